// Which slot of a layer cache a token's keys and values go to, and up to where it attends: by what
// the cache holds, and all of it device data.
#pragma once

#include "cache/layer_cache.h"
#include "plan/step_state.h"

namespace pianola {

inline std::int32_t slot_of(const StepState& s, CacheHolds holds, std::int32_t token) {
  const std::int32_t lane = s.lane_of[token];
  if (holds == CacheHolds::kStep) return lane;
  const std::int32_t row = s.row_of[lane];
  return holds == CacheHolds::kInput ? s.row[row].input_slot : row;
}

// Behind the last position that the token attends to; 0 for a masked token.
inline std::int32_t end_of(const StepState& s, CacheHolds holds, std::int32_t token) {
  const std::int32_t position = s.position[token];
  if (position < 0 || holds == CacheHolds::kTokens) return position + 1;
  return s.row[s.row_of[s.lane_of[token]]].input_length;
}

}  // namespace pianola
