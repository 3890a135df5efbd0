// What templates find without defining it: filters, tests, methods of values and global functions.
//
//   Filter upper = find_filter("upper");          // nullptr when there is none
//   Value loud = upper(interpreter, value, arguments);
//   Arguments a;  a.positional = {Value::integer(2)};
//   Bound bound(sandbox, "indent", a, {"width", "first", "blank"});
//   std::int64_t width = bound.integer(0, 4);
#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tokenizer/jinja_value.h"

namespace pianola::jinja {

class Interpreter;

struct Arguments {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> keywords;

  // Removes and returns a keyword; kMissing when it was not passed.
  Value take(std::string_view keyword);
};

// Arguments bound to the parameters of a Python function; fails as a Python call does.
class Bound {
 public:
  Bound(Sandbox& sandbox, std::string_view function, const Arguments& arguments,
        std::initializer_list<std::string_view> parameters, std::size_t required = 0);

  bool has(std::size_t i) const { return !values_[i].is(Kind::kMissing); }
  const Value& operator[](std::size_t i) const { return values_[i]; }
  Value value_or(std::size_t i, const Value& otherwise) const {
    return has(i) ? values_[i] : otherwise;
  }
  bool truth(std::size_t i, bool otherwise = false) const {
    return has(i) ? is_true(values_[i]) : otherwise;
  }
  // An int, where None stands for `otherwise` as well.
  std::int64_t integer(std::size_t i, std::int64_t otherwise) const;
  // A str; fails for anything else.
  const std::string& text(std::size_t i) const;

 private:
  Sandbox& sandbox_;
  std::string_view function_;
  std::vector<Value> values_;
};

using Filter = Value (*)(Interpreter&, const Value& input, Arguments&);
using Test = bool (*)(Interpreter&, const Value& input, Arguments&);

Filter find_filter(std::string_view name);
Test find_test(std::string_view name);

struct NamedFilter {
  std::string_view name;
  Filter filter;
};
// The filters of one source file.
const std::vector<NamedFilter>& text_filters();
const std::vector<NamedFilter>& sequence_filters();
const std::vector<NamedFilter>& number_filters();

// range, dict, namespace, cycler, joiner, raise_exception, strftime_now: nullopt for another name.
bool is_global(std::string_view name);
Value call_global(Interpreter& interpreter, std::string_view name, const Arguments& arguments);

// value.name where Python's type has such an attribute: a bound method, a property, or an undefined
// that says the sandbox forbids it. nullopt where there is none.
std::optional<Value> find_attribute(Interpreter& interpreter, const Value& value,
                                    std::string_view name);
// Calls what find_attribute bound.
Value call_method(Interpreter& interpreter, const Value& self, std::string_view name,
                  const Arguments& arguments);
Value call_string_method(Interpreter& interpreter, const Value& self, std::string_view name,
                         const Arguments& arguments);
bool is_string_method(std::string_view name);
Value str_format(Interpreter& interpreter, const Value& self, const Arguments& arguments);

// strftime of Python, for a local time without a zone.
std::string format_time(Sandbox& sandbox, std::string_view format, std::int64_t microseconds);

}  // namespace pianola::jinja
