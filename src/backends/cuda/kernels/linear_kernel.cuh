// The kernels behind linear.h, for one form of weights each. linear_*.cu instantiate them.
//
// A block is eight warps. Warps that share a tile of eight rows each take a slice of the columns;
// blocks take contiguous ranges of tiles. Weights are the operand of eight columns of a tensor-core
// product, so one 16-byte load of a lane (512 bytes of a warp) feeds it directly; the operand of 16
// rows holds the high bfloat16 parts of eight tokens above their low parts.
#pragma once

#include <algorithm>

#include "backends/cuda/kernels/device.cuh"
#include "backends/cuda/kernels/linear.h"

namespace pianola::cuda::products {

inline constexpr int kWarps = 8;
inline constexpr int kThreads = kWarps * 32;
inline constexpr int kTileRows = 8;

// What one 16-byte load of a lane (512 of a warp: 8 rows) brings, by form of the weights.
template <Codes codes>
struct Step {
  static constexpr int kCols = codes == Codes::kF32    ? 16
                               : codes == Codes::kInt8 ? 64
                               : codes == Codes::kInt4 ? 128
                                                       : 32;
  static constexpr int kProducts = kCols / 16;  // tensor-core products
  // bfloat16 parts that represent a weight exactly
  static constexpr int kParts = codes == Codes::kF32 ? 3 : codes == Codes::kF16 ? 2 : 1;
};

// First of the four columns that lane t (0..3 of its row) holds in product j of a step. A product
// sums over 16 columns in any order, as long as weights and activations agree on it.
template <Codes codes>
__device__ __forceinline__ constexpr int column(int j, int t) {
  if constexpr (codes == Codes::kF32) return 4 * t;
  if constexpr (codes == Codes::kF16 || codes == Codes::kBF16) return 8 * t + 4 * j;
  return 16 * j + 4 * t;
}

// The inverse: which product and lane hold the four columns from `c` on, a multiple of four.
struct Place {
  int product;
  int t;
};
template <Codes codes>
__device__ __forceinline__ Place place_of(int c) {
  if constexpr (codes == Codes::kF32) return {0, c / 4};
  if constexpr (codes == Codes::kF16 || codes == Codes::kBF16) return {c / 4 % 2, c / 8};
  return {c / 16, c % 16 / 4};
}

// One part of the launch, as the kernel sees it.
struct Part {
  const std::byte* codes = nullptr;
  const std::byte* scales = nullptr;
  const float* bias = nullptr;
  float* out = nullptr;
  int rows = 0;
  int ld = 0;
  int first_tile = 0;  // tiles of earlier parts
};

struct Params {
  Part part[3];
  const float* in = nullptr;
  const float* norm = nullptr;
  const float* residual = nullptr;
  const std::int32_t* count = nullptr;
  const std::int32_t* gather = nullptr;
  uint4* words = nullptr;      // prepared activations: [product of the row][group][lane]
  float* inverse_rms = nullptr;  // [tokens], beside them
  float eps = 0;
  int first = 0;
  int in_ld = 0;
  int in_rows = 0;  // rows that `gather` may name, or a bound on it
  int cols = 0;
  int tokens = 1;  // of the bucket
  int parts = 1;
  int gated = 0;
  int units = 0;        // tiles, or pairs of a gate and an up tile
  int slices = 1;       // warps that share the columns of a tile: 1, 2, 4 or 8
  int steps = 0;        // 16-byte loads along a row, padding included
  int slice_steps = 0;  // the most of one slice, a multiple of the prefetch depth
  int code_row = 0;     // bytes
  int scale_row = 0;    // bytes
  // Of stream_kernel: units of each block, and how many blocks take one more.
  int share = 0;
  int extra = 0;
  int turns = 0;
};

struct Tile {
  int part = -1;
  int row = 0;
};

__device__ __forceinline__ Tile tile_of(const Params& p, int unit, int end_unit, int slot) {
  if (p.gated) {
    const int pair = unit + slot / 2;
    return pair < end_unit ? Tile{slot % 2, pair * kTileRows} : Tile{};
  }
  const int tile = unit + slot;
  if (tile >= end_unit) return {};
  int part = 0;
#pragma unroll
  for (int i = 1; i < 3; ++i) {
    if (i < p.parts && tile >= p.part[i].first_tile) part = i;
  }
  return {part, (tile - p.part[part].first_tile) * kTileRows};
}

// The scales of a tile for one step travel with its codes: a lane loads a word or two of its own row
// and fetches those of the two rows whose results it holds from the lanes that loaded them.
template <Codes codes, Scales scales>
struct ScaleWords {
  static constexpr bool kWide = codes == Codes::kInt4 && scales == Scales::kFloatPair;
  static constexpr int kRowBytes =
      kWide ? 32 : codes == Codes::kInt8 && scales == Scales::kHalfPair ? 8 : 16;
  std::uint32_t word[kWide ? 2 : 1];

