// Heads that an item of attend() finishes in registers: q right as an operand of the tensor cores,
// and the token's own key and value as they go to the cache. 16-bit caches, heads of 64 and of 128
// that rope turns whole, groups of at most kItemHeads. The bits are those of finish_head().
#pragma once

#include "backends/cuda/kernels/attention_tensor.cuh"

namespace pianola::cuda {

// Rope's turns and the norms' weights, for heads of kDim.
template <int kDim>
struct alignas(16) HeadTables {
  Turn turns[kDim / 2];  // of the pairs, in their order
  float q_norm[kDim];
  float k_norm[kDim];
};

// The same address, which is certainly known from here on: compilers put the arithmetic of
// addresses next to the loads, but not what lanes tell each other.
__device__ __forceinline__ const float* keep(const float* address) {
  const auto bits = reinterpret_cast<std::uint64_t>(address);
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const std::uint64_t low = __shfl_sync(kAllLanes, static_cast<std::uint32_t>(bits), lane);
  const std::uint64_t high = __shfl_sync(kAllLanes, static_cast<std::uint32_t>(bits >> 32), lane);
  return reinterpret_cast<const float*>(high << 32 | low);
}

// Of heads of kDim.
template <typename T, int kDim, bool kPlain>
using ExactItem = TensorItem<T, kDim / 32, kDim / 64, true, tiles_of(kDim), kPlain>;

template <typename T, int kDim, RopeStyle kStyle, bool kPlain>
struct HeadsItem : ExactItem<T, kDim, kPlain> {
  static constexpr int kKeySteps = kDim / 32;
  static constexpr int kValueSteps = kDim / 64;
  static constexpr int kTiles = tiles_of(kDim);
  using Base = ExactItem<T, kDim, kPlain>;
  using Part = float[kKeySteps][8];         // dims 32 s + 8 j + 0..7 of a head
  using ValuePart = float[kValueSteps][8];  // dims 64 s + 8 r + 0..7
  using Base::item;
  using Base::j;
  using Base::memory;
  using Base::p;
  using Base::r;
  using Base::span;
  using Base::tile_base;
  using Base::tile_row;
  using typename Base::Query;
  using typename Base::Sums;

  using Base::Base;

  // Whether this warp has the tile of the token's own position.
  __device__ __forceinline__ bool has_own() const {
    return owns(item, span, item.position) &&
           (item.position & (kCacheBlock - 1)) / 16 == thread_index() / 32;
  }

  // Raw heads, from this lane's elements on; of a head that there is not, the last one's.
  struct Raw {
    const float* q;
    const float* k;
    const float* v;
  };
  __device__ __forceinline__ Raw find_raw() const {
    const std::size_t token = p.first + item.token;
    const std::size_t head = token * p.attention.heads + item.head + min(r, item.heads - 1);
    const std::size_t kv = token * p.attention.cache.kv_heads + item.kv_head;
    return {keep(p.heads.q + head * kDim + 8 * j), keep(p.heads.k + kv * kDim + 8 * j),
            keep(p.heads.v + kv * kDim + 8 * r)};
  }

  __device__ __forceinline__ void fill(HeadTables<kDim>& tables) const {
    const int warp = thread_index() / 32;
    const int lane = thread_index() & 31;
    if (warp < kDim / 64) {
      const int pair = lane + 32 * warp;
      tables.turns[pair] =
          turn(item.position, __ldg(p.heads.inverse_frequencies + pair), p.heads.attention_factor);
    } else if (kStyle == RopeStyle::kHalf && warp >= 2) {
      const float* norm = warp == 2 ? p.heads.q_norm : p.heads.k_norm;
      float* to = warp == 2 ? tables.q_norm : tables.k_norm;
      if (norm) {
#pragma unroll
        for (int d = lane; d < kDim; d += 32) to[d] = __ldg(norm + d);
      }
    }
  }

