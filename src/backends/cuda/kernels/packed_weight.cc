#include "backends/cuda/kernels/packed_weight.h"

#include "base/check.h"

namespace pianola::cuda {
namespace {

constexpr int kBlock = 32;  // columns of one pair of scales

std::size_t round_up(std::size_t n, std::size_t step) { return (n + step - 1) / step * step; }

// Bytes of the scales of one block of 32 columns.
std::size_t scale_block_bytes(Scales scales) {
  switch (scales) {
    case Scales::kNone:
      return 0;
    case Scales::kHalfPair:
      return 4;
    case Scales::kFloatPair:
    case Scales::kFloat16:
      return 8;
  }
  return 0;
}

}  // namespace

int group_cols(Codes codes) {
  switch (codes) {
    case Codes::kInt4:
      return 128;
    case Codes::kInt8:
      return 64;
    default:
      return 1;
  }
}

int padded_cols(Codes codes, int cols) {
  const auto group = static_cast<std::size_t>(group_cols(codes));
  return static_cast<int>(round_up(static_cast<std::size_t>(cols), group));
}

std::size_t code_row_bytes(Codes codes, int cols) {
  const auto padded = static_cast<std::size_t>(padded_cols(codes, cols));
  switch (codes) {
    case Codes::kF32:
      return padded * 4;
    case Codes::kF16:
    case Codes::kBF16:
      return padded * 2;
    case Codes::kInt4:
      return padded / 2;
    case Codes::kInt8:
      return padded;
  }
  return 0;
}

std::size_t scale_row_bytes(Scales scales, Codes codes, int cols) {
  const auto blocks = static_cast<std::size_t>(padded_cols(codes, cols)) / kBlock;
  return round_up(blocks * scale_block_bytes(scales), 16);
}

std::size_t scale_offset(Codes codes, int rows, int cols) {
  return round_up(static_cast<std::size_t>(rows) * code_row_bytes(codes, cols), 256);
}

std::size_t packed_bytes(Codes codes, Scales scales, int rows, int cols) {
  if (scales == Scales::kNone) return static_cast<std::size_t>(rows) * code_row_bytes(codes, cols);
  return scale_offset(codes, rows, cols) +
         static_cast<std::size_t>(rows) * scale_row_bytes(scales, codes, cols);
}

bool packed_form(DType dtype, Codes& codes, Scales& scales) {
  const auto form = [&](Codes c, Scales s) {
    codes = c;
    scales = s;
    return true;
  };
  switch (dtype) {
    case DType::kF32:
      return form(Codes::kF32, Scales::kNone);
    case DType::kF16:
      return form(Codes::kF16, Scales::kNone);
    case DType::kBF16:
      return form(Codes::kBF16, Scales::kNone);
    case DType::kQ4_0:
    case DType::kQ4_1:
      return form(Codes::kInt4, Scales::kHalfPair);
    case DType::kQ4_K:
      return form(Codes::kInt4, Scales::kFloatPair);
    case DType::kQ5_0:
    case DType::kQ5_1:
    case DType::kQ8_0:
      return form(Codes::kInt8, Scales::kHalfPair);
    case DType::kQ5_K:
      return form(Codes::kInt8, Scales::kFloatPair);
    case DType::kQ6_K:
      return form(Codes::kInt8, Scales::kFloat16);
    default:
      return false;
  }
}

PackedWeight packed_weight(const BoundWeight& weight) {
  PackedWeight packed;
  PIANOLA_CHECK(packed_form(weight.layout.dtype, packed.codes, packed.scales),
                "weight '{}': no packed form of {}", weight.decl->name,
                dtype_name(weight.layout.dtype));
  packed.rows = static_cast<int>(weight.decl->rows);
  packed.cols = static_cast<int>(weight.decl->cols);
  packed.data = weight.data;
  if (packed.scales != Scales::kNone) {
    packed.scale_data = weight.data + scale_offset(packed.codes, packed.rows, packed.cols);
  }
  return packed;
}

bool same_form(const PackedWeight& a, const PackedWeight& b) {
  return a.codes == b.codes && a.scales == b.scales;
}

bool same_form(DType a, DType b) {
  PackedWeight first;
  PackedWeight second;
  return packed_form(a, first.codes, first.scales) && packed_form(b, second.codes, second.scales) &&
         same_form(first, second);
}

}  // namespace pianola::cuda
