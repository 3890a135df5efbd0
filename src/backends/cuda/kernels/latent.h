// Multi-head latent attention: products of each head by a matrix of its own, the end of latents and
// of queries, and attention over a cache whose values are the first elements of its keys.
#pragma once

#include "backends/cuda/kernels/attention.h"
#include "backends/cuda/kernels/packed_weight.h"

namespace pianola::cuda {

// out[t, h] = W[h] in[t, h] of live tokens.
struct HeadProductArgs {
  PackedWeight weight;      // that of the first head
  std::int64_t stride = 0;  // bytes from the matrix of one head to that of the next
  int heads = 1;
  const float* in = nullptr;  // head h of token t at t * in_token + h * in_head, multiples of 4
  int in_token = 0;
  int in_head = 0;
  float* out = nullptr;
  int out_token = 0;
  int out_head = 0;
  const std::int32_t* count = nullptr;  // [1] live tokens
  int tokens = 1;                       // of the bucket
};
// Any number of tokens; products and sums in f32, in an order that depends on the columns alone.
void head_products(const HeadProductArgs& args, const Launch& launch);

// What remains of LatentQkvOp after its products: the norm of the latent and the parts that turn,
// the append to the cache, and zeros as the queries of masked tokens.
struct LatentHeadsArgs {
  const float* q = nullptr;        // [tokens, heads * (plain + turned)]
  const float* kv = nullptr;       // [tokens, key_dim]
  const float* kv_norm = nullptr;  // [value_dim]
  float eps = 0;
  const float* inverse_frequencies = nullptr;  // [turned / 2]; key_dim = value_dim + turned
  RopeStyle style = RopeStyle::kHalf;
  float attention_factor = 1;
  int heads = 0;
  int plain = 0;           // elements of a head of q in front of those that turn
  float* q_out = nullptr;  // [tokens, heads * key_dim]: of each head the last `turned` are written
  LayerCacheView cache;
  StepState state;
  int tokens = 1;  // of the bucket
};
void finish_latents(const LatentHeadsArgs& args, const Launch& launch);

// Whether there are kernels for these widths.
inline constexpr int kMaxLatentKeyDim = 768;
inline bool latent_supported(int key_dim, int value_dim) {
  return key_dim % 8 == 0 && value_dim % 8 == 0 && key_dim <= kMaxLatentKeyDim;
}

// Any number of tokens; finish_latents() has run, and the scratch is not used. How a token's
// positions are split is fixed by their numbers alone, so its result has the same bits whatever
// else the step holds, and in steps of any size.
void attend_latent(const AttentionArgs& args, const Launch& launch);

}  // namespace pianola::cuda
