// Block types through the tile unit, for 16 tokens or more: the bits of the VNNI kernel.
//
// Within a block everything is a small integer, and bfloat16 products summed in f32 are then exact,
// in any order. So the tiles multiply bfloat16: the block's dot products come out as the floats
// that VNNI has to convert to, at the cost of int8 (whose tiles would be half empty: a block is 32
// deep). They leave through memory, and vector code scales and adds them as all tiers do.
//
// That vector code is the bottleneck, its loads as much as its arithmetic. Hence: two panels and
// two tiles of tokens at a time, so that a tile loaded serves twice; 8 tokens x 2 panels of sums in
// registers, so that a broadcast serves twice; and chunks of 4 blocks, the products of the next one
// started between the sums of this one, so that both units work at once. Panels are expanded once
// into scratch, a group that fits the second-level cache at a time, and meet all tokens there.
#include "backends/cpu/kernels/packed_blocks_avx512.h"

namespace pianola::cpu {
namespace {

using Byte = std::uint8_t;
constexpr int kRows = 16;
constexpr int kScales = 1024;  // where a kTileBlock's floats begin
constexpr int kDepth = 4;      // blocks in a chunk
constexpr int kPart = 8;       // tokens whose sums are in registers

int min_of(int a, int b) { return a < b ? a : b; }

// Tiles 0 to 3 hold products [16 tokens, 16 rows], 4 and 5 activations, 6 and 7 weights; `pairs` of
// k at a time.
void configure_tiles(int pairs) {
  struct alignas(64) Config {
    Byte palette = 1;
    Byte start = 0;
    Byte reserved[14] = {};
    std::uint16_t row_bytes[16] = {};
    Byte rows[16] = {};
  } config;
  for (int i = 0; i < 8; ++i) {
    const bool activations = i == 4 || i == 5;
    config.row_bytes[i] = static_cast<std::uint16_t>(activations ? 4 * pairs : 64);
    config.rows[i] = static_cast<Byte>(i < 6 ? 16 : pairs);
  }
  _tile_loadconfig(&config);
}

// The bfloat16 of 0 .. 31 less a bias, by table.
struct Table {
  std::uint16_t bits[64];
};

Table bf16_table(int bias) {
  Table table;
  for (int i = 0; i < 64; ++i) {
    const float value = static_cast<float>(i - bias);
    std::uint32_t bits;
    __builtin_memcpy(&bits, &value, 4);
    table.bits[i] = static_cast<std::uint16_t>(bits >> 16);
  }
  return table;
}

// 32 unsigned values in 16-bit lanes to bfloat16, less their bias.
template <int kBits>
PIANOLA_INLINE __m512i to_bf16(__m512i values, const __m512i* table) {
  if constexpr (kBits <= 5) {
    return _mm512_permutexvar_epi16(values, table[0]);
  } else if constexpr (kBits == 6) {
    return _mm512_permutex2var_epi16(table[0], values, table[1]);
  } else {
    const __m512i bias = _mm512_set1_epi32(128);
    const __m512i low = _mm512_sub_epi32(_mm512_and_si512(values, _mm512_set1_epi32(255)), bias);
    const __m512i high = _mm512_sub_epi32(_mm512_srli_epi32(values, 16), bias);
    const __m512i even = _mm512_srli_epi32(_mm512_castps_si512(_mm512_cvtepi32_ps(low)), 16);
    return _mm512_or_si512(even, _mm512_castps_si512(_mm512_cvtepi32_ps(high)));
  }
}

// A panel in the form of the tiles: for each block 16 pairs of k [16 rows][2], then d[16] and
// m[16].
template <DType kType>
void expand_panel(const Byte* panel, int blocks, Byte* out) {
  constexpr PackedFormat kFormat = packed_format(kType);
  const Table values = bf16_table(kFormat.has_min ? 0 : 1 << kFormat.bias_shift);
  const __m512i table[2] = {_mm512_loadu_si512(values.bits), _mm512_loadu_si512(values.bits + 32)};
  const __m512i byte = _mm512_set1_epi16(255);
  for_each_block<kType>(panel, blocks, [&](const Block512& block) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      const __m512i even = _mm512_and_si512(block.w[i], byte);
      const __m512i odd = _mm512_srli_epi16(block.w[i], 8);
      _mm512_store_si512(out + 128 * i, to_bf16<kFormat.bits>(even, table));
      _mm512_store_si512(out + 128 * i + 64, to_bf16<kFormat.bits>(odd, table));
    }
    _mm512_store_ps(out + kScales, block.d);
    _mm512_store_ps(out + kScales + 64, block.m);
    out += kTileBlock;
  });
}

