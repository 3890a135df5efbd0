// State layers: folding tokens into the state of each head, the short convolution before it, and
// the gates behind it.
//
// Where a state is read and written is decided on the device, from the positions of the step: what
// backends/state_walk.h does on the host. Elements of a state are summed in one order that depends
// on key_dim alone, and a row's tokens are folded in one after the other, so that a row's bits do
// not depend on how its tokens were cut into steps or on how often some were taken back.
#pragma once

#include "backends/cuda/kernels/launch.h"
#include "cache/layer_cache.h"
#include "plan/op.h"
#include "plan/step_state.h"

namespace pianola::cuda {

inline constexpr int kMaxStateKeyDim = 256;

enum class StateRule : std::uint8_t { kDelta, kSsm };

// How a token's step comes out of what a thread block of the fold has read; kept for the record of
// the step, so that both have the same bits.
struct alignas(16) StepRates {
  float decay;
  float strength;
  float key_scale;  // of the raw key
  float unused;
};

struct FoldArgs {
  StateRule rule = StateRule::kDelta;
  const float* in = nullptr;  // [tokens, in_width]: keys, queries and values from these columns on
  int in_width = 0;
  int key_at = 0;
  int query_at = 0;
  int value_at = 0;
  int key_heads = 1;  // head h has those of h / group % key_heads
  int group = 1;
  const float* rate = nullptr;     // [tokens, heads]: decay, or dt
  const float* beta = nullptr;     // [tokens, heads], of the delta rule
  const float* a_log = nullptr;    // [heads]
  const float* dt_bias = nullptr;  // [heads]
  const float* skip = nullptr;     // [heads], of the state-space rule
  float eps = 0;                   // of the delta rule
  float dt_min = 0;                // of the state-space rule
  float dt_max = 0;
  float* out = nullptr;        // [tokens, heads * value_dim]
  StepRates* rates = nullptr;  // scratch [tokens, heads]; only with an interval above 1
  StateView view;
  StepState state;
  int lanes = 1;  // of the bucket
};
// DeltaRuleOp or SsmOp; key_dim at most kMaxStateKeyDim. Two launches where steps are kept.
void fold_states(const FoldArgs& args, const Launch& launch);

struct ShortConvArgs {
  const float* in = nullptr;      // [tokens, conv_width]
  const float* weight = nullptr;  // [taps, conv_width]
  const float* bias = nullptr;    // [conv_width] or null
  bool silu = false;
  float* out = nullptr;  // [tokens, conv_width]
  StateView view;
  StepState state;
  int lanes = 1;   // of the bucket
  int tokens = 1;  // of the bucket
};
void short_conv(const ShortConvArgs& args, const Launch& launch);

// out = in * sigmoid(gate); `out` may be `in`.
struct SigmoidGateArgs {
  const float* in = nullptr;    // [tokens, width]
  const float* gate = nullptr;  // [tokens, width]
  float* out = nullptr;
  int width = 0;
  const std::int32_t* count = nullptr;  // [1] live tokens
  int tokens = 1;                       // of the bucket
};
void sigmoid_gate(const SigmoidGateArgs& args, const Launch& launch);

// GatedNormOp; `out` may be `in`.
struct GatedNormArgs {
  const float* in = nullptr;      // [tokens, width]
  const float* gate = nullptr;    // [tokens, width]
  const float* weight = nullptr;  // [group] or [width]
  float* out = nullptr;
  float eps = 0;
  int width = 0;
  int group = 0;
  bool own_weights = false;  // weight is [width]
  bool gate_first = false;
  const std::int32_t* count = nullptr;  // [1] live tokens
  int tokens = 1;                       // of the bucket
};
void gated_norm(const GatedNormArgs& args, const Launch& launch);

}  // namespace pianola::cuda
