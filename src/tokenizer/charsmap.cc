#include "tokenizer/charsmap.h"

#include <utf8proc.h>

#include <array>

#include "base/check.h"
#include "base/utf8.h"

namespace pianola {
namespace {

constexpr std::size_t kMaxGrowth = 16;  // the longest of real ones is eleven
constexpr std::size_t kMaxGraphemeBytes = 5;
constexpr std::uint32_t kValueBit = std::uint32_t{1} << 31;

std::uint32_t read_u32(std::string_view bytes) {
  std::uint32_t value = 0;
  for (int i = 3; i >= 0; --i) {
    value = value << 8 | static_cast<unsigned char>(bytes[static_cast<std::size_t>(i)]);
  }
  return value;
}

// The fields of a unit of the double array.
std::size_t offset_of(std::uint32_t unit) {
  return static_cast<std::size_t>(unit >> 10) << ((unit & (1U << 9)) >> 6);
}
bool has_value(std::uint32_t unit) { return (unit >> 8 & 1) != 0; }
std::uint32_t label_of(std::uint32_t unit) { return unit & (kValueBit | 0xFF); }

}  // namespace

Charsmap::Charsmap(std::string_view bytes, Matching matching, std::string_view where)
    : matching_(matching) {
  const std::size_t size = bytes.size() < 4 ? 0 : read_u32(bytes);
  if (size == 0 || size % 4 != 0 || size > bytes.size() - 4) {
    fail(ErrorCode::kInvalidModel, "{}: {} bytes with a trie of {}, no precompiled charsmap", where,
         bytes.size(), size);
  }
  replacements_ = bytes.substr(4 + size);
  if (replacements_.empty() || replacements_.back() != '\0' || !is_valid_utf8(replacements_)) {
    fail(ErrorCode::kInvalidModel, "{}: replacements that are no UTF-8 or do not end", where);
  }
  units_.resize(size / 4);
  for (std::size_t i = 0; i < units_.size(); ++i) {
    units_[i] = read_u32(bytes.substr(4 + 4 * i));
    if ((units_[i] & kValueBit) != 0 && (units_[i] & ~kValueBit) >= replacements_.size()) {
      fail(ErrorCode::kInvalidModel, "{}: a replacement at {} of {} bytes", where,
           units_[i] & ~kValueBit, replacements_.size());
    }
  }
}

// Places outside the array end the search: only those that a text leads to can be checked.
Charsmap::Match Charsmap::find(std::string_view text, bool longest) const {
  Match match;
  std::size_t place = offset_of(units_[0]);
  for (std::size_t i = 0; i < text.size() && text[i] != '\0'; ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    place ^= byte;
    if (place >= units_.size() || label_of(units_[place]) != byte) break;
    const std::uint32_t unit = units_[place];
    place ^= offset_of(unit);
    if (!has_value(unit)) continue;
    if (place >= units_.size()) break;
    const std::size_t begin = units_[place] & ~kValueBit;
    if (begin >= replacements_.size()) break;
    match = {i + 1, std::string_view(replacements_.data() + begin)};
    if (!longest) break;
  }
  return match;
}

std::string Charsmap::apply(std::string_view text) const {
  std::string out;
  out.reserve(text.size());
  if (matching_ == Matching::kLongest) {
    apply_longest(text, out);
  } else {
    apply_graphemes(text, out);
  }
  return out;
}

void Charsmap::apply_longest(std::string_view text, std::string& out) const {
  const std::size_t most = kMaxGrowth * text.size();
  while (!text.empty()) {
    const Match match = find(text, true);
    const std::size_t length =
        match.length > 0 ? match.length : static_cast<std::size_t>(decode_utf8(text).length);
    out.append(match.length > 0 ? match.replacement : text.substr(0, length));
    text.remove_prefix(length);
    if (out.size() > most) {
      fail(ErrorCode::kInvalidModel,
           "precompiled charsmap: a text becomes more than {} times longer", kMaxGrowth);
    }
  }
}

void Charsmap::apply_graphemes(std::string_view text, std::string& out) const {
  const std::size_t most = kMaxGrowth * text.size();
  std::size_t begin = 0;
  utf8proc_int32_t state = 0;
  Utf8Char before;
  for (std::size_t at = 0; at <= text.size();) {
    const Utf8Char c = at < text.size() ? decode_utf8(text.substr(at)) : Utf8Char();
    const bool breaks =
        !before.valid || !c.valid ||
        utf8proc_grapheme_break_stateful(static_cast<utf8proc_int32_t>(before.code_point),
                                         static_cast<utf8proc_int32_t>(c.code_point), &state);
    if (breaks) {
      if (!before.valid || !c.valid) state = 0;
      apply_grapheme(text.substr(begin, at - begin), out);
      begin = at;
      if (out.size() > most) {
        fail(ErrorCode::kInvalidModel,
             "precompiled charsmap: a text becomes more than {} times longer", kMaxGrowth);
      }
    }
    before = c;
    at += at < text.size() ? static_cast<std::size_t>(c.length) : 1;
  }
}

void Charsmap::apply_grapheme(std::string_view grapheme, std::string& out) const {
  if (grapheme.size() <= kMaxGraphemeBytes) {
    if (const Match match = find(grapheme, false); match.length > 0) {
      out.append(match.replacement);
      return;
    }
  }
  while (!grapheme.empty()) {
    const auto length = static_cast<std::size_t>(decode_utf8(grapheme).length);
    const std::string_view character = grapheme.substr(0, length);
    const Match match = find(character, false);
    out.append(match.length > 0 ? match.replacement : character);
    grapheme.remove_prefix(length);
  }
}

std::string decode_base64(std::string_view text, std::string_view where) {
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::array<int, 256> values{};
  values.fill(-1);
  for (std::size_t i = 0; i < kDigits.size(); ++i) {
    values[static_cast<unsigned char>(kDigits[i])] = static_cast<int>(i);
  }
  std::string_view digits = text;
  for (int i = 0; i < 2 && digits.ends_with('='); ++i) digits.remove_suffix(1);
  std::string out;
  out.reserve(digits.size() / 4 * 3 + 2);
  std::uint32_t bits = 0;
  int count = 0;
  bool good = text.size() % 4 == 0 && digits.size() % 4 != 1;
  for (const char c : digits) {
    const int value = values[static_cast<unsigned char>(c)];
    good = good && value >= 0;
    bits = bits << 6 | static_cast<std::uint32_t>(value & 0x3F);
    count += 6;
    if (count < 8) continue;
    count -= 8;
    out += static_cast<char>(bits >> count & 0xFF);
  }
  if (!good) fail(ErrorCode::kInvalidModel, "{}: no base64", where);
  return out;
}

}  // namespace pianola
