// ExpertsOp: gated MLPs of which every token gets a few, chosen on the device.
//
// A route is one token's choice of one expert: token * top_k + rank. Routes of one expert stand
// together in segments of a few, and a segment reads its expert's weights once. A route's result
// has the same bits in any segment, whatever else is in the step: columns are cut into slices as in
// linear.h, one warp a slice, and slices are added in order; a token's experts are added up by
// rank.
#pragma once

#include "backends/cuda/kernels/launch.h"
#include "backends/cuda/kernels/packed_weight.h"
#include "plan/op.h"

namespace pianola::cuda {

// One matrix of each expert, one behind the other.
struct ExpertStack {
  PackedWeight weight;          // of expert 0
  std::int64_t stride = 0;      // bytes from one expert's to the next one's
  const float* bias = nullptr;  // [experts, rows] or null
};

struct ExpertsArgs {
  ExpertStack gate, up;  // [ff, width] each
  ExpertStack down;      // [out width, ff]
  Activation activation = Activation::kSilu;
  int experts = 1;
  int top_k = 1;
  const float* in = nullptr;    // [tokens, width]
  const float* norm = nullptr;  // [width]
  float eps = 0;
  const float* routing = nullptr;       // [tokens, 2 * top_k] as RouteOp writes it
  const float* residual = nullptr;      // [tokens, out width] or null; may be out
  float* out = nullptr;                 // [tokens, out width]; may be in
  const std::int32_t* count = nullptr;  // [1] live tokens
  std::byte* scratch = nullptr;         // experts_scratch_bytes()
  int tokens = 1;                       // of the bucket
};

// Sizes that scratch depends on.
struct ExpertsShape {
  int tokens = 1;
  int experts = 1;
  int top_k = 1;
  int width = 0;
  int ff = 0;
  int out_width = 0;
  bool mixed = false;  // gate and up are of different forms
};
std::size_t experts_scratch_bytes(const ExpertsShape& shape);

void run_experts(const ExpertsArgs& args, const Launch& launch);

// out[t] = the sum over ranks of weight * parts[t * top_k + rank], in order, + residual[t].
struct SumArgs {
  const float* parts = nullptr;    // [tokens, top_k, width]
  const float* routing = nullptr;  // [tokens, 2 * top_k]
  const float* residual = nullptr;
  float* out = nullptr;
  const std::int32_t* count = nullptr;
  int first = 0;  // token of the step that row 0 is
  int width = 0;  // a multiple of 4
  int top_k = 1;
  int tokens = 1;
};
void sum_experts(const SumArgs& args, const Launch& launch);

}  // namespace pianola::cuda
