#include "base/utf8.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <fstream>
#include <functional>

namespace pianola {
namespace {

constexpr std::array<unsigned char, 25> kEdges = {
    0x00, 0x41, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC1, 0xC2, 0xDF,
    0xE0, 0xE1, 0xEC, 0xED, 0xEE, 0xEF, 0xF0, 0xF1, 0xF3, 0xF4, 0xF5, 0xFF};

void fnv(std::uint64_t& state, std::string_view data) {
  for (const char c : data) state = (state ^ static_cast<unsigned char>(c)) * 0x100000001B3;
}

// Calls f with every sequence of `size` edge bytes that begins with `first`, in order.
void for_each_sequence(std::size_t size, unsigned char first,
                       const std::function<void(const std::string&)>& f) {
  std::array<std::size_t, 4> index = {};
  std::string text(size, static_cast<char>(first));
  while (true) {
    for (std::size_t i = 1; i < size; ++i) text[i] = static_cast<char>(kEdges[index[i]]);
    f(text);
    std::size_t i = size - 1;
    while (i > 0 && ++index[i] == kEdges.size()) index[i--] = 0;
    if (i == 0) return;
  }
}

// See tools/golden/utf8_golden.py.
TEST(Utf8, AllEdgeSequencesAsPythonDecodesThem) {
  std::ifstream golden(PIANOLA_SOURCE_DIR "/tests/unit/base/golden/utf8.txt");
  std::size_t size = 0;
  unsigned first = 0;
  std::uint64_t text_hash = 0;
  std::uint64_t prefix_hash = 0;
  int lines = 0;
  while (golden >> std::dec >> size >> std::hex >> first >> text_hash >> prefix_hash) {
    ++lines;
    std::uint64_t text_state = 0xCBF29CE484222325;
    std::uint64_t prefix_state = 0xCBF29CE484222325;
    for_each_sequence(size, static_cast<unsigned char>(first), [&](const std::string& s) {
      const std::string clean = sanitize_utf8(s);
      ASSERT_TRUE(is_valid_utf8(clean));
      ASSERT_EQ(is_valid_utf8(s), clean == s);
      fnv(text_state, clean + "\xff");
      fnv(prefix_state, std::string(1, static_cast<char>(complete_utf8_prefix(s))));
    });
    EXPECT_EQ(text_state, text_hash) << size << " bytes from " << std::hex << first;
    EXPECT_EQ(prefix_state, prefix_hash) << size << " bytes from " << std::hex << first;
  }
  EXPECT_EQ(lines, 100);
}

TEST(Utf8, EveryCodePointGoesRound) {
  for (char32_t c = 0; c <= 0x10FFFF; ++c) {
    if (c >= 0xD800 && c <= 0xDFFF) continue;
    std::string text;
    append_utf8(text, c);
    const Utf8Char back = decode_utf8(text);
    ASSERT_TRUE(back.valid && back.code_point == c && back.length == static_cast<int>(text.size()));
    ASSERT_EQ(complete_utf8_prefix(text), text.size());
    for (std::size_t n = 1; n < text.size(); ++n) {
      ASSERT_EQ(complete_utf8_prefix("ab" + text.substr(0, n)), 2U);
    }
  }
}

TEST(Utf8, PrefixOfNothing) { EXPECT_EQ(complete_utf8_prefix(""), 0U); }

TEST(Utf8, PrintableShowsNoControls) {
  EXPECT_EQ(printable("blk.0.w"), "blk.0.w");
  EXPECT_EQ(printable("\u00e9\U0001F600"), "\u00e9\U0001F600");
  EXPECT_EQ(printable("a\x1b[31m\n\x7f"), "a\\x1b[31m\\x0a\\x7f");
  EXPECT_EQ(printable("\u009b1m"), "\\xc2\\x9b1m");  // a control sequence in one character
  EXPECT_EQ(printable("\xff\xc3"), "\\xff\\xc3");
  EXPECT_EQ(printable("a\\b"), "a\\\\b");
  EXPECT_EQ(printable(std::string(1000, 'x')), std::string(100, 'x') + "...");
  EXPECT_EQ(printable("abc", 3), "abc");
  EXPECT_EQ(printable("abcd", 3), "abc...");
}

}  // namespace
}  // namespace pianola
