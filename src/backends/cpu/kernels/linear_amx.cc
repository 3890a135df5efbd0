// Block types with int8 tiles, for 16 tokens or more.
//
// A block of 32 values is one tile product: 16 tokens x 32 values times 32 values x 16 rows into
// 16 x 16 exact integers, which leave through memory and are scaled and added as the VNNI kernel
// does it: the same bits. Panels are expanded once into scratch (signed bytes, which need no
// correction, and f32 scales), a group that fits the second-level cache at a time, and meet all
// tokens there. The next product is started before the last one is scaled, so that the tile unit
// and the vector units work at the same time.
#include "backends/cpu/kernels/packed_blocks_avx512.h"

namespace pianola::cpu {
namespace {

using Byte = std::uint8_t;
constexpr int kRows = 16;
constexpr int kRecord = kTileTokens * kActRecord;  // of a whole tile of tokens

int min_of(int a, int b) { return a < b ? a : b; }

// Tiles 0 and 1 hold results, 2 and 3 activations, 4 and 5 weights; `depth` values of k.
void configure_tiles(int depth) {
  struct alignas(64) Config {
    Byte palette = 1;
    Byte start = 0;
    Byte reserved[14] = {};
    std::uint16_t row_bytes[16] = {};
    Byte rows[16] = {};
  } config;
  for (int i = 0; i < 2; ++i) {
    config.row_bytes[i] = 64;
    config.rows[i] = kTileTokens;
    config.row_bytes[2 + i] = static_cast<std::uint16_t>(depth);
    config.rows[2 + i] = kTileTokens;
    config.row_bytes[4 + i] = 64;
    config.rows[4 + i] = static_cast<Byte>(depth / 4);
  }
  _tile_loadconfig(&config);
}

// A panel for the tiles: for each block 8 words of signed bytes, then d[16] and m[16].
template <DType kType>
void expand_panel(const Byte* panel, int blocks, Byte* out) {
  constexpr PackedFormat kFormat = packed_format(kType);
  const __m512i bias =
      _mm512_set1_epi8(static_cast<char>(kFormat.has_min ? 0 : 1 << kFormat.bias_shift));
  for_each_block<kType>(panel, blocks, [&](const Block512& block) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      _mm512_store_si512(out + 64 * i, _mm512_sub_epi8(block.w[i], bias));
    }
    _mm512_store_ps(out + 512, block.d);
    _mm512_store_ps(out + 576, block.m);
    out += kExpandedBlock;
  });
}

// Products of one block, or of its halves, as integers [tokens, rows].
struct alignas(64) Products {
  std::int32_t first[kTileTokens * kRows];
  std::int32_t second[kTileTokens * kRows];
};

template <bool kHalves>
PIANOLA_INLINE void multiply_even(const Byte* w, const Byte* x, Products& out) {
  _tile_zero(0);
  _tile_loadd(2, x, kBlock);
  _tile_loadd(4, w, 64);
  _tile_dpbssd(0, 2, 4);
  _tile_stored(0, out.first, 64);
  if constexpr (kHalves) {
    _tile_zero(1);
    _tile_loadd(3, x + 16, kBlock);
    _tile_loadd(5, w + 256, 64);
    _tile_dpbssd(1, 3, 5);
    _tile_stored(1, out.second, 64);
  }
}

template <bool kHalves>
PIANOLA_INLINE void multiply_odd(const Byte* w, const Byte* x, Products& out) {
  if constexpr (kHalves) return multiply_even<true>(w, x, out);
  _tile_zero(1);
  _tile_loadd(3, x, kBlock);
  _tile_loadd(5, w, 64);
  _tile_dpbssd(1, 3, 5);
  _tile_stored(1, out.first, 64);
}

