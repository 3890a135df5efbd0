#include <algorithm>
#include <cmath>
#include <cstdio>
#include <optional>

#include "base/utf8.h"
#include "tokenizer/jinja_format.h"
#include "tokenizer/jinja_text.h"

namespace pianola::jinja {
namespace {

constexpr int kMaxWidth = 1 << 20;
constexpr int kMaxPrecision = 1000;

std::string digits_of(std::uint64_t value, unsigned base, bool upper) {
  const char* digits = upper ? "0123456789ABCDEF" : "0123456789abcdef";
  std::string out;
  do {
    out += digits[value % base];
    value /= base;
  } while (value != 0);
  std::reverse(out.begin(), out.end());
  return out;
}

std::uint64_t magnitude(std::int64_t value) {
  return value < 0 ? ~static_cast<std::uint64_t>(value) + 1 : static_cast<std::uint64_t>(value);
}

// A decimal number at text[i]; advances i.
int read_number(const Sandbox& sandbox, std::string_view text, std::size_t& i, int limit) {
  int n = 0;
  while (i < text.size() && text[i] >= '0' && text[i] <= '9') {
    n = n * 10 + (text[i++] - '0');
    if (n > limit) sandbox.fail("a width or precision above {} in a format", limit);
  }
  return n;
}

std::string pad(std::string text, int width, char align, std::string_view fill) {
  const auto size = static_cast<int>(length(text));
  if (size >= width) return text;
  const int total = width - size;
  const int left = align == '<' ? 0 : align == '^' ? total / 2 : total;
  std::string out;
  for (int i = 0; i < left; ++i) out += fill;
  out += text;
  for (int i = left; i < total; ++i) out += fill;
  return out;
}

struct Spec {
  std::string fill = " ";
  char align = '\0';
  char sign = '-';
  bool alternate = false, zero = false;
  int width = 0;
  char grouping = '\0';
  std::optional<int> precision;
  char type = '\0';
};

Spec parse_spec(const Sandbox& sandbox, std::string_view text) {
  const auto is_align = [](char c) { return c == '<' || c == '>' || c == '=' || c == '^'; };
  Spec spec;
  std::size_t i = 0;
  if (!text.empty()) {
    const auto first = static_cast<std::size_t>(decode_utf8(text).length);
    if (first < text.size() && is_align(text[first])) {
      spec.fill = std::string(text.substr(0, first));
      spec.align = text[first];
      i = first + 1;
    } else if (is_align(text[0])) {
      spec.align = text[0];
      i = 1;
    }
  }
  const auto at = [&](char c) { return i < text.size() && text[i] == c; };
  if (at('+') || at('-') || at(' ')) spec.sign = text[i++];
  if (at('#')) {
    spec.alternate = true;
    ++i;
  }
  if (at('0')) {
    spec.zero = true;
    ++i;
  }
  spec.width = read_number(sandbox, text, i, kMaxWidth);
  if (at(',') || at('_')) spec.grouping = text[i++];
  if (at('.')) {
    ++i;
    const std::size_t start = i;
    spec.precision = read_number(sandbox, text, i, kMaxPrecision);
    if (i == start) sandbox.fail("Format specifier missing precision");
  }
  if (i < text.size()) spec.type = text[i++];
  if (i < text.size()) sandbox.fail("Invalid format specifier '{}'", text);
  return spec;
}

std::string group(const std::string& digits, char separator, std::size_t every) {
  const std::size_t whole =
      std::min(digits.find_first_not_of("0123456789abcdefABCDEF"), digits.size());
  std::string out;
  for (std::size_t i = 0; i < whole; ++i) {
    if (i != 0 && (whole - i) % every == 0) out += separator;
    out += digits[i];
  }
  return out + digits.substr(whole);
}

std::string finish_number(const Spec& spec, bool negative, const std::string& prefix,
                          std::string digits, std::size_t every) {
  if (spec.grouping != '\0') digits = group(digits, spec.grouping, every);
  std::string head = negative ? "-" : spec.sign == '-' ? "" : std::string(1, spec.sign);
  head += prefix;
  const bool fill_inside = spec.align == '=' || (spec.align == '\0' && spec.zero);
  if (fill_inside) {
    const std::string fill = spec.zero && spec.align == '\0' ? "0" : spec.fill;
    return head + pad(digits, spec.width - static_cast<int>(head.size()), '>', fill);
  }
  const std::string fill = spec.zero && spec.fill == " " ? "0" : spec.fill;
  return pad(head + digits, spec.width, spec.align == '\0' ? '>' : spec.align, fill);
}

std::string format_integer(const Sandbox& sandbox, std::int64_t value, const Spec& spec) {
  if (spec.precision) sandbox.fail("Precision not allowed in integer format specifier");
  if (spec.type == 'c') sandbox.unsupported("the format type 'c'");
  const char type = spec.type == '\0' || spec.type == 'n' ? 'd' : spec.type;
  const unsigned base = type == 'b' ? 2 : type == 'o' ? 8 : type == 'd' ? 10 : 16;
  const std::string prefix =
      spec.alternate && type != 'd' ? fmt::format("0{}", type) : std::string();
  return finish_number(spec, value < 0, prefix, digits_of(magnitude(value), base, type == 'X'),
                       base == 10 ? 3 : 4);
}

// %g that always shows a point or an exponent: what a float without a type but with a precision is.
std::string general_with_point(double value, int precision) {
  std::string digits = format_double(value, 'g', precision, false);
  if (digits.find_first_of(".en") != std::string::npos) return digits;
  if (static_cast<int>(digits.size()) < precision) return digits + ".0";
  digits = format_double(value, 'e', precision - 1, false);
  const std::size_t exponent = digits.find('e');
  std::size_t end = exponent;
  if (digits.find('.') != std::string::npos) {
    while (digits[end - 1] == '0') --end;
    if (digits[end - 1] == '.') --end;
  }
  return digits.substr(0, end) + digits.substr(exponent);
}

std::string format_float(double value, const Spec& spec) {
  const bool negative = std::signbit(value) && !std::isnan(value);
  const double size = std::fabs(value);
  std::string digits;
  if (spec.type == '\0' && !spec.precision) {
    digits = float_repr(size);
  } else if (spec.type == '\0') {
    digits = general_with_point(size, std::max(1, *spec.precision));
  } else if (spec.type == '%') {
    digits = format_double(size * 100, 'f', spec.precision.value_or(6), spec.alternate) + "%";
  } else {
    digits = format_double(size, spec.type == 'n' ? 'g' : spec.type, spec.precision.value_or(6),
                           spec.alternate);
  }
  return finish_number(spec, negative, "", digits, 3);
}

// One conversion of the % operator: the text between '%' and its type.
struct Conversion {
  bool left = false, plus = false, space = false, alternate = false, zero = false;
  int width = 0;
  std::optional<int> precision;
};

class PercentFormatter {
 public:
  PercentFormatter(Sandbox& sandbox, const Value& format, const Value& arguments)
      : sandbox_(sandbox),
        format_(format.str()),
        markup_(format.as_text().markup),
        arguments_(arguments) {}

