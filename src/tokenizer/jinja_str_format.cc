#include <algorithm>
#include <charconv>

#include "tokenizer/jinja_format.h"
#include "tokenizer/jinja_interpreter.h"
#include "tokenizer/jinja_text.h"

namespace pianola::jinja {
namespace {

// str.format with the rules of Python's string.Formatter, which Jinja's sandbox uses.
class StrFormatter {
 public:
  StrFormatter(Interpreter& interpreter, const Arguments& arguments, bool markup)
      : interpreter_(interpreter),
        sandbox_(interpreter.sandbox()),
        arguments_(arguments),
        markup_(markup) {}

  std::string run(std::string_view format, int depth) {
    if (depth < 0) sandbox_.fail("Max string recursion exceeded");
    std::string out;
    for (std::size_t i = 0; i < format.size();) {
      const char c = format[i];
      if ((c == '{' || c == '}') && i + 1 < format.size() && format[i + 1] == c) {
        out += c;
        i += 2;
      } else if (c == '}') {
        sandbox_.fail("Single '}}' encountered in format string");
      } else if (c == '{') {
        const std::size_t end = field_end(format, i + 1);
        out += field(format.substr(i + 1, end - i - 1), depth);
        sandbox_.copy(end - i);
        i = end + 1;
      } else {
        out += c;
        ++i;
      }
      sandbox_.reserve(out.size());
    }
    return out;
  }

 private:
  std::size_t field_end(std::string_view format, std::size_t i) const {
    int nested = 0;
    for (; i < format.size(); ++i) {
      if (format[i] == '{') ++nested;
      if (format[i] == '}' && nested-- == 0) return i;
    }
    sandbox_.fail("expected '}}' before end of string");
  }

  std::string field(std::string_view text, int depth) {
    // name[!conversion][:spec]; brackets in the name may hold anything.
    std::size_t end = 0;
    bool bracket = false;
    for (; end < text.size(); ++end) {
      if (text[end] == '[') bracket = true;
      if (text[end] == ']') bracket = false;
      if (!bracket && (text[end] == '!' || text[end] == ':')) break;
    }
    Value value = look_up(text.substr(0, end));
    std::string_view rest = text.substr(end);
    if (rest.starts_with('!')) {
      if (rest.size() < 2 || (rest.size() > 2 && rest[2] != ':')) {
        sandbox_.fail("expected ':' after conversion specifier");
      }
      if (rest[1] == 's') {
        value = to_str(sandbox_, value);
      } else if (rest[1] == 'r') {
        value = sandbox_.string(repr(sandbox_, value));
      } else {
        sandbox_.unsupported("the conversion !{}", rest[1]);
      }
      rest.remove_prefix(2);
    }
    std::string spec;
    if (rest.starts_with(':')) spec = run(rest.substr(1), depth - 1);
    if (markup_ && !(value.is_string() && value.as_text().markup)) {
      return escape_html(format_value(sandbox_, value, spec));
    }
    return format_value(sandbox_, value, spec);
  }

  static bool read_index(std::string_view text, std::int64_t& index) {
    const char* begin = text.data();
    const char* end = begin + text.size();
    const auto result = std::from_chars(begin, end, index);
    return !text.empty() && text[0] != '-' && result.ec == std::errc() && result.ptr == end;
  }

  Value first_value(std::string_view name) {
    std::int64_t index = 0;
    const bool numbered = read_index(name, index);
    if (name.empty()) {
      if (manual_) {
        sandbox_.fail("cannot switch from manual field specification to automatic field numbering");
      }
      automatic_ = true;
      index = next_++;
    } else if (numbered) {
      if (automatic_) {
        sandbox_.fail("cannot switch from manual field specification to automatic field numbering");
      }
      manual_ = true;
    } else {
      for (const auto& [keyword, value] : arguments_.keywords) {
        sandbox_.step();
        if (keyword == name) return value;
      }
      sandbox_.fail("{}", quote(name));
    }
    if (index >= static_cast<std::int64_t>(arguments_.positional.size())) {
      sandbox_.fail("replacement index {} out of range for positional args tuple", index);
    }
    return arguments_.positional[static_cast<std::size_t>(index)];
  }

  Value look_up(std::string_view name) {
    std::size_t i = std::min(name.find_first_of(".["), name.size());
    Value value = first_value(name.substr(0, i));
    while (i < name.size()) {
      if (name[i] == '.') {
        const std::size_t end = std::min(name.find_first_of(".[", i + 1), name.size());
        if (end == i + 1) sandbox_.fail("Empty attribute in format string");
        value = interpreter_.get_attribute(value, name.substr(i + 1, end - i - 1));
        i = end;
        continue;
      }
      if (name[i] != '[') {
        sandbox_.fail("Only '.' or '[' may follow ']' in format field specifier");
      }
      const std::size_t end = name.find(']', i);
      if (end == std::string_view::npos) sandbox_.fail("Missing ']' in format string");
      const std::string_view key = name.substr(i + 1, end - i - 1);
      if (key.empty()) sandbox_.fail("Empty attribute in format string");
      std::int64_t index = 0;
      value =
          interpreter_.get_item(value, read_index(key, index) ? Value::integer(index)
                                                              : sandbox_.string(std::string(key)));
      i = end + 1;
    }
    return value;
  }

  Interpreter& interpreter_;
  Sandbox& sandbox_;
  const Arguments& arguments_;
  const bool markup_;
  std::int64_t next_ = 0;
  bool automatic_ = false, manual_ = false;
};

}  // namespace

Value str_format(Interpreter& interpreter, const Value& self, const Arguments& arguments) {
  const bool markup = self.as_text().markup;
  StrFormatter formatter(interpreter, arguments, markup);
  return interpreter.sandbox().string(formatter.run(self.str(), 2), markup);
}

}  // namespace pianola::jinja
