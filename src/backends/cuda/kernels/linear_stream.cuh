// Products of plain weights of regular shapes: the kernel that decoding spends its time in.
#pragma once

#include "backends/cuda/kernels/linear_operand.cuh"

namespace pianola::cuda::products {

// The same for the shapes that matter most: plain weights whose rows cut into eight equal slices of
// whole steps. Weights travel through shared memory, every thread its own 16 bytes at a time:
// kDepth steps are on their way, also before the kernel before has ended, and no thread waits for
// another's. It gives the bits that linear_kernel would give.
inline constexpr int kStepsAtOnce = 2;
// Buffers of partial results: two save a barrier, where there is room.
template <int kGroups>
inline constexpr int kPartials = kGroups <= 2 ? 2 : 1;

template <Codes codes, int kGroups, int kTiles, int kDepth, bool kStaged>
__global__ void __launch_bounds__(kThreads, kGroups* kTiles <= 16 ? 2 : 1)
    stream_kernel(const Params p) {
  using S = Step<codes>;
  using M = Shared<kGroups, kTiles>;
  constexpr int kTokens = M::kTokens;
  static_assert(!kStaged || kGroups == 1);
  static_assert(kDepth % kStepsAtOnce == 0);
  extern __shared__ __align__(16) float shared[];
  uint4* ring = reinterpret_cast<uint4*>(shared) + threadIdx.x;  // [depth][tile][thread]
  float* partials = shared + kDepth * kTiles * kThreads * 4;
  float* squares = partials + kPartials<kGroups> * M::kPartial;
  uint4* staged = reinterpret_cast<uint4*>(squares + M::kSquares);

  allow_next();
  const int warp = threadIdx.x / 32;  // its slice
  const int lane = threadIdx.x % 32;
  const int g = lane / 4;
  const int t = lane % 4;
  const int block = blockIdx.x;
  const int unit_begin = block * p.share + min(block, p.extra);
  const int unit_end = unit_begin + p.share + (block < p.extra ? 1 : 0);
  const int units_at_once = p.gated ? kTiles / 2 : kTiles;
  const int step_begin = warp * p.slice_steps;

  // Loading runs ahead of computing, by kDepth steps and across turns.
  const std::byte* code[kTiles];
  bool exists[kTiles];
  int load_turn = 0;
  int steps_to_load = p.slice_steps;
  const auto set_tiles = [&](int turn) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const Tile tile = tile_of(p, unit_begin + turn * units_at_once, unit_end, n);
      exists[n] = turn < p.turns && tile.part >= 0;
      if (!exists[n]) continue;
      // Rows beyond the matrix read its last one: their results are not stored.
      const Part& part = p.part[tile.part];
      const int row = min(tile.row + g, part.rows - 1);
      code[n] = part.codes + static_cast<std::int64_t>(p.code_row) * row + step_begin * 64 + 16 * t;
    }
  };
  const auto load_steps = [&](int slot) {
#pragma unroll
    for (int i = 0; i < kStepsAtOnce; ++i) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        if (exists[n]) copy_async(ring + ((slot + i) * kTiles + n) * kThreads, code[n] + i * 64);
      }
    }
    commit_copies();
#pragma unroll
    for (int n = 0; n < kTiles; ++n) code[n] += kStepsAtOnce * 64;
    steps_to_load -= kStepsAtOnce;
    if (steps_to_load == 0) {
      steps_to_load = p.slice_steps;
      set_tiles(++load_turn);
    }
  };
  set_tiles(0);
