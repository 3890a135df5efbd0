#include "tokenizer/vocabulary.h"

#include <array>
#include <bit>

#include "base/utf8.h"
#include "tokenizer/flat_map.h"

namespace pianola {
namespace {

// Printable Latin-1 bytes stand for themselves, the other 68 for U+0100 and up, in order.
struct Alphabet {
  std::array<char32_t, 256> chars{};
  std::array<std::int16_t, 0x144> bytes{};

  Alphabet() {
    bytes.fill(-1);
    char32_t next = 0x100;
    for (unsigned b = 0; b < 256; ++b) {
      const bool printable = (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
      chars[b] = printable ? b : next++;
      bytes[chars[b]] = static_cast<std::int16_t>(b);
    }
  }
};

const Alphabet& alphabet() {
  static const Alphabet instance;
  return instance;
}

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

}  // namespace

void Vocabulary::set(TokenId id, std::string_view text, TokenKind kind) {
  at(id).text = text;
  at(id).kind = kind;
}

void Vocabulary::build_index() {
  index_.assign(std::bit_ceil(tokens_.size() * 2 + 2), -1);
  mask_ = index_.size() - 1;
  const std::uint64_t salt = hash_salt();
  for (TokenId id = 0; id < size(); ++id) {
    if (kind(id) == TokenKind::kHole) continue;
    std::size_t i = static_cast<std::size_t>(hash_bytes(text(id), salt)) & mask_;
    while (index_[i] >= 0 && text(index_[i]) != text(id)) i = (i + 1) & mask_;
    index_[i] = id;
  }
}

std::optional<TokenId> Vocabulary::find(std::string_view wanted) const {
  if (index_.empty()) return std::nullopt;
  std::size_t i = static_cast<std::size_t>(hash_bytes(wanted, hash_salt())) & mask_;
  for (; index_[i] >= 0; i = (i + 1) & mask_) {
    if (text(index_[i]) == wanted) return index_[i];
  }
  return std::nullopt;
}

char32_t byte_to_char(unsigned char byte) { return alphabet().chars[byte]; }

bool append_alphabet_bytes(std::string_view text, std::string& out) {
  const std::size_t before = out.size();
  while (!text.empty()) {
    const Utf8Char c = decode_utf8(text);
    const std::int16_t byte =
        c.valid && c.code_point < alphabet().bytes.size() ? alphabet().bytes[c.code_point] : -1;
    if (byte < 0) {
      out.resize(before);
      return false;
    }
    out += static_cast<char>(byte);
    text.remove_prefix(static_cast<std::size_t>(c.length));
  }
  return true;
}

std::optional<unsigned char> parse_byte_token(std::string_view text) {
  if (text.size() != 6 || text.substr(0, 3) != "<0x" || text[5] != '>') return std::nullopt;
  const int high = hex_digit(text[3]);
  const int low = hex_digit(text[4]);
  if (high < 0 || low < 0) return std::nullopt;
  return static_cast<unsigned char>(high * 16 + low);
}

std::string replace_all(std::string_view text, std::string_view from, std::string_view to) {
  std::string out;
  out.reserve(text.size());
  for (std::size_t at = 0;;) {
    const std::size_t found = text.find(from, at);
    out.append(text.substr(at, found - at));
    if (found == std::string_view::npos) return out;
    out.append(to);
    at = found + from.size();
  }
}

}  // namespace pianola
