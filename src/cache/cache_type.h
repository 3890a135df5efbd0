// The element types that a layer cache can have, by the names that users write.
//
//   parse_cache_type("int8");  // DType::kI8
//
// int8 has a scale for each position and head: see layer_cache.h. fp8 is e4m3, saturating, at
// scale 1.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>

#include "tensor/dtype.h"

namespace pianola {

inline constexpr std::array kCacheTypes = {DType::kF16, DType::kBF16, DType::kF32, DType::kI8,
                                           DType::kF8E4M3};

bool is_cache_type(DType dtype);
std::optional<DType> parse_cache_type(std::string_view name);
// "f16, bf16, f32, int8 or fp8"
std::string cache_type_names();

}  // namespace pianola
