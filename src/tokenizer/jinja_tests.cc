#include <algorithm>
#include <iterator>

#include "tokenizer/jinja_interpreter.h"
#include "tokenizer/jinja_text.h"

namespace pianola::jinja {
namespace {

template <Kind kind>
bool is_kind(Interpreter& /*in*/, const Value& value, Arguments& /*arguments*/) {
  return value.is(kind);
}

template <CompareOp op>
bool compares(Interpreter& in, const Value& value, Arguments& arguments) {
  const Bound bound(in.sandbox(), "test", arguments, {"other"}, 1);
  return compare(in.sandbox(), op, value, bound[0]);
}

bool defined(Interpreter& /*in*/, const Value& value, Arguments& /*arguments*/) {
  return !value.is_undefined();
}

template <bool wanted>
bool is_boolean(Interpreter& /*in*/, const Value& value, Arguments& /*arguments*/) {
  return value.is(Kind::kBool) && value.as_bool() == wanted;
}

bool number(Interpreter& /*in*/, const Value& value, Arguments& /*arguments*/) {
  return value.is_number();
}

bool sequence(Interpreter& /*in*/, const Value& value, Arguments& /*arguments*/) {
  // len() and __getitem__; an undefined has both.
  return value.is_string() || value.is_sequence() || value.is(Kind::kDict) ||
         value.is(Kind::kRange) || value.is_undefined();
}

bool iterable(Interpreter& /*in*/, const Value& value, Arguments& /*arguments*/) {
  return is_iterable(value);
}

bool callable(Interpreter& /*in*/, const Value& value, Arguments& /*arguments*/) {
  return value.is(Kind::kMacro) || value.is(Kind::kFunction) || value.is(Kind::kJoiner) ||
         value.is(Kind::kLoop) || value.is_undefined();
}

bool escaped(Interpreter& /*in*/, const Value& value, Arguments& /*arguments*/) {
  return value.is_string() && value.as_text().markup;
}

bool same_as(Interpreter& in, const Value& value, Arguments& arguments) {
  const Bound bound(in.sandbox(), "sameas", arguments, {"other"}, 1);
  const Value& other = bound[0];
  if (value.kind() != other.kind()) return false;
  switch (value.kind()) {
    case Kind::kNone:
      return true;
    case Kind::kBool:
      return value.as_bool() == other.as_bool();
    case Kind::kInt:
      // CPython keeps one object for each small int.
      return value.as_int() == other.as_int() && value.as_int() >= -5 && value.as_int() <= 256;
    case Kind::kString:
      return &value.as_text() == &other.as_text();
    case Kind::kFloat:
    case Kind::kUndefined:
      return false;
    default:
      return value.as_object() == other.as_object();
  }
}

bool in_test(Interpreter& in, const Value& value, Arguments& arguments) {
  const Bound bound(in.sandbox(), "in", arguments, {"seq"}, 1);
  return contains(in.sandbox(), bound[0], value);
}

bool remainder_is(Interpreter& in, const Value& value, const Value& divisor, std::int64_t wanted) {
  const Value rest = binary(in.sandbox(), BinaryOp::kMod, value, divisor);
  return equal(in.sandbox(), rest, Value::integer(wanted));
}

bool odd(Interpreter& in, const Value& value, Arguments& /*arguments*/) {
  return remainder_is(in, value, Value::integer(2), 1);
}

bool even(Interpreter& in, const Value& value, Arguments& /*arguments*/) {
  return remainder_is(in, value, Value::integer(2), 0);
}

bool divisible_by(Interpreter& in, const Value& value, Arguments& arguments) {
  const Bound bound(in.sandbox(), "divisibleby", arguments, {"num"}, 1);
  return remainder_is(in, value, bound[0], 0);
}

bool has_case(Interpreter& in, const Value& value, std::string_view method) {
  const Value text = to_str(in.sandbox(), value);
  return is_true(call_string_method(in, text, method, {}));
}

bool lower(Interpreter& in, const Value& value, Arguments& /*arguments*/) {
  return has_case(in, value, "islower");
}

bool upper(Interpreter& in, const Value& value, Arguments& /*arguments*/) {
  return has_case(in, value, "isupper");
}

bool filter_exists(Interpreter& /*in*/, const Value& value, Arguments& /*arguments*/) {
  return value.is_string() && find_filter(value.str()) != nullptr;
}

bool test_exists(Interpreter& /*in*/, const Value& value, Arguments& /*arguments*/) {
  return value.is_string() && find_test(value.str()) != nullptr;
}

struct NamedTest {
  std::string_view name;
  Test test;
};

constexpr NamedTest kTests[] = {{"defined", defined},
                                {"undefined", is_kind<Kind::kUndefined>},
                                {"none", is_kind<Kind::kNone>},
                                {"string", is_kind<Kind::kString>},
                                {"mapping", is_kind<Kind::kDict>},
                                {"boolean", is_kind<Kind::kBool>},
                                {"integer", is_kind<Kind::kInt>},
                                {"float", is_kind<Kind::kFloat>},
                                {"true", is_boolean<true>},
                                {"false", is_boolean<false>},
                                {"number", number},
                                {"sequence", sequence},
                                {"iterable", iterable},
                                {"callable", callable},
                                {"escaped", escaped},
                                {"sameas", same_as},
                                {"in", in_test},
                                {"odd", odd},
                                {"even", even},
                                {"divisibleby", divisible_by},
                                {"lower", lower},
                                {"upper", upper},
                                {"filter", filter_exists},
                                {"test", test_exists},
                                {"eq", compares<CompareOp::kEq>},
                                {"==", compares<CompareOp::kEq>},
                                {"equalto", compares<CompareOp::kEq>},
                                {"ne", compares<CompareOp::kNe>},
                                {"!=", compares<CompareOp::kNe>},
                                {"lt", compares<CompareOp::kLt>},
                                {"<", compares<CompareOp::kLt>},
                                {"lessthan", compares<CompareOp::kLt>},
                                {"le", compares<CompareOp::kLe>},
                                {"<=", compares<CompareOp::kLe>},
                                {"gt", compares<CompareOp::kGt>},
                                {">", compares<CompareOp::kGt>},
                                {"greaterthan", compares<CompareOp::kGt>},
                                {"ge", compares<CompareOp::kGe>},
                                {">=", compares<CompareOp::kGe>}};

}  // namespace

Test find_test(std::string_view name) {
  const auto* it = std::find_if(std::begin(kTests), std::end(kTests),
                                [name](const auto& test) { return test.name == name; });
  return it == std::end(kTests) ? nullptr : it->test;
}

}  // namespace pianola::jinja
