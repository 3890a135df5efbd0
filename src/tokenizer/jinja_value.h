// Values of the Jinja interpreter: what a template computes with, with the semantics of the Python
// objects that Hugging Face templates meet (None, bool, int, float, str, list, tuple, dict, ...).
//
// A Value is 16 bytes. Strings are shared and immutable; containers belong to a Sandbox, which
// frees them all together when the rendering ends: values may form cycles (through namespaces) and
// nests of any shape, and neither leaks nor recurses in a destructor. Every allocation is charged
// to the Sandbox, so a template cannot take more memory, time or depth than its limits.
//
//   Sandbox sandbox(limits);
//   Value v = value_from_json(sandbox, parse_json(R"({"role": "user"})", "request"));
//   const Value* role = v.dict().find("role");
#pragma once

#include <boost/json/fwd.hpp>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/check.h"

namespace pianola::jinja {

// Bounds of one template. A template that reaches one is refused with InvalidArgument (running) or
// InvalidModel (its source).
struct Limits {
  std::size_t source_bytes = std::size_t{1} << 20;
  std::size_t nesting = 100;  // of statements and of expressions in the source
  std::int64_t steps =
      1'000'000;  // nodes evaluated, items visited, 1 for 64 bytes copied, 1 for 8 scanned
  std::size_t output_bytes = std::size_t{4} << 20;
  std::size_t memory_bytes = std::size_t{64} << 20;  // of all values alive
  int call_depth = 100;                              // macros and recursive loops
  int cpu_ms = 200;                                  // of this thread; 0: no limit
};

enum class Kind : std::uint8_t {
  kMissing,  // an argument that was not passed; never visible to a template
  kUndefined,
  kNone,
  kBool,
  kInt,
  kFloat,
  kString,
  kList,
  kTuple,
  kDict,
  kView,       // dict.keys(), .values(), .items()
  kRange,      // range(...)
  kGenerator,  // what lazy filters give: can be walked once, has no length
  kNamespace,
  kLoop,  // the `loop` variable
  kCycler,
  kJoiner,
  kMacro,
  kFunction,  // a global function or a bound method
};

// An immutable string: UTF-8, always valid.
struct Text {
  std::atomic<std::uint32_t> references{0};
  bool ascii = true;            // then bytes are code points
  bool markup = false;          // markupsafe.Markup: what |safe and |escape give
  std::size_t* live = nullptr;  // the memory count to give the bytes back to
  std::string bytes;
};

struct Object {
  explicit Object(Kind k) : kind(k) {}
  virtual ~Object() = default;
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;
  const Kind kind;
  std::uint32_t depth = 1;  // nesting of containers below and including this one
};

struct ListObject;
struct DictObject;
class Sandbox;

class Value {
 public:
  Value() : kind_(Kind::kMissing) { payload_.integer = 0; }
  Value(const Value& other) : kind_(other.kind_), payload_(other.payload_) { retain(); }
  Value(Value&& other) noexcept : kind_(other.kind_), payload_(other.payload_) {
    other.kind_ = Kind::kMissing;
  }
  Value& operator=(const Value& other) {
    Value copy(other);
    swap(copy);
    return *this;
  }
  Value& operator=(Value&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Value() { release(); }

  static Value none() { return Value(Kind::kNone); }
  static Value boolean(bool b);
  static Value integer(std::int64_t i);
  static Value real(double f);
  // Takes over one reference. A null message is the plain Undefined.
  static Value undefined(Text* message);
  static Value text(Text* text);
  static Value object(Object* object);

  Kind kind() const { return kind_; }
  bool is(Kind kind) const { return kind_ == kind; }
  bool is_string() const { return kind_ == Kind::kString; }
  bool is_undefined() const { return kind_ == Kind::kUndefined; }
  bool is_sequence() const { return kind_ == Kind::kList || kind_ == Kind::kTuple; }
  // bool and int, as Python's isinstance(value, int).
  bool is_integral() const { return kind_ == Kind::kInt || kind_ == Kind::kBool; }
  bool is_number() const { return is_integral() || kind_ == Kind::kFloat; }

  bool as_bool() const { return payload_.boolean; }
  std::int64_t as_int() const {
    return kind_ == Kind::kBool ? (payload_.boolean ? 1 : 0) : payload_.integer;
  }
  double as_double() const {
    return kind_ == Kind::kFloat ? payload_.real : static_cast<double>(as_int());
  }
  const Text& as_text() const { return *payload_.text; }
  const std::string& str() const { return payload_.text->bytes; }
  // The message of an undefined value; null when it has none.
  const Text* undefined_message() const { return payload_.text; }
  Object* as_object() const { return payload_.object; }
  template <typename T>
  T& as() const {
    return static_cast<T&>(*payload_.object);
  }
  const std::vector<Value>& items() const;  // of a list or tuple
  DictObject& dict() const;

  // Nesting of containers in this value: 0 for a scalar.
  std::uint32_t depth() const { return is_object() ? payload_.object->depth : 0; }
  bool is_object() const { return kind_ >= Kind::kList; }

 private:
  explicit Value(Kind kind) : kind_(kind) { payload_.integer = 0; }
  void swap(Value& other) noexcept {
    std::swap(kind_, other.kind_);
    std::swap(payload_, other.payload_);
  }
  bool has_text() const {
    return (kind_ == Kind::kString || kind_ == Kind::kUndefined) && payload_.text != nullptr;
  }
  void retain() const {
    if (has_text()) payload_.text->references.fetch_add(1, std::memory_order_relaxed);
  }
  void release() {
    if (has_text() && payload_.text->references.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      free_text(payload_.text);
    }
  }
  static void free_text(Text* text);

  Kind kind_;
  union {
    bool boolean;
    std::int64_t integer;
    double real;
    Text* text;
    Object* object;
  } payload_;
};

struct ListObject : Object {
  explicit ListObject(Kind k) : Object(k) {}
  std::vector<Value> items;
  bool group = false;  // a (grouper, list) pair of |groupby, whose parts have names
};

// A dictionary that keeps the order of insertion. Keys compare as in Python: 1 == 1.0 == True.
struct DictObject : Object {
  DictObject() : Object(Kind::kDict) {}
  std::vector<std::pair<Value, Value>> entries;

