// The parts of a tokenizer.json, each read into TokenizerData. Internal to tokenizer_json.cc and
// its neighbours.
#pragma once

#include <memory>

#include "base/json_reader.h"
#include "tokenizer/tokenizer_data.h"

namespace pianola {

// Refuses, before anything is built, a document whose size alone would cost seconds or gigabytes.
void check_json_bounds(std::string_view json, std::string_view where);

// The whole of tokenizer.json, but for what the files beside it say.
std::unique_ptr<TokenizerData> read_tokenizer_json(std::string_view json, std::string_view where);

// "normalizer", "pre_tokenizer", "decoder" (tokenizer_json_steps.cc). Absent or null is nothing to
// do, except for the decoder, which must be there.
void read_normalizer(const JsonObject& root, TokenizerData& data);
// Returns whether the pieces are byte-level.
bool read_pre_tokenizer(const JsonObject& root, TokenizerData& data);
// Also sets the bytes of every token. The vocabulary must be complete.
void read_decoder(const JsonObject& root, bool byte_level, TokenizerData& data);

}  // namespace pianola
