// Products of one token, or of a few, by plain weights of regular shapes: what a single row decodes
// with, drafts or not.
#pragma once

#include <cuda.h>

#include "backends/cuda/kernels/barriers.cuh"
#include "backends/cuda/kernels/linear_operand.cuh"

namespace pianola::cuda::products {

// The bits of linear_kernel, with as little as possible between the end of the kernel before and
// the first result: a step of one token is a chain of kernels, most of them shorter than what one
// needs to find its addresses. So all of that happens before the wait (a prefetch keeps an address
// there, which the compiler would move). Eight warps multiply a slice of the columns each; others
// add the slices of a turn's tiles and store, while those are at the next turn.
inline constexpr int kOneBlocksPerSm = 3;  // that registers leave room for
// More tokens are rows_kernel's: here every thread block converts the activations whole.
inline constexpr int kFewTokens = 4;
inline constexpr int kFewTokensOfShortRows = 8;  // of at most 2,048 columns

// Weights come through a ring of stages, each 256 bytes of every row of the tiles of a warp, in
// boxes that the copy engine cuts out of the matrix: no thread computes an address for each row,
// and no load of activations stands behind them in a queue.
inline constexpr int kStageBoxes = 2;  // side by side; a box is the eight rows of a tile
inline constexpr int kStageSteps = kStageBoxes * kBoxBytes / 64;

template <int kTiles, int kTokens>
struct OneShared {
  static constexpr int kTileBytes = kTileRows * kBoxBytes;
  static constexpr int kStageBytes = kTiles * kStageBoxes * kTileBytes;
  static constexpr int kSlice = kTokens * kTiles * kTileRows;  // sums of one turn, in floats
  static constexpr int kPartial = kWarps * kSlice;
  // Warps that add the slices of a turn and store, one result a lane, while the others are at the
  // next turn.
  static constexpr int kAdders = (kSlice + 31) / 32;
  static constexpr int kAllThreads = kThreads + 32 * kAdders;
  // Then partial results twice, sums of squares, a barrier a stage; activations.
  static constexpr std::size_t bytes(int stages, int cols, int tokens) {
    return kBoxAlign +
           static_cast<std::size_t>(stages) * kWarps * (kStageBytes + sizeof(std::uint64_t)) +
           (2 * kPartial + kWarps * kTokens) * sizeof(float) +
           static_cast<std::size_t>(cols * tokens) * sizeof(float);
  }
};

struct OneParams {
  CUtensorMap map[3];  // of the codes of each part, as rows of bytes
  Params p;
};

// The high parts of four activations, then the low ones.
__device__ __forceinline__ uint4 high_words_first(const uint4& v) {
  return make_uint4(v.x, v.z, v.y, v.w);
}

// What all warps of a block know.
template <int kTiles, int kTokens>
struct OneBlock {
  using M = OneShared<kTiles, kTokens>;
  const Params& p;
  int tokens;
  unsigned char* ring;  // [kWarps, stages] of M::kStageBytes
  float* partials;      // [2, M::kPartial]
  float* squares;       // [kWarps, kTokens]
  uint4* staged;        // activations
  int unit_begin;
  int unit_end;
  int units_at_once;

  __device__ __forceinline__ OneBlock(const Params& params, unsigned char* unaligned) : p(params) {
    tokens = kTokens == 1 ? 1 : p.tokens;
    ring = unaligned + bytes_to_boxes(unaligned);
    partials = reinterpret_cast<float*>(ring + kWarps * p.stages * M::kStageBytes);
    squares = partials + 2 * M::kPartial;
    staged = reinterpret_cast<uint4*>(squares + kWarps * kTokens);
    const UnitRange units = units_of(p, static_cast<int>(blockIdx.x));
    unit_begin = units.begin;
    unit_end = units.end;
    units_at_once = p.gated ? kTiles / 2 : kTiles;
  }
  __device__ __forceinline__ int first_unit(int turn) const {
    return unit_begin + turn * units_at_once;
  }
  // Barriers of a turn's half of the partial results: it is full, it has been read.
  static __device__ __forceinline__ void tell_full(int turn) {
    arrive_named(1 + (turn & 1), M::kAllThreads);
  }
  static __device__ __forceinline__ void wait_full(int turn) {
    wait_named(1 + (turn & 1), M::kAllThreads);
  }
  static __device__ __forceinline__ void tell_read(int turn) {
    arrive_named(3 + (turn & 1), M::kAllThreads);
  }
  static __device__ __forceinline__ void wait_read(int turn) {
    wait_named(3 + (turn & 1), M::kAllThreads);
  }

