#include "backends/cuda/kernels/linear.h"

#include <algorithm>

#include "backends/cuda/kernels/device.cuh"

namespace pianola::cuda {
namespace {

// A block is eight warps and stays for the whole launch, one block a multiprocessor; two launches
// that follow each other fit on one, so that the second loads weights while the first ends.
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;
constexpr int kTileRows = 8;  // rows of W in one tensor-core product

// What one 16-byte load of a lane (512 of a warp: 8 rows) brings, by form of the weights.
template <Codes codes>
struct Step;
template <>
struct Step<Codes::kF32> {
  static constexpr int kCols = 16;
  static constexpr int kProducts = 1;  // of 16 columns
  static constexpr int kParts = 3;     // bfloat16 parts of a weight
};
template <>
struct Step<Codes::kF16> {
  static constexpr int kCols = 32;
  static constexpr int kProducts = 2;
  static constexpr int kParts = 2;
};
template <>
struct Step<Codes::kBF16> {
  static constexpr int kCols = 32;
  static constexpr int kProducts = 2;
  static constexpr int kParts = 1;
};
template <>
struct Step<Codes::kInt8> {
  static constexpr int kCols = 64;
  static constexpr int kProducts = 4;
  static constexpr int kParts = 1;
};
template <>
struct Step<Codes::kInt4> {
  static constexpr int kCols = 128;
  static constexpr int kProducts = 8;
  static constexpr int kParts = 1;
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
  float eps = 0;
  int first = 0;
  int in_ld = 0;
  int cols = 0;
  int parts = 1;
  int gated = 0;
  int units = 0;         // tiles, or pairs of a gate and an up tile
  int slices = 1;        // warps that share the columns of a tile
  int steps = 0;         // 16-byte loads along a row, padding included
  int slice_steps = 0;   // the most of one slice, a multiple of the prefetch depth
  std::int64_t code_row = 0;   // bytes
  std::int64_t scale_row = 0;  // bytes
};

struct Tile {
  int part = -1;
  int row = 0;
};

template <int kTiles>
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
  static constexpr int kRowBytes = kWide ? 32 : codes == Codes::kInt8 && scales == Scales::kHalfPair ? 8 : 16;
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
    const __nv_bfloat162 bias = __halves2bfloat162(__ushort_as_bfloat16(0x4300), __ushort_as_bfloat16(0x4300));
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
__device__ __forceinline__ void activation_words(const float4& x, const float4& norm,
                                                 std::uint32_t (&a)[4]) {
  const SplitPair first = split_bf16(x.x * norm.x, x.y * norm.y);
  const SplitPair second = split_bf16(x.z * norm.z, x.w * norm.w);
  a[0] = first.high;
  a[1] = first.low;
  a[2] = second.high;
  a[3] = second.low;
}

__device__ __forceinline__ float square_sum(const float4& x) {
  return x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w;
}

__device__ __forceinline__ float silu(float x) { return x / (1.0F + __expf(-x)); }

// Shared memory, in floats: partial results twice, sums of squares, then (staged) the activations.
template <int kGroups, int kTiles>
struct Shared {
  static constexpr int kTokens = 8 * kGroups;
  static constexpr int kPartial = kWarps * kTiles * kTokens * kTileRows;
  static constexpr int kSquares = kWarps * kTokens;
  static constexpr int kFloats = 2 * kPartial + kSquares;
};

// kGroups of eight tokens; kTiles tiles at a time; with kStaged the activations of a slice are
// converted once and kept in shared memory, else they are read again for every set of tiles.
template <Codes codes, Scales scales, int kGroups, int kTiles, int kDepth, bool kStaged>
__global__ void __launch_bounds__(kThreads, kGroups <= 2 ? 2 : 1) linear_kernel(const Params p) {
  using S = Step<codes>;
  constexpr int kTokens = 8 * kGroups;
  using M = Shared<kGroups, kTiles>;
  extern __shared__ float shared[];
  float* squares = shared + 2 * M::kPartial;
  uint4* staged = reinterpret_cast<uint4*>(shared + M::kFloats);

  allow_next();
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int g = lane / 4;  // row of a tile as weights are loaded; token as results lie
  const int t = lane % 4;
  const int slice = warp % p.slices;
  const int team = warp / p.slices;  // warps that work on the same tiles
  const int teams = kWarps / p.slices;

  // Units of this team: contiguous, so that neighbours read neighbouring rows.
  const int workers = gridDim.x * teams;
  const int worker = blockIdx.x * teams + team;
  const int unit_begin = static_cast<int>(static_cast<std::int64_t>(p.units) * worker / workers);
  const int unit_end = static_cast<int>(static_cast<std::int64_t>(p.units) * (worker + 1) / workers);
  const int units_at_once = p.gated ? kTiles / 2 : kTiles;
  // Every team of a block makes the same number of turns: they meet at barriers.
  const int most = (p.units + workers - 1) / workers;
  const int turns = (most + units_at_once - 1) / units_at_once;

  const int step_begin = static_cast<int>(static_cast<std::int64_t>(p.steps) * slice / p.slices);
  const int step_end = static_cast<int>(static_cast<std::int64_t>(p.steps) * (slice + 1) / p.slices);

  constexpr bool kQuantised = scales != Scales::kNone;
  uint4 weights[kDepth][kTiles];
  ScaleWords<codes, scales> words[kQuantised ? kDepth : 1][kQuantised ? kTiles : 1];
  const std::byte* code_base[kTiles];  // of the turn whose weights are being loaded
  const std::byte* scale_base[kQuantised ? kTiles : 1];
  const auto set_bases = [&](int turn) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const Tile tile = turn < turns
                            ? tile_of<kTiles>(p, unit_begin + turn * units_at_once, unit_end, n)
                            : Tile{};
      code_base[n] = nullptr;
      if (tile.part < 0) continue;
      // Rows beyond the matrix read its last one: their results are not stored.
      const Part& part = p.part[tile.part];
      const int row = min(tile.row + g, part.rows - 1);
      code_base[n] = part.codes + p.code_row * row + 16 * t;
      if constexpr (kQuantised) scale_base[n] = part.scales + p.scale_row * row;
    }
  };
  const auto load_step = [&](int i, int step) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      weights[i][n] = make_uint4(0, 0, 0, 0);
      if constexpr (kQuantised) words[i][n].clear();
      if (!code_base[n] || step >= step_end) continue;
      // Rows of f32, f16 and bf16 end where the matrix ends; those of codes are padded.
      if (kQuantised || step * S::kCols + column<codes>(0, t) < p.cols) {
        weights[i][n] = load_weight(code_base[n] + static_cast<std::int64_t>(step) * 64);
        if constexpr (kQuantised) words[i][n].load(scale_base[n], step, t);
      }
    }
  };

  set_bases(0);
