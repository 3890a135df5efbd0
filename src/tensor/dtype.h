// Element types: plain types and the GGUF block types, with their sizes.
//
//   row_bytes(DType::kQ4_1, 576)  // 576 / 32 blocks of 20 bytes = 360
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace pianola {

enum class DType : std::uint8_t {
  kF32,
  kF16,
  kBF16,
  kQ4_0,
  kQ4_1,
  kQ5_0,
  kQ5_1,
  kQ8_0,
  kQ4_K,
  kQ5_K,
  kQ6_K,
  kI32,
  kI64,
  kI8,
  kU8,
  kF8E4M3,  // no infinity; ±448 is the largest, and NaN has one pattern of each sign
};

// A block is the smallest addressable unit: `elements` values in `bytes` bytes. Plain types have
// one element a block.
struct DTypeInfo {
  const char* name;  // "f32", "q4_1": as users write them
  std::uint32_t elements;
  std::uint32_t bytes;
};

const DTypeInfo& dtype_info(DType dtype);
inline const char* dtype_name(DType dtype) { return dtype_info(dtype).name; }
std::optional<DType> parse_dtype(std::string_view name);

// True for the GGUF block types.
bool is_quantized(DType dtype);

// Bytes of one row of `elements` values; `elements` must be a multiple of the block's.
std::size_t row_bytes(DType dtype, std::size_t elements);

}  // namespace pianola
