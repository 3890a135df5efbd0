#include "tensor/weight_layout.h"

#include <cmath>
#include <cstring>

#include "base/check.h"
#include "tensor/quant_format.h"

namespace pianola {

const char* weight_role_name(WeightRole role) {
  switch (role) {
    case WeightRole::kLinear:
      return "linear";
    case WeightRole::kRouter:
      return "router";
    case WeightRole::kEmbedding:
      return "embedding";
    case WeightRole::kVector:
      return "vector";
  }
  return "?";
}

std::vector<std::byte> gather_rows(const WeightDecl& decl, const std::byte* source) {
  const bool vector = decl.role == WeightRole::kVector;
  const std::size_t row = row_bytes(decl.dtype, vector ? 1 : static_cast<std::size_t>(decl.cols));
  std::vector<std::byte> bytes(decl.source_bytes());
  std::byte* to = bytes.data();
  for (const RowSlice& slice : decl.slices) {
    for (std::int64_t i = 0; i < slice.count; ++i, to += row) {
      std::memcpy(to, source + static_cast<std::size_t>(slice.source_row(i)) * row, row);
    }
  }
  return bytes;
}

WeightDecl one_matrix(const WeightDecl& stack) {
  WeightDecl decl{.name = stack.name, .source = stack.source, .role = stack.role};
  decl.dtype = stack.dtype;
  decl.rows = stack.rows;
  decl.cols = stack.cols;
  decl.offset = stack.offset;
  return decl;
}

void read_vector(const WeightDecl& decl, const std::byte* source, float* values) {
  dequantize_row(decl.dtype, source, values, static_cast<std::size_t>(decl.cols));
  for (std::int64_t i = 0; decl.offset != 0 && i < decl.cols; ++i) values[i] += decl.offset;
  for (std::int64_t i = 0; decl.scale != 1 && i < decl.cols; ++i) values[i] *= decl.scale;
  for (std::int64_t i = 0; decl.negative_exponentials && i < decl.cols; ++i) {
    if (!(values[i] <= 0)) {  // 0 is what becomes of a very small one
      fail(ErrorCode::kInvalidModel, "tensor '{}': element {}: expected -e^x, found {}",
           decl.source, i, values[i]);
    }
    values[i] = std::log(-values[i]);
  }
}

}  // namespace pianola