  __device__ __forceinline__ void clear() { word[0] = 0, word[kWide ? 1 : 0] = 0; }
  // `row` is the scale row of the lane's own row of the tile.
  __device__ __forceinline__ void load(const std::byte* row, int step, int t) {
    const std::byte* at = row + static_cast<std::int64_t>(step) * kRowBytes;
    if constexpr (kWide) {
      const uint2 v = __ldg(reinterpret_cast<const uint2*>(at) + t);
      word[0] = v.x, word[1] = v.y;
    } else if constexpr (kRowBytes == 8) {
      word[0] = __ldg(reinterpret_cast<const std::uint32_t*>(at) + (t & 1));
    } else {
      word[0] = __ldg(reinterpret_cast<const std::uint32_t*>(at) + t);
    }
  }
  // d and m of block (or product, for kFloat16) `b` in row `row` of the tile.
  __device__ __forceinline__ float2 get(int row, int b) const {
    if constexpr (scales == Scales::kHalfPair) {
      const std::uint32_t raw = __shfl_sync(kAllLanes, word[0], row * 4 + b);
      return __half22float2(*reinterpret_cast<const __half2*>(&raw));
    } else if constexpr (kWide) {
      return make_float2(__uint_as_float(__shfl_sync(kAllLanes, word[0], row * 4 + b)),
                         __uint_as_float(__shfl_sync(kAllLanes, word[1], row * 4 + b)));
    } else if constexpr (scales == Scales::kFloatPair) {
      return make_float2(__uint_as_float(__shfl_sync(kAllLanes, word[0], row * 4 + 2 * b)),
                         __uint_as_float(__shfl_sync(kAllLanes, word[0], row * 4 + 2 * b + 1)));
    } else {
      return make_float2(__uint_as_float(__shfl_sync(kAllLanes, word[0], row * 4 + b)), 0.0F);
    }
  }
};

// The bfloat16 operand of product j from a lane's 16 bytes; part 0 is the highest.
template <Codes codes>
__device__ __forceinline__ void operand(const uint4& w, int j, int part, std::uint32_t& b0,
                                        std::uint32_t& b1) {
  const std::uint32_t words[4] = {w.x, w.y, w.z, w.w};
  if constexpr (codes == Codes::kBF16) {
    b0 = words[2 * j];
    b1 = words[2 * j + 1];
  } else if constexpr (codes == Codes::kF16) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::uint32_t raw = words[2 * j + i];
      const float2 v = __half22float2(*reinterpret_cast<const __half2*>(&raw));
      const SplitPair s = split_bf16(v.x, v.y);
      (i ? b1 : b0) = part == 0 ? s.high : s.low;
    }
  } else if constexpr (codes == Codes::kF32) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float a = __uint_as_float(words[2 * i]);
      float b = __uint_as_float(words[2 * i + 1]);
      std::uint32_t bits = pack_bf16(a, b);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        if (k < part) {
          a -= bf16_low(bits);
          b -= bf16_high(bits);
          bits = pack_bf16(a, b);
        }
      }
      (i ? b1 : b0) = bits;
    }
  } else if constexpr (codes == Codes::kInt4) {
    // 0x4300 | code is 128 + code; the difference to 128 is exact.
    const std::uint32_t word = words[j / 2];
    const int shift = 8 * (j % 2);
    const __nv_bfloat162 bias =
        __halves2bfloat162(__ushort_as_bfloat16(0x4300), __ushort_as_bfloat16(0x4300));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::uint32_t raw = ((word >> (shift + 4 * i)) & 0x000f000fU) | 0x43004300U;
      const __nv_bfloat162 v = __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&raw), bias);
      (i ? b1 : b0) = *reinterpret_cast<const std::uint32_t*>(&v);
    }
  } else {
    // Bytes become 2^23 + (code + 128) as f32, and what remains without the bias is exact.
    const std::uint32_t word = words[j] ^ 0x80808080U;
    constexpr float kBias = 8388608.0F + 128.0F;
    const float v0 = __uint_as_float(__byte_perm(word, 0x4b000000U, 0x7540)) - kBias;
    const float v1 = __uint_as_float(__byte_perm(word, 0x4b000000U, 0x7541)) - kBias;
    const float v2 = __uint_as_float(__byte_perm(word, 0x4b000000U, 0x7542)) - kBias;
    const float v3 = __uint_as_float(__byte_perm(word, 0x4b000000U, 0x7543)) - kBias;
    b0 = pack_bf16(v0, v1);
    b1 = pack_bf16(v2, v3);
  }
}

