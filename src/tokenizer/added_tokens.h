// Tokens that are found in the text itself, before any splitting: control tokens and user-defined
// ones. The leftmost match wins, and of those the longest.
//
//   AddedTokens added;
//   added.add({"<|im_end|>", 2, /*special=*/true});
//   added.split(text, parse_special, [&](std::string_view piece, std::optional<TokenId> id) {...});
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/flat_map.h"
#include "tokenizer/vocabulary.h"

namespace pianola {

struct AddedToken {
  std::string content;
  TokenId id = 0;
  bool special = false;
  bool lstrip = false;       // takes the spaces in front of it
  bool rstrip = false;       // takes the spaces behind it
  bool single_word = false;  // only where no word character touches it
  bool normalized = false;   // looked for in the normalised text
};

class AddedTokens {
 public:
  // The content must not be empty; the last token added for a content stays.
  void add(AddedToken token);
  bool empty() const { return tokens_.empty(); }

  // Calls emit(piece, id) in order for every token found and emit(piece, nullopt) for the text
  // between. With parse_special false the text of a special token is text; nothing is looked for
  // inside it.
  template <typename Emit>
  void split(std::string_view text, bool parse_special, Emit&& emit) const {
    std::size_t begin = 0;  // start of the text not yet emitted
    if (!empty()) {
      for (std::size_t at = 0; at < text.size();) {
        std::size_t end = 0;
        const AddedToken* token = match(text, at, end);
        if (!token) {
          ++at;
          continue;
        }
        std::size_t first = at;
        at = end;
        if ((token->special && !parse_special) || !fits(*token, text, first, end)) continue;
        if (token->lstrip) first = std::max(space_start(text, first), begin);
        if (token->rstrip) end = space_end(text, end);
        if (first > begin) emit(text.substr(begin, first - begin), std::optional<TokenId>());
        emit(text.substr(first, end - first), std::optional<TokenId>(token->id));
        begin = end;
      }
    }
    if (begin < text.size()) emit(text.substr(begin), std::optional<TokenId>());
  }

 private:
  const AddedToken* match(std::string_view text, std::size_t at, std::size_t& end) const;
  static bool fits(const AddedToken& token, std::string_view text, std::size_t first,
                   std::size_t end);
  static std::size_t space_start(std::string_view text, std::size_t end);
  static std::size_t space_end(std::string_view text, std::size_t begin);

  std::vector<AddedToken> tokens_;
  // A trie over bytes: (node, byte) -> child, node 0 the root, and the token that ends in a node.
  FlatMap<std::uint32_t> children_;
  std::vector<std::int32_t> token_at_ = {-1};
  std::array<bool, 256> starts_{};
};

}  // namespace pianola
