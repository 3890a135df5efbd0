#include <algorithm>
#include <array>

#include "base/utf8.h"
#include "tokenizer/jinja_builtins.h"
#include "tokenizer/jinja_format.h"
#include "tokenizer/jinja_interpreter.h"
#include "tokenizer/jinja_text.h"

namespace pianola::jinja {
namespace {

// One call of a method of str.
class StringCall {
 public:
  StringCall(Interpreter& interpreter, const Value& self, std::string_view name,
             const Arguments& arguments)
      : sandbox_(interpreter.sandbox()),
        self_(self),
        text_(self.str()),
        name_(name),
        arguments_(arguments) {
    sandbox_.copy(text_.size());
  }

  Value strip() {
    const Bound bound(sandbox_, name_, arguments_, {"chars"});
    const int sides = name_ == "lstrip" ? 1 : name_ == "rstrip" ? 2 : 3;
    if (!bound.has(0) || bound[0].is(Kind::kNone)) return give(strip_space(text_, sides));
    sandbox_.copy(text_.size() * std::min<std::size_t>(bound.text(0).size(), 64));
    return give(strip_chars(text_, bound.text(0), sides));
  }

  Value split() {
    const Bound bound(sandbox_, name_, arguments_, {"sep", "maxsplit"});
    const std::int64_t max = bound.integer(1, -1);
    const bool right = name_ == "rsplit";
    if (!bound.has(0) || bound[0].is(Kind::kNone)) {
      sandbox_.scan(text_.size());
      return give_list(right ? rsplit_space(text_, max) : split_space(text_, max));
    }
    const std::string& separator = bound.text(0);
    if (separator.empty()) sandbox_.fail("empty separator");
    sandbox_.scan(text_.size());
    sandbox_.reserve_items(count_of(text_, separator));
    return give_list(right ? rsplit_at(text_, separator, max) : split_at(text_, separator, max));
  }

  Value split_lines_of() {
    const Bound bound(sandbox_, name_, arguments_, {"keepends"});
    sandbox_.scan(text_.size());
    return give_list(split_lines(text_, bound.truth(0)));
  }

  Value partition() {
    const Bound bound(sandbox_, name_, arguments_, {"sep"}, 1);
    const std::string& separator = bound.text(0);
    if (separator.empty()) sandbox_.fail("empty separator");
    const bool right = name_ == "rpartition";
    const std::size_t at = right ? text_.rfind(separator) : text_.find(separator);
    if (at == std::string_view::npos) {
      return right ? sandbox_.tuple({give(""), give(""), self_})
                   : sandbox_.tuple({self_, give(""), give("")});
    }
    return sandbox_.tuple(
        {give(text_.substr(0, at)), give(separator), give(text_.substr(at + separator.size()))});
  }

  Value starts_or_ends() {
    const Bound bound(sandbox_, name_, arguments_, {"prefix", "start", "end"}, 1);
    const Range range = range_of(bound);
    const auto matches = [&](const Value& part) {
      if (part.is_undefined()) fail_undefined(sandbox_, part);
      if (!part.is_string()) {
        sandbox_.fail("{} first arg must be str or a tuple of str, not {}", name_, type_name(part));
      }
      sandbox_.copy(part.str().size());
      if (!range.valid) return false;
      return name_ == "startswith" ? range.text.starts_with(part.str())
                                   : range.text.ends_with(part.str());
    };
    if (bound[0].is(Kind::kTuple)) {
      const auto& parts = bound[0].items();
      return Value::boolean(std::any_of(parts.begin(), parts.end(), matches));
    }
    return Value::boolean(matches(bound[0]));
  }

  // find, rfind, index, rindex, count
  Value search() {
    const Bound bound(sandbox_, name_, arguments_, {"sub", "start", "end"}, 1);
    const std::string& part = bound.text(0);
    const Range range = range_of(bound);
    if (name_ == "count") {
      sandbox_.scan(text_.size());
      const std::size_t n = range.valid ? count_of(range.text, part) : 0;
      return Value::integer(static_cast<std::int64_t>(n));
    }
    const bool right = name_ == "rfind" || name_ == "rindex";
    std::size_t at = std::string_view::npos;
    if (range.valid) at = right ? range.text.rfind(part) : range.text.find(part);
    if (at != std::string_view::npos) {
      return Value::integer(range.start +
                            static_cast<std::int64_t>(length(range.text.substr(0, at))));
    }
    if (name_ == "index" || name_ == "rindex") sandbox_.fail("substring not found");
    return Value::integer(-1);
  }

  Value replace() {
    const Bound bound(sandbox_, name_, arguments_, {"old", "new", "count"}, 2);
    const std::string& old_part = bound.text(0);
    const bool escape = markup() && !bound[1].as_text().markup;
    const std::string new_part = escape ? escape_html(bound.text(1)) : bound.text(1);
    const std::int64_t count = bound.integer(2, -1);
    sandbox_.scan(2 * text_.size());  // counted, then replaced
    sandbox_.reserve(replaced_size(text_, old_part, new_part, count));
    return give(replace_all(text_, old_part, new_part, count));
  }