// Four activations of one token, times the norm's weight, as operand words of a product: rows g are
// the high parts of eight tokens, rows g + 8 their low parts.
__device__ __forceinline__ uint4 activation_words(const float4& x, const float4& norm) {
  const SplitPair first = split_bf16(x.x * norm.x, x.y * norm.y);
  const SplitPair second = split_bf16(x.z * norm.z, x.w * norm.w);
  return make_uint4(first.high, first.low, second.high, second.low);
}

__device__ __forceinline__ float square_sum(const float4& x) {
  return x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w;
}

__device__ __forceinline__ float silu(float x) { return x / (1.0F + __expf(-x)); }

__device__ __forceinline__ int slice_begin(const Params& p, int slice) {
  return static_cast<int>(static_cast<unsigned>(p.steps) * static_cast<unsigned>(slice) /
                          static_cast<unsigned>(p.slices));
}

// Sums over slices, in order; `at(s)` is one of them.
template <typename At>
__device__ __forceinline__ float add_slices(int slices, const At& at) {
  float part[kWarps];
#pragma unroll
  for (int s = 0; s < kWarps; ++s) part[s] = s < slices ? at(s) : 0.0F;
  float sum = 0;
#pragma unroll
  for (int s = 0; s < kWarps; ++s) sum += part[s];
  return sum;
}

// Quads (four columns) of one slice that a lane holds at once.
inline constexpr int kHeld = 4;

// One warp converts its slice of one token: `store(quad column, words)`. Returns the slice's sum of
// squares, in the order that every route shares: a lane's quads in turn, then lanes as a tree.
template <Codes codes, typename Store>
__device__ __forceinline__ float convert_slice(const Params& p, const float* x_row, int first,
                                               int end, const float4 (&norm)[kHeld], int lane,
                                               const Store& store) {
  float square = 0;
  for (int base = first + 4 * lane; base < end; base += 128 * kHeld) {
    float4 x[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int c = base + 128 * i;
      x[i] = c < p.cols && c < end ? load_activation4(x_row + c) : make_float4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int c = base + 128 * i;
      if (c >= end) continue;
      float4 weight = norm[i];
      if (p.norm && base >= first + 128 * kHeld) {
        weight = c < p.cols ? __ldg(reinterpret_cast<const float4*>(p.norm + c))
                            : make_float4(1, 1, 1, 1);
      }
      square += square_sum(x[i]);
      store(c, activation_words(x[i], weight));
    }
  }
  return warp_sum(square);
}

// The norm's weights of a lane's first quads: they do not depend on the kernel before.
__device__ __forceinline__ void load_norm(const Params& p, int first, int end, int lane,
                                          float4 (&norm)[kHeld]) {
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int c = first + 4 * lane + 128 * i;
    norm[i] = p.norm && c < end && c < p.cols
                  ? __ldg(reinterpret_cast<const float4*>(p.norm + c))
                  : make_float4(1, 1, 1, 1);
  }
}

__device__ __forceinline__ int live_tokens(const Params& p) {
  return max(0, min(__ldcg(p.count) - p.first, p.tokens));
}

// One block a token: its operand words, and one over its root mean square.
template <Codes codes>
__global__ void __launch_bounds__(kThreads) prepare_kernel(const Params p) {
  using S = Step<codes>;
  __shared__ float squares[kWarps];
  allow_next();
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int token = blockIdx.x;
  const int first = slice_begin(p, min(warp, p.slices - 1)) * S::kCols;
  const int end = slice_begin(p, min(warp, p.slices - 1) + 1) * S::kCols;
  float4 norm[kHeld];
  load_norm(p, first, end, lane, norm);
  wait_for_previous();
  if (token >= live_tokens(p)) return;
  const int row = p.gather ? __ldcg(p.gather + token) : token;
  const int groups = (p.tokens + 7) / 8;
  if (warp < p.slices) {
    const float square = convert_slice<codes>(
        p, p.in + static_cast<std::int64_t>(row) * p.in_ld, first, end, norm, lane,
        [&](int c, const uint4& words) {
          const Place place = place_of<codes>(c % S::kCols);
          const int product = c / S::kCols * S::kProducts + place.product;
          p.words[(product * groups + token / 8) * 32 + token % 8 * 4 + place.t] = words;
        });
    if (lane == 0) squares[warp] = square;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    const float sum = add_slices(p.slices, [&](int s) { return squares[s]; });
    p.inverse_rms[token] = p.norm ? rsqrtf(sum / static_cast<float>(p.cols) + p.eps) : 1.0F;
  }
}

