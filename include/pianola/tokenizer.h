// Text to token ids and back, exactly as the model's own tokenizer does it.
//
// A Tokenizer is immutable and may be used from any number of threads. It comes from the metadata
// of a GGUF file or from a folder with a tokenizer.json; what it cannot do exactly is refused at
// load.
//
//   std::shared_ptr<const Tokenizer> tokenizer = ...;
//   std::vector<TokenId> ids = tokenizer->encode("Why is the sky blue?");
//   Detokenizer stream(tokenizer);
//   for (TokenId id : ids) std::cout << stream.push(id);   // whole UTF-8 characters only
//   std::cout << stream.flush();
//
// Text is bytes. Bytes that are not UTF-8 are kept: a byte-level vocabulary sees each invalid part
// as one symbol character and encodes its bytes, a SentencePiece vocabulary with byte tokens
// encodes them as those, so that decode(encode(text)) gives them back; one without has no more for
// them than its unknown token.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace pianola {

using TokenId = std::int32_t;

struct EncodeOptions {
  // Adds the tokens that the vocabulary puts around a text: bos, eos or those of its template.
  bool add_special = true;
  // Turns the text of control tokens ("<|im_end|>") into their ids. Leave it off for anything a
  // user wrote: the ids of control tokens then cannot come out of the text. Added tokens that are
  // not control tokens are matched either way.
  bool parse_special = false;
};

struct TokenizerData;

class Tokenizer {
 public:
  explicit Tokenizer(std::unique_ptr<const TokenizerData> data);
  ~Tokenizer();
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;

  // Ids are in [0, vocab_size()). Ids that name no token (holes) have empty text.
  std::int32_t vocab_size() const;

  // Throws InvalidArgument for a text of 2 GiB or more.
  std::vector<TokenId> encode(std::string_view text, const EncodeOptions& options = {}) const;

  // The bytes that the tokens stand for, which need not be valid UTF-8. Where encode() puts a space
  // in front of the text, decode() takes one leading space away. Throws InvalidArgument for an id
  // outside the vocabulary.
  std::string decode(std::span<const TokenId> ids, bool skip_special = false) const;

  // The bytes of one token inside a text, and its name as the vocabulary writes it ("Ġthe",
  // "▁the", "<0x0A>"). Valid as long as the tokenizer lives.
  std::string_view token_bytes(TokenId id) const;
  std::string_view token_text(TokenId id) const;
  // True for control tokens (bos, eos, chat markers, unk): never text a user reads.
  bool is_special(TokenId id) const;
  // The token whose token_text() is `text`.
  std::optional<TokenId> find_token(std::string_view text) const;

  std::optional<TokenId> bos_id() const;
  std::optional<TokenId> eos_id() const;
  std::optional<TokenId> unk_id() const;
  std::optional<TokenId> pad_id() const;
  // Every token that ends a generation (eos, end of turn, end of text), ascending.
  const std::vector<TokenId>& eog_ids() const;
  bool is_eog(TokenId id) const;
  // Whether encode() with add_special starts the text with bos, and ends it with eos.
  bool add_bos() const;
  bool add_eos() const;

  // For people: "byte-level BPE", "SentencePiece BPE" or "SentencePiece unigram", and the rule that
  // splits text into words
  // ("smollm", "gpt-2", "llama-bpe", "qwen2", or what a tokenizer.json lists).
  const std::string& kind() const;
  const std::string& pre() const;

 private:
  friend class Detokenizer;
  // What decoding has to remember between tokens.
  struct DecodeState {
    bool first = true;
    int strip = 0;
  };
  DecodeState start_decode() const;
  void append_decoded(TokenId id, DecodeState& state, std::string& out) const;
  void check_id(TokenId id) const;

  std::unique_ptr<const TokenizerData> data_;
};

// Decoding one token at a time. What push() and flush() return, joined, is decode() of all the ids
// with each maximal invalid part replaced by U+FFFD; no returned piece ends inside a character.
class Detokenizer {
 public:
  explicit Detokenizer(std::shared_ptr<const Tokenizer> tokenizer, bool skip_special = false);

  // The text that is complete after this token; at most three bytes are held back.
  std::string push(TokenId id);
  // The rest, an incomplete character as U+FFFD; then starts anew.
  std::string flush();

 private:
  std::shared_ptr<const Tokenizer> tokenizer_;
  bool skip_special_;
  Tokenizer::DecodeState state_;
  std::string pending_;
};

}  // namespace pianola