#pragma unroll 1
  for (int i = 0; i < kDepth; i += kStepsAtOnce) load_steps(i);
  const int rank = threadIdx.x;
  Output mine = find_output<kTiles>(p, unit_begin, unit_end, rank);

  const int slice_cols = p.slice_steps * S::kCols;  // a multiple of 128
  int live = 0;
  float held_residual = 0;
  // The last token's sum of squares is added up when the products are on their way.
  float square = 0;
  const auto keep_square = [&](int token) {
    const float sum = warp_sum(square);
    if (lane == 0) squares[warp * kTokens + token] = sum;
  };
  if constexpr (kStaged) {
    // A lane's quads lie 128 columns apart: the same place in steps 128 / kCols apart.
    const int first = warp * slice_cols + 4 * lane;
    const Place place = place_of<codes>(4 * lane % S::kCols);
    const int product = first / S::kCols * S::kProducts + place.product;
    const int stride = 128 / S::kCols * S::kProducts * p.tokens * 4;
    const int quads = slice_cols / 128;
    float4 norm[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      norm[i] = p.norm && i < quads ? load_activation4(p.norm + first + 128 * i)
                                    : make_float4(1, 1, 1, 1);
    }
    keep_addresses(p, mine, first);
    wait_for_previous();
    live = live_tokens(p);
    held_residual = load_residual(mine);
    for (int token = 0; token < p.tokens; ++token) {
      if (token > 0) keep_square(token - 1);
      const int row = p.gather ? min(max(__ldcg(p.gather + token), 0), p.in_rows - 1) : token;
      const float* x_row = p.in + static_cast<std::int64_t>(row) * p.in_ld + first;
      uint4* to = staged + (product * p.tokens + token) * 4 + place.t;
      square = 0;
      for (int base = 0; base < quads; base += 2 * kHeld) {
        float4 x[2 * kHeld];
#pragma unroll
        for (int i = 0; i < 2 * kHeld; ++i) {
          if (base + i < quads) x[i] = load_activation4(x_row + 128 * (base + i));
        }
#pragma unroll
        for (int i = 0; i < 2 * kHeld; ++i) {
          if (base + i >= quads) continue;
          float4 weight = i < kHeld ? norm[i % kHeld] : make_float4(1, 1, 1, 1);
          if (p.norm && (base > 0 || i >= kHeld)) {
            weight = __ldg(reinterpret_cast<const float4*>(p.norm + first + 128 * (base + i)));
          }
          square += square_sum(x[i]);
          to[(base + i) * stride] = activation_words(x[i], weight);
        }
      }
    }
    __syncwarp();
  } else {
    wait_for_previous();
    live = live_tokens(p);
    held_residual = load_residual(mine);
  }

  float acc[kTiles][kGroups][4];
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int m = 0; m < kGroups; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[n][m][i] = 0;
    }
  }

  const int groups = (p.tokens + 7) / 8;
  int slot = 0;
  for (int turn = 0; turn < p.turns; ++turn) {
    int product = step_begin * S::kProducts;
    for (int step = 0; step < p.slice_steps; step += kStepsAtOnce) {
      wait_copies<kDepth / kStepsAtOnce - 1>();
#pragma unroll
      for (int i = 0; i < kStepsAtOnce; ++i) {
        uint4 weights[kTiles];
#pragma unroll
        for (int n = 0; n < kTiles; ++n) weights[n] = ring[((slot + i) * kTiles + n) * kThreads];
#pragma unroll
        for (int j = 0; j < S::kProducts; ++j) {
          uint4 a[kGroups];
#pragma unroll
          for (int m = 0; m < kGroups; ++m) {
            a[m] = make_uint4(0, 0, 0, 0);
            if constexpr (kStaged) {
              if (g < p.tokens) a[m] = staged[((product + j) * p.tokens + g) * 4 + t];
            } else {
              if (m < groups) a[m] = __ldcg(p.words + ((product + j) * groups + m) * 32 + lane);
            }
          }
#pragma unroll
          for (int m = 0; m < kGroups; ++m) {
            const std::uint32_t words[4] = {a[m].x, a[m].y, a[m].z, a[m].w};
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
#pragma unroll
              for (int part = 0; part < S::kParts; ++part) {
                std::uint32_t b0 = 0;
                std::uint32_t b1 = 0;
                operand<codes>(weights[n], j, part, b0, b1);
                mma_bf16(acc[n][m], words, b0, b1);
              }
            }
          }
        }
        product += S::kProducts;
      }
      load_steps(slot);  // into the slots that were just read
      slot = slot + kStepsAtOnce == kDepth ? 0 : slot + kStepsAtOnce;
    }

    if constexpr (kStaged) {
      if (turn == 0 && p.norm) keep_square(p.tokens - 1);
    }
    float* partial = partials + (kPartials<kGroups> == 2 ? turn & 1 : 0) * M::kPartial;
    float* slice = partial + warp * kTokens * kTiles * kTileRows;
#pragma unroll
    for (int m = 0; m < kGroups; ++m) {
      const bool wanted = 8 * m + g < p.tokens;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        if (wanted) {
          *reinterpret_cast<float2*>(slice + ((8 * m + g) * kTiles + n) * kTileRows + 2 * t) =
              make_float2(acc[n][m][0] + acc[n][m][2], acc[n][m][1] + acc[n][m][3]);
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) acc[n][m][k] = 0;
      }
    }
    __syncthreads();

    const int unit = unit_begin + turn * units_at_once;
    const int outputs = units_at_once * kTileRows * live;
    for (int o = rank; o < outputs; o += kThreads) {
      const bool first = o == rank;
      const Output at = first ? mine : find_output<kTiles>(p, unit, unit_end, o);
      if (!at.out) continue;
      float scale = 1;
      if (p.norm) {
        if constexpr (kStaged) {
          const float sum =
              add_slices(kWarps, [&](int s) { return squares[s * kTokens + at.token]; });
          scale = rsqrtf(sum / static_cast<float>(p.cols) + p.eps);
        } else {
          scale = __ldcg(p.inverse_rms + at.token);
        }
      }
      store_output(p, at, partial, kWarps, kTokens * kTiles * kTileRows, scale,
                   first ? held_residual : load_residual(at));
    }
    if (turn + 1 < p.turns) {
      mine = find_output<kTiles>(p, unit + units_at_once, unit_end, rank);
      held_residual = load_residual(mine);
    }
    if (kPartials<kGroups> == 1) __syncthreads();
  }
}

}  // namespace pianola::cuda::products