// Shared memory, in floats: partial results twice, sums of squares, then (staged) the activations.
template <int kGroups, int kTiles>
struct Shared {
  static constexpr int kTokens = 8 * kGroups;
  static constexpr int kPartial = kWarps * kTokens * kTiles * kTileRows;
  static constexpr int kSquares = kWarps * kTokens;
  static constexpr int kFloats = 2 * kPartial + kSquares;
};

// kGroups of eight tokens; kTiles tiles at a time. With kStaged each block converts the activations
// of a few tokens itself; else prepare_kernel has done it.
template <Codes codes, Scales scales, int kGroups, int kTiles, int kDepth, bool kStaged>
__global__ void __launch_bounds__(kThreads, kGroups * kTiles <= 8 ? 2 : 1)
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
  const int units_at_once = p.gated ? kTiles / 2 : kTiles;  // a power of two
  const int unit_shift = __ffs(units_at_once) - 1;
  // Every team of a block makes the same number of turns: they meet at barriers.
  const int most = static_cast<int>((p.units + workers - 1) / workers);
  const int turns = (most + units_at_once - 1) / units_at_once;
  const int step_begin = slice_begin(p, slice);
  const int step_end = slice_begin(p, slice + 1);

  uint4 weights[kDepth][kTiles];
  ScaleWords<codes, scales> words[kQuantised ? kDepth : 1][kQuantised ? kTiles : 1];
  const std::byte* code_base[kTiles];  // of the turn whose weights are being loaded
  const std::byte* scale_base[kQuantised ? kTiles : 1];
  const auto set_bases = [&](int turn) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const Tile tile = turn < turns
                            ? tile_of(p, unit_begin + turn * units_at_once, unit_end, n)
                            : Tile{};
      code_base[n] = nullptr;
      if (tile.part < 0) continue;
      // Rows beyond the matrix read its last one: their results are not stored.
      const Part& part = p.part[tile.part];
      const int row = min(tile.row + g, part.rows - 1);
      code_base[n] = part.codes + static_cast<std::int64_t>(p.code_row) * row + 16 * t;
      if constexpr (kQuantised) scale_base[n] = part.scales + static_cast<std::int64_t>(p.scale_row) * row;
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

  int live = 0;
  bool staged_here = false;  // whether this lane's token has staged words
  if constexpr (kStaged) {
    const int first = step_begin * S::kCols;
    const int end = step_end * S::kCols;
    float4 norm[kHeld];
    load_norm(p, first, end, lane, norm);
    wait_for_previous();
    live = live_tokens(p);  // on its way beside the activations: all of the bucket are converted
    staged_here = g < p.tokens;
    if (team == 0) {
      for (int token = 0; token < p.tokens; ++token) {
        const int row = p.gather ? min(max(__ldcg(p.gather + token), 0), p.in_rows - 1) : token;
        const float square = convert_slice<codes>(
            p, p.in + static_cast<std::int64_t>(row) * p.in_ld, first, end, norm, lane,
            [&](int c, const uint4& v) {
              const Place place = place_of<codes>(c % S::kCols);
              const int product = c / S::kCols * S::kProducts + place.product;
              staged[(product * p.tokens + token) * 4 + place.t] = v;
            });
        if (lane == 0) squares[warp * kTokens + token] = square;
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
  }

  // What the first results need besides: on its way while products run.
  const int per_team = kThreads / teams;
  const int rank = static_cast<int>(threadIdx.x) - team * per_team;
  float held_residual = 0;
  const auto output_at = [&](int o, int& slot, int& token, int& row) {
    row = o % kTileRows;
    slot = o / kTileRows & (units_at_once - 1);
    token = o / kTileRows >> unit_shift;
  };
  if (p.residual) {
    int slot = 0;
    int token = 0;
    int row = 0;
    output_at(rank, slot, token, row);
    const Tile tile = tile_of(p, unit_begin, unit_end, p.gated ? 2 * slot : slot);
    if (token < p.tokens && tile.part >= 0 && tile.row + row < p.part[tile.part].rows) {
      held_residual = __ldcg(p.residual + static_cast<std::int64_t>(token) * p.part[tile.part].ld +
                             tile.row + row);
    }
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
    const int active = min(kTiles, (p.gated ? 2 : 1) *
                                       max(0, unit_end - unit_begin - turn * units_at_once));
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
            // Codes are multiplied as integers; scales join when their block is complete.
            constexpr int kPer = scales == Scales::kFloat16 ? 1 : 2;  // products under one scale
#pragma unroll
            for (int b = 0; b < S::kProducts / kPer; ++b) {
#pragma unroll
              for (int m = 0; m < kGroups; ++m) {
                if (m * 8 >= p.tokens) continue;
                std::uint32_t a[kPer][4];
                float ones[4] = {};
#pragma unroll
                for (int h = 0; h < kPer; ++h) {
                  const uint4 v = activations(b * kPer + h, m);
                  a[h][0] = v.x, a[h][1] = v.y, a[h][2] = v.z, a[h][3] = v.w;
                  // The sum of a block's activations, in every column of the product.
                  if (kPer == 2) mma_bf16(ones, a[h], 0x3f803f80U, 0x3f803f80U);
                }
#pragma unroll
                for (int n = 0; n < kTiles; ++n) {
                  if (n >= active) continue;
                  float block[4] = {};
#pragma unroll
                  for (int h = 0; h < kPer; ++h) {
                    std::uint32_t b0 = 0;
                    std::uint32_t b1 = 0;
                    operand<codes>(weights[i][n], b * kPer + h, 0, b0, b1);
                    mma_bf16(block, a[h], b0, b1);
                  }
                  const float2 even = words[i][n].get(2 * t, b);
                  const float2 odd = words[i][n].get(2 * t + 1, b);
#pragma unroll
                  for (int k = 0; k < 4; ++k) {
                    const float2 scale = k % 2 ? odd : even;
                    acc[n][m][k] = fmaf(scale.x, block[k], acc[n][m][k]);
                    if (kPer == 2) acc[n][m][k] = fmaf(scale.y, ones[k], acc[n][m][k]);
                  }
                }
              }
            }
          }
        }
        const int next = base + i + kDepth;
        load_step(i, step_begin + (last ? next - p.slice_steps : next));
      }
    }

    // Partial results of this turn, [warp][token][tile][row]; even and odd turns use different
    // halves, so that one barrier a turn is enough.
    float* partial = shared + (turn & 1) * M::kPartial;
    float* mine = partial + warp * kTokens * kTiles * kTileRows;
