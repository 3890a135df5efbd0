#include "tensor/shape.h"

#include <gtest/gtest.h>

#include <vector>

#include "tensor/dtype.h"
#include "tensor/tensor.h"

namespace pianola {
namespace {

std::optional<Shape> make(const std::vector<std::int64_t>& dims) { return Shape::make(dims); }

TEST(Shape, CountsItsElements) {
  EXPECT_EQ(Shape{}.elements(), 1);
  EXPECT_EQ((Shape{49152, 576}).elements(), 49152 * 576);
  EXPECT_EQ((Shape{3, 0, 5}).elements(), 0);
  EXPECT_EQ((Shape{3, 4}).to_string(), "[3, 4]");
  EXPECT_EQ(Shape{}.to_string(), "[]");
  EXPECT_EQ((Shape{3, 4})[-1], 4);
  EXPECT_THROW((Shape{3, 4}).dim(2), Error);
}

TEST(Shape, RefusesWhatDoesNotFit) {
  EXPECT_TRUE(make({INT64_MAX}));
  EXPECT_FALSE(make({INT64_MAX, 2}));
  EXPECT_FALSE(make({INT64_C(1) << 32, INT64_C(1) << 31}));
  EXPECT_TRUE(make({INT64_C(1) << 31, INT64_C(1) << 31}));
  EXPECT_FALSE(make({-1}));
  EXPECT_TRUE(make({1, 1, 1, 1, 1, 1, 1, 1}));
  EXPECT_FALSE(make({1, 1, 1, 1, 1, 1, 1, 1, 1}));
  // A zero hides an overflow only in the product, not in what is computed on the way.
  EXPECT_FALSE(make({0, INT64_MAX, 2}));
}

TEST(TensorView, FindsItsRows) {
  const std::vector<std::byte> bytes(3 * 36);
  const TensorView view{DType::kQ4_0, {3, 64}, bytes.data(), bytes.size()};
  EXPECT_EQ(view.rows(), 3);
  EXPECT_EQ(view.columns(), 64);
  EXPECT_EQ(view.row(2) - view.data, 2 * 36);
  EXPECT_EQ((TensorView{DType::kF32, {}, nullptr, 4}).columns(), 1);
}

TEST(DType, NamesAndSizes) {
  for (int i = 0; i <= static_cast<int>(DType::kF8E4M3); ++i) {
    const auto dtype = static_cast<DType>(i);
    EXPECT_EQ(parse_dtype(dtype_name(dtype)), dtype);
  }
  EXPECT_EQ(row_bytes(DType::kQ4_1, 576), 360U);
  EXPECT_THROW(row_bytes(DType::kQ4_K, 576), Error);
  EXPECT_FALSE(parse_dtype("q9_9"));
}

}  // namespace
}  // namespace pianola
