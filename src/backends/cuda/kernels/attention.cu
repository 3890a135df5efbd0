// Attention of the decode class: finish_heads() and the launch of attend().
#include "backends/cuda/kernels/attention.h"

#include <algorithm>
#include <string>

#include "backends/cuda/kernels/attention_common.cuh"
#include "backends/cuda/kernels/attention_decode.h"
#include "backends/cuda/kernels/attention_items.cuh"
#include "pianola/error.h"

namespace pianola::cuda {
namespace {

constexpr int kFinishWarps = 8;
constexpr int kFinishFew = 256;  // tokens up to which every warp takes one head

// A head as multiples of its scale. each(store) hands every element to store(i, value); all lanes
// of a warp.
template <typename Each>
__device__ __forceinline__ void store_multiples(std::int8_t* out, float* scale_out,
                                                const Each& each) {
  float most = 0;
  bool finite = true;
  each([&](int, float value) {
    most = fmaxf(most, fabsf(value));
    finite = finite && isfinite(value);
  });
  const float scale = int8_scale(warp_max(most), __all_sync(kAllLanes, finite));
  each([&](int d, float value) { out[d] = int8_multiple(value, scale); });
  if ((threadIdx.x & 31) == 0) *scale_out = scale;
}

// `share` warps a token, each with every share-th head of q, k and v; pairs a lane N: key_dim and
// value_dim <= 64 N. kRows: the cache holds the tokens of rows.
template <typename T, int N, bool kRows>
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
  load_frequencies<N>(frequencies, args.inverse_frequencies, args.turned);
  wait_for_previous();
  if (token >= min(args.tokens, __ldcg(&args.state.counts->tokens))) return;
  const int position = __ldcg(args.state.position + token);
  const int row = cache_slot(args.state, kRows ? CacheHolds::kTokens : cache.holds, token);
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
  const int place = cache.window > 0 ? position % cache.capacity : position;
  T* k = key_slot<T>(cache, row) + cache_offset(place, 0, cache.kv_heads, key_dim);
  T* v = value_slot<T>(cache, row) + cache_offset(place, 0, cache.kv_heads, value_dim);
  const Turns<N> turns = make_turns<N>(frequencies, position, args.attention_factor);
  const int half = args.turned / 2;
  constexpr int kInFlight = N == 1 ? 4 : N == 2 ? 2 : 1;
#pragma unroll 1
  for (int base = first; base < all; base += kInFlight * share) {
    HeadPairs<N> x[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int head = base + i * share;
      if (head >= all) break;
      if (head < args.heads) {
        x[i] = load_head<N>(raw_q + head * key_dim, key_dim, args.style, half);
      } else if (head < args.heads + cache.kv_heads) {
        x[i] = load_head<N>(raw_k + (head - args.heads) * key_dim, key_dim, args.style, half);
      } else {
        x[i] = load_head<N>(raw_v + (head - args.heads - cache.kv_heads) * value_dim, value_dim,
                            RopeStyle::kInterleaved, half);
      }
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      int head = base + i * share;
      if (head >= all) break;
      if (head < args.heads) {
        float* out = q + head * key_dim;
        finish_head<N>(x[i], key_dim, args.style, half, args.q_norm,
                       load_norm<N>(args.q_norm, key_dim, args.style, half), args.q_norm_eps, turns,
                       [&](int d, float value) { out[d] = value; });
        continue;
      }
      head -= args.heads;
      if (head < cache.kv_heads) {
        T* out = k + head * kCacheBlock * key_dim;
        const auto norm = load_norm<N>(args.k_norm, key_dim, args.style, half);
        const auto each = [&](const auto& store) {
          finish_head<N>(x[i], key_dim, args.style, half, args.k_norm, norm, args.k_norm_eps, turns,
                         store);
        };
        if constexpr (kScaled<T>) {
          store_multiples(
              out, key_scales(cache, row) + cache_offset(place, head, cache.kv_heads, 1), each);
        } else {
          each([&](int d, float value) { out[d] = to_cache<T>(value); });
        }
        continue;
      }
      head -= cache.kv_heads;
      T* out = v + head * kCacheBlock * value_dim;
      const auto each_pair = [&](const auto& store) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
          const int pair = lane + 32 * n;
          if (pair < value_dim / 2) store(2 * pair, x[i].a[n], x[i].b[n]);
        }
      };
      if constexpr (kScaled<T>) {
        store_multiples(out,
                        value_scales(cache, row) + cache_offset(place, head, cache.kv_heads, 1),
                        [&](const auto& store) {
                          each_pair([&](int d, float a, float b) { store(d, a), store(d + 1, b); });
                        });
      } else {
        each_pair([&](int d, float a, float b) { store_pair<T>(out + d, a, b); });
      }
    }
  }
}

