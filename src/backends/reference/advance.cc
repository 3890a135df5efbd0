#include "backends/reference/ops.h"

namespace pianola::reference {
namespace {

bool is_stop_token(const RowState& row, TokenId token) {
  for (std::int32_t i = 0; i < row.stop_count; ++i) {
    if (row.stop_tokens[i] == token) return true;
  }
  return false;
}

// Adds the sampled token to its row and says how the row goes on.
RowStatus append_token(const StepState& s, std::int32_t row_index, TokenId token) {
  RowState& row = s.row[row_index];
  if (token < 0) return RowStatus::kFailed;
  s.history[static_cast<std::int64_t>(row_index) * s.history_stride + row.history_length] = token;
  ++row.history_length;
  if (is_stop_token(row, token)) return RowStatus::kStopToken;
  return row.history_length >= row.max_length ? RowStatus::kLength : RowStatus::kRunning;
}

}  // namespace

void run(const AdvanceOp&, const BoundPlan& bound) {
  const StepState& s = bound.state();
  for (std::int32_t lane = 0; lane < s.counts->lanes; ++lane) {
    const std::int32_t first = s.first_token[lane];
    if (s.position[first] >= 0) s.row[s.row_of[lane]].length += s.first_token[lane + 1] - first;
  }
  if (bound.plan().shape.variant != StepVariant::kSample) return;
  for (std::int32_t r = 0; r < s.counts->logit_rows; ++r) {
    const std::int32_t t = s.logit_token[r];
    if (s.position[t] < 0) continue;
    const std::int32_t row_index = s.row_of[s.lane_of[t]];
    RowState& row = s.row[row_index];
    row.status = append_token(s, row_index, s.sampled[r]);
    s.ring[*s.ring_head % static_cast<std::uint64_t>(s.ring_capacity)] = {row_index, s.sampled[r],
                                                                          s.logprob[r], row.status};
    ++*s.ring_head;
    if (s.counts->feed) {
      s.token[t] = s.sampled[r];
      s.position[t] = row.status == RowStatus::kRunning ? row.length : -1;
    }
  }
}

bool all_lanes_stopped(const StepState& s) {
  for (std::int32_t t = 0; t < s.counts->tokens; ++t) {
    if (s.position[t] >= 0) return false;
  }
  return true;
}

bool ring_is_full(const StepState& s) {
  return *s.ring_head - *s.ring_tail + static_cast<std::uint64_t>(s.counts->lanes) >
         static_cast<std::uint64_t>(s.ring_capacity);
}

void HostRounds::begin(const StepState& state, int max_rounds) {
  max_rounds_ = max_rounds;
  rounds_ = 0;
  *state.yield = 0;
}

std::optional<RunResult> HostRounds::next(Program& program, const StepState& state) {
  if (const auto over = end(state)) return over;
  program.replay();
  ++rounds_;
  return end(state);
}

std::optional<RunResult> HostRounds::end(const StepState& state) const {
  if (all_lanes_stopped(state)) return RunResult{rounds_, RunEnd::kAllStopped};
  if (rounds_ >= max_rounds_) return RunResult{rounds_, RunEnd::kBound};
  if (ring_is_full(state)) return RunResult{rounds_, RunEnd::kRingFull};
  if (*state.yield) return RunResult{rounds_, RunEnd::kYield};
  return std::nullopt;
}

}  // namespace pianola::reference
