#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

#include "tokenizer/jinja_format.h"
#include "tokenizer/jinja_interpreter.h"
#include "tokenizer/jinja_text.h"

namespace pianola::jinja {
namespace {

int digit_of(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if ((c | 0x20) >= 'a' && (c | 0x20) <= 'z') return (c | 0x20) - 'a' + 10;
  return 99;
}

// Python's int(text, base); false where it raises ValueError.
bool parse_int(Sandbox& sandbox, std::string_view text, std::int64_t base, std::int64_t& out) {
  text = strip_space(text, 3);
  const bool negative = text.starts_with('-');
  if (negative || text.starts_with('+')) text.remove_prefix(1);
  if (base != 0 && (base < 2 || base > 36)) return false;
  if (text.size() > 2 && text[0] == '0') {
    const char mark = static_cast<char>(text[1] | 0x20);
    const std::int64_t marked = mark == 'x' ? 16 : mark == 'o' ? 8 : mark == 'b' ? 2 : 0;
    if (marked != 0 && (base == marked || base == 0)) {
      base = marked;
      text.remove_prefix(2);
      if (text.starts_with('_')) text.remove_prefix(1);
    }
  }
  const bool from_literal = base == 0;
  if (from_literal) base = 10;
  if (text.empty() || text.front() == '_' || text.back() == '_') return false;
  std::int64_t value = 0;
  bool overflow = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '_' && text[i - 1] != '_') continue;
    const int digit = digit_of(text[i]);
    if (digit >= base) return false;
    overflow = overflow || __builtin_mul_overflow(value, base, &value) ||
               __builtin_add_overflow(value, std::int64_t{digit}, &value);
  }
  if (overflow) sandbox.fail("integer overflow: {} does not fit in 64 bits", text.substr(0, 40));
  if (from_literal && text.size() > 1 && text[0] == '0' && value != 0) return false;
  out = negative ? -value : value;
  return true;
}

// Python's float(text); false where it raises ValueError.
bool parse_float(std::string_view text, double& out) {
  text = strip_space(text, 3);
  std::string digits;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto is_digit_at = [&](std::size_t j) {
      return j < text.size() && text[j] >= '0' && text[j] <= '9';
    };
    if (text[i] == '_') {
      if (i == 0 || !is_digit_at(i - 1) || !is_digit_at(i + 1)) return false;
      continue;
    }
    digits += text[i];
  }
  std::string_view body = digits;
  const bool negative = body.starts_with('-');
  if (negative || body.starts_with('+')) body.remove_prefix(1);
  if (body.empty() || body[0] == '-') return false;
  const std::string lower = to_lower(body);
  const double sign = negative ? -1.0 : 1.0;
  if (lower == "inf" || lower == "infinity") {
    out = sign * std::numeric_limits<double>::infinity();
    return true;
  }
  if (lower == "nan") {
    out = std::numeric_limits<double>::quiet_NaN();
    return true;
  }
  if (lower[0] == 'i' || lower[0] == 'n') return false;
  double value = 0;
  const char* begin = body.data();
  const char* end = begin + body.size();
  const auto result = std::from_chars(begin, end, value);
  if (result.ptr != end || result.ec == std::errc::invalid_argument) return false;
  if (result.ec == std::errc::result_out_of_range) value = std::strtod(digits.c_str(), nullptr);
  out = result.ec == std::errc::result_out_of_range ? value : sign * value;
  return true;
}

std::int64_t truncated(Sandbox& sandbox, double value) {
  if (std::isnan(value)) sandbox.fail("cannot convert float NaN to integer");
  if (std::isinf(value)) sandbox.fail("cannot convert float infinity to integer");
  if (!(std::fabs(value) < 9223372036854775807.0)) {
    sandbox.fail("integer overflow: {} does not fit in 64 bits", value);
  }
  return static_cast<std::int64_t>(value);
}

Value int_filter(Interpreter& in, const Value& value, Arguments& arguments) {
  Sandbox& sandbox = in.sandbox();
  const Bound bound(sandbox, "int", arguments, {"default", "base"});
  if (value.is_undefined()) fail_undefined(sandbox, value);
  Value otherwise = bound.value_or(0, Value::integer(0));
  if (value.is_integral()) return Value::integer(value.as_int());
  if (value.is(Kind::kFloat)) {
    // NaN is a ValueError, which gives the default; infinity an OverflowError, which is raised.
    if (std::isnan(value.as_double())) return otherwise;
    return Value::integer(truncated(sandbox, value.as_double()));
  }
  if (!value.is_string()) return otherwise;
  sandbox.copy(value.str().size());
  std::int64_t number = 0;
  if (parse_int(sandbox, value.str(), bound.integer(1, 10), number)) return Value::integer(number);
  double real = 0;
  if (!parse_float(value.str(), real) || !std::isfinite(real)) return otherwise;
  return Value::integer(truncated(sandbox, real));
}

