// UTF-8 decoding that never reads past its input and never accepts what Unicode forbids.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace pianola {

inline constexpr char32_t kReplacementCharacter = 0xFFFD;

struct Utf8Char {
  char32_t code_point = 0;  // kReplacementCharacter when !valid
  int length = 0;           // bytes consumed: 1 to 4; for invalid input its maximal subpart
  bool valid = false;
};

// Decodes the character at `text[0]`; `text` must not be empty. Overlong forms, surrogates and
// values above U+10FFFF are invalid.
Utf8Char decode_utf8(std::string_view text);

bool is_valid_utf8(std::string_view text);

// Length of the longest prefix that does not end inside a character that more bytes could complete.
// Bytes that can never become valid count as complete. At most three bytes are held back.
std::size_t complete_utf8_prefix(std::string_view text);

// Replaces each maximal invalid part by U+FFFD, as Unicode recommends and as Python's
// bytes.decode("utf-8", "replace") does.
std::string sanitize_utf8(std::string_view text);

// Text from a file as a message may show it: control characters, DEL and bytes that are not UTF-8
// become \xNN, a backslash \\, and what is longer than `limit` bytes is cut, with "..." behind it.
std::string printable(std::string_view text, std::size_t limit = 100);

void append_utf8(std::string& out, char32_t code_point);

}  // namespace pianola
