#include "tensor/dtype.h"

#include <array>

#include "base/check.h"

namespace pianola {
namespace {

constexpr std::array<DTypeInfo, 16> kInfo = {{
    {"f32", 1, 4},
    {"f16", 1, 2},
    {"bf16", 1, 2},
    {"q4_0", 32, 18},
    {"q4_1", 32, 20},
    {"q5_0", 32, 22},
    {"q5_1", 32, 24},
    {"q8_0", 32, 34},
    {"q4_k", 256, 144},
    {"q5_k", 256, 176},
    {"q6_k", 256, 210},
    {"i32", 1, 4},
    {"i64", 1, 8},
    {"int8", 1, 1},
    {"u8", 1, 1},
    {"fp8", 1, 1},
}};

}  // namespace

const DTypeInfo& dtype_info(DType dtype) { return kInfo[static_cast<std::size_t>(dtype)]; }

std::optional<DType> parse_dtype(std::string_view name) {
  for (std::size_t i = 0; i < kInfo.size(); ++i) {
    if (name == kInfo[i].name) return static_cast<DType>(i);
  }
  return std::nullopt;
}

bool is_quantized(DType dtype) { return dtype_info(dtype).elements > 1; }

std::size_t row_bytes(DType dtype, std::size_t elements) {
  const DTypeInfo& info = dtype_info(dtype);
  PIANOLA_CHECK(elements % info.elements == 0, "row of {} elements is not whole {} blocks",
                elements, info.name);
  return elements / info.elements * info.bytes;
}

}  // namespace pianola
