// What sampling is made of: the order of candidates, reductions over a CTA of kThreads in a fixed
// order, sorting, and random numbers.
#pragma once

#include <climits>
#include <cstdint>

#include "backends/cuda/kernels/device.cuh"
#include "plan/step_state.h"

namespace pianola::cuda::sampling {

inline constexpr int kThreads = 512;
inline constexpr int kWarps = kThreads / 32;

// Floats as integers of the same order; both zeros are one.
__device__ __forceinline__ std::uint32_t key_of(float x) {
  const std::uint32_t bits = __float_as_uint(__fadd_rn(x, 0.0F));
  return bits ^ (bits >> 31 ? 0xffffffffU : 0x80000000U);
}
__device__ __forceinline__ float of_key(std::uint32_t key) {
  return __uint_as_float(key ^ (key >> 31 ? 0x80000000U : 0xffffffffU));
}

// A logit and its id in one number: greater is better, and of equals the lower id.
using Ranked = unsigned long long;
__device__ __forceinline__ Ranked ranked(float logit, int id) {
  return Ranked{key_of(logit)} << 32 | ~static_cast<std::uint32_t>(id);
}
__device__ __forceinline__ float logit_of(Ranked r) {
  return of_key(static_cast<std::uint32_t>(r >> 32));
}
__device__ __forceinline__ int id_of(Ranked r) {
  return static_cast<int>(~static_cast<std::uint32_t>(r));
}

// The candidates at least as good as (key, id). All of them by default.
struct Cut {
  std::uint32_t key = 0;
  int id = INT_MAX;
  __device__ bool keeps(std::uint32_t k, int i) const { return k > key || (k == key && i <= id); }
};

// exp() once in the code, which is large where it is inlined.
__device__ __noinline__ double exp_of(double x) { return exp(x); }

// Sum over groups of kCount neighbouring lanes, the same in each of them.
template <int kCount>
__device__ __forceinline__ double group_sum(double v) {
#pragma unroll
  for (int offset = kCount / 2; offset; offset >>= 1) {
    v += __shfl_xor_sync(kAllLanes, v, offset);
  }
  return v;
}
// Sum over this lane and those before.
__device__ __forceinline__ double warp_scan(double v) {
#pragma unroll
  for (int offset = 1; offset < 32; offset <<= 1) {
    const double other = __shfl_up_sync(kAllLanes, v, offset);
    if (threadIdx.x % 32 >= static_cast<unsigned>(offset)) v += other;
  }
  return v;
}
__device__ __forceinline__ Ranked warp_best(Ranked v) {
  const auto high = static_cast<std::uint32_t>(v >> 32);
  const std::uint32_t best = __reduce_max_sync(kAllLanes, high);
  const std::uint32_t low = high == best ? static_cast<std::uint32_t>(v) : 0;
  return Ranked{best} << 32 | __reduce_max_sync(kAllLanes, low);
}
// Sum over the CTA's threads before this one, and `total` of all.
__device__ __forceinline__ double block_scan(double v, double* partial, double& total) {
  const double inclusive = warp_scan(v);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int warp = static_cast<int>(threadIdx.x / 32);
  const double before = __shfl_up_sync(kAllLanes, inclusive, 1);
  if (lane == 31) partial[warp] = inclusive;
  __syncthreads();
  const double warps = warp_scan(partial[lane % kWarps]);
  total = __shfl_sync(kAllLanes, warps, kWarps - 1);
  const double base = warp ? __shfl_sync(kAllLanes, warps, warp - 1) : 0;
  __syncthreads();
  return lane ? base + before : base;
}
// The best of the CTA's threads; `bad` becomes true when it is in one of them.
__device__ __forceinline__ Ranked block_best(Ranked v, Ranked* partial, int& bad) {
  v = warp_best(v);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = v;
  bad = __syncthreads_or(bad);
  return warp_best(partial[threadIdx.x % kWarps]);
}

// A number in [0, 1) as uniform_random() of plan/step_state.cc gives it: Philox 4x32-10.
__device__ double uniform(std::uint64_t seed, std::uint32_t choice, std::uint32_t position) {
  std::uint32_t c0 = position;
  std::uint32_t c1 = choice;
  std::uint32_t c2 = static_cast<std::uint32_t>(RandomPurpose::kSample);
  std::uint32_t c3 = 0;
  auto k0 = static_cast<std::uint32_t>(seed);
  auto k1 = static_cast<std::uint32_t>(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const std::uint32_t h0 = __umulhi(0xD2511F53U, c0);
    const std::uint32_t l0 = 0xD2511F53U * c0;
    const std::uint32_t h1 = __umulhi(0xCD9E8D57U, c2);
    const std::uint32_t l1 = 0xCD9E8D57U * c2;
    c0 = h1 ^ c1 ^ k0;
    c1 = l1;
    c2 = h0 ^ c3 ^ k1;
    c3 = l0;
    k0 += 0x9E3779B9U;
    k1 += 0xBB67AE85U;
  }
  const std::uint64_t bits = (std::uint64_t{c0} << 21) | (c1 >> 11);
  return static_cast<double>(bits) * 0x1.0p-53;
}

// Sorts `count` numbers, a power of two, the greatest first.
__device__ void sort_down(Ranked* v, int count) {
  for (int size = 2; size <= count; size *= 2) {
    for (int stride = size / 2; stride > 0; stride /= 2) {
      for (int i = static_cast<int>(threadIdx.x); i < count / 2; i += kThreads) {
        const int low = 2 * i - (i & (stride - 1));
        const int high = low + stride;
        const Ranked a = v[low];
        const Ranked b = v[high];
        if ((a < b) == ((low & size) == 0)) {
          v[low] = b;
          v[high] = a;
        }
      }
      __syncthreads();
    }
  }
}

}  // namespace pianola::cuda::sampling
