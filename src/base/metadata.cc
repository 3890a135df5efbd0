#include "base/metadata.h"

#include <array>

#include "base/check.h"

namespace pianola {
namespace {

template <typename T>
const T* find_as(const Metadata& metadata, std::string_view key, const char* expected) {
  const MetadataValue* value = metadata.find(key);
  if (!value) return nullptr;
  if (const T* typed = std::get_if<T>(value)) return typed;
  fail(ErrorCode::kInvalidModel, "metadata key '{}': expected {}, found {}", key, expected,
       metadata_kind(*value));
}

template <typename T>
std::optional<T> to_optional(const T* value) {
  return value ? std::optional<T>(*value) : std::nullopt;
}

[[noreturn]] void fail_missing(std::string_view key) {
  fail(ErrorCode::kInvalidModel, "metadata key '{}' is missing", key);
}

}  // namespace

const char* metadata_kind(const MetadataValue& value) {
  static constexpr std::array<const char*, std::variant_size_v<MetadataValue>> kNames = {
      "bool", "integer", "float", "string", "[bool]", "[integer]", "[float]", "[string]"};
  return kNames[value.index()];
}

bool Metadata::insert(std::string key, MetadataValue value) {
  return entries_.emplace(std::move(key), std::move(value)).second;
}

const MetadataValue* Metadata::find(std::string_view key) const {
  const auto it = entries_.find(key);
  return it == entries_.end() ? nullptr : &it->second;
}

std::optional<bool> Metadata::find_bool(std::string_view key) const {
  return to_optional(find_as<bool>(*this, key, "bool"));
}

std::optional<std::int64_t> Metadata::find_int(std::string_view key) const {
  return to_optional(find_as<std::int64_t>(*this, key, "integer"));
}

std::optional<double> Metadata::find_float(std::string_view key) const {
  if (const MetadataValue* value = find(key)) {
    if (const auto* integer = std::get_if<std::int64_t>(value))
      return static_cast<double>(*integer);
  }
  return to_optional(find_as<double>(*this, key, "float"));
}

const std::string* Metadata::find_string(std::string_view key) const {
  return find_as<std::string>(*this, key, "string");
}

const std::vector<std::string>* Metadata::find_strings(std::string_view key) const {
  return find_as<std::vector<std::string>>(*this, key, "[string]");
}

const std::vector<bool>* Metadata::find_bools(std::string_view key) const {
  return find_as<std::vector<bool>>(*this, key, "[bool]");
}

const std::vector<std::int64_t>* Metadata::find_ints(std::string_view key) const {
  return find_as<std::vector<std::int64_t>>(*this, key, "[integer]");
}

const std::vector<double>* Metadata::find_floats(std::string_view key) const {
  return find_as<std::vector<double>>(*this, key, "[float]");
}

std::int64_t Metadata::get_int(std::string_view key) const {
  if (const auto value = find_int(key)) return *value;
  fail_missing(key);
}

double Metadata::get_float(std::string_view key) const {
  if (const auto value = find_float(key)) return *value;
  fail_missing(key);
}

const std::string& Metadata::get_string(std::string_view key) const {
  if (const auto* value = find_string(key)) return *value;
  fail_missing(key);
}

}  // namespace pianola
