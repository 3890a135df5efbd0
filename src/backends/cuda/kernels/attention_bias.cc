#include <algorithm>

#include "backends/cuda/kernels/attention_encoder.h"
#include "plan/relative_bias.h"

namespace pianola::cuda {
namespace {

int one_way_of(const RelativeBias& bias) {
  return bias.both_directions ? bias.buckets / 2 : bias.buckets;
}

}  // namespace

bool bias_supported(const RelativeBias& bias) {
  const int one_way = one_way_of(bias);
  return one_way - 1 - one_way / 2 <= BiasSteps::kMostSteps &&
         std::max(bias.max_distance, one_way / 2) <= BiasSteps::kMostDistance;
}

BiasSteps bias_steps(const RelativeBias& bias, const float* table) {
  BiasSteps s;
  s.table = table;
  s.one_way = one_way_of(bias);
  s.both_directions = bias.both_directions ? 1 : 0;
  s.near = s.one_way / 2;
  s.reach = s.near;
  s.steps = s.one_way - 1 - s.near;
  // Buckets grow with the distance, and what lies before the token is counted from 0.
  int distance = s.near;
  for (int i = 0; i < s.steps; ++i) {
    while (distance < bias.max_distance && relative_bucket(bias, -distance) < s.near + 1 + i) {
      ++distance;
    }
    s.from[i] = s.reach = distance;
  }
  return s;
}

}  // namespace pianola::cuda
