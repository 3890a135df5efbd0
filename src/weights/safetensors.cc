#include "weights/safetensors.h"

#include <boost/json/basic_parser_impl.hpp>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>

#include "base/check.h"
#include "base/utf8.h"

namespace pianola {
namespace {

namespace json = boost::json;

constexpr std::size_t kMaxNameLength = 1'024;
constexpr std::size_t kMaxMetadataKeys = 65'536;

struct FileType {
  std::string_view name;
  DType dtype;
};

constexpr FileType kFileTypes[] = {
    {"F32", DType::kF32}, {"F16", DType::kF16}, {"BF16", DType::kBF16}, {"I64", DType::kI64},
    {"I32", DType::kI32}, {"I8", DType::kI8},   {"U8", DType::kU8},
};

// Types of the format that are not read; BOOL, for one, has no use in a model's weights.
constexpr std::string_view kOtherTypes[] = {
    "BOOL", "F4",  "F6_E2M3", "F6_E3M2",     "F8_E5M2",     "F8_E4M3", "F8_E8M0", "I16",
    "U16",  "U32", "U64",     "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F64",     "C64",
};

// Follows the header's only legal shape:
//   { "__metadata__": {string: string...},
//     name: {"dtype": string, "shape": [integer...], "data_offsets": [begin, end]}... }
// Boost.JSON has checked syntax, UTF-8 and escapes when a handler is called.
class HeaderHandler {
 public:
  static constexpr std::size_t max_object_size = static_cast<std::size_t>(-1);
  static constexpr std::size_t max_array_size = static_cast<std::size_t>(-1);
  static constexpr std::size_t max_key_size = static_cast<std::size_t>(-1);
  static constexpr std::size_t max_string_size = static_cast<std::size_t>(-1);

  std::vector<TensorInfo> tensors;  // offset: begin; bytes: end - begin, both from the data section
  std::string problem;
  ErrorCode problem_code = ErrorCode::kInvalidModel;

  bool on_document_begin(json::error_code&) { return true; }
  bool on_document_end(json::error_code&) { return true; }
  bool on_comment_part(json::string_view, json::error_code&) { return true; }
  bool on_comment(json::string_view, json::error_code&) { return true; }

  bool on_object_begin(json::error_code& ec) {
    switch (at_) {
      case At::kStart:
        at_ = At::kTop;
        return true;
      case At::kMetadata:
        at_ = At::kMetadataEntries;
        return true;
      case At::kTensor:
        at_ = At::kFields;
        has_dtype_ = has_shape_ = has_offsets_ = false;
        return true;
      default:
        return refuse_value("an object", ec);
    }
  }

  bool on_object_end(std::size_t, json::error_code& ec) {
    if (at_ == At::kTop) {
      at_ = At::kEnd;
      return true;
    }
    if (at_ == At::kMetadataEntries) {
      at_ = At::kTop;
      return finish_metadata(ec);
    }
    at_ = At::kTop;
    return finish_tensor(ec);
  }

  bool on_array_begin(json::error_code& ec) {
    if (in_array_ || (at_ != At::kShape && at_ != At::kOffsets)) {
      return refuse_value("an array", ec);
    }
    numbers_ = 0;
    in_array_ = true;
    return true;
  }

  bool on_array_end(std::size_t, json::error_code& ec) {
    in_array_ = false;
    if (at_ == At::kShape) {
      const auto shape = Shape::make({values_, static_cast<std::size_t>(numbers_)});
      if (!shape) return refuse("the product of its shape does not fit 63 bits", ec);
      tensor_.shape = *shape;
    } else {
      if (numbers_ != 2) return refuse("'data_offsets' must be [begin, end]", ec);
      if (values_[0] > values_[1]) {
        return refuse(
            fmt::format("data_offsets [{}, {}]: begin is behind end", values_[0], values_[1]), ec);
      }
      tensor_.offset = static_cast<std::uint64_t>(values_[0]);
      tensor_.bytes = static_cast<std::uint64_t>(values_[1] - values_[0]);
    }
    at_ = At::kFields;
    return true;
  }

  bool on_key_part(json::string_view part, std::size_t total, json::error_code& ec) {
    if (total > kMaxNameLength) return refuse_key_length(ec);
    text_.append(part.data(), part.size());
    return true;
  }