  // What the adding warps do.
  __device__ __forceinline__ void add() const {
    const int result = static_cast<int>(threadIdx.x) - kThreads;
    Output mine = find_output<kTiles>(p, unit_begin, unit_end, result);
    prefetch(p.count);
    if (mine.residual) prefetch(mine.residual);
    wait_for_previous();
    const int live = __ldcg(p.count) - p.first;
    float residual = load_residual(mine);
    float scale = 1;
#pragma unroll 1
    for (int turn = 0; turn < p.turns; ++turn) {
      wait_full(turn);
      if (turn == 0 && p.norm) {
        const int token = kTokens == 1 ? 0 : min(mine.token, kTokens - 1);
        const float sum = add_slices(kWarps, [&](int s) { return squares[s * kTokens + token]; });
        scale = rsqrtf(sum / static_cast<float>(p.cols) + p.eps);
      }
      if (mine.out && mine.token < live) {
        store_output(p, mine, partials + (turn & 1) * M::kPartial, kWarps, M::kSlice, kTileRows,
                     scale, residual);
      }
      if (turn + 2 < p.turns) tell_read(turn);
      if (turn + 1 < p.turns) {
        mine = find_output<kTiles>(p, first_unit(turn + 1), unit_end, result);
        residual = load_residual(mine);
      }
    }
  }
};

// How weights come to a warp's ring, ahead of computing and across turns.
template <int kTiles, int kTokens>
struct OneRing {
  using M = OneShared<kTiles, kTokens>;
  const OneParams& params;
  const Params& p;
  const OneBlock<kTiles, kTokens>& block;
  std::uint32_t at;    // of the warp's ring
  std::uint32_t full;  // its barriers, one a stage
  int lane;
  int pieces;  // stages of a turn
  int first_box;
  // Of the next load; the tile is this lane's.
  int turn = 0;
  int piece = 0;
  const CUtensorMap* map = nullptr;  // null: none
  int row = 0;
  int bytes = 0;  // of a stage

  __device__ __forceinline__ OneRing(const OneParams& of, const OneBlock<kTiles, kTokens>& in)
      : params(of), p(of.p), block(in) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    lane = static_cast<int>(threadIdx.x) % 32;
    at = shared_address(block.ring) + warp * p.stages * M::kStageBytes;
    full = shared_address(block.staged) + p.cols * block.tokens * 4 + warp * p.stages * 8;
    pieces = p.slice_steps / kStageSteps;
    first_box = warp * p.slice_steps * 64 / kBoxBytes;
  }
  __device__ __forceinline__ int turn_bytes(int of_turn) const {
    const int units = max(0, min(block.units_at_once, block.unit_end - block.first_unit(of_turn)));
    return units * (p.gated ? 2 : 1) * kStageBoxes * M::kTileBytes;
  }
  // All stages at once, a tile of one a lane.
  __device__ __forceinline__ void fill() {
    if (lane < p.stages) init_barrier(full + 8 * lane, 1);
    fence_barriers();
    __syncwarp();
    const int stage = lane / kTiles;
    const int of_turn = stage / pieces;
    if (stage < p.stages && of_turn < p.turns) {
      if (lane % kTiles == 0) expect_bytes(full + 8 * stage, turn_bytes(of_turn));
      const Tile tile = tile_of(p, block.first_unit(of_turn), block.unit_end, lane % kTiles);
      if (tile.part >= 0)
        copy(stage, lane % kTiles, params.map + tile.part, stage - of_turn * pieces, tile.row);
    }
    turn = p.stages / pieces;
    piece = p.stages - turn * pieces;
    if (turn < p.turns) set_tile();
  }
  __device__ __forceinline__ void copy(int stage, int tile, const CUtensorMap* of, int of_piece,
                                       int of_row) const {
    copy_boxes(at + stage * M::kStageBytes + tile * (kStageBoxes * M::kTileBytes), of,
               first_box + of_piece * kStageBoxes, of_row, full + 8 * stage);
  }
  __device__ __forceinline__ void set_tile() {
    bytes = turn_bytes(turn);
    map = nullptr;
    if (lane >= kTiles) return;
    const Tile tile = tile_of(p, block.first_unit(turn), block.unit_end, lane);
    if (tile.part < 0) return;
    map = params.map + tile.part;
    row = tile.row;
  }
  // The next piece to a stage that has been read.
  __device__ __forceinline__ void load(int stage) {
    if (turn >= p.turns) return;
    if (lane == 0) expect_bytes(full + 8 * stage, bytes);
    if (map) copy(stage, lane, map, piece, row);
    if (++piece == pieces) {
      piece = 0;
      if (++turn < p.turns) set_tile();
    }
  }
};

