// The weights of a warp, in the order in which it uses them: a ring in shared memory that runs
// ahead of the walk over the ops.
#pragma once

#include "backends/cuda/kernels/persistent_tables.cuh"

namespace pianola::cuda::persistent {

inline constexpr int kChunk = 4;  // loads of a lane that travel together

template <int kBytes>
__device__ __forceinline__ void copy_few_async(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from),
               "n"(kBytes)
               : "memory");
}

template <bool kQuantised, int kDepth>
struct Stream {
  static constexpr int kWarpBytes = kDepth * kChunk * 32 * (kQuantised ? 24 : 16);

  const Entry* entries;
  const Shape* shapes;
  const Range* ranges;
  int ops;
  uint4* ring;   // [depth][chunk] of this lane, 32 apart
  uint2* words;  // the scales of the same
  int slot = 0;  // that is used next
  // What is loaded next:
  int op = 0;
  int group;
  int steps = 0;  // left of the group's slice; 0: nothing is left at all
  int tiles = 1;
  bool both = false;  // the group has a second tile
  int scale_step = 0;
  const std::byte* code[2];
  const std::byte* scale[2];

  __device__ __forceinline__ void begin(const Program& p, unsigned char* shared) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    entries = reinterpret_cast<const Entry*>(shared + p.entries_at);
    shapes = reinterpret_cast<const Shape*>(shared + p.shapes_at);
    ranges = reinterpret_cast<const Range*>(shared + p.ranges_at);
    ops = p.ops;
    unsigned char* mine = shared + warp * kWarpBytes;
    ring = reinterpret_cast<uint4*>(mine) + lane;
    words = reinterpret_cast<uint2*>(mine + kDepth * kChunk * 32 * 16) + lane;
    group = warp;
    find_group();
#pragma unroll 1
    for (int i = 0; i < kDepth; ++i) load(i);
  }

  // From op and group on, the first group there is.
  __device__ __forceinline__ void find_group() {
    const int t = static_cast<int>(threadIdx.x) & 3;
    const int g = (static_cast<int>(threadIdx.x) & 31) >> 2;
    steps = 0;
    for (;; ++op, group = static_cast<int>(threadIdx.x) / 32) {
      if (op >= ops) return;
      const Entry& entry = entries[op];
      if (entry.shape < 0 || group >= ranges[entry.shape].groups) continue;
      const Shape& shape = shapes[entry.shape];
      const Range& range = ranges[entry.shape];
      tiles = shape.tiles;
      scale_step = shape.scale_step;
      steps = range.steps;
      const int unit = range.unit_begin + (shape.gated ? group : group * tiles);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        if (n >= tiles) break;
        const Tile tile = products::tile_of(shape, unit, range.unit_end, n);
        if (n == 1) both = tile.part >= 0;
        if (tile.part < 0) continue;
        // Rows beyond the matrix read its last one: their results are not stored.
        const std::int64_t row = min(tile.row + g, shape.part[tile.part].rows - 1);
        code[n] = entry.codes[tile.part] + shape.code_row * row + range.step_begin * 64 + 16 * t;
        if constexpr (kQuantised) {
          const int at = scale_step == 32 ? 8 * t : scale_step == 8 ? 4 * (t & 1) : 4 * t;
          scale[n] =
              entry.scales[tile.part] + shape.scale_row * row + range.step_begin * scale_step + at;
        }
      }
      return;
    }
  }

  __device__ __forceinline__ void copy(int to, int n, int step) {
    copy_async(ring + to * 32, code[n] + step * 64);
    if constexpr (kQuantised) {
      if (scale_step == 32) {
        copy_few_async<8>(words + to * 32, scale[n] + step * 32);
      } else if (scale_step != 0) {
        copy_few_async<4>(words + to * 32, scale[n] + step * scale_step);
      }
    }
  }

  // The next loads, into a slot whose bytes have been read. Always one group of copies.
  __device__ __forceinline__ void load(int into) {
    const int base = into * kChunk;
    int loaded = 0;
    if (steps > 0) {
      if (tiles == 1) {
        loaded = kChunk;
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
          if (i < steps) copy(base + i, 0, i);
        }
      } else {
        loaded = kChunk / 2;
#pragma unroll
        for (int i = 0; i < kChunk / 2; ++i) {
          if (i < steps) copy(base + 2 * i, 0, i);
          if (i < steps && both) copy(base + 2 * i + 1, 1, i);
        }
      }
    }
    commit_copies();
    if (loaded == 0) return;
    steps -= loaded;
    if (steps > 0) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        code[n] += loaded * 64;
        if constexpr (kQuantised) scale[n] += loaded * scale_step;
      }
    } else {
      group += kWarps;
      find_group();
    }
  }

  // Slot `slot` has arrived.
  __device__ __forceinline__ void wait() const { wait_copies<kDepth - 1>(); }
  __device__ __forceinline__ void next() {
    load(slot);
    slot = slot + 1 == kDepth ? 0 : slot + 1;
  }
};

}  // namespace pianola::cuda::persistent
