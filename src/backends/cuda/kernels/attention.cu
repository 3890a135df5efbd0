// Attention of the decode class: finish_heads() and attend().
//
// attend_tensor() serves 16-bit caches with heads of at most 128, attend_general() everything else.
#include "backends/cuda/kernels/attention.h"

#include <algorithm>
#include <string>

#include "backends/cuda/kernels/attention_common.cuh"
#include "backends/cuda/kernels/attention_general.cuh"
#include "backends/cuda/kernels/attention_items.cuh"
#include "backends/cuda/kernels/attention_tensor.cuh"
#include "pianola/error.h"

namespace pianola::cuda {
namespace {

constexpr int kFinishWarps = 8;
constexpr int kFinishFew = 256;  // tokens up to which every warp takes one head

// `share` warps a token, each with every share-th head of q, k and v; pairs a lane N: key_dim and
// value_dim <= 64 N.
template <typename T, int N>
__global__ void __launch_bounds__(kFinishWarps * 32)
    finish_heads_kernel(const __grid_constant__ HeadsArgs args, int share) {
  allow_next();
  const LayerCacheView& cache = args.cache;
  const int all = args.heads + 2 * cache.kv_heads;
  const int index =
      static_cast<int>(blockIdx.x) * kFinishWarps + static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int token = index / share;
  const int first = index - token * share;
  float frequencies[N];
  load_frequencies<N>(frequencies, args);
  wait_for_previous();
  if (token >= min(args.tokens, __ldcg(&args.state.counts->tokens))) return;
  const int position = __ldcg(args.state.position + token);
  const int row = __ldcg(args.state.row_of + __ldcg(args.state.lane_of + token));
  const int key_dim = cache.key_dim;
  const int value_dim = cache.value_dim;
  float* q = args.q_out + static_cast<std::size_t>(token) * args.heads * key_dim;
  if (position < 0) {
    for (int i = first * 32 + lane; i < args.heads * key_dim; i += share * 32) q[i] = 0;
    return;
  }
  const float* raw_q = args.q + static_cast<std::size_t>(token) * args.heads * key_dim;
  const float* raw_k = args.k + static_cast<std::size_t>(token) * cache.kv_heads * key_dim;
  const float* raw_v = args.v + static_cast<std::size_t>(token) * cache.kv_heads * value_dim;
  T* k = key_slot<T>(cache, row) + cache_offset(position, 0, cache.kv_heads, key_dim);
  T* v = value_slot<T>(cache, row) + cache_offset(position, 0, cache.kv_heads, value_dim);
  const Turns<N> turns = make_turns<N>(frequencies, position, args.attention_factor);
  constexpr int kInFlight = N == 1 ? 4 : 2;
#pragma unroll 1
  for (int base = first; base < all; base += kInFlight * share) {
    HeadPairs<N> x[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int head = base + i * share;
      if (head >= all) break;
      if (head < args.heads) {
        x[i] = load_head<N>(raw_q + head * key_dim, key_dim, args.style);
      } else if (head < args.heads + cache.kv_heads) {
        x[i] = load_head<N>(raw_k + (head - args.heads) * key_dim, key_dim, args.style);
      } else {
        x[i] = load_head<N>(raw_v + (head - args.heads - cache.kv_heads) * value_dim, value_dim,
                            RopeStyle::kInterleaved);
      }
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      int head = base + i * share;
      if (head >= all) break;
      if (head < args.heads) {
        float* out = q + head * key_dim;
        finish_head<N>(x[i], key_dim, args.style, args.q_norm,
                       load_norm<N>(args.q_norm, key_dim, args.style), args.q_norm_eps, turns,
                       [&](int d, float value) { out[d] = value; });
        continue;
      }
      head -= args.heads;
      if (head < cache.kv_heads) {
        T* out = k + head * kCacheBlock * key_dim;
        finish_head<N>(x[i], key_dim, args.style, args.k_norm,
                       load_norm<N>(args.k_norm, key_dim, args.style), args.k_norm_eps, turns,
                       [&](int d, float value) { out[d] = to_cache<T>(value); });
        continue;
      }
      T* out = v + (head - cache.kv_heads) * kCacheBlock * value_dim;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const int pair = lane + 32 * n;
        if (pair < value_dim / 2) {
          store_pair<T>(out + 2 * pair, x[i].a[n], x[i].b[n]);
        }
      }
    }
  }
}

// The item of this team, a thread block, and whether it has anything to compute. Without a wait
// only those leave that neither read nor write: a cluster's first thread block always waits, so
// that no kernel behind this one can overtake the one before.
template <typename T>
__device__ __forceinline__ bool begin_item(const DecodeParams& p, const ItemMemory<T>& memory,
                                           Tables& tables, Item& item) {
  allow_next();
  start_cluster(memory);
  const int block = static_cast<int>(blockIdx.x);
  item = find_item(p, tables, block >> p.log_cluster, block & ((1 << p.log_cluster) - 1));
  if (item.team >= item.active) return false;
  if (item.position < 0) {
    wait_for_previous();
    if (item.position == -1) clear_item(p, item);
    return false;
  }
  expect_parts(p, item, memory);
  if (threadIdx.x == 0) *memory.item = item;
  return true;
}

__device__ __forceinline__ void wait_for_item(const Item& item) {
  if (item.ranks > 1) cluster_wait();  // all have started
  wait_for_previous();
}

template <typename T, int kKeySteps, int kValueSteps, bool kExact, int kTiles>
__global__ void __launch_bounds__(kItemThreads, kExact&& kKeySteps == 2 ? 3 : 2)
    attend_tensor(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(16) unsigned char shared[];
  const ItemMemory<T> memory(p, shared);
  Tables tables;
  Item item;
  if (!begin_item(p, memory, tables, item)) return;
  const Fresh fresh = p.fused ? find_fresh(tables, item) : Fresh();
  TensorItem<T, kKeySteps, kValueSteps, kExact, kTiles>(p, item, fresh, memory).run(tables, [&] {
    wait_for_item(item);
  });
}

template <typename T, int N>
__global__ void __launch_bounds__(kItemThreads, 2)
    attend_general(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(16) unsigned char shared[];
  const ItemMemory<T> memory(p, shared);
  Tables tables;
  Item item;
  if (!begin_item(p, memory, tables, item)) return;
  const Fresh fresh = p.fused ? find_fresh(tables, item) : Fresh();
  GeneralItem<T, N>{p, item, fresh, memory}.run(tables, [&] { wait_for_item(item); });
}

using DecodeKernel = void (*)(DecodeParams);

template <typename T>
DecodeKernel general_kernel(int dim) {
  if (dim <= 64) return attend_general<T, 1>;
  if (dim <= 128) return attend_general<T, 2>;
  return attend_general<T, 4>;
}

template <typename T>
DecodeKernel decode_kernel(int key_dim, int value_dim) {
  const int most = std::max(key_dim, value_dim);
  if (most > 128) return general_kernel<T>(most);
  if (key_dim == 64 && value_dim == 64) return attend_tensor<T, 2, 1, true, 2>;
  if (key_dim == 128 && value_dim == 128) return attend_tensor<T, 4, 2, true, 1>;
  if (most <= 64) return attend_tensor<T, 2, 1, false, 2>;
  return attend_tensor<T, 4, 2, false, 1>;
}

using FinishKernel = void (*)(HeadsArgs, int);

template <typename T>
FinishKernel finish_kernel(int dim) {
  if (dim <= 64) return finish_heads_kernel<T, 1>;
  if (dim <= 128) return finish_heads_kernel<T, 2>;
  return finish_heads_kernel<T, 4>;
}

// Thread blocks that share an item: as many as the device holds at once, but always a few, as
// tokens of one step may differ much in length.
constexpr int kFewBlocks = 4;
int log_cluster_of(int items, int sms) {
  int log = 4;
  static_assert(1 << 4 == kMostRanks);
  while (1 << log > kFewBlocks && items << log > 2 * sms) --log;
  return log;
}

void launch_decode(const Launch& launch, DecodeKernel kernel, const DecodeParams& p, int items,
                   std::size_t bytes) {
  const auto* function = reinterpret_cast<const void*>(kernel);
  if (bytes > 48 * 1024) {
    check(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(bytes)),
          "attend");
  }
  if (1 << p.log_cluster > 8) {
    check(cudaFuncSetAttribute(function, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
          "attend");
  }
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = 1U << p.log_cluster;
  attributes[0].val.clusterDim.y = 1;
  attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(items) << p.log_cluster);
  config.blockDim = dim3(kItemThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = launch.stream;
  config.attrs = attributes;
  config.numAttrs = launch.dependent ? 2 : 1;
  check(cudaLaunchKernelEx(&config, kernel, p), "attend");
}

// The tokens first..first + 63 of the bucket.
void attend_from(const AttentionArgs& args, const HeadsArgs* heads, int first,
                 const Launch& launch) {
  const LayerCacheView& cache = args.cache;
  const int tokens = std::min(args.tokens - first, kDecodeTokens);
  const int items = tokens * cache.kv_heads * parts_of(args.heads, cache.kv_heads);
  const DecodeParams p =
      decode_params(args, heads, first, tokens, log_cluster_of(items, launch.sms));

  const DecodeKernel kernel =
      cache.dtype == DType::kF32   ? general_kernel<float>(std::max(cache.key_dim, cache.value_dim))
      : cache.dtype == DType::kF16 ? decode_kernel<__half>(cache.key_dim, cache.value_dim)
                                   : decode_kernel<__nv_bfloat16>(cache.key_dim, cache.value_dim);
  launch_decode(launch, kernel, p, items, item_memory_bytes(p, cache.dtype == DType::kF32 ? 4 : 2));
}

}  // namespace