#pragma unroll
  for (int i = 0; i < kDepth; ++i) load_step(i, step_begin + i);
  if (p.norm) {  // on its way while the kernel before ends
    const int first = step_begin * S::kCols + 32 * lane;
    for (int c = first; c < min(step_end * S::kCols, p.cols); c += 32 * 32) prefetch(p.norm + c);
  }

  wait_for_previous();

  const int live =
      max(0, min(*static_cast<const volatile std::int32_t*>(p.count) - p.first, kTokens));
  const float* x_row[kGroups];
  bool alive[kGroups];
#pragma unroll
  for (int m = 0; m < kGroups; ++m) {
    const int token = 8 * m + g;
    alive[m] = token < live;
    const int row = alive[m] && p.gather ? __ldcg(p.gather + token) : token;
    x_row[m] = p.in + static_cast<std::int64_t>(row) * p.in_ld;
  }
  const auto load_x = [&](int m, int column_at) {
    return alive[m] && column_at < p.cols ? load_activation4(x_row[m] + column_at)
                                          : make_float4(0, 0, 0, 0);
  };
  const auto load_norm = [&](int column_at) {
    return p.norm && column_at < p.cols ? __ldg(reinterpret_cast<const float4*>(p.norm + column_at))
                                        : make_float4(1, 1, 1, 1);
  };
  float square[kGroups] = {};

  // Staged operand words, [product of the row][token][t]: the lanes of a warp read 512 bytes in a
  // row; behind them the sum of squares of each four columns, so that they are added in the order
  // in which the other route adds them. Teams share slices, and the first of them converts for all.
  const int staged_tokens = min(kTokens, max(live, 1));
  const auto staged_index = [&](int product, int token, int of_t) {
    return (product * staged_tokens + token) * 4 + of_t;
  };
  float* quad_squares =
      reinterpret_cast<float*>(staged + p.steps * S::kProducts * staged_tokens * 4);
  if constexpr (kStaged) {
    if (team == 0) {
      constexpr int kBatch = 4;  // loads in flight
      const int quads = (step_end - step_begin) * (S::kCols / 4);
      const int first_column = step_begin * S::kCols;
      for (int base = lane; base < quads * live; base += 32 * kBatch) {
        float4 x[kBatch];
        float4 norm[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int at = base + 32 * i;
          x[i] = make_float4(0, 0, 0, 0);
          norm[i] = make_float4(1, 1, 1, 1);
          const int token = at / quads;
          const int c = first_column + 4 * (at % quads);
          if (token >= live || c >= p.cols) continue;
          const int row = p.gather ? __ldcg(p.gather + token) : token;
          x[i] = load_activation4(p.in + static_cast<std::int64_t>(row) * p.in_ld + c);
          norm[i] = load_norm(c);
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int at = base + 32 * i;
          const int token = at / quads;
          if (token >= live) continue;
          const int c = first_column + 4 * (at % quads);
          const Place place = place_of<codes>(c % S::kCols);
          const int index =
              staged_index(c / S::kCols * S::kProducts + place.product, token, place.t);
          std::uint32_t a[4];
          activation_words(x[i], norm[i], a);
          staged[index] = make_uint4(a[0], a[1], a[2], a[3]);
          quad_squares[index] = square_sum(x[i]);
        }
      }
    }
    __syncthreads();
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
          constexpr bool kAhead = !kStaged && !kQuantised;  // a whole step of activations at once
          float4 x[kAhead ? kGroups : 1][S::kProducts];
          float4 norm[S::kProducts];
          if constexpr (kAhead) {
#pragma unroll
            for (int j = 0; j < S::kProducts; ++j) {
              const int c = step * S::kCols + column<codes>(j, t);
#pragma unroll
              for (int m = 0; m < kGroups; ++m) x[m][j] = load_x(m, c);
              norm[j] = load_norm(c);
            }
          }
#pragma unroll
          for (int m = 0; m < kGroups; ++m) {
            const auto activations = [&](int j, std::uint32_t(&a)[4]) {
              if constexpr (kStaged) {
                uint4 v = make_uint4(0, 0, 0, 0);
                if (alive[0]) v = staged[staged_index(step * S::kProducts + j, g, t)];
                a[0] = v.x, a[1] = v.y, a[2] = v.z, a[3] = v.w;
              } else {
                const int c = step * S::kCols + column<codes>(j, t);
                const float4 four = kAhead ? x[kAhead ? m : 0][j] : load_x(m, c);
                if (turn == 0) square[m] += square_sum(four);
                activation_words(four, kAhead ? norm[j] : load_norm(c), a);
              }
            };
            if constexpr (!kQuantised) {
#pragma unroll
              for (int j = 0; j < S::kProducts; ++j) {
                std::uint32_t a[4];
                activations(j, a);
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
            } else {
              // Codes are multiplied as integers; scales join when their block is complete.
              constexpr int kPer = scales == Scales::kFloat16 ? 1 : 2;  // products under one scale
#pragma unroll
              for (int b = 0; b < S::kProducts / kPer; ++b) {
                std::uint32_t a[kPer][4];
                float ones[4] = {};
#pragma unroll
                for (int h = 0; h < kPer; ++h) {
                  activations(b * kPer + h, a[h]);
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

    // Partial results of this turn, [warp][tile][token][row]; even and odd turns use different
    // halves, so that one barrier a turn is enough.
    float* partial = shared + (turn % 2) * M::kPartial;
    float* mine = partial + warp * kTiles * kTokens * kTileRows;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int m = 0; m < kGroups; ++m) {
        // High and low parts of a token lie in the same lane.
        const float2 sum =
            make_float2(acc[n][m][0] + acc[n][m][2], acc[n][m][1] + acc[n][m][3]);
        *reinterpret_cast<float2*>(mine + (n * kTokens + 8 * m + g) * kTileRows + 2 * t) = sum;
#pragma unroll
        for (int k = 0; k < 4; ++k) acc[n][m][k] = 0;
      }
    }
    if (turn == 0 && p.norm && (!kStaged || team == 0)) {
      if constexpr (kStaged) {
        for (int i = step_begin * S::kProducts; alive[0] && i < step_end * S::kProducts; ++i) {
          square[0] += quad_squares[staged_index(i, g, t)];
        }
      }
#pragma unroll
      for (int m = 0; m < kGroups; ++m) {
        float sum = square[m];
        sum += __shfl_xor_sync(kAllLanes, sum, 1);
        sum += __shfl_xor_sync(kAllLanes, sum, 2);
        if (t == 0) squares[warp * kTokens + 8 * m + g] = sum;
      }
    }
    __syncthreads();

    // Slices are added in order. The sums of squares are those of the warps of team 0 when staged,
    // else of the own team: the same numbers.
    const int outputs = (p.gated ? kTiles / 2 : kTiles) * kTileRows * live;
    const int per_team = kThreads / teams;
    const int rank = static_cast<int>(threadIdx.x) - team * per_team;
    const int first_warp = team * p.slices;
    for (int o = rank; o < outputs; o += per_team) {
      const int row = o % kTileRows;
      const int token = (o / kTileRows) % live;
      const int slot = o / (kTileRows * live);
      const int n = p.gated ? 2 * slot : slot;
      const Tile tile = tile_of<kTiles>(p, unit_begin + turn * units_at_once, unit_end, n);
      if (tile.part < 0 || tile.row + row >= p.part[tile.part].rows) continue;
      float scale = 1;
      if (p.norm) {
        float sum = 0;
        for (int s = 0; s < p.slices; ++s) {
          sum += squares[((kStaged ? 0 : first_warp) + s) * kTokens + token];
        }
        scale = rsqrtf(sum / static_cast<float>(p.cols) + p.eps);
      }
      const auto total = [&](int which) {
        float sum = 0;
        for (int s = 0; s < p.slices; ++s) {
          sum += partial[(((first_warp + s) * kTiles + which) * kTokens + token) * kTileRows + row];
        }
        return sum * scale;
      };
      const Part& part = p.part[tile.part];
      const int column_out = tile.row + row;
      float y = total(n);
      if (part.bias) y += __ldg(part.bias + column_out);
      if (p.gated) {
        float up = total(n + 1);
        if (p.part[1].bias) up += __ldg(p.part[1].bias + column_out);
        y = silu(y) * up;
      }
      const std::int64_t at = static_cast<std::int64_t>(token) * part.ld + column_out;
      if (p.residual) y += __ldcg(p.residual + at);
      part.out[at] = y;
    }
  }
}

constexpr int kMostStagedBytes = 100 * 1024;

int ceil_div(int a, int b) { return (a + b - 1) / b; }

template <Codes codes, Scales scales, int kGroups, int kTiles, int kDepth, bool kStaged>
void launch_one(Params& p, int max_tokens, const Launch& launch) {
  p.slice_steps = ceil_div(ceil_div(p.steps, p.slices), kDepth) * kDepth;
  std::size_t bytes = Shared<kGroups, kTiles>::kFloats * sizeof(float);
  if (kStaged) {
    bytes += static_cast<std::size_t>(p.steps) * Step<codes>::kProducts * 4 *
             static_cast<std::size_t>(max_tokens) * (sizeof(uint4) + sizeof(float));
  }
  auto* kernel = linear_kernel<codes, scales, kGroups, kTiles, kDepth, kStaged>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(bytes)),
        "linear: shared memory");
  launch_kernel(launch, "linear", kernel, dim3(static_cast<unsigned>(launch.sms)), dim3(kThreads),
                bytes, p);
}

