// Barriers in shared memory (which also count bytes that arrive), and what the thread blocks of a
// cluster say to each other.
#pragma once

#include "backends/cuda/kernels/device.cuh"

namespace pianola::cuda {

// Where thread block `block` of the cluster has what lies at `address` here.
__device__ __forceinline__ std::uint32_t peer_address(std::uint32_t address, int block) {
  std::uint32_t peer;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(peer) : "r"(address), "r"(block));
  return peer;
}

__device__ __forceinline__ void init_barrier(std::uint32_t at, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}
// What was initialised is so for the cluster and for the copy engine.
__device__ __forceinline__ void fence_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Arrives, and adds to the bytes that end the phase.
__device__ __forceinline__ void expect_bytes(std::uint32_t at, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void arrive_at_peer(std::uint32_t at, int count) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0], %1;" ::"r"(at),
               "r"(count)
               : "memory");
}
// Until the phase with this parity has ended.
__device__ __forceinline__ void wait_barrier(std::uint32_t at, unsigned parity, const char* what,
                                             int number) {
  Patience patience;
  std::uint32_t done = 0;
  while (true) {
    asm volatile(
        "{\n .reg .pred done;\n"
        " mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%1], %2;\n"
        " selp.u32 %0, 1, 0, done;\n}"
        : "=r"(done)
        : "r"(at), "r"(parity)
        : "memory");
    if (done != 0 || patience.over()) return;
    patience.look(what, number);
  }
}
// The same for what the copy engine brings, for a warp as one: tensor cores that several warps use
// together take no waiting that lanes leave one by one.
__device__ __forceinline__ void wait_copied(std::uint32_t at, unsigned parity) {
  Patience patience;
  std::uint32_t done = 0;
  while (true) {
    asm volatile(
        "{\n .reg .pred done;\n"
        " mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        " selp.u32 %0, 1, 0, done;\n}"
        : "=r"(done)
        : "r"(at), "r"(parity)
        : "memory");
    if (__all_sync(kAllLanes, done != 0) || patience.over()) return;
    patience.look("a copy", 0);
  }
}

// Whether the phase with this parity has ended, without waiting for it.
__device__ __forceinline__ bool copied(std::uint32_t at, unsigned parity) {
  std::uint32_t done = 0;
  asm volatile(
      "{\n .reg .pred done;\n"
      " mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      " selp.u32 %0, 1, 0, done;\n}"
      : "=r"(done)
      : "r"(at), "r"(parity)
      : "memory");
  return __all_sync(kAllLanes, done != 0) != 0;
}

// A barrier of so many threads of a block, in number 1..15: some arrive and go on, others wait.
__device__ __forceinline__ void arrive_named(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
__device__ __forceinline__ void wait_named(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Boxes lie in shared memory as the copy engine's pattern of 128 bytes: chunk c of 16 bytes of row
// r at place c ^ r % 8.
inline constexpr int kBoxBytes = 128;   // of a row
inline constexpr int kBoxAlign = 1024;  // of the pattern
// From an address of shared memory to the first place for boxes.
__device__ __forceinline__ std::uint32_t bytes_to_boxes(const void* memory) {
  return (kBoxAlign - shared_address(memory) % kBoxAlign) % kBoxAlign;
}
// What row g of eight is to a product on tensor cores, so that a quarter of a warp, which reads
// four chunks of two rows, meets every bank once.
__device__ __forceinline__ constexpr int box_row(int g) { return g / 2 + g % 2 * 4; }

// Boxes of a matrix (boxes_of() in launch.h), the first of them box x of row y.
__device__ __forceinline__ void copy_boxes(std::uint32_t to, const void* map, int x, int y,
                                           std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3, %4}], [%5];" ::"r"(to),
      "l"(map), "r"(0), "r"(y), "r"(x), "r"(barrier)
      : "memory");
}

// Boxes to the second-level cache.
__device__ __forceinline__ void fetch_boxes(const void* map, int x, int y) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1, %2, %3}];" ::"l"(map), "r"(0),
               "r"(y), "r"(x)
               : "memory");
}

// To the shared memory of a peer, whose barrier counts the bytes.
__device__ __forceinline__ void send(std::uint32_t to, float v, std::uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to), "f"(v),
      "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void send(std::uint32_t to, float2 v, std::uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
          to),
      "f"(v.x), "f"(v.y), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void send(std::uint32_t to, float4 v, std::uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(to),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// Without an order of memory, for which a fence has to care.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

}  // namespace pianola::cuda
