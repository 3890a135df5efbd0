// The small kernels, every instruction set this machine has, against double precision on fresh
// random inputs; what surrounds a buffer must neither be read nor written.
#include "backends/cpu/kernels/elementwise.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "backends/cpu/kernels/rope.h"

namespace pianola::cpu {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int kLengths[] = {1,  2,  7,  8,  9,   15,  16,  17,  31,
                            33, 63, 64, 65, 127, 255, 257, 576, 1000};

// n random floats, then NaN that nobody may read or overwrite.
class Guarded {
 public:
  Guarded(int n, unsigned seed, float scale = 1.0F)
      : n_(n), v_(static_cast<std::size_t>(n + 32), kNan) {
    std::mt19937 engine(seed);
    std::normal_distribution<float> normal(0.0F, scale);
    std::generate_n(v_.begin(), n, [&] { return normal(engine); });
  }
  ~Guarded() {
    for (std::size_t i = static_cast<std::size_t>(n_); i < v_.size(); ++i) {
      EXPECT_TRUE(std::isnan(v_[i])) << "written at " << i << " of " << n_;
    }
  }
  Guarded(const Guarded&) = default;
  Guarded& operator=(const Guarded&) = delete;
  float* data() { return v_.data(); }
  float& operator[](int i) { return v_[static_cast<std::size_t>(i)]; }
  double at(int i) const { return static_cast<double>(v_[static_cast<std::size_t>(i)]); }
  int size() const { return n_; }

