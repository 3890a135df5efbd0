// Products for any shape and form, and the kernel that prepares activations for all blocks.
#pragma once

#include "backends/cuda/kernels/linear_operand.cuh"

namespace pianola::cuda::products {

// One block a token: its operand words, and one over its root mean square.
template <Codes codes>
__global__ void __launch_bounds__(kThreads) prepare_kernel(const Params p) {
  using S = Step<codes>;
  __shared__ float squares[kWarps];
  allow_next();
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int token = blockIdx.x;
  const int first = slice_begin(p.steps, p.slices, min(warp, p.slices - 1)) * S::kCols;
  const int end = slice_begin(p.steps, p.slices, min(warp, p.slices - 1) + 1) * S::kCols;
  float4 norm[kHeld];
  load_norm(p.norm, p.cols, first, end, lane, norm);
  wait_for_previous();
  if (token >= live_tokens(p)) return;
  const int row = p.gather ? __ldcg(p.gather + token) : token;
  const int groups = (p.tokens + 7) / 8;
  if (warp < p.slices) {
    const float square = warp_sum(convert_slice<codes>(
        p.norm, p.cols, p.in + static_cast<std::int64_t>(row) * p.in_ld, first, end, norm, lane,
        [&](int c, const uint4& words) {
          const Place place = place_of<codes>(c % S::kCols);
          const int product = c / S::kCols * S::kProducts + place.product;
          p.words[(product * groups + token / 8) * 32 + token % 8 * 4 + place.t] = words;
        }));
    if (lane == 0) squares[warp] = square;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    const float sum = add_slices(p.slices, [&](int s) { return squares[s]; });
    p.inverse_rms[token] = p.norm ? rsqrtf(sum / static_cast<float>(p.cols) + p.eps) : 1.0F;
  }
}

// kGroups of eight tokens; kTiles tiles at a time. With kStaged each block converts the activations
// of a few tokens itself; else prepare_kernel has done it.
template <Codes codes, Scales scales, int kGroups, int kTiles, int kDepth, bool kStaged>
__global__ void __launch_bounds__(kThreads, kGroups* kTiles <= 8 ? 2 : 1)
    linear_kernel(const Params p) {
  using S = Step<codes>;
  using M = Shared<kGroups, kTiles>;
  constexpr bool kQuantised = scales != Scales::kNone;
  constexpr int kTokens = M::kTokens;
  static_assert(!kStaged || kGroups == 1);
  extern __shared__ float shared[];
  float* squares = shared + 2 * M::kPartial;
  uint4* staged = reinterpret_cast<uint4*>(shared + M::kFloats);

  allow_next();
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int g = lane / 4;  // row of a tile as weights are loaded; token as results lie
  const int t = lane % 4;
  const int slice = warp & (p.slices - 1);
  const int team = warp / p.slices;  // warps that work on the same tiles
  const int teams = kWarps / p.slices;

  // Units of this team: contiguous, so that neighbours read neighbouring rows.
  const unsigned workers = gridDim.x * teams;
  const unsigned worker = blockIdx.x * teams + team;
  const int unit_begin = static_cast<int>(static_cast<unsigned>(p.units) * worker / workers);
  const int unit_end = static_cast<int>(static_cast<unsigned>(p.units) * (worker + 1) / workers);
  const int units_at_once = p.gated ? kTiles / 2 : kTiles;
  // Every team of a block makes the same number of turns: they meet at barriers.
  const int most = static_cast<int>((p.units + workers - 1) / workers);
  const int turns = (most + units_at_once - 1) / units_at_once;
  const int step_begin = slice_begin(p.steps, p.slices, slice);
  const int step_end = slice_begin(p.steps, p.slices, slice + 1);

  uint4 weights[kDepth][kTiles];
  ScaleWords<codes, scales> words[kQuantised ? kDepth : 1][kQuantised ? kTiles : 1];
  const std::byte* code_base[kTiles];  // of the turn whose weights are being loaded
  const std::byte* scale_base[kQuantised ? kTiles : 1];
  const auto set_bases = [&](int turn) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const Tile tile =
          turn < turns ? tile_of(p, unit_begin + turn * units_at_once, unit_end, n) : Tile{};
      code_base[n] = nullptr;
      if (tile.part < 0) continue;
      // Rows beyond the matrix read its last one: their results are not stored.
      const Part& part = p.part[tile.part];
      const int row = min(tile.row + g, part.rows - 1);
      code_base[n] = part.codes + static_cast<std::int64_t>(p.code_row) * row + 16 * t;
      if constexpr (kQuantised)
        scale_base[n] = part.scales + static_cast<std::int64_t>(p.scale_row) * row;
    }
  };
  const auto load_step = [&](int i, int step) {
    // Rows of f32, f16 and bf16 end where the matrix ends; those of codes are padded.
    const bool inside =
        step < step_end && (kQuantised || step * S::kCols + column<codes>(0, t) < p.cols);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      weights[i][n] = make_uint4(0, 0, 0, 0);
      if constexpr (kQuantised) words[i][n].clear();
      if (inside && code_base[n]) {
        weights[i][n] = load_weight(code_base[n] + step * 64);
        if constexpr (kQuantised) words[i][n].load(scale_base[n], step, t);
      }
    }
  };

  set_bases(0);
