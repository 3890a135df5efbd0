// The steps that tokens fold into a state, as the loop over the tokens wants them: a tile of them
// is prepared in shared memory by the warps of a thread block, one warp a step.
#pragma once

#include "backends/cuda/kernels/device.cuh"
#include "backends/cuda/kernels/state.h"
#include "backends/cuda/kernels/state_places.cuh"

namespace pianola::cuda::folding {

inline constexpr int kWarps = 4;
inline constexpr int kThreads = kWarps * 32;
inline constexpr int kWarpColumns = 8;  // two lanes, four columns each, and 16 shares of the keys
inline constexpr int kKeyShares = 16;
inline constexpr int kBlockColumns = kWarps * kWarpColumns;
inline constexpr int kTile = 8;  // steps that are prepared at a time
inline constexpr int kMine = kTile / kWarps;

// A step as the loop over the tokens wants it.
template <int kRows>
struct alignas(16) PreparedStep {
  float key[kKeyShares * kRows];
  float query[kKeyShares * kRows];
  float value[kBlockColumns];
  float decay;
  float strength;
  float product;  // key . query
  float unused;
};

// What a warp reads to prepare one.
template <int kRows>
struct RawStep {
  static constexpr int kEach = (kRows + 1) / 2;  // keys of a lane: lane, 32 + lane, ...
  float key[kEach];
  float query[kEach];
  float value;
  float rate;
  float beta;
};

// One head of one lane's row, as a thread block sees it.
struct Head {
  int head;
  int slot;
  int column;  // the block's first
  float a;     // e^a_log
  float dt_bias;
};

__device__ __forceinline__ float softplus(float x) {
  return fmaxf(x, 0.0F) + log1pf(expf(-fabsf(x)));
}

template <int kRows>
__device__ __forceinline__ void load_raw(const FoldArgs& p, const Head& h, int step,
                                         RawStep<kRows>& raw) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int key_dim = p.view.spec.key_dim;
  const int value_dim = p.view.spec.value_dim;
  const float* key = nullptr;
  const float* query = nullptr;
  const float* value = nullptr;
  const float* rate = nullptr;
  const float* beta = nullptr;
  if (step >= 0) {
    const float* row = p.in + static_cast<std::size_t>(step) * p.in_width;
    const int shared = h.head / p.group % p.key_heads * key_dim;
    key = row + p.key_at + shared;
    query = row + p.query_at + shared;
    value = row + p.value_at + static_cast<std::size_t>(h.head) * value_dim;
    const std::size_t at = static_cast<std::size_t>(step) * p.view.spec.heads + h.head;
    rate = p.rate + at;
    beta = p.beta ? p.beta + at : nullptr;
  } else {
    key = step_place(p.view, h.slot, h.head, ~step);
    value = key + key_dim;
    rate = value + value_dim;
    beta = rate + 1;
  }
#pragma unroll
  for (int e = 0; e < RawStep<kRows>::kEach; ++e) {
    const int i = e * 32 + lane;
    raw.key[e] = i < key_dim ? load_activation(key + i) : 0.0F;
    raw.query[e] = query && i < key_dim ? load_activation(query + i) : 0.0F;
  }
  const int column = h.column + lane;
  raw.value = column < value_dim ? load_activation(value + column) : 0.0F;
  raw.rate = load_activation(rate);
  raw.beta = beta ? load_activation(beta) : 0.0F;
}

// A whole warp; the order of its sums depends on key_dim alone.
template <StateRule kRule, int kRows>
__device__ __forceinline__ void prepare(const FoldArgs& p, const Head& h, int step,
                                        const RawStep<kRows>& raw, PreparedStep<kRows>& to) {
  constexpr bool kDelta = kRule == StateRule::kDelta;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float keys = 0;
  float queries = 0;
  float product = 0;
#pragma unroll
  for (int e = 0; e < RawStep<kRows>::kEach; ++e) {
    keys = fmaf(raw.key[e], raw.key[e], keys);
    queries = fmaf(raw.query[e], raw.query[e], queries);
    product = fmaf(raw.key[e], raw.query[e], product);
  }
  product = warp_sum(product);
  float key_scale = 1;
  float query_scale = 1;
  float decay = raw.rate;
  float strength = raw.beta;
  if (step >= 0) {
    float rate = softplus(raw.rate + h.dt_bias);
    if constexpr (kDelta) {
      key_scale = 1.0F / sqrtf(warp_sum(keys) + p.eps);
      query_scale =
          1.0F / sqrtf((warp_sum(queries) + p.eps) * static_cast<float>(p.view.spec.key_dim));
      product *= key_scale * query_scale;
      strength = 1.0F / (1.0F + expf(-raw.beta));
    } else {
      rate = rate < p.dt_min ? p.dt_min : rate;  // NaN stays
      rate = rate > p.dt_max ? p.dt_max : rate;
      strength = rate;
    }
    decay = expf(-h.a * rate);
  }
#pragma unroll
  for (int e = 0; e < RawStep<kRows>::kEach; ++e) {
    const int i = e * 32 + lane;
    if (i < kKeyShares * kRows) {
      to.key[i] = __fmul_rn(raw.key[e], key_scale);
      to.query[i] = __fmul_rn(raw.query[e], query_scale);
    }
  }
  to.value[lane] = raw.value;
  if (lane > 0) return;
  to.decay = decay;
  to.strength = strength;
  to.product = product;
  if (p.rates && h.column == 0 && step >= 0) {
    p.rates[static_cast<std::size_t>(step) * p.view.spec.heads + h.head] = {decay, strength,
                                                                            key_scale, 0.0F};
  }
}

}  // namespace pianola::cuda::folding
