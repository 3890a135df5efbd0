// An item of attend() on tensor cores: 16-bit caches with heads of up to 128, and of 256.
//
// Keys and values go from memory to registers in the order in which the tensor cores want them (the
// order of a sum's terms is free, so a lane takes 16 bytes of a key as the terms of four products),
// and q and the weights are split into two 16-bit parts.
#pragma once

#include "backends/cuda/kernels/attention_merge.cuh"

namespace pianola::cuda {

// Transposes an 8 x 8 matrix of 16-bit elements, two neighbours of row lane / 4 a lane.
__device__ __forceinline__ std::uint32_t transpose(std::uint32_t v) {
  std::uint32_t t;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(t) : "r"(v));
  return t;
}

__device__ __forceinline__ std::uint32_t word(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

__device__ __forceinline__ uint4 as_uint4(const std::uint32_t (&v)[4]) {
  return make_uint4(v[0], v[1], v[2], v[3]);
}

// A team's way through its ranks: the first of a round's blocks of positions, which lie
// `ranks` blocks apart.
struct Walk {
  int rank;
  int block;  // Item::blocks at the end

  // Whether that was the rank's last round. `first` is the span's first block.
  __device__ __forceinline__ bool next(const Item& item, int first, int step) {
    block += step * item.ranks;
    if (block < item.blocks) return false;
    rank += item.teams;
    block = rank < item.ranks ? first + rank : item.blocks;
    return true;
  }
};

// Blocks that a warp takes at a time, which is part of the order of sums.
__host__ __device__ constexpr int tiles_of(int dim) { return dim <= 64 ? 2 : 1; }

// An item on tensor cores. A warp takes 16 of a block's positions, kTiles blocks at a time. With
// lane = 4 r + j, scores^T [16 positions, 8 heads] = K q^T: the lane holds dims 32 s + 8 j + 0..7
// of keys r and r + 8, which are terms 2j, 2j+1, 2j+8, 2j+9 of products 2s and 2s + 1. sums^T
// [dims, 8 heads] += V^T weights^T: the lane holds dims 64 s + 8 r + 0..7 of values 2j, 2j+1, 2j+8,
// 2j+9; dims 8 r + 2i and 8 r + 2i + 1 are rows r and r + 8 of product i.
template <typename T, int kKeySteps, int kValueSteps, bool kExact, int kTiles, bool kPlain>
struct TensorItem {
  static constexpr int kAhead = 3;  // rounds fetched into the second-level cache
  static constexpr int kPairs = kKeySteps > 2 * kValueSteps ? kKeySteps / 2 : kValueSteps;
  // Keys, values and sums of wide heads leave no registers for q.
  static constexpr bool kWide = kKeySteps > 4;
  static constexpr int kChains = kWide ? 2 : 1;  // of products that wait for each other
  static_assert(kExact || !kWide);

  const DecodeParams& p;
  const Item& item;
  const Fresh& fresh;
  const ItemMemory<T>& memory;
  const Span<kPlain>& span;
  const T* keys;    // of the kv head
  const T* values;  // of the kv head
  int key_dim;
  int value_dim;
  int r;
  int j;

  __device__ __forceinline__ TensorItem(const DecodeParams& params, const Item& of,
                                        const Fresh& with, const ItemMemory<T>& in,
                                        const Span<kPlain>& over)
      : p(params), item(of), fresh(with), memory(in), span(over) {
    const LayerCacheView& cache = p.attention.cache;
    key_dim = kExact ? 32 * kKeySteps : cache.key_dim;
    value_dim = kExact ? 64 * kValueSteps : cache.value_dim;
    keys = key_slot<T>(cache, item.row) + item.kv_head * kCacheBlock * key_dim;
    values = value_slot<T>(cache, item.row) + item.kv_head * kCacheBlock * value_dim;
    r = (thread_index() & 31) >> 2;
    j = thread_index() & 3;
  }

  // First position of this warp's tile of a block, and where its rows lie.
  __device__ __forceinline__ int tile_base(int block) const {
    return block * kCacheBlock + thread_index() / 32 * 16;
  }
  __device__ __forceinline__ std::size_t tile_row(int block) const {
    return static_cast<std::size_t>(span.place(block)) *
               (p.attention.cache.kv_heads * kCacheBlock) +
           thread_index() / 32 * 16;
  }
  // Row of a head's cache where a position lies.
  __device__ __forceinline__ std::size_t position_row(int position) const {
    return cache_offset(span.place_of(position), 0, p.attention.cache.kv_heads, 1);
  }
  __device__ __forceinline__ bool key_inside(int s) const {
    return kExact || 32 * s + 8 * j < key_dim;
  }
  __device__ __forceinline__ bool value_inside(int s) const {
    return kExact || 64 * s + 8 * r < value_dim;
  }
  static __device__ __forceinline__ int value_row(int j, int i) {
    return 2 * j + (i & 1) + 4 * (i & 2);
  }

  // Whether rows [least, limit) of a tile are all of it: nearly always, and then no register needs
  // a zero first. Narrow heads have few enough to load.
  static __device__ __forceinline__ bool whole(int limit, int least) {
    return kWide && limit >= 16 && (kPlain || least <= 0);
  }

  __device__ __forceinline__ void load_keys(uint4 (&k)[kKeySteps][2], int block) const {
    const T* tile = keys + tile_row(block) * key_dim;
    const int limit = min(item.end, fresh.low) - tile_base(block);
    const int least = span.begin - tile_base(block);
    if (whole(limit, least)) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int s = 0; s < kKeySteps; ++s) {
          k[s][half] = load_cache(tile + (r + 8 * half) * key_dim + 32 * s + 8 * j);
        }
      }
      return;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = r + 8 * half;
      const bool wanted = row < limit && (kPlain || row >= least);
#pragma unroll
      for (int s = 0; s < kKeySteps; ++s) {
        k[s][half] = load_cache_if(tile + row * key_dim + 32 * s + 8 * j, wanted && key_inside(s));
      }
    }
  }
  __device__ __forceinline__ void load_values(uint4 (&v)[kValueSteps][4], int block) const {
    const T* tile = values + tile_row(block) * value_dim;
    const int limit = min(item.end, fresh.low) - tile_base(block);
    const int least = span.begin - tile_base(block);
    if (whole(limit, least)) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int s = 0; s < kValueSteps; ++s) {
          v[s][i] = load_cache(tile + value_row(j, i) * value_dim + 64 * s + 8 * r);
        }
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = value_row(j, i);
      const bool wanted = row < limit && (kPlain || row >= least);