  Value join() {
    const Bound bound(sandbox_, name_, arguments_, {"iterable"}, 1);
    std::string out;
    std::size_t i = 0;
    Walk walk(sandbox_, bound[0]);
    for (Value item; walk.next(item); ++i) {
      if (!item.is_string() && !markup()) {
        sandbox_.fail("sequence item {}: expected str instance, {} found", i, type_name(item));
      }
      const Value text = to_str(sandbox_, item);
      if (i != 0) out += text_;
      out += markup() && !text.as_text().markup ? escape_html(text.str()) : text.str();
      sandbox_.reserve(out.size());
      sandbox_.copy(text.str().size() + text_.size());
    }
    return give(out);
  }

  Value remove_affix() {
    const Bound bound(sandbox_, name_, arguments_, {"affix"}, 1);
    const std::string& affix = bound.text(0);
    std::string_view text = text_;
    if (name_ == "removeprefix") {
      if (text.starts_with(affix)) text.remove_prefix(affix.size());
    } else if (text.ends_with(affix)) {
      text.remove_suffix(affix.size());
    }
    return give(text);
  }

  // center, ljust, rjust, zfill
  Value pad() {
    const Bound bound(sandbox_, name_, arguments_, {"width", "fillchar"}, 1);
    const std::string fill = name_ == "zfill" ? "0" : bound.has(1) ? bound.text(1) : " ";
    if (length(fill) != 1) {
      sandbox_.fail("the fill character must be exactly one character long");
    }
    const std::int64_t width = bound.integer(0, 0);
    const std::int64_t missing = width - static_cast<std::int64_t>(length(text_));
    if (missing <= 0) return self_;
    const auto count = static_cast<std::size_t>(missing);
    sandbox_.reserve(count > (SIZE_MAX >> 8) ? SIZE_MAX : text_.size() + count * fill.size());
    std::size_t left = 0;
    if (name_ == "rjust" || name_ == "zfill") left = count;
    if (name_ == "center") left = count / 2 + (count & static_cast<std::size_t>(width) & 1);
    std::string_view text = text_;
    std::string out;
    if (name_ == "zfill" && !text.empty() && (text[0] == '-' || text[0] == '+')) {
      out += text[0];
      text.remove_prefix(1);
    }
    for (std::size_t i = 0; i < left; ++i) out += fill;
    out += text;
    for (std::size_t i = left; i < count; ++i) out += fill;
    return give(out);
  }

  Value change_case() {
    const Bound bound(sandbox_, name_, arguments_, {});
    sandbox_.scan(text_.size());
    if (name_ == "upper") return give(to_upper(text_));
    if (name_ == "lower") return give(to_lower(text_));
    if (name_ == "title") return give(to_title(text_));
    if (name_ == "swapcase") return give(swap_case(text_));
    return give(capitalize(text_));
  }

  Value classify() {
    const Bound bound(sandbox_, name_, arguments_, {});
    sandbox_.scan(text_.size());
    if (name_ == "isascii") return Value::boolean(self_.as_text().ascii);
    const std::u32string wide = to_utf32(text_);
    if (name_ == "isprintable") return Value::boolean(all(wide, is_printable));
    if (wide.empty()) return Value::boolean(false);
    if (name_ == "isalpha") return Value::boolean(all(wide, is_alpha));
    if (name_ == "isdigit") return Value::boolean(all(wide, is_digit));
    if (name_ == "isdecimal") return Value::boolean(all(wide, is_decimal));
    if (name_ == "isnumeric") return Value::boolean(all(wide, is_numeric));
    if (name_ == "isspace") return Value::boolean(all(wide, is_space));
    if (name_ == "isalnum") {
      return Value::boolean(all(wide, [](char32_t c) { return is_alpha(c) || is_numeric(c); }));
    }
    const auto any = [&wide](auto test) { return std::any_of(wide.begin(), wide.end(), test); };
    if (name_ == "islower") {
      return Value::boolean(any(is_lower) && !any(is_upper) && !any(is_title));
    }
    if (name_ == "isupper") {
      return Value::boolean(any(is_upper) && !any(is_lower) && !any(is_title));
    }
    return Value::boolean(is_title_text(wide));
  }

 private:
  struct Range {
    std::string_view text;
    std::int64_t start = 0;
    bool valid = true;  // false when it starts behind the end: then nothing matches
  };

  template <typename Test>
  static bool all(const std::u32string& text, Test test) {
    return std::all_of(text.begin(), text.end(), test);
  }

  static bool is_title_text(const std::u32string& text) {
    bool inside = false;
    bool any = false;
    for (const char32_t c : text) {
      if (is_upper(c) || is_title(c)) {
        if (inside) return false;
        inside = any = true;
      } else if (is_lower(c)) {
        if (!inside) return false;
        any = true;
      } else {
        inside = false;
      }
    }
    return any;
  }