  bool on_key(json::string_view part, std::size_t total, json::error_code& ec) {
    if (total > kMaxNameLength) return refuse_key_length(ec);
    text_.append(part.data(), part.size());
    const std::string key = std::exchange(text_, {});
    switch (at_) {
      case At::kTop:
        return begin_entry(key, ec);
      case At::kMetadataEntries:
        if (metadata_keys_.size() == kMaxMetadataKeys) {
          return refuse(fmt::format("more than {} entries", kMaxMetadataKeys), ec);
        }
        metadata_keys_.push_back(key);
        at_ = At::kMetadataValue;
        return true;
      default:
        return begin_field(key, ec);
    }
  }

  bool on_string_part(json::string_view part, std::size_t total, json::error_code& ec) {
    if (at_ == At::kMetadataValue) return true;
    if (at_ != At::kDtype) return refuse_value("a string", ec);
    if (total > kMaxNameLength) return refuse("unknown dtype", ec);
    text_.append(part.data(), part.size());
    return true;
  }

  bool on_string(json::string_view part, std::size_t total, json::error_code& ec) {
    if (at_ == At::kMetadataValue) {
      at_ = At::kMetadataEntries;
      return true;
    }
    if (!on_string_part(part, total, ec)) return false;
    const std::string name = std::exchange(text_, {});
    at_ = At::kFields;
    for (const FileType& type : kFileTypes) {
      if (type.name != name) continue;
      tensor_.dtype = type.dtype;
      return true;
    }
    if (std::find(std::begin(kOtherTypes), std::end(kOtherTypes), name) != std::end(kOtherTypes)) {
      problem_code = ErrorCode::kUnsupported;
      return refuse(fmt::format("dtype {} is not read; convert it to F32, F16 or BF16", name), ec);
    }
    return refuse(fmt::format("unknown dtype '{}'", printable(name)), ec);
  }

  bool on_int64(std::int64_t value, json::string_view text, json::error_code& ec) {
    if (!in_array_) return refuse_value("a number", ec);
    if (value < 0 || text.starts_with('-')) {  // -0, too: other readers take it for a float
      return refuse(fmt::format("{} {} is negative", field(), std::string_view(text)), ec);
    }
    if (numbers_ == Shape::kMaxRank) {
      return refuse(fmt::format("{} has more than {} entries", field(), Shape::kMaxRank), ec);
    }
    values_[numbers_++] = value;
    return true;
  }

  bool on_number_part(json::string_view, json::error_code&) { return true; }
  bool on_uint64(std::uint64_t value, json::string_view, json::error_code& ec) {
    if (!in_array_) return refuse_value("a number", ec);
    return refuse(fmt::format("{} {} is above 2^63 - 1", field(), value), ec);
  }
  bool on_double(double, json::string_view, json::error_code& ec) {
    return refuse_value("a number that is not an integer", ec);
  }
  bool on_bool(bool, json::error_code& ec) { return refuse_value("a boolean", ec); }
  bool on_null(json::error_code& ec) { return refuse_value("null", ec); }

 private:
  enum class At {
    kStart,
    kTop,              // between entries
    kMetadata,         // at the value of __metadata__
    kMetadataEntries,  // in it, between entries
    kMetadataValue,    // at one of its values
    kTensor,           // at the value of a tensor's name
    kFields,           // in it, between fields
    kDtype,            // at the value of a field, or in its array
    kShape,
    kOffsets,
    kEnd,
  };

  const char* field() const { return at_ == At::kShape ? "shape entry" : "data offset"; }

  // The place a message begins with.
  std::string place() const {
    switch (at_) {
      case At::kStart:
      case At::kEnd:
        return "header";
      case At::kMetadata:
      case At::kMetadataEntries:
      case At::kMetadataValue:
        return "__metadata__";
      default:
        return tensor_.name.empty() ? "header"
                                    : fmt::format("tensor '{}'", printable(tensor_.name));
    }
  }

  bool refuse(const std::string& text, json::error_code& ec) {
    problem = fmt::format("{}: {}", place(), text);
    ec = json::error::exception;
    return false;
  }

