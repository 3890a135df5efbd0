// Byte-pair merging of one word into token ids.
//
//   Bpe bpe(vocabulary, options);
//   bpe.add_merge(left, right, rank, merged);
//   Bpe::Scratch scratch;
//   bpe.encode_word("hello", scratch, ids);      // appends
//
// Repeats "merge the leftmost pair of the lowest rank" until no pair has a rank: on short words by
// scanning, on long ones with ordered positions over a linked list, O(n log n) in the length of the
// word, so that a text without spaces costs no more than any other.
#pragma once

#include <array>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "tokenizer/flat_map.h"
#include "tokenizer/vocabulary.h"

namespace pianola {

struct BpeOptions {
  bool byte_level = false;          // symbols are bytes, not characters
  bool byte_fallback = false;       // a character that is no token becomes the tokens of its bytes
  bool fuse_unk = false;            // neighbouring unknown characters become one unknown token
  bool ignore_merges = false;       // a word that is a token is that token
  std::optional<TokenId> unk = {};  // nothing: unknown characters are dropped
};

class Bpe {
 public:
  Bpe() = default;
  // The vocabulary must be complete, and must stay where it is as long as this object lives.
  Bpe(const Vocabulary& vocabulary, const BpeOptions& options);

  void reserve_merges(std::size_t n) { merges_.reserve(n); }
  // Ids at or above the vocabulary's size are those of add_character().
  void add_merge(TokenId left, TokenId right, std::uint32_t rank, TokenId merged);
  // A symbol for a character that is part of tokens but none itself: it can merge, and is spelled
  // in bytes where it does not. Returns its id.
  TokenId add_character(std::string_view character);
  std::size_t merge_count() const { return merges_.size(); }

  struct Symbol {
    TokenId id = 0;
    std::uint32_t previous = 0;
    std::uint32_t next = 0;
  };
  struct Scratch {
    std::vector<TokenId> ids;
    std::vector<std::uint32_t> ranks;
    std::vector<Symbol> symbols;
    std::vector<std::uint64_t> ordered;
    std::vector<std::uint64_t> heap;
  };
  void encode_word(std::string_view word, Scratch& scratch, std::vector<TokenId>& out) const;

 private:
  struct Merge {
    std::uint32_t rank = kNoRank;
    TokenId id = -1;
  };
  static constexpr std::uint32_t kNoRank = ~std::uint32_t{0};

  const Merge* find_merge(TokenId left, TokenId right) const;
  std::uint32_t rank_of(TokenId left, TokenId right) const;
  void spell_bytes(std::string_view word, Scratch& scratch) const;
  void spell_characters(std::string_view word, Scratch& scratch) const;
  bool spell_fallback(std::string_view character, std::vector<TokenId>& ids) const;
  void merge_short(Scratch& scratch) const;
  void merge_long(Scratch& scratch) const;
  void append(TokenId id, std::vector<TokenId>& out) const;

  const Vocabulary* vocabulary_ = nullptr;
  BpeOptions options_;
  FlatMap<Merge> merges_;
  std::array<TokenId, 256> byte_ids_{};      // byte-level: the token of a byte, or -1
  std::array<TokenId, 256> fallback_ids_{};  // "<0x41>", or -1
  FlatMap<TokenId> characters_;              // code point -> symbol
  std::vector<std::string> extra_;           // text of the ids of add_character()
};

}  // namespace pianola
