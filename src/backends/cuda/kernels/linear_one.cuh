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
// there, which the compiler would move), and three kernels of the chain fit a multiprocessor at
// once, so that weights never stop coming.
inline constexpr int kOneBlocksPerSm = 3;
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

// kTokens: 1, or as many as there may be. kQuads: four activations each of a token, that a lane has
// on their way at once.
template <Codes codes, int kTiles, int kQuads, int kTokens>
__global__ void __launch_bounds__(kThreads, kTokens == 1 ? kOneBlocksPerSm : 2)
    one_kernel(const __grid_constant__ OneParams params) {
  using S = Step<codes>;
  using M = OneShared<kTiles, kTokens>;
  constexpr int kResultWarps = (M::kSlice + 31) / 32;  // one result of a turn a lane
  static_assert(kResultWarps <= kWarps);
  const Params& p = params.p;
  const int tokens = kTokens == 1 ? 1 : p.tokens;
  extern __shared__ __align__(16) unsigned char unaligned[];
  unsigned char* memory =
      unaligned + (kBoxAlign - shared_address(unaligned) % kBoxAlign) % kBoxAlign;
  const int warp = threadIdx.x / 32;  // its slice
  const int lane = threadIdx.x % 32;
  unsigned char* ring = memory + warp * p.stages * M::kStageBytes;
  float* partials = reinterpret_cast<float*>(memory + kWarps * p.stages * M::kStageBytes);
  float* squares = partials + 2 * M::kPartial;
  uint4* staged = reinterpret_cast<uint4*>(squares + kWarps * kTokens);
  const std::uint32_t full =
      shared_address(reinterpret_cast<unsigned char*>(staged) + p.cols * tokens * 4) +
      warp * p.stages * 8;

  allow_next();
  const int g = lane / 4;
  const int t = lane % 4;
  const int unit_begin = blockIdx.x * p.share + min(static_cast<int>(blockIdx.x), p.extra);
  const int unit_end = unit_begin + p.share + (blockIdx.x < static_cast<unsigned>(p.extra) ? 1 : 0);
  const int units_at_once = p.gated ? kTiles / 2 : kTiles;
  if (lane == 0) {
#pragma unroll 1
    for (int i = 0; i < p.stages; ++i) {
      init_barrier(full + 8 * i, 1);
    }
    fence_barriers();
  }
  __syncwarp();

  // Loading runs ahead of computing, by the stages of the ring and across turns. A lane a tile.
  const int pieces = p.slice_steps / kStageSteps;
  const CUtensorMap* map = nullptr;  // of this lane's tile, or null
  int box_x = 0;
  int box_y = 0;
  int load_turn = 0;
  int pieces_to_load = pieces;
  int turn_bytes = 0;  // of a stage
  const auto set_box = [&] {
    const int unit = unit_begin + load_turn * units_at_once;
    const int units = max(0, min(units_at_once, unit_end - unit));
    turn_bytes = units * (p.gated ? 2 : 1) * kStageBoxes * M::kTileBytes;
    map = nullptr;
    if (lane >= kTiles) return;
    const Tile tile = tile_of(p, unit, unit_end, lane);
    if (tile.part < 0) return;
    map = params.map + tile.part;
    box_x = warp * p.slice_steps * 64 / kBoxBytes;
    box_y = tile.row;
  };
  const std::uint32_t tile_at = shared_address(ring) + lane * (kStageBoxes * M::kTileBytes);
  const auto load_stage = [&](int stage) {
    if (load_turn >= p.turns) return;
    const std::uint32_t barrier = full + 8 * stage;
    if (lane == 0) expect_bytes(barrier, turn_bytes);
    if (map) {
      copy_boxes(tile_at + stage * M::kStageBytes, map, box_x, box_y, barrier);
      box_x += kStageBoxes;
    }
    if (--pieces_to_load == 0) {
      pieces_to_load = pieces;
      ++load_turn;
      if (load_turn < p.turns) set_box();
    }
  };
  set_box();
#pragma unroll 1
  for (int i = 0; i < p.stages; ++i) load_stage(i);

  Output mine;
  const int result = threadIdx.x;
  const bool has_result = warp < kResultWarps;
  if (has_result) mine = find_output<kTiles>(p, unit_begin, unit_end, result);

  // A lane's quads lie 128 columns apart: the same place in steps 128 / kCols apart.
  const int slice_cols = p.slice_steps * S::kCols;  // a multiple of 128
  const int first = warp * slice_cols + 4 * lane;
  const Place place = place_of<codes>(4 * lane % S::kCols);
  const int stride = 128 / S::kCols * S::kProducts * 4 * tokens;
  uint4* to = staged + (first / S::kCols * S::kProducts + place.product) * tokens * 4 + place.t;
  int left = slice_cols / 128;
  const float* x_at[kTokens];
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    x_at[i] = p.in + static_cast<std::int64_t>(i < tokens ? i : 0) * p.in_ld + first;
  }
  const float* norm_at = p.norm ? p.norm + first : nullptr;
  const std::int32_t* gather = p.gather;
  const std::int32_t* count = p.count;
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
  keep_addresses(p, mine, first);

  wait_for_previous();
  if (gather) {
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      const int row = __ldcg(gather + (i < tokens ? i : 0));
      x_at[i] = p.in + static_cast<std::int64_t>(min(max(row, 0), p.in_rows - 1)) * p.in_ld + first;
    }
  }
  float square[kTokens] = {};
  int live = 0;
  float held_residual = 0;
  bool first_round = true;
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
    if (first_round && has_result) {
      live = __ldcg(count) - p.first;
      held_residual = load_residual(mine);
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
        to[q * stride + 4 * i] = activation_words(x[i][q], weight);
      }
    }
    left -= kQuads;
    if (left <= 0) break;
    first_round = false;
