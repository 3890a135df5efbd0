#include "tokenizer/jinja_builtins.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "tokenizer/jinja_interpreter.h"

namespace pianola::jinja {
namespace {

constexpr std::string_view kGlobals[] = {
    "range", "dict", "namespace", "cycler", "joiner", "raise_exception", "lipsum", "strftime_now"};
constexpr std::uint64_t kMaxRange = 100000;  // of Jinja's sandbox

template <std::size_t N>
std::string_view find_name(const std::string_view (&names)[N], std::string_view name) {
  const auto* it = std::find(std::begin(names), std::end(names), name);
  return it == std::end(names) ? std::string_view() : *it;
}

std::int64_t integer_argument(Sandbox& sandbox, const Value& value) {
  if (value.is_undefined()) fail_undefined(sandbox, value);
  if (!value.is_integral()) {
    sandbox.fail("'{}' object cannot be interpreted as an integer", type_name(value));
  }
  return value.as_int();
}

Value make_range(Sandbox& sandbox, const Arguments& arguments) {
  const Bound bound(sandbox, "range", arguments, {"start", "stop", "step"}, 1);
  auto& range = sandbox.make<RangeObject>();
  if (bound.has(1)) {
    range.start = integer_argument(sandbox, bound[0]);
    range.stop = integer_argument(sandbox, bound[1]);
  } else {
    range.stop = integer_argument(sandbox, bound[0]);
  }
  if (bound.has(2)) range.step = integer_argument(sandbox, bound[2]);
  if (range.step == 0) sandbox.fail("range() arg 3 must not be zero");
  // In unsigned arithmetic: the distance of two int64 may need 64 bits without a sign.
  const bool up = range.step > 0;
  const bool empty = up ? range.start >= range.stop : range.start <= range.stop;
  const auto low = static_cast<std::uint64_t>(up ? range.start : range.stop);
  const auto high = static_cast<std::uint64_t>(up ? range.stop : range.start);
  const auto step = static_cast<std::uint64_t>(range.step);
  const std::uint64_t stride = up ? step : ~step + 1;
  const std::uint64_t count = empty ? 0 : (high - low - 1) / stride + 1;
  if (count > kMaxRange) {
    sandbox.fail("range too big: the sandbox blocks ranges larger than {}", kMaxRange);
  }
  range.count = static_cast<std::int64_t>(count);
  return Value::object(&range);
}

// dict(mapping or pairs, **keywords)
DictObject& make_dict(Sandbox& sandbox, const Arguments& arguments) {
  DictObject& dict = sandbox.dict();
  if (arguments.positional.size() > 1) {
    sandbox.fail("dict expected at most 1 argument, got {}", arguments.positional.size());
  }
  if (!arguments.positional.empty()) {
    const Value& source = arguments.positional[0];
    if (source.is(Kind::kDict)) {
      for (const auto& [key, value] : source.dict().entries) sandbox.set(dict, key, value);
    } else {
      Walk walk(sandbox, source);
      for (Value pair; walk.next(pair);) {
        const std::vector<Value> parts = to_vector(sandbox, pair);
        if (parts.size() != 2) {
          sandbox.fail("dictionary update sequence element has length {}; 2 is required",
                       parts.size());
        }
        sandbox.set(dict, parts[0], parts[1]);
      }
    }
  }
  for (const auto& [name, value] : arguments.keywords) {
    sandbox.set(dict, sandbox.string(name), value);
  }
  return dict;
}

Value unsafe(Sandbox& sandbox, const Value& value, std::string_view name) {
  return sandbox.undefined(
      fmt::format("access to attribute '{}' of '{}' object is unsafe.", name, type_name(value)));
}

std::optional<Value> dict_attribute(Sandbox& sandbox, const Value& value, std::string_view name) {
  static constexpr std::string_view kMethods[] = {"items", "keys", "values", "get", "copy"};
  static constexpr std::string_view kBlocked[] = {"clear", "pop", "popitem", "setdefault",
                                                  "update"};
  if (const auto method = find_name(kMethods, name); !method.empty()) {
    return sandbox.function(method, value);
  }
  if (!find_name(kBlocked, name).empty()) return unsafe(sandbox, value, name);
  if (name == "fromkeys") sandbox.unsupported("dict.fromkeys");
  return std::nullopt;
}

std::optional<Value> list_attribute(Sandbox& sandbox, const Value& value, std::string_view name) {
  static constexpr std::string_view kMethods[] = {"count", "index", "copy"};
  static constexpr std::string_view kBlocked[] = {"append", "clear",  "pop",  "reverse",
                                                  "insert", "extend", "sort", "remove"};
  const auto& list = value.as<ListObject>();
  if (list.group && name == "grouper") return list.items[0];
  if (list.group && name == "list") return list.items[1];
  if (const auto method = find_name(kMethods, name); !method.empty()) {
    if (method != "copy" || value.is(Kind::kList)) return sandbox.function(method, value);
  }
  if (value.is(Kind::kList) && !find_name(kBlocked, name).empty()) {
    return unsafe(sandbox, value, name);
  }
  return std::nullopt;
}

std::optional<Value> number_attribute(Sandbox& sandbox, const Value& value, std::string_view name) {
  static constexpr std::string_view kOthers[] = {"as_integer_ratio", "bit_count",  "bit_length",
                                                 "conjugate",        "from_bytes", "to_bytes",
                                                 "fromhex",          "hex",        "is_integer"};
  const bool is_float = value.is(Kind::kFloat);
  if (name == "real") return is_float ? value : Value::integer(value.as_int());
  if (name == "imag") return is_float ? Value::real(0) : Value::integer(0);
  if (!is_float && name == "numerator") return Value::integer(value.as_int());
  if (!is_float && name == "denominator") return Value::integer(1);
  if (is_float && name == "is_integer") return sandbox.function("is_integer", value);
  if (!find_name(kOthers, name).empty()) {
    sandbox.unsupported("the method '{}' of a number", name);
  }
  return std::nullopt;
}

Value call_dict_method(Sandbox& sandbox, const Value& self, std::string_view name,
                       const Arguments& arguments) {
  if (name == "get") {
    const Bound bound(sandbox, "get", arguments, {"key", "default"}, 1);
    std::uint64_t hash = 0;
    if (!hash_value(sandbox, bound[0], hash)) {
      sandbox.fail("unhashable type: '{}'", type_name(bound[0]));
    }
    const Value* found = self.dict().find(sandbox, bound[0]);
    return found != nullptr ? *found : bound.value_or(1, Value::none());
  }
  const Bound bound(sandbox, name, arguments, {});
  if (name == "copy") {
    DictObject& dict = sandbox.dict();
    for (const auto& [key, value] : self.dict().entries) sandbox.set(dict, key, value);
    return Value::object(&dict);
  }
  auto& view = sandbox.make<ViewObject>();
  view.part = name == "keys"     ? ViewObject::Part::kKeys
              : name == "values" ? ViewObject::Part::kValues
                                 : ViewObject::Part::kItems;
  view.dict = &self.dict();
  sandbox.nest(view, self);
  return Value::object(&view);
}

Value call_sequence_method(Sandbox& sandbox, const Value& self, std::string_view name,
                           const Arguments& arguments) {
  if (name == "copy") return sandbox.list(self.items());
  const Bound bound(sandbox, name, arguments, {"value", "start", "stop"}, 1);
  std::int64_t count = 0;
  const auto size = static_cast<std::int64_t>(self.items().size());
  const auto clip = [size](std::int64_t i) {
    return std::clamp(i < 0 ? i + size : i, std::int64_t{0}, size);
  };
  const std::int64_t start = clip(bound.integer(1, 0));
  const std::int64_t stop = clip(bound.integer(2, size));
  for (std::int64_t i = start; i < stop; ++i) {
    sandbox.step();
    if (!equal(sandbox, self.items()[static_cast<std::size_t>(i)], bound[0])) continue;
    if (name == "index") return Value::integer(i);
    ++count;
  }
  if (name == "index") sandbox.fail("{} is not in list", repr(sandbox, bound[0]));
  return Value::integer(count);
}

Value call_cycler_method(Sandbox& sandbox, CyclerObject& cycler, std::string_view name,
                         const Arguments& arguments) {
  const Bound bound(sandbox, name, arguments, {});
  if (name == "reset") {
    cycler.position = 0;
    return Value::none();
  }
  const Value current = cycler.items[cycler.position];
  cycler.position = (cycler.position + 1) % cycler.items.size();
  return current;
}

Value call_loop_method(Sandbox& sandbox, LoopObject& loop, std::string_view name,
                       const Arguments& arguments) {
  if (name == "cycle") {
    if (arguments.positional.empty()) sandbox.fail("no items for cycling given");
    const auto n = static_cast<std::int64_t>(arguments.positional.size());
    return arguments.positional[static_cast<std::size_t>(loop.index0 % n)];
  }
  const Value now = sandbox.tuple(arguments.positional);
  const bool changed = !equal(sandbox, loop.last_changed, now);
  loop.last_changed = now;
  return Value::boolean(changed);
}

}  // namespace

Value Arguments::take(std::string_view keyword) {
  const auto it = std::find_if(keywords.begin(), keywords.end(),
                               [keyword](const auto& k) { return k.first == keyword; });
  if (it == keywords.end()) return Value();
  Value value = std::move(it->second);
  keywords.erase(it);
  return value;
}

Bound::Bound(Sandbox& sandbox, std::string_view function, const Arguments& arguments,
             std::initializer_list<std::string_view> parameters, std::size_t required)
    : sandbox_(sandbox), function_(function), values_(parameters.size()) {
  if (arguments.positional.size() > parameters.size()) {
    sandbox.fail("{}() takes at most {} argument(s), {} given", function, parameters.size(),
                 arguments.positional.size());
  }
  std::copy(arguments.positional.begin(), arguments.positional.end(), values_.begin());
  for (const auto& [name, value] : arguments.keywords) {
    const auto* it = std::find(parameters.begin(), parameters.end(), std::string_view(name));
    if (it == parameters.end()) {
      sandbox.fail("{}() got an unexpected keyword argument '{}'", function, name);
    }
    Value& slot = values_[static_cast<std::size_t>(it - parameters.begin())];
    if (!slot.is(Kind::kMissing)) {
      sandbox.fail("{}() got multiple values for argument '{}'", function, name);
    }
    slot = value;
  }
  for (std::size_t i = 0; i < required; ++i) {
    if (values_[i].is(Kind::kMissing)) {
      sandbox.fail("{}() missing required argument '{}'", function, parameters.begin()[i]);
    }
  }
}

std::int64_t Bound::integer(std::size_t i, std::int64_t otherwise) const {
  if (!has(i) || values_[i].is(Kind::kNone)) return otherwise;
  return integer_argument(sandbox_, values_[i]);
}

const std::string& Bound::text(std::size_t i) const {
  if (values_[i].is_undefined()) fail_undefined(sandbox_, values_[i]);
  if (!values_[i].is_string()) {
    sandbox_.fail("{}() argument {} must be str, not {}", function_, i + 1, type_name(values_[i]));
  }
  return values_[i].str();
}

Filter find_filter(std::string_view name) {
  static const std::map<std::string_view, Filter> filters = [] {
    std::map<std::string_view, Filter> all;
    for (const auto* group : {&text_filters(), &sequence_filters(), &number_filters()}) {
      for (const auto& [filter_name, filter] : *group) all.emplace(filter_name, filter);
    }
    return all;
  }();
  const auto it = filters.find(name);
  return it == filters.end() ? nullptr : it->second;
}

bool is_global(std::string_view name) { return !find_name(kGlobals, name).empty(); }

Value call_global(Interpreter& interpreter, std::string_view name, const Arguments& arguments) {
  Sandbox& sandbox = interpreter.sandbox();
  if (name == "range") return make_range(sandbox, arguments);
  if (name == "dict") return Value::object(&make_dict(sandbox, arguments));
  if (name == "namespace") {
    auto& space = sandbox.make<NamespaceObject>();
    space.attributes = &make_dict(sandbox, arguments);
    sandbox.nest(space, Value::object(space.attributes));
    return Value::object(&space);
  }
  if (name == "cycler") {
    if (arguments.positional.empty()) sandbox.fail("at least one item has to be provided");
    auto& cycler = sandbox.make<CyclerObject>();
    sandbox.reserve_items(arguments.positional.size());
    for (const Value& item : arguments.positional) sandbox.nest(cycler, item);
    cycler.items = arguments.positional;
    return Value::object(&cycler);
  }
  if (name == "joiner") {
    const Bound bound(sandbox, "joiner", arguments, {"sep"});
    auto& joiner = sandbox.make<JoinerObject>();
    joiner.separator = bound.has(0) ? bound[0] : sandbox.string(", ");
    sandbox.nest(joiner, joiner.separator);
    return Value::object(&joiner);
  }
  if (name == "raise_exception") {
    const Bound bound(sandbox, "raise_exception", arguments, {"message"}, 1);
    sandbox.fail("the template refuses this conversation: {}", to_str(sandbox, bound[0]).str());
  }
  if (name == "strftime_now") {
    const Bound bound(sandbox, "strftime_now", arguments, {"format"}, 1);
    return sandbox.string(format_time(sandbox, bound.text(0), interpreter.now_microseconds()));
  }
  sandbox.unsupported("the function '{}'", name);
}

std::optional<Value> find_attribute(Interpreter& interpreter, const Value& value,
                                    std::string_view name) {
  Sandbox& sandbox = interpreter.sandbox();
  if (name.starts_with("__") && name.ends_with("__") && name.size() > 4) {
    if (!value.is(Kind::kDict) || value.dict().find(name) == nullptr) {
      return unsafe(sandbox, value, name);
    }
  }
  switch (value.kind()) {
    case Kind::kString:
      if (!is_string_method(name)) return std::nullopt;
      return sandbox.function(name, value);
    case Kind::kDict:
      return dict_attribute(sandbox, value, name);
    case Kind::kList:
    case Kind::kTuple:
      return list_attribute(sandbox, value, name);
    case Kind::kBool:
    case Kind::kInt:
    case Kind::kFloat:
      return number_attribute(sandbox, value, name);
    case Kind::kRange: {
      const auto& range = value.as<RangeObject>();
      if (name == "start") return Value::integer(range.start);
      if (name == "stop") return Value::integer(range.stop);
      if (name == "step") return Value::integer(range.step);
      if (name == "count" || name == "index") sandbox.unsupported("the method '{}' of range", name);
      return std::nullopt;
    }
    case Kind::kView:
      if (name == "mapping" || name == "isdisjoint") {
        sandbox.unsupported("the attribute '{}' of a view", name);
      }
      return std::nullopt;
    case Kind::kNamespace: {
      const Value* found = value.as<NamespaceObject>().attributes->find(name);
      if (found == nullptr) return std::nullopt;
      return name.starts_with('_') ? unsafe(sandbox, value, name) : *found;
    }
    case Kind::kLoop: {
      const Value found = interpreter.loop_attribute(value.as<LoopObject>(), name);
      return found.is(Kind::kMissing) ? std::nullopt : std::optional<Value>(found);
    }
    case Kind::kMacro: {
      const Value found = interpreter.macro_attribute(value.as<MacroObject>(), name);
      return found.is(Kind::kMissing) ? std::nullopt : std::optional<Value>(found);
    }
    case Kind::kCycler: {
      auto& cycler = value.as<CyclerObject>();
      if (name == "current") return cycler.items[cycler.position];
      if (name == "next") return sandbox.function("next", value);
      if (name == "reset") return sandbox.function("reset", value);
      if (name == "items") return sandbox.tuple(cycler.items);
      if (name == "pos") return Value::integer(static_cast<std::int64_t>(cycler.position));
      return std::nullopt;
    }
    case Kind::kJoiner:
      if (name == "sep") return value.as<JoinerObject>().separator;
      if (name == "used") return Value::boolean(value.as<JoinerObject>().used);
      return std::nullopt;
    default:
      return std::nullopt;
  }
}

Value call_method(Interpreter& interpreter, const Value& self, std::string_view name,
                  const Arguments& arguments) {
  Sandbox& sandbox = interpreter.sandbox();
  switch (self.kind()) {
    case Kind::kString:
      return call_string_method(interpreter, self, name, arguments);
    case Kind::kDict:
      return call_dict_method(sandbox, self, name, arguments);
    case Kind::kList:
    case Kind::kTuple:
      return call_sequence_method(sandbox, self, name, arguments);
    case Kind::kCycler:
      return call_cycler_method(sandbox, self.as<CyclerObject>(), name, arguments);
    case Kind::kLoop:
      return call_loop_method(sandbox, self.as<LoopObject>(), name, arguments);
    case Kind::kFloat: {
      const double number = self.as_double();
      return Value::boolean(std::isfinite(number) && number == std::floor(number));
    }
    default:
      sandbox.fail("'{}' object is not callable", type_name(self));
  }
}

}  // namespace pianola::jinja
