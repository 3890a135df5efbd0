// Classes of code points as regular expressions see them: \p{L}, \p{N}, \p{M}, \s, \w.
//
//   if (unicode::classes_of(c) & unicode::kLetter) ...
//
// The tables are those of the reference tokenizer, not of the Unicode library at hand: token ids
// depend on the Unicode version.
#pragma once

#include <cstdint>

namespace pianola::unicode {

using Classes = std::uint16_t;
inline constexpr Classes kLetter = 1;
inline constexpr Classes kNumber = 2;
inline constexpr Classes kSpace = 4;
inline constexpr Classes kWord = 8;
inline constexpr Classes kDigit = 16;      // what the Digits pre-tokenizer splits off
inline constexpr Classes kReordered = 32;  // by the reference's NFC: marks
inline constexpr Classes kMark = 64;       // \p{M}
inline constexpr Classes kUpper = 128;     // letters of upper case or title case
inline constexpr Classes kLower = 256;

// Of each code point, [0x110000]; built on first use.
const Classes* class_table();

inline Classes classes_of(char32_t c) { return c < 0x110000 ? class_table()[c] : 0; }

}  // namespace pianola::unicode