  const Value* find(Sandbox& sandbox, const Value& key) const;
  const Value* find(std::string_view key) const;

 private:
  friend class Sandbox;
  std::size_t find_index(Sandbox& sandbox, const Value& key, std::uint64_t hash) const;
  std::unordered_multimap<std::uint64_t, std::uint32_t> index_;  // filled above eight entries
};

struct ViewObject : Object {
  enum class Part : std::uint8_t { kKeys, kValues, kItems };
  ViewObject() : Object(Kind::kView) {}
  Part part = Part::kKeys;
  const DictObject* dict = nullptr;
};

struct RangeObject : Object {
  RangeObject() : Object(Kind::kRange) {}
  std::int64_t start = 0, stop = 0, step = 1, count = 0;
};

struct GeneratorObject : Object {
  GeneratorObject() : Object(Kind::kGenerator) {}
  std::vector<Value> items;
  std::size_t position = 0;
};

struct NamespaceObject : Object {
  NamespaceObject() : Object(Kind::kNamespace) {}
  DictObject* attributes = nullptr;
};

struct CyclerObject : Object {
  CyclerObject() : Object(Kind::kCycler) {}
  std::vector<Value> items;
  std::size_t position = 0;
};

struct JoinerObject : Object {
  JoinerObject() : Object(Kind::kJoiner) {}
  Value separator;
  bool used = false;
};

// A global function, or a method together with the value it was taken from.
struct FunctionObject : Object {
  FunctionObject() : Object(Kind::kFunction) {}
  std::string_view name;  // static storage
  Value self;             // kMissing for a global
};

// What bounds one rendering (or one parse): steps, memory and time; and the line that errors name.
class Sandbox {
 public:
  explicit Sandbox(const Limits& limits);
  Sandbox(const Sandbox&) = delete;
  Sandbox& operator=(const Sandbox&) = delete;
  ~Sandbox();

