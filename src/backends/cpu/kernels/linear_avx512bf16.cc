// BF16 weights with bfloat16 activations through the dot product instruction.
//
// `vdpbf16ps` adds two products to a lane. Four running sums by (k / 2) mod 4 hide its latency;
// they are added in pairs at the end, for any number of tokens.
#include <immintrin.h>

#include "backends/cpu/kernels/packed_layout.h"

namespace pianola::cpu {
namespace {

#define PIANOLA_INLINE inline __attribute__((always_inline))

using Byte = std::uint8_t;
constexpr int kRows = 16;
constexpr int kMostTokens = 6;

struct Tokens {
  const Byte* x;  // the first token's pair at k = 0
  int width;
  float* y;
  std::ptrdiff_t ldy;
  __mmask16 rows;
  bool accumulate;
};

PIANOLA_INLINE __m512bh pair(const Byte* p) {
  std::int32_t bits;
  __builtin_memcpy(&bits, p, 4);
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(bits));
}

template <int kTokens>
void panel_tokens(const Byte* panel, int cols, const Tokens& tokens) {
  __m512 acc[kTokens][4];
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) acc[t][i] = _mm512_setzero_ps();
  }
  const Byte* x = tokens.x;
  const std::ptrdiff_t step = 4 * static_cast<std::ptrdiff_t>(tokens.width);
  for (int k = 0; k < cols; k += 8, panel += 256, x += 4 * step) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      _mm_prefetch(reinterpret_cast<const char*>(panel) + kPrefetchBytes + 64 * i, _MM_HINT_T1);
      const __m512bh w = reinterpret_cast<__m512bh>(_mm512_loadu_si512(panel + 64 * i));
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) {
        acc[t][i] = _mm512_dpbf16_ps(acc[t][i], w, pair(x + i * step + 4 * t));
      }
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
    __m512 sum =
        _mm512_add_ps(_mm512_add_ps(acc[t][0], acc[t][1]), _mm512_add_ps(acc[t][2], acc[t][3]));
    float* y = tokens.y + t * tokens.ldy;
    if (tokens.accumulate) sum = _mm512_add_ps(_mm512_maskz_loadu_ps(tokens.rows, y), sum);
    _mm512_mask_storeu_ps(y, tokens.rows, sum);
  }
}

using Kernel = void (*)(const Byte* panel, int cols, const Tokens& tokens);
constexpr Kernel kKernels[kMostTokens] = {panel_tokens<1>, panel_tokens<2>, panel_tokens<3>,
                                          panel_tokens<4>, panel_tokens<5>, panel_tokens<6>};

int min_of(int a, int b) { return a < b ? a : b; }

}  // namespace

void linear_avx512bf16(const LinearCall& call) {
  const int cols = padded_cols(call.cols);
  const std::size_t panel_size = static_cast<std::size_t>(cols) * kRows * 2;
  const std::ptrdiff_t token_size = cols * 2;
  const int width = min_of(call.tokens, kTileTokens);
  const int group = call.tokens <= kTileTokens
                        ? kRows
                        : kRows * (1 + static_cast<int>((std::size_t{512} << 10) / panel_size));
  for (int first = call.row_begin; first < call.row_end; first += group) {
    const int last = min_of(call.row_end, first + group);
    for (int tile = 0; tile < call.tokens; tile += kTileTokens) {
      const int tile_tokens = min_of(kTileTokens, call.tokens - tile);
      for (int row = first; row < last; row += kRows) {
        const Byte* panel = call.weight + static_cast<std::size_t>(row / kRows) * panel_size;
        const int rows = min_of(kRows, call.row_end - row);
        for (int at = 0; at < tile_tokens;) {
          const int n = min_of(kMostTokens, tile_tokens - at);
          const Tokens tokens{call.activations + tile * token_size + at * 4, width,
                              call.y + (tile + at) * call.ldy + row,         call.ldy,
                              static_cast<__mmask16>((1U << rows) - 1U),     call.accumulate};
          kKernels[n - 1](panel, cols, tokens);
          at += n;
        }
      }
    }
  }
}

}  // namespace pianola::cpu