void check_attention_shape(const LayerCacheView& cache, int heads) {
  const auto fits = [](int dim) { return dim > 0 && dim % 8 == 0 && dim <= kMaxHeadDim; };
  if (!fits(cache.key_dim) || !fits(cache.value_dim)) {
    throw Error(ErrorCode::kUnsupported, "attention: heads of " + std::to_string(cache.key_dim) +
                                             " and " + std::to_string(cache.value_dim) +
                                             " (the CUDA kernels take multiples of 8 up to 256)");
  }
  if (heads % cache.kv_heads != 0) {
    throw Error(ErrorCode::kUnsupported, "attention: " + std::to_string(heads) + " heads on " +
                                             std::to_string(cache.kv_heads) + " kv heads");
  }
}

std::size_t attention_scratch_bytes(int /*tokens*/, int /*heads*/, int /*kv_heads*/,
                                    int /*value_dim*/, int /*capacity*/) {
  return kCounterBytes;
}

void finish_heads(const HeadsArgs& args, const Launch& launch) {
  check_attention_shape(args.cache, args.heads);
  const int dim = std::max(args.cache.key_dim, args.cache.value_dim);
  const FinishKernel kernel = args.cache.dtype == DType::kF32   ? finish_kernel<float>(dim)
                              : args.cache.dtype == DType::kF16 ? finish_kernel<__half>(dim)
                                                                : finish_kernel<__nv_bfloat16>(dim);
  const int all = args.heads + 2 * args.cache.kv_heads;
  const int share = args.tokens <= kFinishFew ? all : std::min(all, 4);
  const auto blocks =
      static_cast<unsigned>((args.tokens * share + kFinishWarps - 1) / kFinishWarps);
  launch_kernel(launch, "finish_heads", kernel, dim3(blocks), dim3(kFinishWarps * 32), 0, args,
                share);
}

void attend(const AttentionArgs& args, const HeadsArgs* heads, const Launch& launch) {
  check_attention_shape(args.cache, args.heads);
  if (heads && args.tokens > kDecodeTokens) {
    throw Error(ErrorCode::kUnsupported,
                "attend: heads of " + std::to_string(args.tokens) + " tokens (at most 64 at once)");
  }
  for (int first = 0; first < args.tokens; first += kDecodeTokens) {
    attend_from(args, heads, first, launch);
  }
}

}  // namespace pianola::cuda
