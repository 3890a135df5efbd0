#include <ctime>
#include <string>

#include "tokenizer/jinja_builtins.h"

namespace pianola::jinja {

std::string format_time(Sandbox& sandbox, std::string_view format, std::int64_t microseconds) {
  std::int64_t seconds = microseconds / 1'000'000;
  std::int64_t fraction = microseconds % 1'000'000;
  if (fraction < 0) {
    fraction += 1'000'000;
    --seconds;
  }
  const auto time = static_cast<std::time_t>(seconds);
  std::tm local{};
  if (localtime_r(&time, &local) == nullptr)
    sandbox.fail("strftime_now: the clock is out of range");
  static constexpr std::string_view kDirectives = "aAbBcCdDeFgGhHIjklmMnpPrRsStTuUVwWxXyY";
  std::string out;
  for (std::size_t i = 0; i < format.size(); ++i) {
    if (format[i] != '%') {
      out += format[i];
      continue;
    }
    std::string directive = "%";
    ++i;
    if (i < format.size() && format[i] == '-') directive += format[i++];  // no padding
    if (i >= format.size()) {
      out += directive;
      break;
    }
    const char kind = format[i];
    directive += kind;
    if (kind == '%') {
      out += '%';
    } else if (kind == 'f' && directive.size() == 2) {
      out += fmt::format("{:06}", fraction);
    } else if ((kind == 'z' || kind == 'Z') && directive.size() == 2) {
      continue;  // the time has no zone
    } else if (kDirectives.find(kind) != std::string_view::npos) {
      char buffer[256];
      out.append(buffer, std::strftime(buffer, sizeof buffer, directive.c_str(), &local));
    } else {
      sandbox.unsupported("the directive '{}' of strftime_now", directive);
    }
    sandbox.copy(out.size());
    sandbox.reserve(out.size());
  }
  return out;
}

}  // namespace pianola::jinja