Value float_filter(Interpreter& in, const Value& value, Arguments& arguments) {
  Sandbox& sandbox = in.sandbox();
  const Bound bound(sandbox, "float", arguments, {"default"});
  if (value.is_undefined()) fail_undefined(sandbox, value);
  if (value.is_number()) return Value::real(value.as_double());
  double real = 0;
  if (value.is_string() && parse_float(value.str(), real)) return Value::real(real);
  return bound.value_or(0, Value::real(0));
}

Value abs_filter(Interpreter& in, const Value& value, Arguments& arguments) {
  Sandbox& sandbox = in.sandbox();
  const Bound bound(sandbox, "abs", arguments, {});
  if (value.is(Kind::kFloat)) return Value::real(std::fabs(value.as_double()));
  if (!value.is_integral()) sandbox.fail("bad operand type for abs(): '{}'", type_name(value));
  return value.as_int() < 0 ? negative(sandbox, value) : Value::integer(value.as_int());
}

// Python's round(value, digits), which rounds the exact binary value half to even.
double round_double(double value, std::int64_t digits) {
  if (!std::isfinite(value) || digits > 323) return value;
  if (digits >= 0) {
    const std::string text = format_double(value, 'f', static_cast<int>(digits), false);
    return std::strtod(text.c_str(), nullptr);
  }
  if (digits < -308) return std::copysign(0.0, value);
  const double unit = std::pow(10.0, static_cast<double>(-digits));
  return std::nearbyint(value / unit) * unit;
}

Value round_int(Sandbox& sandbox, std::int64_t value, std::int64_t digits) {
  if (digits >= 0) return Value::integer(value);
  if (digits < -18) return Value::integer(0);
  std::int64_t unit = 1;
  for (std::int64_t i = 0; i < -digits; ++i) unit *= 10;
  std::int64_t rest = value % unit;
  if (rest < 0) rest += unit;
  std::int64_t down = 0;
  if (__builtin_sub_overflow(value, rest, &down)) sandbox.fail("integer overflow");
  const bool up = rest > unit / 2 || (rest == unit / 2 && (down / unit) % 2 != 0);
  if (up && __builtin_add_overflow(down, unit, &down)) sandbox.fail("integer overflow");
  return Value::integer(down);
}

Value round_filter(Interpreter& in, const Value& value, Arguments& arguments) {
  Sandbox& sandbox = in.sandbox();
  const Bound bound(sandbox, "round", arguments, {"precision", "method"});
  const std::int64_t digits = bound.integer(0, 0);
  const std::string method = bound.has(1) ? bound.text(1) : "common";
  if (method != "common" && method != "ceil" && method != "floor") {
    sandbox.fail("method must be common, ceil or floor");
  }
  if (value.is_undefined()) fail_undefined(sandbox, value);
  if (!value.is_number()) {
    sandbox.fail("type {} doesn't define __round__ method", type_name(value));
  }
  if (method == "common") {
    if (value.is_integral()) return round_int(sandbox, value.as_int(), digits);
    return Value::real(round_double(value.as_double(), digits));
  }
  const Value power = binary(sandbox, BinaryOp::kPow, Value::integer(10), Value::integer(digits));
  const Value scaled = binary(sandbox, BinaryOp::kMul, value, power);
  const double whole =
      method == "ceil" ? std::ceil(scaled.as_double()) : std::floor(scaled.as_double());
  const Value integer = scaled.is_integral() ? scaled : Value::integer(truncated(sandbox, whole));
  return binary(sandbox, BinaryOp::kDiv, integer, power);
}

// Filters of Jinja that no chat template has a use for.
template <const char* name>
Value refused(Interpreter& in, const Value& /*value*/, Arguments& /*arguments*/) {
  in.sandbox().unsupported("the filter '{}'", name);
}

constexpr char kFileSize[] = "filesizeformat";
constexpr char kPprint[] = "pprint";
constexpr char kRandom[] = "random";
constexpr char kStripTags[] = "striptags";
constexpr char kUrlEncode[] = "urlencode";
constexpr char kUrlize[] = "urlize";
constexpr char kWordWrap[] = "wordwrap";
constexpr char kXmlAttr[] = "xmlattr";

}  // namespace

const std::vector<NamedFilter>& number_filters() {
  static const std::vector<NamedFilter> filters = {{"int", int_filter},
                                                   {"float", float_filter},
                                                   {"abs", abs_filter},
                                                   {"round", round_filter},
                                                   {kFileSize, refused<kFileSize>},
                                                   {kPprint, refused<kPprint>},
                                                   {kRandom, refused<kRandom>},
                                                   {kStripTags, refused<kStripTags>},
                                                   {kUrlEncode, refused<kUrlEncode>},
                                                   {kUrlize, refused<kUrlize>},
                                                   {kWordWrap, refused<kWordWrap>},
                                                   {kXmlAttr, refused<kXmlAttr>}};
  return filters;
}

}  // namespace pianola::jinja
