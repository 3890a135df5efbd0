// Vectors of 16 floats in AVX-512, the way attention_body.h and elementwise_body.h use them. Only
// *_avx512.cc files include this. Everything has internal linkage, so that no function compiled for
// this instruction set can stand in for one that runs elsewhere; for the same reason those bodies
// use no inline function of the standard library.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace pianola::cpu {
namespace {

struct Simd {
  using F = __m512;
  static constexpr int kLanes = 16;
  static constexpr int kTileRows = 4;  // of scores computed at once, see attention_body.h
  static constexpr int kTileVectors = 2;

  static __mmask16 first(int n) { return static_cast<__mmask16>((1U << n) - 1U); }

  static F zero() { return _mm512_setzero_ps(); }
  static F set(float x) { return _mm512_set1_ps(x); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  // The first n < kLanes elements; the rest is neither read nor written (and reads as zero).
  static F load_first(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
  static void store_first(float* p, F x, int n) { _mm512_mask_storeu_ps(p, first(n), x); }
  // Lane l: l < n ? a : b, for n in 0..kLanes.
  static F select_first(int n, F a, F b) { return _mm512_mask_mov_ps(b, first(n), a); }

  static F load_f16(const std::uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static void store_f16(std::uint16_t* p, F x) {
    const __m256i half = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), half);
  }
  static F load_bf16(const std::uint16_t* p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }
  static void store_bf16(std::uint16_t* p, F x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded =
        _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i result = _mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, quiet), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(result));
  }
  static F load_i8(const std::int8_t* p) {
    return _mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  // Rounds to the nearest integer; magnitudes are at most 127.
  static void store_i8(std::int8_t* p, F x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
  }
  // e4m3 as f16 is 2^8 too small, but for NaN, which is made one.
  static F load_e4m3(const std::uint8_t* p) {
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m256i half = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(kE4m3Bits));
    const __m256i all = _mm256_set1_epi16(0x3F80);
    const __m256i nan = _mm256_cmpeq_epi16(_mm256_and_si256(half, all), all);
    return mul(
        _mm512_cvtph_ps(_mm256_or_si256(half, _mm256_and_si256(nan, _mm256_set1_epi16(0x7F80)))),
        set(256.0F));
  }

  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  // Zero, or NaN where x is NaN.
  static F quiet_zero(F x) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x);
  }

  static float reduce_add(F x) {
    x = add(x, _mm512_shuffle_f32x4(x, x, 0x4E));
    x = add(x, _mm512_shuffle_f32x4(x, x, 0xB1));
    x = add(x, _mm512_permute_ps(x, 0x4E));
    x = add(x, _mm512_permute_ps(x, 0xB1));
    return _mm512_cvtss_f32(x);
  }
  static float reduce_max(F x) {
    x = max(x, _mm512_shuffle_f32x4(x, x, 0x4E));
    x = max(x, _mm512_shuffle_f32x4(x, x, 0xB1));
    x = max(x, _mm512_permute_ps(x, 0x4E));
    x = max(x, _mm512_permute_ps(x, 0xB1));
    return _mm512_cvtss_f32(x);
  }

  // Lane l: l & kBit ? b[l] + b[l ^ kBit] : a[l] + a[l ^ kBit]. Folding 16 vectors down by the bits
  // 8, 4, 2 and 1 leaves one vector with the sum of each.
  template <int kBit>
  static F fold(F a, F b) {
    return add(_mm512_mask_blend_ps(kMask<kBit>, a, b), crossed<kBit>(a, b));
  }

  // (a, b) becomes (a with b[l ^ kBit] in the lanes with kBit, b with a[l ^ kBit] in the others):
  // four rounds of this transpose 16 vectors.
  template <int kBit>
  static void exchange(F& a, F& b) {
    if constexpr (kBit == 8) {
      const F low = _mm512_shuffle_f32x4(a, b, 0x44);
      b = _mm512_shuffle_f32x4(a, b, 0xEE);
      a = low;
    } else if constexpr (kBit == 2) {
      const __m512d x = _mm512_castps_pd(a);
      const __m512d y = _mm512_castps_pd(b);
      a = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y));
      b = _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
    } else {
      const F low = _mm512_permutex2var_ps(a, low_lanes<kBit>(), b);
      b = _mm512_permutex2var_ps(a, high_lanes<kBit>(), b);
      a = low;
    }
  }

  // e^x within 2 units in the last place; zero below the least normal number, NaN stays NaN.
  static F exp(F x) {
    const F n = _mm512_roundscale_ps(mul(x, set(1.44269504F)),
                                     _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    F r = fma(n, set(-0.693359375F), x);
    r = fma(n, set(2.12194440e-4F), r);
    F p = fma(set(0.0013814539F), r, set(0.008368745F));
    p = fma(p, r, set(0.04166839F));
    p = fma(p, r, set(0.16666521F));
    p = fma(p, r, set(0.49999994F));
    p = fma(mul(p, r), r, add(r, set(1.0F)));
    // The comparison is also true for NaN; it keeps e^-inf from being one.
    const __mmask16 normal = _mm512_cmp_ps_mask(x, set(-87.33654F), _CMP_NLT_UQ);
    const F result = _mm512_maskz_scalef_ps(normal, p, n);
    const __mmask16 large = _mm512_cmp_ps_mask(x, set(88.72284F), _CMP_GT_OQ);
    return _mm512_mask_mov_ps(result, large, set(__builtin_huge_valf()));
  }

  // 2^x for x <= 0 within 2 units in the last place, and like exp() otherwise.
  static F exp2_of_negative(F x) {
    const F n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const F r = sub(x, n);
    F p = fma(set(0.00015353342F), r, set(0.0013398901F));
    p = fma(p, r, set(0.009618438F));
    p = fma(p, r, set(0.055503324F));
    p = fma(p, r, set(0.24022648F));
    p = fma(p, r, set(0.6931472F));
    p = fma(p, r, set(1.0F));
    const __mmask16 normal = _mm512_cmp_ps_mask(x, set(-126.0F), _CMP_NLT_UQ);
    return _mm512_maskz_scalef_ps(normal, p, n);
  }

 private:
  // Sign, exponent and mantissa of e4m3 in a half: bit 14 is the exponent's highest.
  static constexpr short kE4m3Bits = static_cast<short>(0xBF80);

  template <int kBit>
  static constexpr __mmask16 kMask = kBit == 8   ? 0xFF00
                                     : kBit == 4 ? 0xF0F0
                                     : kBit == 2 ? 0xCCCC
                                                 : 0xAAAA;

  // Lane l: l & kBit ? b[l ^ kBit] : a[l ^ kBit].
  template <int kBit>
  static F crossed(F a, F b) {
    if constexpr (kBit == 8) {
      return _mm512_shuffle_f32x4(a, b, 0x4E);
    } else if constexpr (kBit == 4) {
      const F t = _mm512_mask_blend_ps(kMask<kBit>, b, a);
      return _mm512_shuffle_f32x4(t, t, 0xB1);
    } else if constexpr (kBit == 2) {
      return _mm512_castpd_ps(_mm512_shuffle_pd(_mm512_castps_pd(a), _mm512_castps_pd(b), 0x55));
    } else {
      return _mm512_permute_ps(_mm512_mask_blend_ps(kMask<kBit>, b, a), 0xB1);
    }
  }

  template <int kBit>
  static __m512i low_lanes() {
    if constexpr (kBit == 4) {
      return _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
    } else {
      return _mm512_setr_epi32(0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
    }
  }
  template <int kBit>
  static __m512i high_lanes() {
    if constexpr (kBit == 4) {
      return _mm512_setr_epi32(4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    } else {
      return _mm512_setr_epi32(1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
    }
  }
};

}  // namespace
}  // namespace pianola::cpu
