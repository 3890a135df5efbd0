// The unigram language model of SentencePiece: of all the ways to spell a text in pieces, the one
// whose scores have the largest sum.
//
//   Unigram unigram(vocabulary, scores, {.unk = 2}, "tokenizer.json");
//   Unigram::Scratch scratch;
//   unigram.encode_word("▁hello", scratch, ids);   // appends
//
// A character that no piece spells costs ten less than the worst score; neighbouring ones become
// one unknown token, or the tokens of their bytes. Takes time linear in the text times the longest
// piece, and memory for the longest stretch that pieces cover without a gap between two of them.
#pragma once

#include <array>
#include <string_view>
#include <vector>

#include "tokenizer/flat_map.h"
#include "tokenizer/vocabulary.h"

namespace pianola {

struct UnigramOptions {
  TokenId unk = 0;
  bool byte_fallback = false;  // unknown characters become the tokens of their bytes
};

class Unigram {
 public:
  // The longest piece there may be: a text takes so many steps for each of its bytes.
  static constexpr std::size_t kMaxPieceBytes = 512;

  // `scores` holds one number for each token of the vocabulary or for the first of them; the others
  // are no pieces, and neither are control, unused and byte tokens. Throws InvalidModel, naming
  // `where`, for a score that is not finite and for pieces that are too long.
  Unigram(const Vocabulary& vocabulary, const std::vector<double>& scores,
          const UnigramOptions& options, std::string_view where);

  // How the best spelling of the text up to a place ends.
  struct Node {
    double score = 0;
    TokenId id = -1;
    std::uint32_t length = 0;  // of the last piece; 0: no spelling ends here
  };
  struct Scratch {
    std::vector<Node> nodes;
    std::vector<Node> path;
  };
  void encode_word(std::string_view word, Scratch& scratch, std::vector<TokenId>& out) const;

 private:
  struct Piece {
    TokenId id = -1;
    double score = 0;
  };
  class Writer;

  void add_piece(std::string_view text, Piece piece);
  std::size_t extend(std::string_view word, std::size_t at, std::size_t base,
                     std::vector<Node>& nodes) const;

  UnigramOptions options_;
  double unknown_score_ = 0;
  // A trie over bytes: (node, byte) -> child, node 0 the root, and the piece that ends in a node.
  FlatMap<std::uint32_t> children_;
  std::vector<Piece> piece_at_ = {Piece()};
  std::array<TokenId, 256> fallback_ids_{};  // "<0x41>", or -1
};

}  // namespace pianola