  const Limits& limits() const { return limits_; }
  std::uint32_t line = 1;

  // Counts work: one step, or `bytes` read or written.
  void step() { step(1); }
  void step(std::int64_t n) {
    steps_ -= n;
    if (steps_ < check_at_) check_budget();
  }
  void copy(std::size_t bytes) { step(1 + static_cast<std::int64_t>(bytes / 64)); }
  // Work on every character of `bytes`, which costs more than copying them.
  void scan(std::size_t bytes) { step(1 + static_cast<std::int64_t>(bytes / 8)); }
  // Throws when `bytes` more would not fit: call it before a large string or list is built.
  void reserve(std::size_t bytes) const;
  // As copy() and reserve(), for `count` values.
  void reserve_items(std::size_t count);

  Value string(std::string bytes, bool markup = false);
  Value undefined(std::string message);
  Value undefined() { return Value::undefined(nullptr); }
  Value list(std::vector<Value> items) { return sequence(Kind::kList, std::move(items)); }
  Value tuple(std::vector<Value> items) { return sequence(Kind::kTuple, std::move(items)); }
  Value sequence(Kind kind, std::vector<Value> items);
  Value generator(std::vector<Value> items);
  Value function(std::string_view name, Value self = Value());
  DictObject& dict();
  // Inserts or replaces. An unhashable key is an error, as in Python.
  void set(DictObject& dict, Value key, Value value);
  template <typename T>
  T& make() {
    auto owned = std::make_unique<T>();
    T& object = *owned;
    adopt(std::move(owned), sizeof(T));
    return object;
  }
  // Records that `child` is now inside `parent`; refuses nests deeper than kMaxDepth.
  void nest(Object& parent, const Value& child);
  void charge(std::size_t bytes);

  // A failure of the template at the current line.
  template <typename... Args>
  [[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) const {
    raise(ErrorCode::kInvalidArgument, fmt::format(format, std::forward<Args>(args)...));
  }
  template <typename... Args>
  [[noreturn]] void unsupported(fmt::format_string<Args...> format, Args&&... args) const {
    raise(ErrorCode::kUnsupported, fmt::format(format, std::forward<Args>(args)...) +
                                       " is not supported by this interpreter");
  }

  static constexpr std::uint32_t kMaxDepth = 100;

 private:
  [[noreturn]] void raise(ErrorCode code, const std::string& message) const;
  void adopt(std::unique_ptr<Object> object, std::size_t bytes);
  void check_budget();

  const Limits limits_;
  std::int64_t steps_;
  std::int64_t check_at_;
  std::int64_t cpu_deadline_ns_ = 0;
  std::size_t live_ = 0;
  std::vector<std::unique_ptr<Object>> objects_;
};

// A string that belongs to no sandbox: a constant of a template, shared by its renderings.
Value constant_string(std::string bytes);

// Order of keys is kept. Throws InvalidArgument when it does not fit in the sandbox, or for an
// integer above 2^63 - 1. Invalid UTF-8 becomes U+FFFD.
Value value_from_json(Sandbox& sandbox, const boost::json::value& json);

// Python's type(value).__name__.
const char* type_name(const Value& value);
bool is_true(const Value& value);
// Python's ==.
bool equal(Sandbox& sandbox, const Value& a, const Value& b);
// A hash consistent with equal(); false for an unhashable value.
bool hash_value(Sandbox& sandbox, const Value& value, std::uint64_t& hash);

}  // namespace pianola::jinja