 private:
  int n_;
  std::vector<float> v_;
};

// |got - want| in units of the last place of `want`.
double ulps(float got, double want) {
  const auto nearest = static_cast<float>(std::abs(want));
  const double unit =
      static_cast<double>(std::nextafter(nearest, kInf)) - static_cast<double>(nearest);
  return std::abs(static_cast<double>(got) - want) / unit;
}

class ElementwiseKernels : public testing::TestWithParam<Isa> {
 protected:
  const Elementwise& f_ = elementwise(GetParam());
};
// The tiers above AVX-512 share its kernels.
std::vector<Isa> distinct_isas() {
  std::vector<Isa> isas = supported_isas();
  std::erase_if(isas, [](Isa isa) { return isa > Isa::kAvx512; });
  return isas;
}
INSTANTIATE_TEST_SUITE_P(Isas, ElementwiseKernels, testing::ValuesIn(distinct_isas()),
                         [](const auto& isa) { return std::string(isa_name(isa.param)); });

TEST_P(ElementwiseKernels, RmsNorm) {
  for (const int n : kLengths) {
    Guarded x(n, static_cast<unsigned>(n), 3.0F);
    Guarded weight(n, 2);
    double sum = 0;
    for (int i = 0; i < n; ++i) sum += x.at(i) * x.at(i);
    const double scale = 1.0 / std::sqrt(sum / n + static_cast<double>(1e-5F));
    Guarded y(n, 3);
    f_.rms_norm(x.data(), weight.data(), 1e-5F, n, y.data());
    for (int i = 0; i < n; ++i) {
      const double want = x.at(i) * scale * weight.at(i);
      ASSERT_NEAR(y.at(i), want, std::abs(want) * 5e-7) << n << ' ' << i;
    }
    Guarded in_place = x;
    f_.rms_norm(in_place.data(), weight.data(), 1e-5F, n, in_place.data());
    for (int i = 0; i < n; ++i) ASSERT_EQ(in_place.at(i), y.at(i));
  }
}

TEST_P(ElementwiseKernels, RmsNormOfZerosAndNan) {
  std::vector<float> x(100);
  const std::vector<float> weight(100, 2.0F);
  std::vector<float> y(100);
  f_.rms_norm(x.data(), weight.data(), 1e-6F, 100, y.data());
  EXPECT_EQ(y, std::vector<float>(100));
  x[99] = kNan;
  f_.rms_norm(x.data(), weight.data(), 1e-6F, 100, y.data());
  for (const float v : y) EXPECT_TRUE(std::isnan(v));
}

TEST_P(ElementwiseKernels, AddScaledAndClampedGate) {
  for (const int n : kLengths) {
    Guarded x(n, static_cast<unsigned>(n), 6.0F);  // beyond the clamps on both sides
    Guarded y(n, 5, 6.0F);
    Guarded sum = y;
    f_.add_scaled(x.data(), 0.3F, n, sum.data());
    Guarded gated = x;
    f_.gate_clamped(gated.data(), y.data(), n, gated.data());
    for (int i = 0; i < n; ++i) {
      const double product = x.at(i) * static_cast<double>(0.3F);
      ASSERT_NEAR(sum.at(i), product + y.at(i), (std::abs(product) + std::abs(y.at(i))) * 2e-7);
      const double g = std::min(x.at(i), 7.0);
      const double u = std::clamp(y.at(i), -7.0, 7.0);
      const double want = g / (1.0 + std::exp(-1.702 * g)) * (u + 1.0);
      // u + 1 is rounded where u is near -1.
      ASSERT_NEAR(gated.at(i), want, std::abs(want) * 6e-7 + std::abs(g) * 6e-8);
    }
  }
  float g[] = {kNan, 1.0F, kInf, -kInf, 8.0F, 7.0F, 1000.0F, 2.0F};
  float u[] = {1.0F, kNan, 1.0F, 1.0F, kInf, 7.0F, -kInf, -1.0F};
  float y[8];
  f_.gate_clamped(g, u, 8, y);
  EXPECT_TRUE(std::isnan(y[0]) && std::isnan(y[1]));
  EXPECT_NEAR(y[2], 14.0, 1e-3);  // as if the gate were 7
  EXPECT_EQ(y[4], y[5]);
  EXPECT_NEAR(y[6], -42.0, 1e-3);
  EXPECT_EQ(y[7], 0.0F);
}

TEST_P(ElementwiseKernels, ReluGate) {
  for (const int n : kLengths) {
    Guarded x(n, static_cast<unsigned>(n), 4.0F);
    Guarded y(n, 5);
    Guarded gated = x;
    f_.gate_relu(gated.data(), y.data(), n, gated.data());
    for (int i = 0; i < n; ++i) {
      const double want = std::max<double>(x.at(i), 0.0) * y.at(i);
      ASSERT_NEAR(gated.at(i), want, std::abs(want) * 1e-7);
    }
  }
  float g[] = {kNan, -1.0F, kInf, -kInf, 0.0F};
  float u[] = {1.0F, kNan, 1.0F, 1.0F, 3.0F};
  float y[5];
  f_.gate_relu(g, u, 5, y);
  EXPECT_TRUE(std::isnan(y[0]) && std::isnan(y[1]));
  EXPECT_EQ(y[2], kInf);
  EXPECT_EQ(y[3], 0.0F);
  EXPECT_EQ(y[4], 0.0F);
}

TEST_P(ElementwiseKernels, AddAndGate) {
  for (const int n : kLengths) {
    Guarded x(n, static_cast<unsigned>(n), 4.0F);
    Guarded y(n, 5);
    Guarded sum = y;
    f_.add(x.data(), n, sum.data());
    Guarded gated = x;
    f_.gate(gated.data(), y.data(), n, gated.data());
    for (int i = 0; i < n; ++i) {
      ASSERT_EQ(sum[i], x[i] + y[i]);
      const double want = x.at(i) / (1.0 + std::exp(-x.at(i))) * y.at(i);
      ASSERT_NEAR(gated.at(i), want, std::abs(want) * 5e-7);
    }
  }
  float x[] = {-1000.0F, -100.0F, 100.0F, 1000.0F, kNan, 0.0F, -90.0F, 90.0F};
  float y[] = {1, 1, 1, 1, 1, 1, 1, 1};
  f_.gate(x, y, 8, y);
  EXPECT_EQ(y[0], 0.0F);
  EXPECT_NEAR(y[1], 0.0F, 1e-36);
  EXPECT_EQ(y[2], 100.0F);
  EXPECT_EQ(y[3], 1000.0F);
  EXPECT_TRUE(std::isnan(y[4]));
  EXPECT_EQ(y[5], 0.0F);
  EXPECT_NEAR(y[6], 0.0F, 1e-36);
  EXPECT_EQ(y[7], 90.0F);
}

TEST_P(ElementwiseKernels, GeluGateAndScale) {
  // Times gate and value: where e^-2u overflows, and below it numbers thin out.
  constexpr double kLeast = 100 * std::numeric_limits<float>::min();
  for (const int n : kLengths) {
    Guarded x(n, static_cast<unsigned>(n), 4.0F);
    Guarded y(n, 5);
    Guarded scaled = x;
    f_.scale(scaled.data(), 1.7F, n, scaled.data());
    Guarded gated = x;
    f_.gate_gelu(gated.data(), y.data(), n, gated.data());
    for (int i = 0; i < n; ++i) {
      ASSERT_EQ(scaled[i], x[i] * 1.7F);
      const double v = x.at(i);
      const double u = std::sqrt(2.0 / M_PI) * (v + 0.044715 * v * v * v);
      // By the identity with the logistic function: 1 + tanh loses its digits where u is large.
      const double want = v / (1.0 + std::exp(-2.0 * u)) * y.at(i);
      // Four roundings of the exponent, in single precision, are so many of the result.
      ASSERT_NEAR(gated.at(i), want, std::abs(want) * (5e-7 + 2.4e-7 * std::abs(2 * u)) + kLeast)
          << v;
    }
  }
  float x[] = {-1e20F, -100.0F, 100.0F, 1e20F, kNan, 0.0F, -9.0F, 9.0F};
  float y[] = {1, 1, 1, 1, 1, 1, 1, 1};
  f_.gate_gelu(x, y, 8, y);
  EXPECT_EQ(y[0], 0.0F);
  EXPECT_EQ(y[1], 0.0F);
  EXPECT_EQ(y[2], 100.0F);
  EXPECT_EQ(y[3], 1e20F);
  EXPECT_TRUE(std::isnan(y[4]));
  EXPECT_EQ(y[5], 0.0F);
  EXPECT_NEAR(y[6], 0.0F, 1e-15);
  EXPECT_EQ(y[7], 9.0F);
}

TEST_P(ElementwiseKernels, ExpIsAccurateOverItsRange) {
  std::vector<float> x;
  for (float v = -87.3F; v < 88.7F; v += 0.00731F) x.push_back(v);
  for (int e = -30; e < 0; ++e) x.insert(x.end(), {std::ldexp(1.1F, e), -std::ldexp(1.7F, e)});
  std::vector<float> y(x.size());
  f_.exp(x.data(), 0.0F, 1.0F, static_cast<int>(x.size()), y.data());
  double worst = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    worst = std::max(worst, ulps(y[i], std::exp(static_cast<double>(x[i]))));
  }
  EXPECT_LT(worst, 2.0);  // what simd_*.h promise