// Two panels and up to two tiles of tokens.
struct Quad {
  const Byte* w[2];  // expanded panels
  const Byte* x[2];  // tiles of tokens
  int steps;         // blocks, or halves of blocks
  int tokens;        // 1 .. 32
  float* y;
  std::ptrdiff_t ldy;
  __mmask16 rows[2];
  bool accumulate;
};

// Products of a chunk [block][tile of tokens][panel][token][row].
struct alignas(64) Products {
  float at[kDepth][2][2][kTileTokens][kRows];
};

// Where step i of a stream has its values and its floats. Types with halves take two steps a block.
template <bool kHalves>
PIANOLA_INLINE std::ptrdiff_t block_of(int step) {
  return static_cast<std::ptrdiff_t>(kHalves ? step / 2 : step) * kTileBlock;
}

// Part `part` (0 .. 3) of the products of one step; all four make a step, in order.
template <bool kHalves>
PIANOLA_INLINE void multiply(const Quad& quad, int step, int part,
                             float (*out)[2][kTileTokens][kRows]) {
  const std::ptrdiff_t at = block_of<kHalves>(step);
  const int half = kHalves ? step % 2 : 0;
  if (part == 0) {
    _tile_loadd(4, quad.x[0] + at + 32 * half, 64);
    _tile_loadd(6, quad.w[0] + at + 512 * half, 64);
    _tile_zero(0);
    _tile_dpbf16ps(0, 4, 6);
    _tile_stored(0, out[0][0], 64);
  } else if (part == 1) {
    _tile_loadd(7, quad.w[1] + at + 512 * half, 64);
    _tile_zero(1);
    _tile_dpbf16ps(1, 4, 7);
    _tile_stored(1, out[0][1], 64);
  } else if (quad.tokens <= kTileTokens) {
    return;
  } else if (part == 2) {
    _tile_loadd(5, quad.x[1] + at + 32 * half, 64);
    _tile_zero(2);
    _tile_dpbf16ps(2, 5, 6);
    _tile_stored(2, out[1][0], 64);
  } else {
    _tile_zero(3);
    _tile_dpbf16ps(3, 5, 7);
    _tile_stored(3, out[1][1], 64);
  }
}

// Adds one step's products to the sums of 8 tokens and 2 panels.
template <DType kType>
PIANOLA_INLINE void add_step(const Quad& quad, int step, int tile, int token,
                             const float (*products)[2][kTileTokens][kRows], __m512 (*acc)[2]) {
  constexpr PackedFormat kFormat = packed_format(kType);
  const std::ptrdiff_t at = block_of<kFormat.halves>(step) + kScales;
  const int which = kFormat.halves ? 64 * (step % 2) : 0;
  const float* numbers = reinterpret_cast<const float*>(quad.x[tile] + at) + token;
  const __m512 d0 = _mm512_load_ps(quad.w[0] + at + which);
  const __m512 d1 = _mm512_load_ps(quad.w[1] + at + which);
  const __m512 m0 = _mm512_load_ps(quad.w[0] + at + 64);
  const __m512 m1 = _mm512_load_ps(quad.w[1] + at + 64);
#pragma GCC unroll 8
  for (int t = 0; t < kPart; ++t) {
    const __m512 d = _mm512_set1_ps(numbers[t]);
    if constexpr (kFormat.has_min) {
      const __m512 s = _mm512_set1_ps(numbers[kTileTokens + t]);
      acc[t][0] = _mm512_fmadd_ps(m0, s, acc[t][0]);
      acc[t][1] = _mm512_fmadd_ps(m1, s, acc[t][1]);
    }
    const __m512 first = _mm512_load_ps(products[tile][0][token + t]);
    const __m512 second = _mm512_load_ps(products[tile][1][token + t]);
    acc[t][0] = _mm512_fmadd_ps(_mm512_mul_ps(d0, d), first, acc[t][0]);
    acc[t][1] = _mm512_fmadd_ps(_mm512_mul_ps(d1, d), second, acc[t][1]);
  }
}

struct alignas(64) Sums {
  float at[2 * kTileTokens][2][kRows];
};

void write_part(const Quad& quad, int first, const __m512 (*acc)[2]) {
#pragma GCC unroll 8
  for (int t = 0; t < kPart; ++t) {
    if (first + t < quad.tokens) {
      float* y = quad.y + (first + t) * quad.ldy;
      write_rows(y, quad.rows[0], acc[t][0], quad.accumulate);
      if (quad.rows[1] != 0) write_rows(y + kRows, quad.rows[1], acc[t][1], quad.accumulate);
    }
  }
}

