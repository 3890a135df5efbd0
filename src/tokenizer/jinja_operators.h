// Python's operators on Values: arithmetic, comparison, containment, subscripts, iteration, str()
// and repr(). Each fails, with the sandbox's line, where Python raises.
//
//   Value three = binary(sandbox, BinaryOp::kAdd, Value::integer(1), Value::integer(2));
//   Walk walk(sandbox, list);
//   for (Value item; walk.next(item);) ...
#pragma once

#include <algorithm>
#include <optional>
#include <utility>

#include "tokenizer/jinja_ast.h"

namespace pianola::jinja {

Value binary(Sandbox& sandbox, BinaryOp op, const Value& a, const Value& b);
Value negative(Sandbox& sandbox, const Value& a);
Value positive(Sandbox& sandbox, const Value& a);
bool compare(Sandbox& sandbox, CompareOp op, const Value& a, const Value& b);
bool less(Sandbox& sandbox, const Value& a, const Value& b);
bool contains(Sandbox& sandbox, const Value& container, const Value& item);

// len(value); nullopt where Python has none.
std::optional<std::int64_t> find_length(const Value& value);
std::int64_t length_of(Sandbox& sandbox, const Value& value);

// value[key] alone; nullopt where Python raises TypeError or LookupError.
std::optional<Value> find_item(Sandbox& sandbox, const Value& value, const Value& key);
// value[start:stop:step]; kMissing where a bound is absent.
Value slice(Sandbox& sandbox, const Value& value, const Value& start, const Value& stop,
            const Value& step);

// Iterates as Python's iter() does; fails for a value that cannot be iterated.
class Walk {
 public:
  Walk(Sandbox& sandbox, Value iterable);
  bool next(Value& item);

 private:
  Sandbox* sandbox_;
  Value iterable_;
  std::size_t position_ = 0;
};
bool is_iterable(const Value& value);
std::vector<Value> to_vector(Sandbox& sandbox, const Value& iterable);

// What {{ value }} prints, as a string value (a str stays as it is).
Value to_str(Sandbox& sandbox, const Value& value);
std::string repr(Sandbox& sandbox, const Value& value);
std::string float_repr(double value);

// A stable merge sort. `before` may throw, and may be no order at all (NaN): then the result is
// some order, where std::sort would leave its range.
template <typename T, typename Before>
void merge_sort(std::vector<T>& items, Before before) {
  std::vector<T> merged(items.size());
  for (std::size_t width = 1; width < items.size(); width *= 2) {
    for (std::size_t start = 0; start < items.size(); start += 2 * width) {
      const std::size_t middle = std::min(start + width, items.size());
      const std::size_t end = std::min(start + 2 * width, items.size());
      std::size_t left = start;
      std::size_t right = middle;
      for (std::size_t out = start; out < end; ++out) {
        const bool take_right =
            right < end && (left == middle || before(items[right], items[left]));
        merged[out] = std::move(take_right ? items[right++] : items[left++]);
      }
    }
    items.swap(merged);
  }
}

[[noreturn]] void fail_undefined(const Sandbox& sandbox, const Value& value);
// An undefined for an attribute or element that does not exist.
Value missing_attribute(Sandbox& sandbox, const Value& object, const Value& name);

}  // namespace pianola::jinja
