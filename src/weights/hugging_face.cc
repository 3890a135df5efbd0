// The folder form of a model: config.json, weights in one file or in shards with an index.
#include <algorithm>
#include <iterator>
#include <optional>
#include <set>

#include "base/check.h"
#include "base/json_reader.h"
#include "base/utf8.h"
#include "weights/safetensors.h"

namespace pianola {
namespace {

namespace fs = std::filesystem;
namespace json = boost::json;

constexpr std::size_t kMaxConfigBytes = 16U << 20;
constexpr std::size_t kMaxIndexBytes = 16U << 20;
constexpr std::size_t kMaxShards = 4'096;
constexpr const char* kSingle = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

std::string file_name(const fs::path& path) { return path.filename().string(); }

bool is_plain_name(std::string_view name) {
  return !name.empty() && name != "." && name != ".." &&
         name.find_first_of(std::string_view("/\\\0", 3)) == std::string_view::npos;
}

// The file `name` of `folder`, which must not lead elsewhere through a link. The one layout of
// links that is followed is that of a Hub cache: snapshots/REVISION/name -> ../../blobs/HASH.
fs::path resolve_inside(const fs::path& folder, const std::string& name) {
  const fs::path path = folder / name;
  std::error_code ec;
  const fs::path root = fs::canonical(folder, ec);
  const fs::path target = ec ? fs::path() : fs::canonical(path, ec);
  if (ec) fail(ErrorCode::kNotFound, "{}: cannot open: {}", path.string(), ec.message());
  if (target.parent_path() == root) return path;
  const fs::path snapshots = root.parent_path();
  if (snapshots.filename() == "snapshots" &&
      target.parent_path() == snapshots.parent_path() / "blobs") {
    return path;
  }
  fail(ErrorCode::kInvalidModel,
       "{}: a link to {}, outside the model's folder; copy the file into the folder", path.string(),
       target.string());
}

// True for a link, too, wherever it leads: following it is resolve_inside's business.
bool is_there(const fs::path& path) {
  std::error_code ec;
  return fs::exists(fs::symlink_status(path, ec));
}

// nullopt when the folder has no such file.
std::shared_ptr<const json::value> read_config(const fs::path& folder, const std::string& name) {
  if (!is_there(folder / name)) return nullptr;
  const fs::path path = resolve_inside(folder, name);
  json::value value = parse_json(read_text_file(path, kMaxConfigBytes), name);
  if (!value.is_object()) {
    fail(ErrorCode::kInvalidModel, "{}: expected an object", path.string());
  }
  return std::make_shared<const json::value>(std::move(value));
}

void add_file(const fs::path& path, Checkpoint::Parts& parts) {
  MappedFile file(path);
  check_not_pointer(file);
  SafetensorsHeader header = parse_safetensors(file.bytes(), file_name(path));
  const auto index = static_cast<std::uint32_t>(parts.files.size());
  for (TensorInfo& tensor : header.tensors) tensor.file = index;
  if (parts.tensors.empty()) {
    parts.tensors = std::move(header.tensors);
  } else {
    parts.tensors.insert(parts.tensors.end(), std::make_move_iterator(header.tensors.begin()),
                         std::make_move_iterator(header.tensors.end()));
  }
  parts.files.push_back(std::move(file));
}

// The index (sorted by tensor) and the shards must list the same tensors.
void check_against_index(const std::vector<std::pair<std::string, std::string>>& index,
                         const Checkpoint::Parts& parts) {
  const NameIndex names(parts.tensors, "shards");
  for (const auto& [name, file] : index) {
    const TensorInfo* tensor = names.find(parts.tensors, name);
    if (!tensor) {
      fail(ErrorCode::kInvalidModel, "{}: tensor '{}' is listed in '{}', but is not there", kIndex,
           printable(name), printable(file));
    }
    const std::string found = file_name(parts.files[tensor->file].path());
    if (found != file) {
      fail(ErrorCode::kInvalidModel, "{}: tensor '{}' is listed in '{}', but found in '{}'", kIndex,
           printable(name), printable(file), found);
    }
  }
  if (index.size() == parts.tensors.size()) return;
  for (const TensorInfo& tensor : parts.tensors) {
    const auto listed = std::lower_bound(
        index.begin(), index.end(), tensor.name,
        [](const auto& entry, const std::string& name) { return entry.first < name; });
    if (listed == index.end() || listed->first != tensor.name) {
      fail(ErrorCode::kInvalidModel, "{}: tensor '{}' is not listed in {}",
           file_name(parts.files[tensor.file].path()), printable(tensor.name), kIndex);
    }
  }
}

void add_shards(const fs::path& folder, Checkpoint::Parts& parts) {
  const fs::path path = resolve_inside(folder, kIndex);
  const auto index = parse_safetensors_index(read_text_file(path, kMaxIndexBytes), kIndex);
  std::set<std::string> shards;  // sorted: the order of files does not depend on the index
  for (const auto& [tensor, shard] : index) shards.insert(shard);
  if (shards.size() > kMaxShards) {
    fail(ErrorCode::kInvalidModel, "{}: {} files, at most {}", kIndex, shards.size(), kMaxShards);
  }
  for (const std::string& shard : shards) {
    add_file(resolve_inside(folder, shard), parts);
    if (parts.tensors.size() > kMaxTensors) {
      fail(ErrorCode::kInvalidModel, "{}: more than {} tensors", kIndex, kMaxTensors);
    }
  }
  check_against_index(index, parts);
}

// Says what the folder has instead of `missing`.
[[noreturn]] void fail_no_model(const fs::path& folder, std::string_view missing) {
  std::string gguf;
  std::string weights;
  std::string pickle;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string extension = entry.path().extension().string();
    std::string name = file_name(entry.path());
    std::string* kind = extension == ".gguf"          ? &gguf
                        : extension == ".safetensors" ? &weights
                        : extension == ".bin" || extension == ".pt" || extension == ".pth"
                            ? &pickle
                            : nullptr;
    if (kind && (kind->empty() || name < *kind)) *kind = std::move(name);
  }
  if (!gguf.empty() || !weights.empty()) {
    fail(ErrorCode::kNotFound, "{}: no {} in this folder, but '{}': give the path of that file",
         folder.string(), missing, printable(gguf.empty() ? weights : gguf));
  }
  if (!pickle.empty()) {
    fail(ErrorCode::kUnsupported,
         "{}: no {} in this folder; '{}' is a PyTorch pickle, which is not read: save the model as "
         "safetensors",
         folder.string(), missing, printable(pickle));
  }
  fail(ErrorCode::kNotFound, "{}: no {} in this folder", folder.string(), missing);
}

// "model-00001-of-00003.safetensors"
bool is_shard_name(std::string_view name) {
  constexpr std::string_view kForm = "-#####-of-#####.safetensors";
  if (name.size() <= kForm.size()) return false;
  name.remove_prefix(name.size() - kForm.size());
  return std::equal(name.begin(), name.end(), kForm.begin(), [](char c, char form) {
    return form == '#' ? c >= '0' && c <= '9' : c == form;
  });
}

}  // namespace

