// The shape of a tensor: at most eight dimensions, row-major, outermost first.
//
//   Shape s{49152, 576};                       // [out, in]
//   s.elements();                              // 28311552
//   auto checked = Shape::make(dims_of_file);  // nullopt when the product does not fit
//
// Invariant: every dimension is at least 0, and the product of the dimensions that are not 0 fits
// an int64 (so any partial product does, too).
#pragma once

#include <fmt/format.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>

#include "base/check.h"

namespace pianola {

class Shape {
 public:
  static constexpr int kMaxRank = 8;

  Shape() = default;  // rank 0: one element
  Shape(std::initializer_list<std::int64_t> dims) {
    PIANOLA_CHECK(append_all(std::span(dims.begin(), dims.size())), "shape out of range");
  }

  // For dimensions read from a file. nullopt when the invariant would not hold.
  static std::optional<Shape> make(std::span<const std::int64_t> dims) {
    Shape shape;
    if (!shape.append_all(dims)) return std::nullopt;
    return shape;
  }

  int rank() const { return rank_; }
  // Negative indices count from the end: dim(-1) is the innermost dimension.
  std::int64_t dim(int i) const {
    const int at = i < 0 ? i + rank_ : i;
    PIANOLA_CHECK(at >= 0 && at < rank_, "dimension {} of a shape of rank {}", i, rank_);
    return dims_[static_cast<std::size_t>(at)];
  }
  std::int64_t operator[](int i) const { return dim(i); }
  std::span<const std::int64_t> dims() const {
    return {dims_.data(), static_cast<std::size_t>(rank_)};
  }

  std::int64_t elements() const {
    std::int64_t n = 1;
    for (const std::int64_t d : dims()) n *= d;
    return n;
  }

  // "[49152, 576]"
  std::string to_string() const { return fmt::format("[{}]", fmt::join(dims(), ", ")); }

  friend bool operator==(const Shape&, const Shape&) = default;

 private:
  bool append_all(std::span<const std::int64_t> dims) {
    if (dims.size() > kMaxRank) return false;
    std::int64_t product = 1;
    for (const std::int64_t d : dims) {
      if (d < 0) return false;
      if (d > 0 && __builtin_mul_overflow(product, d, &product)) return false;
      dims_[static_cast<std::size_t>(rank_++)] = d;
    }
    return true;
  }

  std::array<std::int64_t, kMaxRank> dims_ = {};  // unused entries stay 0
  int rank_ = 0;
};

}  // namespace pianola
