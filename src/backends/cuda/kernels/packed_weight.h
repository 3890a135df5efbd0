// How matrices lie in device memory. F32, F16 and BF16 stay as they are, [rows, cols], so that
// cuBLASLt reads the same bytes. Block formats become planes of whole groups, so that a lane of a
// warp reads 16 bytes at a time:
//
//   kInt4: groups of 128 columns, 64 bytes each: [row][group][t: 4][block: 4] words of eight codes.
//   kInt8: groups of 64 columns, 64 bytes each:  [row][group][t: 4][block: 2] eight bytes of codes.
//
// A block is 32 columns; lane t holds its columns 4t..4t+3 and 16+4t..16+4t+3, in this order. In a
// word of kInt4, column j (0..7 of that order) is nibble j/2 + 4 (j%2): pair i is nibbles i and
// i+4. Codes of kInt4 are 0..15; of kInt8 signed. Columns are padded to whole groups with zero
// scales.
//
// The scales follow, [row][block of 32] unless said otherwise:
//   kHalfPair  half d, half m:   value = d * code + m   (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0)
//   kFloatPair float d, float m: value = d * code + m   (Q4_K, Q5_K)
//   kFloat16   float d for each 16 columns, [row][block][2]: value = d * code (Q6_K)
#pragma once

#include <cstddef>
#include <cstdint>

#include "tensor/dtype.h"
#include "tensor/weight_layout.h"

namespace pianola::cuda {

enum class Codes : std::uint8_t { kF32, kF16, kBF16, kInt4, kInt8 };
enum class Scales : std::uint8_t { kNone, kHalfPair, kFloatPair, kFloat16 };

struct PackedWeight {
  Codes codes = Codes::kBF16;
  Scales scales = Scales::kNone;
  int rows = 0;
  int cols = 0;
  const std::byte* data = nullptr;        // codes
  const std::byte* scale_data = nullptr;  // null for kNone
};

// Columns in one group of codes: what a row is padded to.
int group_cols(Codes codes);
int padded_cols(Codes codes, int cols);
std::size_t code_row_bytes(Codes codes, int cols);
std::size_t scale_row_bytes(Scales scales, Codes codes, int cols);  // a multiple of 16
// Offset of the scales from the codes, a multiple of 256.
std::size_t scale_offset(Codes codes, int rows, int cols);
std::size_t packed_bytes(Codes codes, Scales scales, int rows, int cols);

// How a checkpoint's element type is stored; false when there is no form for it.
bool packed_form(DType dtype, Codes& codes, Scales& scales);
PackedWeight packed_weight(const BoundWeight& weight);
// Whether one kernel multiplies by both.
bool same_form(const PackedWeight& a, const PackedWeight& b);
bool same_form(DType a, DType b);

}  // namespace pianola::cuda