// kTokens: 1, or as many as there may be. kQuads: four activations each of a token, that a lane has
// on their way at once.
template <Codes codes, int kTiles, int kQuads, int kTokens>
__global__ void __launch_bounds__(OneShared<kTiles, kTokens>::kAllThreads,
                                  kTokens == 1 ? kOneBlocksPerSm : 1)
    one_kernel(const __grid_constant__ OneParams params) {
  using S = Step<codes>;
  using M = OneShared<kTiles, kTokens>;
  static_assert(kTiles % 2 == 0);
  constexpr int kGroups = (kTokens + 3) / 4;  // of tokens, operands of a product
  const Params& p = params.p;
  extern __shared__ __align__(16) unsigned char unaligned[];
  const OneBlock<kTiles, kTokens> block(p, unaligned);
  const int tokens = block.tokens;
  const int warp = static_cast<int>(threadIdx.x) / 32;  // its slice
  const int lane = static_cast<int>(threadIdx.x) % 32;

  allow_next();
  if (warp >= kWarps) {
    block.add();
    return;
  }
  OneRing<kTiles, kTokens> ring(params, block);
  ring.fill();

  // A lane's quads lie 128 columns apart: the same place in steps 128 / kCols apart.
  const int slice_cols = p.slice_steps * S::kCols;  // a multiple of 128
  const int first = warp * slice_cols + 4 * lane;
  const Place place = place_of<codes>(4 * lane % S::kCols);
  const int stride = 128 / S::kCols * S::kProducts * 4 * tokens;
  uint4* to =
      block.staged + (first / S::kCols * S::kProducts + place.product) * tokens * 4 + place.t;
  int left = slice_cols / 128;
  const float* x_at[kTokens];
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    x_at[i] = p.in + static_cast<std::int64_t>(i < tokens ? i : 0) * p.in_ld + first;
  }
  const float* norm_at = p.norm ? p.norm + first : nullptr;
  const std::int32_t* gather = p.gather;
  constexpr bool kHoldsNorm = kQuads <= 4;
  float4 norm[kHoldsNorm ? kQuads : 1];
  const auto load_norms = [&] {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      norm[i] = make_float4(1, 1, 1, 1);
      if (norm_at && i < left) norm[i] = load_activation4(norm_at + 128 * i);
    }
  };
  if constexpr (kHoldsNorm) load_norms();
  prefetch(p.in + min(first, p.cols - 1));

  wait_for_previous();
  if (gather) {
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const int row = __ldcg(gather + (i < tokens ? i : 0));
      x_at[i] = p.in + static_cast<std::int64_t>(min(max(row, 0), p.in_rows - 1)) * p.in_ld + first;
    }
  }
  float square[kTokens] = {};
#pragma unroll 1
  while (true) {
    float4 x[kTokens][kQuads];
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        if (i < tokens && q < left) x[i][q] = load_activation4(x_at[i] + 128 * q);
      }
    }
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      if (q >= left) break;
      float4 weight = norm[kHoldsNorm ? q : 0];
      if constexpr (!kHoldsNorm) {
        weight = norm_at ? load_activation4(norm_at + 128 * q) : make_float4(1, 1, 1, 1);
      }