  Value run() {
    std::size_t i = 0;
    while (i < format_.size()) {
      const std::size_t mark = std::min(format_.find('%', i), format_.size());
      out_ += format_.substr(i, mark - i);
      i = mark;
      if (i < format_.size()) convert(++i);
      sandbox_.step();
      sandbox_.reserve(out_.size());
    }
    const bool tuple = arguments_.is(Kind::kTuple);
    const bool subscripted = arguments_.is(Kind::kDict) || arguments_.is(Kind::kList) ||
                             arguments_.is(Kind::kRange) || arguments_.is_undefined();
    const bool all_used =
        tuple ? used_ >= arguments_.items().size() : used_ >= 1 || named_ || subscripted;
    if (!all_used) sandbox_.fail("not all arguments converted during string formatting");
    return sandbox_.string(std::move(out_), markup_);
  }

 private:
  const Value& next_argument() {
    const bool tuple = arguments_.is(Kind::kTuple);
    if (used_ >= (tuple ? arguments_.items().size() : 1)) {
      sandbox_.fail("not enough arguments for format string");
    }
    ++used_;
    return tuple ? arguments_.items()[used_ - 1] : arguments_;
  }

  int number_or_star(std::size_t& i, int limit) {
    if (i >= format_.size() || format_[i] != '*') return read_number(sandbox_, format_, i, limit);
    ++i;
    const Value& value = next_argument();
    if (!value.is_integral()) sandbox_.fail("* wants int");
    if (value.as_int() > limit || value.as_int() < -limit) {
      sandbox_.fail("a width or precision above {} in a format", limit);
    }
    return static_cast<int>(value.as_int());
  }

