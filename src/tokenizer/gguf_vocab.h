// The tokenizer of a GGUF file, from its metadata (tokenizer.ggml.*).
//
//   std::shared_ptr<const Tokenizer> tokenizer = tokenizer_from_gguf(metadata);
//
// Models "gpt2" (byte-level BPE, pre: smollm, gpt-2, gpt-4o, llama-bpe, qwen2, qwen35 and their
// aliases), "llama" (SentencePiece BPE by scores) and "t5" (SentencePiece unigram). Others are
// Unsupported, by name. Where the family's tokenizer.json normalises (qwen2: NFC), so does this.
#pragma once

#include <memory>

#include "base/metadata.h"
#include "pianola/tokenizer.h"

namespace pianola {

std::shared_ptr<const Tokenizer> tokenizer_from_gguf(const Metadata& metadata);

}  // namespace pianola
