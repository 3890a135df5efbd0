// The kernels of attend() for steps of any size and the choice between them: attend_tensor() serves
// 16-bit caches with heads of at most 128 and of 256, attend_general() everything else.
// attention_plain.cu and attention_window.cu instantiate them. Most steps have another kernel,
// attend_one() or attend_lanes().
#pragma once

#include <algorithm>

#include "backends/cuda/kernels/attention_decode.h"
#include "backends/cuda/kernels/attention_general.cuh"
#include "backends/cuda/kernels/attention_tensor.cuh"

namespace pianola::cuda {

// The item of this team, a thread block, and whether it has anything to compute. Without a wait
// only those leave that neither read nor write: a cluster's first thread block always waits, so
// that no kernel behind this one can overtake the one before. With kInStep all warps of a thread
// block that goes on are behind the barrier's start.
template <bool kPlain, bool kInStep = false, typename T>
__device__ __forceinline__ bool begin_item(const DecodeParams& p, const ItemMemory<T>& memory,
                                           Tables& tables, Item& item) {
  allow_next();
  start_cluster(p, memory);
  const int block = static_cast<int>(blockIdx.x);
  item = find_item<kPlain>(p, tables, block >> p.log_cluster, block & ((1 << p.log_cluster) - 1));
  if (item.team >= item.active) return false;
  if (item.position < 0) {
    wait_for_previous();
    if (item.position == -1) clear_item(p, item);
    return false;
  }
  if constexpr (kInStep) __syncthreads();
  expect_parts(p, item, memory);
  if (threadIdx.x == 0) *memory.item = item;
  return true;
}

__device__ __forceinline__ void wait_for_item(const Item& item) {
  wait_for_teams(item);
  wait_for_previous();
}

template <typename T, int kKeySteps, int kValueSteps, bool kExact, int kTiles, bool kPlain>
__global__ void __launch_bounds__(kItemThreads, kExact&& kKeySteps == 2 ? 3 : 2)
    attend_tensor(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(16) unsigned char shared[];
  const ItemMemory<T> memory(p, shared);
  Tables tables;
  Item item;
  if (!begin_item<kPlain>(p, memory, tables, item)) return;
  const Span<kPlain> span(p.attention.cache, item.end);
  const Fresh fresh = p.fused ? find_fresh(tables, item, span) : Fresh();
  TensorItem<T, kKeySteps, kValueSteps, kExact, kTiles, kPlain>(p, item, fresh, memory, span)
      .run(tables, [&] { wait_for_item(item); });
}

template <typename T, int N, bool kPlain>
__global__ void __launch_bounds__(kItemThreads, 2)
    attend_general(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(16) unsigned char shared[];
  const ItemMemory<T> memory(p, shared);
  Tables tables;
  Item item;
  // Racecheck takes one lane's arrival for one of every warp where the compiler made it a condition
  // of an instruction.
  if (!begin_item<kPlain, true>(p, memory, tables, item)) return;
  const Span<kPlain> span(p.attention.cache, item.end);
  const Fresh fresh = kFuses<T> && p.fused ? find_fresh(tables, item, span) : Fresh();
  GeneralItem<T, N, kPlain>{p, item, fresh, memory, span}.run(tables, [&] { wait_for_item(item); });
}

template <typename T, bool kPlain>
DecodeKernel general_kernel(int dim) {
  if (dim <= 64) return attend_general<T, 1, kPlain>;
  if (dim <= 128) return attend_general<T, 2, kPlain>;
  return attend_general<T, 4, kPlain>;
}

template <typename T, bool kPlain>
DecodeKernel kernel_for(int key_dim, int value_dim) {
  const int most = std::max(key_dim, value_dim);
  if (key_dim == 256 && value_dim == 256) return attend_tensor<T, 8, 4, true, 1, kPlain>;
  if (most > 128) return general_kernel<T, kPlain>(most);
  if (key_dim == 64 && value_dim == 64) return attend_tensor<T, 2, 1, true, tiles_of(64), kPlain>;
  if (key_dim == 128 && value_dim == 128)
    return attend_tensor<T, 4, 2, true, tiles_of(128), kPlain>;
  if (most <= 64) return attend_tensor<T, 2, 1, false, tiles_of(64), kPlain>;
  return attend_tensor<T, 4, 2, false, tiles_of(128), kPlain>;
}

template <bool kPlain>
DecodeKernel decode_kernel(const LayerCacheView& cache) {
  switch (cache.dtype) {
    case DType::kF32:
      return general_kernel<float, kPlain>(std::max(cache.key_dim, cache.value_dim));
    case DType::kF16:
      return kernel_for<__half, kPlain>(cache.key_dim, cache.value_dim);
    case DType::kI8:
      return general_kernel<std::int8_t, kPlain>(std::max(cache.key_dim, cache.value_dim));
    case DType::kF8E4M3:
      return general_kernel<Fp8, kPlain>(std::max(cache.key_dim, cache.value_dim));
    default:
      return kernel_for<__nv_bfloat16, kPlain>(cache.key_dim, cache.value_dim);
  }
}

}  // namespace pianola::cuda
