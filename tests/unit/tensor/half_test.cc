#include "tensor/half.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace pianola {
namespace {

static_assert(f16_to_f32(0x3C00) == 1.0F && f32_to_f16(-2.0F) == 0xC000);
static_assert(bf16_to_f32(0x3F80) == 1.0F && f32_to_bf16(-2.0F) == 0xC000);

// The value by the definition of the format, without bit tricks.
double f16_value(unsigned bits) {
  const double sign = (bits & 0x8000U) != 0 ? -1.0 : 1.0;
  const int exponent = static_cast<int>(bits >> 10 & 0x1F);
  const double mantissa = bits & 0x3FFU;
  if (exponent == 0) return sign * std::ldexp(mantissa, -24);
  return sign * std::ldexp(1024.0 + mantissa, exponent - 25);
}

bool f16_is_finite(unsigned bits) { return (bits & 0x7C00U) != 0x7C00U; }

TEST(Half, EveryF16WidensToItsValueAndBack) {
  for (unsigned bits = 0; bits < 0x10000; ++bits) {
    const float value = f16_to_f32(static_cast<std::uint16_t>(bits));
    if (f16_is_finite(bits)) {
      ASSERT_EQ(static_cast<double>(value), f16_value(bits)) << std::hex << bits;
      ASSERT_EQ(std::signbit(value), (bits & 0x8000U) != 0);
      ASSERT_EQ(f32_to_f16(value), bits);
    } else if ((bits & 0x3FFU) == 0) {
      ASSERT_TRUE(std::isinf(value));
      ASSERT_EQ(f32_to_f16(value), bits);
    } else {
      ASSERT_TRUE(std::isnan(value)) << std::hex << bits;
      ASSERT_TRUE(std::isnan(f16_to_f32(f32_to_f16(value))));
    }
  }
}

// Between two neighbours rounding changes at the midpoint only, so these three points test it all.
TEST(Half, NarrowingRoundsToNearestEvenBetweenAllNeighbours) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (unsigned low = 0; low < 0x7C00; ++low) {
    const double upper = low + 1 == 0x7C00 ? 65536.0 : f16_value(low + 1);
    const auto middle = static_cast<float>((f16_value(low) + upper) / 2);  // exact
    const unsigned even = low % 2 == 0 ? low : low + 1;
    for (const unsigned sign : {0U, 0x8000U}) {
      const float s = sign != 0 ? -1.0F : 1.0F;
      ASSERT_EQ(f32_to_f16(s * middle), sign | even) << low;
      ASSERT_EQ(f32_to_f16(s * std::nextafter(middle, 0.0F)), sign | low) << low;
      ASSERT_EQ(f32_to_f16(s * std::nextafter(middle, kInf)), sign | (low + 1)) << low;
    }
  }
  EXPECT_EQ(f32_to_f16(std::numeric_limits<float>::max()), 0x7C00);
  EXPECT_EQ(f32_to_f16(-std::numeric_limits<float>::denorm_min()), 0x8000);
}

TEST(Half, Bf16RoundsToNearestEvenBetweenAllNeighbours) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (unsigned low = 0; low < 0x7F80; ++low) {
    const float middle = std::bit_cast<float>(low << 16 | 0x8000U);
    const unsigned even = low % 2 == 0 ? low : low + 1;
    ASSERT_EQ(f32_to_bf16(bf16_to_f32(static_cast<std::uint16_t>(low))), low);
    ASSERT_EQ(f32_to_bf16(middle), even);
    ASSERT_EQ(f32_to_bf16(-middle), even | 0x8000U);
    ASSERT_EQ(f32_to_bf16(std::nextafter(middle, 0.0F)), low);
    ASSERT_EQ(f32_to_bf16(std::nextafter(middle, kInf)), low + 1);
  }
}

// A NaN whose payload is all in the bits that are cut off must not become infinity.
TEST(Half, NanStaysNan) {
  for (const std::uint32_t bits : {0x7F800001U, 0xFF800001U, 0x7FFFFFFFU, 0xFFFFFFFFU}) {
    const float nan = std::bit_cast<float>(bits);
    EXPECT_TRUE(std::isnan(f16_to_f32(f32_to_f16(nan))));
    EXPECT_TRUE(std::isnan(bf16_to_f32(f32_to_bf16(nan))));
  }
}

}  // namespace
}  // namespace pianola
