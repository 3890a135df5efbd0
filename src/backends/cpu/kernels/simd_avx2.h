// Vectors of 8 floats in AVX2, FMA and F16C: simd_avx512.h says what each function promises, and
// why everything here has internal linkage. Only *_avx2.cc files include this.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace pianola::cpu {
namespace {

struct Simd {
  using F = __m256;
  static constexpr int kLanes = 8;
  static constexpr int kTileRows = 2;
  static constexpr int kTileVectors = 2;

  static F zero() { return _mm256_setzero_ps(); }
  static F set(float x) { return _mm256_set1_ps(x); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
  static __m256i first(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static F load_first(const float* p, int n) { return _mm256_maskload_ps(p, first(n)); }
  static void store_first(float* p, F x, int n) { _mm256_maskstore_ps(p, first(n), x); }
  static F select_first(int n, F a, F b) {
    return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(first(n)));
  }

  static F load_f16(const std::uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static void store_f16(std::uint16_t* p, F x) {
    const __m128i half = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), half);
  }
  static F load_bf16(const std::uint16_t* p) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  }
  static void store_bf16(std::uint16_t* p, F x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i wide = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
    const __m256i packed = _mm256_packus_epi32(wide, wide);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
  }
  static F load_i8(const std::int8_t* p) {
    return _mm256_cvtepi32_ps(
        _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
  static void store_i8(std::int8_t* p, F x) {
    const __m256i wide = _mm256_cvtps_epi32(x);
    const __m128i half =
        _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(half, half));
  }
  static F load_e4m3(const std::uint8_t* p) {
    const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const __m128i half = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(kE4m3Bits));
    const __m128i all = _mm_set1_epi16(0x3F80);
    const __m128i nan = _mm_cmpeq_epi16(_mm_and_si128(half, all), all);
    return mul(_mm256_cvtph_ps(_mm_or_si128(half, _mm_and_si128(nan, _mm_set1_epi16(0x7F80)))),
               set(256.0F));
  }

  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F quiet_zero(F x) { return _mm256_and_ps(x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q)); }

  static float reduce_add(F x) {
    x = add(x, _mm256_permute2f128_ps(x, x, 0x01));
    x = add(x, _mm256_permute_ps(x, 0x4E));
    x = add(x, _mm256_permute_ps(x, 0xB1));
    return _mm256_cvtss_f32(x);
  }
  static float reduce_max(F x) {
    x = max(x, _mm256_permute2f128_ps(x, x, 0x01));
    x = max(x, _mm256_permute_ps(x, 0x4E));
    x = max(x, _mm256_permute_ps(x, 0xB1));
    return _mm256_cvtss_f32(x);
  }

  template <int kBit>
  static F fold(F a, F b) {
    if constexpr (kBit == 4) {
      return add(_mm256_blend_ps(a, b, 0xF0), _mm256_permute2f128_ps(a, b, 0x21));
    } else if constexpr (kBit == 2) {
      const __m256d crossed = _mm256_shuffle_pd(_mm256_castps_pd(a), _mm256_castps_pd(b), 0b0101);
      return add(_mm256_blend_ps(a, b, 0xCC), _mm256_castpd_ps(crossed));
    } else {
      static_assert(kBit == 1);
      return add(_mm256_blend_ps(a, b, 0xAA), _mm256_permute_ps(_mm256_blend_ps(b, a, 0xAA), 0xB1));
    }
  }

  template <int kBit>
  static void exchange(F& a, F& b) {
    if constexpr (kBit == 4) {
      const F low = _mm256_permute2f128_ps(a, b, 0x20);
      b = _mm256_permute2f128_ps(a, b, 0x31);
      a = low;
    } else if constexpr (kBit == 2) {
      const __m256d x = _mm256_castps_pd(a);
      const __m256d y = _mm256_castps_pd(b);
      a = _mm256_castpd_ps(_mm256_unpacklo_pd(x, y));
      b = _mm256_castpd_ps(_mm256_unpackhi_pd(x, y));
    } else {
      static_assert(kBit == 1);
      const F low = _mm256_blend_ps(a, _mm256_moveldup_ps(b), 0xAA);
      b = _mm256_blend_ps(_mm256_movehdup_ps(a), b, 0xAA);
      a = low;
    }
  }

  static F exp(F x) {
    const F n =
        _mm256_round_ps(mul(x, set(1.44269504F)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    F r = fma(n, set(-0.693359375F), x);
    r = fma(n, set(2.12194440e-4F), r);
    F p = fma(set(0.0013814539F), r, set(0.008368745F));
    p = fma(p, r, set(0.04166839F));
    p = fma(p, r, set(0.16666521F));
    p = fma(p, r, set(0.49999994F));
    p = fma(mul(p, r), r, add(r, set(1.0F)));
    // Times 2^n in two halves: 2^128 is no float. What is out of range is replaced below.
    const __m256i whole = _mm256_cvtps_epi32(n);
    const __m256i half = _mm256_srai_epi32(whole, 1);
    const F scaled = mul(mul(p, power_of_two(half)), power_of_two(_mm256_sub_epi32(whole, half)));
    const F low = _mm256_cmp_ps(x, set(-87.33654F), _CMP_LT_OQ);
    const F high = _mm256_cmp_ps(x, set(88.72284F), _CMP_GT_OQ);
    const F result = _mm256_blendv_ps(scaled, set(__builtin_huge_valf()), high);
    return _mm256_andnot_ps(low, result);
  }

  static F exp2_of_negative(F x) {
    const F n = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const F r = sub(x, n);
    F p = fma(set(0.00015353342F), r, set(0.0013398901F));
    p = fma(p, r, set(0.009618438F));
    p = fma(p, r, set(0.055503324F));
    p = fma(p, r, set(0.24022648F));
    p = fma(p, r, set(0.6931472F));
    p = fma(p, r, set(1.0F));
    const F low = _mm256_cmp_ps(x, set(-126.0F), _CMP_LT_OQ);
    return _mm256_andnot_ps(low, mul(p, power_of_two(_mm256_cvtps_epi32(n))));
  }

 private:
  // Sign, exponent and mantissa of e4m3 in a half: bit 14 is the exponent's highest.
  static constexpr short kE4m3Bits = static_cast<short>(0xBF80);

  static F power_of_two(__m256i n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
  }
};

}  // namespace
}  // namespace pianola::cpu