  void convert(std::size_t& i) {
    Conversion c;
    std::optional<Value> named;
    if (i < format_.size() && format_[i] == '(') {
      const std::size_t end = format_.find(')', i);
      if (end == std::string::npos) sandbox_.fail("incomplete format key");
      if (!arguments_.is(Kind::kDict)) sandbox_.fail("format requires a mapping");
      const std::string key(format_.substr(i + 1, end - i - 1));
      const Value* found = arguments_.dict().find(key);
      if (found == nullptr) sandbox_.fail("{}", quote(key));
      named = *found;
      named_ = true;
      i = end + 1;
    }
    for (; i < format_.size(); ++i) {
      const char f = format_[i];
      if (f == '-')
        c.left = true;
      else if (f == '+')
        c.plus = true;
      else if (f == ' ')
        c.space = true;
      else if (f == '#')
        c.alternate = true;
      else if (f == '0')
        c.zero = true;
      else
        break;
    }
    c.width = number_or_star(i, kMaxWidth);
    if (c.width < 0) {
      c.left = true;
      c.width = -c.width;
    }
    if (i < format_.size() && format_[i] == '.') {
      ++i;
      c.precision = std::max(0, number_or_star(i, kMaxPrecision));
    }
    while (i < format_.size() && (format_[i] == 'l' || format_[i] == 'h' || format_[i] == 'L')) ++i;
    if (i >= format_.size()) sandbox_.fail("incomplete format");
    const char type = format_[i++];
    if (type == '%') {
      out_ += '%';
      return;
    }
    const Value value = named ? *named : next_argument();
    one(c, type, value);
  }

  void one(const Conversion& c, char type, const Value& value) {
    std::string head;
    std::string body;
    bool numeric = true;
    switch (type) {
      case 's':
      case 'r':
      case 'a': {
        if (type == 'a') sandbox_.unsupported("the conversion %a");
        numeric = false;
        body = type == 's' ? to_str(sandbox_, value).str() : repr(sandbox_, value);
        if (markup_ && !(value.is_string() && value.as_text().markup)) body = escape_html(body);
        if (c.precision) body.resize(byte_offset(body, static_cast<std::size_t>(*c.precision)));
        break;
      }
      case 'c':
        numeric = false;
        if (value.is_string() && length(value.str()) == 1) {
          body = value.str();
        } else if (value.is_integral() && value.as_int() >= 0 && value.as_int() < 0x110000 &&
                   (value.as_int() < 0xD800 || value.as_int() > 0xDFFF)) {
          append_utf8(body, static_cast<char32_t>(value.as_int()));
        } else {
          sandbox_.fail("%c requires int or char");
        }
        break;
      case 'd':
      case 'i':
      case 'u':
      case 'x':
      case 'X':
      case 'o':
        integer(c, type, value, head, body);
        break;
      case 'e':
      case 'E':
      case 'f':
      case 'F':
      case 'g':
      case 'G': {
        if (value.is_undefined()) fail_undefined(sandbox_, value);
        if (!value.is_number()) sandbox_.fail("must be real number, not {}", type_name(value));
        const double number = value.as_double();
        if (std::signbit(number) && !std::isnan(number)) head = "-";
        body = format_double(std::fabs(number), type, c.precision.value_or(6), c.alternate);
        break;
      }
      default:
        sandbox_.fail("unsupported format character '{}'", type);
    }
    if (numeric && head.empty() && (c.plus || c.space)) head.assign(1, c.plus ? '+' : ' ');
    if (numeric && c.zero && !c.left) {
      out_ += head + pad(body, c.width - static_cast<int>(head.size()), '>', "0");
    } else {
      out_ += pad(head + body, c.width, c.left ? '<' : '>', " ");
    }
  }

