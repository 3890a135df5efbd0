// Eight-bit activations with AVX-512; the same bits as the portable version.
#include <immintrin.h>

#include "backends/cpu/kernels/packed_layout.h"

namespace pianola::cpu {
namespace {

using Byte = std::uint8_t;

// 32 values as integers, with their scale; d * sum follows from both.
struct Quantized {
  __m512i first;
  __m512i second;
  float d;
};

Quantized quantize(const float* x) {
  const __m512 a = _mm512_loadu_ps(x);
  const __m512 b = _mm512_loadu_ps(x + 16);
  // As integers without their sign, floats keep their order and NaN is above infinity.
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  const std::uint32_t most = _mm512_reduce_max_epu32(
      _mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(a), magnitude),
                       _mm512_and_si512(_mm512_castps_si512(b), magnitude)));
  float d = __builtin_nanf("");
  float inverse = 0.0F;
  if (most < 0x7f800000U) {
    float largest;
    __builtin_memcpy(&largest, &most, 4);
    const bool counts = largest >= 1e-30F;
    d = counts ? largest / 127.0F : 0.0F;
    inverse = counts ? 127.0F / largest : 0.0F;
  }
  const __m512 scale = _mm512_set1_ps(inverse);
  const __mmask16 keep = inverse != 0.0F ? 0xffff : 0;
  return {_mm512_maskz_cvtps_epi32(keep, _mm512_mul_ps(a, scale)),
          _mm512_maskz_cvtps_epi32(keep, _mm512_mul_ps(b, scale)), d};
}

// One block of one token to its place: values at `q`, then the four numbers `stride` bytes apart.
void store_block(const Quantized& block, Byte* q, Byte* meta, std::ptrdiff_t stride) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(q), _mm512_cvtepi32_epi8(block.first));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(q + 16), _mm512_cvtepi32_epi8(block.second));
  const std::int32_t h = -_mm512_reduce_add_epi32(block.first);
  const std::int32_t n = -_mm512_reduce_add_epi32(_mm512_add_epi32(block.first, block.second));
  const float s = block.d * static_cast<float>(-n);
  __builtin_memcpy(meta, &block.d, 4);
  __builtin_memcpy(meta + stride, &s, 4);
  __builtin_memcpy(meta + 2 * stride, &n, 4);
  __builtin_memcpy(meta + 3 * stride, &h, 4);
}

}  // namespace

void prepare_int8_avx512(const PrepareCall& call) {
  const int blocks = call.cols / kBlock;
  const bool tiled = call.tokens >= kTileTokens;
  const int width = tiled ? kTileTokens : call.tokens;
  const std::ptrdiff_t record = static_cast<std::ptrdiff_t>(width) * kActRecord;
  const bool pad = tiled && call.token_end == call.tokens;
  const int end =
      pad ? (call.tokens + kTileTokens - 1) / kTileTokens * kTileTokens : call.token_end;
  alignas(64) const float zeros[kBlock] = {};
  for (int token = call.token_begin; token < end; ++token) {
    const int at = tiled ? token % kTileTokens : token;
    Byte* out = call.out + (tiled ? token / kTileTokens : 0) * blocks * record;
    for (int b = 0; b < blocks; ++b, out += record) {
      const float* x = token < call.tokens ? call.x + token * call.ldx + b * kBlock : zeros;
      store_block(quantize(x), out + at * kBlock, out + width * kBlock + at * 4, width * 4);
    }
  }
}

}  // namespace pianola::cpu
