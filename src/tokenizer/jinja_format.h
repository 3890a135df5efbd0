// Text made of values: str(), repr(), json.dumps, the % operator of strings and str.format.
//
//   to_json(sandbox, value, {})           // {"a": 1, "b": [true, null]}
//   percent_format(sandbox, "%05.2f", 3.14159)
#pragma once

#include <string>
#include <string_view>

#include "tokenizer/jinja_operators.h"

namespace pianola::jinja {

struct JsonStyle {
  bool ensure_ascii = false;
  bool has_indent = false;
  std::string indent;
  std::string item_separator = ", ";  // "," when there is an indent and none was given
  std::string key_separator = ": ";
  bool sort_keys = false;
};

// json.dumps, which is what transformers puts in the place of Jinja's own |tojson.
std::string to_json(Sandbox& sandbox, const Value& value, const JsonStyle& style);

// format % arguments: a tuple, a dict for %(name)s, or one value.
Value percent_format(Sandbox& sandbox, const Value& format, const Value& arguments);

// format(value, spec): fill, alignment, sign, '#', '0', width, grouping, precision, type.
std::string format_value(Sandbox& sandbox, const Value& value, std::string_view spec);

// A finite or infinite double with %e, %f or %g; upper case for 'E', 'F', 'G'.
std::string format_double(double value, char type, int precision, bool alternate);

}  // namespace pianola::jinja
