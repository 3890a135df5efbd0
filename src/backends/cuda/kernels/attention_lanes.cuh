// attend() with its heads for tokens of several lanes, where the token's own position is the only
// one of this step that it attends to: nearly all of them, as a lane has mostly one token. The sums
// are those of attention_tensor.cuh, in the same order, with the same bits, and an item that needs
// other tokens' keys is computed there.
//
// Whatever the token's q, k and v do not decide is read, computed and addressed before
// wait_for_previous(), and keys and values are on their way, as many as a ring holds. Then the
// heads are finished in registers, and no warp waits for another until the warps' sums are added.
#pragma once

#include "backends/cuda/kernels/attention_decode.cuh"
#include "backends/cuda/kernels/attention_heads.cuh"
#include "backends/cuda/kernels/attention_ring.cuh"

namespace pianola::cuda {

// Thread blocks that a multiprocessor is given, at most.
__host__ __device__ constexpr int lanes_blocks(int dim) { return dim == 64 ? 3 : 2; }

struct LanesParams {
  RingMaps maps;
  DecodeParams p;
  int stages = 0;  // of a warp's ring
};

// What a team has where other kernels have fresh keys and values.
template <int kDim>
struct LanesMemory {
  unsigned char* ring;  // [kItemWarps, stages] tiles
  unsigned char* own;   // [2, kDim] key and value of the token, 16 bits an element
  HeadTables<kDim>* tables;
  std::uint32_t barriers;  // [kItemWarps, stages] of the rings
  WarpSums sums;  // of a team's every other rank, so that none waits until one has been read

  __device__ __forceinline__ LanesMemory(void* memory, int stages, int heads)
      : ring(static_cast<unsigned char*>(memory) + bytes_to_boxes(memory)),
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

template <typename T, int kDim, RopeStyle kStyle, bool kPlain>
struct LanesItem : HeadsItem<T, kDim, kStyle, kPlain> {
  static constexpr int kProducts = kDim / 16;  // of a tile's values
  using Heads = HeadsItem<T, kDim, kStyle, kPlain>;
  using typename Heads::Base;
  using typename Heads::Part;
  using typename Heads::Query;
  using typename Heads::Sums;
  using typename Heads::ValuePart;
  static constexpr int kKeySteps = Heads::kKeySteps;
  static constexpr int kValueSteps = Heads::kValueSteps;
  static constexpr int kTiles = Heads::kTiles;
  using Ring = TileRing<kDim, kPlain>;
  using Keys = uint4[kKeySteps][2];
  using Values = std::uint32_t[kProducts][4];
  using Heads::item;
  using Heads::j;
  using Heads::memory;
  using Heads::p;
  using Heads::r;
  using Heads::span;
  using Heads::tile_base;
  using Heads::tile_row;

  const LanesMemory<kDim>& own_memory;

  __device__ __forceinline__ LanesItem(const DecodeParams& params, const Item& of,
                                       const Fresh& with, const ItemMemory<T>& in,
                                       const Span<kPlain>& over, const LanesMemory<kDim>& besides)
      : Heads(params, of, with, in, over), own_memory(besides) {}

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

  // What the warp of the token's own position does more: its key and value go to the cache, and to
  // where load_keys() and load_values() of this warp find them.
  __device__ __forceinline__ void store_own(const Part& key, const ValuePart& value) const {
    const std::size_t place = tile_row(item.blocks - 1) + (item.position & (kTileRows - 1));
    if (r == 0) {
      T* to = const_cast<T*>(Base::keys) + place * kDim;
#pragma unroll
      for (int s = 0; s < kKeySteps; ++s) {
        const uint4 packed = Heads::pack_eight(key[s]);
        reinterpret_cast<uint4*>(own_memory.own)[4 * s + j] = packed;
        reinterpret_cast<uint4*>(to)[4 * s + j] = packed;
      }
    }
    if (j == 0) {
      T* to = const_cast<T*>(Base::values) + place * kDim;
#pragma unroll
      for (int s = 0; s < kValueSteps; ++s) {
        const uint4 packed = Heads::pack_eight(value[s]);
        reinterpret_cast<uint4*>(own_memory.own + 2 * kDim)[8 * s + r] = packed;
        reinterpret_cast<uint4*>(to)[8 * s + r] = packed;
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void run(const RingMaps& maps, int stages) const {
    const int first_stage = thread_index() / 32 * stages;
    Ring ring(maps, item, span, p.attention.cache,
              shared_address(own_memory.ring) + first_stage * stage_bytes(kDim),
              own_memory.barriers + 8 * first_stage, stages);
    ring.fill();
    HeadTables<kDim>& tables = *own_memory.tables;
    Heads::fill(tables);
    const bool own = Heads::has_own();
    const typename Heads::Raw raw = Heads::find_raw();
    __syncthreads();  // tables are filled

    Part q;
    Part key;
    ValuePart value;
    wait_for_previous();
    Heads::load_part(q, raw.q);
    if (own) {
      Heads::load_part(key, raw.k);
      Heads::load_part(value, raw.v);
    }
    wait_for_teams(item);  // while q is on its way
    Query query;
    Heads::finish_query(q, tables, query);
    if (own) {
      Heads::finish_key(key, tables);
      store_own(key, value);
    }
    walk(ring, query);
  }

  __device__ __forceinline__ void walk(Ring& ring, const Query& query) const {
    Walk at{item.team, span.first() + item.team};
    typename Ring::Turn turn;
    Sums sums = {};
    float most[2] = {kNoScore, kNoScore};  // of heads 2j and 2j + 1
    float total[2] = {0, 0};               // of this lane's positions
    bool odd = false;
#pragma unroll 1
    for (;;) {
      Walk next = at;
      const bool last = next.next(item, span.first(), kTiles);
      add_round(ring, turn, at, query, sums, most, total);
      if (last) {
        WarpSums to = memory.sums;
        if (odd) to = own_memory.sums;
        odd = !odd;
        store(to, sums, most, total);
        end_rank<kPlain>(p, *memory.item, item_out(p, *memory.item), kDim, memory, to, at.rank);
        if (next.block == item.blocks) break;
        Base::clear(sums, most, total);
      }
      at = next;
    }
    add_parts<kPlain>(p, *memory.item, item_out(p, *memory.item), kDim, memory);
  }

  // Tiles of kTiles blocks. Where a stage has been read, the next tile comes.
  __device__ __forceinline__ void add_round(Ring& ring, typename Ring::Turn& turn, const Walk& at,
                                            const Query& query, Sums& sums, float (&most)[2],
                                            float (&total)[2]) const {
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
      if (stage[u] < 0) continue;
      ring.load(stage[u]);
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
__device__ __noinline__ void attend_fresh(const DecodeParams& p, Tables tables, Item item,
                                          Fresh fresh, unsigned char* shared) {
  const ItemMemory<T> memory(p, shared);
  const Span<kPlain> span(p.attention.cache, item.end);
  ExactItem<T, kDim, kPlain>(p, item, fresh, memory, span).run(tables, [&] {
    wait_for_item(item);
  });
}

template <typename T, int kDim, RopeStyle kStyle, bool kPlain>
__global__ void __launch_bounds__(kItemThreads, lanes_blocks(kDim))
    attend_lanes(const __grid_constant__ LanesParams params) {
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
    const LanesMemory<kDim> besides(memory.k, params.stages, memory.heads);
    LanesItem<T, kDim, kStyle, kPlain>(p, item, fresh, memory, span, besides)
        .run(params.maps, params.stages);
  } else {
    attend_fresh<T, kDim, kPlain>(p, tables, item, fresh, shared);
  }
}

}  // namespace pianola::cuda
