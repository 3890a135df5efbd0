#include "base/json_reader.h"

#include <boost/json/basic_parser_impl.hpp>

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>
#include <vector>

#include "base/check.h"
#include "base/utf8.h"

namespace pianola {
namespace {

namespace json = boost::json;

constexpr std::size_t kMaxDepth = 64;

// The keys of the objects that are open, innermost last, in one buffer: large objects are common (a
// vocabulary has 150,000 keys), and a set of strings costs ten times the parsing.
class OpenKeys {
 public:
  void begin_object() { objects_.push_back({keys_.size(), text_.size()}); }

  void append(json::string_view part) { text_.append(part.data(), part.size()); }
  void end_key() {
    const std::size_t begin =
        keys_.size() == objects_.back().first_key ? objects_.back().first_byte : keys_.back().end;
    const std::string_view key = std::string_view(text_).substr(begin);
    keys_.push_back({std::hash<std::string_view>()(key), begin, text_.size()});
  }

  // Closes the innermost object; gives a key that it has twice.
  std::optional<std::string> end_object() {
    const auto [first_key, first_byte] = objects_.back();
    const auto begin = keys_.begin() + static_cast<std::ptrdiff_t>(first_key);
    // Sorted, so that keys made to have one hash cost n log n comparisons and not n^2.
    std::sort(begin, keys_.end(), [&](const Key& a, const Key& b) {
      return a.hash != b.hash ? a.hash < b.hash : view(a) < view(b);
    });
    const auto twice = std::adjacent_find(begin, keys_.end(), [&](const Key& a, const Key& b) {
      return a.hash == b.hash && view(a) == view(b);
    });
    std::optional<std::string> result;
    if (twice != keys_.end()) result = view(*twice);
    objects_.pop_back();
    keys_.resize(first_key);
    text_.resize(first_byte);
    return result;
  }

 private:
  struct Key {
    std::size_t hash;
    std::size_t begin;
    std::size_t end;
  };
  struct Object {
    std::size_t first_key;
    std::size_t first_byte;
  };
  std::string_view view(const Key& key) const {
    return std::string_view(text_).substr(key.begin, key.end - key.begin);
  }

  std::string text_;
  std::vector<Key> keys_;
  std::vector<Object> objects_;
};

// Boost.JSON keeps the last of two equal keys and turns 1e400 into infinity. This handler walks the
// same text once more and refuses both.
struct StrictHandler {
  static constexpr std::size_t max_object_size = static_cast<std::size_t>(-1);
  static constexpr std::size_t max_array_size = static_cast<std::size_t>(-1);
  static constexpr std::size_t max_key_size = static_cast<std::size_t>(-1);
  static constexpr std::size_t max_string_size = static_cast<std::size_t>(-1);

  OpenKeys keys;
  std::string problem;

