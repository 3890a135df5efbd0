// What a Tokenizer consists of. The readers fill it; the Tokenizer only reads it.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/added_tokens.h"
#include "tokenizer/bpe.h"
#include "tokenizer/normalizer.h"
#include "tokenizer/pretokenizer.h"
#include "tokenizer/unigram.h"
#include "tokenizer/vocabulary.h"

namespace pianola {

struct TokenizerData {
  TokenizerData() = default;
  TokenizerData(const TokenizerData&) = delete;  // `bpe` points at `vocabulary`
  TokenizerData& operator=(const TokenizerData&) = delete;

  std::string kind;
  std::string pre;

  Vocabulary vocabulary;
  AddedTokens raw_added;         // found in the text as it comes
  AddedTokens normalized_added;  // found in the normalised text
  Normalizer normalizer;
  PreTokenizer pre_tokenizer;
  Bpe bpe;
  std::optional<Unigram> unigram;  // instead of `bpe`

  // Around a text, with add_special.
  std::vector<TokenId> prefix;
  std::vector<TokenId> suffix;

  // Decoding: spaces taken off the start of the text; and whether the first token loses every "▁".
  int strip_spaces = 0;
  bool strip_first_token = false;

  std::optional<TokenId> bos, eos, unk, pad;
  std::vector<TokenId> eog;  // ascending
};

// Whether a control token of this text ends a generation in every vocabulary that has it.
bool is_end_of_generation_text(std::string_view text);

// Adds the control tokens of such texts to `eog` and puts it in order.
void finish_eog(TokenizerData& data);

}  // namespace pianola
