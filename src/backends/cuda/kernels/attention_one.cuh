// attend() for a step of one token with its heads: 16-bit caches, heads of 64 and of 128 that rope
// turns whole, groups of at most kItemHeads. The sums are those of attention_tensor.cuh, in the
// same order, with the same bits.
//
// Such a step is a chain of short kernels, so what counts is how soon after wait_for_previous()
// this one is done. Whatever the token's q, k and v do not decide is read, computed and addressed
// before; then every lane takes its part of q right as an operand of the tensor cores, finishes it
// in registers, and no warp waits for another until the warps' sums are added. The warp of the
// token's own position does the same with its key and value, and stores them. And the way to the
// result is short, as no instruction of it is in a cache when the kernel starts.
#pragma once

#include "backends/cuda/kernels/attention_decode.h"
#include "backends/cuda/kernels/attention_heads.cuh"

namespace pianola::cuda {

// They lie from ItemMemory::k on.
static_assert(sizeof(HeadTables<64>) == one_extra_bytes(64));

// The item of this thread block.
template <int kDim, bool kPlain>
__device__ __forceinline__ Item find_only_item(const DecodeParams& p) {
  const DecodeParams::StepTables& s = p.attention.state;
  const int position = __ldcg(s.position);
  const int lane = __ldcg(s.lane_of);
  const int row = __ldcg(s.row_of + (threadIdx.x & 31));
  const int live = __ldcg(&s.counts->tokens);
  const int block = static_cast<int>(blockIdx.x);

  Item item;
  item.token = 0;
  item.teams = 1 << p.log_cluster;
  item.team = block & (item.teams - 1);
  item.kv_head = block >> p.log_cluster;
  item.head = item.kv_head * p.group;
  item.heads = p.group;
  item.stores = true;
  item.position = live > 0 ? position : -2;
  item.lane = lane;
  item.row = __shfl_sync(kAllLanes, row, lane & 31);
  if (lane >= 32 && item.position >= 0) item.row = __ldcg(s.row_of + lane);
  set_extent<kPlain>(p, kDim, item);
  return item;
}

template <typename T, int kDim, RopeStyle kStyle, bool kPlain>
struct OneItem : HeadsItem<T, kDim, kStyle, kPlain> {
  static constexpr int kAhead = 3;  // rounds fetched into the second-level cache
  // Whether the way from q to the result is walked once before the wait, with nothing real and
  // nothing left: then its instructions are in the caches when q is there. Qwen3-0.6B, heads of
  // 128, loses by it (1,495 tokens/s to 1,381); 1B, heads of 64, gains (1,340 to 1,347).
  static constexpr bool kRehearse = kDim == 64;
  using Heads = HeadsItem<T, kDim, kStyle, kPlain>;
  using typename Heads::Base;
  using typename Heads::Part;
  using typename Heads::Query;
  using typename Heads::Sums;
  using typename Heads::ValuePart;
  static constexpr int kKeySteps = Heads::kKeySteps;
  static constexpr int kValueSteps = Heads::kValueSteps;
  static constexpr int kTiles = Heads::kTiles;
  using Keys = uint4[kTiles][kKeySteps][2];
  using Values = uint4[kTiles][kValueSteps][4];
  using Heads::item;
  using Heads::j;
  using Heads::memory;
  using Heads::p;
  using Heads::r;
  using Heads::span;
  using Heads::tile_base;
  using Heads::tile_row;

  using Heads::Heads;

