// attend() with its heads, where the token's own position is the only one of this step that it
// attends to: one token of each lane, in steps of any size. 16-bit caches, heads of 64 and of 128
// that rope turns whole, groups of at most kItemHeads. The sums are those of attention_tensor.cuh,
// in the same order, with the same bits, and an item that needs other tokens' keys is computed
// there.
//
// Such a step is a chain of short kernels, so what counts is how soon after wait_for_previous()
// this one is done. Whatever the token's q, k and v do not decide is read, computed and addressed
// before, and keys and values are on their way, as many as a ring holds. Then every lane takes its
// part of q right as an operand of the tensor cores, finishes it in registers, and no warp waits
// for another until the warps' sums are added. The warp of the token's own position does the same
// with its key and value, and stores them. And the way to the result is short, as no instruction of
// it is in a cache when the kernel starts.
#pragma once

#include "backends/cuda/kernels/attention_decode.cuh"
#include "backends/cuda/kernels/attention_ring.cuh"

namespace pianola::cuda {

// Thread blocks that a multiprocessor has registers for.
constexpr int one_blocks(int dim) { return dim == 64 ? 3 : 2; }

struct OneParams {
  RingMaps maps;
  DecodeParams p;
  int stages = 0;  // of a warp's ring
};

// Rope's turns and the norms' weights, for heads of kDim.
template <int kDim>
struct alignas(16) HeadTables {
  Turn turns[kDim / 2];  // of the pairs, in their order
  float q_norm[kDim];
  float k_norm[kDim];
};

// What a team has where other kernels have fresh keys and values.
template <int kDim>
struct OneMemory {
  unsigned char* ring;  // [kItemWarps, stages] tiles
  unsigned char* own;   // [2, kDim] key and value of the token, 16 bits an element
  HeadTables<kDim>* tables;
  std::uint32_t barriers;  // [kItemWarps, stages] of the rings
  WarpSums sums;  // of a team's every other rank, so that none waits until one has been read

  __device__ __forceinline__ OneMemory(void* memory, int stages, int heads)
      : ring(static_cast<unsigned char*>(memory) +
             (kBoxAlign - shared_address(memory) % kBoxAlign) % kBoxAlign),
        own(ring + stages * kItemWarps * stage_bytes(kDim)),
        tables(reinterpret_cast<HeadTables<kDim>*>(own + 4 * kDim)),
        barriers(shared_address(tables + 1)),
        sums(reinterpret_cast<float*>(tables + 1) + 2 * kItemWarps * stages, heads, kDim) {}

  static std::size_t bytes(int stages, int heads, int log_cluster) {
    const int each = stage_bytes(kDim) + static_cast<int>(sizeof(std::uint64_t));
    const int others = 1 << log_cluster < kMostRanks ? WarpSums::floats(heads, kDim) : 0;
    return kBoxAlign + static_cast<std::size_t>(stages * kItemWarps * each + 4 * kDim) +
           sizeof(HeadTables<kDim>) + static_cast<std::size_t>(others) * sizeof(float);
  }
};

// The same address, which is certainly known from here on: compilers put the arithmetic of
// addresses next to the loads, but not what lanes tell each other.
__device__ __forceinline__ const float* keep(const float* address) {
  const auto bits = reinterpret_cast<std::uint64_t>(address);
  const int lane = thread_index() & 31;
  const std::uint64_t low = __shfl_sync(kAllLanes, static_cast<std::uint32_t>(bits), lane);
  const std::uint64_t high = __shfl_sync(kAllLanes, static_cast<std::uint32_t>(bits >> 32), lane);
  return reinterpret_cast<const float*>(high << 32 | low);
}

template <typename T, int kDim, RopeStyle kStyle, bool kPlain>
struct OneItem : TensorItem<T, kDim / 32, kDim / 64, true, tiles_of(kDim), kPlain> {
  static constexpr int kKeySteps = kDim / 32;
  static constexpr int kValueSteps = kDim / 64;
  static constexpr int kTiles = tiles_of(kDim);
  static constexpr int kProducts = kDim / 16;  // of a tile's values
  using Base = TensorItem<T, kKeySteps, kValueSteps, true, kTiles, kPlain>;
  using Ring = TileRing<kDim, kPlain>;
  using Keys = uint4[kKeySteps][2];
  using Values = std::uint32_t[kProducts][4];
  using Sums = float[kValueSteps][4][4];
  using Part = float[kKeySteps][8];  // dims 32 s + 8 j + 0..7 of a head
  using Base::item;
  using Base::j;
  using Base::memory;
  using Base::p;
  using Base::r;
  using Base::span;
  using Base::tile_base;
  using Base::tile_row;

