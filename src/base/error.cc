#include "pianola/error.h"

#include <cstring>

#include "base/check.h"

namespace pianola {

const char* error_code_name(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::kInvalidArgument:
      return "invalid_argument";
    case ErrorCode::kInvalidModel:
      return "invalid_model";
    case ErrorCode::kUnsupported:
      return "unsupported";
    case ErrorCode::kNotFound:
      return "not_found";
    case ErrorCode::kOutOfMemory:
      return "out_of_memory";
    case ErrorCode::kContextOverflow:
      return "context_overflow";
    case ErrorCode::kDevice:
      return "device";
    case ErrorCode::kInternal:
      return "internal";
  }
  return "internal";
}

int Error::exit_code() const noexcept { return 2 + static_cast<int>(code_); }

void fail_check(const char* condition, const char* file, int line, const std::string& message) {
  const char* name = std::strrchr(file, '/');
  throw Error(ErrorCode::kInternal,
              fmt::format("internal error at {}:{}: {} ({}); please report it",
                          name ? name + 1 : file, line, message, condition));
}

}  // namespace pianola
