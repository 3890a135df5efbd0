// The matrix kernels for AVX2 with FMA and F16C: the same packed panels, in two halves of 8 rows,
// and per (row, token) the same operations as the AVX-512 kernels.
//
// `vpmaddubsw` adds pairs of products into 16 bits. Values of 4 bits leave room to add 8 such words
// before widening, 5 bits 4, 6 bits 2; 8-bit values go in as magnitudes with their sign moved to
// the activation, which keeps a pair at or below 2 * 128 * 127.
#include <immintrin.h>

#include "backends/cpu/kernels/packed_layout.h"

namespace pianola::cpu {
namespace {

#define PIANOLA_INLINE inline __attribute__((always_inline))

using Byte = std::uint8_t;
constexpr int kRows = 16;
constexpr int kHalf = 8;
constexpr int kMostTokens = 4;

struct Tokens {
  const Byte* x;        // the first token's values in the tile's first record
  std::ptrdiff_t meta;  // block types: from there to the token's scale
  int width;            // of the tile
  float* y;
  std::ptrdiff_t ldy;
  int rows;
  bool accumulate;
};

// Eight rows of a block. Words are unsigned, or for 8 bits signed.
struct Block256 {
  __m256i w[8];
  __m256 d;
  __m256 m;
};

PIANOLA_INLINE __m256i load256(const Byte* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}

PIANOLA_INLINE __m256 halves_to_floats(const Byte* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

PIANOLA_INLINE __m128i load_bytes(const Byte* p) {
  return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
}

PIANOLA_INLINE void prefetch_ahead(const Byte* p) {
  _mm_prefetch(reinterpret_cast<const char*>(p) + kPrefetchBytes, _MM_HINT_T1);
}

PIANOLA_INLINE __m256i broadcast_i32(const Byte* p) {
  std::int32_t value;
  __builtin_memcpy(&value, p, 4);
  return _mm256_set1_epi32(value);
}

PIANOLA_INLINE __m256 broadcast_f32(const Byte* p) {
  float value;
  __builtin_memcpy(&value, p, 4);
  return _mm256_set1_ps(value);
}

template <int kBits>
PIANOLA_INLINE void unpack_words(const Byte* p, __m256i* w) {
  if constexpr (kBits == 8) {
    const __m256i bias = _mm256_set1_epi8(static_cast<char>(-128));
    for (int i = 0; i < 8; ++i) w[i] = _mm256_xor_si256(load256(p + 64 * i), bias);
    return;
  }
  const __m256i low = _mm256_set1_epi8(15);
  constexpr int kPlanes = kBits - 4;
  for (int i = 0; i < 4; ++i) {
    const __m256i both = load256(p + 64 * (kPlanes + i));
    w[i] = _mm256_and_si256(both, low);
    w[i + 4] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
  }
  if constexpr (kBits > 4) {
    const __m256i high = _mm256_set1_epi8(kBits == 5 ? 0x10 : 0x30);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      const int at = kBits == 5 ? i : i % 4 * 2;
      const __m256i from = load256(p + 64 * (kBits == 5 ? 0 : i / 4));
      const __m256i moved =
          at <= 4 ? _mm256_slli_epi16(from, 4 - at) : _mm256_srli_epi16(from, at - 4);
      w[i] = _mm256_or_si256(w[i], _mm256_and_si256(moved, high));
    }
  }
}

// `half` is 0 or 1.
template <DType kType>
PIANOLA_INLINE void unpack_half(const Byte* header, const Byte* part, const Byte* quants, int half,
                                Block256& out) {
  constexpr PackedFormat kFormat = packed_format(kType);
  unpack_words<kFormat.bits>(quants + 32 * half, out.w);
  const Byte* scales = part + kHalf * half;
  const Byte* supers = header + 16 * half;
  if constexpr (kFormat.halves) {
    const __m256 d = halves_to_floats(supers);
    out.d = _mm256_mul_ps(d, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_bytes(scales))));
    out.m = _mm256_mul_ps(d, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_bytes(scales + 16))));
  } else if constexpr (kFormat.header != 0) {
    const __m256 d = halves_to_floats(supers);
    const __m256 m = _mm256_xor_ps(halves_to_floats(supers + 32), _mm256_set1_ps(-0.0F));
    out.d = _mm256_mul_ps(d, _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load_bytes(scales))));
    out.m = _mm256_mul_ps(m, _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load_bytes(scales + 16))));
  } else {
    out.d = halves_to_floats(part + 16 * half);
    if constexpr (kFormat.has_min) out.m = halves_to_floats(part + 32 + 16 * half);
  }
}

