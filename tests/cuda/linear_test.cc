// The products of the decode class against sums in double, for every form of weights; and the
// promise that a token's result does not depend on how many others a launch holds.
#include "backends/cuda/kernels/linear.h"

#include <cmath>
#include <random>

#include "backends/reference/ops.h"
#include "cuda/matrix_fixture.h"

namespace pianola::cuda {
namespace {

constexpr DType kForms[] = {DType::kF32,  DType::kF16,  DType::kBF16, DType::kQ4_0,
                            DType::kQ4_1, DType::kQ5_0, DType::kQ5_1, DType::kQ8_0,
                            DType::kQ4_K, DType::kQ5_K, DType::kQ6_K};

struct Case {
  DType dtype;
  int rows;
  int cols;
};

// One product with everything on: norm, bias, residual.
class Product {
 public:
  Product(const Case& c, int capacity, unsigned seed)
      : case_(c),
        capacity_(capacity),
        weight_(make_matrix(c.dtype, c.rows, c.cols, seed)),
        x_(random_floats(size(capacity, c.cols), seed + 1, 2.0F)),
        norm_(random_floats(static_cast<std::size_t>(c.cols), seed + 2)),
        bias_(random_floats(static_cast<std::size_t>(c.rows), seed + 3)),
        residual_(random_floats(size(capacity, c.rows), seed + 4)),
        x_device_(x_),
        norm_device_(norm_),
        bias_device_(bias_) {}

  int sms = multiprocessors();  // that launches are sized for

  // Tokens [first, first + live) of a launch whose bucket holds `bucket`.
  std::vector<float> run(int first, int live, int bucket, bool with_norm, bool dependent = false) {
    const std::vector<std::int32_t> count = {live};
    const DeviceArray<std::int32_t> count_device(count);
    DeviceArray<float> out(size(bucket, case_.rows));
    DeviceArray<float> residual(size(bucket, case_.rows));
    residual.write(std::span(residual_).subspan(size(first, case_.rows), size(live, case_.rows)));
    LinearArgs args;
    args.part[0] = {weight_.view, bias_device_.data(), out.data(), case_.rows};
    args.in = x_device_.data() + size(first, case_.cols);
    args.in_ld = case_.cols;
    args.norm = with_norm ? norm_device_.data() : nullptr;
    args.eps = 1e-5F;
    args.residual = residual.data();
    args.count = count_device.data();
    args.tokens = bucket;
    DeviceArray<std::byte> scratch(linear_scratch_bytes(bucket, case_.cols));
    args.scratch = scratch.data();
    Launch launch = test_launch(dependent);
    launch.sms = sms;
    linear(args, launch);
    std::vector<float> y = out.read();
    EXPECT_TRUE(out.intact());
    for (std::size_t i = size(live, case_.rows); i < y.size(); ++i) {
      EXPECT_TRUE(std::isnan(y[i])) << "padding was written";
      if (!std::isnan(y[i])) break;
    }
    y.resize(size(live, case_.rows));
    return y;
  }

  // Largest error over the size of what was added up.
  double error(const std::vector<float>& y, int first, bool with_norm) const {
    double worst = 0;
    const int tokens = static_cast<int>(y.size()) / case_.rows;
    for (int t = 0; t < tokens; ++t) {
      const float* x = x_.data() + size(first + t, case_.cols);
      double scale = 1;
      if (with_norm) {
        double squares = 0;
        for (int c = 0; c < case_.cols; ++c) squares += static_cast<double>(x[c]) * x[c];
        scale = 1 / std::sqrt(squares / case_.cols + 1e-5);
      }
      for (int r = 0; r < case_.rows; ++r) {
        const float* w = weight_.values.data() + size(r, case_.cols);
        double sum = 0;
        double magnitude = 0;
        for (int c = 0; c < case_.cols; ++c) {
          const double term = static_cast<double>(w[c]) * x[c] * scale *
                              (with_norm ? norm_[static_cast<std::size_t>(c)] : 1.0F);
          sum += term;
          magnitude += term * term;
        }
        sum += bias_[static_cast<std::size_t>(r)] +
               residual_[size(first + t, case_.rows) + static_cast<std::size_t>(r)];
        const double got = y[size(t, case_.rows) + static_cast<std::size_t>(r)];
        if (std::isnan(got)) return 1e9;
        worst = std::max(worst, std::fabs(got - sum) / (std::sqrt(magnitude) + 1));
      }
    }
    return worst;
  }

