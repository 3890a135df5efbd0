#include "tokenizer/score_merges.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "base/utf8.h"

namespace pianola {
namespace {

// Polynomial hashes modulo 2^61 - 1, so that the hash of every prefix and suffix of a token costs a
// step and not its length.
constexpr std::uint64_t kModulus = (std::uint64_t{1} << 61) - 1;

std::uint64_t multiply(std::uint64_t a, std::uint64_t b) {
  const Uint128 product = static_cast<Uint128>(a) * b;
  const std::uint64_t sum =
      static_cast<std::uint64_t>(product & kModulus) + static_cast<std::uint64_t>(product >> 61);
  return sum >= kModulus ? sum - kModulus : sum;
}

class SplitFinder {
 public:
  explicit SplitFinder(const Vocabulary& vocabulary, Bpe& bpe)
      : vocabulary_(vocabulary), bpe_(bpe), base_(hash_salt() % (kModulus - 512) + 256) {}

  void add_symbol(std::string_view text, TokenId id) {
    std::uint64_t hash = 0;
    for (const char c : text) hash = step(hash, c);
    symbols_.put(hash, id);
  }

  // Gives a symbol to every character that is in a token of several and is no token itself.
  void add_characters(std::string_view token) {
    while (!token.empty()) {
      const auto length = static_cast<std::size_t>(decode_utf8(token).length);
      const std::string_view character = token.substr(0, length);
      token.remove_prefix(length);
      std::uint64_t hash = 0;
      for (const char c : character) hash = step(hash, c);
      if (symbols_.find(hash) || !is_valid_utf8(character)) continue;
      const TokenId id = bpe_.add_character(character);
      extra_.emplace_back(character);
      symbols_.put(hash, id);
    }
  }

  void add_pairs(TokenId token, std::uint32_t rank) {
    const std::string_view text = vocabulary_.text(token);
    prefix_.assign(1, 0);
    power_.assign(1, 1);
    for (const char c : text) {
      prefix_.push_back(step(prefix_.back(), c));
      power_.push_back(multiply(power_.back(), base_));
    }
    for (std::size_t at = 1; at < text.size(); ++at) {
      if ((static_cast<unsigned char>(text[at]) & 0xC0) == 0x80) continue;
      const TokenId* left = find(prefix_[at], text.substr(0, at));
      if (!left) continue;
      const std::uint64_t whole = prefix_[text.size()];
      const std::uint64_t part = multiply(prefix_[at], power_[text.size() - at]);
      const std::uint64_t suffix = whole >= part ? whole - part : whole + kModulus - part;
      if (const TokenId* right = find(suffix, text.substr(at))) {
        bpe_.add_merge(*left, *right, rank, token);
      }
    }
  }

 private:
  std::uint64_t step(std::uint64_t hash, char c) const {
    const std::uint64_t next = multiply(hash, base_) + static_cast<unsigned char>(c) + 1;
    return next >= kModulus ? next - kModulus : next;
  }

  const TokenId* find(std::uint64_t hash, std::string_view text) {
    const TokenId* id = symbols_.find(hash);
    if (!id) return nullptr;
    compared_ += text.size();
    if (compared_ > kMaxCompared) {
      fail(ErrorCode::kInvalidModel,
           "tokenizer.ggml.tokens: the tokens have too many ways to be put together");
    }
    const std::string_view found = *id < vocabulary_.size()
                                       ? vocabulary_.text(*id)
                                       : extra_[static_cast<std::size_t>(*id - vocabulary_.size())];
    return found == text ? id : nullptr;
  }

  static constexpr std::size_t kMaxCompared = std::size_t{1} << 31;
  const Vocabulary& vocabulary_;
  Bpe& bpe_;
  std::uint64_t base_;
  FlatMap<TokenId> symbols_;
  std::vector<std::string> extra_;
  std::vector<std::uint64_t> prefix_;
  std::vector<std::uint64_t> power_;
  std::size_t compared_ = 0;
};

}  // namespace

void add_score_merges(const Vocabulary& vocabulary, const std::vector<double>& scores, Bpe& bpe) {
  constexpr std::size_t kMaxText = std::size_t{1} << 24;
  std::vector<TokenId> tokens;
  std::size_t total = 0;
  for (TokenId id = 0; id < vocabulary.size(); ++id) {
    if (!std::isfinite(scores[static_cast<std::size_t>(id)])) {
      fail(ErrorCode::kInvalidModel, "tokenizer.ggml.scores: {} for token {}, expected a number",
           scores[static_cast<std::size_t>(id)], id);
    }
    const TokenKind kind = vocabulary.kind(id);
    if (vocabulary.is_control(id) || kind == TokenKind::kByte || vocabulary.text(id).empty()) {
      continue;
    }
    total += vocabulary.text(id).size();
    tokens.push_back(id);
  }
  if (total > kMaxText) {
    fail(ErrorCode::kInvalidModel, "tokenizer.ggml.tokens: {} bytes of text, at most {}", total,
         kMaxText);
  }
  SplitFinder finder(vocabulary, bpe);
  for (const TokenId id : tokens) finder.add_symbol(vocabulary.text(id), id);
  for (const TokenId id : tokens) finder.add_characters(vocabulary.text(id));

  std::vector<double> order;
  order.reserve(tokens.size());
  for (const TokenId id : tokens) order.push_back(scores[static_cast<std::size_t>(id)]);
  std::sort(order.begin(), order.end(), std::greater<>());
  order.erase(std::unique(order.begin(), order.end()), order.end());
  for (const TokenId id : tokens) {
    const auto at = std::lower_bound(order.begin(), order.end(),
                                     scores[static_cast<std::size_t>(id)], std::greater<>());
    finder.add_pairs(id, static_cast<std::uint32_t>(at - order.begin()));
  }
}

}  // namespace pianola