template <Codes codes, Scales scales>
void launch_form(Params& p, int tokens, const Launch& launch) {
  using S = Step<codes>;
  p.steps = ceil_div(p.cols, S::kCols);
  // Slices depend on the number of columns alone: the order of summation does too.
  p.slices = p.steps >= 32 ? 8 : p.steps >= 16 ? 4 : p.steps >= 8 ? 2 : 1;
  const std::size_t staged_bytes = static_cast<std::size_t>(p.steps) * S::kCols * sizeof(float) *
                                   static_cast<std::size_t>(tokens);
  constexpr int kDepth = scales == Scales::kNone ? 4 : 2;
  if (tokens <= 8) {
    if (staged_bytes <= kMostStagedBytes) {
      launch_one<codes, scales, 1, 4, kDepth, true>(p, tokens, launch);
    } else {
      launch_one<codes, scales, 1, 4, kDepth, false>(p, tokens, launch);
    }
  } else if (tokens <= 16) {
    launch_one<codes, scales, 2, 4, 2, false>(p, tokens, launch);
  } else if (tokens <= 32) {
    launch_one<codes, scales, 4, 4, 2, false>(p, tokens, launch);
  } else {
    launch_one<codes, scales, 8, 2, 2, false>(p, tokens, launch);
  }
}

}  // namespace

