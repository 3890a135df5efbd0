// The matrix kernels for AVX-512 with VNNI.
//
// A panel of 16 rows meets up to 8 tokens at a time: each block of weights is unpacked into 8
// registers and multiplied with each token's 8 words, broadcast from memory by the instruction
// itself. Token counts are template arguments so that all sums stay in registers; the operations
// of one (row, token) are the same for all of them.
#include "backends/cpu/kernels/packed_blocks_avx512.h"

namespace pianola::cpu {
namespace {

using Byte = std::uint8_t;
constexpr int kRows = 16;
constexpr int kBlockTokens = 8;
constexpr int kFloatTokens = 6;

// Where one group of tokens finds its activations and puts its results.
struct Tokens {
  const Byte* x;        // the first token's values in the tile's first record
  std::ptrdiff_t meta;  // block types: from there to the token's scale
  int width;            // of the tile
  float* y;
  std::ptrdiff_t ldy;
  __mmask16 rows;
  bool accumulate;
};

PIANOLA_INLINE __m512i broadcast_i32(const Byte* p) {
  std::int32_t value;
  __builtin_memcpy(&value, p, 4);
  return _mm512_set1_epi32(value);
}

PIANOLA_INLINE __m512 broadcast_f32(const Byte* p) {
  float value;
  __builtin_memcpy(&value, p, 4);
  return _mm512_set1_ps(value);
}

// Words [kBegin, kEnd) of the block with one token, in two chains if `kSplit`.
template <int kBegin, int kEnd, bool kSplit>
PIANOLA_INLINE __m512i dot(__m512i start, const __m512i* w, const Byte* q) {
  __m512i other = _mm512_setzero_si512();
#pragma GCC unroll 8
  for (int i = kBegin; i < kEnd; ++i) {
    const __m512i x = broadcast_i32(q + 4 * i);
    if (kSplit && i % 2 == 1) {
      other = _mm512_dpbusd_epi32(other, w[i], x);
    } else {
      start = _mm512_dpbusd_epi32(start, w[i], x);
    }
  }
  return kSplit ? _mm512_add_epi32(start, other) : start;
}

template <DType kType, int kTokens>
void block_panel(const Byte* panel, int blocks, const Tokens& tokens) {
  constexpr PackedFormat kFormat = packed_format(kType);
  [[maybe_unused]] constexpr bool kSplit = kTokens <= 2;
  __m512 acc[kTokens];
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) acc[t] = _mm512_setzero_ps();
  const std::ptrdiff_t width = tokens.width;
  const Byte* q = tokens.x;
  for_each_block<kType>(panel, blocks, [&](const Block512& block) {
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
      const Byte* meta = q + tokens.meta + 4 * t;
      const __m512 scale = broadcast_f32(meta);
      if constexpr (kFormat.halves) {
        const __m512i h = broadcast_i32(meta + 12 * width);
        const __m512i rest = _mm512_sub_epi32(broadcast_i32(meta + 8 * width), h);
        const __m512i a =
            dot<0, 4, false>(_mm512_slli_epi32(h, kFormat.bias_shift), block.w, q + 32 * t);
        const __m512i b =
            dot<4, 8, false>(_mm512_slli_epi32(rest, kFormat.bias_shift), block.w, q + 32 * t);
        acc[t] = _mm512_fmadd_ps(_mm512_mul_ps(block.d, scale), _mm512_cvtepi32_ps(a), acc[t]);
        acc[t] = _mm512_fmadd_ps(_mm512_mul_ps(block.m, scale), _mm512_cvtepi32_ps(b), acc[t]);
      } else {
        __m512i start = _mm512_setzero_si512();
        if constexpr (kFormat.has_min) {
          acc[t] = _mm512_fmadd_ps(block.m, broadcast_f32(meta + 4 * width), acc[t]);
        } else {
          start = _mm512_slli_epi32(broadcast_i32(meta + 8 * width), kFormat.bias_shift);
        }
        const __m512i sum = dot<0, 8, kSplit>(start, block.w, q + 32 * t);
        acc[t] = _mm512_fmadd_ps(_mm512_mul_ps(block.d, scale), _mm512_cvtepi32_ps(sum), acc[t]);
      }
    }
    q += width * kActRecord;
  });
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
    write_rows(tokens.y + t * tokens.ldy, tokens.rows, acc[t], tokens.accumulate);
  }
}