#pragma unroll
      for (int s = 0; s < kValueSteps; ++s) {
        v[s][i] = load_cache_if(tile + row * value_dim + 64 * s + 8 * r, wanted && value_inside(s));
      }
    }
  }
  // Brings this warp's tile of a block to the second-level cache; no position is touched that does
  // not exist, as its memory may not either.
  __device__ __forceinline__ void fetch(int block) const {
    fetch(block, keys, key_dim);
    fetch(block, values, value_dim);
  }
  __device__ __forceinline__ void fetch(int block, const T* of, int dim) const {
    if (block >= item.blocks) return;
    const int bytes = min(item.end - tile_base(block), 16) * dim * static_cast<int>(sizeof(T));
    const auto* tile = reinterpret_cast<const char*>(of + tile_row(block) * dim);
#pragma unroll 1
    for (int i = (thread_index() & 31) * 128; i < bytes; i += 32 * 128) prefetch(tile + i);
  }
  // What load_keys() left out: positions of the span from fresh.low on.
  __device__ __forceinline__ bool left_out(int position) const {
    return position >= fresh.low && position < item.end && (kPlain || position >= span.begin);
  }
  __device__ __forceinline__ void add_fresh_keys(uint4 (&k)[kKeySteps][2], int base) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int position = base + r + 8 * half;
      if (!left_out(position)) continue;
      const int place = fresh_place(memory, fresh, position);
