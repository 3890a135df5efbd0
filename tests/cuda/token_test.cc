// Embedding and norms against the host: rows of every form of table, masked tokens, padding.
#include "backends/cuda/kernels/token.h"

#include <cmath>
#include <random>

#include "backends/cuda/kernels/repack.h"
#include "backends/reference/ops.h"
#include "cuda/cuda_fixture.h"
#include "cuda/state_fixture.h"
#include "tensor/half.h"
#include "tensor/quant_format.h"

namespace pianola::cuda {
namespace {

std::vector<float> random_floats(std::size_t count, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& v : values) v = normal(random);
  return values;
}

struct Table {
  std::vector<float> values;  // [rows, cols] as the host decodes them
  DeviceArray<std::byte> memory;
  PackedWeight weight;
};

Table random_table(DType dtype, int rows, int cols, std::mt19937& random) {
  Table table;
  table.values =
      random_floats(static_cast<std::size_t>(rows) * static_cast<std::size_t>(cols), random);
  const std::size_t stride = row_bytes(dtype, static_cast<std::size_t>(cols));
  std::vector<std::byte> file(stride * static_cast<std::size_t>(rows));
  for (int r = 0; r < rows; ++r) {
    float* row = table.values.data() + std::ptrdiff_t{r} * cols;
    std::byte* bytes = file.data() + static_cast<std::size_t>(r) * stride;
    if (dtype == DType::kF32) {
      std::memcpy(bytes, row, stride);
    } else {
      quantize_row(dtype, row, bytes, static_cast<std::size_t>(cols));
      dequantize_row(dtype, bytes, row, static_cast<std::size_t>(cols));
    }
  }
  PackedWeight& w = table.weight;
  EXPECT_TRUE(packed_form(dtype, w.codes, w.scales));
  w.rows = rows;
  w.cols = cols;
  table.memory = DeviceArray<std::byte>(packed_bytes(w.codes, w.scales, rows, cols));
  w.data = table.memory.data();
  if (is_quantized(dtype)) {
    w.scale_data = w.data + scale_offset(w.codes, rows, cols);
    const DeviceArray<std::byte> source(file);
    repack(dtype, rows, cols, source.data(), table.memory.data(), test_launch());
    check(cudaDeviceSynchronize(), "repack");
  } else {
    table.memory.write(file);
  }
  return table;
}

void compare_embed(DType dtype, int cols, float scale = 1) {
  std::mt19937 random(1);
  constexpr int kVocab = 50;
  constexpr int kTokens = 9;  // of the bucket
  constexpr int kLive = 7;
  SCOPED_TRACE(std::string(dtype_name(dtype)) + " cols " + std::to_string(cols));
  const Table table = random_table(dtype, kVocab, cols, random);
  MirroredState state({.rows = 1, .max_seq_len = 16, .tokens = kTokens});
  state.host.counts->tokens = kLive;
  for (int t = 0; t < kTokens; ++t) {
    state.host.token[t] = static_cast<int>(random() % kVocab);
    state.host.position[t] = t == 3 ? -1 : t;
  }
  state.host.token[0] = 0;
  state.host.token[1] = kVocab - 1;
  state.host.token[3] = -1;  // a row that failed
  state.upload();
  const auto width = static_cast<std::size_t>(cols);
  DeviceArray<float> out(kTokens * width);
  embed({.table = table.weight,
         .scale = scale,
         .out = out.data(),
         .state = state.device,
         .tokens = kTokens},
        test_launch());
  const auto got = out.read();
  ASSERT_TRUE(out.intact());
  for (std::size_t t = 0; t < kTokens; ++t) {
    for (std::size_t c = 0; c < width; ++c) {
      const float value = got[t * width + c];
      if (t >= kLive) {
        ASSERT_TRUE(std::isnan(value)) << "padding token " << t << " col " << c;
      } else {
        const auto row = static_cast<std::size_t>(std::max(0, state.host.token[t]));
        const float want = t == 3 ? 0 : table.values[row * width + c] * scale;
        ASSERT_EQ(value, want) << "token " << t << " col " << c;
      }
    }
  }
}

TEST(Embed, RowsOfEveryForm) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const int cols : {1, 33, 64, 576, 2056, 4099}) compare_embed(dtype, cols);
  }
  for (const DType dtype : {DType::kQ4_0, DType::kQ4_1, DType::kQ5_0, DType::kQ5_1, DType::kQ8_0}) {
    for (const int cols : {32, 96, 160, 576, 2080}) compare_embed(dtype, cols);
  }
  for (const DType dtype : {DType::kQ4_K, DType::kQ5_K, DType::kQ6_K}) {
    for (const int cols : {256, 768, 2304}) compare_embed(dtype, cols);
  }
}

TEST(Embed, SmallRowsOfEveryForm) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const int cols : {33, 64}) compare_embed(dtype, cols);
  }
  for (const DType dtype : {DType::kQ4_0, DType::kQ4_1, DType::kQ5_0, DType::kQ5_1, DType::kQ8_0}) {
    compare_embed(dtype, 96);
  }
  for (const DType dtype : {DType::kQ4_K, DType::kQ5_K, DType::kQ6_K}) compare_embed(dtype, 256);
}

