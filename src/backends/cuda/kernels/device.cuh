// What the kernels of this backend share: waiting for the kernel before, reductions in a fixed
// order, and numbers split into two bfloat16 parts.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstdio>

namespace pianola::cuda {

inline constexpr unsigned kAllLanes = 0xffffffffU;

// Everything the kernels before this one wrote is visible afterwards.
__device__ __forceinline__ void wait_for_previous() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
// The next kernel may start to load what does not depend on this one.
__device__ __forceinline__ void allow_next() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Waits between thread blocks end in an error of the device after many seconds rather than never:
// one that lasts so long is a mistake of ours. With PIANOLA_DEBUG_WAITS it says where, and goes on.
class Patience {
 public:
  __device__ __forceinline__ void look([[maybe_unused]] const char* what,
                                       [[maybe_unused]] int number) {
#ifdef PIANOLA_DEBUG_WAITS
    if (++looks_ == 1U << 22) {
      std::printf("block %d warp %d lane %d waits for %s %d\n", static_cast<int>(blockIdx.x),
                  static_cast<int>(threadIdx.x / 32), static_cast<int>(threadIdx.x % 32), what,
                  number);
    }
#else
    if (++looks_ == 1U << 28) __trap();
#endif
  }
  __device__ __forceinline__ bool over() const {
#ifdef PIANOLA_DEBUG_WAITS
    return looks_ >= 1U << 22;
#else
    return false;
#endif
  }

 private:
  unsigned looks_ = 0;
};

// Activations are read past the first-level cache: with overlapping kernels it may hold what an
// address contained before.
__device__ __forceinline__ float load_activation(const float* p) { return __ldcg(p); }
__device__ __forceinline__ float4 load_activation4(const float* p) {
  return __ldcg(reinterpret_cast<const float4*>(p));
}

__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// 16 bytes of shared memory, in the order in which the program says so.
__device__ __forceinline__ uint4 load_shared(std::uint32_t at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(at)
               : "memory");
  return v;
}
__device__ __forceinline__ uint2 load_shared8(std::uint32_t at) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ void store_shared(std::uint32_t at, const uint4& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}
__device__ __forceinline__ void store_shared(std::uint32_t at, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(v) : "memory");
}

// Weights are read once: the first to be evicted from both caches.
__device__ __forceinline__ uint4 load_weight(const void* p) {
  uint4 v;
  asm volatile("ld.global.cs.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// 16 bytes to shared memory, past the first-level cache, without a register. Copies end in groups:
// wait_copies<n>() returns when at most n groups of this thread are on their way.
__device__ __forceinline__ void copy_async(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared_address(to)),
               "l"(from)
               : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;"); }
template <int kGroups>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// Brings a line to the second-level cache.
__device__ __forceinline__ void prefetch(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// Sum over the lanes of a warp, the same in all of them; the order is fixed.
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) v += __shfl_xor_sync(kAllLanes, v, offset);
  return v;
}
__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) v = fmaxf(v, __shfl_xor_sync(kAllLanes, v, offset));
  return v;
}

__device__ __forceinline__ std::uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}
__device__ __forceinline__ float bf16_low(std::uint32_t pair) {
  return __uint_as_float(pair << 16);
}
__device__ __forceinline__ float bf16_high(std::uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000U);
}

// x = high + low to 16 bits of mantissa, so that two products on tensor cores are as good as one of
// the f32 value.
struct SplitPair {
  std::uint32_t high;
  std::uint32_t low;
};
__device__ __forceinline__ SplitPair split_bf16(float a, float b) {
  const std::uint32_t high = pack_bf16(a, b);
  return {high, pack_bf16(a - bf16_low(high), b - bf16_high(high))};
}

// d += a b with a [16, 16], b [16, 8], bfloat16 parts and f32 sums.
__device__ __forceinline__ void mma_bf16(float (&d)[4], const std::uint32_t (&a)[4],
                                         std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace pianola::cuda
