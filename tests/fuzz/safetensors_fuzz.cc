// Any bytes as a safetensors file (either an Error, or tensors that cover the file), and as the
// index of a model in shards (either an Error, or plain file names).
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string_view>

#include "pianola/error.h"
#include "weights/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    const auto header = pianola::parse_safetensors(std::as_bytes(std::span(data, size)), "fuzz");
    std::uint64_t covered = header.data_offset;
    for (const pianola::TensorInfo& t : header.tensors) {
      if (t.offset < header.data_offset || t.bytes > size || t.offset > size - t.bytes)
        std::abort();
      covered += t.bytes;
    }
    if (covered != size) std::abort();
  } catch (const pianola::Error& e) {
    if (e.code() == pianola::ErrorCode::kInternal) std::abort();
  }
  try {
    const std::string_view text(reinterpret_cast<const char*>(data), size);
    for (const auto& [tensor, file] : pianola::parse_safetensors_index(text, "fuzz")) {
      if (file.find('/') != std::string_view::npos) std::abort();
    }
  } catch (const pianola::Error& e) {
    if (e.code() == pianola::ErrorCode::kInternal) std::abort();
  }
  return 0;
}
