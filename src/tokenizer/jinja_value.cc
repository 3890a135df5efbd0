#include "tokenizer/jinja_value.h"

#include <boost/json.hpp>

#include <time.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "base/utf8.h"
#include "tokenizer/jinja_text.h"

namespace pianola::jinja {
namespace {

constexpr std::size_t kIndexAbove = 8;
constexpr std::int64_t kStepsBetweenChecks = 2048;

std::int64_t thread_cpu_ns() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

Text* new_text(std::string bytes) {
  auto* text = new Text;
  text->bytes = std::move(bytes);
  text->ascii = is_ascii(text->bytes);
  text->references.store(1, std::memory_order_relaxed);
  return text;
}

}  // namespace

Value Value::boolean(bool b) {
  Value v(Kind::kBool);
  v.payload_.boolean = b;
  return v;
}

Value Value::integer(std::int64_t i) {
  Value v(Kind::kInt);
  v.payload_.integer = i;
  return v;
}

Value Value::real(double f) {
  Value v(Kind::kFloat);
  v.payload_.real = f;
  return v;
}

Value Value::undefined(Text* message) {
  Value v(Kind::kUndefined);
  v.payload_.text = message;
  return v;
}

Value Value::text(Text* text) {
  Value v(Kind::kString);
  v.payload_.text = text;
  return v;
}

Value Value::object(Object* object) {
  Value v(object->kind);
  v.payload_.object = object;
  return v;
}

const std::vector<Value>& Value::items() const { return as<ListObject>().items; }
DictObject& Value::dict() const { return as<DictObject>(); }

void Value::free_text(Text* text) {
  if (text->live != nullptr) *text->live -= text->bytes.size() + sizeof(Text);
  delete text;
}

Value constant_string(std::string bytes) { return Value::text(new_text(std::move(bytes))); }

const Value* DictObject::find(Sandbox& sandbox, const Value& key) const {
  std::uint64_t hash = 0;
  if (!hash_value(sandbox, key, hash)) return nullptr;
  const std::size_t i = find_index(sandbox, key, hash);
  return i == entries.size() ? nullptr : &entries[i].second;
}

const Value* DictObject::find(std::string_view key) const {
  if (index_.empty()) {
    for (const auto& [name, value] : entries) {
      if (name.is_string() && name.str() == key) return &value;
    }
    return nullptr;
  }
  const auto [first, last] = index_.equal_range(std::hash<std::string_view>()(key));
  for (auto it = first; it != last; ++it) {
    const auto& [name, value] = entries[it->second];
    if (name.is_string() && name.str() == key) return &value;
  }
  return nullptr;
}

std::size_t DictObject::find_index(Sandbox& sandbox, const Value& key, std::uint64_t hash) const {
  if (index_.empty()) {
    for (std::size_t i = 0; i < entries.size(); ++i) {
      if (equal(sandbox, entries[i].first, key)) return i;
    }
    return entries.size();
  }
  const auto [first, last] = index_.equal_range(hash);
  for (auto it = first; it != last; ++it) {
    if (equal(sandbox, entries[it->second].first, key)) return it->second;
  }
  return entries.size();
}

Sandbox::Sandbox(const Limits& limits)
    : limits_(limits), steps_(limits.steps), check_at_(limits.steps) {
  if (limits.cpu_ms > 0) {
    cpu_deadline_ns_ = thread_cpu_ns() + std::int64_t{limits.cpu_ms} * 1'000'000;
  }
  check_budget();
}

Sandbox::~Sandbox() = default;

void Sandbox::raise(ErrorCode code, const std::string& message) const {
  throw Error(code, fmt::format("chat template line {}: {}", line, message));
}

void Sandbox::check_budget() {
  if (steps_ < 0) {
    fail("more than {} steps; the template or the request is too large", limits_.steps);
  }
  if (cpu_deadline_ns_ != 0 && thread_cpu_ns() > cpu_deadline_ns_) {
    fail("more than {} ms of processor time; the template or the request is too large",
         limits_.cpu_ms);
  }
  check_at_ = std::max<std::int64_t>(0, steps_ - kStepsBetweenChecks);
}

void Sandbox::reserve(std::size_t bytes) const {
  if (bytes > limits_.memory_bytes || live_ > limits_.memory_bytes - bytes) {
    fail("values of more than {} bytes; the template or the request is too large",
         limits_.memory_bytes);
  }
}

void Sandbox::reserve_items(std::size_t count) {
  reserve(count > limits_.memory_bytes ? count : count * sizeof(Value));
  copy(count * sizeof(Value));
}

void Sandbox::charge(std::size_t bytes) {
  reserve(bytes);
  live_ += bytes;
}

Value Sandbox::string(std::string bytes, bool markup) {
  copy(bytes.size());
  charge(bytes.size() + sizeof(Text));
  Text* text = new_text(std::move(bytes));
  text->markup = markup;
  text->live = &live_;
  return Value::text(text);
}

Value Sandbox::undefined(std::string message) {
  charge(message.size() + sizeof(Text));
  Text* text = new_text(std::move(message));
  text->live = &live_;
  return Value::undefined(text);
}

void Sandbox::adopt(std::unique_ptr<Object> object, std::size_t bytes) {
  step(4);
  charge(bytes + sizeof(void*) * 2);
  objects_.push_back(std::move(object));
}

void Sandbox::nest(Object& parent, const Value& child) {
  if (child.depth() >= parent.depth) {
    parent.depth = child.depth() + 1;
    if (parent.depth > kMaxDepth) fail("values nested deeper than {}", kMaxDepth);
  }
}

Value Sandbox::sequence(Kind kind, std::vector<Value> items) {
  reserve_items(items.size());
  auto owned = std::make_unique<ListObject>(kind);
  ListObject& list = *owned;
  for (const Value& item : items) nest(list, item);
  list.items = std::move(items);
  adopt(std::move(owned), sizeof(ListObject) + list.items.size() * sizeof(Value));
  return Value::object(&list);
}

Value Sandbox::generator(std::vector<Value> items) {
  reserve_items(items.size());
  auto& generator = make<GeneratorObject>();
  charge(items.size() * sizeof(Value));
  for (const Value& item : items) nest(generator, item);
  generator.items = std::move(items);
  return Value::object(&generator);
}

Value Sandbox::function(std::string_view name, Value self) {
  auto& function = make<FunctionObject>();
  function.name = name;
  function.self = std::move(self);
  return Value::object(&function);
}

DictObject& Sandbox::dict() { return make<DictObject>(); }

void Sandbox::set(DictObject& dict, Value key, Value value) {
  std::uint64_t hash = 0;
  if (!hash_value(*this, key, hash)) fail("unhashable type: '{}'", type_name(key));
  step();
  nest(dict, key);
  nest(dict, value);
  const std::size_t i = dict.find_index(*this, key, hash);
  if (i < dict.entries.size()) {
    dict.entries[i].second = std::move(value);
    return;
  }
  charge(2 * sizeof(Value) + sizeof(void*) * 4);
  dict.entries.emplace_back(std::move(key), std::move(value));
  if (!dict.index_.empty()) {
    dict.index_.emplace(hash, static_cast<std::uint32_t>(i));
  } else if (dict.entries.size() > kIndexAbove) {
    for (std::uint32_t j = 0; j < dict.entries.size(); ++j) {
      std::uint64_t h = 0;
      hash_value(*this, dict.entries[j].first, h);
      dict.index_.emplace(h, j);
    }
  }
}

namespace {

Value from_json(Sandbox& sandbox, const boost::json::value& json, std::uint32_t depth) {
  if (depth > Sandbox::kMaxDepth) sandbox.fail("JSON nested deeper than {}", Sandbox::kMaxDepth);
  switch (json.kind()) {
    case boost::json::kind::null:
      return Value::none();
    case boost::json::kind::bool_:
      return Value::boolean(json.get_bool());
    case boost::json::kind::int64:
      return Value::integer(json.get_int64());
    case boost::json::kind::uint64:
      sandbox.fail("integer {} is above 2^63 - 1", json.get_uint64());
    case boost::json::kind::double_:
      return Value::real(json.get_double());
    case boost::json::kind::string: {
      const auto& s = json.get_string();
      return sandbox.string(sanitize_utf8(std::string_view(s.data(), s.size())));
    }
    case boost::json::kind::array: {
      std::vector<Value> items;
      items.reserve(json.get_array().size());
      for (const auto& item : json.get_array())
        items.push_back(from_json(sandbox, item, depth + 1));
      return sandbox.list(std::move(items));
    }
    case boost::json::kind::object: {
      DictObject& dict = sandbox.dict();
      for (const auto& [key, item] : json.get_object()) {
        const std::string_view name(key.data(), key.size());
        sandbox.set(dict, sandbox.string(sanitize_utf8(name)), from_json(sandbox, item, depth + 1));
      }
      return Value::object(&dict);
    }
  }
  return Value::none();
}

}  // namespace

Value value_from_json(Sandbox& sandbox, const boost::json::value& json) {
  return from_json(sandbox, json, 0);
}

const char* type_name(const Value& value) {
  switch (value.kind()) {
    case Kind::kMissing:
    case Kind::kUndefined:
      return "Undefined";
    case Kind::kNone:
      return "NoneType";
    case Kind::kBool:
      return "bool";
    case Kind::kInt:
      return "int";
    case Kind::kFloat:
      return "float";
    case Kind::kString:
      return value.as_text().markup ? "Markup" : "str";
    case Kind::kList:
      return "list";
    case Kind::kTuple:
      return "tuple";
    case Kind::kDict:
      return "dict";
    case Kind::kView:
      switch (value.as<ViewObject>().part) {
        case ViewObject::Part::kKeys:
          return "dict_keys";
        case ViewObject::Part::kValues:
          return "dict_values";
        case ViewObject::Part::kItems:
          return "dict_items";
      }
      return "dict_items";
    case Kind::kRange:
      return "range";
    case Kind::kGenerator:
      return "generator";
    case Kind::kNamespace:
      return "Namespace";
    case Kind::kLoop:
      return "LoopContext";
    case Kind::kCycler:
      return "Cycler";
    case Kind::kJoiner:
      return "Joiner";
    case Kind::kMacro:
      return "Macro";
    case Kind::kFunction:
      return "function";
  }
  return "object";
}

bool is_true(const Value& value) {
  switch (value.kind()) {
    case Kind::kMissing:
    case Kind::kUndefined:
    case Kind::kNone:
      return false;
    case Kind::kBool:
      return value.as_bool();
    case Kind::kInt:
      return value.as_int() != 0;
    case Kind::kFloat:
      return value.as_double() != 0.0;
    case Kind::kString:
      return !value.str().empty();
    case Kind::kList:
    case Kind::kTuple:
      return !value.items().empty();
    case Kind::kDict:
      return !value.dict().entries.empty();
    case Kind::kView:
      return !value.as<ViewObject>().dict->entries.empty();
    case Kind::kRange:
      return value.as<RangeObject>().count != 0;
    default:
      return true;
  }
}

bool equal(Sandbox& sandbox, const Value& a, const Value& b) {
  if (a.is_number() && b.is_number()) {
    if (a.is_integral() && b.is_integral()) return a.as_int() == b.as_int();
    return a.as_double() == b.as_double();
  }
  if (a.kind() != b.kind()) return false;
  switch (a.kind()) {
    case Kind::kMissing:
    case Kind::kUndefined:
    case Kind::kNone:
      return true;
    case Kind::kString:
      if (a.str().size() != b.str().size()) return false;
      sandbox.copy(a.str().size());
      return a.str() == b.str();
    case Kind::kList:
    case Kind::kTuple:
      // The same list twice inside itself makes a walk exponential: every visit is a step.
      sandbox.step();
      return a.as_object() == b.as_object() ||
             std::equal(
                 a.items().begin(), a.items().end(), b.items().begin(), b.items().end(),
                 [&sandbox](const Value& x, const Value& y) { return equal(sandbox, x, y); });
    case Kind::kDict: {
      sandbox.step();
      if (a.as_object() == b.as_object()) return true;
      const auto& entries = a.dict().entries;
      if (entries.size() != b.dict().entries.size()) return false;
      return std::all_of(entries.begin(), entries.end(), [&](const auto& entry) {
        const Value* other = b.dict().find(sandbox, entry.first);
        return other != nullptr && equal(sandbox, entry.second, *other);
      });
    }
    case Kind::kRange: {
      const auto& x = a.as<RangeObject>();
      const auto& y = b.as<RangeObject>();
      return x.count == y.count && (x.count == 0 || x.start == y.start) &&
             (x.count <= 1 || x.step == y.step);
    }
    case Kind::kFunction: {
      const auto& x = a.as<FunctionObject>();
      const auto& y = b.as<FunctionObject>();
      return x.name == y.name && x.self.kind() == y.self.kind() && equal(sandbox, x.self, y.self);
    }
    default:
      return a.as_object() == b.as_object();
  }
}

bool hash_value(Sandbox& sandbox, const Value& value, std::uint64_t& hash) {
  sandbox.step();
  switch (value.kind()) {
    case Kind::kBool:
    case Kind::kInt:
      hash = std::hash<double>()(static_cast<double>(value.as_int()));
      return true;
    case Kind::kFloat:
      hash = std::hash<double>()(value.as_double());
      return true;
    case Kind::kString:
      sandbox.copy(value.str().size());
      hash = std::hash<std::string_view>()(value.str());
      return true;
    case Kind::kList:
    case Kind::kDict:
    case Kind::kView:
      return false;
    case Kind::kTuple: {
      hash = 0x9E3779B97F4A7C15;
      for (const Value& item : value.items()) {
        std::uint64_t h = 0;
        if (!hash_value(sandbox, item, h)) return false;
        hash = (hash ^ h) * 0x100000001B3;
      }
      return true;
    }
    case Kind::kMissing:
    case Kind::kUndefined:
    case Kind::kNone:
      hash = static_cast<std::uint64_t>(value.kind());
      return true;
    default:
      hash = std::hash<const void*>()(value.as_object());
      return true;
  }
}

}  // namespace pianola::jinja