#pragma unroll
  for (int i = 0; i < kDepth; ++i) load_step(i, step_begin + i);

  const int per_team = kThreads / teams;
  const int rank = static_cast<int>(threadIdx.x) - team * per_team;
  Output mine = find_output<kTiles>(p, unit_begin, unit_end, rank);
  int live = 0;
  float held_residual = 0;
  bool staged_here = false;  // whether this lane's token has staged words
  // The last token's sum of squares is added up when the products are on their way.
  float square = 0;
  const auto keep_square = [&](int token) {
    const float sum = warp_sum(square);
    if (lane == 0) squares[warp * kTokens + token] = sum;
  };
  if constexpr (kStaged) {
    const int first = step_begin * S::kCols;
    const int end = step_end * S::kCols;
    float4 norm[kHeld];
    load_norm(p.norm, p.cols, first, end, lane, norm);
    keep_addresses(p, mine, first + 4 * lane);
    wait_for_previous();
    live = live_tokens(p);
    held_residual = load_residual(mine);
    staged_here = g < p.tokens;
    if (team == 0) {
      for (int token = 0; token < p.tokens; ++token) {
        if (token > 0) keep_square(token - 1);
        const int row = p.gather ? min(max(__ldcg(p.gather + token), 0), p.in_rows - 1) : token;
        square =
            convert_slice<codes>(p.norm, p.cols, p.in + static_cast<std::int64_t>(row) * p.in_ld,
                                 first, end, norm, lane, [&](int c, const uint4& v) {
                                   const Place place = place_of<codes>(c % S::kCols);
                                   const int product = c / S::kCols * S::kProducts + place.product;
                                   staged[(product * p.tokens + token) * 4 + place.t] = v;
                                 });
      }
    }
    if (teams > 1) {
      __syncthreads();
    } else {
      __syncwarp();
    }
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

  for (int turn = 0; turn < turns; ++turn) {
    // Tiles of this turn that exist, the same for all lanes of a warp.
    const int active =
        min(kTiles, (p.gated ? 2 : 1) * max(0, unit_end - unit_begin - turn * units_at_once));
    for (int base = 0; base < p.slice_steps; base += kDepth) {
      const bool last = base + kDepth >= p.slice_steps;
      if (last) set_bases(turn + 1);  // what is loaded from here on belongs to the next turn
#pragma unroll
      for (int i = 0; i < kDepth; ++i) {
        const int step = step_begin + base + i;
        if (step < step_end && active > 0) {
          const auto activations = [&](int j, int m) -> uint4 {
            const int product = step * S::kProducts + j;
            if constexpr (kStaged) {
              if (!staged_here) return make_uint4(0, 0, 0, 0);
              return staged[(product * p.tokens + g) * 4 + t];
            } else {
              return __ldcg(p.words + (product * ((p.tokens + 7) / 8) + m) * 32 + lane);
            }
          };
          if constexpr (!kQuantised) {
            uint4 ahead[kStaged ? 1 : S::kProducts][kGroups];
            if constexpr (!kStaged) {
#pragma unroll
              for (int j = 0; j < S::kProducts; ++j) {
#pragma unroll
                for (int m = 0; m < kGroups; ++m) {
                  ahead[j][m] = m * 8 < p.tokens ? activations(j, m) : make_uint4(0, 0, 0, 0);
                }
              }
            }
#pragma unroll
            for (int j = 0; j < S::kProducts; ++j) {
#pragma unroll
              for (int m = 0; m < kGroups; ++m) {
                const uint4 v = kStaged ? activations(j, m) : ahead[kStaged ? 0 : j][m];
                const std::uint32_t a[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                for (int n = 0; n < kTiles; ++n) {
#pragma unroll
                  for (int part = 0; part < S::kParts; ++part) {
                    std::uint32_t b0 = 0;
                    std::uint32_t b1 = 0;
                    operand<codes>(weights[i][n], j, part, b0, b1);
                    mma_bf16(acc[n][m], a, b0, b1);
                  }
                }
              }
            }
          } else {
            multiply_blocks<codes, scales>(acc, weights[i], words[i], active, p.tokens, t,
                                           activations);
          }
        }
        const int next = base + i + kDepth;
        load_step(i, step_begin + (last ? next - p.slice_steps : next));
      }
    }

    // Partial results of this turn, [warp][token][tile][row]; even and odd turns use different
    // halves, so that one barrier a turn is enough.
    if constexpr (kStaged) {
      if (turn == 0 && team == 0 && p.norm) keep_square(p.tokens - 1);
    }
    float* partial = shared + (turn & 1) * M::kPartial;
    float* slice = partial + warp * kTokens * kTiles * kTileRows;
#pragma unroll
    for (int m = 0; m < kGroups; ++m) {
      const bool wanted = 8 * m + g < p.tokens;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        // High and low parts of a token lie in the same lane.
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
    const float* sums = partial + team * p.slices * kTokens * kTiles * kTileRows;
    for (int o = rank; o < outputs; o += per_team) {
      const bool first = o == rank;
      const Output at = first ? mine : find_output<kTiles>(p, unit, unit_end, o);
      if (!at.out) continue;
      float scale = 1;
      if (p.norm) {
        if constexpr (kStaged) {
          const float sum =
              add_slices(p.slices, [&](int s) { return squares[s * kTokens + at.token]; });
          scale = rsqrtf(sum / static_cast<float>(p.cols) + p.eps);
        } else {
          scale = __ldcg(p.inverse_rms + at.token);
        }
      }
      store_output(p, at, sums, p.slices, kTokens * kTiles * kTileRows, kTileRows, scale,
                   first ? held_residual : load_residual(at));
    }
    if (turn + 1 < turns) {
      mine = find_output<kTiles>(p, unit + units_at_once, unit_end, rank);
      held_residual = load_residual(mine);
    }
  }
}

}  // namespace pianola::cuda::products
