#include "weights/checkpoint.h"

#include <algorithm>
#include <functional>

#include "base/check.h"
#include "base/utf8.h"
#include "weights/gguf.h"
#include "weights/safetensors.h"

namespace pianola {

std::unique_ptr<Checkpoint> open_checkpoint(const std::filesystem::path& path) {
  std::error_code ec;
  if (std::filesystem::is_directory(path, ec)) return open_hugging_face(path, {});
  MappedFile file(path);
  check_not_pointer(file);
  if (is_gguf(file.bytes()) || path.extension() == ".gguf") return open_gguf(std::move(file));
  if (path.extension() == ".safetensors") {
    const std::filesystem::path folder = path.parent_path();
    return open_hugging_face(folder.empty() ? "." : folder, path);
  }
  fail(
      ErrorCode::kUnsupported,
      "{}: neither a GGUF nor a .safetensors file; give one of these, or a folder with config.json "
      "and model.safetensors",
      path.string());
}

void check_not_pointer(const MappedFile& file) {
  constexpr std::string_view kPointer = "version https://git-lfs.github.com/spec/";
  const auto bytes = file.bytes();
  if (bytes.empty()) fail(ErrorCode::kInvalidModel, "{}: the file is empty", file.path().string());
  const std::string_view start(reinterpret_cast<const char*>(bytes.data()),
                               std::min(bytes.size(), kPointer.size()));
  if (start == kPointer) {
    fail(ErrorCode::kInvalidModel,
         "{}: the file is {} bytes and looks like a Git LFS pointer; fetch the real file (git lfs "
         "pull)",
         file.path().string(), bytes.size());
  }
}

Checkpoint::Checkpoint(std::filesystem::path folder, Parts parts)
    : folder_(folder.empty() ? "." : std::move(folder)), parts_(std::move(parts)) {
  for (const MappedFile& file : parts_.files) paths_.push_back(file.path());
  by_name_ = NameIndex(parts_.tensors, folder_.string());
}

const char* Checkpoint::format_name() const {
  return parts_.format == Format::kGguf ? "GGUF" : "Hugging Face safetensors";
}

const TensorInfo* Checkpoint::find(std::string_view name) const {
  return by_name_.find(parts_.tensors, name);
}

const TensorInfo& Checkpoint::get(std::string_view name) const {
  if (const TensorInfo* tensor = find(name)) return *tensor;
  fail(ErrorCode::kInvalidModel, "{}: tensor '{}' is missing", paths_.front().filename().string(),
       printable(name));
}

TensorView Checkpoint::view(const TensorInfo& tensor) const {
  const auto bytes = parts_.files[tensor.file].bytes().subspan(tensor.offset, tensor.bytes);
  return {tensor.dtype, tensor.shape, bytes.data(), bytes.size()};
}

void Checkpoint::drop(const TensorInfo& tensor) const noexcept {
  parts_.files[tensor.file].drop(tensor.offset, tensor.bytes);
}

void Checkpoint::drop_all() const noexcept {
  for (const MappedFile& file : parts_.files) file.drop(0, file.bytes().size());
}

const boost::json::value* Checkpoint::config() const { return parts_.config.get(); }

const boost::json::value* Checkpoint::generation_config() const {
  return parts_.generation_config.get();
}

std::uint64_t Checkpoint::total_bytes() const {
  std::uint64_t total = 0;
  for (const MappedFile& file : parts_.files) total += file.bytes().size();
  return total;
}

NameIndex::NameIndex(const std::vector<TensorInfo>& tensors, std::string_view where) {
  entries_.reserve(tensors.size());
  for (std::uint32_t i = 0; i < tensors.size(); ++i) {
    entries_.push_back({std::hash<std::string_view>()(tensors[i].name), i});
  }
  std::sort(entries_.begin(), entries_.end(), [&](const Entry& a, const Entry& b) {
    return a.hash != b.hash ? a.hash < b.hash : tensors[a.tensor].name < tensors[b.tensor].name;
  });
  const auto twice =
      std::adjacent_find(entries_.begin(), entries_.end(), [&](const Entry& a, const Entry& b) {
        return a.hash == b.hash && tensors[a.tensor].name == tensors[b.tensor].name;
      });
  if (twice != entries_.end()) {
    fail(ErrorCode::kInvalidModel, "{}: tensor '{}' is there twice", where,
         printable(tensors[twice->tensor].name));
  }
}

const TensorInfo* NameIndex::find(const std::vector<TensorInfo>& tensors,
                                  std::string_view name) const {
  const std::uint64_t hash = std::hash<std::string_view>()(name);
  const auto it = std::lower_bound(
      entries_.begin(), entries_.end(), name, [&](const Entry& e, std::string_view n) {
        return e.hash != hash ? e.hash < hash : tensors[e.tensor].name < n;
      });
  if (it == entries_.end() || tensors[it->tensor].name != name) return nullptr;
  return &tensors[it->tensor];
}

}  // namespace pianola
