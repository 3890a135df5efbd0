#include "tokenizer/bpe.h"

#include <algorithm>

#include "base/check.h"
#include "base/utf8.h"

namespace pianola {
namespace {

constexpr std::size_t kShortWord = 40;

std::uint64_t pair_key(TokenId left, TokenId right) {
  return static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32 |
         static_cast<std::uint32_t>(right);
}

}  // namespace

Bpe::Bpe(const Vocabulary& vocabulary, const BpeOptions& options)
    : vocabulary_(&vocabulary), options_(options) {
  for (unsigned b = 0; b < 256; ++b) {
    std::string character;
    append_utf8(character, byte_to_char(static_cast<unsigned char>(b)));
    byte_ids_[b] = vocabulary.find(character).value_or(-1);
    fallback_ids_[b] = vocabulary.find(fmt::format("<0x{:02X}>", b)).value_or(-1);
  }
  if (options.byte_level) return;
  for (TokenId id = 0; id < vocabulary.size(); ++id) {
    const std::string_view text = vocabulary.text(id);
    // With byte tokens to fall back on, no character needs a token that is a control token.
    if (text.empty() || text.size() > 4) continue;
    if (options.byte_fallback && vocabulary.is_control(id)) continue;
    const Utf8Char c = decode_utf8(text);
    if (c.valid && static_cast<std::size_t>(c.length) == text.size()) {
      characters_.put(c.code_point, id);
    }
  }
}

void Bpe::add_merge(TokenId left, TokenId right, std::uint32_t rank, TokenId merged) {
  merges_.put(pair_key(left, right), {rank, merged});
}

TokenId Bpe::add_character(std::string_view character) {
  const TokenId id = vocabulary_->size() + static_cast<TokenId>(extra_.size());
  extra_.emplace_back(character);
  characters_.put(decode_utf8(character).code_point, id);
  return id;
}

void Bpe::encode_word(std::string_view word, Scratch& scratch, std::vector<TokenId>& out) const {
  if (options_.ignore_merges) {
    std::optional<TokenId> whole;
    if (options_.byte_level) {
      std::string text;
      for (const char c : word) append_utf8(text, byte_to_char(static_cast<unsigned char>(c)));
      whole = vocabulary_->find(text);
    } else {
      whole = vocabulary_->find(word);
    }
    // Control tokens are no words: a text that spells one stays text.
    if (whole && !vocabulary_->is_control(*whole)) {
      out.push_back(*whole);
      return;
    }
  }
  scratch.ids.clear();
  if (options_.byte_level) {
    spell_bytes(word, scratch);
  } else {
    spell_characters(word, scratch);
  }
  if (scratch.ids.size() <= kShortWord) {
    merge_short(scratch);
    for (const TokenId id : scratch.ids) append(id, out);
  } else {
    merge_long(scratch);
    for (std::uint32_t i = 0; i < scratch.symbols.size(); i = scratch.symbols[i].next) {
      append(scratch.symbols[i].id, out);
    }
  }
}

void Bpe::append(TokenId id, std::vector<TokenId>& out) const {
  if (id < vocabulary_->size()) [[likely]] {
    out.push_back(id);
    return;
  }
  const std::string& text = extra_[static_cast<std::size_t>(id - vocabulary_->size())];
  if (!spell_fallback(text, out) && options_.unk) out.push_back(*options_.unk);
}

void Bpe::spell_bytes(std::string_view word, Scratch& scratch) const {
  bool in_unknown = false;
  for (const char c : word) {
    const TokenId id = byte_ids_[static_cast<unsigned char>(c)];
    if (id >= 0) {
      scratch.ids.push_back(id);
    } else if (options_.unk && !(in_unknown && options_.fuse_unk)) {
      scratch.ids.push_back(*options_.unk);
    }
    in_unknown = id < 0;
  }
}

void Bpe::spell_characters(std::string_view word, Scratch& scratch) const {
  // The reference keeps an unknown token back until the next known character, behind the byte
  // tokens of those between: the order below is its order.
  bool unknown = false;
  const auto flush = [&] {
    if (unknown) scratch.ids.push_back(*options_.unk);
    unknown = false;
  };
  while (!word.empty()) {
    const Utf8Char c = decode_utf8(word);
    const std::string_view character = word.substr(0, static_cast<std::size_t>(c.length));
    word.remove_prefix(character.size());
    const TokenId* id = c.valid ? characters_.find(c.code_point) : nullptr;
    if (id) {
      flush();
      scratch.ids.push_back(*id);
    } else if (!spell_fallback(character, scratch.ids) && options_.unk) {
      if (!options_.fuse_unk) flush();
      unknown = true;
    }
  }
  flush();
}

bool Bpe::spell_fallback(std::string_view character, std::vector<TokenId>& ids) const {
  if (!options_.byte_fallback) return false;
  for (const char c : character) {
    if (fallback_ids_[static_cast<unsigned char>(c)] < 0) return false;
  }
  for (const char c : character) ids.push_back(fallback_ids_[static_cast<unsigned char>(c)]);
  return true;
}

const Bpe::Merge* Bpe::find_merge(TokenId left, TokenId right) const {
  return merges_.find(pair_key(left, right));
}

std::uint32_t Bpe::rank_of(TokenId left, TokenId right) const {
  const Merge* merge = find_merge(left, right);
  return merge ? merge->rank : kNoRank;
}

void Bpe::merge_short(Scratch& scratch) const {
  std::vector<TokenId>& ids = scratch.ids;
  std::vector<std::uint32_t>& ranks = scratch.ranks;  // of the pair (i, i + 1)
  if (ids.size() < 2) return;
  ranks.resize(ids.size() - 1);
  for (std::size_t i = 0; i + 1 < ids.size(); ++i) ranks[i] = rank_of(ids[i], ids[i + 1]);
  while (!ranks.empty()) {
    const auto lowest = std::min_element(ranks.begin(), ranks.end());
    if (*lowest == kNoRank) return;
    const auto i = static_cast<std::size_t>(lowest - ranks.begin());
    ids[i] = find_merge(ids[i], ids[i + 1])->id;
    ids.erase(ids.begin() + static_cast<std::ptrdiff_t>(i) + 1);
    ranks.erase(lowest);
    if (i < ranks.size()) ranks[i] = rank_of(ids[i], ids[i + 1]);
    if (i > 0) ranks[i - 1] = rank_of(ids[i - 1], ids[i]);
  }
}

// Candidates are (rank, position) in one integer. Those of the word as spelled lie in a sorted list
// that is read once; those that merges create go to a heap, which becomes the next sorted list when
// the list has been read. A run of one letter thus costs linear time, not a heap of its length.
// A candidate whose pair has changed since is recognised by its rank.
void Bpe::merge_long(Scratch& scratch) const {
  std::vector<Symbol>& symbols = scratch.symbols;
  std::vector<std::uint64_t>& ordered = scratch.ordered;
  std::vector<std::uint64_t>& heap = scratch.heap;
  const auto count = static_cast<std::uint32_t>(scratch.ids.size());
  constexpr auto kAfter = std::greater<>();

  symbols.resize(count);
  ordered.clear();
  heap.clear();
  const auto candidate = [&](std::uint32_t position, std::vector<std::uint64_t>& list) {
    const std::uint32_t next = symbols[position].next;
    if (next >= count) return false;
    const std::uint32_t rank = rank_of(symbols[position].id, symbols[next].id);
    if (rank == kNoRank) return false;
    list.push_back(static_cast<std::uint64_t>(rank) << 32 | position);
    return true;
  };
  for (std::uint32_t i = 0; i < count; ++i) symbols[i] = {scratch.ids[i], i - 1, i + 1};
  for (std::uint32_t i = 0; i < count; ++i) candidate(i, ordered);

  std::size_t read = ordered.size();
  const auto sort = [&] {
    read = 0;
    if (!std::is_sorted(ordered.begin(), ordered.end())) std::sort(ordered.begin(), ordered.end());
  };
  sort();
  for (;;) {
    if (read == ordered.size()) {
      if (heap.empty()) return;
      ordered.swap(heap);
      heap.clear();
      sort();
    }
    std::uint64_t best = ordered[read];
    if (!heap.empty() && heap.front() < best) {
      best = heap.front();
      std::pop_heap(heap.begin(), heap.end(), kAfter);
      heap.pop_back();
    } else {
      ++read;
    }
    const auto position = static_cast<std::uint32_t>(best);
    Symbol& left = symbols[position];
    if (left.id < 0 || left.next >= count) continue;
    Symbol& right = symbols[left.next];
    const Merge* merge = find_merge(left.id, right.id);
    if (!merge || merge->rank != best >> 32) continue;
    left.id = merge->id;
    right.id = -1;
    left.next = right.next;
    if (left.next < count) symbols[left.next].previous = position;
    if (candidate(position, heap)) std::push_heap(heap.begin(), heap.end(), kAfter);
    if (position > 0 && candidate(left.previous, heap)) {
      std::push_heap(heap.begin(), heap.end(), kAfter);
    }
  }
}

}  // namespace pianola
