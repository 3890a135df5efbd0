#include "json_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/utf8.h"

namespace pianola::cli {
namespace {

bool is_flat(const boost::json::array& array) {
  return std::none_of(array.begin(), array.end(),
                      [](const boost::json::value& v) { return v.is_object() || v.is_array(); });
}

void write(std::string& out, const boost::json::value& value, int indent) {
  const std::string inner(static_cast<std::size_t>(indent) + 2, ' ');
  const std::string outer(static_cast<std::size_t>(indent), ' ');
  const char* separator = "";
  if (const auto* object = value.if_object(); object && !object->empty()) {
    out += "{";
    for (const auto& [key, member] : *object) {
      out += fmt::format("{}\n{}", separator, inner);
      out += boost::json::serialize(boost::json::string(key)) + ": ";
      write(out, member, indent + 2);
      separator = ",";
    }
    out += "\n" + outer + "}";
  } else if (const auto* array = value.if_array(); array && !array->empty()) {
    const bool flat = is_flat(*array);
    out += "[";
    for (const auto& element : *array) {
      out += separator;
      if (!flat) out += "\n" + inner;
      write(out, element, indent + 2);
      separator = flat ? ", " : ",";
    }
    out += flat ? "]" : "\n" + outer + "]";
  } else if (const auto* number = value.if_double()) {
    out += std::isfinite(*number) ? fmt::format("{}", *number) : "null";
  } else {
    out += boost::json::serialize(value);
  }
}

}  // namespace

std::string to_json_text(const boost::json::value& value) {
  std::string out;
  write(out, value, 0);
  out += "\n";
  return out;
}

boost::json::string json_string(std::string_view text) {
  return boost::json::string(sanitize_utf8(text));
}

}  // namespace pianola::cli
