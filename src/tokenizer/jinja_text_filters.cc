#include <algorithm>

#include "tokenizer/jinja_format.h"
#include "tokenizer/jinja_interpreter.h"
#include "tokenizer/jinja_text.h"

namespace pianola::jinja {
namespace {

// soft_str: what is a string stays (also as markup), anything else is printed.
Value soft(Interpreter& in, const Value& value) { return to_str(in.sandbox(), value); }

Value method(Interpreter& in, const Value& value, std::string_view name,
             std::vector<Value> positional = {}) {
  return call_string_method(in, soft(in, value), name, {std::move(positional), {}});
}

// A filter that works on str only, where Python's own operation would fail.
const std::string& need_text(Interpreter& in, const Value& value, std::string_view filter) {
  if (value.is_undefined()) fail_undefined(in.sandbox(), value);
  if (!value.is_string()) {
    in.sandbox().fail("filter '{}' needs a str, not {}", filter, type_name(value));
  }
  in.sandbox().scan(value.str().size());
  return value.str();
}

Value upper(Interpreter& in, const Value& value, Arguments& arguments) {
  const Bound bound(in.sandbox(), "upper", arguments, {});
  return method(in, value, "upper");
}

Value lower(Interpreter& in, const Value& value, Arguments& arguments) {
  const Bound bound(in.sandbox(), "lower", arguments, {});
  return method(in, value, "lower");
}

Value capitalize_filter(Interpreter& in, const Value& value, Arguments& arguments) {
  const Bound bound(in.sandbox(), "capitalize", arguments, {});
  return method(in, value, "capitalize");
}

Value title(Interpreter& in, const Value& value, Arguments& arguments) {
  const Bound bound(in.sandbox(), "title", arguments, {});
  const Value text = soft(in, value);
  in.sandbox().scan(text.str().size());
  const std::u32string wide = to_utf32(text.str());
  const auto separates = [](char32_t c) {
    return is_space(c) || c == '-' || c == '(' || c == '{' || c == '[' || c == '<';
  };
  std::string out;
  for (std::size_t i = 0; i < wide.size();) {
    std::size_t end = i;
    while (end < wide.size() && separates(wide[end]) == separates(wide[i])) ++end;
    const std::u32string_view part = std::u32string_view(wide).substr(i, end - i);
    out += to_upper(to_utf8(part.substr(0, 1))) + to_lower(to_utf8(part.substr(1)));
    i = end;
  }
  return in.sandbox().string(std::move(out));
}

Value trim(Interpreter& in, const Value& value, Arguments& arguments) {
  const Bound bound(in.sandbox(), "trim", arguments, {"chars"});
  return method(in, value, "strip", {bound.value_or(0, Value::none())});
}

Value string(Interpreter& in, const Value& value, Arguments& arguments) {
  const Bound bound(in.sandbox(), "string", arguments, {});
  return soft(in, value);
}

Value replace(Interpreter& in, const Value& value, Arguments& arguments) {
  Sandbox& sandbox = in.sandbox();
  const Bound bound(sandbox, "replace", arguments, {"old", "new", "count"}, 2);
  const std::string text = soft(in, value).str();
  const std::string old_part = soft(in, bound[0]).str();
  const std::string new_part = soft(in, bound[1]).str();
  const std::int64_t count = bound.integer(2, -1);
  sandbox.scan(2 * text.size());  // counted, then replaced
  sandbox.reserve(replaced_size(text, old_part, new_part, count));
  return sandbox.string(replace_all(text, old_part, new_part, count));
}

Value indent(Interpreter& in, const Value& value, Arguments& arguments) {
  Sandbox& sandbox = in.sandbox();
  const Bound bound(sandbox, "indent", arguments, {"width", "first", "blank"});
  std::string text = need_text(in, value, "indent");
  text += '\n';
  std::string indention;
  if (bound.has(0) && bound[0].is_string()) {
    indention = bound[0].str();
  } else {
    const std::int64_t width = std::max<std::int64_t>(0, bound.integer(0, 4));
    sandbox.reserve(static_cast<std::size_t>(width));
    indention.assign(static_cast<std::size_t>(width), ' ');
  }
  const std::vector<std::string_view> lines = split_lines(text, false);
  std::string out;
  for (std::size_t i = 0; i < lines.size(); ++i) {
    if (i != 0) out += '\n';
    const bool indented = i == 0 ? bound.truth(1) : bound.truth(2) || !lines[i].empty();
    if (indented) out += indention;
    out += lines[i];
    sandbox.copy(indention.size());
    sandbox.reserve(out.size());
  }
  return sandbox.string(std::move(out), value.as_text().markup);
}

Value center(Interpreter& in, const Value& value, Arguments& arguments) {
  const Bound bound(in.sandbox(), "center", arguments, {"width"});
  return method(in, value, "center", {bound.value_or(0, Value::integer(80))});
}

Value truncate(Interpreter& in, const Value& value, Arguments& arguments) {
  Sandbox& sandbox = in.sandbox();
  const Bound bound(sandbox, "truncate", arguments, {"length", "killwords", "end", "leeway"});
  const std::string& text = need_text(in, value, "truncate");
  const std::int64_t limit = bound.integer(0, 255);
  const std::string end = bound.has(2) ? bound.text(2) : "...";
  const std::int64_t leeway = bound.integer(3, 5);
  const auto end_size = static_cast<std::int64_t>(length(end));
  if (limit < end_size) sandbox.fail("expected length >= {}, got {}", end_size, limit);
  if (leeway < 0) sandbox.fail("expected leeway >= 0, got {}", leeway);
  if (static_cast<std::int64_t>(length(text)) - leeway <= limit) return value;
  std::string_view head = std::string_view(text).substr(
      0, byte_offset(text, static_cast<std::size_t>(limit - end_size)));
  if (!bound.truth(1)) head = rsplit_at(head, " ", 1)[0];
  return sandbox.string(std::string(head) + end, value.as_text().markup);
}

Value word_count(Interpreter& in, const Value& value, Arguments& arguments) {
  const Bound bound(in.sandbox(), "wordcount", arguments, {});
  const Value text = soft(in, value);
  in.sandbox().scan(text.str().size());
  std::int64_t words = 0;
  bool inside = false;
  for (const char32_t c : to_utf32(text.str())) {
    const bool word = is_word(c);
    words += word && !inside ? 1 : 0;
    inside = word;
  }
  return Value::integer(words);
}

Value format(Interpreter& in, const Value& value, Arguments& arguments) {
  Sandbox& sandbox = in.sandbox();
  if (!arguments.positional.empty() && !arguments.keywords.empty()) {
    sandbox.fail("can't handle positional and keyword arguments at the same time");
  }
  const Value text = soft(in, value);
  if (arguments.keywords.empty()) {
    return percent_format(sandbox, text, sandbox.tuple(arguments.positional));
  }
  DictObject& dict = sandbox.dict();
  for (auto& [name, item] : arguments.keywords) sandbox.set(dict, sandbox.string(name), item);
  return percent_format(sandbox, text, Value::object(&dict));
}

Value escape(Interpreter& in, const Value& value, Arguments& arguments) {
  const Bound bound(in.sandbox(), "escape", arguments, {});
  Value text = soft(in, value);
  if (text.as_text().markup) return text;
  in.sandbox().scan(text.str().size());
  return in.sandbox().string(escape_html(text.str()), true);
}

Value force_escape(Interpreter& in, const Value& value, Arguments& arguments) {
  const Bound bound(in.sandbox(), "forceescape", arguments, {});
  return in.sandbox().string(escape_html(soft(in, value).str()), true);
}

Value safe(Interpreter& in, const Value& value, Arguments& arguments) {
  const Bound bound(in.sandbox(), "safe", arguments, {});
  const Value text = soft(in, value);
  return text.as_text().markup ? text : in.sandbox().string(text.str(), true);
}

JsonStyle json_style(Sandbox& sandbox, const Bound& bound) {
  JsonStyle style;
  style.ensure_ascii = bound.truth(0);
  style.sort_keys = bound.truth(3);
  if (bound.has(1) && !bound[1].is(Kind::kNone)) {
    style.has_indent = true;
    style.item_separator = std::string(1, ',');
    if (bound[1].is_string()) {
      style.indent = bound[1].str();
    } else {
      const std::int64_t width = std::max<std::int64_t>(0, bound.integer(1, 0));
      sandbox.reserve(static_cast<std::size_t>(width));
      style.indent.assign(static_cast<std::size_t>(width), ' ');
    }
  }
  if (bound.has(2) && !bound[2].is(Kind::kNone)) {
    const std::vector<Value> parts = to_vector(sandbox, bound[2]);
    if (parts.size() != 2 || !parts[0].is_string() || !parts[1].is_string()) {
      sandbox.fail("tojson: separators must be two strings");
    }
    style.item_separator = parts[0].str();
    style.key_separator = parts[1].str();
  }
  return style;
}

Value to_json_filter(Interpreter& in, const Value& value, Arguments& arguments) {
  Sandbox& sandbox = in.sandbox();
  const Bound bound(sandbox, "tojson", arguments,
                    {"ensure_ascii", "indent", "separators", "sort_keys"});
  return sandbox.string(to_json(sandbox, value, json_style(sandbox, bound)));
}

}  // namespace

const std::vector<NamedFilter>& text_filters() {
  static const std::vector<NamedFilter> filters = {{"upper", upper},
                                                   {"lower", lower},
                                                   {"capitalize", capitalize_filter},
                                                   {"title", title},
                                                   {"trim", trim},
                                                   {"string", string},
                                                   {"replace", replace},
                                                   {"indent", indent},
                                                   {"center", center},
                                                   {"truncate", truncate},
                                                   {"wordcount", word_count},
                                                   {"format", format},
                                                   {"e", escape},
                                                   {"escape", escape},
                                                   {"forceescape", force_escape},
                                                   {"safe", safe},
                                                   {"tojson", to_json_filter}};
  return filters;
}

}  // namespace pianola::jinja