#pragma unroll
    for (int m = 0; m < kGroups; ++m) {
      const bool wanted = 8 * m + g < p.tokens;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        // High and low parts of a token lie in the same lane.
        if (wanted) {
          *reinterpret_cast<float2*>(mine + ((8 * m + g) * kTiles + n) * kTileRows + 2 * t) =
              make_float2(acc[n][m][0] + acc[n][m][2], acc[n][m][1] + acc[n][m][3]);
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) acc[n][m][k] = 0;
      }
    }
    __syncthreads();

    const int outputs = units_at_once * kTileRows * live;
    const int first_warp = team * p.slices;
    for (int o = rank; o < outputs; o += per_team) {
      int slot = 0;
      int token = 0;
      int row = 0;
      output_at(o, slot, token, row);
      const int n = p.gated ? 2 * slot : slot;
      const Tile tile = tile_of(p, unit_begin + turn * units_at_once, unit_end, n);
      if (tile.part < 0 || tile.row + row >= p.part[tile.part].rows) continue;
      const Part& part = p.part[tile.part];
      const int column_out = tile.row + row;
      const std::int64_t at = static_cast<std::int64_t>(token) * part.ld + column_out;
      float scale = 1;
      if (p.norm) {
        if constexpr (kStaged) {
          const float sum =
              add_slices(p.slices, [&](int s) { return squares[s * kTokens + token]; });
          scale = rsqrtf(sum / static_cast<float>(p.cols) + p.eps);
        } else {
          scale = __ldcg(p.inverse_rms + token);
        }
      }
      const auto total = [&](int which) {
        return scale * add_slices(p.slices, [&](int s) {
                 return partial[(((first_warp + s) * kTokens + token) * kTiles + which) *
                                    kTileRows +
                                row];
               });
      };
      float y = total(n);
      if (part.bias) y += __ldg(part.bias + column_out);
      if (p.gated) {
        float up = total(n + 1);
        if (p.part[1].bias) up += __ldg(p.part[1].bias + column_out);
        y = silu(y) * up;
      }
      if (p.residual) y += turn == 0 && o == rank ? held_residual : __ldcg(p.residual + at);
      part.out[at] = y;
    }
  }
}

