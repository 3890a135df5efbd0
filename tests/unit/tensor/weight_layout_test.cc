// Rows that are taken out of a larger tensor, and vectors that files keep in another form.
#include "tensor/weight_layout.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>

#include "expect_error.h"

namespace pianola {
namespace {

// A tensor of 12 rows of two floats: row r holds r and r + 0.5.
std::vector<float> tensor() {
  std::vector<float> values;
  for (int r = 0; r < 12; ++r) {
    values.push_back(static_cast<float>(r));
    values.push_back(static_cast<float>(r) + 0.5F);
  }
  return values;
}

std::vector<float> gathered(const WeightDecl& decl, const std::vector<float>& source) {
  const std::vector<std::byte> bytes =
      gather_rows(decl, reinterpret_cast<const std::byte*>(source.data()));
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

// Three heads of four rows each: query, query, gate, gate.
TEST(GatherRows, TakesGroupsOfRowsInTheOrderOfTheSlices) {
  WeightDecl decl{.name = "w", .role = WeightRole::kLinear};
  decl.rows = 6;
  decl.cols = 2;
  decl.slices = {{.begin = 0, .group = 2, .stride = 4, .count = 6}};
  EXPECT_EQ(gathered(decl, tensor()),
            (std::vector<float>{0, 0.5F, 1, 1.5F, 4, 4.5F, 5, 5.5F, 8, 8.5F, 9, 9.5F}));
  decl.rows = 5;
  decl.slices = {{.begin = 2, .group = 1, .stride = 4, .count = 3},
                 {.begin = 10, .group = 2, .stride = 2, .count = 2}};
  EXPECT_EQ(gathered(decl, tensor()),
            (std::vector<float>{2, 2.5F, 6, 6.5F, 10, 10.5F, 10, 10.5F, 11, 11.5F}));
}

// Elements of a vector: a matrix [4, 3] read by columns.
TEST(GatherRows, OfAVectorARowIsAnElement) {
  std::vector<float> source(12);
  std::iota(source.begin(), source.end(), 0.0F);
  WeightDecl decl{.name = "v", .role = WeightRole::kVector};
  decl.cols = 12;
  for (std::int64_t j = 0; j < 3; ++j) {
    decl.slices.push_back({.begin = j, .group = 1, .stride = 3, .count = 4});
  }
  EXPECT_EQ(gathered(decl, source), (std::vector<float>{0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11}));
}

// The decay of a head: GGUF files hold -e^x of what Hugging Face files hold.
TEST(ReadVector, TakesLogarithmsBack) {
  WeightDecl decl{.name = "layers.0.linear.a_log", .source = "blk.0.ssm_a"};
  decl.role = WeightRole::kVector;
  decl.cols = 4;
  decl.negative_exponentials = true;
  const auto read = [&decl](const std::vector<float>& source) {
    std::vector<float> values(source.size());
    read_vector(decl, reinterpret_cast<const std::byte*>(source.data()), values.data());
    return values;
  };
  const std::vector<float> logs = {-3.5F, 0, 0.25F, 2.75F};
  std::vector<float> source;
  for (const float x : logs) source.push_back(-std::exp(x));
  const std::vector<float> values = read(source);
  for (std::size_t i = 0; i < logs.size(); ++i) EXPECT_NEAR(values[i], logs[i], 0x1p-20);
  source[1] = -0.0F;  // no decay at all
  EXPECT_EQ(std::exp(read(source)[1]), 0);
  for (const float no : {1.0F, std::nanf("")}) {
    source[2] = no;
    expect_error(ErrorCode::kInvalidModel, "'blk.0.ssm_a': element 2", [&] { read(source); });
  }
}

// A row of a block format is whole blocks.
TEST(GatherRows, TakesBlocksWhole) {
  const std::size_t row = row_bytes(DType::kQ8_0, 64);
  std::vector<std::byte> source(4 * row);
  for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<std::byte>(i / row);
  WeightDecl decl{.name = "q", .role = WeightRole::kLinear, .dtype = DType::kQ8_0};
  decl.rows = 2;
  decl.cols = 64;
  decl.slices = {{.begin = 1, .group = 1, .stride = 2, .count = 2}};
  const std::vector<std::byte> bytes = gather_rows(decl, source.data());
  ASSERT_EQ(bytes.size(), 2 * row);
  EXPECT_EQ(bytes.front(), std::byte{1});
  EXPECT_EQ(bytes[row - 1], std::byte{1});
  EXPECT_EQ(bytes[row], std::byte{3});
  EXPECT_EQ(bytes.back(), std::byte{3});
}

}  // namespace
}  // namespace pianola