#pragma unroll
      for (int i = 0; i < kTokens; ++i) {
        if (i >= tokens) break;
        square[i] += square_sum(x[i][q]);
        to[q * stride + 4 * i] = high_words_first(activation_words(x[i][q], weight));
      }
    }
    left -= kQuads;
    if (left <= 0) break;
#pragma unroll
    for (int i = 0; i < kTokens; ++i) x_at[i] += 128 * kQuads;
    to += kQuads * stride;
    if (norm_at) norm_at += 128 * kQuads;
    if constexpr (kHoldsNorm) load_norms();
  }
  if (p.norm) {
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const float sum = warp_sum(square[i]);
      if (lane == 0) block.squares[warp * kTokens + i] = sum;
    }
  }
  __syncwarp();

  // Two tiles are the 16 rows of a product, and the high and low parts of four tokens its columns.
  const int g = lane / 4;
  const int t = lane % 4;
  float acc[kTiles / 2][kGroups][4] = {};
  std::uint32_t words_at[kGroups];  // of a token that there is
#pragma unroll
  for (int m = 0; m < kGroups; ++m) {
    const int token = min(4 * m + g / 2, tokens - 1);
    words_at[m] = shared_address(block.staged +
                                 (warp * p.slice_steps * S::kProducts * tokens + token) * 4 + t) +
                  g % 2 * 8;
  }
  const std::uint32_t row_at = ring.at + box_row(g) * kBoxBytes;
  const int chunk[2] = {(t ^ box_row(g)) * 16, ((t + 4) ^ box_row(g)) * 16};
  const int step_words = S::kProducts * tokens * 64;  // bytes
  int stage = 0;
  unsigned parity = 0;
#pragma unroll 1
  for (int turn = 0; turn < p.turns; ++turn) {
    int words = 0;
#pragma unroll 1
    for (int piece = 0; piece < ring.pieces; ++piece) {
      wait_copied(ring.full + 8 * stage, parity);
      const std::uint32_t from = row_at + stage * M::kStageBytes;
#pragma unroll
      for (int i = 0; i < kStageSteps; ++i) {
        uint4 weights[kTiles];
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          weights[n] = load_shared(from + (n * kStageBoxes + i / 2) * M::kTileBytes + chunk[i % 2]);
        }
#pragma unroll
        for (int j = 0; j < S::kProducts; ++j) {
          uint2 b[kGroups];
#pragma unroll
          for (int m = 0; m < kGroups; ++m) {
            b[m] = load_shared8(words_at[m] + words + i * step_words + j * tokens * 64);
          }
#pragma unroll
          for (int n = 0; n < kTiles / 2; ++n) {
#pragma unroll
            for (int part = 0; part < S::kParts; ++part) {
              std::uint32_t a[4];
              operand<codes>(weights[2 * n], j, part, a[0], a[2]);
              operand<codes>(weights[2 * n + 1], j, part, a[1], a[3]);
#pragma unroll
              for (int m = 0; m < kGroups; ++m) mma_bf16(acc[n][m], a, b[m].x, b[m].y);
            }
          }
        }
      }
      words += kStageSteps * step_words;
      __syncwarp();
      ring.load(stage);  // where these weights were read
      if (++stage == p.stages) {
        stage = 0;
        parity ^= 1;
      }
    }

    if (turn >= 2) block.wait_read(turn);
    float* partial = block.partials + (turn & 1) * M::kPartial + warp * M::kSlice + box_row(g);
#pragma unroll
    for (int m = 0; m < kGroups; ++m) {
      const int token = 4 * m + t;
#pragma unroll
      for (int n = 0; n < kTiles / 2; ++n) {
        if (token < tokens) {
          float* to_row = partial + (token * kTiles + 2 * n) * kTileRows;
          to_row[0] = acc[n][m][0] + acc[n][m][1];
          to_row[kTileRows] = acc[n][m][2] + acc[n][m][3];
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) acc[n][m][k] = 0;
      }
    }
    block.tell_full(turn);
  }
}

}  // namespace pianola::cuda::products
