// Token by token against the reference: the `tokenizers` wheel and SentencePiece on a corpus of
// many scripts and on hostile strings (tools/golden/tokenizer_oracle.py,
// tokenizer_unigram_oracle.py), and llama.cpp's own pairs.
#include <algorithm>
#include <sstream>

#include "base/utf8.h"
#include "tokenizer_files.h"

namespace pianola {
namespace {

using test::gguf_tokenizer;
using test::oracle_path;
using test::read_lists;
using Ids = std::vector<TokenId>;

// Stops at the first text that differs, and says where.
void expect_same(const Tokenizer& tokenizer, const std::vector<std::string>& texts,
                 const std::vector<Ids>& expected, const EncodeOptions& options) {
  ASSERT_EQ(texts.size(), expected.size());
  for (std::size_t i = 0; i < texts.size(); ++i) {
    const Ids found = tokenizer.encode(texts[i], options);
    if (found == expected[i]) continue;
    const auto [ours, theirs] =
        std::mismatch(found.begin(), found.end(), expected[i].begin(), expected[i].end());
    const Ids before(found.begin(), ours);
    std::ostringstream detail;
    const auto list = [&](auto from, auto end) {
      for (int n = 0; n < 6 && from != end; ++n, ++from) {
        detail << " " << *from << " '" << tokenizer.token_text(*from) << "'";
      }
    };
    detail << "found";
    list(ours, found.end());
    detail << "\nexpected";
    list(theirs, expected[i].end());
    const std::string head = tokenizer.decode(before);
    FAIL() << "text " << i << ", after " << head.size() << " bytes '"
           << head.substr(head.size() > 40 ? head.size() - 40 : 0) << "': " << detail.str();
  }
}

class OracleTest : public ::testing::TestWithParam<std::pair<const char*, bool>> {
 protected:
  std::string name() const { return GetParam().first; }
  bool from_json() const { return GetParam().second; }
  std::filesystem::path file(const char* suffix) const { return oracle_path(name() + suffix); }

