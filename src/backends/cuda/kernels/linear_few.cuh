// Products of one token by quantised weights whose slices are a few steps long: what a single row
// of a small model decodes with.
#pragma once

#include "backends/cuda/kernels/linear_operand.cuh"

namespace pianola::cuda::products {

// The bits of linear_kernel, with as little as possible after the wait: the weights of the first
// turn lie in registers and addresses are known, each warp stages the activations of its slice for
// itself, and nothing waits for the block but the sum of the slices.
template <Codes codes, Scales scales, int kTiles, int kSteps>
struct Few {
  static constexpr int kSliceCols = kSteps * Step<codes>::kCols;
  static constexpr int kQuads = (kSliceCols + 127) / 128;  // four columns each, of a lane
  static constexpr int kPartial = kWarps * kTiles * kTileRows;
};

template <Codes codes, Scales scales, int kTiles, int kSteps>
__global__ void __launch_bounds__(kThreads, 2) few_kernel(const __grid_constant__ Params p) {
  using S = Step<codes>;
  using F = Few<codes, scales, kTiles, kSteps>;
  static_assert(kTiles * kTileRows <= 32);  // the results of a turn fit one warp
  __shared__ uint4 staged_words[kWarps][F::kSliceCols / 4];
  __shared__ float partials[2][F::kPartial];
  __shared__ float squares[kWarps];

  allow_next();
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int g = lane / 4;
  const int t = lane % 4;
  const int slice = warp & (p.slices - 1);
  const int team = warp / p.slices;  // warps that work on the same tiles
  const unsigned teams = kWarps / p.slices;
  const unsigned workers = gridDim.x * teams;
  const unsigned worker = blockIdx.x * teams + team;
  const int unit_begin = static_cast<int>(static_cast<unsigned>(p.units) * worker / workers);
  const int unit_end = static_cast<int>(static_cast<unsigned>(p.units) * (worker + 1) / workers);
  const int units_at_once = p.gated ? kTiles / 2 : kTiles;
  // Every team of a block makes the same number of turns: they meet at barriers.
  const int most = static_cast<int>((p.units + workers - 1) / workers);
  const int turns = (most + units_at_once - 1) / units_at_once;
  const int step_begin = slice_begin(p.steps, p.slices, slice);
  const int steps = slice_begin(p.steps, p.slices, slice + 1) - step_begin;

  uint4 weights[kSteps][kTiles];
  ScaleWords<codes, scales> words[kSteps][kTiles];
  const auto load_turn = [&](int turn) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const Tile tile =
          turn < turns ? tile_of(p, unit_begin + turn * units_at_once, unit_end, n) : Tile{};
      // Rows beyond the matrix read its last one: their results are not stored.
      const Part& part = p.part[max(tile.part, 0)];
      const std::int64_t row = min(tile.row + g, part.rows - 1);
      const std::byte* code = part.codes + p.code_row * row + step_begin * 64 + 16 * t;
      const std::byte* scale = part.scales + p.scale_row * row;
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        weights[i][n] = make_uint4(0, 0, 0, 0);
        words[i][n].clear();
        if (tile.part >= 0 && i < steps) {
          weights[i][n] = load_weight(code + 64 * i);
          words[i][n].load(scale, step_begin + i, t);
        }
      }
    }
  };
  load_turn(0);
  Output mine;
  if (slice == 0) mine = find_output<kTiles>(p, unit_begin, unit_end, lane);

  const int first = step_begin * S::kCols + 4 * lane;
  const int end = (step_begin + steps) * S::kCols;
  uint4* staged = staged_words[warp];
  float4 norm[F::kQuads];
#pragma unroll
  for (int i = 0; i < F::kQuads; ++i) {
    const int c = first + 128 * i;
    norm[i] =
        p.norm && c < end && c < p.cols ? load_activation4(p.norm + c) : make_float4(1, 1, 1, 1);
  }
  const float* x_at = p.in + first;
  const std::int32_t* gather = p.gather;
  const std::int32_t* count = p.count;
  keep_addresses(p, mine, first);

  wait_for_previous();
  if (gather) {
    x_at += static_cast<std::int64_t>(min(max(__ldcg(gather), 0), p.in_rows - 1)) * p.in_ld;
  }
  float4 x[F::kQuads];
#pragma unroll
  for (int i = 0; i < F::kQuads; ++i) {
    const int c = first + 128 * i;
    x[i] = c < end && c < p.cols ? load_activation4(x_at + 128 * i) : make_float4(0, 0, 0, 0);
  }
  int live = 0;
  float held_residual = 0;
  if (slice == 0) {
    live = __ldcg(count) - p.first;
    held_residual = load_residual(mine);
  }
  float square = 0;
#pragma unroll
  for (int i = 0; i < F::kQuads; ++i) {
    if (first + 128 * i >= end) continue;
    square += square_sum(x[i]);
    const int c = 4 * lane + 128 * i;
    const Place place = place_of<codes>(c % S::kCols);
    staged[(c / S::kCols * S::kProducts + place.product) * 4 + place.t] =
        activation_words(x[i], norm[i]);
  }
  __syncwarp();

  float scale = 1;
  for (int turn = 0; turn < turns; ++turn) {
    const int active =
        min(kTiles, (p.gated ? 2 : 1) * max(0, unit_end - unit_begin - turn * units_at_once));
    float acc[kTiles][1][4] = {};
    if (active > 0) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        if (i >= steps) continue;
        multiply_blocks<codes, scales, 1, kTiles>(
            acc, weights[i], words[i], active, 1, t, [&](int j, int) {
              return g == 0 ? staged[(i * S::kProducts + j) * 4 + t] : make_uint4(0, 0, 0, 0);
            });
      }
    }
    if (turn + 1 < turns) load_turn(turn + 1);
    if (turn == 0 && p.norm) {
      square = warp_sum(square);
      if (lane == 0) squares[warp] = square;
    }
    // Even and odd turns use different halves, so that one barrier a turn is enough.
    float* partial = partials[turn & 1];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      if (g == 0) {
        *reinterpret_cast<float2*>(partial + (warp * kTiles + n) * kTileRows + 2 * t) =
            make_float2(acc[n][0][0] + acc[n][0][2], acc[n][0][1] + acc[n][0][3]);
      }
    }
    __syncthreads();
    if (slice != 0) continue;
    if (turn == 0 && p.norm) {
      const float sum = add_slices(p.slices, [&](int s) { return squares[warp + s]; });
      scale = rsqrtf(sum / static_cast<float>(p.cols) + p.eps);
    }
    if (mine.out && live > 0) {
      store_output(p, mine, partial + warp * kTiles * kTileRows, p.slices, kTiles * kTileRows,
                   kTileRows, scale, held_residual);
    }
    if (turn + 1 < turns) {
      mine = find_output<kTiles>(p, unit_begin + (turn + 1) * units_at_once, unit_end, lane);
      held_residual = load_residual(mine);
    }
  }
}

}  // namespace pianola::cuda::products
