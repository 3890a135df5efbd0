#include "engine/step_tables.h"

#include "base/check.h"

namespace pianola {
namespace {

std::size_t size_of(int n) { return static_cast<std::size_t>(n); }

template <typename T>
void write_front(Backend& backend, T* device, const std::vector<T>& host, int count) {
  if (count > 0) backend.write(device, host.data(), size_of(count) * sizeof(T));
}

}  // namespace

StepTables::StepTables(const StepLimits& limits)
    : token_(size_of(limits.tokens)),
      position_(size_of(limits.tokens)),
      lane_of_(size_of(limits.tokens)),
      first_token_(size_of(limits.lanes) + 1),
      row_of_(size_of(limits.lanes)),
      logit_token_(size_of(limits.logit_rows)),
      target_(size_of(limits.logit_rows)) {}

void StepTables::clear() { counts_ = {}; }

void StepTables::add_lane(int row, int position, const TokenId* tokens, int count, int logit_rows) {
  PIANOLA_CHECK(size_of(counts_.tokens + count) <= token_.size() &&
                    size_of(counts_.lanes) < row_of_.size() &&
                    size_of(counts_.logit_rows + logit_rows) <= logit_token_.size(),
                "a step larger than the tables");
  for (int i = 0; i < count; ++i) {
    const std::size_t t = size_of(counts_.tokens + i);
    token_[t] = tokens[i];
    position_[t] = position + i;
    lane_of_[t] = counts_.lanes;
  }
  for (int i = 0; i < logit_rows; ++i) {
    logit_token_[size_of(counts_.logit_rows + i)] = counts_.tokens + count - logit_rows + i;
  }
  first_token_[size_of(counts_.lanes)] = counts_.tokens;
  first_token_[size_of(counts_.lanes) + 1] = counts_.tokens + count;
  row_of_[size_of(counts_.lanes)] = row;
  counts_.tokens += count;
  counts_.logit_rows += logit_rows;
  ++counts_.lanes;
}

void StepTables::write(const StepState& s, Backend& backend) const {
  backend.write(s.counts, &counts_, sizeof(counts_));
  write_front(backend, s.token, token_, counts_.tokens);
  write_front(backend, s.position, position_, counts_.tokens);
  write_front(backend, s.lane_of, lane_of_, counts_.tokens);
  write_front(backend, s.first_token, first_token_, counts_.lanes + 1);
  write_front(backend, s.row_of, row_of_, counts_.lanes);
  write_front(backend, s.logit_token, logit_token_, counts_.logit_rows);
  write_front(backend, s.target, target_, counts_.logit_rows);
}

}  // namespace pianola
