// What the kernels of linear.h share: launch parameters, operands of tensor-core products from
// packed weights and from activations.
//
// A block is eight warps. Warps that share a tile of eight rows each take a slice of the columns;
// blocks take contiguous ranges of tiles. Weights are the operand of eight columns of a tensor-core
// product, so one 16-byte load of a lane (512 bytes of a warp) feeds it directly; the operand of 16
// rows holds the high bfloat16 parts of eight tokens above their low parts.
#pragma once

#include <algorithm>

#include "backends/cuda/kernels/activation.cuh"
#include "backends/cuda/kernels/device.cuh"
#include "backends/cuda/kernels/linear.h"

namespace pianola::cuda::products {

inline constexpr int kWarps = 8;
inline constexpr int kThreads = kWarps * 32;
inline constexpr int kTileRows = 8;

__host__ __device__ inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

// How many slices the columns of a row of so many loads are cut into. The columns alone decide, and
// with them the order of summation, which every route shares.
inline int slices_of(int steps) { return steps >= 8 ? 8 : steps >= 4 ? 4 : steps >= 2 ? 2 : 1; }

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
  uint4* words = nullptr;        // prepared activations: [product of the row][group][lane]
  float* inverse_rms = nullptr;  // [tokens], beside them
  float eps = 0;
  int first = 0;
  int in_ld = 0;
  int in_rows = 0;  // rows that `gather` may name, or a bound on it
  int cols = 0;
  int tokens = 1;  // of the bucket
  int parts = 1;
  int gated = 0;
  Activation activation = Activation::kSilu;
  int units = 0;        // tiles, or pairs of a gate and an up tile
  int slices = 1;       // warps that share the columns of a tile: 1, 2, 4 or 8
  int steps = 0;        // 16-byte loads along a row, padding included
  int slice_steps = 0;  // the most of one slice, a multiple of the prefetch depth
  int code_row = 0;     // bytes
  int scale_row = 0;    // bytes
  // Of one_kernel, resident_kernel and rows_kernel: units of each block or cluster, and how many
  // take one more.
  int share = 0;
  int extra = 0;
  int turns = 0;
  int stages = 0;  // of the rings of weights
  // Of rows_kernel: units of a cluster in a turn; the most of them that a group of warps has, and
  // the tiles that they are; steps of a slice whose activations are in shared memory at a time.
  int turn_units = 0;
  int warp_units = 0;
  int warp_tiles = 0;
  int piece_steps = 0;
};

// The units of a block or cluster, by Params::share and extra.
struct UnitRange {
  int begin = 0;
  int end = 0;
};
__device__ __forceinline__ UnitRange units_of(const Params& p, int worker) {
  const int begin = worker * p.share + min(worker, p.extra);
  return {begin, begin + p.share + (worker < p.extra ? 1 : 0)};
}

struct Tile {
  int part = -1;
  int row = 0;
};