  const OneMemory<kDim>& own_memory;
  bool own;  // whether this warp's tiles hold the token's own position

  __device__ __forceinline__ OneItem(const DecodeParams& params, const Item& of, const Fresh& with,
                                     const ItemMemory<T>& in, const Span<kPlain>& over,
                                     const OneMemory<kDim>& besides)
      : Base(params, of, with, in, over), own_memory(besides) {
    own = owns(item, span, item.position) &&
          (item.position & (kCacheBlock - 1)) / kTileRows == thread_index() / 32;
  }

  __device__ __forceinline__ std::uint32_t own_key() const {
    return shared_address(own_memory.own);
  }
  __device__ __forceinline__ std::uint32_t own_value() const { return own_key() + 2 * kDim; }

  // Position r of a product's first eight is row box_row(r) of the tile. Rows behind the token's
  // own get no weight, so its key and value will do for them: the cache may hold anything there,
  // but a product of 0 must be 0.
  __device__ __forceinline__ void load_keys(Keys& k, std::uint32_t tile, int own_row) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const TileRow row = Ring::row(tile, box_row(r) + 8 * half, j, own_key(), own_row);
#pragma unroll
      for (int s = 0; s < kKeySteps; ++s) k[s][half] = load_shared(row.chunk(s / 2, s % 2 * 4));
    }
  }
  // Operands of products of dims 16 i + 0..15. Positions before the window get no weight either.
  __device__ __forceinline__ void load_values(Values& v, std::uint32_t tile, int first_row,
                                              int own_row) const {
    const int lane = thread_index() & 31;
    int position = box_row(lane & 7) + (lane & 16) / 2;
    if (!kPlain) position = max(position, first_row);
    const TileRow row = Ring::row(tile, position, (lane & 8) / 8, own_value(), own_row);
#pragma unroll
    for (int i = 0; i < kProducts; ++i) load_transposed(v[i], row.chunk(i / 4, i % 4 * 2));
  }

  __device__ __forceinline__ void fill(HeadTables<kDim>& tables) const {
    const int warp = thread_index() / 32;
    const int lane = thread_index() & 31;
    if (warp < kDim / 64) {
      const int pair = lane + 32 * warp;
      tables.turns[pair] =
          turn(item.position, __ldg(p.heads.inverse_frequencies + pair), p.heads.attention_factor);
    } else if (kStyle == RopeStyle::kHalf && warp >= 2) {
      const float* norm = warp == 2 ? p.heads.q_norm : p.heads.k_norm;
      float* to = warp == 2 ? tables.q_norm : tables.k_norm;
      if (norm) {
#pragma unroll
        for (int d = lane; d < kDim; d += 32) to[d] = __ldg(norm + d);
      }
    }
  }

  static __device__ __forceinline__ void load_part(Part& x, const float* head) {
#pragma unroll
    for (int s = 0; s < kKeySteps; ++s) {
#pragma unroll
      for (int i = 0; i < 8; i += 4) {
        const float4 four = load_activation4(head + 32 * s + i);
        x[s][i] = four.x;
        x[s][i + 1] = four.y;
        x[s][i + 2] = four.z;
        x[s][i + 3] = four.w;
      }
    }
  }

  static __device__ __forceinline__ void load_value(float (&x)[kValueSteps][8], const float* head) {
#pragma unroll
    for (int s = 0; s < kValueSteps; ++s) {
#pragma unroll
      for (int i = 0; i < 8; i += 4) {
        const float4 four = load_activation4(head + 64 * s + i);
        x[s][i] = four.x;
        x[s][i + 1] = four.y;
        x[s][i + 2] = four.z;
        x[s][i + 3] = four.w;
      }
    }
  }

  // finish_head() of a head that four lanes hold.
  __device__ __forceinline__ void finish(Part& x, const float* norm, const float* weights,
                                         float eps, const HeadTables<kDim>& tables) const {
    constexpr int kHalf = kKeySteps / 2;
    if constexpr (kStyle == RopeStyle::kHalf) {
      if (norm) {
        // The tree of warp_sum() over the pairs 8 j + i and those 32 behind.
        float sum[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          sum[i] = 0;
#pragma unroll
          for (int s = 0; s < kHalf; ++s) {
            sum[i] = __fmaf_rn(x[s][i], x[s][i], sum[i]);
            sum[i] = __fmaf_rn(x[s + kHalf][i], x[s + kHalf][i], sum[i]);
          }
        }
#pragma unroll
        for (int offset = 2; offset; offset >>= 1) {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            sum[i] = __fadd_rn(sum[i], __shfl_xor_sync(kAllLanes, sum[i], offset));
          }
        }
#pragma unroll
        for (int half = 4; half; half >>= 1) {
#pragma unroll
          for (int i = 0; i < half; ++i) sum[i] = __fadd_rn(sum[i], sum[i + half]);
        }
        const float mean = __fmul_rn(sum[0], 1.0F / kDim);
        const float scale = __frcp_rn(__fsqrt_rn(__fadd_rn(mean, eps)));
#pragma unroll
        for (int s = 0; s < kKeySteps; ++s) {
#pragma unroll
          for (int i = 0; i < 8; i += 4) {
            const float4 w = *reinterpret_cast<const float4*>(weights + 32 * s + 8 * j + i);
            x[s][i] = __fmul_rn(__fmul_rn(x[s][i], scale), w.x);
            x[s][i + 1] = __fmul_rn(__fmul_rn(x[s][i + 1], scale), w.y);
            x[s][i + 2] = __fmul_rn(__fmul_rn(x[s][i + 2], scale), w.z);
            x[s][i + 3] = __fmul_rn(__fmul_rn(x[s][i + 3], scale), w.w);
          }
        }
      }
#pragma unroll
      for (int s = 0; s < kHalf; ++s) {
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
          const float4 two = *reinterpret_cast<const float4*>(tables.turns + 32 * s + 8 * j + i);
          turn_pair(x[s][i], x[s + kHalf][i], {two.x, two.y});
          turn_pair(x[s][i + 1], x[s + kHalf][i + 1], {two.z, two.w});
        }
      }
    } else {
#pragma unroll
      for (int s = 0; s < kKeySteps; ++s) {
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
          const float4 two =
              *reinterpret_cast<const float4*>(tables.turns + 16 * s + 4 * j + i / 2);
          turn_pair(x[s][i], x[s][i + 1], {two.x, two.y});
          turn_pair(x[s][i + 2], x[s][i + 3], {two.z, two.w});
        }
      }
    }
  }
  static __device__ __forceinline__ void turn_pair(float& first, float& second, Turn t) {
    const float a = first;
    const float b = second;
    first = __fmaf_rn(a, t.cos, -__fmul_rn(b, t.sin));
    second = __fmaf_rn(b, t.cos, __fmul_rn(a, t.sin));
  }
  static __device__ __forceinline__ uint4 pack_eight(const float (&x)[8]) {
    return make_uint4(pack<T>(x[0], x[1]), pack<T>(x[2], x[3]), pack<T>(x[4], x[5]),
                      pack<T>(x[6], x[7]));
  }

  // What the warp of the token's own position does more: its key and value go to the cache, and to
  // where load_keys() and load_values() of this warp find them.
  __device__ __forceinline__ void store_own(const Part& key, const float (&value)[kValueSteps][8],
                                            bool real) const {
    const std::size_t place = tile_row(item.blocks - 1) + (item.position & (kTileRows - 1));
    if (r == 0) {
      T* to = const_cast<T*>(Base::keys) + place * kDim;
#pragma unroll
      for (int s = 0; s < kKeySteps; ++s) {
        const uint4 packed = pack_eight(key[s]);
        reinterpret_cast<uint4*>(own_memory.own)[4 * s + j] = packed;
        if (real) reinterpret_cast<uint4*>(to)[4 * s + j] = packed;
      }
    }
    if (j == 0) {
      T* to = const_cast<T*>(Base::values) + place * kDim;
#pragma unroll
      for (int s = 0; s < kValueSteps; ++s) {
        const uint4 packed = pack_eight(value[s]);
        reinterpret_cast<uint4*>(own_memory.own + 2 * kDim)[8 * s + r] = packed;
        if (real) reinterpret_cast<uint4*>(to)[8 * s + r] = packed;
      }
    }
    __syncwarp();
  }

  // Whether the way from q to the result is walked once before the wait, with nothing real and
  // nothing left: then its instructions are in the caches when q is there. Qwen3-0.6B, heads of
  // 128, loses by it (1,495 tokens/s to 1,381); 1B, heads of 64, gains (1,340 to 1,347). In steps
  // of several tokens thread blocks share the caches.
  __device__ __forceinline__ bool rehearses() const { return kDim == 64 && p.tokens == 1; }

  __device__ __forceinline__ void run(const RingMaps& maps, int stages) const {
    const int warp = thread_index() / 32;
    const int warp_stages = warp * stages;
    Ring ring(maps, item, span, p.attention.cache,
              shared_address(own_memory.ring) + warp_stages * stage_bytes(kDim),
              own_memory.barriers + 8 * warp_stages, stages);
    ring.fill();
    HeadTables<kDim>& tables = *own_memory.tables;
    fill(tables);
    const std::size_t token = p.first + item.token;
    const std::size_t kv = token * p.attention.cache.kv_heads + item.kv_head;
    // A lane of a head that there is not takes the last one's.
    const std::size_t head = token * p.attention.heads + item.head + min(r, item.heads - 1);
    const float* raw_q = keep(p.heads.q + head * kDim + 8 * j);
    const float* raw_k = keep(p.heads.k + kv * kDim + 8 * j);
    const float* raw_v = keep(p.heads.v + kv * kDim + 8 * r);

#pragma unroll 1
    for (int pass = rehearses() ? 0 : 1; pass < 2; ++pass) {
      const bool real = pass == 1;
      __syncthreads();  // tables are filled, and what the rehearsal has left in memory is read
      Part q = {};
      Part key = {};
      float value[kValueSteps][8] = {};
      if (real) {
        wait_for_previous();
        load_part(q, raw_q);
        if (own) {
          load_part(key, raw_k);
          load_value(value, raw_v);
        }
        if (item.ranks > 1) cluster_wait();  // all teams have started: while q is on its way
      }
      finish(q, p.heads.q_norm, tables.q_norm, p.heads.q_norm_eps, tables);
      typename Base::Query query;
#pragma unroll
      for (int s = 0; s < kKeySteps; ++s) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const SplitPair parts = split<T>(q[s][2 * i], q[s][2 * i + 1]);
          query.step[s].high[i] = parts.high;
          query.step[s].low[i] = parts.low;
        }
      }
      if (own) {
        finish(key, p.heads.k_norm, tables.k_norm, p.heads.k_norm_eps, tables);
        store_own(key, value, real);
      }
      walk(ring, query, real);
    }
  }

  // All rounds, or in a rehearsal one that leaves the ring alone.
  __device__ __forceinline__ void walk(Ring& ring, const typename Base::Query& query,
                                       bool real) const {
    Walk at{item.team, span.first() + item.team};
    typename Ring::Turn turn;
    Sums sums = {};
    float most[2] = {kNoScore, kNoScore};  // of heads 2j and 2j + 1
    float total[2] = {0, 0};               // of this lane's positions
    bool odd = false;
#pragma unroll 1
    for (;;) {
      Walk next = at;
      const bool last = next.next(item, span.first(), kTiles) || !real;
      add_round(ring, turn, at, query, real, sums, most, total);
      if (last) {
        WarpSums to = memory.sums;
        if (odd) to = own_memory.sums;
        odd = !odd;
        store(to, sums, most, total);
        end_rank<kPlain>(p, *memory.item, item_out(p, *memory.item), kDim, memory, to, at.rank,
                         real);
        if (next.block == item.blocks || !real) break;
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
    add_parts<kPlain>(p, *memory.item, item_out(p, *memory.item), kDim, memory, real);
  }

  // Tiles of kTiles blocks. Where a stage has been read, the next tile comes.
  __device__ __forceinline__ void add_round(Ring& ring, typename Ring::Turn& turn, const Walk& at,
                                            const typename Base::Query& query, bool real,
                                            Sums& sums, float (&most)[2], float (&total)[2]) const {
    const float scale = p.attention.scale * kLog2e;
    int stage[kTiles];  // -1: the token attends to nothing of that tile
    int base[kTiles];
    Values v[kTiles];
    float scores[kTiles][4];  // (position r, heads 2j and 2j + 1), then position r + 8
    float best[2] = {most[0], most[1]};
#pragma unroll
    for (int u = 0; u < kTiles; ++u) {
      const int block = at.block + u * item.ranks;
      base[u] = tile_base(block);
      stage[u] = ring.wants(block) ? ring.wait(turn) : -1;
    }
#pragma unroll
    for (int u = 0; u < kTiles; ++u) {
      if (stage[u] < 0) continue;
      Keys k;
      load_keys(k, ring.keys(stage[u]), item.position - base[u]);
      Base::multiply_keys(scores[u], k, query);
      load_values(v[u], ring.values(stage[u]), span.begin - base[u], item.position - base[u]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int position = base[u] + box_row(r) + 4 * (i & 2);
        const bool inside = position < item.end && (kPlain || position >= span.begin);
        scores[u][i] = inside ? __fmul_rn(scores[u][i], scale) : -INFINITY;
        best[i & 1] = fmaxf(best[i & 1], scores[u][i]);
      }
    }
    __syncwarp();
#pragma unroll
    for (int u = 0; u < kTiles; ++u) {
      if (!real || stage[u] < 0) continue;
      ring.load(stage[u]);
      ring.fetch();
    }
    Base::rescale(best, most, total, sums);
#pragma unroll
    for (int u = 0; u < kTiles; ++u) {
      if (stage[u] < 0) continue;
      const typename Base::Weights w = Base::weigh(scores[u], most, total);
#pragma unroll
      for (int i = 0; i < kProducts; ++i) {
        mma<T>(sums[i / 4][i % 4], v[u][i], w.first.high, w.second.high);
        mma<T>(sums[i / 4][i % 4], v[u][i], w.first.low, w.second.low);
      }
    }
  }

  // To where end_rank() adds the warps': dims 16 i + r and 8 more of heads 2j and 2j + 1. Lanes are
  // added in the order of the bits of their positions, as everywhere.
  __device__ __forceinline__ void store(const WarpSums& to, const Sums& sums,
                                        const float (&most)[2], float (&total)[2]) const {
    const int warp = thread_index() / 32;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      constexpr int kOffsets[3] = {8, 16, 4};
#pragma unroll
      for (int i = 0; i < 3; ++i) total[n] += __shfl_xor_sync(kAllLanes, total[n], kOffsets[i]);
      const int head = 2 * j + n;
      if (r == 0) to.score[warp * kItemHeads + head] = make_float2(most[n], total[n]);
      if (head >= memory.heads) continue;
      float* row = to.merge + (warp * memory.heads + head) * (kDim + kMergePad) + r;
#pragma unroll
      for (int i = 0; i < kProducts; ++i) {
        row[16 * i] = sums[i / 4][i % 4][n];
        row[16 * i + 8] = sums[i / 4][i % 4][n + 2];
      }
    }
  }
};

