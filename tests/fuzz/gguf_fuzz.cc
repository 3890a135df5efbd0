// Any bytes as a GGUF file: either an Error, or tensors that lie inside the file.
#include <cstdint>
#include <cstdlib>
#include <span>

#include "pianola/error.h"
#include "weights/gguf.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    const auto header = pianola::parse_gguf(std::as_bytes(std::span(data, size)), "fuzz");
    for (const pianola::TensorInfo& t : header.tensors) {
      if (t.offset < header.data_offset || t.bytes > size || t.offset > size - t.bytes)
        std::abort();
    }
  } catch (const pianola::Error& e) {
    if (e.code() == pianola::ErrorCode::kInternal) std::abort();
  }
  return 0;
}