  bool refuse_key_length(json::error_code& ec) {
    return refuse(fmt::format("a name is longer than {} bytes", kMaxNameLength), ec);
  }

  bool refuse_value(const char* found, json::error_code& ec) {
    switch (at_) {
      case At::kStart:
        return refuse(fmt::format("must be an object, found {}", found), ec);
      case At::kMetadata:
        return refuse(fmt::format("must be an object of strings, found {}", found), ec);
      case At::kMetadataValue:
        return refuse(fmt::format("values must be strings, found {}", found), ec);
      case At::kTensor:
        return refuse(fmt::format("must be an object, found {}", found), ec);
      case At::kDtype:
        return refuse(fmt::format("'dtype' must be a string, found {}", found), ec);
      default:
        return refuse(fmt::format("'{}' must be an array of integers, found {}",
                                  at_ == At::kShape ? "shape" : "data_offsets", found),
                      ec);
    }
  }

  bool begin_entry(const std::string& name, json::error_code& ec) {
    tensor_ = {};
    if (name == "__metadata__") {
      if (has_metadata_) return refuse("duplicate '__metadata__'", ec);
      has_metadata_ = true;
      at_ = At::kMetadata;
      return true;
    }
    if (name.empty()) return refuse("a tensor's name is empty", ec);
    tensor_.name = name;
    if (tensors.size() == kMaxTensors) {
      return refuse(fmt::format("more than {} tensors", kMaxTensors), ec);
    }
    at_ = At::kTensor;
    return true;
  }

  bool begin_field(const std::string& name, json::error_code& ec) {
    bool* seen = nullptr;
    if (name == "dtype") {
      seen = &has_dtype_;
      at_ = At::kDtype;
    } else if (name == "shape") {
      seen = &has_shape_;
      at_ = At::kShape;
    } else if (name == "data_offsets") {
      seen = &has_offsets_;
      at_ = At::kOffsets;
    } else {
      return refuse(fmt::format("unknown field '{}'", printable(name)), ec);
    }
    if (*seen) return refuse(fmt::format("duplicate field '{}'", name), ec);
    *seen = true;
    return true;
  }

  bool finish_metadata(json::error_code& ec) {
    std::sort(metadata_keys_.begin(), metadata_keys_.end());
    const auto twice = std::adjacent_find(metadata_keys_.begin(), metadata_keys_.end());
    if (twice != metadata_keys_.end()) {
      return refuse(fmt::format("duplicate key '{}' in __metadata__", printable(*twice)), ec);
    }
    metadata_keys_ = {};
    return true;
  }

  bool finish_tensor(json::error_code& ec) {
    for (const auto& [seen, name] :
         {std::pair{has_dtype_, "dtype"}, {has_shape_, "shape"}, {has_offsets_, "data_offsets"}}) {
      if (!seen) return refuse(fmt::format("'{}' is missing", name), ec);
    }
    std::uint64_t bytes = 0;
    const DTypeInfo& info = dtype_info(tensor_.dtype);
    if (__builtin_mul_overflow(static_cast<std::uint64_t>(tensor_.shape.elements()),
                               std::uint64_t{info.bytes}, &bytes)) {
      return refuse("its size in bytes does not fit 64 bits", ec);
    }
    if (bytes != tensor_.bytes) {
      return refuse(fmt::format("{} {} needs {} bytes, but data_offsets give {}", info.name,
                                tensor_.shape.to_string(), bytes, tensor_.bytes),
                    ec);
    }
    tensors.push_back(std::move(tensor_));
    tensor_ = {};
    return true;
  }

