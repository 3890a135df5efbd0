// The matrix kernels on every instruction set of this machine against double precision, and their
// contract: one order of operations whatever the tokens, threads and neighbours.
#include <gtest/gtest.h>

#include <limits>
#include <tuple>

#include "ops/linear_fixture.h"

namespace pianola::cpu {
namespace {

constexpr DType kTypes[] = {DType::kF32,  DType::kF16,  DType::kBF16, DType::kQ4_0,
                            DType::kQ4_1, DType::kQ5_0, DType::kQ5_1, DType::kQ8_0,
                            DType::kQ4_K, DType::kQ5_K, DType::kQ6_K};

class LinearTest : public testing::TestWithParam<std::tuple<DType, Isa>> {
 protected:
  DType dtype() const { return std::get<0>(GetParam()); }
  Isa isa() const { return std::get<1>(GetParam()); }
  // The nearest number of columns that the type can have.
  int fit(int cols) const {
    const int block = static_cast<int>(dtype_info(dtype()).elements);
    return std::max(block, cols / block * block);
  }
};

// Where column `column` of row `row` lies in a matrix of `width` columns.
std::size_t at(int row, int width, int column) {
  return static_cast<std::size_t>(row) * static_cast<std::size_t>(width) +
         static_cast<std::size_t>(column);
}

void expect_same_bits(const float* a, const float* b, std::size_t n, const char* what) {
  for (std::size_t i = 0; i < n; ++i) {
    ASSERT_EQ(std::bit_cast<std::uint32_t>(a[i]), std::bit_cast<std::uint32_t>(b[i]))
        << what << " at " << i << ": " << a[i] << " and " << b[i];
  }
}

void check_against_double(TestWeight& weight, const std::vector<float>& x, int tokens, Isa isa,
                          const std::vector<float>& y) {
  const ActivationKind kind = activation_kind(weight.dtype, isa);
  for (int t = 0; t < tokens; ++t) {
    for (int n = 0; n < weight.rows; ++n) {
      const Expected e = expect_output(weight, kind, x.data() + t * weight.cols, n);
      const double found = y[at(t, weight.rows, n)];
      ASSERT_LE(std::fabs(found - e.value), e.bound)
          << "row " << n << " of " << weight.rows << ", token " << t << " of " << tokens
          << ", cols " << weight.cols << ": " << found << " for " << e.value;
    }
  }
}

TEST_P(LinearTest, AgreesWithDoubleInEveryShape) {
  unsigned seed = 1;
  for (const Scales scales : {Scales::kOrdinary, Scales::kHostile}) {
    for (const int wide : {32, 64, 224, 512, 576, 1536}) {
      for (const int rows : {1, 15, 16, 17, 48}) {
        const int cols = fit(wide);
        TestWeight weight = make_weight(dtype(), rows, cols, scales, ++seed);
        const std::vector<float> x = make_activations(19, cols, ++seed);
        check_against_double(weight, x, 19, isa(),
                             run_linear(weight, x.data(), cols, 19, {.isa = isa()}));
      }
    }
  }
}

TEST_P(LinearTest, OddColumnsOfFloats) {
  if (is_quantized(dtype())) return;  // they have whole blocks
  for (const int cols : {1, 2, 3, 7, 9, 33, 127}) {
    TestWeight weight = make_weight(dtype(), 19, cols, Scales::kOrdinary, 7);
    const std::vector<float> x = make_activations(18, cols, 8);
    check_against_double(weight, x, 18, isa(),
                         run_linear(weight, x.data(), cols, 18, {.isa = isa()}));
  }
}

TEST_P(LinearTest, TokensAndThreadsChangeNoBit) {
  constexpr int kMost = 70;
  for (const auto& [rows, wide] : {std::pair{576, 576}, std::pair{50, 1536}, std::pair{33, 96}}) {
    const int cols = fit(wide);
    TestWeight weight = make_weight(dtype(), rows, cols, Scales::kOrdinary, 3);
    const std::vector<float> x = make_activations(kMost, cols, 4);
    const std::size_t row_count = static_cast<std::size_t>(rows);
    std::vector<float> alone;  // each token by itself
    for (int t = 0; t < kMost; ++t) {
      const std::vector<float> one =
          run_linear(weight, x.data() + t * cols, cols, 1, {.isa = isa()});
      alone.insert(alone.end(), one.begin(), one.end());
    }
    check_against_double(weight, x, 2, isa(), alone);
    for (const int tokens :
         {2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 31, 32, 33, 70}) {
      const int from = kMost - tokens;
      for (const int workers : {1, 3}) {
        const std::vector<float> y = run_linear(weight, x.data() + from * cols, cols, tokens,
                                                {.isa = isa(), .workers = workers});
        expect_same_bits(y.data(), alone.data() + static_cast<std::size_t>(from) * row_count,
                         y.size(), "a batch");
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(LinearTest, AccumulatesWithOneRounding) {
  const int cols = fit(576);
  for (const int tokens : {1, 5, 20}) {
    TestWeight weight = make_weight(dtype(), 37, cols, Scales::kOrdinary, 5);
    const std::vector<float> x = make_activations(tokens, cols, 6);
    const std::vector<float> product = run_linear(weight, x.data(), cols, tokens, {.isa = isa()});
    std::vector<float> before(product.size());
    for (std::size_t i = 0; i < before.size(); ++i)
      before[i] = 0.25F * static_cast<float>(i) - 9.0F;
    std::vector<float> expected(product.size());
    for (std::size_t i = 0; i < before.size(); ++i) expected[i] = before[i] + product[i];
    const std::vector<float> found = run_linear(
        weight, x.data(), cols, tokens, {.isa = isa(), .write = LinearWrite::kAccumulate}, before);
    expect_same_bits(found.data(), expected.data(), found.size(), "an accumulated result");
  }
}

TEST_P(LinearTest, WritesOnlyItsRows) {
  const int cols = fit(64);
  TestWeight weight = make_weight(dtype(), 37, cols, Scales::kOrdinary, 5);
  for (const int tokens : {1, 3, 18}) {
    const std::vector<float> x = make_activations(tokens, cols + 5, 6);
    const ActivationKind kind = activation_kind(dtype(), isa());
    AlignedBytes prepared(activation_bytes(kind, tokens, cols));
    AlignedBytes scratch(linear_scratch_bytes(dtype(), isa(), tokens, cols));
    prepare_activations(kind, isa(), x.data(), cols + 5, tokens, cols, prepared.data(), 0, tokens);
    constexpr int kWide = 41;
    std::vector<float> y(static_cast<std::size_t>(tokens * kWide), -7.0F);
    linear(weight.view(), prepared.data(), tokens, 16, 37, y.data(), kWide, scratch.data(), isa());
    for (int t = 0; t < tokens; ++t) {
      for (int n = 0; n < kWide; ++n) {
        const float value = y[at(t, kWide, n)];
        EXPECT_EQ(value == -7.0F, n < 16 || n >= 37) << "token " << t << " row " << n;
      }
    }
  }
}

TEST_P(LinearTest, NotANumberStaysInItsToken) {
  const int cols = fit(288);
  TestWeight weight = make_weight(dtype(), 20, cols, Scales::kOrdinary, 5);
  for (const int tokens : {1, 4, 16, 21}) {
    for (const float bad :
         {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
          -std::numeric_limits<float>::infinity()}) {
      std::vector<float> x = make_activations(tokens, cols, 6);
      const std::vector<float> clean = run_linear(weight, x.data(), cols, tokens, {.isa = isa()});
      const int victim = tokens / 2;
      x[static_cast<std::size_t>(victim * cols + cols - 3)] = bad;
      const std::vector<float> y = run_linear(weight, x.data(), cols, tokens, {.isa = isa()});
      for (int t = 0; t < tokens; ++t) {
        for (int n = 0; n < 20; ++n) {
          const std::size_t i = at(t, 20, n);
          if (t == victim) {
            EXPECT_FALSE(std::isfinite(y[i])) << t << " " << n;
          } else {
            EXPECT_EQ(std::bit_cast<std::uint32_t>(y[i]), std::bit_cast<std::uint32_t>(clean[i]));
          }
        }
      }
    }
  }
}

TEST_P(LinearTest, ZerosGiveZero) {
  const int cols = fit(96);
  TestWeight weight = make_weight(dtype(), 17, cols, Scales::kHostile, 5);
  for (const int tokens : {1, 17}) {
    const std::vector<float> x(static_cast<std::size_t>(tokens * cols), 0.0F);
    for (const float y : run_linear(weight, x.data(), cols, tokens, {.isa = isa()})) {
      EXPECT_EQ(y, 0.0F);
    }
  }
}

// AVX2 and the AVX-512 tiers do the same operations in the same order; only the bfloat16 dot
// product differs.
TEST_P(LinearTest, VectorTiersAgreeBitForBit) {
  if (isa() <= Isa::kAvx2 || activation_kind(dtype(), isa()) == ActivationKind::kBf16) return;
  const int cols = fit(576);
  TestWeight weight = make_weight(dtype(), 50, cols, Scales::kHostile, 5);
  const std::vector<float> x = make_activations(35, cols, 6);
  const std::vector<float> ours = run_linear(weight, x.data(), cols, 35, {.isa = isa()});
  const std::vector<float> theirs = run_linear(weight, x.data(), cols, 35, {.isa = Isa::kAvx2});
  expect_same_bits(ours.data(), theirs.data(), ours.size(), "a tier");
}

std::string case_name(const testing::TestParamInfo<std::tuple<DType, Isa>>& info) {
  return std::string(dtype_name(std::get<0>(info.param))) + "_" + isa_name(std::get<1>(info.param));
}

INSTANTIATE_TEST_SUITE_P(Types, LinearTest,
                         testing::Combine(testing::ValuesIn(kTypes),
                                          testing::ValuesIn(supported_isas())),
                         case_name);

TEST(PreparedActivations, AreTheSameBytesOnEveryInstructionSet) {
  for (const int tokens : {1, 3, 16, 21}) {
    std::vector<float> x = make_activations(tokens, 576, 9);
    x[40] = std::numeric_limits<float>::quiet_NaN();
    x[70] = std::numeric_limits<float>::infinity();
    const std::size_t bytes = activation_bytes(ActivationKind::kInt8, tokens, 576);
    AlignedBytes first(bytes);
    prepare_activations(ActivationKind::kInt8, Isa::kPortable, x.data(), 576, tokens, 576,
                        first.data(), 0, tokens);
    for (const Isa isa : supported_isas()) {
      AlignedBytes other(bytes);
      prepare_activations(ActivationKind::kInt8, isa, x.data(), 576, tokens, 576, other.data(), 0,
                          tokens);
      EXPECT_EQ(std::memcmp(first.data(), other.data(), bytes), 0) << isa_name(isa);
      EXPECT_TRUE(other.intact());
    }
  }
}

TEST(PackedWeights, StayNearTheSizeOfTheFile) {
  for (const DType dtype : kTypes) {
    const double packed = static_cast<double>(packed_bytes(dtype, 1024, 1536));
    const double file = static_cast<double>(1024 * row_bytes(dtype, 1536));
    EXPECT_LE(packed, 1.03 * file) << dtype_name(dtype);
  }
}

TEST(PackedWeights, RowRangesPackAlike) {
  for (const DType dtype : kTypes) {
    TestWeight w = make_weight(dtype, 50, 512, Scales::kOrdinary, 2);
    AlignedBytes again(w.packed.size());
    pack_rows(dtype, w.file.data(), 50, 512, again.data(), 32, 50);
    pack_rows(dtype, w.file.data(), 50, 512, again.data(), 0, 32);
    EXPECT_EQ(std::memcmp(again.data(), w.packed.data(), again.size()), 0) << dtype_name(dtype);
    EXPECT_TRUE(again.intact());
  }
}

TEST(PackedWeights, RowsUnpackToTheFilesValues) {
  for (const DType dtype : kTypes) {
    const bool has_min = dtype == DType::kQ4_1 || dtype == DType::kQ5_1 || dtype == DType::kQ4_K ||
                         dtype == DType::kQ5_K;
    ASSERT_EQ(unpack_supported(dtype), !has_min) << dtype_name(dtype);
    if (has_min) continue;
    // Whole chunks and a last one that is not, whole panels and a last one that is not.
    const int most = dtype == DType::kQ6_K ? 512 : 32 * 11;
    for (const Scales scales : {Scales::kOrdinary, Scales::kHostile}) {
      for (const int cols : {most, is_quantized(dtype) ? most : 37}) {
        TestWeight w = make_weight(dtype, 37, cols, scales, 3);
        const auto width = static_cast<std::size_t>(cols);
        for (int row = 0; row < 37; ++row) {
          std::vector<float> out(width + 1, NAN);
          unpack_row(dtype, w.packed.data(), cols, row, out.data());
          EXPECT_EQ(std::memcmp(out.data(), w.values.data() + static_cast<std::size_t>(row) * width,
                                width * sizeof(float)),
                    0)
              << dtype_name(dtype) << " row " << row << " of " << cols << " columns";
          EXPECT_TRUE(std::isnan(out.back()));
        }
      }
    }
  }
}

TEST(PackedWeights, SaysWhatItTakes) {
  EXPECT_TRUE(linear_supported(DType::kQ4_1, 1, 32));
  EXPECT_TRUE(linear_supported(DType::kF32, 3, 5));
  EXPECT_FALSE(linear_supported(DType::kQ4_1, 1, 33));
  EXPECT_FALSE(linear_supported(DType::kQ4_K, 16, 128));
  EXPECT_FALSE(linear_supported(DType::kI32, 16, 128));
  EXPECT_FALSE(linear_supported(DType::kF32, 0, 5));
}

TEST(WorkerRows, AreWholePanelsThatCoverEveryRow) {
  for (const int rows : {1, 15, 16, 17, 100, 576, 49152}) {
    for (int workers = 1; workers < 9; ++workers) {
      int next = 0;
      for (int i = 0; i < workers; ++i) {
        const RowRange range = worker_rows(rows, i, workers);
        EXPECT_EQ(range.begin, next);
        EXPECT_TRUE(range.begin % kPanelRows == 0 || range.begin == rows);
        next = range.end;
      }
      EXPECT_EQ(next, rows);
    }
  }
}

}  // namespace
}  // namespace pianola::cpu
