// Strict JSON for model files: Boost.JSON plus what it does not check (duplicate keys, numbers that
// overflow to infinity, depth), and typed field readers whose errors name the field's path.
//
//   const boost::json::value root = parse_json(text, "config.json");
//   const JsonObject config(root, "config.json");
//   int layers = config.get_int("num_hidden_layers", 1, 1024);        // required, with its range
//   double theta = config.find_float("rope_theta").value_or(1e4);
#pragma once

#include <boost/json.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace pianola {

// Parses one JSON document. Throws InvalidModel naming `where` and the byte offset for malformed
// text, a depth above 64, a duplicate key, a number that is not finite, or trailing bytes.
boost::json::value parse_json(std::string_view text, std::string_view where);

// A view of one JSON object with typed access. find_* gives nullopt (nullptr) for an absent or null
// field; get_* throws for it. A wrong type or a value outside [low, high] throws InvalidModel that
// names the path ("config.json: rope_scaling.factor"), the rule and what was found.
class JsonObject {
 public:
  JsonObject(const boost::json::value& value, std::string path);

  const boost::json::value* find(std::string_view key) const;
  std::optional<bool> find_bool(std::string_view key) const;
  std::optional<std::int64_t> find_int(std::string_view key, std::int64_t low = INT64_MIN,
                                       std::int64_t high = INT64_MAX) const;
  std::optional<double> find_float(std::string_view key) const;
  std::optional<std::string> find_string(std::string_view key) const;
  std::optional<JsonObject> find_object(std::string_view key) const;
  const boost::json::array* find_array(std::string_view key) const;

  std::int64_t get_int(std::string_view key, std::int64_t low = INT64_MIN,
                       std::int64_t high = INT64_MAX) const;
  double get_float(std::string_view key) const;
  std::string get_string(std::string_view key) const;
  JsonObject get_object(std::string_view key) const;

  const boost::json::object& object() const { return *object_; }
  const std::string& path() const { return path_; }
  // "config.json: rope_scaling.factor"
  std::string field_path(std::string_view key) const;

 private:
  const boost::json::object* object_;
  std::string path_;
};

}  // namespace pianola