#pragma unroll
    for (int i = 0; i < kTokens; ++i) x_at[i] += 128 * kQuads;
    to += kQuads * stride;
    if (norm_at) norm_at += 128 * kQuads;
    if constexpr (kHoldsNorm) load_norms();
  }
  __syncwarp();

  float acc[kTiles][4] = {};
  const uint4* const activations =
      staged + (warp * p.slice_steps * S::kProducts * tokens + (kTokens == 1 ? 0 : g)) * 4 + t;
  const unsigned char* const weights_at = ring + box_row(g) * kBoxBytes;
  const int chunk[2] = {(t ^ box_row(g)) * 16, ((t + 4) ^ box_row(g)) * 16};
  float scale = 1;
  int stage = 0;
  unsigned parity = 0;
  for (int turn = 0; turn < p.turns; ++turn) {
    const uint4* at = activations;
#pragma unroll 1
    for (int piece = 0; piece < pieces; ++piece) {
      wait_copied(full + 8 * stage, parity);
      const unsigned char* from = weights_at + stage * M::kStageBytes;
#pragma unroll
      for (int i = 0; i < kStageSteps; ++i) {
        uint4 weights[kTiles];
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          weights[n] = *reinterpret_cast<const uint4*>(
              from + (n * kStageBoxes + i / 2) * M::kTileBytes + chunk[i % 2]);
        }
#pragma unroll
        for (int j = 0; j < S::kProducts; ++j) {
          uint4 v = make_uint4(0, 0, 0, 0);
          if (g < tokens) v = at[(i * S::kProducts + j) * tokens * 4];
          const std::uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
#pragma unroll
            for (int part = 0; part < S::kParts; ++part) {
              std::uint32_t b0 = 0;
              std::uint32_t b1 = 0;
              operand<codes>(weights[n], j, part, b0, b1);
              mma_bf16(acc[n], words, b0, b1);
            }
          }
        }
      }
      at += kStageSteps * S::kProducts * tokens * 4;
      __syncwarp();
      load_stage(stage);  // where these weights were read
      if (++stage == p.stages) {
        stage = 0;
        parity ^= 1;
      }
    }

    if (turn == 0 && p.norm) {
#pragma unroll
      for (int i = 0; i < kTokens; ++i) {
        const float sum = warp_sum(square[i]);
        if (lane == 0) squares[warp * kTokens + i] = sum;
      }
    }
    float* partial = partials + (turn & 1) * M::kPartial;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      if (g < tokens) {
        const int token = kTokens == 1 ? 0 : g;
        float* to_row = partial + ((warp * kTokens + token) * kTiles + n) * kTileRows;
        to_row[box_row(2 * t)] = acc[n][0] + acc[n][2];
        to_row[box_row(2 * t + 1)] = acc[n][1] + acc[n][3];
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) acc[n][k] = 0;
    }
    __syncthreads();
    if (!has_result) continue;
    if (turn == 0 && p.norm) {
      const int token = kTokens == 1 ? 0 : min(mine.token, kTokens - 1);
      const float sum = add_slices(kWarps, [&](int s) { return squares[s * kTokens + token]; });
      scale = rsqrtf(sum / static_cast<float>(p.cols) + p.eps);
    }
    if (mine.out && mine.token < live) {
      store_output(p, mine, partial, kWarps, M::kSlice, kTileRows, scale, held_residual);
    }
    if (turn + 1 < p.turns) {
      mine = find_output<kTiles>(p, unit_begin + (turn + 1) * units_at_once, unit_end, result);
      held_residual = load_residual(mine);
    }
  }
}

}  // namespace pianola::cuda::products
