// Which bucket of a RelativeBias a distance has: the same for every backend, and as transformers
// computes it, in f32.
//
//   relative_bucket(bias, p - position);   // of position p, seen from the token
#pragma once

#include <algorithm>
#include <cmath>

#include "plan/op.h"

namespace pianola {

inline int relative_bucket(const RelativeBias& bias, int offset) {
  const int buckets = bias.both_directions ? bias.buckets / 2 : bias.buckets;
  const int first = bias.both_directions && offset > 0 ? buckets : 0;
  const int distance = bias.both_directions ? std::abs(offset) : std::max(-offset, 0);
  const int near = buckets / 2;  // distances with a bucket each
  if (distance < near) return first + distance;
  const auto farthest = static_cast<float>(std::log(static_cast<double>(bias.max_distance) / near));
  const float share = std::log(static_cast<float>(distance) / static_cast<float>(near)) / farthest;
  const int far = static_cast<int>(share * static_cast<float>(buckets - near));
  return first + std::min(near + far, buckets - 1);
}

}  // namespace pianola
