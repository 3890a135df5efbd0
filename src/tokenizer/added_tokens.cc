#include "tokenizer/added_tokens.h"

#include "base/utf8.h"
#include "tokenizer/unicode_class.h"

namespace pianola {
namespace {

std::uint64_t child_key(std::uint32_t node, char byte) {
  return static_cast<std::uint64_t>(node) << 8 | static_cast<unsigned char>(byte);
}

// The last character of `text`; not valid when the bytes there are not UTF-8.
Utf8Char last_char(std::string_view text) {
  for (std::size_t back = 1; back <= 4 && back <= text.size(); ++back) {
    const Utf8Char c = decode_utf8(text.substr(text.size() - back));
    if (c.valid) return static_cast<std::size_t>(c.length) == back ? c : Utf8Char{};
  }
  return {};
}

bool has_class(const Utf8Char& c, std::uint8_t classes) {
  return c.valid && (unicode::classes_of(c.code_point) & classes) != 0;
}

}  // namespace

void AddedTokens::add(AddedToken token) {
  std::uint32_t node = 0;
  for (const char c : token.content) {
    const std::uint64_t key = child_key(node, c);
    if (const std::uint32_t* child = children_.find(key)) {
      node = *child;
      continue;
    }
    node = static_cast<std::uint32_t>(token_at_.size());
    token_at_.push_back(-1);
    children_.put(key, node);
  }
  starts_[static_cast<unsigned char>(token.content[0])] = true;
  token_at_[node] = static_cast<std::int32_t>(tokens_.size());
  tokens_.push_back(std::move(token));
}

const AddedToken* AddedTokens::match(std::string_view text, std::size_t at,
                                     std::size_t& end) const {
  if (!starts_[static_cast<unsigned char>(text[at])]) return nullptr;
  const AddedToken* longest = nullptr;
  std::uint32_t node = 0;
  for (std::size_t i = at; i < text.size(); ++i) {
    const std::uint32_t* child = children_.find(child_key(node, text[i]));
    if (!child) break;
    node = *child;
    if (token_at_[node] >= 0) {
      longest = &tokens_[static_cast<std::size_t>(token_at_[node])];
      end = i + 1;
    }
  }
  return longest;
}

bool AddedTokens::fits(const AddedToken& token, std::string_view text, std::size_t first,
                       std::size_t end) {
  if (!token.single_word) return true;
  if (first > 0 && has_class(last_char(text.substr(0, first)), unicode::kWord)) return false;
  return end == text.size() || !has_class(decode_utf8(text.substr(end)), unicode::kWord);
}

std::size_t AddedTokens::space_start(std::string_view text, std::size_t end) {
  while (end > 0) {
    const Utf8Char c = last_char(text.substr(0, end));
    if (!has_class(c, unicode::kSpace)) break;
    end -= static_cast<std::size_t>(c.length);
  }
  return end;
}

std::size_t AddedTokens::space_end(std::string_view text, std::size_t begin) {
  while (begin < text.size()) {
    const Utf8Char c = decode_utf8(text.substr(begin));
    if (!has_class(c, unicode::kSpace)) break;
    begin += static_cast<std::size_t>(c.length);
  }
  return begin;
}

}  // namespace pianola