template <typename P>  // the parameters of any of the kernels
__device__ __forceinline__ Tile tile_of(const P& p, int unit, int end_unit, int slot) {
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

// The scales of a tile for one step travel with its codes: a lane loads a word or two of its own
// row and fetches those of the two rows whose results it holds from the lanes that loaded them.
template <Codes codes, Scales scales>
struct ScaleWords {
  static constexpr bool kWide = codes == Codes::kInt4 && scales == Scales::kFloatPair;
  static constexpr int kRowBytes = kWide                                                  ? 32
                                   : codes == Codes::kInt8 && scales == Scales::kHalfPair ? 8
                                                                                          : 16;
  std::uint32_t word[kWide ? 2 : 1];

  __device__ __forceinline__ void clear() { word[0] = 0, word[kWide ? 1 : 0] = 0; }
  __device__ __forceinline__ void set(const uint2& words) {
    word[0] = words.x;
    if (kWide) word[kWide ? 1 : 0] = words.y;
  }
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

// acc += the products of one step of quantised weights: codes are multiplied as integers, scales
// join when their block is complete. `activations(j, m)` are the operand words of product j, group
// m.
template <Codes codes, Scales scales, int kGroups, int kTiles, typename Activations>
__device__ __forceinline__ void multiply_blocks(float (&acc)[kTiles][kGroups][4],
                                                const uint4 (&weights)[kTiles],
                                                const ScaleWords<codes, scales> (&words)[kTiles],
                                                int active, int tokens, int t,
                                                const Activations& activations) {
  constexpr int kPer = scales == Scales::kFloat16 ? 1 : 2;  // products under one scale
#pragma unroll
  for (int b = 0; b < Step<codes>::kProducts / kPer; ++b) {
#pragma unroll
    for (int m = 0; m < kGroups; ++m) {
      if (m * 8 >= tokens) continue;
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
          operand<codes>(weights[n], b * kPer + h, 0, b0, b1);
          mma_bf16(block, a[h], b0, b1);
        }
        const float2 even = words[n].get(2 * t, b);
        const float2 odd = words[n].get(2 * t + 1, b);
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

// Products below are spelled out where a compiler could fuse one with a sum in one kernel and not
// in another: all routes must give the same bits.

// Four activations of one token, times the norm's weight, as operand words of a product: rows g are
// the high parts of eight tokens, rows g + 8 their low parts.
__device__ __forceinline__ uint4 activation_words(const float4& x, const float4& norm) {
  const SplitPair first = split_bf16(__fmul_rn(x.x, norm.x), __fmul_rn(x.y, norm.y));
  const SplitPair second = split_bf16(__fmul_rn(x.z, norm.z), __fmul_rn(x.w, norm.w));
  return make_uint4(first.high, first.low, second.high, second.low);
}

__device__ __forceinline__ float square_sum(const float4& x) {
  return __fmaf_rn(x.w, x.w, __fmaf_rn(x.z, x.z, __fmaf_rn(x.x, x.x, __fmul_rn(x.y, x.y))));
}

__device__ __forceinline__ int slice_begin(int steps, int slices, int slice) {
  return static_cast<int>(static_cast<unsigned>(steps) * static_cast<unsigned>(slice) /
                          static_cast<unsigned>(slices));
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

// Quads (four columns) of one slice whose norm weights a lane holds.
inline constexpr int kHeld = 4;

// One warp converts its slice of one token: `store(quad column, words)`. Returns the lane's sum of
// squares, its quads in turn; warp_sum() of it is the slice's, in the order that every route
// shares. kFlight quads are on their way at once.
template <Codes codes, int kFlight = kHeld, typename Store>
__device__ __forceinline__ float convert_slice(const float* norm_weights, int cols,
                                               const float* x_row, int first, int end,
                                               const float4 (&norm)[kHeld], int lane,
                                               const Store& store) {
  float square = 0;
  for (int base = first + 4 * lane; base < end; base += 128 * kFlight) {
    float4 x[kFlight];
#pragma unroll
    for (int i = 0; i < kFlight; ++i) {
      const int c = base + 128 * i;
      x[i] = c < cols && c < end ? load_activation4(x_row + c) : make_float4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < kFlight; ++i) {
      const int c = base + 128 * i;
      if (c >= end) continue;
      float4 weight = i < kHeld ? norm[i % kHeld] : make_float4(1, 1, 1, 1);
      if (norm_weights && (i >= kHeld || base >= first + 128 * kFlight)) {
        weight = c < cols ? __ldg(reinterpret_cast<const float4*>(norm_weights + c))
                          : make_float4(1, 1, 1, 1);
      }
      square += square_sum(x[i]);
      store(c, activation_words(x[i], weight));
    }
  }
  return square;
}

// The norm's weights of a lane's first quads: they do not depend on the kernel before, and are
// loaded in a way that keeps them in front of the wait.
__device__ __forceinline__ void load_norm(const float* weights, int cols, int first, int end,
                                          int lane, float4 (&norm)[kHeld]) {
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int c = first + 4 * lane + 128 * i;
    norm[i] =
        weights && c < end && c < cols ? load_activation4(weights + c) : make_float4(1, 1, 1, 1);
  }
}

__device__ __forceinline__ int live_tokens(const Params& p) {
  return max(0, min(__ldcg(p.count) - p.first, p.tokens));
}

// Shared memory, in floats: partial results twice, sums of squares, then (staged) the activations.
template <int kGroups, int kTiles>
struct Shared {
  static constexpr int kTokens = 8 * kGroups;
  static constexpr int kPartial = kWarps * kTokens * kTiles * kTileRows;
  static constexpr int kSquares = kWarps * kTokens;
  static constexpr int kFloats = 2 * kPartial + kSquares;
};

// One result of a turn: where it goes and what joins it. Nothing of it depends on the step but the
// residual, so it is found before the kernel waits, or while other results are on their way. (Loads
// of constants past the first-level cache stay before the wait: the compiler moves others.)
struct Output {
  float* out = nullptr;  // null: none
  const float* residual = nullptr;
  float bias = 0;
  float up_bias = 0;
  bool biased = false;
  bool up_biased = false;
  int token = 0;
  int sum = 0;  // floats from a slice's partial results to this one's
};

// Of one row of a tile, or of the gate's and the up tile's; `sum` is left to the caller.
__device__ __forceinline__ Output find_output(const Params& p, const Tile& tile, int row,
                                              int token) {
  Output at;
  at.token = token;
  if (token >= p.tokens || tile.part < 0) return at;
  const Part& part = p.part[tile.part];
  const int column = tile.row + row;
  if (column >= part.rows) return at;
  const std::int64_t offset = static_cast<std::int64_t>(token) * part.ld + column;
  at.out = part.out + offset;
  if (p.residual) at.residual = p.residual + offset;
  if (part.bias) {
    at.biased = true;
    at.bias = load_activation(part.bias + column);
  }
  if (p.gated && p.part[1].bias) {
    at.up_biased = true;
    at.up_bias = load_activation(p.part[1].bias + column);
  }
  return at;
}

// The results of the units from `unit` on, below end_unit, in the order [token][unit][row].
template <int kTiles>
__device__ __forceinline__ Output find_output(const Params& p, int unit, int end_unit, int o) {
  const int units_at_once = p.gated ? kTiles / 2 : kTiles;  // a power of two
  const int row = o % kTileRows;
  const int slot = o / kTileRows & (units_at_once - 1);
  const int token = o / kTileRows >> (__ffs(units_at_once) - 1);
  const int n = p.gated ? 2 * slot : slot;
  Output at = find_output(p, tile_of(p, unit, end_unit, n), row, token);
  at.sum = (token * kTiles + n) * kTileRows + row;
  return at;
}

// Slices, which lie `stride` floats apart, are added and stored; an up tile's sums lie tile_floats
// behind the gate's.
__device__ __forceinline__ void store_output(const Params& p, const Output& at, const float* sums,
                                             int slices, int stride, int tile_floats, float scale,
                                             float residual) {
  const auto total = [&](int which) {
    const float* first = sums + at.sum + which * tile_floats;
    return __fmul_rn(scale, add_slices(slices, [&](int s) { return first[s * stride]; }));
  };
  float y = total(0);
  if (at.biased) y += at.bias;
  if (p.gated) {
    float up = total(1);
    if (at.up_biased) up += at.up_bias;
    y = activate(p.activation, y, up);
  }
  if (at.residual) y += residual;
  *at.out = y;
}

// What is loaded first after the wait has its address before it: the compiler would move that.
__device__ __forceinline__ void keep_addresses(const Params& p, const Output& at, int column) {
  prefetch(p.in + min(column, p.cols - 1));
  prefetch(p.count);
  if (at.residual) prefetch(at.residual);
}

__device__ __forceinline__ float load_residual(const Output& at) {
  return at.residual ? __ldcg(at.residual) : 0.0F;
}

}  // namespace pianola::cuda::products
