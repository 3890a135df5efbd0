// The tokens of a vocabulary: text as the file writes it, bytes inside a text, and kind.
//
//   Vocabulary vocabulary;
//   vocabulary.resize(n);
//   vocabulary.set(id, "Ġthe", TokenKind::kNormal);
//   vocabulary.build_index();
//   vocabulary.find("Ġthe");
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "pianola/tokenizer.h"

namespace pianola {

// The numbers are those of tokenizer.ggml.token_type.
enum class TokenKind : std::uint8_t {
  kHole = 0,  // an id that names no token
  kNormal = 1,
  kUnknown = 2,
  kControl = 3,
  kUserDefined = 4,
  kUnused = 5,
  kByte = 6,
};

// Limits that every reader keeps, so that a hostile file costs bounded time and memory.
inline constexpr std::int64_t kMaxVocabulary = std::int64_t{1} << 20;
inline constexpr std::size_t kMaxMerges = std::size_t{1} << 21;
inline constexpr std::size_t kMaxTokenBytes = std::size_t{1} << 14;
inline constexpr std::size_t kMaxAddedTokenBytes = 512;

class Vocabulary {
 public:
  void resize(std::int32_t size) { tokens_.resize(static_cast<std::size_t>(size)); }
  std::int32_t size() const { return static_cast<std::int32_t>(tokens_.size()); }

  void set(TokenId id, std::string_view text, TokenKind kind);
  void set_kind(TokenId id, TokenKind kind) { at(id).kind = kind; }
  void set_bytes(TokenId id, std::string bytes) { at(id).bytes = std::move(bytes); }

  std::string_view text(TokenId id) const { return at(id).text; }
  // What the token stands for inside a text.
  std::string_view bytes(TokenId id) const { return at(id).bytes; }
  TokenKind kind(TokenId id) const { return at(id).kind; }
  bool is_control(TokenId id) const {
    return kind(id) == TokenKind::kControl || kind(id) == TokenKind::kUnknown;
  }

  // Makes find() work for the tokens set so far. Of two equal texts the later id is found.
  void build_index();
  std::optional<TokenId> find(std::string_view text) const;

 private:
  struct Token {
    std::string text;
    std::string bytes;
    TokenKind kind = TokenKind::kHole;
  };
  Token& at(TokenId id) { return tokens_[static_cast<std::size_t>(id)]; }
  const Token& at(TokenId id) const { return tokens_[static_cast<std::size_t>(id)]; }

  std::vector<Token> tokens_;
  std::vector<TokenId> index_;  // open addressing, -1 where free
  std::size_t mask_ = 0;
};

// Byte-level vocabularies write every byte as one printable character: the alphabet of GPT-2.
char32_t byte_to_char(unsigned char byte);
// Appends the bytes that `text` stands for; false (and nothing appended) when a character is not in
// the alphabet.
bool append_alphabet_bytes(std::string_view text, std::string& out);

// The value of "<0x41>", or nullopt for any other text.
std::optional<unsigned char> parse_byte_token(std::string_view text);

// `text` with every `from` replaced by `to`.
std::string replace_all(std::string_view text, std::string_view from, std::string_view to);

}  // namespace pianola
