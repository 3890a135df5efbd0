// The 8-bit float type e4m3 as bit patterns, converted one value at a time: 4 bits of exponent, 3
// of mantissa, no infinity.
//
//   float x = e4m3_to_f32(0x38);           // 1.0f
//   std::uint8_t f = f32_to_e4m3(1000.0f); // 0x7E, which is 448: rounds to nearest, ties to even
//
// Every e4m3 value is exact in f32. Narrowing saturates: what is larger than 448, infinities too,
// becomes 448 with its sign. It keeps the sign of zero, and a NaN a NaN. Like half.h this is the
// specification that vector kernels are tested against.
#pragma once

#include <bit>
#include <cstdint>

namespace pianola {

constexpr float e4m3_to_f32(std::uint8_t f) {
  const std::uint32_t sign = static_cast<std::uint32_t>(f & 0x80U) << 24;
  const std::uint32_t exponent = (f >> 3) & 0xFU;
  const std::uint32_t mantissa = f & 0x7U;
  if ((f & 0x7FU) == 0x7FU) return std::bit_cast<float>(sign | 0x7FC00000U);
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-9
    const float magnitude = static_cast<float>(mantissa) * 0x1p-9F;
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude));
  }
  return std::bit_cast<float>(sign | ((exponent + 120) << 23) | (mantissa << 20));
}

constexpr std::uint8_t f32_to_e4m3(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 24) & 0x80U;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  std::uint32_t result = 0;
  if (magnitude > 0x7F800000U) {
    result = 0x7FU;
  } else if (magnitude >= 0x43E00000U) {  // 448
    result = 0x7EU;
  } else if (magnitude >= 0x3C800000U) {  // at least 2^-6: normal in e4m3
    const std::uint32_t odd = (magnitude >> 20) & 1U;
    result = (magnitude - (120U << 23) + 0x7FFFFU + odd) >> 20;
  } else {
    // Subnormal: the last bit of a float in 2^14..2^15 is 2^-9, and adding rounds to it.
    const float shifted = std::bit_cast<float>(magnitude) + 0x1p14F;
    result = std::bit_cast<std::uint32_t>(shifted) - 0x46800000U;
  }
  return static_cast<std::uint8_t>(sign | result);
}

}  // namespace pianola