TEST(Embed, SmallScaled) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16, DType::kQ4_0, DType::kQ6_K}) {
    compare_embed(dtype, 256, 25.298221F);
  }
  compare_embed(DType::kF32, 33, 0.1F);
}

TEST(Embed, ManyTokens) {
  std::mt19937 random(2);
  constexpr int kVocab = 300;
  constexpr int kTokens = 8192;
  constexpr int kCols = 64;
  const Table table = random_table(DType::kBF16, kVocab, kCols, random);
  MirroredState state({.rows = 1, .max_seq_len = 16, .tokens = kTokens});
  state.host.counts->tokens = kTokens;
  for (int t = 0; t < kTokens; ++t) state.host.token[t] = static_cast<int>(random() % kVocab);
  state.upload();
  DeviceArray<float> out(std::size_t{kTokens} * kCols);
  embed({.table = table.weight, .out = out.data(), .state = state.device, .tokens = kTokens},
        test_launch());
  const auto got = out.read();
  for (std::size_t t = 0; t < kTokens; ++t) {
    for (std::size_t c = 0; c < kCols; ++c) {
      const auto row = static_cast<std::size_t>(state.host.token[t]);
      ASSERT_EQ(got[t * kCols + c], table.values[row * kCols + c]) << "token " << t;
    }
  }
}

struct NormCase {
  int width = 0;
  int tokens = 0;  // of the bucket
  int live = 0;
  bool gathers = false;
};

class Norms : public ::testing::Test {
 protected:
  static constexpr float kEps = 1e-5F;

  void compare_f32(const std::vector<NormCase>& cases);
  void compare_residual(const std::vector<NormCase>& cases);
  void compare_bf16(const std::vector<NormCase>& cases);
  void prepare(const NormCase& c) {
    case_ = c;
    const auto width = static_cast<std::size_t>(c.width);
    const std::size_t inputs = static_cast<std::size_t>(c.tokens) + 3;
    in_ = random_floats(inputs * width, random_);
    weight_ = random_floats(width, random_);
    gather_.assign(static_cast<std::size_t>(c.tokens), 0);
    for (auto& g : gather_) g = static_cast<std::int32_t>(random_() % inputs);
    if (!c.gathers) {  // rows that no live token has: never read
      std::fill(in_.begin() + std::ptrdiff_t{c.live} * c.width, in_.end(), NAN);
    }
    device_in_ = DeviceArray<float>(in_);
    device_weight_ = DeviceArray<float>(weight_);
    device_gather_ = DeviceArray<std::int32_t>(gather_);
    device_count_ = DeviceArray<std::int32_t>(std::vector<std::int32_t>{c.live});
  }
  NormArgs args() const {
    return {.in = device_in_.data(),
            .weight = device_weight_.data(),
            .eps = kEps,
            .width = case_.width,
            .count = device_count_.data(),
            .gather = case_.gathers ? device_gather_.data() : nullptr,
            .tokens = case_.tokens};
  }
  const float* input(int t) const {
    const int row = case_.gathers ? gather_[static_cast<std::size_t>(t)] : t;
    return in_.data() + std::ptrdiff_t{row} * case_.width;
  }
  std::vector<float> want(int t) const {
    std::vector<float> out(static_cast<std::size_t>(case_.width));
    reference::rms_norm({input(t), out.size()}, weight_.data(), kEps, out.data());
    return out;
  }

  std::mt19937 random_{3};
  NormCase case_;
  std::vector<float> in_, weight_;
  std::vector<std::int32_t> gather_;
  DeviceArray<float> device_in_, device_weight_;
  DeviceArray<std::int32_t> device_gather_, device_count_;
};

std::vector<NormCase> norm_cases(std::initializer_list<int> widths) {
  std::vector<NormCase> cases;
  for (const int width : widths) {
    cases.push_back({width, 1, 1, false});
    cases.push_back({width, 5, 3, true});
    cases.push_back({width, 4, 2, false});
  }
  return cases;
}
std::vector<NormCase> all_norm_cases() {
  return norm_cases({1, 3, 4, 31, 64, 100, 576, 1023, 2048, 4096, 4100, 5001, 8192, 20000});
}
// Rows that a thread's registers hold, and one that they do not.
std::vector<NormCase> small_norm_cases() { return norm_cases({3, 64, 5001, 20000}); }

