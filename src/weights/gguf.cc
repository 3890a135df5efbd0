#include "weights/gguf.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>
#include <string>
#include <type_traits>

#include "base/check.h"
#include "base/utf8.h"

namespace pianola {
namespace {

static_assert(std::endian::native == std::endian::little, "GGUF is read in place");

constexpr std::uint64_t kMaxKeys = 65'536;
constexpr std::uint64_t kMaxKeyLength = 65'535;  // by the format
constexpr std::uint64_t kMaxTensorName = 1'024;  // the format says 64; real files have more
// Of all arrays together. A vocabulary of a million has four arrays of that length; kept as int64
// or std::string, the largest header needs less than 400 MB, whatever it says.
constexpr std::uint64_t kMaxArrayElements = 1U << 23;
constexpr std::uint32_t kMaxDims = 4;
constexpr std::uint32_t kMinAlignment = 8;
constexpr std::uint32_t kMaxAlignment = 1U << 20;

enum class ValueType : std::uint32_t {
  kU8,
  kI8,
  kU16,
  kI16,
  kU32,
  kI32,
  kF32,
  kBool,
  kString,
  kArray,
  kU64,
  kI64,
  kF64,
  kCount,
};

// A tensor type by its number in the format. `dtype` is empty for types that are not read here.
struct FileType {
  std::uint32_t id;
  const char* name;
  std::optional<DType> dtype;
};

constexpr FileType kFileTypes[] = {
    {0, "F32", DType::kF32},
    {1, "F16", DType::kF16},
    {2, "Q4_0", DType::kQ4_0},
    {3, "Q4_1", DType::kQ4_1},
    {6, "Q5_0", DType::kQ5_0},
    {7, "Q5_1", DType::kQ5_1},
    {8, "Q8_0", DType::kQ8_0},
    {9, "Q8_1", {}},
    {10, "Q2_K", {}},
    {11, "Q3_K", {}},
    {12, "Q4_K", DType::kQ4_K},
    {13, "Q5_K", DType::kQ5_K},
    {14, "Q6_K", DType::kQ6_K},
    {15, "Q8_K", {}},
    {16, "IQ2_XXS", {}},
    {17, "IQ2_XS", {}},
    {18, "IQ3_XXS", {}},
    {19, "IQ1_S", {}},
    {20, "IQ4_NL", {}},
    {21, "IQ3_S", {}},
    {22, "IQ2_S", {}},
    {23, "IQ4_XS", {}},
    {24, "I8", DType::kI8},
    {25, "I16", {}},
    {26, "I32", DType::kI32},
    {27, "I64", DType::kI64},
    {28, "F64", {}},
    {29, "IQ1_M", {}},
    {30, "BF16", DType::kBF16},
    {34, "TQ1_0", {}},
    {35, "TQ2_0", {}},
    {39, "MXFP4", {}},
};

// A cursor over the header that knows what it is reading, for messages. Reads at most
// kMaxHeaderBytes of the file.
class HeaderReader {
 public:
  HeaderReader(std::span<const std::byte> file, std::string_view where)
      : file_(file), end_(std::min<std::uint64_t>(file.size(), kMaxHeaderBytes)), where_(where) {}

  // What is read from here on: a kind and its name, as messages quote them.
  void enter(const char* kind, std::string_view name) {
    kind_ = kind;
    name_ = name;
  }

  template <typename... Args>
  [[noreturn]] void refuse(ErrorCode code, fmt::format_string<Args...> format,
                           Args&&... args) const {
    const std::string text = fmt::format(format, std::forward<Args>(args)...);
    if (name_.empty()) fail(code, "{}: {}: {}", where_, kind_, text);
    fail(code, "{}: {} '{}': {}", where_, kind_, printable(name_), text);
  }
  template <typename... Args>
  [[noreturn]] void refuse(fmt::format_string<Args...> format, Args&&... args) const {
    refuse(ErrorCode::kInvalidModel, format, std::forward<Args>(args)...);
  }

  std::uint64_t file_size() const { return file_.size(); }
  std::uint64_t position() const { return at_; }
  std::uint64_t left() const { return end_ - at_; }

  template <typename T>
  T read(const char* what) {
    T value;
    std::memcpy(&value, take(sizeof(T), what), sizeof(T));
    return value;
  }

  std::string_view read_string(const char* what, std::uint64_t limit = kMaxHeaderBytes) {
    const auto length = read<std::uint64_t>(what);
    if (length > limit) refuse("{} of {} bytes, at most {}", what, length, limit);
    const std::byte* data = take(length, what);
    return {reinterpret_cast<const char*>(data), length};
  }