  float special[] = {0.0F, -kInf, kInf, kNan, -88.0F, -1e30F, 89.0F, 1e30F, 88.72283F};
  f_.exp(special, 0.0F, 1.0F, 9, special);
  EXPECT_EQ(special[0], 1.0F);
  EXPECT_EQ(special[1], 0.0F);
  EXPECT_EQ(special[2], kInf);
  EXPECT_TRUE(std::isnan(special[3]));
  EXPECT_EQ(special[4], 0.0F);  // below the least normal number
  EXPECT_EQ(special[5], 0.0F);
  EXPECT_EQ(special[6], kInf);
  EXPECT_EQ(special[7], kInf);
  EXPECT_NEAR(special[8] / std::numeric_limits<float>::max(), 1.0F, 1e-5F);
}

TEST_P(ElementwiseKernels, SoftmaxAndItsLogarithm) {
  for (const int n : {1, 3, 16, 17, 255, 256, 257, 1000, 49152}) {
    Guarded x(n, static_cast<unsigned>(n), 5.0F);
    double sum = 0;
    for (int i = 0; i < n; ++i) sum += std::exp(x.at(i));
    Guarded y(n, 1);
    softmax(f_, x.data(), n, y.data());
    for (int i = 0; i < n; i += 1 + n / 100) {
      ASSERT_NEAR(y.at(i), std::exp(x.at(i)) / sum, std::exp(x.at(i)) / sum * 2e-6);
      ASSERT_NEAR(log_softmax_at(f_, x.data(), n, i), x.at(i) - std::log(sum), 5e-7);
    }
  }
  // Large offsets cancel.
  const float far[] = {1000.0F, 1001.0F, -3000.0F};
  EXPECT_NEAR(log_softmax_at(f_, far, 3, 0), -1.3132617, 1e-6);
  float bad[] = {1.0F, kNan, 2.0F};
  EXPECT_TRUE(std::isnan(log_softmax_at(f_, bad, 3, 0)));
  bad[1] = kInf;
  EXPECT_TRUE(std::isnan(log_softmax_at(f_, bad, 3, 0)));
  bad[1] = -kInf;
  EXPECT_NEAR(log_softmax_at(f_, bad, 3, 0), -1.3132617, 1e-6);
}