template <DType kType>
void multiply_quad(const Quad& quad) {
  constexpr bool kHalves = packed_format(kType).halves;
  Products products[2];
  Sums sums;
  for (int i = 0; i < kDepth && i < quad.steps; ++i) {
    for (int part = 0; part < 4; ++part) multiply<kHalves>(quad, i, part, products[0].at[i]);
  }
  for (int step = 0, turn = 0; step < quad.steps; step += kDepth, turn ^= 1) {
    const int n = min_of(kDepth, quad.steps - step);
    const bool last = step + kDepth >= quad.steps;
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) {
      const int next = step + kDepth + part;  // started while this part is added
      const int first = part * kPart;
      const bool real = first < quad.tokens;
      if (!real) {
        for (int i = 0; i < 4 && next < quad.steps; ++i) {
          multiply<kHalves>(quad, next, i, products[turn ^ 1].at[part]);
        }
        continue;
      }
      __m512 acc[kPart][2];
#pragma GCC unroll 8
      for (int t = 0; t < kPart; ++t) {
        acc[t][0] = step == 0 ? _mm512_setzero_ps() : _mm512_load_ps(sums.at[first + t][0]);
        acc[t][1] = step == 0 ? _mm512_setzero_ps() : _mm512_load_ps(sums.at[first + t][1]);
      }
#pragma GCC unroll 4
      for (int i = 0; i < kDepth; ++i) {
        if (next < quad.steps) multiply<kHalves>(quad, next, i, products[turn ^ 1].at[part]);
        if (i < n) {
          add_step<kType>(quad, step + i, part / 2, part % 2 * kPart, products[turn].at[i], acc);
        }
      }
      if (last) {
        write_part(quad, first, acc);
      } else {
#pragma GCC unroll 8
        for (int t = 0; t < kPart; ++t) {
          _mm512_store_ps(sums.at[first + t][0], acc[t][0]);
          _mm512_store_ps(sums.at[first + t][1], acc[t][1]);
        }
      }
    }
  }
}

__mmask16 row_mask(int rows) {
  return static_cast<__mmask16>(rows >= kRows ? 0xffff : (rows <= 0 ? 0 : (1U << rows) - 1U));
}

template <DType kType>
void linear_tiles(const LinearCall& call) {
  constexpr PackedFormat kFormat = packed_format(kType);
  const int blocks = call.cols / kBlock;
  const std::size_t panel_size = panel_bytes(kFormat, blocks);
  const std::ptrdiff_t stream = static_cast<std::ptrdiff_t>(blocks) * kTileBlock;
  const int group = kRows * expanded_panels(blocks);
  configure_tiles(kFormat.halves ? 8 : 16);
  for (int first = call.row_begin; first < call.row_end; first += group) {
    const int last = min_of(call.row_end, first + group);
    for (int row = first; row < last; row += kRows) {
      expand_panel<kType>(call.weight + static_cast<std::size_t>(row / kRows) * panel_size, blocks,
                          call.scratch + (row - first) / kRows * stream);
    }
    for (int token = 0; token < call.tokens; token += 2 * kTileTokens) {
      const Byte* x = call.activations + token / kTileTokens * stream;
      for (int row = first; row < last; row += 2 * kRows) {
        // A panel that is not there is multiplied from stale scratch, and not written.
        const Byte* w = call.scratch + (row - first) / kRows * stream;
        multiply_quad<kType>({{w, w + stream},
                              {x, x + stream},
                              kFormat.halves ? 2 * blocks : blocks,
                              min_of(2 * kTileTokens, call.tokens - token),
                              call.y + token * call.ldy + row,
                              call.ldy,
                              {row_mask(last - row), row_mask(last - row - kRows)},
                              call.accumulate});
      }
    }
  }
  _tile_release();
}

}  // namespace

void linear_amx(const LinearCall& call) {
  switch (call.dtype) {
    case DType::kQ4_0:
      return linear_tiles<DType::kQ4_0>(call);
    case DType::kQ4_1:
      return linear_tiles<DType::kQ4_1>(call);
    case DType::kQ5_0:
      return linear_tiles<DType::kQ5_0>(call);
    case DType::kQ5_1:
      return linear_tiles<DType::kQ5_1>(call);
    case DType::kQ8_0:
      return linear_tiles<DType::kQ8_0>(call);
    case DType::kQ4_K:
      return linear_tiles<DType::kQ4_K>(call);
    case DType::kQ5_K:
      return linear_tiles<DType::kQ5_K>(call);
    case DType::kQ6_K:
      return linear_tiles<DType::kQ6_K>(call);
    default:
      return;
  }
}

}  // namespace pianola::cpu
