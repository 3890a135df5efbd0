// Whether this machine has what a backend needs: tests of a GPU say so and are skipped without one.
//
//   if (const std::string why = missing_backend("cuda"); !why.empty()) GTEST_SKIP() << why;
#pragma once

#include <map>
#include <string>

#include "backends/backend.h"
#include "pianola/error.h"

namespace pianola {

// What it said, or "".
inline const std::string& missing_backend(const std::string& name) {
  static std::map<std::string, std::string> known;
  const auto [found, is_new] = known.try_emplace(name);
  if (!is_new) return found->second;
  try {
    make_backend(name, {});
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kDevice && error.code() != ErrorCode::kUnsupported) throw;
    found->second = error.what();
  }
  return found->second;
}

}  // namespace pianola
