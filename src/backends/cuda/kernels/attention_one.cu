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
// Of the rings of a multiprocessor: what is on its way must cover the latency of memory, and leave
// the kernels before and after what they have there.
constexpr int kRingBytes = 64 * 1024;

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

// Positions of all heads and slots.
std::int64_t cache_rows(const LayerCacheView& cache) {
  return std::int64_t{cache.slots} * cache.capacity * cache.kv_heads;
}

template <int kDim>
std::size_t shared_bytes(const OneParams& params) {
  const std::size_t own = OneMemory<kDim>::bytes(params.stages, group_heads(params.p));
  return item_memory_bytes(params.p) + std::max(fresh_bytes(params.p), own);
}

// The longest rings with which `blocks` thread blocks fit a multiprocessor; false if none do.
template <int kDim>
bool set_stages(OneParams& params, int blocks) {
  params.stages = std::max(kRingBytes / (blocks * kItemWarps * stage_bytes(kDim)), tiles_of(kDim));
  const auto fits = [&] {
    return (shared_bytes<kDim>(params) + kSharedOfBlock) * static_cast<std::size_t>(blocks) <=
           kSharedOfSm;
  };
  while (!fits() && params.stages > tiles_of(kDim)) --params.stages;
  return fits();
}

// An item has as many teams as the device has room for at once. Where there are too many items, it
// has two, as tokens of one step may differ much in length.
template <int kDim>
OneParams plan(const AttentionArgs& args, const HeadsArgs& heads, int first, int tokens, int sms) {
  const int items = tokens * args.cache.kv_heads;
  OneParams params;
  static_assert(1 << 4 == kMostRanks);
  for (int log = 4; log >= 0; --log) {
    const int blocks = ((items << log) + sms - 1) / sms;  // of a multiprocessor
    if (blocks > one_blocks(kDim)) continue;
    params.p = decode_params(args, &heads, first, tokens, log);
    if (set_stages<kDim>(params, blocks)) return params;
  }
  params.p = decode_params(args, &heads, first, tokens, 1);
  for (int blocks = one_blocks(kDim); blocks > 0; --blocks) {
    if (set_stages<kDim>(params, blocks)) break;
  }
  return params;
}

template <typename T, int kDim>
bool launch_one(const AttentionArgs& args, const HeadsArgs& heads, int first, int tokens,
                const Launch& launch) {
  const LayerCacheView& cache = args.cache;
  OneParams params = plan<kDim>(args, heads, first, tokens, launch.sms);
  const Kernel kernel = choose<T, kDim>(params.p);
  if (!kernel) return false;
  const auto rows = static_cast<int>(cache_rows(cache));
  params.maps = {.keys = boxes_of(cache.keys, rows, kDim * 2, kTileRows, kBoxBytes),
                 .values = boxes_of(cache.values, rows, kDim * 2, kTileRows, kBoxBytes)};
  const auto blocks = static_cast<unsigned>(tokens * cache.kv_heads) << params.p.log_cluster;
  launch_grid(launch, "attend", kernel,
              Grid{.blocks = dim3(blocks),
                   .threads = dim3(kItemThreads),
                   .shared_bytes = shared_bytes<kDim>(params),
                   .cluster = 1U << params.p.log_cluster},
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
