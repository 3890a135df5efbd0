// What the attention kernels share: cache elements and addresses, products on tensor cores of
// either 16-bit type, and the end of a head of q or k (norm and rope), which finish_heads() and
// attend() must do with the same bits.
#pragma once

#include <cuda_fp8.h>

#include <type_traits>

#include "backends/cuda/kernels/attention.h"
#include "backends/cuda/kernels/device.cuh"

namespace pianola::cuda {

inline constexpr int kMaxHeadDim = 256;
inline constexpr float kLog2e = 1.4426950408889634F;
// Below every score: finite, so that a tile without a position multiplies by 1.
inline constexpr float kNoScore = -1e30F;

// Scratch is attend_chunk()'s two counters; attend() needs none.
inline constexpr std::size_t kCounterBytes = 256;

// Throws Unsupported unless both widths are multiples of 8 and at most kMaxHeadDim.
void check_attention_shape(const LayerCacheView& cache, int heads);

// --- Elements of caches: float, __half, __nv_bfloat16, Fp8 (e4m3 at scale 1, saturating) and
// std::int8_t, a multiple of the scale of its head and position. ---

using Fp8 = __nv_fp8_e4m3;
template <typename T>
inline constexpr bool kScaled = std::is_same_v<T, std::int8_t>;

template <typename T>
__device__ __forceinline__ T to_cache(float v);
template <>
__device__ __forceinline__ float to_cache<float>(float v) {
  return v;
}
template <>
__device__ __forceinline__ __half to_cache<__half>(float v) {
  return __float2half_rn(v);
}
template <>
__device__ __forceinline__ __nv_bfloat16 to_cache<__nv_bfloat16>(float v) {
  return __float2bfloat16_rn(v);
}

template <>
__device__ __forceinline__ Fp8 to_cache<Fp8>(float v) {
  return Fp8(v);
}

// The scale of a head whose largest magnitude is `most`: NaN where it is not finite, and 0 where
// the scale would have lost precision itself; and an element as a multiple of it.
__device__ __forceinline__ float int8_scale(float most, bool finite) {
  if (!finite) return __int_as_float(0x7fc00000);
  const float scale = __fdiv_rn(most, 127.0F);
  return scale < 1.17549435e-38F ? 0.0F : scale;
}
__device__ __forceinline__ std::int8_t int8_multiple(float v, float scale) {
  return static_cast<std::int8_t>(scale > 0 ? __float2int_rn(__fdiv_rn(v, scale)) : 0);
}

// Two neighbours as they lie in a cache.
template <typename T>
struct PairOf {
  using Type = std::conditional_t<sizeof(T) == 1, std::uint16_t, std::uint32_t>;
};
template <>
struct PairOf<float> {
  using Type = float2;
};

template <typename T>
__device__ __forceinline__ float2 unpack(typename PairOf<T>::Type pair);
template <>
__device__ __forceinline__ float2 unpack<float>(float2 pair) {
  return pair;
}
template <>
__device__ __forceinline__ float2 unpack<__half>(std::uint32_t pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}
template <>
__device__ __forceinline__ float2 unpack<__nv_bfloat16>(std::uint32_t pair) {
  return make_float2(bf16_low(pair), bf16_high(pair));
}

template <>
__device__ __forceinline__ float2 unpack<Fp8>(std::uint16_t pair) {
  return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3)));
}
template <>
__device__ __forceinline__ float2 unpack<std::int8_t>(std::uint16_t pair) {
  return make_float2(static_cast<float>(static_cast<std::int8_t>(pair & 0xff)),
                     static_cast<float>(static_cast<std::int8_t>(pair >> 8)));
}

template <typename T>
__device__ __forceinline__ std::uint32_t pack(float low, float high);
template <>
__device__ __forceinline__ std::uint32_t pack<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}
template <>
__device__ __forceinline__ std::uint32_t pack<__nv_bfloat16>(float low, float high) {
  return pack_bf16(low, high);
}

// Two neighbours, as they go to a cache.
template <typename T>
__device__ __forceinline__ void store_pair(T* to, float low, float high) {
  if constexpr (std::is_same_v<T, float>) {
    *reinterpret_cast<float2*>(to) = make_float2(low, high);
  } else if constexpr (sizeof(T) == 1) {
    to[0] = to_cache<T>(low);
    to[1] = to_cache<T>(high);
  } else {
    *reinterpret_cast<std::uint32_t*>(to) = pack<T>(low, high);
  }
}

// x = high + low, each of the 16-bit type.
template <typename T>
__device__ __forceinline__ SplitPair split(float a, float b) {
  const std::uint32_t high = pack<T>(a, b);
  const float2 rounded = unpack<T>(high);
  return {high, pack<T>(a - rounded.x, b - rounded.y)};
}

