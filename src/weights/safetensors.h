// Reader of safetensors files and of the folders Hugging Face models come in.
//
//   SafetensorsHeader header = parse_safetensors(file.bytes(), "model.safetensors");
//   auto checkpoint = open_hugging_face("folder", {});    // config.json, one file or shards
//
// A file is read only if every byte behind its header belongs to exactly one tensor, and an index
// only if it and its shards list the same tensors. The header is parsed as a stream: memory stays
// below three times its size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "weights/checkpoint.h"

namespace pianola {

struct SafetensorsHeader {
  std::uint64_t data_offset = 0;    // from the start of the file
  std::vector<TensorInfo> tensors;  // in the header's order; offsets from the start of the file
};

// `file` is the whole file. Throws InvalidModel or Unsupported; `where` opens each message.
SafetensorsHeader parse_safetensors(std::span<const std::byte> file, std::string_view where);

// Checks the text of a model.safetensors.index.json and gives its weight map: pairs (tensor, file),
// sorted by tensor. Files are plain names that end in .safetensors.
std::vector<std::pair<std::string, std::string>> parse_safetensors_index(std::string_view text,
                                                                         std::string_view where);

// Opens `folder`, or only `file` of it when that is not empty (its config.json is read all the
// same).
std::unique_ptr<Checkpoint> open_hugging_face(const std::filesystem::path& folder,
                                              const std::filesystem::path& file);

}  // namespace pianola
