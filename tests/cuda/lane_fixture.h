// Steps of several rows: the tokens of each, and the step's tables of them, on the host and on the
// device.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "cuda/state_fixture.h"

namespace pianola::cuda {

// Tokens of one row in a step; position -1 is masked.
struct Lane {
  int row = 0;
  std::vector<int> positions;
};

inline Lane run_of(int row, int first, int count) {
  Lane lane{row, std::vector<int>(static_cast<std::size_t>(count))};
  std::iota(lane.positions.begin(), lane.positions.end(), first);
  return lane;
}

class LaneTables {
 public:
  // At most as many lanes as rows. `set_row(RowState&, row)` is asked for every row.
  template <typename SetRow>
  LaneTables(const std::vector<Lane>& lanes, int rows, int tokens, const SetRow& set_row)
      : state_({.rows = rows, .max_seq_len = 64, .tokens = tokens, .lanes = rows}) {
    const StepState& s = state_.host;
    for (int row = 0; row < rows; ++row) set_row(s.row[row], row);
    // Padding that looks real but for the counts.
    std::fill_n(s.position, tokens, 3);
    std::fill_n(s.lane_of, tokens, 0);
    int lane_index = 0;
    for (const Lane& lane : lanes) {
      s.row_of[lane_index] = lane.row;
      s.first_token[lane_index] = tokens_;
      for (const int position : lane.positions) {
        s.position[tokens_] = position;
        s.lane_of[tokens_++] = lane_index;
      }
      s.first_token[++lane_index] = tokens_;
    }
    *s.counts = {.tokens = tokens_, .lanes = lane_index};
    state_.upload();
  }
  LaneTables(const std::vector<Lane>& lanes, int rows, int tokens)
      : LaneTables(lanes, rows, tokens, [](RowState&, int) {}) {}

  int tokens() const { return tokens_; }
  const StepState& host() const { return state_.host; }
  const StepState& device() const { return state_.device; }

 private:
  MirroredState state_;
  int tokens_ = 0;
};

}  // namespace pianola::cuda
