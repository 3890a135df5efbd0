// Steps of several lanes.
#include "backends/cuda/kernels/attention_lanes.cuh"

#include <algorithm>
#include <climits>

#include "backends/cuda/kernels/attention_decode.h"

namespace pianola::cuda {
namespace {

using Kernel = void (*)(LanesParams);

constexpr std::size_t kSharedOfSm = 228 * 1024;
constexpr std::size_t kSharedOfBlock = 1024;  // that the system takes of each
// Of the rings of a multiprocessor: what is on its way must cover the latency of memory, and leave
// the kernels before and after what they have there.
constexpr int kRingBytes = 64 * 1024;
constexpr int kMostLogCluster = 4;

template <typename T, int kDim>
Kernel choose(const HeadsArgs& heads, bool plain) {
  if (heads.style == RopeStyle::kHalf) {
    return plain ? attend_lanes<T, kDim, RopeStyle::kHalf, true>
                 : attend_lanes<T, kDim, RopeStyle::kHalf, false>;
  }
  const bool normed = heads.q_norm || heads.k_norm;
  return plain && !normed ? attend_lanes<T, kDim, RopeStyle::kInterleaved, true> : nullptr;
}

// Positions of all heads and slots.
std::int64_t cache_rows(const LayerCacheView& cache) {
  return std::int64_t{cache.slots} * cache.capacity * cache.kv_heads;
}

template <int kDim>
std::size_t shared_bytes(const LanesParams& params) {
  const std::size_t own =
      LanesMemory<kDim>::bytes(params.stages, group_heads(params.p), params.p.log_cluster);
  return item_memory_bytes(params.p) + std::max(fresh_bytes(params.p), own);
}

// The longest rings with which `blocks` thread blocks fit a multiprocessor; false if none do.
template <int kDim>
bool set_stages(LanesParams& params, int blocks) {
  params.stages = std::max(kRingBytes / (blocks * kItemWarps * stage_bytes(kDim)), tiles_of(kDim));
  const std::size_t most = kSharedOfSm / static_cast<std::size_t>(blocks) - kSharedOfBlock;
  while (shared_bytes<kDim>(params) > most && params.stages > tiles_of(kDim)) --params.stages;
  return shared_bytes<kDim>(params) <= most;
}

Grid grid_of(int items, int log_cluster, std::size_t shared) {
  return {.blocks = dim3(static_cast<unsigned>(items) << log_cluster),
          .threads = dim3(kItemThreads),
          .shared_bytes = shared,
          .cluster = 1U << log_cluster};
}

// An item has as many teams as let all items be on the device at once. Where there are too many
// items, it has two, as tokens of one step may differ much in length.
template <int kDim>
LanesParams plan(const AttentionArgs& args, const HeadsArgs& heads, int first, int tokens,
                 Kernel kernel) {
  const int items = tokens * args.cache.kv_heads;
  LanesParams params;
  static_assert(1 << kMostLogCluster == kMostRanks);
  for (int log = kMostLogCluster; log >= 0; --log) {
    params.p = decode_params(args, &heads, first, tokens, log);
    for (int blocks = 1; blocks <= lanes_blocks(kDim); ++blocks) {
      if (!set_stages<kDim>(params, blocks)) break;
      // As much as lets so many of them, and no more, onto a multiprocessor.
      const std::size_t shared = kSharedOfSm / static_cast<std::size_t>(blocks) - kSharedOfBlock;
      if (clusters_at_once("attend", kernel, grid_of(items, log, shared)) >= items) return params;
    }
  }
  params.p = decode_params(args, &heads, first, tokens, 1);
  int blocks = lanes_blocks(kDim);
  while (!set_stages<kDim>(params, blocks) && blocks > 1) --blocks;
  return params;
}

template <typename T, int kDim>
bool launch_lanes(const AttentionArgs& args, const HeadsArgs& heads, int first, int tokens,
                  const Launch& launch) {
  const LayerCacheView& cache = args.cache;
  const Kernel kernel = choose<T, kDim>(heads, cache.window == 0 && !args.sinks);
  if (!kernel) return false;
  LanesParams params = plan<kDim>(args, heads, first, tokens, kernel);
  const auto rows = static_cast<int>(cache_rows(cache));
  params.maps = {
      .keys = boxes_of(cache.keys, rows, kDim * 2, kTileRows, kBoxBytes, tile_boxes(kDim)),
      .values = boxes_of(cache.values, rows, kDim * 2, kTileRows, kBoxBytes, tile_boxes(kDim))};
  launch_grid(launch, "attend", kernel,
              grid_of(tokens * cache.kv_heads, params.p.log_cluster, shared_bytes<kDim>(params)),
              params);
  return true;
}

template <typename T>
bool launch_lanes(const AttentionArgs& args, const HeadsArgs& heads, int first, int tokens,
                  const Launch& launch) {
  return args.cache.key_dim == 64 ? launch_lanes<T, 64>(args, heads, first, tokens, launch)
                                  : launch_lanes<T, 128>(args, heads, first, tokens, launch);
}

}  // namespace

bool attend_lanes_from(const AttentionArgs& args, const HeadsArgs* heads, int first, int tokens,
                       const Launch& launch) {
  const LayerCacheView& cache = args.cache;
  const bool fits = heads && parts_of(args.heads, cache.kv_heads) == 1 &&
                    cache.key_dim == cache.value_dim &&
                    (cache.key_dim == 64 || cache.key_dim == 128) &&
                    heads->turned == cache.key_dim && cache_rows(cache) <= INT_MAX;
  if (!fits) return false;
  if (cache.dtype == DType::kF16) return launch_lanes<__half>(args, *heads, first, tokens, launch);
  if (cache.dtype == DType::kBF16) {
    return launch_lanes<__nv_bfloat16>(args, *heads, first, tokens, launch);
  }
  return false;
}

}  // namespace pianola::cuda
