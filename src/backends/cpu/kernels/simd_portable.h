// Vectors of 8 floats in plain C++, for machines without a tier of their own: simd_avx512.h says
// what each function promises. Half-precision conversions equal the hardware's bit for bit.
#pragma once

#include <bit>
#include <cstdint>

namespace pianola::cpu {
namespace {

struct Simd {
  static constexpr int kLanes = 8;
  static constexpr int kTileRows = 2;
  static constexpr int kTileVectors = 1;
  struct F {
    float v[kLanes];
  };

  static F zero() { return {}; }
  static F set(float x) {
    return map([&](int) { return x; });
  }
  static F load(const float* p) {
    return map([&](int l) { return p[l]; });
  }
  static void store(float* p, F x) { store_first(p, x, kLanes); }
  static F load_first(const float* p, int n) {
    return map([&](int l) { return l < n ? p[l] : 0.0F; });
  }
  static void store_first(float* p, F x, int n) {
    for (int l = 0; l < n; ++l) p[l] = x.v[l];
  }
  static F select_first(int n, F a, F b) {
    return map([&](int l) { return l < n ? a.v[l] : b.v[l]; });
  }

  static F load_f16(const std::uint16_t* p) {
    return map([&](int l) { return from_f16(p[l]); });
  }
  static void store_f16(std::uint16_t* p, F x) {
    for (int l = 0; l < kLanes; ++l) p[l] = to_f16(x.v[l]);
  }
  static F load_bf16(const std::uint16_t* p) {
    return map([&](int l) { return std::bit_cast<float>(std::uint32_t{p[l]} << 16); });
  }
  static void store_bf16(std::uint16_t* p, F x) {
    for (int l = 0; l < kLanes; ++l) {
      const auto bits = std::bit_cast<std::uint32_t>(x.v[l]);
      const std::uint32_t rounded =
          x.v[l] != x.v[l] ? bits | 0x400000U : bits + 0x7FFFU + ((bits >> 16) & 1U);
      p[l] = static_cast<std::uint16_t>(rounded >> 16);
    }
  }
  static F load_i8(const std::int8_t* p) {
    return map([&](int l) { return static_cast<float>(p[l]); });
  }
  static void store_i8(std::int8_t* p, F x) {
    // Adding and subtracting 1.5 * 2^23 rounds to the nearest integer.
    for (int l = 0; l < kLanes; ++l) {
      p[l] = static_cast<std::int8_t>((x.v[l] + 12582912.0F) - 12582912.0F);
    }
  }
  static F load_e4m3(const std::uint8_t* p) {
    return map([&](int l) {
      const std::uint32_t rest = p[l] & 0x7FU;
      const std::uint32_t half = (std::uint32_t{p[l] & 0x80U} << 8) | (rest << 7);
      return from_f16(static_cast<std::uint16_t>(rest == 0x7FU ? half | 0x7F80U : half)) * 256.0F;
    });
  }

  static F add(F a, F b) {
    return map([&](int l) { return a.v[l] + b.v[l]; });
  }
  static F sub(F a, F b) {
    return map([&](int l) { return a.v[l] - b.v[l]; });
  }
  static F mul(F a, F b) {
    return map([&](int l) { return a.v[l] * b.v[l]; });
  }
  static F div(F a, F b) {
    return map([&](int l) { return a.v[l] / b.v[l]; });
  }
  // Rounded twice: a fused one is a library call on the machines this is for.
  static F fma(F a, F b, F c) {
    return map([&](int l) { return a.v[l] * b.v[l] + c.v[l]; });
  }
  static F max(F a, F b) {
    return map([&](int l) { return a.v[l] > b.v[l] ? a.v[l] : b.v[l]; });
  }
  static F quiet_zero(F x) {
    return map([&](int l) { return x.v[l] != x.v[l] ? x.v[l] : 0.0F; });
  }

  static float reduce_add(F x) {
    for (int bit = kLanes / 2; bit > 0; bit /= 2) {
      x = map([&](int l) { return x.v[l] + x.v[l ^ bit]; });
    }
    return x.v[0];
  }
  static float reduce_max(F x) {
    float result = x.v[0];
    for (const float v : x.v) result = v > result ? v : result;
    return result;
  }