 private:
  static std::size_t size(int a, int b) {
    return static_cast<std::size_t>(a) * static_cast<std::size_t>(b);
  }

  Case case_;
  int capacity_;
  Matrix weight_;
  std::vector<float> x_, norm_, bias_, residual_;
  DeviceArray<float> x_device_, norm_device_, bias_device_;
};

// Activations keep 16 bits of mantissa, sums are f32.
constexpr double kTolerance = 5e-5;

class LinearForms : public ::testing::TestWithParam<DType> {};

TEST_P(LinearForms, AgreesWithSumsInDouble) {
  const DType dtype = GetParam();
  const bool super = is_quantized(dtype) && dtype_info(dtype).elements == 256;
  for (const auto& [rows, cols] : {std::pair{1, 256},
                                   {7, 512},
                                   {64, 256},
                                   {129, 768},
                                   {960, 1536},
                                   {520, 2048},
                                   {72, 8192},
                                   {1003, 2304}}) {
    Product product({dtype, rows, cols}, 64, 17U + static_cast<unsigned>(rows));
    for (const int tokens : {1, 2, 8, 9, 16, 31, 64}) {
      for (const bool norm : {false, true}) {
        EXPECT_LE(product.error(product.run(0, tokens, tokens, norm), 0, norm), kTolerance)
            << dtype_name(dtype) << " [" << rows << ", " << cols << "], " << tokens << " tokens";
      }
    }
  }
  if (super) return;
  for (const auto& [rows, cols] : {std::pair{8, 32}, {33, 96}, {576, 576}, {20, 1504}}) {
    Product product({dtype, rows, cols}, 8, 5U + static_cast<unsigned>(cols));
    for (const int tokens : {1, 3, 8}) {
      EXPECT_LE(product.error(product.run(0, tokens, tokens, true), 0, true), kTolerance)
          << dtype_name(dtype) << " [" << rows << ", " << cols << "], " << tokens << " tokens";
    }
  }
}

// Every kernel of a form: activations in shared memory or prepared, in groups of 8 to 64 tokens,
// weights streamed or not, and a block with one turn, some, or many.
TEST_P(LinearForms, SmallShapesAgreeWithSumsInDouble) {
  for (const auto& [rows, cols] : {std::pair{20, 256}, {20, 1024}, {160, 1024}, {36, 2816}}) {
    Product product({GetParam(), rows, cols}, 40, 23U + static_cast<unsigned>(rows));
    product.sms = 2;
    for (const int tokens : {1, 8, 9, 17, 40}) {
      const bool norm = tokens != 8;
      const int live = std::max(1, tokens - 1);
      EXPECT_LE(product.error(product.run(0, live, tokens, norm), 0, norm), kTolerance)
          << dtype_name(GetParam()) << " [" << rows << ", " << cols << "], " << tokens << " tokens";
    }
  }
}

TEST_P(LinearForms, ATokensBitsDoNotDependOnTheOthers) {
  const DType dtype = GetParam();
  for (const auto& [rows, cols] : {std::pair{136, 768}, {1000, 2048}, {64, 14336}}) {
    Product product({dtype, rows, cols}, 64, 99U + static_cast<unsigned>(cols));
    for (const bool norm : {false, true}) {
      const std::vector<float> all = product.run(0, 64, 64, norm);
      for (const int bucket : {1, 2, 4, 8, 16, 32}) {
        for (const int live : {bucket, std::max(1, bucket - 1)}) {
          const int first = 64 - bucket;
          const std::vector<float> some = product.run(first, live, bucket, norm, true);
          EXPECT_EQ(std::memcmp(some.data(), all.data() + static_cast<std::size_t>(first * rows),
                                some.size() * sizeof(float)),
                    0)
              << dtype_name(dtype) << " [" << rows << ", " << cols << "], " << live << " of bucket "
              << bucket;
        }
      }
    }
  }
}

// One token by a matrix that the thread blocks hold whole, for every shape of a block: columns,
// tiles, blocks with one less, and a tile with rows to spare.
TEST_P(LinearForms, SmallMatrixHeldWholeGivesTheSameBits) {
  for (const int cols : {1024, 2048, 3072, 4096}) {
    for (const int tiles : {1, 2, 3, 4, 5, 6, 7}) {
      const int rows = 8 * (2 * tiles - (tiles > 1 ? 1 : 0)) - 3;
      Product product({GetParam(), rows, cols}, 5, 7U + static_cast<unsigned>(rows + cols));
      product.sms = 2;
      for (const bool norm : {false, true}) {
        const std::vector<float> all = product.run(0, 5, 5, norm);
        EXPECT_LE(product.error(all, 0, norm), kTolerance);
        const std::vector<float> one = product.run(4, 1, 1, norm, true);
        EXPECT_EQ(std::memcmp(one.data(), all.data() + std::ptrdiff_t{4} * rows,
                              one.size() * sizeof(float)),
                  0)
            << dtype_name(GetParam()) << " [" << rows << ", " << cols << "]";
      }
    }
  }
}

// More rows than the thread blocks of a launch hold sums of at a time, also where some of them have
// nothing left to do in the last turn.
TEST(Linear, TurnsAfterTurnsGiveTheSameBits) {
  for (const int rows : {25'000, 4096 + 8}) {
    Product product({DType::kBF16, rows, 1024}, 64, 41U + static_cast<unsigned>(rows));
    const std::vector<float> all = product.run(0, 64, 64, true);
    std::vector<float> first(all.begin(), all.begin() + rows);
    EXPECT_LE(product.error(first, 0, true), kTolerance);
    for (const int bucket : {1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 48}) {
      const int from = 64 - bucket;
      for (int again = 0; again < 3; ++again) {
        const std::vector<float> some = product.run(from, bucket, bucket, true, true);
        ASSERT_EQ(std::memcmp(some.data(), all.data() + static_cast<std::size_t>(from) * rows,
                              some.size() * sizeof(float)),
                  0)
            << rows << " rows, bucket of " << bucket;
      }
    }
  }
}

TEST(Linear, SmallShapeOfSeveralTurns) {
  Product product({DType::kBF16, 4104, 1024}, 40, 77);
  for (const int tokens : {3, 40}) {
    EXPECT_LE(product.error(product.run(0, tokens, tokens, true), 0, true), kTolerance) << tokens;
  }
}

INSTANTIATE_TEST_SUITE_P(Forms, LinearForms, ::testing::ValuesIn(kForms),
                         [](const auto& form) { return std::string(dtype_name(form.param)); });

TEST(Linear, SmallStepWithNothingLiveWritesNothing) {
  Product product({DType::kBF16, 100, 256}, 8, 3);
  EXPECT_TRUE(product.run(0, 0, 4, true).empty());
}

void expect_parts(int tokens, bool gathers) {
  constexpr int kCols = 1024;
  const int rows[3] = {200, 40, 48};
  std::vector<Matrix> matrices;
  std::vector<DeviceArray<float>> outs;
  LinearArgs args;
  for (int i = 0; i < 3; ++i) {
    matrices.push_back(make_matrix(DType::kBF16, rows[i], kCols, 40U + static_cast<unsigned>(i)));
    outs.emplace_back(static_cast<std::size_t>(rows[i] * tokens));
    args.part[i] = {matrices.back().view, nullptr, outs.back().data(), rows[i]};
  }
  const std::vector<float> x = random_floats(16 * kCols, 7);
  const DeviceArray<float> x_device(x);
  const std::vector<std::int32_t> gather = {3, 15, 0, 7, 3};
  const DeviceArray<std::int32_t> gather_device(gather);
  const DeviceArray<std::int32_t> count(std::vector<std::int32_t>{tokens});
  args.parts = 3;
  args.in = x_device.data();
  args.in_ld = kCols;
  args.count = count.data();
  args.gather = gathers ? gather_device.data() : nullptr;
  args.tokens = tokens;
  args.in_rows = 16;
  const DeviceArray<std::byte> scratch(linear_scratch_bytes(tokens, kCols));
  args.scratch = scratch.data();
  linear(args, test_launch());
  for (std::size_t i = 0; i < 3; ++i) {
    const std::vector<float> y = outs[i].read();
    for (int t = 0; t < tokens; ++t) {
      const int row = gathers ? gather[static_cast<std::size_t>(t)] : t;
      for (int r = 0; r < rows[i]; ++r) {
        double sum = 0;
        for (int c = 0; c < kCols; ++c) {
          sum += static_cast<double>(matrices[i].values[static_cast<std::size_t>(r * kCols + c)]) *
                 x[static_cast<std::size_t>(row * kCols + c)];
        }
        ASSERT_NEAR(y[static_cast<std::size_t>(t * rows[i] + r)], sum, 2e-4)
            << i << " " << t << " " << r;
      }
    }
  }
}

TEST(Linear, SmallPartsShareALaunchAndGather) {
  expect_parts(5, true);
  expect_parts(1, true);
  expect_parts(1, false);
}

void expect_gated(DType dtype, int tokens, int rows, int cols,
                  Activation activation = Activation::kSilu) {
  const Matrix gate = make_matrix(dtype, rows, cols, 1);
  const Matrix up = make_matrix(dtype, rows, cols, 2);
  // Beyond the limits of the clamped one as well.
  const float size = activation == Activation::kClampedSwish ? 4.0F : 1.0F;
  const std::vector<float> x = random_floats(static_cast<std::size_t>(64 * cols), 3, size);
  const DeviceArray<float> x_device(x);
  const DeviceArray<std::int32_t> count(std::vector<std::int32_t>{tokens});
  DeviceArray<float> out(static_cast<std::size_t>(64 * rows));
  LinearArgs args;
  args.parts = 2;
  args.end = LinearEnd::kGated;
  args.activation = activation;
  args.part[0] = {gate.view, nullptr, out.data(), rows};
  args.part[1] = {up.view, nullptr, nullptr, rows};
  args.in = x_device.data();
  args.in_ld = cols;
  args.count = count.data();
  args.tokens = tokens;
  const DeviceArray<std::byte> scratch(linear_scratch_bytes(tokens, cols));
  args.scratch = scratch.data();
  linear(args, test_launch());
  const std::vector<float> y = out.read();
  for (int t = 0; t < tokens; ++t) {
    for (int r = 0; r < rows; ++r) {
      double g = 0;
      double u = 0;
      double g_size = 1;
      double u_size = 1;
      for (int c = 0; c < cols; ++c) {
        const double v = x[static_cast<std::size_t>(t * cols + c)];
        const double g_term = gate.values[static_cast<std::size_t>(r * cols + c)] * v;
        const double u_term = up.values[static_cast<std::size_t>(r * cols + c)] * v;
        g += g_term;
        u += u_term;
        g_size += g_term * g_term;
        u_size += u_term * u_term;
      }
      const double want =
          reference::gated(activation, static_cast<float>(g), static_cast<float>(u));
      // The slope of an activation is at most 1.2; its value is below the gate's.
      const double bar = kTolerance * (1.2 * std::sqrt(g_size) * (std::fabs(u) + 1) +
                                       (std::fabs(g) + 1) * std::sqrt(u_size) + 1);
      ASSERT_NEAR(y[static_cast<std::size_t>(t * rows + r)], want, bar)
          << dtype_name(dtype) << " " << t << " " << r;
    }
  }
}

constexpr Activation kActivations[] = {Activation::kSilu, Activation::kGeluTanh,
                                       Activation::kClampedSwish};

TEST(Linear, GatedIsTheActivationOfOneTimesTheOther) {
  for (const Activation activation : kActivations) {
    for (const DType dtype : {DType::kBF16, DType::kQ4_1, DType::kQ8_0}) {
      for (const int tokens : {1, 3, 20, 64}) expect_gated(dtype, tokens, 340, 576, activation);
    }
    for (const int tokens : {3, 20, 64}) {
      expect_gated(DType::kBF16, tokens, 340, 1024, activation);
    }
  }
  for (const int tokens : {2, 4, 7, 20}) expect_gated(DType::kBF16, tokens, 9000, 1024);  // turns
  // One token by what the thread blocks hold whole: one, two and three units each, and too many.
  for (const int rows : {340, 2104, 3068, 9000}) expect_gated(DType::kBF16, 1, rows, 1024);
  for (const int rows : {340, 1056}) expect_gated(DType::kBF16, 1, rows, 2048);
}

TEST(Linear, SmallGatedIsTheActivationOfOneTimesTheOther) {
  for (const DType dtype : {DType::kBF16, DType::kQ4_1, DType::kQ8_0}) {
    for (const int tokens : {3, 20}) expect_gated(dtype, tokens, 20, 96);
  }
  for (const Activation activation : kActivations) {
    expect_gated(DType::kQ8_0, 3, 20, 96, activation);
    expect_gated(DType::kBF16, 3, 20, 1024, activation);
  }
}

}  // namespace
}  // namespace pianola::cuda
