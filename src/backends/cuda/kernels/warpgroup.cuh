// Products of a group of four warps on tensor cores: d [64, N] += a [64, 16] b [16, N], with a in
// registers, as in mma.sync of each warp's 16 rows, and b in shared memory. That is wgmma of
// sm_90a; elsewhere each warp multiplies its rows by itself, with the same bits.
#pragma once

#include <cstdint>

#include "backends/cuda/kernels/device.cuh"

namespace pianola::cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
inline constexpr bool kHasWarpgroups = true;
#else
inline constexpr bool kHasWarpgroups = false;
#endif

// Registers of a thread move between groups of four warps: some give, others take. Multiples of 8.
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  if constexpr (kHasWarpgroups) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
  }
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  if constexpr (kHasWarpgroups) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
  }
}

// What threads have written to shared memory is there for tensor cores, once they have met.
__device__ __forceinline__ void fence_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Registers are ready.
__device__ __forceinline__ void begin_products() {
  if constexpr (kHasWarpgroups) asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void end_products() {
  if constexpr (kHasWarpgroups) asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until all but the last kPending groups of products are over.
template <int kPending>
__device__ __forceinline__ void wait_products() {
  if constexpr (kHasWarpgroups) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
  }
}

// Describes b as it lies from `at` on: matrices of 8 columns x 8 terms, 16 bytes a column, those of
// the next 8 terms `terms_bytes` further, those of the next 8 columns `columns_bytes`.
__device__ __forceinline__ std::uint64_t core_matrices(const void* at, int terms_bytes,
                                                       int columns_bytes) {
  const std::uint64_t start = shared_address(at) >> 4 & 0x3fff;
  return start | static_cast<std::uint64_t>(terms_bytes >> 4) << 16 |
         static_cast<std::uint64_t>(columns_bytes >> 4) << 32;
}

__device__ __forceinline__ std::uint32_t load_shared_word(std::uint32_t at) {
  std::uint32_t word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(at) : "memory");
  return word;
}
// The same of one warp's 16 rows, b's columns at the addresses of core_matrices().
template <int kColumns>
__device__ __forceinline__ void product_of_warp(float (&d)[kColumns / 8][4],
                                                const std::uint32_t (&a)[4], std::uint64_t b) {
  const auto part = [b](int bit) { return static_cast<std::uint32_t>(b >> bit & 0x3fff) << 4; };
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const std::uint32_t at = part(0) + lane / 4 * 16 + lane % 4 * 4;
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n) {
    mma_bf16(d[n], a, load_shared_word(at + n * part(32)),
             load_shared_word(at + n * part(32) + part(16)));
  }
}

// N = 16 kGroups; d as in mma.sync, eight columns at a time.
template <int kGroups>
__device__ __forceinline__ void product_of_group(float (&d)[2 * kGroups][4],
                                                 const std::uint32_t (&a)[4], std::uint64_t b) {
  static_assert(kGroups == 1 || kGroups == 2 || kGroups == 4 || kGroups == 8);
  if constexpr (!kHasWarpgroups) {
    product_of_warp<16 * kGroups>(d, a, b);
  } else if constexpr (kGroups == 1) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7}, "
        "{%8,%9,%10,%11}, %12, 1, 1, 1, 0;"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),
          "+f"(d[1][2]), "+f"(d[1][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  } else if constexpr (kGroups == 2) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
        "{%16,%17,%18,%19}, %20, 1, 1, 1, 0;"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),
          "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
          "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  } else if constexpr (kGroups == 4) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
        "{%32,%33,%34,%35}, %36, 1, 1, 1, 0;"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),
          "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
          "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]),
          "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
          "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]),
          "+f"(d[7][2]), "+f"(d[7][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  } else {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
        "{%64,%65,%66,%67}, %68, 1, 1, 1, 0;"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),
          "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
          "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]),
          "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
          "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]),
          "+f"(d[7][2]), "+f"(d[7][3]), "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]),
          "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]), "+f"(d[10][0]),
          "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]),
          "+f"(d[11][2]), "+f"(d[11][3]), "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]),
          "+f"(d[12][3]), "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]),
          "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]), "+f"(d[15][0]),
          "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }
}

}  // namespace pianola::cuda
