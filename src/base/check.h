// Raising errors: fail() with a formatted message, and PIANOLA_CHECK for broken invariants.
//
//   if (n > limit) fail(ErrorCode::kInvalidModel, "gguf: {} tensors, at most {}", n, limit);
//   PIANOLA_CHECK(sealed_, "arena used before it was sealed");
#pragma once

#include <fmt/format.h>

#include <utility>

#include "pianola/error.h"

namespace pianola {

// Throws Error(code) with the formatted message.
template <typename... Args>
[[noreturn]] void fail(ErrorCode code, fmt::format_string<Args...> format, Args&&... args) {
  throw Error(code, fmt::format(format, std::forward<Args>(args)...));
}

[[noreturn]] void fail_check(const char* condition, const char* file, int line,
                             const std::string& message);

}  // namespace pianola

// An invariant of pianola itself. A wrong file or request is never one: use fail() for those.
#define PIANOLA_CHECK(condition, ...)                                                    \
  do {                                                                                   \
    if (!(condition)) [[unlikely]]                                                       \
      ::pianola::fail_check(#condition, __FILE__, __LINE__, ::fmt::format(__VA_ARGS__)); \
  } while (false)
