// The words of the known regular expressions, where their alternatives compete. What is expected
// is what the `tokenizers` wheel says.
#include "tokenizer/pretokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace pianola {
namespace {

using ::testing::ElementsAre;

std::vector<std::string> words(WordPattern pattern, std::string_view text) {
  std::vector<std::string> words;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = word_end(pattern, text, at);
    words.emplace_back(text.substr(at, end - at));
    at = end;
  }
  return words;
}

TEST(PreTokenizer, O200kSplitsWhereSmallLettersEnd) {
  const auto of = [](std::string_view text) { return words(WordPattern::kO200k, text); };
  EXPECT_THAT(of("Hello WORLD"), ElementsAre("Hello", " WORLD"));
  EXPECT_THAT(of("helloWorld HTTPServer"), ElementsAre("hello", "World", " HTTPServer"));
  EXPECT_THAT(of("\u01C5abc"), ElementsAre("\u01C5abc"));  // a letter of title case
  // Letters without a case and marks are of both kinds.
  EXPECT_THAT(of("\u6F22A\u6F22a"), ElementsAre("\u6F22A\u6F22a"));
  EXPECT_THAT(of("\u6F22AB"), ElementsAre("\u6F22", "AB"));
  EXPECT_THAT(of(".\u0301A e\u0301x \u0301"), ElementsAre(".\u0301", "A", " e\u0301x", " \u0301"));
  EXPECT_THAT(of("\u0301"), ElementsAre("\u0301"));
}

TEST(PreTokenizer, O200kKeepsContractionsAtTheirWord) {
  const auto of = [](std::string_view text) { return words(WordPattern::kO200k, text); };
  EXPECT_THAT(of("it's I'LL 'tis"), ElementsAre("it's", " I'LL", " '", "tis"));
  EXPECT_THAT(of("DON'T"), ElementsAre("DON'T"));
  EXPECT_THAT(of("x'"), ElementsAre("x", "'"));
}

TEST(PreTokenizer, O200kNumbersSymbolsAndSpaces) {
  const auto of = [](std::string_view text) { return words(WordPattern::kO200k, text); };
  EXPECT_THAT(of("1234 56"), ElementsAre("123", "4", " ", "56"));
  EXPECT_THAT(of("a/b //\n/ x"), ElementsAre("a", "/b", " //\n/", " x"));
  EXPECT_THAT(of(" \n\n  y"), ElementsAre(" \n\n", " ", " y"));
}

TEST(PreTokenizer, Qwen35HasMarksInItsWords) {
  const auto of = [](std::string_view text) { return words(WordPattern::kQwen35, text); };
  EXPECT_THAT(of(".\u0301A e\u0301x \u0301"), ElementsAre(".\u0301A", " e\u0301x", " \u0301"));
  EXPECT_THAT(of("\u0301"), ElementsAre("\u0301"));
  EXPECT_THAT(of("helloWorld DON'T"), ElementsAre("helloWorld", " DON", "'T"));
  EXPECT_THAT(of("12 a/b //\n/ x"), ElementsAre("1", "2", " a", "/b", " //\n", "/", " x"));
}

}  // namespace
}  // namespace pianola
