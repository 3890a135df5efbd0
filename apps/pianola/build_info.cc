#include "build_info.h"

#include <fmt/format.h>

#include <string_view>

namespace pianola::cli {

const char* version() { return PIANOLA_VERSION; }

std::string build_description() {
#if defined(__clang__)
  const std::string compiler = fmt::format("clang {}", __clang_version__);
#else
  const std::string compiler = fmt::format("g++ {}", __VERSION__);
#endif
  std::string_view flags = PIANOLA_BUILD_FLAGS;
  while (!flags.empty() && flags.front() == ' ') flags.remove_prefix(1);
  std::string text = fmt::format("{}, {} ({})", compiler, PIANOLA_BUILD_TYPE, flags);
  const std::string_view sanitizers = PIANOLA_BUILD_SANITIZE;
  if (!sanitizers.empty()) text += fmt::format(", sanitizers {}", sanitizers);
  return text;
}

}  // namespace pianola::cli
