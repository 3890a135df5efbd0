// Eight-bit activations with AVX2; the same bits as the portable version.
#include <immintrin.h>

#include "backends/cpu/kernels/packed_layout.h"

namespace pianola::cpu {
namespace {

using Byte = std::uint8_t;

std::uint32_t largest_of(__m256i v) {
  __m128i m = _mm_max_epu32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4e));
  m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0xb1));
  return static_cast<std::uint32_t>(_mm_cvtsi128_si32(m));
}

std::int32_t sum_of(__m256i v) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1));
  return _mm_cvtsi128_si32(s);
}

// One block of one token to its place: values at `q`, then the four numbers `stride` bytes apart.
void quantize(const float* x, Byte* q, Byte* meta, std::ptrdiff_t stride) {
  // As integers without their sign, floats keep their order and NaN is above infinity.
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  __m256 v[4];
  __m256i top = _mm256_setzero_si256();
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm256_loadu_ps(x + 8 * i);
    top = _mm256_max_epu32(top, _mm256_and_si256(_mm256_castps_si256(v[i]), magnitude));
  }
  const std::uint32_t most = largest_of(top);
  float d = __builtin_nanf("");
  float inverse = 0.0F;
  if (most < 0x7f800000U) {
    float largest;
    __builtin_memcpy(&largest, &most, 4);
    const bool counts = largest >= 1e-30F;
    d = counts ? largest / 127.0F : 0.0F;
    inverse = counts ? 127.0F / largest : 0.0F;
  }
  __m256i r[4];
  const __m256 scale = _mm256_set1_ps(inverse);
  for (int i = 0; i < 4; ++i) {
    r[i] =
        inverse != 0.0F ? _mm256_cvtps_epi32(_mm256_mul_ps(v[i], scale)) : _mm256_setzero_si256();
  }
  const __m256i words =
      _mm256_packs_epi16(_mm256_packs_epi32(r[0], r[1]), _mm256_packs_epi32(r[2], r[3]));
  // The packs work within 128 bits: put the groups of four back in order.
  const __m256i bytes =
      _mm256_permutevar8x32_epi32(words, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), bytes);
  const __m256i first = _mm256_add_epi32(r[0], r[1]);
  const std::int32_t h = -sum_of(first);
  const std::int32_t n = -sum_of(_mm256_add_epi32(first, _mm256_add_epi32(r[2], r[3])));
  const float s = d * static_cast<float>(-n);
  __builtin_memcpy(meta, &d, 4);
  __builtin_memcpy(meta + stride, &s, 4);
  __builtin_memcpy(meta + 2 * stride, &n, 4);
  __builtin_memcpy(meta + 3 * stride, &h, 4);
}

}  // namespace

void prepare_int8_avx2(const PrepareCall& call) {
  const int blocks = call.cols / kBlock;
  const bool tiled = call.tokens >= kTileTokens;
  const int width = tiled ? kTileTokens : call.tokens;
  const std::ptrdiff_t record = static_cast<std::ptrdiff_t>(width) * kActRecord;
  const bool pad = tiled && call.token_end == call.tokens;
  const int end =
      pad ? (call.tokens + kTileTokens - 1) / kTileTokens * kTileTokens : call.token_end;
  const float zeros[kBlock] = {};
  for (int token = call.token_begin; token < end; ++token) {
    const int at = tiled ? token % kTileTokens : token;
    Byte* out = call.out + (tiled ? token / kTileTokens : 0) * blocks * record;
    for (int b = 0; b < blocks; ++b, out += record) {
      const float* x = token < call.tokens ? call.x + token * call.ldx + b * kBlock : zeros;
      quantize(x, out + at * kBlock, out + width * kBlock + at * 4, width * 4);
    }
  }
}

}  // namespace pianola::cpu
