// The end of an item of attention_items.cuh: what its warps and its ranks have summed becomes one
// result, in an order fixed by the token's position alone.
#pragma once

#include "backends/cuda/kernels/attention_items.cuh"

namespace pianola::cuda {

// Output of the item, [heads, value_dim].
__device__ __forceinline__ float4* item_out(const DecodeParams& p, const Item& item) {
  const std::size_t row = static_cast<std::size_t>(p.first + item.token) * p.attention.heads;
  return reinterpret_cast<float4*>(p.attention.out +
                                   (row + item.head) * p.attention.cache.value_dim);
}

__device__ __forceinline__ void clear_item(const DecodeParams& p, const Item& item) {
  float4* out = item_out(p, item);
  for (int i = team_thread(); i < item.heads * p.attention.cache.value_dim / 4; i += kItemThreads) {
    out[i] = make_float4(0, 0, 0, 0);
  }
}

__device__ __forceinline__ void add_scaled(float4& sum, float4 v, float scale) {
  sum.x = __fmaf_rn(v.x, scale, sum.x);
  sum.y = __fmaf_rn(v.y, scale, sum.y);
  sum.z = __fmaf_rn(v.z, scale, sum.z);
  sum.w = __fmaf_rn(v.w, scale, sum.w);
}

// Largest score of a head over the warps, and the factor of each warp's sums.
template <typename T>
__device__ __forceinline__ float2 merge_scores(const ItemMemory<T>& memory, int head,
                                               float (&factor)[kItemWarps]) {
  float2 score[kItemWarps];
  float most = kNoScore;
#pragma unroll
  for (int w = 0; w < kItemWarps; ++w) {
    score[w] = memory.score[w * kItemHeads + head];
    most = fmaxf(most, score[w].x);
  }
  float total = 0;
#pragma unroll
  for (int w = 0; w < kItemWarps; ++w) {
    factor[w] = exp2_approx(score[w].x - most);
    total = __fmaf_rn(score[w].y, factor[w], total);
  }
  return make_float2(most, total);
}

// Adds the warps' results, which lie in memory.merge and memory.score, in order. The only rank's
// are the result; others are sent to those that add them.
template <bool kPlain, typename T>
__device__ __forceinline__ void end_rank(const DecodeParams& p, int value_dim,
                                         const ItemMemory<T>& memory, int rank) {
  const Item& item = *memory.item;
  const int heads = item.heads;
  const int ranks = item.ranks;
  const int slice = item.log_slice;
  const int tid = team_thread();
  const int columns = value_dim / 4;  // of a head
  team_sync();
  float factor[kItemWarps];
  if (ranks > 1) {
    // The last threads first: the first ones have columns to send.
    for (int i = kItemThreads - 1 - tid; i < heads * item.targets; i += kItemThreads) {
      const int target = i / heads;
      const int head = i - target * heads;
      const float2 score = merge_scores(memory, head, factor);
      send(memory.peer(shared_offset(memory.part_score + head * kMostRanks + rank), target), score,
           memory.peer_barrier(target));
    }
  }
#pragma unroll 1
  for (int i = tid; i < heads * columns; i += kItemThreads) {
    const int head = i / columns;
    const int column = i - head * columns;
    const float2 score = merge_scores(memory, head, factor);
    float4 sum = {};
#pragma unroll
    for (int w = 0; w < kItemWarps; ++w) {
      const float* row = memory.merge + (w * memory.heads + head) * (value_dim + kMergePad);
      add_scaled(sum, reinterpret_cast<const float4*>(row)[column], factor[w]);
    }
    if (ranks == 1) {
      const float* sinks = kPlain ? nullptr : p.attention.sinks;
      const float inverse = 1.0F / with_sink(sinks, item.head + head, score.x, score.y);
      item_out(p, item)[i] =
          make_float4(sum.x * inverse, sum.y * inverse, sum.z * inverse, sum.w * inverse);
    } else {
      const int target = i >> slice;
      const int place = (i & ((1 << slice) - 1)) * ranks + rank;
      send(memory.peer(shared_offset(memory.part + place), target), sum,
           memory.peer_barrier(target));
    }
  }
}

// Adds the ranks' parts of this team's columns: 16 lanes a column, one rank each.
template <bool kPlain, typename T>
__device__ __forceinline__ void add_parts(const DecodeParams& p, int value_dim,
                                          const ItemMemory<T>& memory) {
  const Item& item = *memory.item;
  if (item.ranks == 1 || item.team >= item.targets) return;
  const int tid = team_thread();
  const int rank = tid & (kMostRanks - 1);
  const int columns = value_dim / 4;
  const int first = item.team << item.log_slice;
  const int mine = min(1 << item.log_slice, item.heads * columns - first);
  wait_for_parts(memory);
  for (int base = tid / 32 * 2; base < mine; base += 2 * kItemWarps) {
    const int local = base + ((tid & 31) >> 4);
    const bool real = local < mine && rank < item.ranks;
    const int head = (first + min(local, mine - 1)) / columns;
    float2 score = make_float2(kNoScore, 0);
    float4 sum = {};
    if (real) {
      score = memory.part_score[head * kMostRanks + rank];
      sum = memory.part[local * item.ranks + rank];
    }
    float most = score.x;
#pragma unroll
    for (int offset = 8; offset; offset >>= 1) {
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, offset));
    }
    const float factor = exp2_approx(score.x - most);
    float total = score.y * factor;
    sum = make_float4(sum.x * factor, sum.y * factor, sum.z * factor, sum.w * factor);
#pragma unroll
    for (int offset = 8; offset; offset >>= 1) {
      total += __shfl_xor_sync(kAllLanes, total, offset);
      sum.x += __shfl_xor_sync(kAllLanes, sum.x, offset);
      sum.y += __shfl_xor_sync(kAllLanes, sum.y, offset);
      sum.z += __shfl_xor_sync(kAllLanes, sum.z, offset);
      sum.w += __shfl_xor_sync(kAllLanes, sum.w, offset);
    }
    if (real && rank == 0) {
      const float* sinks = kPlain ? nullptr : p.attention.sinks;
      const float inverse = 1.0F / with_sink(sinks, item.head + head, most, total);
      item_out(p, item)[first + local] =
          make_float4(sum.x * inverse, sum.y * inverse, sum.z * inverse, sum.w * inverse);
    }
  }
}

}  // namespace pianola::cuda