  // Eight elements of every 32 or 64 of a raw head.
  template <int kSteps>
  static __device__ __forceinline__ void load_part(float (&x)[kSteps][8], const float* head) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int i = 0; i < 8; i += 4) {
        const float4 four = load_activation4(head + kDim / kSteps * s + i);
        x[s][i] = four.x;
        x[s][i + 1] = four.y;
        x[s][i + 2] = four.z;
        x[s][i + 3] = four.w;
      }
    }
  }

  // finish_head() of a head that four lanes hold.
  __device__ __forceinline__ void finish(Part& x, const float* norm, const float* weights,
                                         float eps, const HeadTables<kDim>& tables) const {
    constexpr int kHalf = kKeySteps / 2;
    if constexpr (kStyle == RopeStyle::kHalf) {
      if (norm) {
        // The tree of warp_sum() over the pairs 8 j + i and those 32 behind.
        float sum[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          sum[i] = 0;
#pragma unroll
          for (int s = 0; s < kHalf; ++s) {
            sum[i] = __fmaf_rn(x[s][i], x[s][i], sum[i]);
            sum[i] = __fmaf_rn(x[s + kHalf][i], x[s + kHalf][i], sum[i]);
          }
        }
#pragma unroll
        for (int offset = 2; offset; offset >>= 1) {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            sum[i] = __fadd_rn(sum[i], __shfl_xor_sync(kAllLanes, sum[i], offset));
          }
        }
#pragma unroll
        for (int half = 4; half; half >>= 1) {
#pragma unroll
          for (int i = 0; i < half; ++i) sum[i] = __fadd_rn(sum[i], sum[i + half]);
        }
        const float mean = __fmul_rn(sum[0], 1.0F / kDim);
        const float scale = __frcp_rn(__fsqrt_rn(__fadd_rn(mean, eps)));
#pragma unroll
        for (int s = 0; s < kKeySteps; ++s) {
#pragma unroll
          for (int i = 0; i < 8; i += 4) {
            const float4 w = *reinterpret_cast<const float4*>(weights + 32 * s + 8 * j + i);
            x[s][i] = __fmul_rn(__fmul_rn(x[s][i], scale), w.x);
            x[s][i + 1] = __fmul_rn(__fmul_rn(x[s][i + 1], scale), w.y);
            x[s][i + 2] = __fmul_rn(__fmul_rn(x[s][i + 2], scale), w.z);
            x[s][i + 3] = __fmul_rn(__fmul_rn(x[s][i + 3], scale), w.w);
          }
        }
      }
#pragma unroll
      for (int s = 0; s < kHalf; ++s) {
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
          const float4 two = *reinterpret_cast<const float4*>(tables.turns + 32 * s + 8 * j + i);
          turn_pair(x[s][i], x[s + kHalf][i], {two.x, two.y});
          turn_pair(x[s][i + 1], x[s + kHalf][i + 1], {two.z, two.w});
        }
      }
    } else {
#pragma unroll
      for (int s = 0; s < kKeySteps; ++s) {
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
          const float4 two =
              *reinterpret_cast<const float4*>(tables.turns + 16 * s + 4 * j + i / 2);
          turn_pair(x[s][i], x[s][i + 1], {two.x, two.y});
          turn_pair(x[s][i + 2], x[s][i + 3], {two.z, two.w});
        }
      }
    }
  }
  static __device__ __forceinline__ void turn_pair(float& first, float& second, Turn t) {
    const float a = first;
    const float b = second;
    first = __fmaf_rn(a, t.cos, -__fmul_rn(b, t.sin));
    second = __fmaf_rn(b, t.cos, __fmul_rn(a, t.sin));
  }
  static __device__ __forceinline__ uint4 pack_eight(const float (&x)[8]) {
    return make_uint4(pack<T>(x[0], x[1]), pack<T>(x[2], x[3]), pack<T>(x[4], x[5]),
                      pack<T>(x[6], x[7]));
  }

  __device__ __forceinline__ void finish_query(Part& q, const HeadTables<kDim>& tables,
                                               Query& query) const {
    finish(q, p.heads.q_norm, tables.q_norm, p.heads.q_norm_eps, tables);
#pragma unroll
    for (int s = 0; s < kKeySteps; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const SplitPair parts = split<T>(q[s][2 * i], q[s][2 * i + 1]);
        query.step[s].high[i] = parts.high;
        query.step[s].low[i] = parts.low;
      }
    }
  }
  __device__ __forceinline__ void finish_key(Part& key, const HeadTables<kDim>& tables) const {
    finish(key, p.heads.k_norm, tables.k_norm, p.heads.k_norm_eps, tables);
  }
};

}  // namespace pianola::cuda