// Words [kBegin, kEnd) with one token, added to `start`.
template <int kBits, int kBegin, int kEnd>
PIANOLA_INLINE __m256i dot(__m256i start, const __m256i* w, const Byte* q) {
  constexpr int kRoom = kBits == 4 ? 8 : (kBits == 5 ? 4 : (kBits == 6 ? 2 : 1));
  const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 8
  for (int i = kBegin; i < kEnd; i += kRoom) {
    __m256i pairs = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int j = i; j < i + kRoom; ++j) {
      __m256i x = broadcast_i32(q + 4 * j);
      __m256i magnitude = w[j];
      if constexpr (kBits == 8) {
        x = _mm256_sign_epi8(x, w[j]);
        magnitude = _mm256_abs_epi8(w[j]);
      }
      const __m256i products = _mm256_maddubs_epi16(magnitude, x);
      pairs = j == i ? products : _mm256_add_epi16(pairs, products);
    }
    start = _mm256_add_epi32(start, _mm256_madd_epi16(pairs, ones));
  }
  return start;
}

// One block of 8 rows with one token whose values are at `q` and whose scale is at `meta`.
template <DType kType>
PIANOLA_INLINE __m256 add_block(__m256 acc, const Block256& block, const Byte* q, const Byte* meta,
                                std::ptrdiff_t width) {
  constexpr PackedFormat kFormat = packed_format(kType);
  constexpr int kBits = kFormat.bits;
  const __m256 scale = broadcast_f32(meta);
  if constexpr (kFormat.halves) {
    const __m256i h = broadcast_i32(meta + 12 * width);
    const __m256i rest = _mm256_sub_epi32(broadcast_i32(meta + 8 * width), h);
    const __m256i a = dot<kBits, 0, 4>(_mm256_slli_epi32(h, kFormat.bias_shift), block.w, q);
    const __m256i b = dot<kBits, 4, 8>(_mm256_slli_epi32(rest, kFormat.bias_shift), block.w, q);
    acc = _mm256_fmadd_ps(_mm256_mul_ps(block.d, scale), _mm256_cvtepi32_ps(a), acc);
    return _mm256_fmadd_ps(_mm256_mul_ps(block.m, scale), _mm256_cvtepi32_ps(b), acc);
  } else {
    __m256i start = _mm256_setzero_si256();
    if constexpr (kFormat.has_min) {
      acc = _mm256_fmadd_ps(block.m, broadcast_f32(meta + 4 * width), acc);
    } else if constexpr (kBits != 8) {
      start = _mm256_slli_epi32(broadcast_i32(meta + 8 * width), kFormat.bias_shift);
    }
    const __m256i sum = dot<kBits, 0, 8>(start, block.w, q);
    return _mm256_fmadd_ps(_mm256_mul_ps(block.d, scale), _mm256_cvtepi32_ps(sum), acc);
  }
}

void write_rows(const Tokens& tokens, int token, int half, __m256 value) {
  float* y = tokens.y + token * tokens.ldy + kHalf * half;
  const int rows = tokens.rows - kHalf * half;
  const __m256i mask =
      _mm256_cmpgt_epi32(_mm256_set1_epi32(rows), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  if (tokens.accumulate) value = _mm256_add_ps(_mm256_maskload_ps(y, mask), value);
  _mm256_maskstore_ps(y, mask, value);
}

template <DType kType, int kTokens>
void block_panel(const Byte* panel, int blocks, const Tokens& tokens) {
  constexpr PackedFormat kFormat = packed_format(kType);
  __m256 acc[2][kTokens];
  for (int t = 0; t < kTokens; ++t) acc[0][t] = acc[1][t] = _mm256_setzero_ps();
  const Byte* q = tokens.x;
  Block256 block = {};
  while (blocks > 0) {
    const int n = blocks < kChunkBlocks ? blocks : kChunkBlocks;
    const Byte* part = panel + kFormat.header;
    const Byte* quants = panel + chunk_header_bytes(kFormat, n);
    for (int j = 0; j < n; ++j) {
      for (int i = 0; i < kFormat.quants; i += 64) prefetch_ahead(quants + i);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        unpack_half<kType>(panel, part, quants, half, block);
#pragma GCC unroll 4
        for (int t = 0; t < kTokens; ++t) {
          acc[half][t] = add_block<kType>(acc[half][t], block, q + kBlock * t,
                                          q + tokens.meta + 4 * t, tokens.width);
        }
      }
      part += kFormat.header_per_block;
      quants += kFormat.quants;
      q += static_cast<std::ptrdiff_t>(tokens.width) * kActRecord;
    }
    panel = quants;
    blocks -= n;
  }
  for (int t = 0; t < kTokens; ++t) {
    write_rows(tokens, t, 0, acc[0][t]);
    write_rows(tokens, t, 1, acc[1][t]);
  }
}

// Weights of 8 rows at k + i.
template <DType kType>
PIANOLA_INLINE __m256 float_weights(const Byte* p, int i, int half) {
  if constexpr (kType == DType::kF32) {
    return _mm256_loadu_ps(reinterpret_cast<const float*>(p + 64 * i + 32 * half));
  } else if constexpr (kType == DType::kF16) {
    return halves_to_floats(p + 32 * i + 16 * half);
  } else {
    const __m256i pair = load256(p + 64 * (i / 2) + 32 * half);
    return _mm256_castsi256_ps(
        i % 2 == 0 ? _mm256_slli_epi32(pair, 16)
                   : _mm256_and_si256(pair, _mm256_set1_epi32(static_cast<int>(0xffff0000U))));
  }
}

