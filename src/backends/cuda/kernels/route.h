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

// What few routers have besides: RouteOp says what it means.
struct RouteChoice {
  const float* bias = nullptr;  // [experts] or null; with a sigmoid score
  RouteGroups groups;
  float scale = 1;

  bool plain(RouteScore score) const {
    return !bias && groups.count == 1 && scale == 1 && score != RouteScore::kSigmoidOfChosen;
  }
};

// Products and sums in f32, in an order that depends on the width alone.
void route(const RouteArgs& args, const Launch& launch, const RouteChoice& choice = {});

// Its second kernel where the choice is not a plain one; the scores are computed.
void choose_among_groups(const RouteArgs& args, const RouteChoice& choice, const Launch& launch);

}  // namespace pianola::cuda
