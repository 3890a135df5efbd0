#include "tokenizer/jinja_format.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/utf8.h"
#include "tokenizer/jinja_text.h"

namespace pianola::jinja {
namespace {

// Cycles are possible through namespaces only, and only they need this bound.
constexpr std::uint32_t kMaxReprDepth = 2 * Sandbox::kMaxDepth;

class Writer {
 public:
  explicit Writer(Sandbox& sandbox) : sandbox_(sandbox) {}

  std::string take() { return std::move(out_); }

  void repr(const Value& value, std::uint32_t depth) {
    sandbox_.step();
    sandbox_.reserve(out_.size());
    if (depth > kMaxReprDepth) sandbox_.fail("values nested deeper than {}", kMaxReprDepth);
    switch (value.kind()) {
      case Kind::kMissing:
      case Kind::kUndefined:
        out_ += "Undefined";
        return;
      case Kind::kNone:
        out_ += "None";
        return;
      case Kind::kBool:
        out_ += value.as_bool() ? "True" : "False";
        return;
      case Kind::kInt:
        out_ += std::to_string(value.as_int());
        return;
      case Kind::kFloat:
        out_ += float_repr(value.as_double());
        return;
      case Kind::kString:
        sandbox_.scan(value.str().size());
        out_ += value.as_text().markup ? "Markup(" + quote(value.str()) + ")" : quote(value.str());
        return;
      case Kind::kList:
        return items(value.items(), "[", "]", depth);
      case Kind::kTuple:
        return items(value.items(), "(", value.items().size() == 1 ? ",)" : ")", depth);
      case Kind::kDict:
        return dict(value.dict(), depth);
      case Kind::kView:
        out_ += type_name(value);
        out_ += '(';
        items(to_vector(sandbox_, value), "[", "]", depth);
        out_ += ')';
        return;
      case Kind::kRange: {
        const auto& range = value.as<RangeObject>();
        out_ += fmt::format("range({}, {}", range.start, range.stop);
        out_ += range.step == 1 ? ")" : fmt::format(", {})", range.step);
        return;
      }
      case Kind::kNamespace:
        out_ += "<Namespace ";
        dict(*value.as<NamespaceObject>().attributes, depth);
        out_ += '>';
        return;
      default:
        sandbox_.unsupported("printing a {} object", type_name(value));
    }
  }

 private:
  void items(const std::vector<Value>& values, const char* open, const char* close,
             std::uint32_t depth) {
    out_ += open;
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (i != 0) out_ += ", ";
      repr(values[i], depth + 1);
    }
    out_ += close;
  }

  void dict(const DictObject& object, std::uint32_t depth) {
    out_ += '{';
    bool first = true;
    for (const auto& [key, value] : object.entries) {
      if (!first) out_ += ", ";
      first = false;
      repr(key, depth + 1);
      out_ += ": ";
      repr(value, depth + 1);
    }
    out_ += '}';
  }

  Sandbox& sandbox_;
  std::string out_;
};

class JsonWriter {
 public:
  JsonWriter(Sandbox& sandbox, const JsonStyle& style) : sandbox_(sandbox), style_(style) {}

  std::string take() { return std::move(out_); }

  void write(const Value& value, std::size_t level) {
    sandbox_.step();
    sandbox_.reserve(out_.size());
    switch (value.kind()) {
      case Kind::kNone:
        out_ += "null";
        return;
      case Kind::kBool:
        out_ += value.as_bool() ? "true" : "false";
        return;
      case Kind::kInt:
        out_ += std::to_string(value.as_int());
        return;
      case Kind::kFloat:
        out_ += number(value.as_double());
        return;
      case Kind::kString:
        return string(value.str());
      case Kind::kList:
      case Kind::kTuple:
        return list(value.items(), level);
      case Kind::kDict:
        return dict(value.dict(), level);
      default:
        sandbox_.fail("Object of type {} is not JSON serializable", type_name(value));
    }
  }

 private:
  static std::string number(double value) {
    if (std::isnan(value)) return "NaN";
    if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
    return float_repr(value);
  }

  void line(std::size_t level) {
    if (!style_.has_indent) return;
    out_ += '\n';
    sandbox_.reserve(out_.size() + level * style_.indent.size());
    for (std::size_t i = 0; i < level; ++i) out_ += style_.indent;
  }