  At at_ = At::kStart;
  TensorInfo tensor_;
  std::string text_;  // the parts of a key or dtype so far
  std::vector<std::string> metadata_keys_;
  std::int64_t values_[Shape::kMaxRank] = {};
  int numbers_ = 0;
  bool in_array_ = false;
  bool has_metadata_ = false;
  bool has_dtype_ = false;
  bool has_shape_ = false;
  bool has_offsets_ = false;
};

// How many tensors the header may list, to reserve once: growing a vector would need up to three
// times its size.
std::size_t count_entries(std::string_view header) {
  constexpr std::string_view kField = "\"data_offsets\"";
  std::size_t n = 0;
  for (std::size_t at = header.find(kField); at != std::string_view::npos;
       at = header.find(kField, at + kField.size())) {
    ++n;
  }
  return std::min<std::size_t>(n, kMaxTensors);
}

std::string_view header_text(std::span<const std::byte> file, std::string_view where) {
  std::uint64_t length = 0;
  if (file.size() < sizeof length) {
    fail(ErrorCode::kInvalidModel, "{}: {} bytes, too short for a safetensors file", where,
         file.size());
  }
  std::memcpy(&length, file.data(), sizeof length);
  if (length > kMaxHeaderBytes) {
    fail(ErrorCode::kInvalidModel,
         "{}: header of {} bytes, at most {}; is this a safetensors file?", where, length,
         kMaxHeaderBytes);
  }
  if (length > file.size() - sizeof length) {
    fail(ErrorCode::kInvalidModel,
         "{}: header of {} bytes, but only {} bytes follow (a partial download? fetch it again)",
         where, length, file.size() - sizeof length);
  }
  const std::string_view text(reinterpret_cast<const char*>(file.data()) + sizeof length, length);
  if (text.empty() || text[0] != '{') {
    fail(ErrorCode::kInvalidModel, "{}: the header must begin with '{{'", where);
  }
  return text;
}

// Each byte of the data section must belong to exactly one tensor.
void check_coverage(const std::vector<TensorInfo>& tensors, std::uint64_t data_size,
                    std::string_view where) {
  std::vector<std::uint32_t> order(tensors.size());
  std::iota(order.begin(), order.end(), 0U);
  const auto before = [&](std::uint32_t a, std::uint32_t b) {
    const TensorInfo& x = tensors[a];
    const TensorInfo& y = tensors[b];
    return x.offset != y.offset ? x.offset < y.offset : x.bytes < y.bytes;
  };
  if (!std::is_sorted(order.begin(), order.end(), before)) {
    std::sort(order.begin(), order.end(), before);
  }
  std::uint64_t expected = 0;
  for (const std::uint32_t i : order) {
    const TensorInfo& t = tensors[i];
    if (t.offset > data_size || t.bytes > data_size - t.offset) {
      fail(ErrorCode::kInvalidModel,
           "{}: tensor '{}' ends at byte {} of the data, but the file has {} (a partial download? "
           "fetch it again)",
           where, printable(t.name), t.offset + t.bytes, data_size);
    }
    if (t.offset != expected) {
      fail(ErrorCode::kInvalidModel,
           "{}: tensor '{}' begins at byte {} of the data, expected {}: {}", where,
           printable(t.name), t.offset, expected,
           t.offset < expected ? "tensors overlap" : "bytes that belong to no tensor");
    }
    expected += t.bytes;
  }
  if (expected != data_size) {
    fail(ErrorCode::kInvalidModel, "{}: {} bytes behind the last tensor belong to no tensor", where,
         data_size - expected);
  }
}

}  // namespace

SafetensorsHeader parse_safetensors(std::span<const std::byte> file, std::string_view where) {
  const std::string_view text = header_text(file, where);
  json::parse_options options;
  options.max_depth = 4;
  json::basic_parser<HeaderHandler> parser(options);
  HeaderHandler& handler = parser.handler();
  handler.tensors.reserve(count_entries(text));
  json::error_code ec;
  const std::size_t used = parser.write_some(false, text.data(), text.size(), ec);
  if (!handler.problem.empty()) fail(handler.problem_code, "{}: {}", where, handler.problem);
  if (ec) {
    fail(ErrorCode::kInvalidModel, "{}: header: invalid JSON at byte {}: {}", where, used,
         ec.message());
  }
  if (text.find_first_not_of(" \t\n\r", used) != std::string_view::npos) {
    fail(ErrorCode::kInvalidModel, "{}: header: bytes after the end of the JSON object at {}",
         where, used);
  }
  SafetensorsHeader header;
  header.data_offset = sizeof(std::uint64_t) + text.size();
  header.tensors = std::move(handler.tensors);
  check_coverage(header.tensors, file.size() - header.data_offset, where);
  [[maybe_unused]] const NameIndex names(header.tensors, where);  // refuses duplicates
  for (TensorInfo& tensor : header.tensors) tensor.offset += header.data_offset;
  return header;
}

}  // namespace pianola
