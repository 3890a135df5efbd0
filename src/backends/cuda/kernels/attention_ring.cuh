// The keys and values of an item come through a ring in shared memory, one of each warp, that the
// copy engine fills in the order in which the warp needs them.
#pragma once

#include <cuda.h>

#include "backends/cuda/kernels/attention_tensor.cuh"

namespace pianola::cuda {

struct RingMaps {
  CUtensorMap keys;  // of all slots, as rows of one position of one head
  CUtensorMap values;
};

// A stage of a ring: a warp's 16 positions of a block, keys and then values, each in boxes of 16
// rows and 128 bytes.
inline constexpr int kTileRows = 16;
// Boxes of the keys, and so of the values.
__host__ __device__ constexpr int tile_boxes(int dim) { return dim * 2 / kBoxBytes; }
__host__ __device__ constexpr int stage_bytes(int dim) {
  return 2 * tile_boxes(dim) * kTileRows * kBoxBytes;
}

// Where a lane reads a row of a tile: at chunk(b, c), its own chunk of 16 bytes of box b, or the
// one whose number differs by the bits of c.
struct TileRow {
  std::uint32_t at;
  int stride;  // from box to box

  __device__ __forceinline__ std::uint32_t chunk(int box, int c) const {
    return (at ^ (c << 4)) + box * stride;
  }
};

template <int kDim, bool kPlain>
class TileRing {
 public:
  static constexpr int kBoxes = tile_boxes(kDim);
  static constexpr int kTileBytes = kTileRows * kBoxBytes;  // of a box

  // `at` and `barriers` are this warp's. Nothing has been asked for.
  __device__ __forceinline__ TileRing(const RingMaps& maps, const Item& item,
                                      const Span<kPlain>& span, const LayerCacheView& cache,
                                      std::uint32_t at, std::uint32_t barriers, int stages)
      : maps_(maps),
        item_(item),
        span_(span),
        cache_(cache),
        ring_(at),
        barriers_(barriers),
        stages_(stages),
        first_row_((item.row * (cache.capacity / kCacheBlock) * cache.kv_heads + item.kv_head) *
                       kCacheBlock +
                   thread_index() / 32 * kTileRows),
        ahead_(span.first() + item.team) {
    if ((thread_index() & 31) == 0) {
#pragma unroll 1
      for (int i = 0; i < stages; ++i) init_barrier(barriers + 8 * i, 1);
      fence_barriers();
    }
    __syncwarp();
  }

  // Whether the token attends to anything in this warp's tile of a block.
  __device__ __forceinline__ bool wants(int block) const {
    const int base = block * kCacheBlock + thread_index() / 32 * kTileRows;
    return base < item_.end && (kPlain || base + kTileRows > span_.begin);
  }

  __device__ __forceinline__ void fill() {
#pragma unroll 1
    for (int stage = 0; stage < stages_; ++stage) load(stage);
  }
  // The next tile of the walk to where `stage` has been read by all lanes.
  __device__ __forceinline__ void load(int stage) {
    const int row = next_row();
    if (row < 0) return;
    const int lane = thread_index() & 31;
    const std::uint32_t barrier = barriers_ + 8 * stage;
    if (lane == 0) expect_bytes(barrier, stage_bytes(kDim));
    if (lane < 2) copy_boxes(lane == 0 ? keys(stage) : values(stage), map(), 0, row, barrier);
  }

  // The stage of the next tile, once the tile is there.
  struct Turn {
    int stage = 0;
    unsigned parity = 0;
  };
  __device__ __forceinline__ int wait(Turn& turn) const {
    wait_copied(barriers_ + 8 * turn.stage, turn.parity);
    const int stage = turn.stage;
    if (++turn.stage == stages_) {
      turn.stage = 0;
      turn.parity ^= 1;
    }
    return stage;
  }

  __device__ __forceinline__ std::uint32_t keys(int stage) const {
    return ring_ + stage * stage_bytes(kDim);
  }
  __device__ __forceinline__ std::uint32_t values(int stage) const {
    return keys(stage) + kBoxes * kTileBytes;
  }
  // Row `row` of a tile of keys or values, of which rows from `own_row` on are one that lies at
  // `own`, without the pattern.
  static __device__ __forceinline__ TileRow row(std::uint32_t tile, int row, int chunk,
                                                std::uint32_t own, int own_row) {
    if (row >= own_row) return {own ^ (chunk << 4), kBoxBytes};
    return {(tile + row * kBoxBytes) ^ ((chunk ^ (row & 7)) << 4), kTileBytes};
  }

 private:
  // Where the next tile begins that the token attends to, or -1: there is none. The walk is Walk's,
  // a block at a time.
  __device__ __forceinline__ int next_row() {
    while (ahead_ < item_.blocks && !wants(ahead_)) ahead_ = behind(ahead_);
    if (ahead_ >= item_.blocks) return -1;
    const int row = first_row_ + span_.place(ahead_) * (cache_.kv_heads * kCacheBlock);
    ahead_ = behind(ahead_);
    return row;
  }
  __device__ __forceinline__ int behind(int block) const {
    const int next = block + item_.ranks;
    if (next < item_.blocks) return next;
    const int rank = ((block - span_.first()) & (kMostRanks - 1)) + item_.teams;
    return rank < item_.ranks ? span_.first() + rank : item_.blocks;
  }

  // What this lane asks for, of the first two.
  __device__ __forceinline__ const CUtensorMap* map() const {
    return (thread_index() & 31) == 0 ? &maps_.keys : &maps_.values;
  }

  const RingMaps& maps_;
  const Item& item_;
  const Span<kPlain>& span_;
  const LayerCacheView& cache_;
  std::uint32_t ring_;
  std::uint32_t barriers_;
  int stages_;
  int first_row_;  // of this warp's tile of the slot's first block
  int ahead_;      // block of the next tile to ask for
};

// Four 8 x 8 matrices of 16-bit elements, each transposed: lanes 8 m + 0..7 have the addresses of
// the rows of matrix m.
__device__ __forceinline__ void load_transposed(std::uint32_t (&m)[4], std::uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(at)
               : "memory");
}

}  // namespace pianola::cuda