// d += a b with a [16, 16], b [16, 8].
template <typename T>
__device__ __forceinline__ void mma(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                    std::uint32_t b1) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    mma_bf16(d, a, b0, b1);
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// Subnormal results become 0; -inf gives 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// A denominator with e^sink in it; `total` is the sum of 2^(score - most). Null: no sinks.
__device__ __forceinline__ float with_sink(const float* sinks, int head, float most, float total) {
  if (!sinks) return total;
  return __fadd_rn(total, exp2_approx(__fmaf_rn(__ldg(sinks + head), kLog2e, -most)));
}

// --- Addresses. ---

// The slot of a token's keys and values, as slot_of() of cache_reach.h.
__device__ __forceinline__ int cache_slot(const StepState& s, CacheHolds holds, int token) {
  const int lane = __ldcg(s.lane_of + token);
  if (holds == CacheHolds::kStep) return lane;
  const int row = __ldcg(s.row_of + lane);
  return holds == CacheHolds::kInput ? __ldcg(&s.row[row].input_slot) : row;
}

// Element of (position, kv_head, 0) inside a slot, as cache_index() of layer_cache.h.
__device__ __forceinline__ std::size_t cache_offset(int position, int kv_head, int kv_heads,
                                                    int dim) {
  const int block = position / kCacheBlock * kv_heads + kv_head;
  return (static_cast<std::size_t>(block) * kCacheBlock + position % kCacheBlock) * dim;
}
template <typename T>
__device__ __forceinline__ T* key_slot(const LayerCacheView& cache, int row) {
  return reinterpret_cast<T*>(cache.keys + static_cast<std::size_t>(row) * cache.key_slot_bytes);
}
template <typename T>
__device__ __forceinline__ T* value_slot(const LayerCacheView& cache, int row) {
  return reinterpret_cast<T*>(cache.values +
                              static_cast<std::size_t>(row) * cache.value_slot_bytes);
}

// The scales of a slot, behind its elements; index them by cache_offset() with a dim of 1.
__device__ __forceinline__ float* key_scales(const LayerCacheView& cache, int row) {
  const std::size_t elements =
      static_cast<std::size_t>(cache.capacity) * cache.kv_heads * cache.key_dim;
  return reinterpret_cast<float*>(key_slot<std::byte>(cache, row) + elements);
}
__device__ __forceinline__ float* value_scales(const LayerCacheView& cache, int row) {
  const std::size_t elements =
      static_cast<std::size_t>(cache.capacity) * cache.kv_heads * cache.value_dim;
  return reinterpret_cast<float*>(value_slot<std::byte>(cache, row) + elements);
}

// 16 bytes past the first-level cache (see load_activation).
__device__ __forceinline__ uint4 load_cache(const void* p) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
// The same, or zeros.
__device__ __forceinline__ uint4 load_cache_if(const void* p, bool wanted) {
  uint4 v;
  asm volatile(
      "{\n .reg .pred wanted;\n setp.ne.b32 wanted, %5, 0;\n mov.b32 %0, 0;\n mov.b32 %1, 0;\n"
      " mov.b32 %2, 0;\n mov.b32 %3, 0;\n @wanted ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];\n}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(p), "r"(static_cast<int>(wanted))
      : "memory");
  return v;
}

// --- The end of a head: one warp, N pairs a lane, dim <= 64 N. Every operation is spelled out so
// that no compilation contracts it differently: the bits do not depend on the kernel or on N. ---

struct Turn {
  float cos;
  float sin;
};
// cos and sin of the f32 product position * frequency, times `factor`: reduced to an eighth of a
// turn and summed in f64, so that long contexts lose nothing.
__device__ __forceinline__ Turn turn(int position, float frequency, float factor) {
  const double angle = __fmul_rn(static_cast<float>(position), frequency);
  const double quarters = rint(__dmul_rn(angle, 0.63661977236758134308));
  double r = __fma_rn(-quarters, 1.5707963267948966, angle);  // pi / 2 in two parts
  r = __fma_rn(-quarters, 6.123233995736766e-17, r);
  const double z = __dmul_rn(r, r);
  double s = -1.0 / 39916800;
  s = __fma_rn(s, z, 1.0 / 362880);
  s = __fma_rn(s, z, -1.0 / 5040);
  s = __fma_rn(s, z, 1.0 / 120);
  s = __fma_rn(s, z, -1.0 / 6);
  s = __fma_rn(__dmul_rn(s, z), r, r);
  double c = 1.0 / 479001600;
  c = __fma_rn(c, z, -1.0 / 3628800);
  c = __fma_rn(c, z, 1.0 / 40320);
  c = __fma_rn(c, z, -1.0 / 720);
  c = __fma_rn(c, z, 1.0 / 24);
  c = __fma_rn(c, z, -0.5);
  c = __fma_rn(c, z, 1.0);
  const int quarter = static_cast<int>(quarters);
  double cosine = (quarter & 1) != 0 ? s : c;
  double sine = (quarter & 1) != 0 ? c : s;
  if (((quarter + 1) & 2) != 0) cosine = -cosine;
  if ((quarter & 2) != 0) sine = -sine;
  return {static_cast<float>(__dmul_rn(cosine, factor)),
          static_cast<float>(__dmul_rn(sine, factor))};
}

