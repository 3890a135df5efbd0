// Block types with int8 tiles, for 16 tokens or more: the bits of the VNNI kernel.
//
// A block of 32 values is one tile product: 16 tokens x 32 values times 32 values x 16 rows gives
// 16 x 16 exact integers, which leave through memory and are scaled and added as all tiers do it.
// That vector code is the bottleneck, its loads as much as its arithmetic. Hence: two panels and
// two tiles of tokens at a time, so that a tile loaded serves twice; 8 tokens x 2 panels of sums in
// registers, so that a broadcast serves twice; and chunks of 2 blocks, the products of the next one
// started between the sums of this one, so that both units work at once. Panels are expanded once
// into scratch (signed bytes, which need no correction, and f32 scales), a group that fits the
// second-level cache at a time, and meet all tokens there.
//
// Measured and left: chunks of 4 blocks (their products no longer fit the first-level cache beside
// a busy sibling thread); bfloat16 tiles, exact too and without the conversion from integers, but
// with twice the bytes; one panel and one tile of tokens at a time.
#include "backends/cpu/kernels/packed_blocks_avx512.h"

namespace pianola::cpu {
namespace {

using Byte = std::uint8_t;
constexpr int kRows = 16;
constexpr int kScales = 512;  // where the floats of a block begin: 32 values x 16 rows or tokens
constexpr int kDepth = 2;     // blocks in a chunk
constexpr int kPart = 8;      // tokens whose sums are in registers
constexpr int kRecord = kTileTokens * kActRecord;

int min_of(int a, int b) { return a < b ? a : b; }

// Makes every earlier store visible to the tile instructions that follow. GCC 12's intrinsics name
// no memory (ldtilecfg only its first eight bytes), so it may drop or delay stores that only they
// read.
PIANOLA_INLINE void publish_stores() { __asm__ volatile("" ::: "memory"); }

// Tiles 0 to 3 hold products [16 tokens, 16 rows], 4 and 5 activations, 6 and 7 weights; `words` of
// four k at a time.
void configure_tiles(int words) {
  struct alignas(64) Config {
    Byte palette = 1;
    Byte start = 0;
    Byte reserved[14] = {};
    std::uint16_t row_bytes[16] = {};
    Byte rows[16] = {};
  } config;
  for (int i = 0; i < 8; ++i) {
    const bool activations = i == 4 || i == 5;
    config.row_bytes[i] = static_cast<std::uint16_t>(activations ? 4 * words : 64);
    config.rows[i] = static_cast<Byte>(i < 6 ? 16 : words);
  }
  __asm__ volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
}

// A panel in the form of the tiles: for each block 8 words of signed bytes, then d[16] and m[16].
template <DType kType>
void expand_panel(const Byte* panel, int blocks, Byte* out) {
  constexpr PackedFormat kFormat = packed_format(kType);
  const __m512i bias =
      _mm512_set1_epi8(static_cast<char>(kFormat.has_min ? 0 : 1 << kFormat.bias_shift));
  for_each_block<kType>(panel, blocks, [&](const Block512& block) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) _mm512_store_si512(out + 64 * i, _mm512_sub_epi8(block.w[i], bias));
    _mm512_store_ps(out + kScales, block.d);
    _mm512_store_ps(out + kScales + 64, block.m);
    out += kExpandedBlock;
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
  std::int32_t at[kDepth][2][2][kTileTokens][kRows];
};

// The block of step i. Types with halves take two steps a block.
template <bool kHalves>
PIANOLA_INLINE std::ptrdiff_t block_of(int step) {
  return kHalves ? step / 2 : step;
}

// Part `part` (0 .. 3) of the products of one step; all four make a step, in order.
template <bool kHalves>
PIANOLA_INLINE void multiply(const Quad& quad, int step, int part,
                             std::int32_t (*out)[2][kTileTokens][kRows]) {
  const std::ptrdiff_t w = block_of<kHalves>(step) * kExpandedBlock;
  const std::ptrdiff_t x = block_of<kHalves>(step) * kRecord;
  const int half = kHalves ? step % 2 : 0;
  if (part == 0) {
    _tile_loadd(4, quad.x[0] + x + 16 * half, 32);
    _tile_loadd(6, quad.w[0] + w + 256 * half, 64);
    _tile_zero(0);
    _tile_dpbssd(0, 4, 6);
    _tile_stored(0, out[0][0], 64);
  } else if (part == 1) {
    _tile_loadd(7, quad.w[1] + w + 256 * half, 64);
    _tile_zero(1);
    _tile_dpbssd(1, 4, 7);
    _tile_stored(1, out[0][1], 64);
  } else if (quad.tokens <= kTileTokens) {
    return;
  } else if (part == 2) {
    _tile_loadd(5, quad.x[1] + x + 16 * half, 32);
    _tile_zero(2);
    _tile_dpbssd(2, 5, 6);
    _tile_stored(2, out[1][0], 64);
  } else {
    _tile_zero(3);
    _tile_dpbssd(3, 5, 7);
    _tile_stored(3, out[1][1], 64);
  }
}

// Adds one step's products to the sums of 8 tokens and 2 panels.
template <DType kType>
PIANOLA_INLINE void add_step(const Quad& quad, int step, int tile, int token,
                             const std::int32_t (*products)[2][kTileTokens][kRows],
                             __m512 (*acc)[2]) {
  constexpr PackedFormat kFormat = packed_format(kType);
  const std::ptrdiff_t block = block_of<kFormat.halves>(step);
  const std::ptrdiff_t at = block * kExpandedBlock + kScales;
  const int which = kFormat.halves ? 64 * (step % 2) : 0;
  const float* numbers =
      reinterpret_cast<const float*>(quad.x[tile] + block * kRecord + kScales) + token;
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
    const __m512 first = _mm512_cvtepi32_ps(_mm512_load_si512(products[tile][0][token + t]));
    const __m512 second = _mm512_cvtepi32_ps(_mm512_load_si512(products[tile][1][token + t]));
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

// One chunk for 8 tokens and 2 panels, while products of the next one are started.
template <DType kType>
PIANOLA_INLINE void add_part(const Quad& quad, int step, int part, const Products& products,
                             Products& next, Sums& sums) {
  constexpr bool kHalves = packed_format(kType).halves;
  const int n = min_of(kDepth, quad.steps - step);
  const int first = part * kPart;
  __m512 acc[kPart][2];
#pragma GCC unroll 8
  for (int t = 0; t < kPart; ++t) {
    acc[t][0] = step == 0 ? _mm512_setzero_ps() : _mm512_load_ps(sums.at[first + t][0]);
    acc[t][1] = step == 0 ? _mm512_setzero_ps() : _mm512_load_ps(sums.at[first + t][1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < kDepth; ++i) {
    // The units of work of the next chunk in order: its blocks, four tiles each.
    const int unit = part * kDepth + i;
    const int ahead = step + kDepth + unit / 4;
    if (ahead < quad.steps) multiply<kHalves>(quad, ahead, unit % 4, next.at[unit / 4]);
    if (i < n && first < quad.tokens) {
      add_step<kType>(quad, step + i, part / 2, part % 2 * kPart, products.at[i], acc);
    }
  }
  if (step + kDepth >= quad.steps) return write_part(quad, first, acc);
#pragma GCC unroll 8
  for (int t = 0; t < kPart; ++t) {
    _mm512_store_ps(sums.at[first + t][0], acc[t][0]);
    _mm512_store_ps(sums.at[first + t][1], acc[t][1]);
  }
}

template <DType kType>
void multiply_quad(const Quad& quad) {
  constexpr bool kHalves = packed_format(kType).halves;
  Products products[2];
  Sums sums;
  for (int i = 0; i < kDepth && i < quad.steps; ++i) {
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) multiply<kHalves>(quad, i, part, products[0].at[i]);
  }
  for (int step = 0, turn = 0; step < quad.steps; step += kDepth, turn ^= 1) {
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) {
      add_part<kType>(quad, step, part, products[turn], products[turn ^ 1], sums);
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
  const std::ptrdiff_t token_stream = static_cast<std::ptrdiff_t>(blocks) * kRecord;
  const std::ptrdiff_t stream = static_cast<std::ptrdiff_t>(blocks) * kExpandedBlock;
  const int group = kRows * expanded_panels(blocks);
  configure_tiles(kFormat.halves ? 4 : 8);
  for (int first = call.row_begin; first < call.row_end; first += group) {
    const int last = min_of(call.row_end, first + group);
    for (int row = first; row < last; row += kRows) {
      expand_panel<kType>(call.weight + static_cast<std::size_t>(row / kRows) * panel_size, blocks,
                          call.scratch + (row - first) / kRows * stream);
    }
    publish_stores();
    for (int token = 0; token < call.tokens; token += 2 * kTileTokens) {
      const Byte* x = call.activations + token / kTileTokens * token_stream;
      for (int row = first; row < last; row += 2 * kRows) {
        // A panel that is not there is multiplied from stale scratch, and not written.
        const Byte* w = call.scratch + (row - first) / kRows * stream;
        multiply_quad<kType>({{w, w + stream},
                              {x, x + token_stream},
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