#pragma unroll
      for (int s = 0; s < kKeySteps; ++s) {
        if (!key_inside(s)) continue;
        const int d = 32 * s + 8 * j;
        if (place >= 0) {
          k[s][half] = *reinterpret_cast<const uint4*>(memory.k + place * key_dim + d);
        } else {
          k[s][half] = load_cache_if(keys + position_row(position) * key_dim + d, true);
        }
      }
    }
  }
  __device__ __forceinline__ void add_fresh_values(uint4 (&v)[kValueSteps][4], int base) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int position = base + value_row(j, i);
      if (!left_out(position)) continue;
      const int place = fresh_place(memory, fresh, position);
#pragma unroll
      for (int s = 0; s < kValueSteps; ++s) {
        if (!value_inside(s)) continue;
        const int d = 64 * s + 8 * r;
        if (place >= 0) {
          v[s][i] = *reinterpret_cast<const uint4*>(memory.v + place * value_dim + d);
        } else {
          v[s][i] = load_cache_if(values + position_row(position) * value_dim + d, true);
        }
      }
    }
  }

  // Dims 32 s + 8 j + 0..7 of head r, the terms of products 2s and 2s + 1.
  struct QueryStep {
    std::uint32_t high[4];
    std::uint32_t low[4];
  };
  struct Query {
    QueryStep step[kWide ? 1 : kKeySteps];
    const uint4* high;  // of wide heads
    const uint4* low;
  };
  __device__ __forceinline__ QueryStep split_query(int s) const {
    const float* q = memory.q + r * (key_dim + kMergePad) + 32 * s + 8 * j;
    QueryStep step;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      float4 v = {};
      if (r < item.heads && key_inside(s)) v = *reinterpret_cast<const float4*>(q + 2 * i);
      const SplitPair a = split<T>(v.x, v.y);
      const SplitPair b = split<T>(v.z, v.w);
      step.high[i] = a.high;
      step.low[i] = a.low;
      step.high[i + 1] = b.high;
      step.low[i + 1] = b.low;
    }
    return step;
  }
  // The parts of wide heads take the place of q in shared memory: [head, step, 2, j] of 16 bytes,
  // the high part first in even heads and the low one in odd heads, so that a quarter of a warp
  // reads all banks. A head that there is not reads the last one's.
  __device__ __forceinline__ Query load_query() const {
    Query query;
    if constexpr (kWide) {
      constexpr int kEach = kKeySteps / kItemWarps;
      const int first = thread_index() / 32 * kEach;
      QueryStep step[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) step[i] = split_query(first + i);
      __syncthreads();  // all of q has been read
      const int head = min(r, item.heads - 1);
      uint4* parts = reinterpret_cast<uint4*>(memory.q) + head * kKeySteps * 8 + j;
      uint4* high = parts + 4 * (head & 1);
      uint4* low = parts + 4 - 4 * (head & 1);
      if (r == head) {
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          high[8 * (first + i)] = as_uint4(step[i].high);
          low[8 * (first + i)] = as_uint4(step[i].low);
        }
      }
      __syncthreads();
      query.high = high;
      query.low = low;
    } else {
#pragma unroll
      for (int s = 0; s < kKeySteps; ++s) query.step[s] = split_query(s);
    }
    return query;
  }
  static __device__ __forceinline__ QueryStep query_step(const Query& query, int s) {
    if constexpr (kWide) {
      const uint4 high = query.high[8 * s];
      const uint4 low = query.low[8 * s];
      return {{high.x, high.y, high.z, high.w}, {low.x, low.y, low.z, low.w}};
    } else {
      return query.step[s];
    }
  }

  // Several sums, so that products of the high and low parts of q do not wait for each other.
  static __device__ __forceinline__ void multiply_keys(float (&scores)[4],
                                                       const uint4 (&k)[kKeySteps][2],
                                                       const Query& query) {
    float high[kChains][4] = {};
    float low[kChains][4] = {};
#pragma unroll
    for (int s = 0; s < kKeySteps; ++s) {
      const QueryStep q = query_step(query, s);
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const std::uint32_t a[4] = {word(k[s][0], i), word(k[s][1], i), word(k[s][0], i + 1),
                                    word(k[s][1], i + 1)};
        mma<T>(high[i / 2 % kChains], a, q.high[i], q.high[i + 1]);
        mma<T>(low[i / 2 % kChains], a, q.low[i], q.low[i + 1]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scores[i] = high[0][i] + low[0][i];
#pragma unroll
      for (int chain = 1; chain < kChains; ++chain) scores[i] += high[chain][i] + low[chain][i];
    }
  }
  // The sums so far, to the largest of this lane's scores and those of the warp's other lanes.
  static __device__ __forceinline__ void rescale(float (&best)[2], float (&most)[2],
                                                 float (&total)[2],
                                                 float (&sums)[kValueSteps][4][4]) {
    float factor[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int offset = 4; offset < 32; offset <<= 1) {
        best[i] = fmaxf(best[i], __shfl_xor_sync(kAllLanes, best[i], offset));
      }
      factor[i] = exp2_approx(most[i] - best[i]);
      most[i] = best[i];
      total[i] = __fmul_rn(total[i], factor[i]);
    }
#pragma unroll
    for (int s = 0; s < kValueSteps; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int c = 0; c < 4; ++c) sums[s][i][c] *= factor[c & 1];
      }
    }
  }
  // Of positions 2j, 2j + 1 and 2j + 8, 2j + 9, for head r.
  struct Weights {
    SplitPair first;
    SplitPair second;
  };
  static __device__ __forceinline__ Weights weigh(const float (&scores)[4], const float (&most)[2],
                                                  float (&total)[2]) {
    float w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      w[i] = exp2_approx(scores[i] - most[i & 1]);
      total[i & 1] = __fadd_rn(total[i & 1], w[i]);
    }
    const SplitPair first = split<T>(w[0], w[1]);
    const SplitPair second = split<T>(w[2], w[3]);
    return {{transpose(first.high), transpose(first.low)},
            {transpose(second.high), transpose(second.low)}};
  }
  static __device__ __forceinline__ void add_values(float (&sums)[kValueSteps][4][4],
                                                    const uint4 (&v)[kValueSteps][4],
                                                    const Weights& w) {
#pragma unroll
    for (int s = 0; s < kValueSteps; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const std::uint32_t a[4] = {__byte_perm(word(v[s][0], i), word(v[s][1], i), 0x5410),
                                    __byte_perm(word(v[s][0], i), word(v[s][1], i), 0x7632),
                                    __byte_perm(word(v[s][2], i), word(v[s][3], i), 0x5410),
                                    __byte_perm(word(v[s][2], i), word(v[s][3], i), 0x7632)};
        mma<T>(sums[s][i], a, w.first.high, w.second.high);
        mma<T>(sums[s][i], a, w.first.low, w.second.low);
      }
    }
  }

  // wait() returns when all teams of the item have started and q, k and v are there.
  template <typename Wait>
  __device__ __forceinline__ void run(const Tables& tables, const Wait& wait) const {
    uint4 k[kTiles][kKeySteps][2];
    uint4 v[kTiles][kValueSteps][4];
    Walk at{item.team, span.first() + item.team};
    HeadConstants<kPairs> constants;
    if (p.fused) {
      // Positions before the step: no kernel that may still run writes them.
      load_first(k, v, at);
      if constexpr (kWide) fetch(at.block, values, value_dim);
      constants.load(p);
      place_fresh(tables, fresh, memory);
    }
    for (int ahead = p.fused ? 1 : 0; ahead < kAhead; ++ahead) {
#pragma unroll
      for (int u = 0; u < kTiles; ++u) fetch(at.block + (ahead * kTiles + u) * item.ranks);
    }
    if (p.fused) {
      constants.turns =
          make_turns<kPairs>(constants.frequencies, item.position, p.heads.attention_factor);
    }
    wait();
    if (!p.fused) load_first(k, v, at);
    prepare_item<T, kPairs>(p, item, tables, fresh, memory, constants);
    if constexpr (kWide) load_first_values(v, at);  // before, heads need the registers
    const Query query = load_query();

    const float scale = p.attention.scale * kLog2e;
    float sums[kValueSteps][4][4] = {};
    float most[2] = {kNoScore, kNoScore};  // of heads 2j and 2j + 1
    float total[2] = {0, 0};               // of this lane's positions
#pragma unroll 1
    for (;;) {
      Walk next = at;
      const bool last = next.next(item, span.first(), kTiles);
#pragma unroll
      for (int u = 0; u < kTiles; ++u) fetch(at.block + (kAhead * kTiles + u) * item.ranks);
      float scores[kTiles][4];  // (position r, heads 2j and 2j + 1), then position r + 8
      float best[2] = {most[0], most[1]};
#pragma unroll
      for (int u = 0; u < kTiles; ++u) {
        const int base = tile_base(at.block + u * item.ranks);
        if (base < item.end) {
          if (base + 15 >= fresh.low) add_fresh_keys(k[u], base);
          multiply_keys(scores[u], k[u], query);
        }
        load_keys(k[u], next.block + u * item.ranks);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int position = base + r + 4 * (i & 2);
          const bool inside = position < item.end && (kPlain || position >= span.begin);
          scores[u][i] = inside ? __fmul_rn(scores[u][i], scale) : -INFINITY;
          best[i & 1] = fmaxf(best[i & 1], scores[u][i]);
        }
      }
      rescale(best, most, total, sums);
#pragma unroll
      for (int u = 0; u < kTiles; ++u) {
        const int base = tile_base(at.block + u * item.ranks);
        if (base < item.end) {
          const Weights w = weigh(scores[u], most, total);
          if (base + 15 >= fresh.low) add_fresh_values(v[u], base);
          add_values(sums, v[u], w);
        }
        load_values(v[u], next.block + u * item.ranks);
      }
      if (last) {
        store(sums, most, total);
        end_rank<kPlain>(p, *memory.item, item_out(p, *memory.item), value_dim, memory, memory.sums,
                         at.rank);
        if (next.block == item.blocks) break;
        __syncthreads();  // the warps' results have been read
#pragma unroll
        for (int s = 0; s < kValueSteps; ++s) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int c = 0; c < 4; ++c) sums[s][i][c] = 0;
          }
        }
        most[0] = most[1] = kNoScore;
        total[0] = total[1] = 0;
      }
      at = next;
    }
    store_fresh<kPlain>(p, fresh, memory);
    add_parts<kPlain>(p, *memory.item, item_out(p, *memory.item), value_dim, memory);
  }

  __device__ __forceinline__ void load_first(uint4 (&k)[kTiles][kKeySteps][2],
                                             uint4 (&v)[kTiles][kValueSteps][4],
                                             const Walk& at) const {
#pragma unroll
    for (int u = 0; u < kTiles; ++u) load_keys(k[u], at.block + u * item.ranks);
    if constexpr (!kWide) load_first_values(v, at);
  }
  __device__ __forceinline__ void load_first_values(uint4 (&v)[kTiles][kValueSteps][4],
                                                    const Walk& at) const {
#pragma unroll
    for (int u = 0; u < kTiles; ++u) load_values(v[u], at.block + u * item.ranks);
  }

  // To where end_rank() adds the warps'.
  __device__ __forceinline__ void store(const float (&sums)[kValueSteps][4][4],
                                        const float (&most)[2], float (&total)[2]) const {
    const int warp = thread_index() / 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int offset = 4; offset < 32; offset <<= 1) {
        total[i] += __shfl_xor_sync(kAllLanes, total[i], offset);
      }
      const int place = warp * kItemHeads + 2 * j + i;
      if (r == 0) memory.sums.score[place] = make_float2(most[i], total[i]);
      if (2 * j + i >= memory.heads) continue;
      float* row = memory.sums.merge + (warp * memory.heads + 2 * j + i) * (value_dim + kMergePad);
#pragma unroll
      for (int s = 0; s < kValueSteps; ++s) {
        if (!value_inside(s)) continue;
        auto* to = reinterpret_cast<float4*>(row + 64 * s + 8 * r);
        to[0] = make_float4(sums[s][0][i], sums[s][0][i + 2], sums[s][1][i], sums[s][1][i + 2]);
        to[1] = make_float4(sums[s][2][i], sums[s][2][i + 2], sums[s][3][i], sums[s][3][i + 2]);
      }
    }
  }
};

}  // namespace pianola::cuda
