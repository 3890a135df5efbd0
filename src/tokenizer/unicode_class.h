// Classes of code points as regular expressions see them: \p{L}, \p{N}, \s, \w.
//
//   if (unicode::classes_of(c) & unicode::kLetter) ...
//
// The tables are those of the reference tokenizer, not of the Unicode library at hand: token ids
// depend on the Unicode version.
#pragma once

#include <cstdint>

namespace pianola::unicode {

inline constexpr std::uint8_t kLetter = 1;
inline constexpr std::uint8_t kNumber = 2;
inline constexpr std::uint8_t kSpace = 4;
inline constexpr std::uint8_t kWord = 8;
inline constexpr std::uint8_t kDigit = 16;  // what the Digits pre-tokenizer splits off
inline constexpr std::uint8_t kMark = 32;   // reordered by the reference's NFC

struct ClassRange {
  char32_t first;
  char32_t last;
  std::uint8_t classes;
};
inline constexpr int kClassRangeCount = 1269;
extern const ClassRange kClassRanges[kClassRangeCount];  // ascending, disjoint

// One byte for each code point, [0x110000]; built on first use.
const std::uint8_t* class_table();

inline std::uint8_t classes_of(char32_t c) { return c < 0x110000 ? class_table()[c] : 0; }

}  // namespace pianola::unicode
