// Matrix products of steps of at most 64 tokens (the decode class), every weight read once.
//
// y[t] = W f(x[t]) for all live tokens. For a weight shape there is one order of summation,
// whatever the number of tokens: columns are cut into slices by the number of columns alone, one
// warp a slice, and slices are added in order. Products run on tensor cores: weights as bfloat16
// parts that represent them exactly, activations as two bfloat16 parts (16 bits of mantissa),
// sums in f32.
#pragma once

#include "backends/cuda/kernels/launch.h"
#include "backends/cuda/kernels/packed_weight.h"
#include "plan/op.h"
#include "plan/step_state.h"

namespace pianola::cuda {

inline constexpr int kDecodeTokens = 64;

// One matrix and where its product goes.
struct LinearPart {
  PackedWeight weight;
  const float* bias = nullptr;  // [rows] or null
  float* out = nullptr;         // [tokens, ld]
  int ld = 0;
};

enum class LinearEnd : std::uint8_t {
  kStore,  // out = y + bias + residual
  kGated,  // parts 0 and 1 are gate and up: out of part 0 = act(gate + bias) * (up + bias)
};

struct LinearArgs {
  LinearPart part[3];  // equal cols and forms may differ in rows; parts share the input
  int parts = 1;
  LinearEnd end = LinearEnd::kStore;
  Activation activation = Activation::kSilu;  // of kGated
  const float* in = nullptr;                  // [tokens, in_ld]
  int in_ld = 0;
  const float* norm = nullptr;  // [cols]: RMS norm of the input, or null
  float eps = 0;
  const float* residual = nullptr;       // [tokens, part[0].ld] or null; may be part[0].out
  const std::int32_t* count = nullptr;   // [1] live tokens (or logit rows)
  const std::int32_t* gather = nullptr;  // [count] input row of each token, or null: the same index
  int in_rows = 1;                       // rows of `in`, when there is a gather
  std::byte* scratch = nullptr;          // linear_scratch_bytes()
  int tokens = 1;                        // of the bucket: the most there can be, <= kDecodeTokens
  // A larger step is computed in several launches: this one takes live tokens from `first` on.
  int first = 0;
  bool out_first = false;  // its results go to rows 0, 1, ... of `out`
};

// For activations that do not fit a block's shared memory: prepared once, read by all.
std::size_t linear_scratch_bytes(int tokens, int widest_cols);

void linear(const LinearArgs& args, const Launch& launch);

}  // namespace pianola::cuda