  // Row of a tile, or the nearest one that the token attends to below `limit`: what is not to be
  // there gets no weight, so it need only be finite, as those rows are.
  __device__ __forceinline__ int near_row(int row, int base, int limit) const {
    row = min(row, limit - 1 - base);
    return kPlain ? row : max(row, span.begin - base);
  }
  __device__ __forceinline__ void load_keys(uint4 (&k)[kKeySteps][2], int block, int limit) const {
    const T* tile = Base::keys + tile_row(block) * kDim + 8 * j;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const T* row = tile + near_row(r + 8 * half, tile_base(block), limit) * kDim;
#pragma unroll
      for (int s = 0; s < kKeySteps; ++s) k[s][half] = load_cache(row + 32 * s);
    }
  }
  __device__ __forceinline__ void load_values(uint4 (&v)[kValueSteps][4], int block,
                                              int limit) const {
    const T* tile = Base::values + tile_row(block) * kDim + 8 * r;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const T* row = tile + near_row(Base::value_row(j, i), tile_base(block), limit) * kDim;
#pragma unroll
      for (int s = 0; s < kValueSteps; ++s) v[s][i] = load_cache(row + 64 * s);
    }
  }
  // The positions before the step's own.
  __device__ __forceinline__ void load_first(Keys& k, Values& v, const Walk& at) const {
    const int limit = item.position;
#pragma unroll
    for (int u = 0; u < kTiles; ++u) {
      const int block = at.block + u * item.ranks;
      if (tile_base(block) < limit && (kPlain || span.begin < limit)) {
        load_keys(k[u], block, limit);
        load_values(v[u], block, limit);
      } else {
#pragma unroll
        for (int s = 0; s < kKeySteps; ++s) k[u][s][0] = k[u][s][1] = uint4{};
#pragma unroll
        for (int s = 0; s < kValueSteps; ++s) {
#pragma unroll
          for (int i = 0; i < 4; ++i) v[u][s][i] = uint4{};
        }
      }
    }
  }
  // A line a lane, without a loop: a bulk copy of a tile by one lane takes 9 % longer at depth
  // 16,384.
  __device__ __forceinline__ void fetch(int block) const {
    constexpr int kBytes = 16 * kDim * static_cast<int>(sizeof(T));
    static_assert(kBytes <= 32 * 128);
    const int at = (thread_index() & 31) * 128;
    const int rows = item.end - tile_base(block);
    if (at >= min(rows * (kBytes / 16), kBytes)) return;
    const std::size_t row = tile_row(block);
    prefetch(reinterpret_cast<const char*>(Base::keys + row * kDim) + at);
    prefetch(reinterpret_cast<const char*>(Base::values + row * kDim) + at);
  }
  // What the warp of the token's own position does more: its key and value go to the cache, from
  // where this very lane reads them if their turn comes later, and to the tile at hand. A key is
  // with the lanes of its row, a value with those of its column.
  __device__ __forceinline__ void store_own(Keys& k, Values& v, const Walk& at, const Part& key,
                                            const ValuePart& value, bool real) const {
    const int row = item.position & 15;
    const std::size_t place = tile_row(item.blocks - 1) + row;
    T* keys = const_cast<T*>(Base::keys) + place * kDim + 8 * j;
    T* values = const_cast<T*>(Base::values) + place * kDim + 8 * r;
    const bool has_key = r == (row & 7);
    const bool has_value = j == (row & 7) >> 1;
    const int key_half = row >> 3;
    const int value_index = (row & 1) + 2 * (row >> 3);
    bool here[kTiles];
#pragma unroll
    for (int u = 0; u < kTiles; ++u) here[u] = at.block + u * item.ranks == item.blocks - 1;
#pragma unroll
    for (int s = 0; s < kKeySteps; ++s) {
      const uint4 packed = Heads::pack_eight(key[s]);
      if (real && has_key) *reinterpret_cast<uint4*>(keys + 32 * s) = packed;
#pragma unroll
      for (int u = 0; u < kTiles; ++u) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (has_key && here[u] && half == key_half) k[u][s][half] = packed;
        }
      }
    }
