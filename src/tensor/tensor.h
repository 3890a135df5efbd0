// A tensor somebody else owns: type, shape and where its bytes are.
//
//   TensorView w = checkpoint.view(*checkpoint.find("output.weight"));   // [vocab, width]
//   dequantize_row(w.dtype, w.row(i), out, static_cast<std::size_t>(w.columns()));
//
// Bytes are row-major and dense. They may lie at any address: a model file need not align its
// tensors, so read them with memcpy, or check the address first.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tensor/dtype.h"
#include "tensor/shape.h"

namespace pianola {

struct TensorView {
  DType dtype = DType::kF32;
  Shape shape;                      // [outermost, ..., innermost]
  const std::byte* data = nullptr;  // row-major, `bytes` long
  std::size_t bytes = 0;

  // Length of the innermost dimension, and how many such rows there are. A scalar is one row of
  // one.
  std::int64_t columns() const { return shape.rank() == 0 ? 1 : shape.dim(-1); }
  std::int64_t rows() const {
    std::int64_t n = 1;
    for (int i = 0; i + 1 < shape.rank(); ++i) n *= shape.dim(i);
    return n;
  }
  std::size_t bytes_per_row() const {
    return row_bytes(dtype, static_cast<std::size_t>(columns()));
  }
  const std::byte* row(std::int64_t i) const {
    return data + static_cast<std::size_t>(i) * bytes_per_row();
  }
};

}  // namespace pianola
