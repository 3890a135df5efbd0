#include "cache/cache_type.h"

#include <algorithm>

namespace pianola {

bool is_cache_type(DType dtype) {
  return std::find(kCacheTypes.begin(), kCacheTypes.end(), dtype) != kCacheTypes.end();
}

std::optional<DType> parse_cache_type(std::string_view name) {
  const std::optional<DType> dtype = parse_dtype(name);
  return dtype && is_cache_type(*dtype) ? dtype : std::nullopt;
}

std::string cache_type_names() {
  std::string names;
  for (const DType dtype : kCacheTypes) {
    if (dtype != kCacheTypes.front()) names += dtype == kCacheTypes.back() ? " or " : ", ";
    names += dtype_name(dtype);
  }
  return names;
}

}  // namespace pianola
