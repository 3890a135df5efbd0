// An item of attend() with plain f32 arithmetic: f32 and 8-bit caches, and heads of more than 128
// that are not of 256.
#pragma once

#include "backends/cuda/kernels/attention_merge.cuh"

namespace pianola::cuda {

// Two neighbours of a cached row, `offset` elements from `row`, from shared or device memory.
template <typename T>
__device__ __forceinline__ typename PairOf<T>::Type load_pair(const T* row, int offset,
                                                              bool shared) {
  const auto* pair = reinterpret_cast<const typename PairOf<T>::Type*>(row + offset);
  return shared ? *pair : __ldcg(pair);
}

// An item in f32. A warp takes kPositions positions of a block at a time; a lane holds dims
// 2 lane + 64 i and the next.
template <typename T, int N, bool kPlain>
struct GeneralItem {
  using Pair = typename PairOf<T>::Type;
  static constexpr int kPositions = 8 / N;

  const DecodeParams& p;
  const Item& item;
  const Fresh& fresh;
  const ItemMemory<T>& memory;
  const Span<kPlain>& span;

  struct Sums {
    float2 sums[kItemHeads][N];
    float most[kItemHeads];
    float total[kItemHeads];
  };

  template <typename Wait>
  __device__ __forceinline__ void run(const Tables& tables, const Wait& wait) const {
    HeadConstants<N> constants;
    if (kFuses<T> && p.fused) {
      constants.load(p);
      place_fresh(tables, fresh, memory);
      constants.turns =
          make_turns<N>(constants.frequencies, item.position, p.heads.attention_factor);
    }
    wait();
    prepare_item<T, N>(p, item, tables, fresh, memory, constants);
    const LayerCacheView& cache = p.attention.cache;
    const int lane = thread_index() & 31;
    const int warp = thread_index() / 32;
    float2 q[kItemHeads][N];
#pragma unroll
    for (int h = 0; h < kItemHeads; ++h) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const int d = 2 * lane + 64 * i;
        q[h][i] = make_float2(0, 0);
        if (h < item.heads && d < cache.key_dim) {
          q[h][i] =
              *reinterpret_cast<const float2*>(memory.q + h * (cache.key_dim + kMergePad) + d);
        }
      }
    }
    for (int rank = item.team; rank < item.ranks; rank += item.teams) {
      Sums s;
#pragma unroll
      for (int h = 0; h < kItemHeads; ++h) {
        s.most[h] = kNoScore;
        s.total[h] = 0;
#pragma unroll
        for (int i = 0; i < N; ++i) s.sums[h][i] = make_float2(0, 0);
      }
      for (int block = span.first() + rank; block < item.blocks; block += item.ranks) {
        const int end = min((block + 1) * kCacheBlock, item.end);
        const int moved = (span.place(block) - block) * kCacheBlock;
        for (int base = block * kCacheBlock + warp * kPositions; base < end;
             base += kItemWarps * kPositions) {
          if (!kPlain && base + kPositions <= span.begin) continue;
          add_positions(s, q, base, end, moved);
        }
      }
#pragma unroll
      for (int h = 0; h < kItemHeads; ++h) {
        if (h >= item.heads) break;
        const int place = warp * kItemHeads + h;
        if (lane == 0) memory.sums.score[place] = make_float2(s.most[h], s.total[h]);
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const int d = 2 * lane + 64 * i;
          if (d >= cache.value_dim) continue;
          float* row =
              memory.sums.merge + (warp * memory.heads + h) * (cache.value_dim + kMergePad);
          *reinterpret_cast<float2*>(row + d) = s.sums[h][i];
        }
      }
      end_rank<kPlain>(p, *memory.item, item_out(p, *memory.item), cache.value_dim, memory,
                       memory.sums, rank);
      __syncthreads();  // the warps' results have been read
    }
    store_fresh<kPlain>(p, fresh, memory);
    add_parts<kPlain>(p, *memory.item, item_out(p, *memory.item), cache.value_dim, memory);
  }

  // Positions from `base` on, below `end`; `position` lies where position + moved does.
  __device__ __forceinline__ void add_positions(Sums& s, const float2 (&q)[kItemHeads][N], int base,
                                                int end, int moved) const {
    const LayerCacheView& cache = p.attention.cache;
    const int lane = thread_index() & 31;
    const float scale = p.attention.scale * kLog2e;
    Pair k[kPositions][N];
    Pair v[kPositions][N];
    float k_scale[kPositions];
    float v_scale[kPositions];
#pragma unroll
    for (int u = 0; u < kPositions; ++u) {
      const int position = base + u;
      const int place = position >= fresh.low ? fresh_place(memory, fresh, position) : -1;
      const bool inside = position < end && (kPlain || position >= span.begin);
      const int at = position + moved;
      k_scale[u] = v_scale[u] = 1;
      if constexpr (kScaled<T>) {
        const std::size_t scale_at = cache_offset(at, item.kv_head, cache.kv_heads, 1);
        k_scale[u] = inside ? __ldcg(key_scales(cache, item.row) + scale_at) : 0.0F;
        v_scale[u] = inside ? __ldcg(value_scales(cache, item.row) + scale_at) : 0.0F;
      }
      const T* key = place >= 0 ? memory.k + place * cache.key_dim
                                : key_slot<T>(cache, item.row) +
                                      cache_offset(at, item.kv_head, cache.kv_heads, cache.key_dim);
      const T* value = place >= 0
                           ? memory.v + place * cache.value_dim
                           : value_slot<T>(cache, item.row) +
                                 cache_offset(at, item.kv_head, cache.kv_heads, cache.value_dim);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const int d = 2 * lane + 64 * i;
        k[u][i] = Pair();
        v[u][i] = Pair();
        if (inside && d < cache.key_dim) k[u][i] = load_pair(key, d, place >= 0);
        if (inside && d < cache.value_dim) v[u][i] = load_pair(value, d, place >= 0);
      }
    }
#pragma unroll
    for (int h = 0; h < kItemHeads; ++h) {
      if (h >= item.heads) break;
      float scores[kPositions];
      float best = s.most[h];
#pragma unroll
      for (int u = 0; u < kPositions; ++u) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const float2 pair = unpack<T>(k[u][i]);
          sum = fmaf(q[h][i].x, pair.x, sum);
          sum = fmaf(q[h][i].y, pair.y, sum);
        }
        const bool inside = base + u < end && (kPlain || base + u >= span.begin);
        const float scale_of = kScaled<T> ? __fmul_rn(scale, k_scale[u]) : scale;
        scores[u] = inside ? warp_sum(sum) * scale_of : -INFINITY;
        best = fmaxf(best, scores[u]);
      }
      const float factor = exp2_approx(s.most[h] - best);
      s.most[h] = best;
      s.total[h] *= factor;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        s.sums[h][i].x *= factor;
        s.sums[h][i].y *= factor;
      }
#pragma unroll
      for (int u = 0; u < kPositions; ++u) {
        const float weight = exp2_approx(scores[u] - best);
        s.total[h] += weight;
        const float factor_of = kScaled<T> ? __fmul_rn(weight, v_scale[u]) : weight;
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const float2 pair = unpack<T>(v[u][i]);
          s.sums[h][i].x = fmaf(factor_of, pair.x, s.sums[h][i].x);
          s.sums[h][i].y = fmaf(factor_of, pair.y, s.sums[h][i].y);
        }
      }
    }
  }
};

}  // namespace pianola::cuda