// An item that attends to other tokens of this step. Not inline, as both ways would share too few
// registers.
template <typename T, int kDim, bool kPlain>
__device__ __noinline__ void attend_lane(const DecodeParams& p, Tables tables, Item item,
                                         Fresh fresh, unsigned char* shared) {
  const ItemMemory<T> memory(p, shared);
  const Span<kPlain> span(p.attention.cache, item.end);
  TensorItem<T, kDim / 32, kDim / 64, true, tiles_of(kDim), kPlain>(p, item, fresh, memory, span)
      .run(tables, [&] { wait_for_item(item); });
}

template <typename T, int kDim, RopeStyle kStyle, bool kPlain>
__global__ void __launch_bounds__(kItemThreads, one_blocks(kDim))
    attend_one(const __grid_constant__ OneParams params) {
  extern __shared__ __align__(16) unsigned char shared[];
  __builtin_assume(threadIdx.x < kItemThreads);
  const DecodeParams& p = params.p;
  const ItemMemory<T> memory(p, shared);
  Tables tables;
  Item item;
  if (!begin_item<kPlain>(p, memory, tables, item)) return;
  const Span<kPlain> span(p.attention.cache, item.end);
  const Fresh fresh = find_fresh(tables, item, span);
  if (fresh.count == (owns(item, span, item.position) ? 1 : 0)) {
    const OneMemory<kDim> besides(memory.k, params.stages, memory.heads);
    OneItem<T, kDim, kStyle, kPlain>(p, item, fresh, memory, span, besides)
        .run(params.maps, params.stages);
  } else {
    attend_lane<T, kDim, kPlain>(p, tables, item, fresh, shared);
  }
}

}  // namespace pianola::cuda