// The same for the shapes that matter most: plain weights whose rows cut into eight equal slices of
// whole steps. Weights travel through shared memory, every thread its own 16 bytes at a time: kDepth
// steps are on their way, also before the kernel before has ended, and no thread waits for another's.
// It gives the bits that linear_kernel would give.
inline constexpr int kStepsAtOnce = 2;
// Buffers of partial results: two save a barrier, where there is room.
template <int kGroups>
inline constexpr int kPartials = kGroups <= 2 ? 2 : 1;

template <Codes codes, int kGroups, int kTiles, int kDepth, bool kStaged>
__global__ void __launch_bounds__(kThreads, kGroups * kTiles <= 16 ? 2 : 1)
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
  const int units_at_once = p.gated ? kTiles / 2 : kTiles;  // a power of two
  const int unit_shift = __ffs(units_at_once) - 1;
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
#pragma unroll
  for (int i = 0; i < kDepth; i += kStepsAtOnce) load_steps(i);

  const int slice_cols = p.slice_steps * S::kCols;  // a multiple of 128
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
      norm[i] = p.norm && i < quads
                    ? __ldg(reinterpret_cast<const float4*>(p.norm + first + 128 * i))
                    : make_float4(1, 1, 1, 1);
    }
    wait_for_previous();
    for (int token = 0; token < p.tokens; ++token) {
      const int row = p.gather ? min(max(__ldcg(p.gather + token), 0), p.in_rows - 1) : token;
      const float* x_row = p.in + static_cast<std::int64_t>(row) * p.in_ld + first;
      uint4* to = staged + (product * p.tokens + token) * 4 + place.t;
      float square = 0;
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
      square = warp_sum(square);
      if (lane == 0) squares[warp * kTokens + token] = square;
    }
    __syncwarp();
  } else {
    wait_for_previous();
  }
  const int live = live_tokens(p);

  // What the first results need besides: on its way while products run.
  const int rank = threadIdx.x;
  float held_residual = 0;
  const auto output_at = [&](int o, int& slot, int& token, int& row) {
    row = o % kTileRows;
    slot = o / kTileRows & (units_at_once - 1);
    token = o / kTileRows >> unit_shift;
  };
  if (p.residual) {
    int slot = 0;
    int token = 0;
    int row = 0;
    output_at(rank, slot, token, row);
    const Tile tile = tile_of(p, unit_begin, unit_end, p.gated ? 2 * slot : slot);
    if (token < p.tokens && tile.part >= 0 && tile.row + row < p.part[tile.part].rows) {
      held_residual = __ldcg(p.residual + static_cast<std::int64_t>(token) * p.part[tile.part].ld +
                             tile.row + row);
    }
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

    float* partial = partials + (kPartials<kGroups> == 2 ? turn & 1 : 0) * M::kPartial;
    float* mine = partial + warp * kTokens * kTiles * kTileRows;
#pragma unroll
    for (int m = 0; m < kGroups; ++m) {
      const bool wanted = 8 * m + g < p.tokens;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        if (wanted) {
          *reinterpret_cast<float2*>(mine + ((8 * m + g) * kTiles + n) * kTileRows + 2 * t) =
              make_float2(acc[n][m][0] + acc[n][m][2], acc[n][m][1] + acc[n][m][3]);
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) acc[n][m][k] = 0;
      }
    }
    __syncthreads();

    const int outputs = units_at_once * kTileRows * live;
    for (int o = rank; o < outputs; o += kThreads) {
      int slot_out = 0;
      int token = 0;
      int row = 0;
      output_at(o, slot_out, token, row);
      const int n = p.gated ? 2 * slot_out : slot_out;
      const Tile tile = tile_of(p, unit_begin + turn * units_at_once, unit_end, n);
      if (tile.part < 0 || tile.row + row >= p.part[tile.part].rows) continue;
      const Part& part = p.part[tile.part];
      const int column_out = tile.row + row;
      const std::int64_t at = static_cast<std::int64_t>(token) * part.ld + column_out;
      float scale = 1;
      if (p.norm) {
        if constexpr (kStaged) {
          const float sum = add_slices(kWarps, [&](int s) { return squares[s * kTokens + token]; });
          scale = rsqrtf(sum / static_cast<float>(p.cols) + p.eps);
        } else {
          scale = __ldcg(p.inverse_rms + token);
        }
      }
      const auto total = [&](int which) {
        return scale * add_slices(kWarps, [&](int s) {
                 return partial[((s * kTokens + token) * kTiles + which) * kTileRows + row];
               });
      };
      float y = total(n);
      if (part.bias) y += __ldg(part.bias + column_out);
      if (p.gated) {
        float up = total(n + 1);
        if (p.part[1].bias) up += __ldg(p.part[1].bias + column_out);
        y = silu(y) * up;
      }
      if (p.residual) y += turn == 0 && o == rank ? held_residual : __ldcg(p.residual + at);
      part.out[at] = y;
    }
    if (kPartials<kGroups> == 1) __syncthreads();
  }
}