using FinishKernel = void (*)(HeadsArgs, int);

template <typename T, bool kRows>
FinishKernel finish_kernel(int dim) {
  if (dim <= 64) return finish_heads_kernel<T, 1, kRows>;
  if (dim <= 128) return finish_heads_kernel<T, 2, kRows>;
  return finish_heads_kernel<T, 4, kRows>;
}

template <bool kRows>
FinishKernel finish_kernel_of(DType dtype, int dim) {
  switch (dtype) {
    case DType::kF32:
      return finish_kernel<float, kRows>(dim);
    case DType::kF16:
      return finish_kernel<__half, kRows>(dim);
    case DType::kI8:
      return finish_kernel<std::int8_t, kRows>(dim);
    case DType::kF8E4M3:
      return finish_kernel<Fp8, kRows>(dim);
    default:
      return finish_kernel<__nv_bfloat16, kRows>(dim);
  }
}

// Thread blocks that share an item: as many as the device holds at once, but a few, as tokens of
// one step may differ much in length, and two where there are many items.
constexpr int kFewBlocks = 4;
int log_cluster_of(int items, int sms) {
  int log = 4;
  static_assert(1 << 4 == kMostRanks);
  while (1 << log > kFewBlocks && items << log > 2 * sms) --log;
  while (log > 1 && items << log > 4 * sms) --log;
  return log;
}

// The tokens first..first + 63 of the bucket.
void attend_from(const AttentionArgs& args, const HeadsArgs* heads, int first,
                 const Launch& launch) {
  const LayerCacheView& cache = args.cache;
  const int tokens = std::min(args.tokens - first, kDecodeTokens);
  if (tokens > 1 && attend_lanes_from(args, heads, first, tokens, launch)) return;
  const int items = tokens * cache.kv_heads * parts_of(args.heads, cache.kv_heads);
  const DecodeParams p =
      decode_params(args, heads, first, tokens, log_cluster_of(items, launch.sms));

  const bool plain = cache.window == 0 && !args.sinks;
  const DecodeKernel one = one_kernel(p);
  const DecodeKernel kernel = one ? one : plain ? plain_kernel(cache) : window_kernel(cache);
  const std::size_t extra = one ? one_extra_bytes(cache.key_dim) : 0;
  const auto blocks = static_cast<unsigned>(items) << p.log_cluster;
  launch_grid(launch, "attend", kernel,
              Grid{.blocks = dim3(blocks),
                   .threads = dim3(kItemThreads),
                   .shared_bytes = item_memory_bytes(p) + fresh_bytes(p) + extra,
                   .cluster = 1U << p.log_cluster},
              p);
}

}  // namespace

void check_attention_shape(const LayerCacheView& cache, int heads) {
  const auto fits = [](int dim) { return dim > 0 && dim % 8 == 0 && dim <= kMaxHeadDim; };
  if (!fits(cache.key_dim) || !fits(cache.value_dim)) {
    throw Error(ErrorCode::kUnsupported, "attention: heads of " + std::to_string(cache.key_dim) +
                                             " and " + std::to_string(cache.value_dim) +
                                             " (the CUDA kernels take multiples of 8 up to 256)");
  }
  if (cache.kv_heads > 0 && heads % cache.kv_heads != 0) {
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
  const FinishKernel kernel = args.cache.holds == CacheHolds::kTokens
                                  ? finish_kernel_of<true>(args.cache.dtype, dim)
                                  : finish_kernel_of<false>(args.cache.dtype, dim);
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
  Launch next = launch;
  if (heads && row_bytes(args.cache.dtype, 1) == 1) {
    // The scale of a head is known when all of it is.
    finish_heads(*heads, launch);
    heads = nullptr;
    next.dependent = launch.dependent_inside;
  }
  for (int first = 0; first < args.tokens; first += kDecodeTokens) {
    attend_from(args, heads, first, next);
  }
}

}  // namespace pianola::cuda
