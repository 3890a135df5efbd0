// The 16-bit float types as bit patterns, converted one value at a time.
//
//   float x = f16_to_f32(0x3C00);            // 1.0f
//   std::uint16_t h = f32_to_f16(0.1f);      // rounds to nearest, ties to even
//
// Every f16 and bf16 value is exact in f32. Narrowing keeps infinities, turns what is too large
// into one (f16), keeps the sign of zero, and keeps a NaN a (quiet) NaN. These are the
// specification that vector kernels are tested against, and fast enough for loading.
#pragma once

#include <bit>
#include <cstdint>

namespace pianola {

constexpr float f16_to_f32(std::uint16_t h) {
  const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000U) << 16;
  const std::uint32_t exponent = (h >> 10) & 0x1FU;
  const std::uint32_t mantissa = h & 0x3FFU;
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24, exact in f32
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24F;
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude));
  }
  if (exponent == 0x1F) {
    const std::uint32_t quiet = mantissa != 0 ? 0x400000U : 0U;
    return std::bit_cast<float>(sign | 0x7F800000U | quiet | (mantissa << 13));
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

constexpr std::uint16_t f32_to_f16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) return static_cast<std::uint16_t>(sign | 0x7E00U);
  // 65520 is half way between the largest f16 and 2^16, and rounds up.
  if (magnitude >= 0x477FF000U) return static_cast<std::uint16_t>(sign | 0x7C00U);
  if (magnitude >= 0x38800000U) {  // at least 2^-14: normal in f16
    const std::uint32_t odd = (magnitude >> 13) & 1U;
    return static_cast<std::uint16_t>(sign | ((magnitude - (112U << 23) + 0x0FFFU + odd) >> 13));
  }
  // Subnormal: the significand in units of 2^-24. Below 2^-25 (and exactly there) it rounds to
  // zero.
  const std::uint32_t exponent = magnitude >> 23;
  if (exponent < 102) return static_cast<std::uint16_t>(sign);
  const std::uint32_t significand = (magnitude & 0x7FFFFFU) | 0x800000U;
  const std::uint32_t shift = 126 - exponent;  // 14 to 24
  const std::uint32_t rest = significand & ((1U << shift) - 1);
  const std::uint32_t half = 1U << (shift - 1);
  std::uint32_t result = significand >> shift;
  if (rest > half || (rest == half && (result & 1U) != 0)) ++result;
  return static_cast<std::uint16_t>(sign | result);
}

constexpr float bf16_to_f32(std::uint16_t b) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(b) << 16);
}

constexpr std::uint16_t f32_to_bf16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) return static_cast<std::uint16_t>((bits >> 16) | 0x40U);
  return static_cast<std::uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

}  // namespace pianola