  void integer(const Conversion& c, char type, const Value& value, std::string& head,
               std::string& body) {
    if (value.is_undefined()) fail_undefined(sandbox_, value);
    const bool decimal = type == 'd' || type == 'i' || type == 'u';
    if (!value.is_number() || (!decimal && !value.is_integral())) {
      sandbox_.fail("%{} format: a{} is required, not {}", type,
                    decimal ? " real number" : "n integer", type_name(value));
    }
    std::int64_t number = value.is_integral() ? value.as_int() : 0;
    if (value.is(Kind::kFloat)) {
      if (!(std::fabs(value.as_double()) < 9.2e18))
        sandbox_.fail("cannot convert float to integer");
      number = static_cast<std::int64_t>(value.as_double());
    }
    if (number < 0) head = "-";
    const unsigned base = decimal ? 10 : type == 'o' ? 8 : 16;
    body = digits_of(magnitude(number), base, type == 'X');
    if (c.precision) body = pad(body, *c.precision, '>', "0");
    if (c.alternate && !decimal) head.append(1, '0').append(1, type);
  }

  Sandbox& sandbox_;
  std::string_view format_;
  bool markup_;
  const Value& arguments_;
  std::size_t used_ = 0;
  bool named_ = false;
  std::string out_;
};

}  // namespace

std::string format_double(double value, char type, int precision, bool alternate) {
  const bool upper = type >= 'A' && type <= 'Z';
  if (!std::isfinite(value)) {
    const std::string text = std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
    return upper ? to_upper(text) : text;
  }
  const char format[] = {'%',
                         alternate ? '#' : '.',
                         alternate ? '.' : '*',
                         alternate ? '*' : type,
                         alternate ? type : '\0',
                         '\0'};
  const int size = std::snprintf(nullptr, 0, format, precision, value);
  std::string out(static_cast<std::size_t>(size) + 1, '\0');
  std::snprintf(out.data(), out.size(), format, precision, value);
  out.pop_back();
  return out;
}

Value percent_format(Sandbox& sandbox, const Value& format, const Value& arguments) {
  return PercentFormatter(sandbox, format, arguments).run();
}

std::string format_value(Sandbox& sandbox, const Value& value, std::string_view text) {
  if (text.empty()) return to_str(sandbox, value).str();
  const Spec spec = parse_spec(sandbox, text);
  static constexpr std::string_view kIntegerTypes = "bcdoxXn";
  static constexpr std::string_view kFloatTypes = "eEfFgGn%";
  const bool integer_type = spec.type == '\0' || kIntegerTypes.find(spec.type) != std::string::npos;
  const bool float_type = spec.type == '\0' || kFloatTypes.find(spec.type) != std::string::npos;
  if (value.is_integral() && integer_type) {
    // A bool without a type formats as its number, as Python's int.__format__ does.
    return format_integer(sandbox, value.as_int(), spec);
  }
  if (value.is_number() && float_type) return format_float(value.as_double(), spec);
  if (value.is_string() && (spec.type == '\0' || spec.type == 's')) {
    if (spec.align == '=') sandbox.fail("'=' alignment not allowed in string format specifier");
    if (spec.sign != '-') sandbox.fail("Sign not allowed in string format specifier");
    std::string body = value.str();
    if (spec.precision) body.resize(byte_offset(body, static_cast<std::size_t>(*spec.precision)));
    const std::string fill = spec.zero && spec.fill == " " ? "0" : spec.fill;
    return pad(body, spec.width, spec.align == '\0' ? '<' : spec.align, fill);
  }
  if (value.is_string() || value.is_number()) {
    sandbox.fail("Unknown format code '{}' for object of type '{}'", spec.type, type_name(value));
  }
  sandbox.fail("unsupported format string passed to {}.__format__", type_name(value));
}

}  // namespace pianola::jinja
