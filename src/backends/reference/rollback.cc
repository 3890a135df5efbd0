#include <algorithm>

#include "backends/reference/ops.h"

namespace pianola::reference {
namespace {

bool has_stopped(const RowState& row) {
  return row.status != RowStatus::kRunning && row.status != RowStatus::kIdle;
}

bool can_take_back(const StepState& s, const RowState& row, std::int32_t count) {
  if (has_stopped(row)) return false;
  if (count < 0 || count > s.rollback_depth || count > row.length - row.floor) return false;
  return std::max(row.reach, row.length) - (row.length - count) <= s.most_ahead;
}

void take_back(const StepState& s, std::int32_t row_index, std::int32_t count) {
  RowState& row = s.row[row_index];
  TokenId* history = s.history + static_cast<std::int64_t>(row_index) * s.history_stride;
  std::copy(history + row.length, history + row.history_length, history + row.length - count);
  row.reach = std::max(row.reach, row.length);
  row.length -= count;
  row.history_length -= count;
}

}  // namespace

void run(const RollbackOp&, const BoundPlan& bound) {
  const StepState& s = bound.state();
  bool any = false;
  for (std::int32_t row = 0; row < s.rows; ++row) any = any || s.rollback[row] != 0;
  if (!any) return;

  for (std::int32_t lane = 0; lane < s.counts->lanes; ++lane) {
    const std::int32_t row_index = s.row_of[lane];
    const RowState& row = s.row[row_index];
    const std::int32_t count = s.rollback[row_index];
    if (count == 0) continue;
    const bool can = can_take_back(s, row, count);
    for (std::int32_t t = s.first_token[lane]; t < s.first_token[lane + 1]; ++t) {
      if (s.position[t] < 0) continue;
      s.position[t] = can ? row.length - count + t - s.first_token[lane] : -1;
    }
  }
  for (std::int32_t row = 0; row < s.rows; ++row) {
    const std::int32_t count = s.rollback[row];
    if (count == 0) continue;
    if (can_take_back(s, s.row[row], count)) {
      take_back(s, row, count);
    } else if (!has_stopped(s.row[row])) {
      s.row[row].status = RowStatus::kRefused;
    }
    const std::int32_t known = s.went_back[row];
    const std::int32_t now = s.row[row].length + 1;
    s.went_back[row] = known > 0 ? std::min(known, now) : now;
    s.rollback[row] = 0;
  }
}

}  // namespace pianola::reference