// Staged activations of one block, so that the next kernel's block fits beside it.
inline constexpr int kMostStagedBytes = 80 * 1024;

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

template <Codes codes, Scales scales, int kGroups, int kTiles, int kDepth, bool kStaged>
void launch_one(Params p, int blocks_per_sm, const Launch& launch) {
  p.slice_steps = ceil_div(ceil_div(p.steps, p.slices), kDepth) * kDepth;
  std::size_t bytes = Shared<kGroups, kTiles>::kFloats * sizeof(float);
  if (kStaged) {
    bytes += static_cast<std::size_t>(p.steps) * Step<codes>::kProducts * 4 *
             static_cast<std::size_t>(p.tokens) * sizeof(uint4);
  }
  auto* kernel = linear_kernel<codes, scales, kGroups, kTiles, kDepth, kStaged>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(bytes)),
        "linear: shared memory");
  launch_kernel(launch, "linear", kernel, dim3(static_cast<unsigned>(launch.sms * blocks_per_sm)),
                dim3(kThreads), bytes, p);
}

template <Codes codes, int kGroups, int kTiles, int kDepth, bool kStaged>
void launch_stream(Params p, const Launch& launch) {
  const int units_at_once = p.gated ? kTiles / 2 : kTiles;
  p.slice_steps = p.steps / kWarps;
  p.share = p.units / launch.sms;
  p.extra = p.units % launch.sms;
  p.turns = ceil_div(p.share + (p.extra > 0 ? 1 : 0), units_at_once);
  std::size_t bytes = static_cast<std::size_t>(kDepth) * kTiles * kThreads * sizeof(uint4) +
                      (kPartials<kGroups> * Shared<kGroups, kTiles>::kPartial +
                       Shared<kGroups, kTiles>::kSquares) *
                          sizeof(float);
  if (kStaged) {
    bytes += static_cast<std::size_t>(p.cols) * sizeof(float) * static_cast<std::size_t>(p.tokens);
  }
  auto* kernel = stream_kernel<codes, kGroups, kTiles, kDepth, kStaged>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(bytes)),
        "linear: shared memory");
  launch_kernel(launch, "linear", kernel, dim3(static_cast<unsigned>(launch.sms)), dim3(kThreads),
                bytes, p);
}

// The stream kernel for a launch whose slices are whole steps.
template <Codes codes>
void launch_streams(const Params& p, bool staged, const Launch& launch) {
  const int tiles = ceil_div(p.units, launch.sms) * (p.gated ? 2 : 1);
  // The ring holds 64 to 128 KB of a multiprocessor's shared memory.
  if (staged) {
    if (tiles <= 2) {
      launch_stream<codes, 1, 2, 8, true>(p, launch);
    } else {
      launch_stream<codes, 1, 4, 8, true>(p, launch);
    }
  } else if (p.tokens <= 8) {
    if (tiles <= 2) {
      launch_stream<codes, 1, 2, 8, false>(p, launch);
    } else {
      launch_stream<codes, 1, 4, 8, false>(p, launch);
    }
  } else if (p.tokens <= 16) {
    launch_stream<codes, 2, 4, 4, false>(p, launch);
  } else if (p.tokens <= 32) {
    launch_stream<codes, 4, 8, 4, false>(p, launch);
  } else {
    launch_stream<codes, 8, 4, 4, false>(p, launch);
  }
}

