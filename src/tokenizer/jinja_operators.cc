#include "tokenizer/jinja_operators.h"

#include <algorithm>
#include <cmath>

#include "base/utf8.h"
#include "tokenizer/jinja_format.h"
#include "tokenizer/jinja_text.h"

namespace pianola::jinja {
namespace {

constexpr const char* kBinaryNames[] = {"+", "-", "*", "/", "//", "%", "** or pow()"};

[[noreturn]] void fail_overflow(const Sandbox& sandbox) {
  sandbox.fail("integer overflow: the result does not fit in 64 bits");
}

std::int64_t floor_div(std::int64_t a, std::int64_t b) {
  const std::int64_t q = a / b;
  return (a % b != 0 && (a < 0) != (b < 0)) ? q - 1 : q;
}

double float_mod(double a, double b) {
  double m = std::fmod(a, b);
  if (m != 0.0) {
    if ((b < 0) != (m < 0)) m += b;
  } else {
    m = std::copysign(0.0, b);
  }
  return m;
}

double float_floor_div(double a, double b) {
  const double m = std::fmod(a, b);
  double div = (a - m) / b;
  if (m != 0.0 && (b < 0) != (m < 0)) div -= 1.0;
  if (div == 0.0) return std::copysign(0.0, a / b);
  const double floored = std::floor(div);
  return div - floored > 0.5 ? floored + 1.0 : floored;
}

Value int_power(const Sandbox& sandbox, std::int64_t base, std::int64_t exponent) {
  if (exponent < 0) {
    if (base == 0) sandbox.fail("0.0 cannot be raised to a negative power");
    return Value::real(std::pow(static_cast<double>(base), static_cast<double>(exponent)));
  }
  if (base == 0 || base == 1) return Value::integer(exponent == 0 ? 1 : base);
  if (base == -1) return Value::integer(exponent % 2 == 0 ? 1 : -1);
  std::int64_t result = 1;
  for (std::int64_t i = 0; i < exponent; ++i) {
    if (__builtin_mul_overflow(result, base, &result)) fail_overflow(sandbox);
  }
  return Value::integer(result);
}

Value int_arithmetic(const Sandbox& sandbox, BinaryOp op, std::int64_t a, std::int64_t b) {
  std::int64_t r = 0;
  bool overflow = false;
  switch (op) {
    case BinaryOp::kAdd:
      overflow = __builtin_add_overflow(a, b, &r);
      break;
    case BinaryOp::kSub:
      overflow = __builtin_sub_overflow(a, b, &r);
      break;
    case BinaryOp::kMul:
      overflow = __builtin_mul_overflow(a, b, &r);
      break;
    case BinaryOp::kDiv:
      if (b == 0) sandbox.fail("division by zero");
      return Value::real(static_cast<double>(a) / static_cast<double>(b));
    case BinaryOp::kFloorDiv:
    case BinaryOp::kMod:
      if (b == 0) sandbox.fail("integer division or modulo by zero");
      if (b == -1) {
        overflow = op == BinaryOp::kFloorDiv && __builtin_sub_overflow(std::int64_t{0}, a, &r);
      } else {
        const std::int64_t q = floor_div(a, b);
        r = op == BinaryOp::kFloorDiv ? q : a - q * b;
      }
      break;
    case BinaryOp::kPow:
      return int_power(sandbox, a, b);
  }
  if (overflow) fail_overflow(sandbox);
  return Value::integer(r);
}

Value float_arithmetic(const Sandbox& sandbox, BinaryOp op, double a, double b) {
  switch (op) {
    case BinaryOp::kAdd:
      return Value::real(a + b);
    case BinaryOp::kSub:
      return Value::real(a - b);
    case BinaryOp::kMul:
      return Value::real(a * b);
    case BinaryOp::kDiv:
      if (b == 0.0) sandbox.fail("float division by zero");
      return Value::real(a / b);
    case BinaryOp::kFloorDiv:
      if (b == 0.0) sandbox.fail("float floor division by zero");
      return Value::real(float_floor_div(a, b));
    case BinaryOp::kMod:
      if (b == 0.0) sandbox.fail("float modulo");
      return Value::real(float_mod(a, b));
    case BinaryOp::kPow: {
      if (a == 0.0 && b < 0) sandbox.fail("0.0 cannot be raised to a negative power");
      if (a < 0 && std::isfinite(b) && b != std::floor(b)) sandbox.unsupported("a complex number");
      const double r = std::pow(a, b);
      if (std::isinf(r) && std::isfinite(a) && std::isfinite(b)) {
        sandbox.fail("(34, 'Numerical result out of range')");
      }
      return Value::real(r);
    }
  }
  return Value::real(0);
}

Value add_strings(Sandbox& sandbox, const Value& a, const Value& b) {
  const bool markup = a.as_text().markup || b.as_text().markup;
  const auto part = [&](const Value& v) {
    return markup && !v.as_text().markup ? escape_html(v.str()) : v.str();
  };
  sandbox.reserve(a.str().size() + b.str().size());
  return sandbox.string(markup ? part(a) + part(b) : a.str() + b.str(), markup);
}

Value repeat(Sandbox& sandbox, const Value& value, std::int64_t count) {
  count = std::max<std::int64_t>(count, 0);
  const std::size_t size = value.is_string() ? value.str().size() : value.items().size();
  const std::size_t unit = value.is_string() ? size : size * sizeof(Value);
  if (size == 0) count = 0;
  std::size_t total = 0;
  if (__builtin_mul_overflow(unit, static_cast<std::size_t>(count), &total)) total = SIZE_MAX;
  sandbox.reserve(total);
  sandbox.copy(total);
  if (value.is_string()) {
    std::string out;
    out.reserve(total);
    for (std::int64_t i = 0; i < count; ++i) out += value.str();
    return sandbox.string(std::move(out), value.as_text().markup);
  }
  std::vector<Value> items;
  items.reserve(size * static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    items.insert(items.end(), value.items().begin(), value.items().end());
  }
  return sandbox.sequence(value.kind(), std::move(items));
}

struct Bounds {
  std::int64_t start, step, count;
};

std::int64_t bound_of(const Sandbox& sandbox, const Value& value) {
  if (!value.is_integral()) {
    sandbox.fail("slice indices must be integers or None, not {}", type_name(value));
  }
  return value.as_int();
}

// slice.indices(length), and how many elements that is.
Bounds slice_bounds(const Sandbox& sandbox, const Value& start, const Value& stop,
                    const Value& step, std::int64_t size) {
  const auto absent = [](const Value& v) { return v.is(Kind::kMissing) || v.is(Kind::kNone); };
  Bounds b{0, absent(step) ? 1 : bound_of(sandbox, step), 0};
  if (b.step == 0) sandbox.fail("slice step cannot be zero");
  const std::int64_t low = b.step > 0 ? 0 : -1;
  const std::int64_t high = b.step > 0 ? size : size - 1;
  const auto clip = [&](std::int64_t i) {
    if (i < 0) i = i < -size ? -1 : i + size;
    return std::clamp(i, low, high);
  };
  b.start = absent(start) ? (b.step > 0 ? low : high) : clip(bound_of(sandbox, start));
  const std::int64_t end = absent(stop) ? (b.step > 0 ? high : low) : clip(bound_of(sandbox, stop));
  if (b.step > 0 && b.start < end) {
    b.count = (end - b.start - 1) / b.step + 1;
  } else if (b.step < 0 && b.start > end) {
    // The distance is at most the size, so a step below it gives one element.
    b.count = b.step < -size ? 1 : (b.start - end - 1) / -b.step + 1;
  }
  return b;
}

Value slice_string(Sandbox& sandbox, const Value& value, const Bounds& b) {
  const std::string& text = value.str();
  sandbox.copy(text.size());
  const bool markup = value.as_text().markup;
  if (b.count == 0) return sandbox.string("", markup);
  const bool ascii = value.as_text().ascii;
  if (b.step == 1) {
    const auto first = static_cast<std::size_t>(b.start);
    const auto count = static_cast<std::size_t>(b.count);
    const std::size_t from = ascii ? first : byte_offset(text, first);
    const std::string_view rest = std::string_view(text).substr(from);
    return sandbox.string(std::string(rest.substr(0, ascii ? count : byte_offset(rest, count))),
                          markup);
  }
  sandbox.scan(text.size());
  const std::u32string wide = to_utf32(text);
  std::u32string out;
  for (std::int64_t i = 0, at = b.start; i < b.count; ++i) {
    out += wide[static_cast<std::size_t>(at)];
    if (i + 1 < b.count) at += b.step;
  }
  return sandbox.string(to_utf8(out), markup);
}

}  // namespace

void fail_undefined(const Sandbox& sandbox, const Value& value) {
  const Text* message = value.undefined_message();
  sandbox.fail("{}", message == nullptr ? "a value is undefined" : message->bytes);
}

Value missing_attribute(Sandbox& sandbox, const Value& object, const Value& name) {
  std::string owner = object.is(Kind::kNone) ? "None" : fmt::format("{} object", type_name(object));
  if (name.is_string()) {
    return sandbox.undefined(fmt::format("'{}' has no attribute {}", owner, quote(name.str())));
  }
  return sandbox.undefined(fmt::format("{} has no element {}", owner, repr(sandbox, name)));
}

Value binary(Sandbox& sandbox, BinaryOp op, const Value& a, const Value& b) {
  if (a.is_integral() && b.is_integral()) {
    return int_arithmetic(sandbox, op, a.as_int(), b.as_int());
  }
  if (a.is_number() && b.is_number()) {
    return float_arithmetic(sandbox, op, a.as_double(), b.as_double());
  }
  if (op == BinaryOp::kMod && a.is_string()) return percent_format(sandbox, a, b);
  if (a.is_undefined()) fail_undefined(sandbox, a);
  if (b.is_undefined()) fail_undefined(sandbox, b);
  if (op == BinaryOp::kAdd) {
    if (a.is_string() && b.is_string()) return add_strings(sandbox, a, b);
    if (a.is_sequence() && a.kind() == b.kind()) {
      sandbox.reserve_items(a.items().size() + b.items().size());
      std::vector<Value> items = a.items();
      items.insert(items.end(), b.items().begin(), b.items().end());
      return sandbox.sequence(a.kind(), std::move(items));
    }
  }
  if (op == BinaryOp::kMul) {
    const auto repeatable = [](const Value& v) { return v.is_string() || v.is_sequence(); };
    if (repeatable(a) && b.is_integral()) return repeat(sandbox, a, b.as_int());
    if (repeatable(b) && a.is_integral()) return repeat(sandbox, b, a.as_int());
  }
  sandbox.fail("unsupported operand type(s) for {}: '{}' and '{}'",
               kBinaryNames[static_cast<int>(op)], type_name(a), type_name(b));
}

Value negative(Sandbox& sandbox, const Value& a) {
  if (a.is_undefined()) fail_undefined(sandbox, a);
  if (a.is(Kind::kFloat)) return Value::real(-a.as_double());
  if (!a.is_integral()) sandbox.fail("bad operand type for unary -: '{}'", type_name(a));
  return int_arithmetic(sandbox, BinaryOp::kSub, 0, a.as_int());
}

Value positive(Sandbox& sandbox, const Value& a) {
  if (a.is_undefined()) fail_undefined(sandbox, a);
  if (a.is(Kind::kFloat)) return a;
  if (!a.is_integral()) sandbox.fail("bad operand type for unary +: '{}'", type_name(a));
  return Value::integer(a.as_int());
}

bool less(Sandbox& sandbox, const Value& a, const Value& b) {
  return compare(sandbox, CompareOp::kLt, a, b);
}

bool compare(Sandbox& sandbox, CompareOp op, const Value& a, const Value& b) {
  switch (op) {
    case CompareOp::kEq:
      return equal(sandbox, a, b);
    case CompareOp::kNe:
      return !equal(sandbox, a, b);
    case CompareOp::kIn:
      return contains(sandbox, b, a);
    case CompareOp::kNotIn:
      return !contains(sandbox, b, a);
    default:
      break;
  }
  sandbox.step();
  const auto ordered = [op](const auto& x, const auto& y) {
    switch (op) {
      case CompareOp::kLt:
        return x < y;
      case CompareOp::kLe:
        return x <= y;
      case CompareOp::kGt:
        return x > y;
      default:
        return x >= y;
    }
  };
  if (a.is_integral() && b.is_integral()) return ordered(a.as_int(), b.as_int());
  if (a.is_number() && b.is_number()) return ordered(a.as_double(), b.as_double());
  if (a.is_string() && b.is_string()) {
    sandbox.copy(std::min(a.str().size(), b.str().size()));
    return ordered(a.str(), b.str());  // bytes of UTF-8 sort as code points do
  }
  if (a.is_sequence() && a.kind() == b.kind()) {
    const std::size_t n = std::min(a.items().size(), b.items().size());
    for (std::size_t i = 0; i < n; ++i) {
      if (!equal(sandbox, a.items()[i], b.items()[i])) {
        return compare(sandbox, op, a.items()[i], b.items()[i]);
      }
    }
    return ordered(a.items().size(), b.items().size());
  }
  if (a.is_undefined()) fail_undefined(sandbox, a);
  if (b.is_undefined()) fail_undefined(sandbox, b);
  static constexpr const char* kNames[] = {"==", "!=", "<", "<=", ">", ">="};
  sandbox.fail("'{}' not supported between instances of '{}' and '{}'",
               kNames[static_cast<int>(op)], type_name(a), type_name(b));
}

bool contains(Sandbox& sandbox, const Value& container, const Value& item) {
  switch (container.kind()) {
    case Kind::kString:
      if (!item.is_string()) {
        sandbox.fail("'in <string>' requires string as left operand, not {}", type_name(item));
      }
      sandbox.copy(container.str().size());
      return container.str().find(item.str()) != std::string::npos;
    case Kind::kDict: {
      std::uint64_t hash = 0;
      if (!hash_value(sandbox, item, hash)) {
        sandbox.fail("unhashable type: '{}'", type_name(item));
      }
      return container.dict().find(sandbox, item) != nullptr;
    }
    case Kind::kRange: {
      if (!item.is_number()) return false;
      if (item.is(Kind::kFloat) && item.as_double() != std::floor(item.as_double())) return false;
      const auto& range = container.as<RangeObject>();
      const double at =
          (item.as_double() - static_cast<double>(range.start)) / static_cast<double>(range.step);
      return at >= 0 && at < static_cast<double>(range.count) && at == std::floor(at);
    }
    default:
      break;
  }
  if (!is_iterable(container)) {
    sandbox.fail("argument of type '{}' is not iterable", type_name(container));
  }
  Walk walk(sandbox, container);
  for (Value candidate; walk.next(candidate);) {
    if (equal(sandbox, candidate, item)) return true;
  }
  return false;
}

std::optional<std::int64_t> find_length(const Value& value) {
  switch (value.kind()) {
    case Kind::kUndefined:
      return 0;
    case Kind::kString:
      return static_cast<std::int64_t>(value.as_text().ascii ? value.str().size()
                                                             : length(value.str()));
    case Kind::kList:
    case Kind::kTuple:
      return static_cast<std::int64_t>(value.items().size());
    case Kind::kDict:
      return static_cast<std::int64_t>(value.dict().entries.size());
    case Kind::kView:
      return static_cast<std::int64_t>(value.as<ViewObject>().dict->entries.size());
    case Kind::kRange:
      return value.as<RangeObject>().count;
    default:
      return std::nullopt;
  }
}

std::int64_t length_of(Sandbox& sandbox, const Value& value) {
  if (value.is_string() && !value.as_text().ascii) sandbox.scan(value.str().size());
  const auto n = find_length(value);
  if (!n) sandbox.fail("object of type '{}' has no len()", type_name(value));
  return *n;
}

std::optional<Value> find_item(Sandbox& sandbox, const Value& value, const Value& key) {
  if (value.is(Kind::kDict)) {
    const Value* found = value.dict().find(sandbox, key);
    return found == nullptr ? std::nullopt : std::optional<Value>(*found);
  }
  const bool indexed = value.is_string() || value.is_sequence() || value.is(Kind::kRange);
  if (!indexed || !key.is_integral()) return std::nullopt;
  const std::int64_t size = length_of(sandbox, value);
  std::int64_t i = key.as_int();
  if (i < 0) i += size;
  if (i < 0 || i >= size) return std::nullopt;
  if (value.is_sequence()) return value.items()[static_cast<std::size_t>(i)];
  if (value.is(Kind::kRange)) {
    const auto& range = value.as<RangeObject>();
    return Value::integer(range.start + i * range.step);
  }
  return slice_string(sandbox, value, {i, 1, 1});
}

Value slice(Sandbox& sandbox, const Value& value, const Value& start, const Value& stop,
            const Value& step) {
  if (value.is_undefined()) fail_undefined(sandbox, value);
  if (value.is(Kind::kDict)) sandbox.fail("unhashable type: 'slice'");
  if (!value.is_string() && !value.is_sequence() && !value.is(Kind::kRange)) {
    sandbox.fail("'{}' object is not subscriptable", type_name(value));
  }
  const Bounds b = slice_bounds(sandbox, start, stop, step, length_of(sandbox, value));
  if (value.is_string()) return slice_string(sandbox, value, b);
  if (value.is(Kind::kRange)) {
    const auto& range = value.as<RangeObject>();
    auto& part = sandbox.make<RangeObject>();
    part.start = range.start + b.start * range.step;
    if (__builtin_mul_overflow(range.step, b.step, &part.step)) fail_overflow(sandbox);
    part.count = b.count;
    if (__builtin_mul_overflow(part.step, b.count, &part.stop) ||
        __builtin_add_overflow(part.stop, part.start, &part.stop)) {
      fail_overflow(sandbox);
    }
    return Value::object(&part);
  }
  sandbox.reserve_items(static_cast<std::size_t>(b.count));
  std::vector<Value> items;
  items.reserve(static_cast<std::size_t>(b.count));
  for (std::int64_t i = 0, at = b.start; i < b.count; ++i) {
    items.push_back(value.items()[static_cast<std::size_t>(at)]);
    if (i + 1 < b.count) at += b.step;
  }
  return sandbox.sequence(value.kind(), std::move(items));
}

bool is_iterable(const Value& value) {
  switch (value.kind()) {
    case Kind::kUndefined:
    case Kind::kString:
    case Kind::kList:
    case Kind::kTuple:
    case Kind::kDict:
    case Kind::kView:
    case Kind::kRange:
    case Kind::kGenerator:
    case Kind::kLoop:
      return true;
    default:
      return false;
  }
}

Walk::Walk(Sandbox& sandbox, Value iterable) : sandbox_(&sandbox), iterable_(std::move(iterable)) {
  if (!is_iterable(iterable_)) {
    sandbox.fail("'{}' object is not iterable", type_name(iterable_));
  }
  if (iterable_.is(Kind::kLoop)) sandbox.unsupported("iterating over 'loop'");
}

bool Walk::next(Value& item) {
  sandbox_->step();
  switch (iterable_.kind()) {
    case Kind::kString: {
      const std::string_view rest = std::string_view(iterable_.str()).substr(position_);
      if (rest.empty()) return false;
      const auto size = static_cast<std::size_t>(decode_utf8(rest).length);
      item = sandbox_->string(std::string(rest.substr(0, size)));
      position_ += size;
      return true;
    }
    case Kind::kList:
    case Kind::kTuple:
      if (position_ >= iterable_.items().size()) return false;
      item = iterable_.items()[position_++];
      return true;
    case Kind::kDict:
      if (position_ >= iterable_.dict().entries.size()) return false;
      item = iterable_.dict().entries[position_++].first;
      return true;
    case Kind::kView: {
      const auto& view = iterable_.as<ViewObject>();
      if (position_ >= view.dict->entries.size()) return false;
      const auto& [key, value] = view.dict->entries[position_++];
      item = view.part == ViewObject::Part::kKeys     ? key
             : view.part == ViewObject::Part::kValues ? value
                                                      : sandbox_->tuple({key, value});
      return true;
    }
    case Kind::kRange: {
      const auto& range = iterable_.as<RangeObject>();
      if (static_cast<std::int64_t>(position_) >= range.count) return false;
      item = Value::integer(range.start + static_cast<std::int64_t>(position_++) * range.step);
      return true;
    }
    case Kind::kGenerator: {
      auto& generator = iterable_.as<GeneratorObject>();
      if (generator.position >= generator.items.size()) return false;
      item = generator.items[generator.position++];
      return true;
    }
    default:
      return false;
  }
}

std::vector<Value> to_vector(Sandbox& sandbox, const Value& iterable) {
  std::vector<Value> items;
  Walk walk(sandbox, iterable);
  for (Value item; walk.next(item);) items.push_back(item);
  return items;
}

}  // namespace pianola::jinja