#pragma unroll
    for (int s = 0; s < kValueSteps; ++s) {
      const uint4 packed = Heads::pack_eight(value[s]);
      if (real && has_value) *reinterpret_cast<uint4*>(values + 64 * s) = packed;
#pragma unroll
      for (int u = 0; u < kTiles; ++u) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (has_value && here[u] && i == value_index) v[u][s][i] = packed;
        }
      }
    }
  }

  __device__ __forceinline__ void run(HeadTables<kDim>& tables) const {
    Keys k;
    Values v;
    Walk at{item.team, span.first() + item.team};
    load_first(k, v, at);
    Heads::fill(tables);
    if (at.block + kTiles * item.ranks < item.blocks) {
#pragma unroll 1
      for (int u = kTiles; u < kAhead * kTiles; ++u) fetch(at.block + u * item.ranks);
    }
    const bool own = Heads::has_own();
    const typename Heads::Raw raw = Heads::find_raw();
    auto* out = reinterpret_cast<float4*>(p.attention.out + item.head * kDim);

#pragma unroll 1
    for (int pass = kRehearse ? 0 : 1; pass < 2; ++pass) {
      const bool real = pass == 1;
      __syncthreads();  // tables are filled, and what the rehearsal has left in memory is read
      Part q = {};
      Part key = {};
      ValuePart value = {};
      if (real) {
        wait_for_previous();
        Heads::load_part(q, raw.q);
        if (own) {
          Heads::load_part(key, raw.k);
          Heads::load_part(value, raw.v);
        }
        wait_for_teams(item);  // while q is on its way
      }
      Query query;
      Heads::finish_query(q, tables, query);
      if (own) {
        Heads::finish_key(key, tables);
        store_own(k, v, at, key, value, real);
      }
      walk(k, v, at, query, out, real);
    }
  }

  // All rounds, or in a rehearsal one that leaves k and v alone.
  __device__ __forceinline__ void walk(Keys& k, Values& v, Walk at, const Query& query, float4* out,
                                       bool real) const {
    const float scale = p.attention.scale * kLog2e;
    Sums sums = {};
    float most[2] = {kNoScore, kNoScore};  // of heads 2j and 2j + 1
    float total[2] = {0, 0};               // of this lane's positions
#pragma unroll 1
    for (;;) {
      Walk next = at;
      const bool last = next.next(item, span.first(), kTiles) || !real;
      const bool more = next.block < item.blocks && real;
      float scores[kTiles][4];  // (position r, heads 2j and 2j + 1), then position r + 8
      float best[2] = {most[0], most[1]};
#pragma unroll
      for (int u = 0; u < kTiles; ++u) {
        const int base = tile_base(at.block + u * item.ranks);
        if (base >= item.end) continue;
        Base::multiply_keys(scores[u], k[u], query);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int position = base + r + 4 * (i & 2);
          const bool inside = position < item.end && (kPlain || position >= span.begin);
          scores[u][i] = inside ? __fmul_rn(scores[u][i], scale) : -INFINITY;
          best[i & 1] = fmaxf(best[i & 1], scores[u][i]);
        }
      }
      if (more) {
#pragma unroll
        for (int u = 0; u < kTiles; ++u) {
          const int block = next.block + u * item.ranks;
          if (tile_base(block) < item.end) load_keys(k[u], block, item.end);
        }
      }
      Base::rescale(best, most, total, sums);
#pragma unroll
      for (int u = 0; u < kTiles; ++u) {
        if (tile_base(at.block + u * item.ranks) >= item.end) continue;
        const typename Base::Weights w = Base::weigh(scores[u], most, total);
        Base::add_values(sums, v[u], w);
      }
      if (more) {
#pragma unroll
        for (int u = 0; u < kTiles; ++u) {
          const int block = next.block + u * item.ranks;
          if (tile_base(block) < item.end) load_values(v[u], block, item.end);
          fetch(block + (kAhead - 1) * kTiles * item.ranks);
        }
      }
      if (last) {
        Base::store(sums, most, total);
        end_rank<kPlain>(p, item, out, kDim, memory, memory.sums, at.rank, real);
        if (!more) break;
        __syncthreads();  // the warps' results have been read
        Base::clear(sums, most, total);
      }
      at = next;
    }
    add_parts<kPlain>(p, item, out, kDim, memory, real);
  }
};

template <typename T, int kDim, RopeStyle kStyle, bool kPlain>
__global__ void __launch_bounds__(kItemThreads, kDim == 64 ? 3 : 2)
    attend_one(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(16) unsigned char shared[];
  __builtin_assume(threadIdx.x < kItemThreads);
  allow_next();
  const ItemMemory<T> memory(p, shared);
  start_cluster(p, memory);
  const Item item = find_only_item<kDim, kPlain>(p);
  // As in begin_item(): without a wait only those leave that neither read nor write.
  if (item.team >= item.active) return;
  if (item.position < 0) {
    wait_for_previous();
    if (item.position == -1) clear_item(p, item);
    return;
  }
  expect_parts(p, item, memory);
  const Span<kPlain> span(p.attention.cache, item.end);
  const Fresh none;
  OneItem<T, kDim, kStyle, kPlain>(p, item, none, memory, span)
      .run(*reinterpret_cast<HeadTables<kDim>*>(memory.k));
}

}  // namespace pianola::cuda