// Weights of 16 rows at four consecutive k.
template <DType kType>
PIANOLA_INLINE void float_weights(const Byte* p, __m512* w) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    if constexpr (kType == DType::kF32) {
      w[i] = _mm512_loadu_ps(p + 64 * i);
    } else if constexpr (kType == DType::kF16) {
      w[i] = halves_to_floats(p + 32 * i);
    } else {  // BF16, two k interleaved: the high half of each 32 bits is the odd one
      const __m512i pair = load512(p + 64 * (i / 2));
      w[i] = _mm512_castsi512_ps(
          i % 2 == 0 ? _mm512_slli_epi32(pair, 16)
                     : _mm512_and_si512(pair, _mm512_set1_epi32(static_cast<int>(0xffff0000U))));
    }
  }
}

// Four running sums by k mod 4, added in pairs at the end.
template <DType kType, int kTokens>
void float_panel(const Byte* panel, int cols, const Tokens& tokens) {
  constexpr int kSize = kType == DType::kF32 ? 4 : 2;
  __m512 acc[kTokens][4];
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) acc[t][i] = _mm512_setzero_ps();
  }
  const Byte* x = tokens.x;
  const std::ptrdiff_t step = 4 * static_cast<std::ptrdiff_t>(tokens.width);
  for (int k = 0; k < cols; k += 4, panel += 4 * kRows * kSize, x += 4 * step) {
    __m512 w[4];
    float_weights<kType>(panel, w);
    prefetch_ahead<4 * kRows * kSize>(panel);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) {
        acc[t][i] = _mm512_fmadd_ps(w[i], broadcast_f32(x + i * step + 4 * t), acc[t][i]);
      }
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
    const __m512 sum =
        _mm512_add_ps(_mm512_add_ps(acc[t][0], acc[t][1]), _mm512_add_ps(acc[t][2], acc[t][3]));
    write_rows(tokens.y + t * tokens.ldy, tokens.rows, sum, tokens.accumulate);
  }
}

using Kernel = void (*)(const Byte* panel, int length, const Tokens& tokens);

// Kernels of a type, by number of tokens minus one.
struct Kernels {
  Kernel by_tokens[kBlockTokens];
  int most;
  bool blocky;
  int float_size;
};

template <DType kType>
Kernels block_kernels() {
  return {
      {block_panel<kType, 1>, block_panel<kType, 2>, block_panel<kType, 3>, block_panel<kType, 4>,
       block_panel<kType, 5>, block_panel<kType, 6>, block_panel<kType, 7>, block_panel<kType, 8>},
      kBlockTokens,
      true,
      0};
}

template <DType kType>
Kernels float_kernels() {
  return {{float_panel<kType, 1>, float_panel<kType, 2>, float_panel<kType, 3>,
           float_panel<kType, 4>, float_panel<kType, 5>, float_panel<kType, 6>, nullptr, nullptr},
          kFloatTokens,
          false,
          kType == DType::kF32 ? 4 : 2};
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

void linear_avx512(const LinearCall& call) {
  const Kernels kernels = kernels_of(call.dtype);
  const int blocks = call.cols / kBlock;
  const int cols = padded_cols(call.cols);
  const int length = kernels.blocky ? blocks : cols;
  const std::size_t panel_size =
      kernels.blocky
          ? panel_bytes(packed_format(call.dtype), blocks)
          : static_cast<std::size_t>(cols) * static_cast<std::size_t>(kRows * kernels.float_size);
  const std::ptrdiff_t token_size = kernels.blocky ? blocks * kActRecord : cols * 4;
  const int value_size = kernels.blocky ? kBlock : 4;
  const int width = min_of(call.tokens, kTileTokens);
  // A group of panels that stays in the second-level cache meets one tile of tokens after another.
  const int group = call.tokens <= kTileTokens
                        ? kRows
                        : kRows * (1 + static_cast<int>((std::size_t{256} << 10) / panel_size));
  for (int first = call.row_begin; first < call.row_end; first += group) {
    const int last = min_of(call.row_end, first + group);
    for (int tile = 0; tile < call.tokens; tile += kTileTokens) {
      const int tile_tokens = min_of(kTileTokens, call.tokens - tile);
      for (int row = first; row < last; row += kRows) {
        const Byte* panel = call.weight + static_cast<std::size_t>(row / kRows) * panel_size;
        const int rows = min_of(kRows, call.row_end - row);
        for (int at = 0; at < tile_tokens;) {
          const int n = min_of(kernels.most, tile_tokens - at);
          const Tokens tokens{call.activations + tile * token_size + at * value_size,
                              kBlock * width - (kBlock - 4) * at,
                              width,
                              call.y + (tile + at) * call.ldy + row,
                              call.ldy,
                              static_cast<__mmask16>((1U << rows) - 1U),
                              call.accumulate};
          kernels.by_tokens[n - 1](panel, length, tokens);
          at += n;
        }
      }
    }
  }
}

}  // namespace pianola::cpu
