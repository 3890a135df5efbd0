// Attention of models with an encoder: scores with a relative position bias, and tokens that attend
// to all of an input or of the step at hand.
#pragma once

#include "backends/cuda/kernels/attention.h"

namespace pianola::cuda {

// A RelativeBias by distances: what a kernel needs to find buckets without a logarithm, whose
// rounding would differ from the host's at their edges.
struct BiasSteps {
  static constexpr int kMostSteps = 64;
  static constexpr int kMostDistance = 1024;

  const float* table = nullptr;  // [buckets * heads]; null: no bias
  int one_way = 0;               // buckets of a direction
  int both_directions = 0;
  int near = 0;   // distances below have a bucket each
  int reach = 0;  // from here on there is one bucket; at most kMostDistance
  int steps = 0;
  int from[kMostSteps] = {};  // the least distances of buckets near + 1, near + 2, ...
};
// Whether there are few enough buckets and distances.
bool bias_supported(const RelativeBias& bias);
BiasSteps bias_steps(const RelativeBias& bias, const float* table);

struct EncoderAttentionArgs {
  AttentionArgs attention;  // its scratch is not used
  BiasSteps bias;
};

// Any number of tokens and any cache; finish_heads() has run. How a token's positions are split is
// fixed by their numbers alone, so its result has the same bits whatever else the step holds, and
// in steps of any size. With `launch.dependent`, the kernel reads StepState's tables and the inputs
// of its rows before it waits, as attend() does.
void attend_encoder(const EncoderAttentionArgs& args, const Launch& launch);

}  // namespace pianola::cuda