TEST_P(ElementwiseKernels, MaxElementIsTheFirstOfTheLargest) {
  for (const int n : {1, 5, 16, 17, 511, 512, 513, 2000}) {
    Guarded x(n, static_cast<unsigned>(n));
    std::mt19937 engine(7);
    for (int round = 0; round < 20; ++round) {
      const int a = static_cast<int>(engine() % static_cast<unsigned>(n));
      const int b = static_cast<int>(engine() % static_cast<unsigned>(n));
      Guarded v = x;
      v[a] = 10.0F;
      v[b] = 10.0F;
      EXPECT_EQ(f_.max_element(v.data(), n).index, std::min(a, b));
      EXPECT_EQ(f_.max_element(v.data(), n).value, 10.0F);
      v[b] = kNan;
      EXPECT_EQ(f_.max_element(v.data(), n).index, b);
      EXPECT_TRUE(std::isnan(f_.max_element(v.data(), n).value));
      v[b] = kInf;
      EXPECT_EQ(f_.max_element(v.data(), n).index, b);
    }
  }
  const std::vector<float> lost(600, -kInf);
  EXPECT_EQ(f_.max_element(lost.data(), 600).index, 0);
  std::vector<float> one = lost;
  one[550] = -1e38F;
  EXPECT_EQ(f_.max_element(one.data(), 600).index, 550);
}

// The definition of a half, in double precision.
double half_value(int h) {
  const int exponent = (h >> 10) & 31;
  const int fraction = h & 1023;
  const double v =
      exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  return (h & 0x8000) != 0 ? -v : v;
}

TEST_P(ElementwiseKernels, EveryHalfConvertsExactlyAndBack) {
  std::vector<std::uint16_t> halves(65536);
  for (std::size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<std::uint16_t>(i);
  std::vector<float> wide(65536);
  std::vector<std::uint16_t> back(65536);
  f_.to_f32(DType::kF16, halves.data(), 65536, wide.data());
  f_.from_f32(DType::kF16, wide.data(), 65536, back.data());
  for (int h = 0; h < 65536; ++h) {
    const auto i = static_cast<std::size_t>(h);
    if ((h & 0x7FFF) > 0x7C00) {
      ASSERT_TRUE(std::isnan(wide[i]));
      ASSERT_EQ(back[i], h | 0x200);  // quiet, payload kept
    } else {
      ASSERT_EQ(static_cast<double>(wide[i]),
                (h & 0x7FFF) == 0x7C00 ? std::copysign(HUGE_VAL, half_value(h)) : half_value(h));
      ASSERT_EQ(std::signbit(wide[i]), (h & 0x8000) != 0);
      ASSERT_EQ(back[i], h);
    }
  }
  f_.to_f32(DType::kBF16, halves.data(), 65536, wide.data());
  f_.from_f32(DType::kBF16, wide.data(), 65536, back.data());
  for (std::size_t i = 0; i < 65536; ++i) {
    ASSERT_EQ(std::bit_cast<std::uint32_t>(wide[i]), i << 16);
    ASSERT_EQ(back[i], std::isnan(wide[i]) ? i | 0x40 : i);
  }
}

// Values between two halves go to the nearer one, ties to the even one.
TEST_P(ElementwiseKernels, RoundsToEven) {
  std::vector<float> x;
  std::vector<int> want;
  for (int h = 0; h < 0x7BFF; ++h) {
    const double low = half_value(h);
    const double high = half_value(h + 1);
    const double middle = (low + high) / 2;  // exact in single precision
    const auto m = static_cast<float>(middle);
    for (const float sign : {1.0F, -1.0F}) {
      x.insert(x.end(), {sign * m, sign * std::nextafter(m, 0.0F), sign * std::nextafter(m, kInf)});
      const int s = sign < 0 ? 0x8000 : 0;
      want.insert(want.end(), {s | (h + (h & 1)), s | h, s | (h + 1)});
    }
  }
  x.insert(x.end(), {65504.0F, 65519.99F, 65520.0F, 1e30F, kInf, 1e-30F, -1e-30F});
  want.insert(want.end(), {0x7BFF, 0x7BFF, 0x7C00, 0x7C00, 0x7C00, 0, 0x8000});
  const int n = static_cast<int>(x.size());
  std::vector<std::uint16_t> got(x.size());
  f_.from_f32(DType::kF16, x.data(), n, got.data());
  for (std::size_t i = 0; i < x.size(); ++i) ASSERT_EQ(got[i], want[i]) << x[i];

  const float b[] = {1.0F,  0x1.01p0F, 0x1.03p0F, 0x1.010002p0F, std::numeric_limits<float>::max(),
                     -kInf, 0x1p-140F};
  f_.from_f32(DType::kBF16, b, 7, got.data());
  const std::uint16_t want_b[] = {0x3F80, 0x3F80, 0x3F82, 0x3F81, 0x7F80, 0xFF80, 0};
  for (std::size_t i = 0; i < 6; ++i) EXPECT_EQ(got[i], want_b[i]) << b[i];
}

TEST_P(ElementwiseKernels, ConversionsTouchOnlyTheirElements) {
  for (const int n : kLengths) {
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      Guarded x(n, static_cast<unsigned>(n));
      std::vector<std::byte> narrow(row_bytes(dtype, static_cast<std::size_t>(n)) + 16,
                                    std::byte{0xA5});
      f_.from_f32(dtype, x.data(), n, narrow.data());
      for (std::size_t i = narrow.size() - 16; i < narrow.size(); ++i) {
        ASSERT_EQ(narrow[i], std::byte{0xA5});
      }
      Guarded y(n, 1);
      f_.to_f32(dtype, narrow.data(), n, y.data());
      for (int i = 0; i < n; ++i) ASSERT_NEAR(y.at(i), x.at(i), std::abs(x.at(i)) * 0x1p-8);
    }
  }
}