// The pairs lane + 32 n of a head. Rope turns the first `half` ones; neighbours make the others.
template <int N>
struct HeadPairs {
  float a[N];
  float b[N];
};
__device__ __forceinline__ int pair_first(RopeStyle style, int pair, int half) {
  return style == RopeStyle::kHalf && pair < half ? pair : 2 * pair;
}
__device__ __forceinline__ int pair_second(RopeStyle style, int pair, int half) {
  return style == RopeStyle::kHalf && pair < half ? pair + half : 2 * pair + 1;
}

template <int N>
__device__ __forceinline__ HeadPairs<N> load_head(const float* raw, int dim, RopeStyle style,
                                                  int half) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  HeadPairs<N> x;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int pair = lane + 32 * n;
    const bool inside = pair < dim / 2;
    if (style == RopeStyle::kHalf) {
      x.a[n] = inside ? load_activation(raw + pair_first(style, pair, half)) : 0.0F;
      x.b[n] = inside ? load_activation(raw + pair_second(style, pair, half)) : 0.0F;
    } else {
      const float2 both =
          inside ? __ldcg(reinterpret_cast<const float2*>(raw) + pair) : make_float2(0, 0);
      x.a[n] = both.x;
      x.b[n] = both.y;
    }
  }
  return x;
}
// The weights of a norm, which no kernel writes; 1 without a norm.
template <int N>
__device__ __forceinline__ HeadPairs<N> load_norm(const float* norm, int dim, RopeStyle style,
                                                  int half) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  HeadPairs<N> x;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int pair = lane + 32 * n;
    const bool inside = norm && pair < dim / 2;
    x.a[n] = inside ? __ldg(norm + pair_first(style, pair, half)) : 1.0F;
    x.b[n] = inside ? __ldg(norm + pair_second(style, pair, half)) : 1.0F;
  }
  return x;
}

// Of the same pairs.
template <int N>
struct Turns {
  Turn pair[N];
};
template <int N>
__device__ __forceinline__ Turns<N> make_turns(const float (&frequencies)[N], int position,
                                               float factor) {
  Turns<N> turns;
#pragma unroll
  for (int n = 0; n < N; ++n) turns.pair[n] = turn(position, frequencies[n], factor);
  return turns;
}
template <int N>
__device__ __forceinline__ void load_frequencies(float (&frequencies)[N],
                                                 const float* inverse_frequencies, int turned) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int pair = (static_cast<int>(threadIdx.x) & 31) + 32 * n;
    frequencies[n] = pair < turned / 2 ? __ldg(inverse_frequencies + pair) : 0.0F;
  }
}

// store(i, value) receives each element of the finished head.
template <int N, typename Store>
__device__ __forceinline__ void finish_head(const HeadPairs<N>& x, int dim, RopeStyle style,
                                            int half, bool normed, const HeadPairs<N>& weights,
                                            float eps, const Turns<N>& turns, Store&& store) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  float scale = 1;
  if (normed) {
    float sum = 0;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      sum = __fmaf_rn(x.a[n], x.a[n], sum);
      sum = __fmaf_rn(x.b[n], x.b[n], sum);
    }
    sum = warp_sum(sum);
    const float mean = __fdiv_rn(sum, static_cast<float>(dim));
    scale = __fdiv_rn(1.0F, __fsqrt_rn(__fadd_rn(mean, eps)));
  }
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int pair = lane + 32 * n;
    if (pair >= dim / 2) continue;
    float a = x.a[n];
    float b = x.b[n];
    if (normed) {
      a = __fmul_rn(__fmul_rn(a, scale), weights.a[n]);
      b = __fmul_rn(__fmul_rn(b, scale), weights.b[n]);
    }
    const Turn t = turns.pair[n];
    const bool turns_here = pair < half;
    store(pair_first(style, pair, half),
          turns_here ? __fmaf_rn(a, t.cos, -__fmul_rn(b, t.sin)) : a);
    store(pair_second(style, pair, half),
          turns_here ? __fmaf_rn(b, t.cos, __fmul_rn(a, t.sin)) : b);
  }
}

}  // namespace pianola::cuda