template <DType kType>
PIANOLA_INLINE void scale_and_add(const Products& products, const Byte* scales, const Byte* meta,
                                  __m512* acc) {
  constexpr PackedFormat kFormat = packed_format(kType);
  const __m512 d = _mm512_load_ps(scales);
  const __m512 m = _mm512_load_ps(scales + 64);
  const float* token_d = reinterpret_cast<const float*>(meta);
#pragma GCC unroll 16
  for (int t = 0; t < kTileTokens; ++t) {
    const __m512 first = _mm512_cvtepi32_ps(_mm512_load_si512(products.first + kRows * t));
    const __m512 scale = _mm512_set1_ps(token_d[t]);
    if constexpr (kFormat.has_min) {
      acc[t] = _mm512_fmadd_ps(m, _mm512_set1_ps(token_d[kTileTokens + t]), acc[t]);
    }
    acc[t] = _mm512_fmadd_ps(_mm512_mul_ps(d, scale), first, acc[t]);
    if constexpr (kFormat.halves) {
      const __m512 second = _mm512_cvtepi32_ps(_mm512_load_si512(products.second + kRows * t));
      acc[t] = _mm512_fmadd_ps(_mm512_mul_ps(m, scale), second, acc[t]);
    }
  }
}

struct Output {
  float* y;
  std::ptrdiff_t ldy;
  int tokens;
  __mmask16 rows;
  bool accumulate;
};

template <DType kType>
void tile_panel(const Byte* w, const Byte* x, int blocks, const Output& output) {
  constexpr bool kHalves = packed_format(kType).halves;
  constexpr int kValues = kTileTokens * kBlock;
  __m512 acc[kTileTokens];
#pragma GCC unroll 16
  for (int t = 0; t < kTileTokens; ++t) acc[t] = _mm512_setzero_ps();
  Products even;
  Products odd;
  multiply_even<kHalves>(w, x, even);
  int b = 0;
  for (; b + 2 <= blocks; b += 2, w += 2 * kExpandedBlock, x += 2 * kRecord) {
    multiply_odd<kHalves>(w + kExpandedBlock, x + kRecord, odd);
    scale_and_add<kType>(even, w + 512, x + kValues, acc);
    if (b + 2 < blocks) multiply_even<kHalves>(w + 2 * kExpandedBlock, x + 2 * kRecord, even);
    scale_and_add<kType>(odd, w + kExpandedBlock + 512, x + kRecord + kValues, acc);
  }
  if (b < blocks) scale_and_add<kType>(even, w + 512, x + kValues, acc);
#pragma GCC unroll 16
  for (int t = 0; t < kTileTokens; ++t) {
    if (t < output.tokens)
      write_rows(output.y + t * output.ldy, output.rows, acc[t], output.accumulate);
  }
}

template <DType kType>
void linear_tiles(const LinearCall& call) {
  constexpr PackedFormat kFormat = packed_format(kType);
  const int blocks = call.cols / kBlock;
  const std::size_t panel_size = panel_bytes(kFormat, blocks);
  const std::ptrdiff_t expanded_size = static_cast<std::ptrdiff_t>(blocks) * kExpandedBlock;
  const int group = kRows * expanded_panels(blocks);
  configure_tiles(kFormat.halves ? 16 : 32);
  for (int first = call.row_begin; first < call.row_end; first += group) {
    const int last = min_of(call.row_end, first + group);
    for (int row = first; row < last; row += kRows) {
      expand_panel<kType>(call.weight + static_cast<std::size_t>(row / kRows) * panel_size, blocks,
                          call.scratch + (row - first) / kRows * expanded_size);
    }
    for (int token = 0; token < call.tokens; token += kTileTokens) {
      const Byte* x = call.activations + static_cast<std::ptrdiff_t>(token) * blocks * kActRecord;
      for (int row = first; row < last; row += kRows) {
        const int rows = min_of(kRows, call.row_end - row);
        const Output output{call.y + token * call.ldy + row, call.ldy,
                            min_of(kTileTokens, call.tokens - token),
                            static_cast<__mmask16>((1U << rows) - 1U), call.accumulate};
        tile_panel<kType>(call.scratch + (row - first) / kRows * expanded_size, x, blocks, output);
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
