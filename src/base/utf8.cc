#include "base/utf8.h"

namespace pianola {
namespace {

// Number of bytes that the lead byte announces, and the range of the second byte. 0: not a lead.
struct Lead {
  int length;
  unsigned char low;
  unsigned char high;
};

Lead classify(unsigned char c) {
  if (c < 0x80) return {1, 0, 0};
  if (c < 0xC2) return {0, 0, 0};
  if (c < 0xE0) return {2, 0x80, 0xBF};
  if (c == 0xE0) return {3, 0xA0, 0xBF};
  if (c == 0xED) return {3, 0x80, 0x9F};
  if (c < 0xF0) return {3, 0x80, 0xBF};
  if (c == 0xF0) return {4, 0x90, 0xBF};
  if (c < 0xF4) return {4, 0x80, 0xBF};
  if (c == 0xF4) return {4, 0x80, 0x8F};
  return {0, 0, 0};
}

// Bytes of `text` that form a valid start of the character its first byte announces.
int valid_part(std::string_view text, const Lead& lead) {
  int n = 1;
  while (n < lead.length && static_cast<std::size_t>(n) < text.size()) {
    const auto c = static_cast<unsigned char>(text[static_cast<std::size_t>(n)]);
    const unsigned char low = n == 1 ? lead.low : 0x80;
    const unsigned char high = n == 1 ? lead.high : 0xBF;
    if (c < low || c > high) break;
    ++n;
  }
  return n;
}

}  // namespace

Utf8Char decode_utf8(std::string_view text) {
  const auto first = static_cast<unsigned char>(text[0]);
  const Lead lead = classify(first);
  if (lead.length == 1) return {first, 1, true};
  if (lead.length == 0) return {kReplacementCharacter, 1, false};
  const int n = valid_part(text, lead);
  if (n < lead.length) return {kReplacementCharacter, n, false};
  char32_t code_point = first & (0xFFU >> (lead.length + 1));
  for (int i = 1; i < n; ++i) {
    code_point =
        (code_point << 6) | (static_cast<unsigned char>(text[static_cast<std::size_t>(i)]) & 0x3FU);
  }
  return {code_point, n, true};
}

bool is_valid_utf8(std::string_view text) {
  while (!text.empty()) {
    const Utf8Char c = decode_utf8(text);
    if (!c.valid) return false;
    text.remove_prefix(static_cast<std::size_t>(c.length));
  }
  return true;
}

std::size_t complete_utf8_prefix(std::string_view text) {
  const std::size_t size = text.size();
  for (std::size_t back = 1; back <= 3 && back <= size; ++back) {
    const Lead lead = classify(static_cast<unsigned char>(text[size - back]));
    if (lead.length == 0) continue;  // a continuation byte (or one that is never valid)
    const std::string_view tail = text.substr(size - back);
    const bool open =
        lead.length > static_cast<int>(back) && valid_part(tail, lead) == static_cast<int>(back);
    return open ? size - back : size;
  }
  return size;
}

std::string sanitize_utf8(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const Utf8Char c = decode_utf8(text);
    const auto length = static_cast<std::size_t>(c.length);
    if (c.valid) {
      out.append(text.substr(0, length));
    } else {
      append_utf8(out, kReplacementCharacter);
    }
    text.remove_prefix(length);
  }
  return out;
}

std::string printable(std::string_view text, std::size_t limit) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string out;
  while (!text.empty()) {
    if (out.size() >= limit) return out + "...";
    const Utf8Char c = decode_utf8(text);
    // C1 controls (U+0080 to U+009F) can drive a terminal as escape sequences do.
    const bool shown = c.valid && c.code_point >= 0x20 && c.code_point != '\\' &&
                       (c.code_point < 0x7F || c.code_point > 0x9F);
    const auto length = static_cast<std::size_t>(c.length);
    for (const char byte : text.substr(0, length)) {
      if (shown) {
        out += byte;
      } else if (byte == '\\') {
        out += "\\\\";
      } else {
        const auto value = static_cast<unsigned char>(byte);
        out += {'\\', 'x', kHex[value >> 4], kHex[value & 0xF]};
      }
    }
    text.remove_prefix(length);
  }
  return out;
}

void append_utf8(std::string& out, char32_t c) {
  if (c < 0x80) {
    out += static_cast<char>(c);
  } else if (c < 0x800) {
    out += static_cast<char>(0xC0 | (c >> 6));
    out += static_cast<char>(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    out += static_cast<char>(0xE0 | (c >> 12));
    out += static_cast<char>(0x80 | ((c >> 6) & 0x3F));
    out += static_cast<char>(0x80 | (c & 0x3F));
  } else {
    out += static_cast<char>(0xF0 | (c >> 18));
    out += static_cast<char>(0x80 | ((c >> 12) & 0x3F));
    out += static_cast<char>(0x80 | ((c >> 6) & 0x3F));
    out += static_cast<char>(0x80 | (c & 0x3F));
  }
}

}  // namespace pianola