  void list(const std::vector<Value>& items, std::size_t level) {
    out_ += '[';
    for (std::size_t i = 0; i < items.size(); ++i) {
      if (i != 0) out_ += style_.item_separator;
      line(level + 1);
      write(items[i], level + 1);
    }
    if (!items.empty()) line(level);
    out_ += ']';
  }

  void dict(const DictObject& object, std::size_t level) {
    std::vector<std::pair<Value, Value>> sorted;
    if (style_.sort_keys) {
      sandbox_.reserve_items(2 * object.entries.size());
      sorted = object.entries;
      merge_sort(sorted,
                 [this](const auto& a, const auto& b) { return less(sandbox_, a.first, b.first); });
    }
    const auto& entries = style_.sort_keys ? sorted : object.entries;
    out_ += '{';
    bool first = true;
    for (const auto& [key, value] : entries) {
      if (!first) out_ += style_.item_separator;
      first = false;
      line(level + 1);
      write_key(key);
      out_ += style_.key_separator;
      write(value, level + 1);
    }
    if (!entries.empty()) line(level);
    out_ += '}';
  }

  void write_key(const Value& key) {
    switch (key.kind()) {
      case Kind::kString:
        return string(key.str());
      case Kind::kNone:
        return string("null");
      case Kind::kBool:
        return string(key.as_bool() ? "true" : "false");
      case Kind::kInt:
        return string(std::to_string(key.as_int()));
      case Kind::kFloat:
        return string(number(key.as_double()));
      default:
        sandbox_.fail("keys must be str, int, float, bool or None, not {}", type_name(key));
    }
  }

  void string(std::string_view text) {
    sandbox_.scan(text.size());
    out_ += '"';
    for (std::size_t i = 0; i < text.size();) {
      const auto byte = static_cast<unsigned char>(text[i]);
      if (byte < 0x80) {
        ascii(text[i]);
        ++i;
        continue;
      }
      const Utf8Char c = decode_utf8(text.substr(i));
      const auto size = static_cast<std::size_t>(c.length);
      if (style_.ensure_ascii) {
        escaped(static_cast<std::uint32_t>(c.code_point));
      } else {
        out_ += text.substr(i, size);
      }
      i += size;
    }
    out_ += '"';
  }

  void ascii(char c) {
    static constexpr std::string_view kFrom = "\"\\\n\r\t\f\b";
    static constexpr std::string_view kTo = "\"\\nrtfb";
    if (const std::size_t k = kFrom.find(c); k != std::string_view::npos) {
      out_ += '\\';
      out_ += kTo[k];
    } else if (static_cast<unsigned char>(c) < 0x20 || (c == 0x7F && style_.ensure_ascii)) {
      escaped(static_cast<unsigned char>(c));
    } else {
      out_ += c;
    }
  }

  void escaped(std::uint32_t code) {
    if (code >= 0x10000) {
      code -= 0x10000;
      out_ += fmt::format("\\u{:04x}\\u{:04x}", 0xD800 + (code >> 10), 0xDC00 + (code & 0x3FF));
    } else {
      out_ += fmt::format("\\u{:04x}", code);
    }
  }

  Sandbox& sandbox_;
  const JsonStyle& style_;
  std::string out_;
};

}  // namespace

// Shortest digits that read back the same, in exponent form below 1e-4 and from 1e16 on.
std::string float_repr(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  if (value == 0.0) return std::signbit(value) ? "-0.0" : "0.0";
  char buffer[400];
  const double size = std::fabs(value);
  if (size >= 1e16 || size < 1e-4) {
    const auto end = std::to_chars(buffer, std::end(buffer), value, std::chars_format::scientific);
    return {buffer, end.ptr};
  }
  const auto end = std::to_chars(buffer, std::end(buffer), value, std::chars_format::fixed);
  std::string text(buffer, end.ptr);
  if (text.find('.') == std::string::npos) text += ".0";
  return text;
}

std::string repr(Sandbox& sandbox, const Value& value) {
  Writer writer(sandbox);
  writer.repr(value, 0);
  return writer.take();
}

Value to_str(Sandbox& sandbox, const Value& value) {
  if (value.is_string()) return value;
  if (value.is_undefined()) return sandbox.string("");
  return sandbox.string(repr(sandbox, value));
}

std::string to_json(Sandbox& sandbox, const Value& value, const JsonStyle& style) {
  JsonWriter writer(sandbox, style);
  writer.write(value, 0);
  return writer.take();
}

}  // namespace pianola::jinja
