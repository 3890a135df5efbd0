// Tokenizers of Hugging Face folders: tokenizer.json and the small files beside it.
//
//   auto tokenizer = tokenizer_from_folder("SmolLM2-135M-Instruct");
//   auto bare = tokenizer_from_json(text, "tokenizer.json");    // no tokenizer_config.json
//
// BPE models, byte-level and SentencePiece-style, and unigram models. Whatever the file asks for
// that is not done exactly as the reference does it is Unsupported, by name; what is malformed is
// InvalidModel.
#pragma once

#include <filesystem>
#include <memory>
#include <string_view>

#include "pianola/tokenizer.h"

namespace pianola {

// Bytes of tokenizer.json that are read at most; the largest real ones have about 35 MB.
inline constexpr std::size_t kMaxTokenizerJson = std::size_t{64} << 20;

std::shared_ptr<const Tokenizer> tokenizer_from_json(std::string_view json, std::string_view where);

// Reads tokenizer.json, and where they exist tokenizer_config.json, special_tokens_map.json (names
// of bos, eos, unk, pad) and generation_config.json or config.json (ids that end a generation).
std::shared_ptr<const Tokenizer> tokenizer_from_folder(const std::filesystem::path& folder);

}  // namespace pianola