// One token: 8 running sums fill half the registers.
template <DType kType>
void float_panel(const Byte* panel, int cols, const Tokens& tokens) {
  constexpr int kSize = kType == DType::kF32 ? 4 : 2;
  __m256 acc[2][4];
  for (int i = 0; i < 4; ++i) acc[0][i] = acc[1][i] = _mm256_setzero_ps();
  const Byte* x = tokens.x;
  const std::ptrdiff_t step = 4 * static_cast<std::ptrdiff_t>(tokens.width);
  for (int k = 0; k < cols; k += 4, panel += 4 * kRows * kSize, x += 4 * step) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      if (i * kSize % 4 == 0) prefetch_ahead(panel + kRows * kSize * i);
      const __m256 value = broadcast_f32(x + i * step);
      acc[0][i] = _mm256_fmadd_ps(float_weights<kType>(panel, i, 0), value, acc[0][i]);
      acc[1][i] = _mm256_fmadd_ps(float_weights<kType>(panel, i, 1), value, acc[1][i]);
    }
  }
  for (int half = 0; half < 2; ++half) {
    write_rows(tokens, 0, half,
               _mm256_add_ps(_mm256_add_ps(acc[half][0], acc[half][1]),
                             _mm256_add_ps(acc[half][2], acc[half][3])));
  }
}

using Kernel = void (*)(const Byte* panel, int length, const Tokens& tokens);

struct Kernels {
  Kernel by_tokens[kMostTokens];
  int most;
  int float_size;  // 0 for block types
};

template <DType kType>
Kernels block_kernels() {
  return {
      {block_panel<kType, 1>, block_panel<kType, 2>, block_panel<kType, 3>, block_panel<kType, 4>},
      kMostTokens,
      0};
}

template <DType kType>
Kernels float_kernels() {
  return {{float_panel<kType>, nullptr, nullptr, nullptr}, 1, kType == DType::kF32 ? 4 : 2};
}

Kernels kernels_of(DType dtype) {
  switch (dtype) {
    case DType::kQ4_0:
      return block_kernels<DType::kQ4_0>();
    case DType::kQ4_1:
      return block_kernels<DType::kQ4_1>();
    case DType::kQ5_0:
      return block_kernels<DType::kQ5_0>();
    case DType::kQ5_1:
      return block_kernels<DType::kQ5_1>();
    case DType::kQ8_0:
      return block_kernels<DType::kQ8_0>();
    case DType::kQ4_K:
      return block_kernels<DType::kQ4_K>();
    case DType::kQ5_K:
      return block_kernels<DType::kQ5_K>();
    case DType::kQ6_K:
      return block_kernels<DType::kQ6_K>();
    case DType::kF16:
      return float_kernels<DType::kF16>();
    case DType::kBF16:
      return float_kernels<DType::kBF16>();
    default:
      return float_kernels<DType::kF32>();
  }
}

int min_of(int a, int b) { return a < b ? a : b; }

}  // namespace

void linear_avx2(const LinearCall& call) {
  const Kernels kernels = kernels_of(call.dtype);
  const bool blocky = kernels.float_size == 0;
  const int blocks = call.cols / kBlock;
  const int cols = padded_cols(call.cols);
  const std::size_t panel_size = blocky ? panel_bytes(packed_format(call.dtype), blocks)
                                        : static_cast<std::size_t>(cols) *
                                              static_cast<std::size_t>(kRows * kernels.float_size);
  const std::ptrdiff_t token_size = blocky ? blocks * kActRecord : cols * 4;
  const int value_size = blocky ? kBlock : 4;
  const int width = min_of(call.tokens, kTileTokens);
  const int group = call.tokens <= kTileTokens
                        ? kRows
                        : kRows * (1 + static_cast<int>((std::size_t{128} << 10) / panel_size));
  for (int first = call.row_begin; first < call.row_end; first += group) {
    const int last = min_of(call.row_end, first + group);
    for (int tile = 0; tile < call.tokens; tile += kTileTokens) {
      const int tile_tokens = min_of(kTileTokens, call.tokens - tile);
      for (int row = first; row < last; row += kRows) {
        const Byte* panel = call.weight + static_cast<std::size_t>(row / kRows) * panel_size;
        for (int at = 0; at < tile_tokens;) {
          const int n = min_of(kernels.most, tile_tokens - at);
          const Tokens tokens{call.activations + tile * token_size + at * value_size,
                              kBlock * width - (kBlock - 4) * at,
                              width,
                              call.y + (tile + at) * call.ldy + row,
                              call.ldy,
                              min_of(kRows, call.row_end - row),
                              call.accumulate};
          kernels.by_tokens[n - 1](panel, blocky ? blocks : cols, tokens);
          at += n;
        }
      }
    }
  }
}

}  // namespace pianola::cpu
