// The host's image of one step's tables: filled lane by lane, then written to the device.
#pragma once

#include <vector>

#include "backends/backend.h"
#include "plan/step_state.h"

namespace pianola {

class StepTables {
 public:
  explicit StepTables(const StepLimits& limits);

  void clear();
  // Adds a lane: `count` tokens of `row` from `position` on. Logits are wanted of the last
  // `logit_rows` of them.
  void add_lane(int row, int position, const TokenId* tokens, int count, int logit_rows);
  void set_target(int logit_row, TokenId token) {
    target_[static_cast<std::size_t>(logit_row)] = token;
  }
  void set_feed(bool feed) { counts_.feed = feed ? 1 : 0; }

  const StepCounts& counts() const { return counts_; }
  void write(const StepState& state, Backend& backend) const;

 private:
  StepCounts counts_;
  std::vector<TokenId> token_;
  std::vector<std::int32_t> position_;
  std::vector<std::int32_t> lane_of_;
  std::vector<std::int32_t> first_token_;
  std::vector<std::int32_t> row_of_;
  std::vector<std::int32_t> logit_token_;
  std::vector<TokenId> target_;
};

}  // namespace pianola