void Norms::compare_f32(const std::vector<NormCase>& cases) {
  for (const NormCase& c : cases) {
    SCOPED_TRACE("width " + std::to_string(c.width) + " tokens " + std::to_string(c.tokens));
    prepare(c);
    const auto width = static_cast<std::size_t>(c.width);
    DeviceArray<float> out(static_cast<std::size_t>(c.tokens) * width);
    NormArgs norm = args();
    norm.out = out.data();
    rms_norm(norm, test_launch());
    const auto got = out.read();
    ASSERT_TRUE(out.intact());
    for (int t = 0; t < c.tokens; ++t) {
      const float* row = got.data() + std::ptrdiff_t{t} * c.width;
      if (t >= c.live) {
        for (std::size_t i = 0; i < width; ++i) ASSERT_TRUE(std::isnan(row[i])) << "token " << t;
        continue;
      }
      const auto expected = want(t);
      for (std::size_t i = 0; i < width; ++i) {
        ASSERT_NEAR(row[i], expected[i], 2e-6F * (1 + std::fabs(expected[i]))) << t << " " << i;
      }
    }
  }
}

// A residual behind the norm, apart and where the result goes.
void Norms::compare_residual(const std::vector<NormCase>& cases) {
  for (const NormCase& c : cases) {
    SCOPED_TRACE("width " + std::to_string(c.width) + " tokens " + std::to_string(c.tokens));
    prepare(c);
    const std::size_t count =
        static_cast<std::size_t>(c.tokens) * static_cast<std::size_t>(c.width);
    std::vector<float> residual = random_floats(count, random_);
    std::fill(residual.begin() + std::ptrdiff_t{c.live} * c.width, residual.end(), NAN);
    DeviceArray<float> in_place(residual);
    const DeviceArray<float> apart(residual);
    DeviceArray<float> out(count);
    NormArgs norm = args();
    norm.residual = apart.data();
    norm.out = out.data();
    rms_norm(norm, test_launch());
    norm.residual = norm.out = in_place.data();
    rms_norm(norm, test_launch());
    const auto got = out.read();
    ASSERT_TRUE(out.intact());
    ASSERT_TRUE(in_place.intact());
    ASSERT_EQ(std::memcmp(got.data(), in_place.read().data(),
                          static_cast<std::size_t>(c.live * c.width) * sizeof(float)),
              0);
    for (int t = 0; t < c.tokens; ++t) {
      const auto expected = t < c.live ? want(t) : std::vector<float>();
      for (int i = 0; i < c.width; ++i) {
        const auto at = static_cast<std::size_t>(t * c.width + i);
        if (t >= c.live) {
          ASSERT_TRUE(std::isnan(got[at])) << "padding token " << t;
        } else {
          const float normed = expected[static_cast<std::size_t>(i)];
          ASSERT_NEAR(got[at], normed + residual[at],
                      2e-6F * (1 + std::fabs(normed) + std::fabs(residual[at])))
              << t << " " << i;
        }
      }
    }
  }
}

TEST_F(Norms, Residual) { compare_residual(all_norm_cases()); }
TEST_F(Norms, SmallResidual) { compare_residual(small_norm_cases()); }

TEST_F(Norms, F32) { compare_f32(all_norm_cases()); }
TEST_F(Norms, SmallF32) { compare_f32(small_norm_cases()); }

// Where it works in place, and that a token's bits depend on nothing beside it.
TEST_F(Norms, InPlace) {
  prepare({.width = 4100, .tokens = 3, .live = 3});
  DeviceArray<float> out(std::size_t{3} * 4100);
  NormArgs norm = args();
  norm.out = out.data();
  rms_norm(norm, test_launch());
  norm.out = device_in_.data();
  rms_norm(norm, test_launch());
  const auto in_place = device_in_.read();
  const auto apart = out.read();
  EXPECT_EQ(std::memcmp(in_place.data(), apart.data(), out.bytes()), 0);
}

void Norms::compare_bf16(const std::vector<NormCase>& cases) {
  for (const NormCase& c : cases) {
    for (const bool norms : {true, false}) {
      SCOPED_TRACE("width " + std::to_string(c.width) + " tokens " + std::to_string(c.tokens) +
                   (norms ? "" : " converts"));
      prepare(c);
      const auto width = static_cast<std::size_t>(c.width);
      DeviceArray<std::uint16_t> out(static_cast<std::size_t>(c.tokens) * width);
      NormArgs norm = args();
      if (!norms) norm.weight = nullptr;
      rms_norm_bf16(norm, out.data(), test_launch());
      const auto got = out.read();
      ASSERT_TRUE(out.intact());
      for (int t = 0; t < c.tokens; ++t) {
        const std::uint16_t* row = got.data() + std::ptrdiff_t{t} * c.width;
        const auto expected = t < c.live ? want(t) : std::vector<float>(width);
        for (std::size_t i = 0; i < width; ++i) {
          if (t >= c.live) {
            ASSERT_EQ(row[i], 0) << "token " << t;
          } else if (norms) {
            ASSERT_NEAR(bf16_to_f32(row[i]), expected[i], 0.0040F * std::fabs(expected[i]) + 1e-7F);
          } else {
            ASSERT_EQ(row[i], f32_to_bf16(input(t)[i])) << t << " " << i;
          }
        }
      }
    }
  }
}

TEST_F(Norms, Bf16) { compare_bf16(all_norm_cases()); }
TEST_F(Norms, SmallBf16) { compare_bf16(small_norm_cases()); }

}  // namespace
}  // namespace pianola::cuda
