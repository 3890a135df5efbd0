// A model on disk: its tensors by name, mapped and not copied, and what the files say about it.
//
//   auto checkpoint = open_checkpoint("SmolLM2-135M-Instruct.Q4_1.gguf");
//   if (const TensorInfo* t = checkpoint->find("token_embd.weight")) {
//     TensorView view = checkpoint->view(*t);          // [vocab, width], valid while it lives
//     ...                                              // copy or repack
//     checkpoint->drop(*t);                            // its pages are not needed any more
//   }
//
// Opening checks everything a file says before using it: a Checkpoint that exists has unique tensor
// names, and every view lies inside its file and has exactly the bytes its type and shape need.
// Errors are InvalidModel (malformed), Unsupported (well-formed, not readable here) or NotFound,
// and name file, tensor or key, and the rule. Memory is bounded by a small multiple of the header.
//
// Bytes are those of the file at the time of reading: a file that shrinks while it is mapped raises
// SIGBUS at the first read beyond its new end; turning that into a message belongs to the program.
#pragma once

#include <boost/json/fwd.hpp>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/mapped_file.h"
#include "base/metadata.h"
#include "tensor/tensor.h"

namespace pianola {

// Limits of model files: a header (all that precedes tensor data) and the tensors it lists.
inline constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;
inline constexpr std::uint64_t kMaxTensors = 1'000'000;

struct TensorInfo {
  std::string name;
  Shape shape;  // row-major, outermost first: [out, in], for GGUF, too
  DType dtype = DType::kF32;
  std::uint32_t file = 0;    // index into Checkpoint::paths()
  std::uint64_t offset = 0;  // from the start of that file
  std::uint64_t bytes = 0;
};

// Finds tensors by name. Sorted by hash, then name: fast for a million tensors, and names made to
// have one hash do not make it slow.
class NameIndex {
 public:
  NameIndex() = default;
  // Throws InvalidModel naming `where` and the tensor when two have one name.
  NameIndex(const std::vector<TensorInfo>& tensors, std::string_view where);
  // `tensors` must be those of the constructor, perhaps moved elsewhere.
  const TensorInfo* find(const std::vector<TensorInfo>& tensors, std::string_view name) const;

 private:
  struct Entry {
    std::uint64_t hash;
    std::uint32_t tensor;
  };
  std::vector<Entry> entries_;
};

class Checkpoint {
 public:
  enum class Format { kGguf, kHuggingFace };

  Format format() const { return parts_.format; }
  const char* format_name() const;

  const std::vector<TensorInfo>& tensors() const { return parts_.tensors; }
  const TensorInfo* find(std::string_view name) const;  // nullptr when there is none
  const TensorInfo& get(std::string_view name) const;   // InvalidModel when there is none
  TensorView view(const TensorInfo& tensor) const;
  void drop(const TensorInfo& tensor) const noexcept;
  // Gives back every page of every file; what is read in place comes back when it is read.
  void drop_all() const noexcept;

  // The keys of a GGUF file; empty for a Hugging Face folder.
  const Metadata& metadata() const { return parts_.metadata; }
  // config.json and generation_config.json of a Hugging Face folder; nullptr when there is none.
  const boost::json::value* config() const;
  const boost::json::value* generation_config() const;

  // The weight files, and the folder they lie in (where tokenizer.json and templates are).
  const std::vector<std::filesystem::path>& paths() const { return paths_; }
  const std::filesystem::path& folder() const { return folder_; }
  std::uint64_t total_bytes() const;  // of all weight files

  // What a reader hands over. `tensors` must have been checked against `files`.
  struct Parts {
    Format format = Format::kGguf;
    std::vector<MappedFile> files;
    std::vector<TensorInfo> tensors;
    Metadata metadata;
    std::shared_ptr<const boost::json::value> config;  // nullptr when there is none
    std::shared_ptr<const boost::json::value> generation_config;
  };
  // Throws InvalidModel when two tensors have one name.
  Checkpoint(std::filesystem::path folder, Parts parts);

 private:
  std::filesystem::path folder_;
  std::vector<std::filesystem::path> paths_;
  Parts parts_;
  NameIndex by_name_;
};

// Opens a .gguf file, a .safetensors file (with the config.json beside it), or a folder that holds
// config.json with model.safetensors or model.safetensors.index.json.
std::unique_ptr<Checkpoint> open_checkpoint(const std::filesystem::path& path);

// Refuses a file that is empty or only a Git LFS pointer to the real one.
void check_not_pointer(const MappedFile& file);

}  // namespace pianola