inline Params make_params(const LinearArgs& args) {
  Params p;
  const PackedWeight& first = args.part[0].weight;
  // Pointers to the first token of this launch; `gather` names input rows itself.
  const std::int64_t first_token = args.first;
  const std::int64_t first_out = args.out_first ? 0 : first_token;
  p.in = args.in + (args.gather ? 0 : first_token * args.in_ld);
  p.norm = args.norm;
  p.residual = args.residual ? args.residual + first_out * args.part[0].ld : nullptr;
  p.count = args.count;
  p.gather = args.gather ? args.gather + first_token : nullptr;
  p.in_rows = args.in_rows;
  p.inverse_rms = reinterpret_cast<float*>(args.scratch);
  p.words = reinterpret_cast<uint4*>(args.scratch + kDecodeTokens * sizeof(float));
  p.first = args.first;
  p.eps = args.eps;
  p.in_ld = args.in_ld;
  p.cols = first.cols;
  p.tokens = args.tokens;
  p.parts = args.parts;
  p.gated = args.end == LinearEnd::kGated ? 1 : 0;
  p.code_row = static_cast<int>(code_row_bytes(first.codes, first.cols));
  p.scale_row = static_cast<int>(scale_row_bytes(first.scales, first.codes, first.cols));
  int tiles = 0;
  for (int i = 0; i < args.parts; ++i) {
    const LinearPart& part = args.part[i];
    p.part[i] = {part.weight.data,
                 part.weight.scale_data,
                 part.bias,
                 part.out ? part.out + first_out * part.ld : nullptr,
                 part.weight.rows,
                 part.ld,
                 tiles};
    tiles += ceil_div(part.weight.rows, kTileRows);
  }
  p.units = p.gated ? ceil_div(first.rows, kTileRows) : tiles;
  return p;
}

// Chooses the kernel for a launch; p is complete but for steps and slices.
template <Codes codes, Scales scales>
void launch_form(Params& p, const Launch& launch) {
  using S = Step<codes>;
  constexpr bool kPlain = scales == Scales::kNone;
  p.steps = ceil_div(p.cols, S::kCols);
  // Slices depend on the number of columns alone: the order of summation does too.
  p.slices = p.steps >= 8 ? 8 : p.steps >= 4 ? 4 : p.steps >= 2 ? 2 : 1;
  // Chunks of four steps at most, whatever the kernel that runs.
  const bool streams = kPlain && p.cols % 1024 == 0 && p.steps % (kWarps * 4) == 0;
  const int staged_bytes = p.steps * S::kCols * static_cast<int>(sizeof(float)) * p.tokens;
  const bool staged = p.tokens <= 8 && staged_bytes <= kMostStagedBytes;
  if constexpr (kPlain) {
    if (streams && staged) return launch_streams<codes>(p, true, launch);
  }
  if (staged) {
    const int workers = launch.sms * (kWarps / p.slices);
    const int tiles = ceil_div(p.units, workers) * (p.gated ? 2 : 1);
    if (tiles <= 2) {
      launch_one<codes, scales, 1, 2, kPlain ? 8 : 4, true>(p, 1, launch);
    } else {
      // Work for several turns: two blocks, so that one loads while the other adds up.
      launch_one<codes, scales, 1, 4, kPlain ? 4 : 2, true>(p, tiles > 8 ? 2 : 1, launch);
    }
    return;
  }
  launch_kernel(launch, "prepare", prepare_kernel<codes>, dim3(static_cast<unsigned>(p.tokens)),
                dim3(kThreads), 0, p);
  Launch next = launch;
  next.dependent = launch.dependent_inside;
  if constexpr (kPlain) {
    if (streams) return launch_streams<codes>(p, false, next);
  }
  if (p.tokens <= 8) {
    launch_one<codes, scales, 1, 4, kPlain ? 4 : 2, false>(p, 1, next);
  } else if (p.tokens <= 16) {
    launch_one<codes, scales, 2, 4, 2, false>(p, 1, next);
  } else if (p.tokens <= 32) {
    launch_one<codes, scales, 4, kPlain ? 8 : 4, 1, false>(p, 1, next);
  } else {
    launch_one<codes, scales, 8, kPlain ? 4 : 2, 1, false>(p, 1, next);
  }
}

}  // namespace pianola::cuda::products
