// Key-value metadata of a model file, whatever its container: what GGUF stores beside its tensors,
// kept in a form that both the weight readers and the tokenizer can see.
//
//   Metadata m = ...;
//   int layers = m.get_int("llama.block_count");          // throws InvalidModel when absent
//   auto pre = m.find_string("tokenizer.ggml.pre");       // nullopt when absent
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace pianola {

// One value. Integers of any width are stored as int64 (a uint64 above 2^63 - 1 is refused by the
// reader), floats as double. Arrays are flat.
using MetadataValue =
    std::variant<bool, std::int64_t, double, std::string, std::vector<bool>,
                 std::vector<std::int64_t>, std::vector<double>, std::vector<std::string>>;

// Kind of the alternative held, for messages: "bool", "integer", "float", "string", "[string]", ...
const char* metadata_kind(const MetadataValue& value);

class Metadata {
 public:
  // False (and no change) when the key is there already.
  bool insert(std::string key, MetadataValue value);
  const MetadataValue* find(std::string_view key) const;
  bool contains(std::string_view key) const { return find(key) != nullptr; }
  const std::map<std::string, MetadataValue, std::less<>>& entries() const { return entries_; }

  // find_*: nullopt (nullptr) when the key is absent. All throw InvalidModel, naming the key, when
  // the value has another type. A float reader accepts an integer.
  std::optional<bool> find_bool(std::string_view key) const;
  std::optional<std::int64_t> find_int(std::string_view key) const;
  std::optional<double> find_float(std::string_view key) const;
  const std::string* find_string(std::string_view key) const;
  const std::vector<std::string>* find_strings(std::string_view key) const;
  const std::vector<bool>* find_bools(std::string_view key) const;
  const std::vector<std::int64_t>* find_ints(std::string_view key) const;
  const std::vector<double>* find_floats(std::string_view key) const;

  // get_*: as above, but an absent key is InvalidModel too.
  std::int64_t get_int(std::string_view key) const;
  double get_float(std::string_view key) const;
  const std::string& get_string(std::string_view key) const;

 private:
  std::map<std::string, MetadataValue, std::less<>> entries_;
};

}  // namespace pianola