  std::shared_ptr<const Tokenizer> load() const {
    if (!from_json()) return gguf_tokenizer(name());
    return tokenizer_from_json(test::read_file(file(".tokenizer.json")), "tokenizer.json");
  }
};

TEST_P(OracleTest, Corpus) {
  PIANOLA_SKIP_WITHOUT(file(".corpus.ids"));
  const auto texts = read_lists<std::string>(oracle_path("corpus.texts"));
  const auto ids = read_lists<Ids>(file(".corpus.ids"));
  const auto tokenizer = load();
  expect_same(*tokenizer, texts, ids, {.add_special = false});
  // What decodes to the text again does so for the reference, too, and the other way round.
  const auto decoded = read_lists<std::string>(file(".decoded.texts"));
  for (std::size_t i = 0; i < decoded.size(); ++i) {
    if (decoded[i].empty() && !ids[i].empty()) continue;  // not every oracle decodes
    ASSERT_EQ(sanitize_utf8(tokenizer->decode(ids[i])), decoded[i]) << "text " << i;
  }
}

TEST_P(OracleTest, HostileTextIsText) {
  PIANOLA_SKIP_WITHOUT(file(".corpus.ids"));
  const auto texts = read_lists<std::string>(file(".hostile.texts"));
  const auto tokenizer = load();
  expect_same(*tokenizer, texts, read_lists<Ids>(file(".hostile.plain.ids")),
              {.add_special = false});
  for (const std::string& text : texts) {
    for (const TokenId id : tokenizer->encode(text, {.add_special = false})) {
      if (id == tokenizer->unk_id()) continue;  // of a character that the vocabulary lacks
      ASSERT_FALSE(tokenizer->is_special(id)) << tokenizer->token_text(id) << " in " << text;
    }
  }
}

TEST_P(OracleTest, SpecialTokensWhenAsked) {
  PIANOLA_SKIP_WITHOUT(file(".corpus.ids"));
  expect_same(*load(), read_lists<std::string>(file(".hostile.texts")),
              read_lists<Ids>(file(".hostile.special.ids")), {.parse_special = true});
}

TEST_P(OracleTest, DetokenizerIsDecode) {
  PIANOLA_SKIP_WITHOUT(file(".corpus.ids"));
  const auto tokenizer = load();
  const auto ids = read_lists<Ids>(file(".corpus.ids"));
  for (std::size_t i = 0; i < ids.size(); i += 7) {
    Detokenizer stream(tokenizer);
    std::string joined;
    for (const TokenId id : ids[i]) {
      const std::string piece = stream.push(id);
      ASSERT_TRUE(is_valid_utf8(piece));
      joined += piece;
    }
    joined += stream.flush();
    ASSERT_EQ(joined, sanitize_utf8(tokenizer->decode(ids[i]))) << "text " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Vocabularies, OracleTest,
    ::testing::Values(std::pair("smollm2", false), std::pair("gpt-2", false),
                      std::pair("llama-bpe", false), std::pair("qwen2", false),
                      std::pair("qwen35", false), std::pair("llama-spm", false),
                      std::pair("smollm2", true), std::pair("gpt-2", true),
                      std::pair("llama-bpe", true), std::pair("qwen2", true),
                      std::pair("qwen35", true), std::pair("gpt-4o", true),
                      std::pair("llama-spm", true), std::pair("llama-spm-metaspace", true),
                      std::pair("unigram", true), std::pair("unigram-old", true),
                      std::pair("unigram-bytes", true), std::pair("unigram-bytes-old", true)),
    [](const auto& param) {
      std::string name = param.param.first;
      std::erase(name, '-');
      return name + (param.param.second ? "_json" : "_gguf");
    });

TEST(SentencePieceOracle, Corpus) {
  PIANOLA_SKIP_WITHOUT(oracle_path("llama-spm.sentencepiece.ids"));
  expect_same(*gguf_tokenizer("llama-spm"), read_lists<std::string>(oracle_path("corpus.texts")),
              read_lists<Ids>(oracle_path("llama-spm.sentencepiece.ids")), {.add_special = false});
}

class UnigramGguf : public ::testing::TestWithParam<const char*> {};

TEST_P(UnigramGguf, IsSentencePiece) {
  const std::string name = GetParam();
  PIANOLA_SKIP_WITHOUT(oracle_path(name + ".sentencepiece.odd.ids"));
  const MappedFile file(oracle_path(name + ".gguf"));
  const auto tokenizer = tokenizer_from_gguf(parse_gguf(file.bytes(), name).metadata);
  const auto compare = [&](const std::string& texts, const std::string& ids) {
    expect_same(*tokenizer, read_lists<std::string>(oracle_path(texts)),
                read_lists<Ids>(oracle_path(name + ids)), {.add_special = false});
  };
  compare("corpus.texts", ".sentencepiece.ids");
  compare(name + ".sentencepiece.texts", ".sentencepiece.odd.ids");
}

INSTANTIATE_TEST_SUITE_P(Vocabularies, UnigramGguf,
                         ::testing::Values("unigram", "unigram-spaces", "unigram-bytes",
                                           "unigram-bytes-spaces"),
                         [](const auto& param) {
                           std::string name = param.param;
                           std::erase(name, '-');
                           return name;
                         });

class LlamaCppPairs : public ::testing::TestWithParam<const char*> {};

TEST_P(LlamaCppPairs, InpGivesOut) {
  const auto path = test::gguf_path(GetParam());
  PIANOLA_SKIP_WITHOUT(path);
  const std::string input = test::read_file(path.string() + ".inp");
  const std::string separator = "\n__ggml_vocab_test__\n";
  std::vector<std::string> texts;
  for (std::size_t at = 0;;) {
    const std::size_t end = input.find(separator, at);
    if (end == std::string::npos) break;  // nothing stands behind the last separator
    texts.push_back(input.substr(at, end - at));
    at = end + separator.size();
  }
  std::istringstream output(test::read_file(path.string() + ".out"));
  std::vector<Ids> expected;
  for (std::string line; std::getline(output, line);) {
    std::istringstream numbers(line);
    expected.emplace_back(std::istream_iterator<TokenId>(numbers),
                          std::istream_iterator<TokenId>());
  }
  ASSERT_GT(texts.size(), 40U);
  ASSERT_EQ(texts.size(), expected.size());
  // transformers composes letter and accent before it splits words, llama.cpp does not.
  constexpr char kLeadOfAccents = '\xCC';  // U+0300 to U+033F in UTF-8
  for (std::size_t i = texts.size(); i-- > 0;) {
    if (texts[i].find(kLeadOfAccents) == std::string::npos) continue;
    texts.erase(texts.begin() + static_cast<std::ptrdiff_t>(i));
    expected.erase(expected.begin() + static_cast<std::ptrdiff_t>(i));
  }
  expect_same(*gguf_tokenizer(GetParam()), texts, expected, {.add_special = false});
}

INSTANTIATE_TEST_SUITE_P(Vocabularies, LlamaCppPairs,
                         ::testing::Values("gpt-2", "llama-bpe", "llama-spm", "qwen2", "qwen35"),
                         [](const auto& param) {
                           std::string name = param.param;
                           std::erase(name, '-');
                           return name;
                         });

}  // namespace
}  // namespace pianola
