// Attention over static caches. Work follows the lengths in StepState, read on the device.
#pragma once

#include "backends/cuda/kernels/launch.h"
#include "cache/layer_cache.h"
#include "plan/op.h"
#include "plan/step_state.h"

namespace pianola::cuda {

// What remains of QkvOp after its products: head norms, rope, and the append to the cache. Of
// QueryOp the cache has no heads.
struct HeadsArgs {
  const float* q = nullptr;       // [tokens, heads * key_dim] raw
  const float* k = nullptr;       // [tokens, kv_heads * key_dim] raw
  const float* v = nullptr;       // [tokens, kv_heads * value_dim] raw
  float* q_out = nullptr;         // [tokens, heads * key_dim]; may be q
  const float* q_norm = nullptr;  // [key_dim] or null
  const float* k_norm = nullptr;
  float q_norm_eps = 0;
  float k_norm_eps = 0;
  const float* inverse_frequencies = nullptr;  // [turned / 2]
  int turned = 0;                              // the first elements of a head, that rope turns
  RopeStyle style = RopeStyle::kHalf;
  float attention_factor = 1;
  int heads = 0;  // 0: keys and values alone, and q is not looked at
  LayerCacheView cache;
  StepState state;
  int tokens = 1;  // of the bucket
};

struct AttentionArgs {
  const float* q = nullptr;  // [tokens, heads * key_dim], normed and roped
  float* out = nullptr;      // [tokens, heads * value_dim]
  int heads = 0;
  float scale = 1;
  const float* sinks = nullptr;  // [heads] or null
  LayerCacheView cache;
  StepState state;
  int tokens = 1;                // of the bucket
  std::byte* scratch = nullptr;  // attention_scratch_bytes(), zeroed once at load: attend_chunk()
};

// Whether there is a kernel for these widths.
inline bool attention_supported(int heads, int kv_heads, int key_dim, int value_dim) {
  return heads % kv_heads == 0 && key_dim % 8 == 0 && value_dim % 8 == 0 && key_dim <= 256 &&
         value_dim <= 256;
}

// Bytes of scratch, for any shape; counters in it return to zero after every launch.
std::size_t attention_scratch_bytes(int tokens, int heads, int kv_heads, int value_dim,
                                    int capacity);

// Any number of tokens: one warp or more a head of a token. Into caches of any kind.
void finish_heads(const HeadsArgs& args, const Launch& launch);

// Decode class: at most kDecodeTokens tokens with `heads`; without, more are taken kDecodeTokens at
// a time (chunks in the order of the decode class). A cluster of thread blocks serves a (token, kv
// head); how its positions are split is fixed by the token's own position and the layer's window,
// so a token's result has the same bits whatever else the step holds. `heads` is not null when
// finish_heads() has not run: the kernel then does its work first (q in registers; keys and values
// of the step's tokens are stored by the block that reads them, and used from there), with the same
// arithmetic as finish_heads(), which runs first where the cache has 8 bits. With
// `launch.dependent`, the kernel reads StepState's tables, and with `heads` also keys and values of
// positions before the step, before it waits: no kernel of a step writes them but its last, and the
// first kernel of a step is not launched as a dependent one.
void attend(const AttentionArgs& args, const HeadsArgs* heads, const Launch& launch);

// Chunk class, any number of tokens; finish_heads() has run. Tensor cores; caches of f32 and of 8
// bits take attend().
void attend_chunk(const AttentionArgs& args, const Launch& launch);

}  // namespace pianola::cuda