  bool markup() const { return self_.as_text().markup; }
  Value give(std::string_view text) { return sandbox_.string(std::string(text), markup()); }
  Value give_list(const std::vector<std::string_view>& parts) {
    std::vector<Value> items;
    items.reserve(parts.size());
    for (const std::string_view part : parts) items.push_back(give(part));
    return sandbox_.list(std::move(items));
  }

  // text[start:end] of the second and third parameters.
  Range range_of(const Bound& bound) {
    Range range{text_};
    if (!bound.has(1) && !bound.has(2)) return range;
    const auto size = static_cast<std::int64_t>(length(text_));
    const auto clip = [size](std::int64_t i) {
      return std::min(i < 0 ? std::max<std::int64_t>(i + size, 0) : i, size);
    };
    const std::int64_t wanted = bound.integer(1, 0);
    const std::int64_t end = clip(bound.integer(2, size));
    range.start = clip(wanted);
    range.valid = wanted <= size && range.start <= end;
    if (!range.valid) return range;
    const std::size_t from = byte_offset(text_, static_cast<std::size_t>(range.start));
    const std::size_t to = byte_offset(text_, static_cast<std::size_t>(end));
    range.text = text_.substr(from, to - from);
    return range;
  }

  Sandbox& sandbox_;
  const Value self_;
  const std::string_view text_;
  const std::string_view name_;
  const Arguments& arguments_;
};

using Method = Value (StringCall::*)();
struct NamedMethod {
  std::string_view name;
  Method method;  // null: Python has it, this interpreter does not
};

constexpr NamedMethod kMethods[] = {{"strip", &StringCall::strip},
                                    {"lstrip", &StringCall::strip},
                                    {"rstrip", &StringCall::strip},
                                    {"split", &StringCall::split},
                                    {"rsplit", &StringCall::split},
                                    {"splitlines", &StringCall::split_lines_of},
                                    {"partition", &StringCall::partition},
                                    {"rpartition", &StringCall::partition},
                                    {"startswith", &StringCall::starts_or_ends},
                                    {"endswith", &StringCall::starts_or_ends},
                                    {"find", &StringCall::search},
                                    {"rfind", &StringCall::search},
                                    {"index", &StringCall::search},
                                    {"rindex", &StringCall::search},
                                    {"count", &StringCall::search},
                                    {"replace", &StringCall::replace},
                                    {"join", &StringCall::join},
                                    {"removeprefix", &StringCall::remove_affix},
                                    {"removesuffix", &StringCall::remove_affix},
                                    {"center", &StringCall::pad},
                                    {"ljust", &StringCall::pad},
                                    {"rjust", &StringCall::pad},
                                    {"zfill", &StringCall::pad},
                                    {"upper", &StringCall::change_case},
                                    {"lower", &StringCall::change_case},
                                    {"title", &StringCall::change_case},
                                    {"capitalize", &StringCall::change_case},
                                    {"swapcase", &StringCall::change_case},
                                    {"isascii", &StringCall::classify},
                                    {"isprintable", &StringCall::classify},
                                    {"isalpha", &StringCall::classify},
                                    {"isdigit", &StringCall::classify},
                                    {"isdecimal", &StringCall::classify},
                                    {"isnumeric", &StringCall::classify},
                                    {"isspace", &StringCall::classify},
                                    {"isalnum", &StringCall::classify},
                                    {"islower", &StringCall::classify},
                                    {"isupper", &StringCall::classify},
                                    {"istitle", &StringCall::classify},
                                    {"format", nullptr},
                                    {"format_map", nullptr},
                                    {"encode", nullptr},
                                    {"casefold", nullptr},
                                    {"expandtabs", nullptr},
                                    {"isidentifier", nullptr},
                                    {"maketrans", nullptr},
                                    {"translate", nullptr}};

const NamedMethod* find_method(std::string_view name) {
  const auto* it = std::find_if(std::begin(kMethods), std::end(kMethods),
                                [name](const auto& m) { return m.name == name; });
  return it == std::end(kMethods) ? nullptr : it;
}

}  // namespace

bool is_string_method(std::string_view name) { return find_method(name) != nullptr; }

Value call_string_method(Interpreter& interpreter, const Value& self, std::string_view name,
                         const Arguments& arguments) {
  Sandbox& sandbox = interpreter.sandbox();
  if (name == "format") return str_format(interpreter, self, arguments);
  if (name == "format_map") {
    const Bound bound(sandbox, name, arguments, {"mapping"}, 1);
    if (!bound[0].is(Kind::kDict)) sandbox.unsupported("format_map without a dict");
    Arguments keywords;
    for (const auto& [key, value] : bound[0].dict().entries) {
      sandbox.step();
      if (key.is_string()) keywords.keywords.emplace_back(key.str(), value);
    }
    return str_format(interpreter, self, keywords);
  }
  const NamedMethod* method = find_method(name);
  if (method == nullptr || method->method == nullptr) {
    sandbox.unsupported("the method '{}' of a string", name);
  }
  StringCall call(interpreter, self, method->name, arguments);
  return (call.*(method->method))();
}

}  // namespace pianola::jinja
