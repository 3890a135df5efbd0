#include "generate/stop_strings.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace pianola {
namespace {

constexpr std::size_t kMaxStrings = 16;
constexpr std::size_t kMaxBytes = 256;

}  // namespace

StopStrings::StopStrings(std::vector<std::string> strings) : strings_(std::move(strings)) {
  if (strings_.size() > kMaxStrings) {
    fail(ErrorCode::kInvalidArgument, "request: {} stop strings, at most {}", strings_.size(),
         kMaxStrings);
  }
  for (const std::string& s : strings_) {
    if (s.empty() || s.size() > kMaxBytes) {
      fail(ErrorCode::kInvalidArgument, "request: a stop string of {} bytes, expected 1 to {}",
           s.size(), kMaxBytes);
    }
  }
}

std::string StopStrings::push(std::string_view text) {
  if (found_) return {};
  held_ += text;
  // The one that is complete first, of several the longest: then it does not matter how the text
  // was cut into pieces.
  std::size_t first = std::string::npos;
  std::size_t end = std::string::npos;
  for (const std::string& s : strings_) {
    const std::size_t at = held_.find(s);
    if (at == std::string::npos || at + s.size() > end) continue;
    first = at + s.size() < end ? at : std::min(first, at);
    end = at + s.size();
  }
  if (first != std::string::npos) {
    found_ = true;
    std::string safe = held_.substr(0, first);
    held_.clear();
    return safe;
  }
  // The longest end of the text that starts a stop string stays.
  std::size_t keep = 0;
  for (const std::string& s : strings_) {
    for (std::size_t n = std::min(s.size() - 1, held_.size()); n > keep; --n) {
      if (held_.compare(held_.size() - n, n, s, 0, n) == 0) keep = n;
    }
  }
  std::string safe = held_.substr(0, held_.size() - keep);
  held_.erase(0, safe.size());
  return safe;
}

std::string StopStrings::flush() { return std::exchange(held_, {}); }

}  // namespace pianola
