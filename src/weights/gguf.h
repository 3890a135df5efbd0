// Reader of GGUF versions 2 and 3, little endian.
//
//   GgufHeader header = parse_gguf(file.bytes(), "model.gguf");   // touches only the header
//
// Everything is checked against the bytes left in the file before it is used: counts, lengths,
// products, alignment, offsets, overlap, duplicates. Values are kept as Metadata keeps them; string
// values are bytes, not necessarily UTF-8 (a vocabulary may hold parts of characters).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "base/mapped_file.h"
#include "base/metadata.h"
#include "weights/checkpoint.h"

namespace pianola {

struct GgufHeader {
  std::uint32_t version = 0;
  std::uint32_t alignment = 32;
  std::uint64_t data_offset = 0;  // from the start of the file; all tensors lie behind it
  Metadata metadata;
  std::vector<TensorInfo> tensors;  // in the file's order
};

// True when the bytes begin as a GGUF file of any version does.
bool is_gguf(std::span<const std::byte> file);

// `file` is the whole file. Throws InvalidModel or Unsupported; `where` opens each message.
GgufHeader parse_gguf(std::span<const std::byte> file, std::string_view where);

// As open_checkpoint for a file known to be GGUF. Parts of a split file are refused by name.
std::unique_ptr<Checkpoint> open_gguf(MappedFile file);

}  // namespace pianola