  // Refuses a count of things that need at least `each` bytes when they cannot all be there.
  void check_count(std::uint64_t count, std::uint64_t each, const char* what) const {
    if (count > left() / each) {
      refuse("{} {}, but only {} bytes are left{}", count, what, left(), hint());
    }
  }

 private:
  const std::byte* take(std::uint64_t size, const char* what) {
    if (size > left()) {
      refuse("{} of {} bytes at {}, but only {} bytes are left{}", what, size, at_, left(), hint());
    }
    const std::byte* data = file_.data() + at_;
    at_ += size;
    return data;
  }

  const char* hint() const {
    return end_ < file_.size() ? " of the largest header that is read (100 MB)"
                               : " in the file (a partial download? fetch it again)";
  }

  std::span<const std::byte> file_;
  std::uint64_t at_ = 0;
  std::uint64_t end_;
  std::string_view where_;
  const char* kind_ = "header";
  std::string_view name_;
};

void read_magic(HeaderReader& in, GgufHeader& header) {
  const auto magic = in.read<std::uint32_t>("magic");
  if (std::memcmp(&magic, "GGUF", 4) != 0) in.refuse("not a GGUF file (it must begin with 'GGUF')");
  header.version = in.read<std::uint32_t>("version");
  if (header.version == 2 || header.version == 3) return;
  if (header.version == 1) {
    in.refuse(ErrorCode::kUnsupported, "GGUF version 1 is not read; convert the file to version 3");
  }
  if ((header.version & 0xFFFFU) == 0) {
    in.refuse(ErrorCode::kUnsupported, "a big-endian GGUF file; only little-endian files are read");
  }
  in.refuse(ErrorCode::kUnsupported, "GGUF version {}; versions 2 and 3 are read", header.version);
}

// A number of file type T as Metadata stores it.
template <typename T>
auto to_stored(const HeaderReader& in, T value) {
  if constexpr (std::is_floating_point_v<T>) {
    return static_cast<double>(value);
  } else {
    if constexpr (std::is_same_v<T, std::uint64_t>) {
      if (value > INT64_MAX) in.refuse("value {} is above 2^63 - 1", value);
    }
    return static_cast<std::int64_t>(value);
  }
}

bool read_bool(HeaderReader& in) {
  const auto value = in.read<std::uint8_t>("boolean");
  if (value > 1) in.refuse("a boolean must be 0 or 1, found {}", value);
  return value == 1;
}

// Calls f(T{}) for the number type that `type` names; false when it is not a number.
template <typename F>
bool with_number_type(ValueType type, F&& f) {
  switch (type) {
    case ValueType::kU8:
      return f(std::uint8_t{}), true;
    case ValueType::kI8:
      return f(std::int8_t{}), true;
    case ValueType::kU16:
      return f(std::uint16_t{}), true;
    case ValueType::kI16:
      return f(std::int16_t{}), true;
    case ValueType::kU32:
      return f(std::uint32_t{}), true;
    case ValueType::kI32:
      return f(std::int32_t{}), true;
    case ValueType::kF32:
      return f(float{}), true;
    case ValueType::kU64:
      return f(std::uint64_t{}), true;
    case ValueType::kI64:
      return f(std::int64_t{}), true;
    case ValueType::kF64:
      return f(double{}), true;
    default:
      return false;
  }
}

ValueType read_value_type(HeaderReader& in, const char* what) {
  const auto type = in.read<std::uint32_t>(what);
  if (type >= static_cast<std::uint32_t>(ValueType::kCount)) {
    in.refuse("unknown {} {}, at most {}", what, type,
              static_cast<std::uint32_t>(ValueType::kCount) - 1);
  }
  return static_cast<ValueType>(type);
}

MetadataValue read_array(HeaderReader& in, std::uint64_t& elements_left) {
  const ValueType type = read_value_type(in, "array element type");
  const auto count = in.read<std::uint64_t>("array length");
  if (type == ValueType::kArray) {
    in.refuse(ErrorCode::kUnsupported, "arrays of arrays are not read");
  }
  const auto allow = [&](std::uint64_t each) {
    in.check_count(count, each, "array elements");
    if (count > elements_left) {
      in.refuse("{} array elements, at most {} in all arrays of a file", count, kMaxArrayElements);
    }
    elements_left -= count;
  };
  MetadataValue result;
  const bool number = with_number_type(type, [&](auto example) {
    using T = decltype(example);
    allow(sizeof(T));
    std::vector<decltype(to_stored(in, T{}))> values;
    values.reserve(count);
    for (std::uint64_t i = 0; i < count; ++i) {
      values.push_back(to_stored(in, in.read<T>("array element")));
    }
    result = std::move(values);
  });
  if (number) return result;
  if (type == ValueType::kBool) {
    allow(1);
    std::vector<bool> values(count);
    for (std::uint64_t i = 0; i < count; ++i) values[i] = read_bool(in);
    return values;
  }
  allow(sizeof(std::uint64_t));  // a string has at least its length
  std::vector<std::string> values;
  values.reserve(count);
  for (std::uint64_t i = 0; i < count; ++i) values.emplace_back(in.read_string("string"));
  return values;
}

MetadataValue read_value(HeaderReader& in, ValueType type, std::uint64_t& elements_left) {
  if (type == ValueType::kString) return std::string(in.read_string("string"));
  if (type == ValueType::kArray) return read_array(in, elements_left);
  if (type == ValueType::kBool) return read_bool(in);
  MetadataValue result;
  with_number_type(
      type, [&](auto example) { result = to_stored(in, in.read<decltype(example)>("value")); });
  return result;
}

void set_alignment(HeaderReader& in, ValueType type, const MetadataValue& value,
                   GgufHeader& header) {
  if (type != ValueType::kU32) in.refuse("must be an unsigned 32-bit integer");
  const std::int64_t alignment = std::get<std::int64_t>(value);
  if (alignment < kMinAlignment || alignment > kMaxAlignment ||
      !std::has_single_bit(static_cast<std::uint64_t>(alignment))) {
    in.refuse("must be a power of two in [{}, {}], found {}", kMinAlignment, kMaxAlignment,
              alignment);
  }
  header.alignment = static_cast<std::uint32_t>(alignment);
}

void read_metadata(HeaderReader& in, std::uint64_t count, GgufHeader& header) {
  std::uint64_t elements_left = kMaxArrayElements;
  for (std::uint64_t i = 0; i < count; ++i) {
    in.enter("metadata", {});
    const std::string_view key = in.read_string("key", kMaxKeyLength);
    in.enter("metadata key", key);
    if (key.empty()) in.refuse("key {} of {} is empty", i, count);
    if (!is_valid_utf8(key)) in.refuse("a key must be valid UTF-8");
    if (header.metadata.contains(key)) in.refuse("duplicate key");
    const ValueType type = read_value_type(in, "value type");
    MetadataValue value = read_value(in, type, elements_left);
    if (key == "general.alignment") set_alignment(in, type, value, header);
    header.metadata.insert(std::string(key), std::move(value));
  }
}

DType read_dtype(HeaderReader& in) {
  const auto id = in.read<std::uint32_t>("type");
  for (const FileType& type : kFileTypes) {
    if (type.id != id) continue;
    if (type.dtype) return *type.dtype;
    in.refuse(ErrorCode::kUnsupported,
              "type {} is not read; use F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K "
              "or Q6_K",
              type.name);
  }
  in.refuse("unknown type {}", id);
}

// `offset` of the result is still relative to the data section.
TensorInfo read_tensor(HeaderReader& in, std::uint64_t index) {
  in.enter("tensor list", {});
  TensorInfo tensor;
  const std::string_view name = in.read_string("tensor name", kMaxTensorName);
  in.enter("tensor", name);
  if (name.empty()) in.refuse("the name of tensor {} is empty", index);
  if (!is_valid_utf8(name)) in.refuse("a name must be valid UTF-8");
  tensor.name = name;
  const auto rank = in.read<std::uint32_t>("number of dimensions");
  if (rank < 1 || rank > kMaxDims) {
    in.refuse("{} dimensions, expected 1 to {}", rank, kMaxDims);
  }
  std::int64_t dims[kMaxDims];
  for (std::uint32_t d = 0; d < rank; ++d) {
    const auto dim = in.read<std::uint64_t>("dimension");
    if (dim == 0 || dim > INT64_MAX) {
      in.refuse("dimension {} is {}, expected 1 to 2^63 - 1", d, static_cast<std::int64_t>(dim));
    }
    dims[rank - 1 - d] = static_cast<std::int64_t>(dim);  // stored innermost first
  }
  const auto shape = Shape::make({dims, rank});
  if (!shape) in.refuse("the product of its dimensions does not fit 63 bits");
  tensor.shape = *shape;
  tensor.dtype = read_dtype(in);
  const DTypeInfo& info = dtype_info(tensor.dtype);
  if (dims[rank - 1] % info.elements != 0) {
    in.refuse("rows of {} elements are not whole blocks of {} ({})", dims[rank - 1], info.elements,
              info.name);
  }
  const std::uint64_t blocks = static_cast<std::uint64_t>(shape->elements()) / info.elements;
  if (__builtin_mul_overflow(blocks, std::uint64_t{info.bytes}, &tensor.bytes)) {
    in.refuse("its size in bytes does not fit 64 bits");
  }
  tensor.offset = in.read<std::uint64_t>("offset");
  if (tensor.bytes > in.file_size() || tensor.offset > in.file_size() - tensor.bytes) {
    in.refuse(
        "{} bytes at offset {} of the tensor data, but the whole file has {} (a partial "
        "download? fetch it again)",
        tensor.bytes, tensor.offset, in.file_size());
  }
  return tensor;
}

// Places tensors in the file: each is aligned, lies inside, and begins where the one before it ends
// (with padding to the alignment), so that no byte belongs to two tensors.
void place_tensors(HeaderReader& in, GgufHeader& header) {
  std::vector<std::uint32_t> order(header.tensors.size());
  std::iota(order.begin(), order.end(), 0U);
  const auto before = [&](std::uint32_t a, std::uint32_t b) {
    return header.tensors[a].offset < header.tensors[b].offset;
  };
  if (!std::is_sorted(order.begin(), order.end(), before)) {
    std::sort(order.begin(), order.end(), before);
  }
  const std::uint64_t mask = header.alignment - 1;
  header.data_offset = (in.position() + mask) & ~mask;  // both small: cannot wrap
  std::uint64_t expected = 0;                           // from data_offset
  for (const std::uint32_t i : order) {
    TensorInfo& tensor = header.tensors[i];
    in.enter("tensor", tensor.name);
    if ((tensor.offset & mask) != 0) {
      in.refuse("offset {} is not a multiple of the alignment {}", tensor.offset, header.alignment);
    }
    const std::uint64_t space =
        in.file_size() > header.data_offset ? in.file_size() - header.data_offset : 0;
    if (tensor.offset > space || tensor.bytes > space - tensor.offset) {
      in.refuse(
          "{} bytes at offset {} of the tensor data, but the file has {} (a partial download? "
          "fetch it again)",
          tensor.bytes, tensor.offset, space);
    }
    if (tensor.offset != expected) {
      in.refuse("offset {}, expected {}: tensors {}", tensor.offset, expected,
                tensor.offset < expected ? "overlap" : "leave a hole");
    }
    expected = (tensor.offset + tensor.bytes + mask) & ~mask;  // at most file size + alignment
    tensor.offset += header.data_offset;
  }
}

}  // namespace

bool is_gguf(std::span<const std::byte> file) {
  return file.size() >= 4 && std::memcmp(file.data(), "GGUF", 4) == 0;
}

GgufHeader parse_gguf(std::span<const std::byte> file, std::string_view where) {
  HeaderReader in(file, where);
  GgufHeader header;
  read_magic(in, header);
  const auto tensors = in.read<std::uint64_t>("tensor count");
  const auto keys = in.read<std::uint64_t>("key count");
  if (tensors > kMaxTensors) in.refuse("{} tensors, at most {}", tensors, kMaxTensors);
  if (keys > kMaxKeys) in.refuse("{} metadata keys, at most {}", keys, kMaxKeys);
  // The least that one takes: a key has length, one byte, type and value; a tensor has length, one
  // byte, rank, one dimension, type and offset.
  in.check_count(keys, 8 + 1 + 4 + 1, "metadata keys");
  in.check_count(tensors, 8 + 1 + 4 + 8 + 4 + 8, "tensors");
  read_metadata(in, keys, header);
  in.enter("tensor list", {});
  in.check_count(tensors, 8 + 1 + 4 + 8 + 4 + 8, "tensors");
  header.tensors.reserve(tensors);
  for (std::uint64_t i = 0; i < tensors; ++i) header.tensors.push_back(read_tensor(in, i));
  place_tensors(in, header);
  [[maybe_unused]] const NameIndex names(header.tensors, where);  // refuses duplicates
  return header;
}

std::unique_ptr<Checkpoint> open_gguf(MappedFile file) {
  const std::string where = file.path().filename().string();
  GgufHeader header = parse_gguf(file.bytes(), where);
  if (const auto parts = header.metadata.find_int("split.count"); parts && *parts > 1) {
    fail(ErrorCode::kUnsupported,
         "{}: one part of a model split over {} files (split.count); merge them with "
         "llama-gguf-split --merge",
         where, *parts);
  }
  const std::filesystem::path folder = file.path().parent_path();
  Checkpoint::Parts parts;
  parts.format = Checkpoint::Format::kGguf;
  parts.tensors = std::move(header.tensors);
  parts.metadata = std::move(header.metadata);
  parts.files.push_back(std::move(file));
  return std::make_unique<Checkpoint>(folder, std::move(parts));
}

}  // namespace pianola