  bool refuse(std::string text, json::error_code& ec) {
    problem = std::move(text);
    ec = json::error::exception;
    return false;
  }
  bool on_document_begin(json::error_code&) { return true; }
  bool on_document_end(json::error_code&) { return true; }
  bool on_array_begin(json::error_code&) { return true; }
  bool on_array_end(std::size_t, json::error_code&) { return true; }
  bool on_object_begin(json::error_code&) {
    keys.begin_object();
    return true;
  }
  bool on_object_end(std::size_t, json::error_code& ec) {
    const auto twice = keys.end_object();
    return !twice || refuse(fmt::format("duplicate key '{}'", printable(*twice)), ec);
  }
  bool on_string_part(json::string_view, std::size_t, json::error_code&) { return true; }
  bool on_string(json::string_view, std::size_t, json::error_code&) { return true; }
  bool on_key_part(json::string_view part, std::size_t, json::error_code&) {
    keys.append(part);
    return true;
  }
  bool on_key(json::string_view part, std::size_t, json::error_code&) {
    keys.append(part);
    keys.end_key();
    return true;
  }
  bool on_number_part(json::string_view, json::error_code&) { return true; }
  bool on_int64(std::int64_t, json::string_view, json::error_code&) { return true; }
  bool on_uint64(std::uint64_t, json::string_view, json::error_code&) { return true; }
  bool on_double(double value, json::string_view, json::error_code& ec) {
    return std::isfinite(value) || refuse("a number that is not finite", ec);
  }
  bool on_bool(bool, json::error_code&) { return true; }
  bool on_null(json::error_code&) { return true; }
  bool on_comment_part(json::string_view, json::error_code&) { return true; }
  bool on_comment(json::string_view, json::error_code&) { return true; }
};

const char* kind_name(const json::value& value) {
  switch (value.kind()) {
    case json::kind::null:
      return "null";
    case json::kind::bool_:
      return "a boolean";
    case json::kind::int64:
    case json::kind::uint64:
      return "an integer";
    case json::kind::double_:
      return "a float";
    case json::kind::string:
      return "a string";
    case json::kind::array:
      return "an array";
    case json::kind::object:
      return "an object";
  }
  return "a value";
}

[[noreturn]] void fail_type(const std::string& path, const char* expected,
                            const json::value& found) {
  fail(ErrorCode::kInvalidModel, "{}: expected {}, found {}", path, expected, kind_name(found));
}

}  // namespace

json::value parse_json(std::string_view text, std::string_view where) {
  json::parse_options options;
  options.max_depth = kMaxDepth;
  json::basic_parser<StrictHandler> checker(options);
  json::error_code ec;
  const std::size_t used = checker.write_some(false, text.data(), text.size(), ec);
  if (ec) {
    const std::string& problem = checker.handler().problem;
    fail(ErrorCode::kInvalidModel, "{}: invalid JSON at byte {}: {}", where, used,
         problem.empty() ? ec.message() : problem);
  }
  for (const char c : text.substr(used)) {
    if (c != ' ' && c != '\t' && c != '\n' && c != '\r') {
      fail(ErrorCode::kInvalidModel, "{}: invalid JSON: bytes after the end of the document at {}",
           where, used);
    }
  }
  json::value value = json::parse(text, ec, {}, options);
  if (ec) fail(ErrorCode::kInvalidModel, "{}: invalid JSON: {}", where, ec.message());
  return value;
}

JsonObject::JsonObject(const json::value& value, std::string path)
    : object_(value.if_object()), path_(std::move(path)) {
  if (!object_) fail_type(path_, "an object", value);
}

std::string JsonObject::field_path(std::string_view key) const {
  return fmt::format("{}{}{}", path_, path_.find(": ") == std::string::npos ? ": " : ".", key);
}

const json::value* JsonObject::find(std::string_view key) const {
  const json::value* value = object_->if_contains({key.data(), key.size()});
  return value && !value->is_null() ? value : nullptr;
}

std::optional<bool> JsonObject::find_bool(std::string_view key) const {
  const json::value* value = find(key);
  if (!value) return std::nullopt;
  if (const bool* b = value->if_bool()) return *b;
  fail_type(field_path(key), "a boolean", *value);
}

std::optional<std::int64_t> JsonObject::find_int(std::string_view key, std::int64_t low,
                                                 std::int64_t high) const {
  const json::value* value = find(key);
  if (!value) return std::nullopt;
  if (value->is_uint64()) {
    fail(ErrorCode::kInvalidModel, "{}: {} is out of range", field_path(key), value->get_uint64());
  }
  const std::int64_t* integer = value->if_int64();
  if (!integer) fail_type(field_path(key), "an integer", *value);
  if (*integer < low || *integer > high) {
    fail(ErrorCode::kInvalidModel, "{}: expected a value in [{}, {}], found {}", field_path(key),
         low, high, *integer);
  }
  return *integer;
}

std::optional<double> JsonObject::find_float(std::string_view key) const {
  const json::value* value = find(key);
  if (!value) return std::nullopt;
  if (value->is_double()) return value->get_double();
  if (value->is_int64()) return static_cast<double>(value->get_int64());
  if (value->is_uint64()) return static_cast<double>(value->get_uint64());
  fail_type(field_path(key), "a number", *value);
}

std::optional<std::string> JsonObject::find_string(std::string_view key) const {
  const json::value* value = find(key);
  if (!value) return std::nullopt;
  if (const json::string* s = value->if_string()) return std::string(s->data(), s->size());
  fail_type(field_path(key), "a string", *value);
}

std::optional<JsonObject> JsonObject::find_object(std::string_view key) const {
  const json::value* value = find(key);
  if (!value) return std::nullopt;
  return JsonObject(*value, field_path(key));
}

const json::array* JsonObject::find_array(std::string_view key) const {
  const json::value* value = find(key);
  if (!value) return nullptr;
  if (const json::array* a = value->if_array()) return a;
  fail_type(field_path(key), "an array", *value);
}

namespace {
template <typename T>
T require(std::optional<T> value, const std::string& path) {
  if (value) return *std::move(value);
  fail(ErrorCode::kInvalidModel, "{} is missing", path);
}
}  // namespace

std::int64_t JsonObject::get_int(std::string_view key, std::int64_t low, std::int64_t high) const {
  return require(find_int(key, low, high), field_path(key));
}

double JsonObject::get_float(std::string_view key) const {
  return require(find_float(key), field_path(key));
}

std::string JsonObject::get_string(std::string_view key) const {
  return require(find_string(key), field_path(key));
}

JsonObject JsonObject::get_object(std::string_view key) const {
  return require(find_object(key), field_path(key));
}

}  // namespace pianola