std::vector<std::pair<std::string, std::string>> parse_safetensors_index(std::string_view text,
                                                                         std::string_view where) {
  const json::value root = parse_json(text, where);
  const JsonObject map = JsonObject(root, std::string(where)).get_object("weight_map");
  std::vector<std::pair<std::string, std::string>> result;
  result.reserve(map.object().size());
  for (const auto& entry : map.object()) {
    std::string tensor(entry.key().data(), entry.key().size());
    const json::string* shard = entry.value().if_string();
    if (!shard) {
      fail(ErrorCode::kInvalidModel, "{}: tensor '{}': expected a file name", where,
           printable(tensor));
    }
    std::string name(shard->data(), shard->size());
    if (!is_plain_name(name) || !name.ends_with(".safetensors")) {
      fail(ErrorCode::kInvalidModel,
           "{}: tensor '{}': '{}' is not the name of a .safetensors file in the folder", where,
           printable(tensor), printable(name));
    }
    result.emplace_back(std::move(tensor), std::move(name));
  }
  if (result.empty()) fail(ErrorCode::kInvalidModel, "{}: weight_map is empty", where);
  std::sort(result.begin(), result.end());
  return result;
}

std::unique_ptr<Checkpoint> open_hugging_face(const fs::path& folder, const fs::path& file) {
  Checkpoint::Parts parts;
  parts.format = Checkpoint::Format::kHuggingFace;
  parts.config = read_config(folder, "config.json");
  if (!parts.config) {
    if (file.empty()) fail_no_model(folder, "config.json");
    fail(ErrorCode::kNotFound, "{}: no config.json in this folder; it must lie beside the weights",
         folder.string());
  }
  parts.generation_config = read_config(folder, "generation_config.json");
  const bool has_index = is_there(folder / kIndex);
  const bool shard = is_shard_name(file_name(file));
  if (shard && !has_index) {
    fail(ErrorCode::kNotFound,
         "{}: a part of a model in several files, but {} is missing beside it", file.string(),
         kIndex);
  }
  if (!file.empty() && !shard) {
    add_file(file, parts);
  } else if (!shard && is_there(folder / kSingle)) {
    add_file(resolve_inside(folder, kSingle), parts);
  } else if (has_index) {
    add_shards(folder, parts);
  } else {
    fail_no_model(folder, fmt::format("{} or {}", kSingle, kIndex));
  }
  return std::make_unique<Checkpoint>(folder, std::move(parts));
}

}  // namespace pianola
