// Taking packed blocks apart with AVX-512, for the *_avx512.cc and *_amx.cc files only. Everything
// is in an unnamed namespace: each file has its own copy, compiled with its own flags.
#pragma once

#include <immintrin.h>

#include "backends/cpu/kernels/packed_layout.h"

namespace pianola::cpu {
namespace {

#define PIANOLA_INLINE inline __attribute__((always_inline))

// A block of 16 rows: 8 words of unsigned values, scales, and minimum or second scale.
struct Block512 {
  __m512i w[8];
  __m512 d;  // scale of every value, or of the first half
  __m512 m;  // minimum, or scale of the second half
};

PIANOLA_INLINE __m512 halves_to_floats(const std::uint8_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

PIANOLA_INLINE __m512i load512(const std::uint8_t* p) { return _mm512_loadu_si512(p); }

template <int kBits>
PIANOLA_INLINE void unpack_words(const std::uint8_t* p, __m512i* w) {
  if constexpr (kBits == 8) {
    for (int i = 0; i < 8; ++i) w[i] = load512(p + 64 * i);
    return;
  }
  const __m512i low = _mm512_set1_epi8(15);
  constexpr int kPlanes = kBits - 4;
  for (int i = 0; i < 4; ++i) {
    const __m512i both = load512(p + 64 * (kPlanes + i));
    w[i] = _mm512_and_si512(both, low);
    w[i + 4] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
  }
  if constexpr (kBits > 4) {
    // The high bits move to bit 4 of their byte: left by 4, and back right by where they are.
    const __m512i high = _mm512_set1_epi8(kBits == 5 ? 0x10 : 0x30);
    __m512i plane[kPlanes];
    for (int i = 0; i < kPlanes; ++i) plane[i] = load512(p + 64 * i);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      const int at = kBits == 5 ? i : i % 4 * 2;
      const __m512i from = plane[kBits == 5 ? 0 : i / 4];
      const __m512i moved = at <= 4 ? _mm512_slli_epi16(from, static_cast<unsigned>(4 - at))
                                    : _mm512_srli_epi16(from, static_cast<unsigned>(at - 4));
      w[i] = _mm512_ternarylogic_epi32(w[i], moved, high, 0xf8);  // w | (moved & high)
    }
  }
}

template <DType kType>
PIANOLA_INLINE void unpack_scales(const std::uint8_t* header, const std::uint8_t* part,
                                  Block512& out) {
  constexpr PackedFormat kFormat = packed_format(kType);
  const auto bytes = [](const std::uint8_t* p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  };
  if constexpr (kFormat.halves) {
    const __m512 d = halves_to_floats(header);
    out.d = _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes(part))));
    out.m = _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes(part + 16))));
  } else if constexpr (kFormat.header != 0) {
    const __m512 d = halves_to_floats(header);
    const __m512 m = _mm512_xor_ps(halves_to_floats(header + 32), _mm512_set1_ps(-0.0F));
    out.d = _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes(part))));
    out.m = _mm512_mul_ps(m, _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes(part + 16))));
  } else {
    out.d = halves_to_floats(part);
    if constexpr (kFormat.has_min) out.m = halves_to_floats(part + 32);
  }
}

// Prefetches what lies kPrefetchBytes after the next kBytes.
template <int kBytes>
PIANOLA_INLINE void prefetch_ahead(const std::uint8_t* p) {
#pragma GCC unroll 8
  for (int i = 0; i < kBytes; i += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(p) + kPrefetchBytes + i, _MM_HINT_T1);
  }
}

// Calls visit(block) for every block of a panel in order.
template <DType kType, typename Visit>
PIANOLA_INLINE void for_each_block(const std::uint8_t* panel, int blocks, Visit visit) {
  constexpr PackedFormat kFormat = packed_format(kType);
  Block512 block = {};
  while (blocks > 0) {
    const int n = blocks < kChunkBlocks ? blocks : kChunkBlocks;
    const std::uint8_t* part = panel + kFormat.header;
    const std::uint8_t* quants = panel + chunk_header_bytes(kFormat, n);
    for (int j = 0; j < n; ++j) {
      unpack_scales<kType>(panel, part, block);
      unpack_words<kFormat.bits>(quants, block.w);
      prefetch_ahead<kFormat.quants>(quants);
      visit(block);
      part += kFormat.header_per_block;
      quants += kFormat.quants;
    }
    panel = quants;
    blocks -= n;
  }
}

PIANOLA_INLINE void write_rows(float* y, __mmask16 rows, __m512 value, bool accumulate) {
  if (accumulate) value = _mm512_add_ps(_mm512_maskz_loadu_ps(rows, y), value);
  _mm512_mask_storeu_ps(y, rows, value);
}

}  // namespace
}  // namespace pianola::cpu
