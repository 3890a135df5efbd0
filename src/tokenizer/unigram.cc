#include "tokenizer/unigram.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/check.h"
#include "base/utf8.h"

namespace pianola {
namespace {

constexpr double kUnknownPenalty = 10;
// Of all pieces together: real vocabularies have below three.
constexpr std::size_t kMaxTotalBytes = std::size_t{16} << 20;

std::uint64_t edge_key(std::uint32_t node, char byte) {
  return static_cast<std::uint64_t>(node) << 8 | static_cast<unsigned char>(byte);
}

}  // namespace

// Appends the ids of pieces in their order. Unknown characters are kept back until their run ends,
// which may be stretches later.
class Unigram::Writer {
 public:
  Writer(const Unigram& model, std::string_view word, std::vector<TokenId>& out)
      : model_(model), word_(word), out_(out) {}

  void piece(TokenId id, std::size_t begin, std::size_t length) {
    if (id == model_.options_.unk) {
      if (unknown_length_ == 0) unknown_begin_ = begin;
      unknown_length_ += length;
      return;
    }
    flush();
    out_.push_back(id);
  }

  void flush() {
    const std::string_view unknown = word_.substr(unknown_begin_, unknown_length_);
    if (unknown.empty()) return;
    unknown_length_ = 0;
    const auto fallback = [&](char c) {
      return model_.fallback_ids_[static_cast<unsigned char>(c)];
    };
    const bool spelled =
        model_.options_.byte_fallback &&
        std::all_of(unknown.begin(), unknown.end(), [&](char c) { return fallback(c) >= 0; });
    if (!spelled) return out_.push_back(model_.options_.unk);
    for (const char c : unknown) out_.push_back(fallback(c));
  }

 private:
  const Unigram& model_;
  std::string_view word_;
  std::vector<TokenId>& out_;
  std::size_t unknown_begin_ = 0;
  std::size_t unknown_length_ = 0;
};

Unigram::Unigram(const Vocabulary& vocabulary, const std::vector<double>& scores,
                 const UnigramOptions& options, std::string_view where)
    : options_(options) {
  for (unsigned b = 0; b < 256; ++b) {
    fallback_ids_[b] = vocabulary.find(fmt::format("<0x{:02X}>", b)).value_or(-1);
  }
  double lowest = std::numeric_limits<double>::infinity();
  std::size_t total = 0;
  const auto scored =
      static_cast<TokenId>(std::min(scores.size(), static_cast<std::size_t>(vocabulary.size())));
  for (TokenId id = 0; id < scored; ++id) {
    const double score = scores[static_cast<std::size_t>(id)];
    const std::string_view text = vocabulary.text(id);
    if (!std::isfinite(score)) {
      fail(ErrorCode::kInvalidModel, "{}: token {} has a score of {}", where, id, score);
    }
    const TokenKind kind = vocabulary.kind(id);
    if (kind != TokenKind::kNormal && kind != TokenKind::kUserDefined) continue;
    lowest = std::min(lowest, score);
    if (text.empty()) continue;
    total += text.size();
    if (text.size() > kMaxPieceBytes || total > kMaxTotalBytes) {
      fail(ErrorCode::kInvalidModel,
           "{}: token {} has {} bytes, at most {} each and {} MiB together in a unigram model",
           where, id, text.size(), kMaxPieceBytes, kMaxTotalBytes >> 20);
    }
    add_piece(text, {id, score});
  }
  if (!std::isfinite(lowest)) fail(ErrorCode::kInvalidModel, "{}: no pieces", where);
  unknown_score_ = lowest - kUnknownPenalty;
}

void Unigram::add_piece(std::string_view text, Piece piece) {
  std::uint32_t node = 0;
  for (const char byte : text) {
    const std::uint64_t key = edge_key(node, byte);
    if (const std::uint32_t* child = children_.find(key)) {
      node = *child;
      continue;
    }
    node = static_cast<std::uint32_t>(piece_at_.size());
    children_.put(key, node);
    piece_at_.emplace_back();
  }
  piece_at_[node] = piece;  // of two equal pieces the later one counts, as in Vocabulary::find
}

// Offers every piece that begins at `at` to the node where it ends; `nodes` begins at `base`.
// Returns the length of the character there.
std::size_t Unigram::extend(std::string_view word, std::size_t at, std::size_t base,
                            std::vector<Node>& nodes) const {
  const double before = nodes[at - base].score;
  const auto character = static_cast<std::size_t>(decode_utf8(word.substr(at)).length);
  const auto offer = [&](std::size_t length, double score, TokenId id) {
    const std::size_t end = at + length - base;
    if (nodes.size() <= end) nodes.resize(end + 1);
    Node& node = nodes[end];
    if (node.length > 0 && before + score <= node.score) return;
    node = {before + score, id, static_cast<std::uint32_t>(length)};
  };
  bool spelled = false;
  std::uint32_t state = 0;
  for (std::size_t end = at; end < word.size();) {
    const std::uint32_t* child = children_.find(edge_key(state, word[end]));
    if (!child) break;
    state = *child;
    ++end;
    const Piece& piece = piece_at_[state];
    if (piece.id < 0) continue;
    offer(end - at, piece.score, piece.id);
    spelled = spelled || end - at == character;
  }
  if (!spelled) offer(character, unknown_score_, options_.unk);
  return character;
}

// Viterbi's search from left to right. Where no piece reaches across a place, every spelling passes
// through it: what lies before is written out and forgotten. The score goes on from there, so that
// sums round as those of one long search do.
void Unigram::encode_word(std::string_view word, Scratch& scratch,
                          std::vector<TokenId>& out) const {
  std::vector<Node>& nodes = scratch.nodes;
  std::vector<Node>& path = scratch.path;
  Writer writer(*this, word, out);
  std::size_t base = 0;
  nodes.assign(1, Node());
  for (std::size_t at = 0; at < word.size();) {
    at += extend(word, at, base, nodes);
    if (base + nodes.size() - 1 > at) continue;
    path.clear();
    for (std::size_t end = at; end > base; end -= path.back().length) {
      path.push_back(nodes[end - base]);
    }
    for (; !path.empty(); path.pop_back()) {
      writer.piece(path.back().id, base, path.back().length);
      base += path.back().length;
    }
    nodes.assign(1, {.score = nodes.back().score});
  }
  writer.flush();
}

}  // namespace pianola
