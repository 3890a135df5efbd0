// RouteOp: which experts a token gets, and with what weights.
#pragma once

#include "backends/cuda/kernels/launch.h"
#include "plan/op.h"
#include "plan/step_state.h"

namespace pianola::cuda {

struct RouteArgs {
  const float* in = nullptr;      // [tokens, width]
  const float* norm = nullptr;    // [width] or null
  const float* router = nullptr;  // [experts, width]
  const float* bias = nullptr;    // [experts] or null
  float eps = 0;
  int width = 0;  // a multiple of 4
  int experts = 1;
  int top_k = 1;
  RouteScore score = RouteScore::kSoftmax;
  float* out = nullptr;     // [tokens, 2 * top_k]
  float* scores = nullptr;  // [tokens, experts], scratch
  StepState state;
  int tokens = 1;  // of the bucket
};

// The most experts that one token's choice is made among.
inline constexpr int kMostExperts = 4096;

// Products and sums in f32, in an order that depends on the width alone.
void route(const RouteArgs& args, const Launch& launch);

}  // namespace pianola::cuda
