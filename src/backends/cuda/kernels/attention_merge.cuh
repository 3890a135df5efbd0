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
  for (int i = thread_index(); i < item.heads * p.attention.cache.value_dim / 4;
       i += kItemThreads) {
    out[i] = make_float4(0, 0, 0, 0);
  }
}

__device__ __forceinline__ void add_scaled(float4& sum, float4 v, float scale) {
  sum.x = __fmaf_rn(v.x, scale, sum.x);
  sum.y = __fmaf_rn(v.y, scale, sum.y);
  sum.z = __fmaf_rn(v.z, scale, sum.z);
  sum.w = __fmaf_rn(v.w, scale, sum.w);
}

__device__ __forceinline__ void add_to(float4& sum, float4 v) {
  sum.x = __fadd_rn(sum.x, v.x);
  sum.y = __fadd_rn(sum.y, v.y);
  sum.z = __fadd_rn(sum.z, v.z);
  sum.w = __fadd_rn(sum.w, v.w);
}

// A column of the result, of this head; stored if `real`.
template <bool kPlain>
__device__ __forceinline__ void store_column(const DecodeParams& p, const Item& item, int head,
                                             float4* to, float4 sum, float2 score, bool real) {
  const float* sinks = kPlain ? nullptr : p.attention.sinks;
  const float inverse = 1.0F / with_sink(sinks, item.head + head, score.x, score.y);
  sum = make_float4(sum.x * inverse, sum.y * inverse, sum.z * inverse, sum.w * inverse);
  if (real) *to = sum;
}

// Largest score of a head over the warps, and the factor of each warp's sums.
__device__ __forceinline__ float2 merge_scores(const WarpSums& sums, int head,
                                               float (&factor)[kItemWarps]) {
  float2 score[kItemWarps];
  float most = kNoScore;
#pragma unroll
  for (int w = 0; w < kItemWarps; ++w) {
    score[w] = sums.score[w * kItemHeads + head];
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

// Adds the warps' results in order, once all have theirs in `sums`. The only rank's are the result;
// others are sent to those that add them. Without `real` nothing leaves the team.
template <bool kPlain, typename T>
__device__ __forceinline__ void end_rank(const DecodeParams& p, const Item& item, float4* out,
                                         int value_dim, const ItemMemory<T>& memory,
                                         const WarpSums& sums, int rank, bool real = true) {
  const int tid = thread_index();
  const int columns = value_dim / 4;  // of a head
  __syncthreads();
  float factor[kItemWarps];
  if (item.ranks > 1) {
    // The last threads: the first ones have columns to send.
    static_assert(kItemThreads == kItemHeads * kMostRanks);
    const int target = (kItemThreads - 1 - tid) / kItemHeads;
    const int head = tid % kItemHeads;
    if (target < item.targets && head < item.heads) {
      const float2 score = merge_scores(sums, head, factor);
      if (real) {
        give_part(item, memory, memory.part_score + head * kMostRanks + rank, score, target);
      }
    }
  }
#pragma unroll 1
  for (int i = tid; i < item.heads * columns; i += kItemThreads) {
    const int head = i / columns;
    const int column = i - head * columns;
    const float2 score = merge_scores(sums, head, factor);
    float4 sum = {};
#pragma unroll
    for (int w = 0; w < kItemWarps; ++w) {
      const float* row = sums.merge + (w * memory.heads + head) * (value_dim + kMergePad);
      add_scaled(sum, reinterpret_cast<const float4*>(row)[column], factor[w]);
    }
    if (item.ranks > 1) {
      const int target = i >> item.log_slice;
      const int place = (i & ((1 << item.log_slice) - 1)) * item.ranks + rank;
      if (real) {
        give_part(item, memory, memory.part + place, sum, target);
      }
    } else {
      store_column<kPlain>(p, item, head, out + i, sum, score, real);
    }
  }
}

// Adds the ranks' parts of this team's columns: four lanes a column, with the ranks lane, lane + 4,
// lane + 8 and lane + 12 each. The sums are those of a tree whose lower half is rank + 8.
template <bool kPlain, typename T>
__device__ __forceinline__ void add_parts(const DecodeParams& p, const Item& item, float4* out,
                                          int value_dim, const ItemMemory<T>& memory,
                                          bool real = true) {
  if (item.ranks == 1 || item.team >= item.targets) return;
  constexpr int kLanes = 4;
  constexpr int kEach = kMostRanks / kLanes;
  const int tid = thread_index();
  const int lane = tid % kLanes;
  const int columns = value_dim / 4;
  const int first = item.team << item.log_slice;
  const int mine = min(1 << item.log_slice, item.heads * columns - first);
  if (real) wait_for_parts(item, memory);
#pragma unroll 1
  for (int base = tid / 32 * (32 / kLanes); base < mine; base += kItemThreads / kLanes) {
    const int local = base + tid % 32 / kLanes;
    const int head = (first + min(local, mine - 1)) / columns;
    float2 score[kEach];
    float4 sum[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int rank = lane + i * kLanes;
      const bool there = local < mine && rank < item.ranks;
      score[i] = there ? memory.part_score[head * kMostRanks + rank] : make_float2(kNoScore, 0);
      sum[i] = there ? memory.part[local * item.ranks + rank] : make_float4(0, 0, 0, 0);
    }
    float most = fmaxf(fmaxf(score[0].x, score[1].x), fmaxf(score[2].x, score[3].x));
#pragma unroll
    for (int offset = kLanes / 2; offset; offset >>= 1) {
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, offset));
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const float factor = exp2_approx(score[i].x - most);
      score[i].y = __fmul_rn(score[i].y, factor);
      sum[i] = make_float4(__fmul_rn(sum[i].x, factor), __fmul_rn(sum[i].y, factor),
                           __fmul_rn(sum[i].z, factor), __fmul_rn(sum[i].w, factor));
    }
#pragma unroll
    for (int half = kEach / 2; half; half >>= 1) {
#pragma unroll
      for (int i = 0; i < half; ++i) {
        score[i].y = __fadd_rn(score[i].y, score[i + half].y);
        add_to(sum[i], sum[i + half]);
      }
    }
    float total = score[0].y;
#pragma unroll
    for (int offset = kLanes / 2; offset; offset >>= 1) {
      total = __fadd_rn(total, __shfl_xor_sync(kAllLanes, total, offset));
      add_to(sum[0], make_float4(__shfl_xor_sync(kAllLanes, sum[0].x, offset),
                                 __shfl_xor_sync(kAllLanes, sum[0].y, offset),
                                 __shfl_xor_sync(kAllLanes, sum[0].z, offset),
                                 __shfl_xor_sync(kAllLanes, sum[0].w, offset)));
    }
    if (local < mine && lane == 0) {
      store_column<kPlain>(p, item, head, out + first + local, sum[0], make_float2(most, total),
                           real);
    }
  }
}

}  // namespace pianola::cuda