  template <int kBit>
  static F fold(F a, F b) {
    return map(
        [&](int l) { return (l & kBit) != 0 ? b.v[l] + b.v[l ^ kBit] : a.v[l] + a.v[l ^ kBit]; });
  }

  template <int kBit>
  static void exchange(F& a, F& b) {
    const F low = map([&](int l) { return (l & kBit) != 0 ? b.v[l ^ kBit] : a.v[l]; });
    b = map([&](int l) { return (l & kBit) != 0 ? b.v[l] : a.v[l ^ kBit]; });
    a = low;
  }

  static F exp(F x) {
    return map([&](int l) { return exp_one(x.v[l]); });
  }

  static F exp2_of_negative(F x) {
    return map([&](int l) { return exp2_one(x.v[l]); });
  }

 private:
  template <typename Function>
  static F map(Function function) {
    F result;
    for (int l = 0; l < kLanes; ++l) result.v[l] = function(l);
    return result;
  }

  static float exp_one(float x) {
    if (x < -87.33654F) return 0.0F;
    if (x > 88.72284F) return __builtin_huge_valf();
    if (x != x) return x;
    // Adding and subtracting 1.5 * 2^23 rounds to the nearest integer.
    const float n = (x * 1.44269504F + 12582912.0F) - 12582912.0F;
    float r = x - n * 0.693359375F;
    r = r + n * 2.12194440e-4F;
    float p = 0.0013814539F * r + 0.008368745F;
    p = p * r + 0.04166839F;
    p = p * r + 0.16666521F;
    p = p * r + 0.49999994F;
    p = (p * r) * r + (r + 1.0F);
    const int whole = static_cast<int>(n);
    const int half = whole / 2;
    return p * power_of_two(half) * power_of_two(whole - half);
  }
  static float exp2_one(float x) {
    if (x < -126.0F) return 0.0F;
    if (x != x) return x;
    const float n = (x + 12582912.0F) - 12582912.0F;
    const float r = x - n;
    float p = 0.00015353342F * r + 0.0013398901F;
    p = p * r + 0.009618438F;
    p = p * r + 0.055503324F;
    p = p * r + 0.24022648F;
    p = p * r + 0.6931472F;
    p = p * r + 1.0F;
    return p * power_of_two(static_cast<int>(n));
  }
  static float power_of_two(int n) {
    return std::bit_cast<float>(static_cast<std::uint32_t>(n + 127) << 23);
  }

  static float from_f16(std::uint16_t half) {
    const std::uint32_t sign = std::uint32_t{half & 0x8000U} << 16;
    const std::uint32_t rest = half & 0x7FFFU;
    if (rest >= 0x7C00U) {  // infinity, or NaN made quiet
      const std::uint32_t quiet = rest > 0x7C00U ? 0x400000U : 0U;
      return std::bit_cast<float>(sign | 0x7F800000U | ((rest & 0x3FFU) << 13) | quiet);
    }
    // Exponents differ by 112; the multiplication also normalises what is subnormal as a half.
    const float magnitude = std::bit_cast<float>(rest << 13) * 0x1p112F;
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude));
  }

  static std::uint16_t to_f16(float x) {
    const auto bits = std::bit_cast<std::uint32_t>(x);
    const std::uint32_t sign = (bits >> 16) & 0x8000U;
    const std::uint32_t rest = bits & 0x7FFFFFFFU;
    std::uint32_t half = 0;
    if (rest > 0x7F800000U) {
      half = 0x7E00U | ((rest >> 13) & 0x3FFU);
    } else if (rest >= 0x477FF000U) {  // rounds to 65,536 or more
      half = 0x7C00U;
    } else if (rest < 0x38800000U) {
      // Subnormal as a half: adding 0.5 leaves the value in units of 2^-24, rounded to even.
      const float shifted = std::bit_cast<float>(rest) + 0.5F;
      half = std::bit_cast<std::uint32_t>(shifted) - 0x3F000000U;
    } else {
      half = (rest - 0x38000000U + 0xFFFU + ((rest >> 13) & 1U)) >> 13;
    }
    return static_cast<std::uint16_t>(sign | half);
  }
};

}  // namespace
}  // namespace pianola::cpu
