// What the host tells a launch of attend(): the parameters of its kernels.
#pragma once

#include <algorithm>

#include "backends/cuda/kernels/attention.h"
#include "backends/cuda/kernels/linear.h"

namespace pianola::cuda {

inline constexpr int kItemThreads = 128;  // of a team
inline constexpr int kItemWarps = kItemThreads / 32;
inline constexpr int kItemHeads = 8;  // of one group that an item serves
inline constexpr int kMergePad = 4;   // floats after a row of shared memory, against bank conflicts
inline constexpr int kMostRanks = 16;

// What attend() needs of AttentionArgs and HeadsArgs, each thing once: the first read of every 64
// bytes of a kernel's parameters costs as much as one of memory.
struct alignas(16) DecodeParams {
  struct StepTables {
    const StepCounts* counts = nullptr;
    const std::int32_t* position = nullptr;
    const std::int32_t* lane_of = nullptr;
    const std::int32_t* row_of = nullptr;
  };
  struct Attention {
    StepTables state;
    LayerCacheView cache;
    const float* q = nullptr;
    float* out = nullptr;
    const float* sinks = nullptr;
    int heads = 0;
    float scale = 1;
  };
  struct Heads {
    const float* q = nullptr;
    const float* k = nullptr;
    const float* v = nullptr;
    const float* q_norm = nullptr;
    const float* k_norm = nullptr;
    const float* inverse_frequencies = nullptr;
    float q_norm_eps = 0;
    float k_norm_eps = 0;
    float attention_factor = 1;
    int turned = 0;
    RopeStyle style = RopeStyle::kHalf;
  };
  Attention attention;
  Heads heads;
  bool fused = false;   // heads are to be finished here
  int first = 0;        // first token of the launch
  int tokens = 1;       // of the launch, <= kDecodeTokens
  int group = 1;        // heads of a kv head
  int parts = 1;        // of a group, kItemHeads heads each
  int log_cluster = 0;  // teams of an item, at most kMostRanks
  int part_floats = 0;  // of ItemMemory::part
};

// Heads of an item, at most.
__host__ __device__ inline int group_heads(const DecodeParams& p) {
  return p.group < kItemHeads ? p.group : kItemHeads;
}

// Columns (of four floats) of an item that one team adds up, when `active` share them: the least
// power of two that is enough.
__host__ __device__ inline int log_slice(int columns, int active) {
#ifdef __CUDA_ARCH__
  const int log = max(__clz(active) - __clz(columns), 0);
  return active << log < columns ? log + 1 : log;
#else
  int log = 0;
  while (active << log < columns) ++log;
  return log;
#endif
}

inline int parts_of(int heads, int kv_heads) {
  return (heads / kv_heads + kItemHeads - 1) / kItemHeads;
}

// Floats of ItemMemory::part: a column for each rank of a team's slice.
inline int part_floats(int columns, int teams) {
  int most = 0;
  for (int ranks = 2; ranks <= kMostRanks; ++ranks) {
    most = std::max(most, ranks << log_slice(columns, std::min(ranks, teams)));
  }
  return 4 * most;
}

// The tokens first..first + tokens - 1 of the bucket, each of their items on 1 << log_cluster
// teams.
inline DecodeParams decode_params(const AttentionArgs& args, const HeadsArgs* heads, int first,
                                  int tokens, int log_cluster) {
  const LayerCacheView& cache = args.cache;
  DecodeParams p;
  p.attention = {.state = {.counts = args.state.counts,
                           .position = args.state.position,
                           .lane_of = args.state.lane_of,
                           .row_of = args.state.row_of},
                 .cache = cache,
                 .q = args.q,
                 .out = args.out,
                 .sinks = args.sinks,
                 .heads = args.heads,
                 .scale = args.scale};
  if (heads) {
    p.heads = {.q = heads->q,
               .k = heads->k,
               .v = heads->v,
               .q_norm = heads->q_norm,
               .k_norm = heads->k_norm,
               .inverse_frequencies = heads->inverse_frequencies,
               .q_norm_eps = heads->q_norm_eps,
               .k_norm_eps = heads->k_norm_eps,
               .attention_factor = heads->attention_factor,
               .turned = heads->turned,
               .style = heads->style};
  }
  p.fused = heads != nullptr;
  p.first = first;
  p.tokens = tokens;
  p.group = args.heads / cache.kv_heads;
  p.parts = parts_of(args.heads, cache.kv_heads);
  p.log_cluster = log_cluster;
  p.part_floats = part_floats(group_heads(p) * (cache.value_dim / 4), 1 << log_cluster);
  return p;
}

}  // namespace pianola::cuda