TEST_P(ElementwiseKernels, RopeTurnsPairs) {
  const std::vector<std::int32_t> positions = {0, 1, 77, 8191, -1, 1 << 24};
  for (const int head_dim : {16, 64, 80, 96, 128}) {
    for (const int half : {head_dim / 2, head_dim / 4}) {
      std::vector<float> inverse;
      for (int i = 0; i < half; ++i) {
        inverse.push_back(1.0F /
                          std::pow(10000.0F, static_cast<float>(i) / static_cast<float>(half)));
      }
      std::vector<float> table(positions.size() * 2 * static_cast<std::size_t>(half));
      rope_table(positions.data(), static_cast<int>(positions.size()), inverse.data(), half, 1.25F,
                 table.data());
      for (std::size_t t = 0; t < positions.size(); ++t) {
        const float* cosines = table.data() + t * 2 * static_cast<std::size_t>(half);
        const float* sines = cosines + half;
        if (positions[t] < 0) {
          for (int i = 0; i < 2 * half; ++i) ASSERT_EQ(cosines[i], 0.0F);
          continue;
        }
        constexpr int kHeads = 3;
        Guarded x(kHeads * head_dim, 9);
        Guarded halves = x;
        Guarded pairs = x;
        f_.rope_halves(cosines, sines, half, kHeads, head_dim, halves.data());
        f_.rope_pairs(cosines, sines, half, kHeads, head_dim, pairs.data());
        for (int h = 0; h < kHeads; ++h) {
          const int base = h * head_dim;
          for (int i = 0; i < half; ++i) {
            const float angle =
                static_cast<float>(positions[t]) * inverse[static_cast<std::size_t>(i)];
            const double c = 1.25 * std::cos(static_cast<double>(angle));
            const double s = 1.25 * std::sin(static_cast<double>(angle));
            const auto check = [&](const Guarded& y, int a, int b) {
              ASSERT_NEAR(y.at(a), x.at(a) * c - x.at(b) * s, 2e-6);
              ASSERT_NEAR(y.at(b), x.at(b) * c + x.at(a) * s, 2e-6);
            };
            check(halves, base + i, base + half + i);
            check(pairs, base + 2 * i, base + 2 * i + 1);
          }
          for (int i = 2 * half; i < head_dim; ++i) {  // beyond the rotary part
            ASSERT_EQ(halves.at(base + i), x.at(base + i));
            ASSERT_EQ(pairs.at(base + i), x.at(base + i));
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace pianola::cpu
