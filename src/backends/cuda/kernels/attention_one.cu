// Steps of one token of each lane.
#include "backends/cuda/kernels/attention_one.cuh"

#include <algorithm>
#include <climits>

#include "backends/cuda/kernels/attention_decode.h"

namespace pianola::cuda {
namespace {

using Kernel = void (*)(OneParams);

constexpr std::size_t kSharedOfSm = 228 * 1024;
constexpr std::size_t kSharedOfBlock = 1024;  // that the system takes of each
// Of the rings of a multiprocessor: what is on its way must cover the latency of memory, and what
// the kernels before and after have there is to stay.
constexpr int kRingBytes = 64 * 1024;
constexpr int kLeastStages = 2;  // a round of tiles

template <typename T, int kDim>
Kernel choose(const DecodeParams& p) {
  const bool plain = p.attention.cache.window == 0 && !p.attention.sinks;
  if (p.heads.style == RopeStyle::kHalf) {
    return plain ? attend_one<T, kDim, RopeStyle::kHalf, true>
                 : attend_one<T, kDim, RopeStyle::kHalf, false>;
  }
  const bool normed = p.heads.q_norm || p.heads.k_norm;
  return plain && !normed ? attend_one<T, kDim, RopeStyle::kInterleaved, true> : nullptr;
}

// Teams of an item: as many as the device has room for at once.
int log_cluster_of(int items, int room) {
  int log = 4;
  static_assert(1 << 4 == kMostRanks);
  while (log > 0 && items << log > room) --log;
  return items <= room ? log : 1;  // else two, as tokens of one step may differ much in length
}

// Positions of all heads and slots.
std::int64_t cache_rows(const LayerCacheView& cache) {
  return std::int64_t{cache.slots} * cache.capacity * cache.kv_heads;
}

template <typename T, int kDim>
bool launch_one(const AttentionArgs& args, const HeadsArgs& heads, int first, int tokens,
                const Launch& launch) {
  const LayerCacheView& cache = args.cache;
  const int items = tokens * cache.kv_heads;
  const int log = log_cluster_of(items, one_blocks(kDim) * launch.sms);
  OneParams params = {.maps = {}, .p = decode_params(args, &heads, first, tokens, log)};
  const Kernel kernel = choose<T, kDim>(params.p);
  if (!kernel) return false;

  const int blocks = items << log;
  const int of_sm = std::min((blocks + launch.sms - 1) / launch.sms, one_blocks(kDim));
  const auto bytes = [&] {
    return item_memory_bytes(params.p) +
           std::max(fresh_bytes(params.p),
                    OneMemory<kDim>::bytes(params.stages, group_heads(params.p)));
  };
  params.stages = std::max(kRingBytes / (of_sm * kItemWarps * stage_bytes(kDim)), kLeastStages);
  while (params.stages > kLeastStages && (bytes() + kSharedOfBlock) * of_sm > kSharedOfSm) {
    --params.stages;
  }
  const auto rows = static_cast<int>(cache_rows(cache));
  params.maps = {.keys = boxes_of(cache.keys, rows, kDim * 2, kTileRows, kBoxBytes),
                 .values = boxes_of(cache.values, rows, kDim * 2, kTileRows, kBoxBytes)};
  launch_grid(launch, "attend", kernel,
              Grid{.blocks = dim3(static_cast<unsigned>(blocks)),
                   .threads = dim3(kItemThreads),
                   .shared_bytes = bytes(),
                   .cluster = 1U << log},
              params);
  return true;
}

template <typename T>
bool launch_one(const AttentionArgs& args, const HeadsArgs& heads, int first, int tokens,
                const Launch& launch) {
  return args.cache.key_dim == 64 ? launch_one<T, 64>(args, heads, first, tokens, launch)
                                  : launch_one<T, 128>(args, heads, first, tokens, launch);
}

}  // namespace

bool attend_one_from(const AttentionArgs& args, const HeadsArgs* heads, int first, int tokens,
                     const Launch& launch) {
  const LayerCacheView& cache = args.cache;
  const bool fits = heads && parts_of(args.heads, cache.kv_heads) == 1 &&
                    cache.key_dim == cache.value_dim &&
                    (cache.key_dim == 64 || cache.key_dim == 128) &&
                    heads->turned == cache.key_dim && cache_rows(cache) <= INT_MAX;
  if (!fits) return false;
  if (cache.dtype == DType::kF16) return launch_one<__half>(args, *heads, first, tokens, launch);
  if (cache.dtype == DType::kBF16) {
    return launch_one<__nv_bfloat16>(args, *heads, first, tokens, launch);
  }
  return false;
}

}  // namespace pianola::cuda