void linear(const LinearArgs& args, const Launch& launch) {
  require(args.tokens <= kDecodeTokens, "linear: more tokens than a decode-class step has");
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
  p.first = args.first;
  p.eps = args.eps;
  p.in_ld = args.in_ld;
  p.cols = first.cols;
  p.parts = args.parts;
  p.gated = args.end == LinearEnd::kGated ? 1 : 0;
  p.code_row = static_cast<std::int64_t>(code_row_bytes(first.codes, first.cols));
  p.scale_row =
      static_cast<std::int64_t>(scale_row_bytes(first.scales, first.codes, first.cols));
  int tiles = 0;
  for (int i = 0; i < args.parts; ++i) {
    const LinearPart& part = args.part[i];
    require(part.weight.codes == first.codes && part.weight.scales == first.scales &&
                part.weight.cols == first.cols && part.weight.cols % 8 == 0,
            "linear: parts of different forms");
    p.part[i] = {part.weight.data, part.weight.scale_data, part.bias,
                 part.out ? part.out + first_out * part.ld : nullptr, part.weight.rows, part.ld,
                 tiles};
    tiles += ceil_div(part.weight.rows, kTileRows);
  }
  p.units = p.gated ? ceil_div(first.rows, kTileRows) : tiles;

  switch (first.codes) {
    case Codes::kF32:
      return launch_form<Codes::kF32, Scales::kNone>(p, args.tokens, launch);
    case Codes::kF16:
      return launch_form<Codes::kF16, Scales::kNone>(p, args.tokens, launch);
    case Codes::kBF16:
      return launch_form<Codes::kBF16, Scales::kNone>(p, args.tokens, launch);
    case Codes::kInt4:
      return first.scales == Scales::kHalfPair
                 ? launch_form<Codes::kInt4, Scales::kHalfPair>(p, args.tokens, launch)
                 : launch_form<Codes::kInt4, Scales::kFloatPair>(p, args.tokens, launch);
    case Codes::kInt8:
      if (first.scales == Scales::kHalfPair) {
        return launch_form<Codes::kInt8, Scales::kHalfPair>(p, args.tokens, launch);
      }
      return first.scales == Scales::kFloatPair
                 ? launch_form<Codes::kInt8, Scales::kFloatPair>(p, args.tokens, launch)
                 : launch_form<Codes::kInt8, Scales::kFloat16>(p, args.tokens, launch);
  }
}

}  // namespace pianola::cuda
