#include "tensor/fp8.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <string>

namespace pianola {
namespace {

static_assert(e4m3_to_f32(0x38) == 1.0F && f32_to_e4m3(-2.0F) == 0xC0);

constexpr float kInf = std::numeric_limits<float>::infinity();

// The value by the definition of the format, without bit tricks.
double e4m3_value(unsigned bits) {
  const double sign = (bits & 0x80U) != 0 ? -1.0 : 1.0;
  const int exponent = static_cast<int>(bits >> 3 & 0xF);
  const double mantissa = bits & 7U;
  if (exponent == 0) return sign * std::ldexp(mantissa, -9);
  return sign * std::ldexp(8.0 + mantissa, exponent - 10);
}

TEST(Fp8, EveryValueWidensAndNarrowsBack) {
  for (unsigned bits = 0; bits < 256; ++bits) {
    const float value = e4m3_to_f32(static_cast<std::uint8_t>(bits));
    if ((bits & 0x7FU) == 0x7FU) {
      EXPECT_TRUE(std::isnan(value)) << bits;
    } else {
      EXPECT_EQ(static_cast<double>(value), e4m3_value(bits)) << bits;
      EXPECT_EQ(std::signbit(value), (bits & 0x80U) != 0);
    }
    EXPECT_EQ(f32_to_e4m3(value), bits);
  }
}

// Between two neighbours rounding changes at the midpoint only, so these three points test it all.
TEST(Fp8, NarrowingRoundsToNearestEvenBetweenAllNeighbours) {
  for (unsigned low = 0; low < 0x7E; ++low) {
    const auto middle = static_cast<float>((e4m3_value(low) + e4m3_value(low + 1)) / 2);  // exact
    const unsigned even = low % 2 == 0 ? low : low + 1;
    for (const unsigned sign : {0U, 0x80U}) {
      const float s = sign != 0 ? -1.0F : 1.0F;
      ASSERT_EQ(f32_to_e4m3(s * middle), sign | even) << low;
      ASSERT_EQ(f32_to_e4m3(s * std::nextafter(middle, 0.0F)), sign | low) << low;
      ASSERT_EQ(f32_to_e4m3(s * std::nextafter(middle, kInf)), sign | (low + 1)) << low;
    }
  }
}

TEST(Fp8, WhatIsTooLargeSaturatesAndNanStays) {
  for (const float large : {448.0F, 463.0F, 464.0F, 480.0F, 1e30F, kInf}) {
    EXPECT_EQ(f32_to_e4m3(large), 0x7E) << large;
    EXPECT_EQ(f32_to_e4m3(-large), 0xFE) << large;
  }
  EXPECT_EQ(f32_to_e4m3(std::numeric_limits<float>::quiet_NaN()) & 0x7F, 0x7F);
  EXPECT_EQ(f32_to_e4m3(std::bit_cast<float>(0xFFFFFFFFU)), 0xFF);
  EXPECT_EQ(f32_to_e4m3(std::bit_cast<float>(0x7F800001U)), 0x7F);  // signalling
}

// PyTorch's float8_e4m3fn; see tools/golden/fp8_golden.py for the file.
TEST(Fp8, EqualsPyTorch) {
  std::ifstream in(PIANOLA_SOURCE_DIR "/tests/unit/tensor/golden/fp8.bin", std::ios::binary);
  const std::string table{std::istreambuf_iterator<char>(in), {}};
  constexpr std::size_t kCodes = 256;
  constexpr std::size_t kRecord = 5;  // f32, code
  ASSERT_GT(table.size(), kCodes * 4 + 1000 * kRecord);
  const auto float_at = [&](std::size_t at) {
    float value = 0;
    std::memcpy(&value, table.data() + at, sizeof(value));
    return value;
  };
  for (std::size_t code = 0; code < kCodes; ++code) {
    const float value = e4m3_to_f32(static_cast<std::uint8_t>(code));
    const float want = float_at(4 * code);
    ASSERT_TRUE(value == want || (std::isnan(value) && std::isnan(want))) << code;
  }
  for (std::size_t at = kCodes * 4; at < table.size(); at += kRecord) {
    ASSERT_EQ(f32_to_e4m3(float_at(at)), static_cast<std::uint8_t>(table[at + 4])) << float_at(at);
  }
}

}  // namespace
}  // namespace pianola
