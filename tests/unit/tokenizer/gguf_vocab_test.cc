// Tokenizers of GGUF metadata: small vocabularies made here, refusals, and the real ones.
#include "tokenizer/gguf_vocab.h"

#include <gmock/gmock.h>

#include <cmath>

#include "base/utf8.h"
#include "pianola/error.h"
#include "tokenizer_files.h"

namespace pianola {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Strings = std::vector<std::string>;
using Ints = std::vector<std::int64_t>;
using Floats = std::vector<double>;

using Entries = std::vector<std::pair<std::string, MetadataValue>>;

// Later entries replace earlier ones of the same key.
Metadata metadata(const Entries& entries) {
  Metadata out;
  for (auto it = entries.rbegin(); it != entries.rend(); ++it) {
    out.insert("tokenizer.ggml." + it->first, it->second);
  }
  return out;
}

Entries byte_level() {
  return {{"model", std::string("gpt2")},
          {"pre", std::string("gpt-2")},
          {"tokens", Strings{"a", "b", "ab", "Ġ", "<eos>"}},
          {"token_type", Ints{1, 1, 1, 1, 3}},
          {"merges", Strings{"a b"}},
          {"eos_token_id", std::int64_t{4}}};
}

Entries sentencepiece() {
  Strings tokens{"<unk>", "<s>", "</s>"};
  Ints types{2, 3, 3};
  Floats scores{0, 0, 0};
  for (int b = 0; b < 256; ++b) {
    tokens.push_back(fmt::format("<0x{:02X}>", b));
    types.push_back(6);
    scores.push_back(0);
  }
  for (const char* text : {"▁", "a", "b", "ab", "▁ab", "<", "s", ">", "/", "</", "s>"}) {
    tokens.push_back(text);
    types.push_back(1);
    scores.push_back(-static_cast<double>(tokens.size()));
  }
  return {{"model", std::string("llama")},
          {"tokens", tokens},
          {"scores", scores},
          {"token_type", types}};
}

Entries unigram() {
  return {{"model", std::string("t5")},
          {"tokens", Strings{"<pad>", "</s>", "<unk>", "▁", "a", "b", "ab", "▁ab", "unused"}},
          {"scores", Floats{0, 0, 0, -3, -2, -2.5, -4.4, -5, -1}},
          {"token_type", Ints{3, 3, 2, 1, 1, 1, 1, 1, 5}}};
}

Entries with(Entries entries, const char* key, MetadataValue value) {
  entries.emplace_back(key, std::move(value));
  return entries;
}

void expect_refused(const Entries& entries, ErrorCode code, const std::string& words) {
  try {
    tokenizer_from_gguf(metadata(entries));
    ADD_FAILURE() << "not refused, expected: " << words;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_THAT(error.what(), HasSubstr(words));
  }
}

TEST(GgufVocab, Refusals) {
  const ErrorCode kNo = ErrorCode::kUnsupported;
  const ErrorCode kBad = ErrorCode::kInvalidModel;
  for (const char* model : {"no_vocab", "bert", "rwkv", "plamo2", "none"}) {
    expect_refused(with(byte_level(), "model", std::string(model)), kNo, model);
  }
  for (const char* pre : {"default", "deepseek-llm", "tekken", "llama4", ""}) {
    expect_refused(with(byte_level(), "pre", std::string(pre)), kNo, fmt::format("'{}'", pre));
  }
  expect_refused({}, kBad, "tokenizer.ggml.model");
  expect_refused(with(byte_level(), "tokens", Strings{}), kBad, "empty");
  expect_refused(with(byte_level(), "tokens", std::string("x")), kBad, "tokenizer.ggml.tokens");
  expect_refused(with(byte_level(), "token_type", Ints{1}), kBad, "1 entries for 5 tokens");
  expect_refused(with(byte_level(), "token_type", Ints{1, 1, 1, 1, 9}), kBad, "9 for token 4");
  expect_refused(with(byte_level(), "merges", Strings{"a z"}), kBad, "'z'");
  expect_refused(with(byte_level(), "merges", Strings{"a"}), kBad, "not two tokens");
  expect_refused(with(byte_level(), "merges", Strings{""}), kBad, "not two tokens");
  expect_refused(with(byte_level(), "eos_token_id", std::int64_t{5}), kBad, "eos_token_id: 5");
  expect_refused(with(byte_level(), "bos_token_id", std::int64_t{-2}), kBad, "bos_token_id: -2");
  expect_refused(with(byte_level(), "add_bos_token", true), kBad, "bos_token_id: missing");
  expect_refused(
      with(byte_level(), "tokens", Strings{"a", "b", "ab", std::string(1 << 20, 'x'), "<eos>"}),
      kBad, "1048576 bytes");
  expect_refused(with(sentencepiece(), "scores", Floats{1, 2}), kBad, "2 entries");
  Floats scores(270, 0.0);
  scores[7] = std::nan("");
  expect_refused(with(sentencepiece(), "scores", scores), kBad, "token 7");
  Strings tokens = std::get<Strings>(sentencepiece()[1].second);
  tokens[3] = "zero";
  expect_refused(with(sentencepiece(), "tokens", tokens), kBad, "expected <0xNN>");
}

TEST(GgufVocab, UnigramRefusals) {
  const ErrorCode kBad = ErrorCode::kInvalidModel;
  expect_refused(with(unigram(), "scores", Floats{1, 2}), kBad, "2 entries for 9 tokens");
  Floats scores(9, -1.0);
  scores[4] = std::nan("");
  expect_refused(with(unigram(), "scores", scores), kBad, "token 4");
  expect_refused(with(unigram(), "unknown_token_id", std::int64_t{-1}), kBad, "unknown_token_id");
  expect_refused(with(unigram(), "unknown_token_id", std::int64_t{9}), kBad, "unknown_token_id: 9");
  expect_refused(with(unigram(), "precompiled_charsmap", std::string("x")), kBad,
                 "precompiled_charsmap");
  expect_refused(with(unigram(), "precompiled_charsmap", Ints{300}), kBad, "300, expected a byte");
  expect_refused(with(unigram(), "precompiled_charsmap", Ints{4, 0, 0, 0, 0, 0}), kBad,
                 "6 bytes with a trie of 4");
  expect_refused(with(unigram(), "token_type", Ints{3, 3, 2, 3, 3, 3, 3, 3, 5}), kBad, "no pieces");
}

TEST(GgufVocab, UnigramOfT5) {
  const auto tokenizer = tokenizer_from_gguf(metadata(unigram()));
  EXPECT_EQ(tokenizer->unk_id(), 2);
  EXPECT_THAT(tokenizer->eog_ids(), ElementsAre(1));
  EXPECT_THAT(tokenizer->encode("  ab   a "), ElementsAre(7, 3, 4, 1));  // </s> behind it
  EXPECT_THAT(tokenizer->encode("  "), ElementsAre(1));
  EXPECT_THAT(tokenizer->encode("unused", {.add_special = false}), ElementsAre(3, 2));
  EXPECT_EQ(tokenizer->decode(std::vector<TokenId>{7, 3, 4}), "ab a");
  const auto kept = tokenizer_from_gguf(
      metadata(with(with(unigram(), "remove_extra_whitespaces", false), "add_eos_token", false)));
  EXPECT_THAT(kept->encode(" ab "), ElementsAre(3, 7, 3));
}

// "bA" is a token and a merge, and a word or not by the pre-tokenizer's expression.
TEST(GgufVocab, PreSaysWhatWordsAre) {
  const auto encode = [](const char* pre) {
    Entries entries = with(byte_level(), "pre", std::string(pre));
    entries = with(entries, "tokens", Strings{"b", "A", "bA", "c", "<eos>"});
    entries = with(entries, "merges", Strings{"b A"});
    const auto tokenizer = tokenizer_from_gguf(metadata(entries));
    EXPECT_EQ(tokenizer->pre(), pre);
    return tokenizer->encode("bA", {.add_special = false});
  };
  for (const char* pre : {"gpt-2", "smollm", "qwen2", "qwen35"}) {
    EXPECT_THAT(encode(pre), ElementsAre(2)) << pre;
  }
  EXPECT_THAT(encode("gpt-4o"), ElementsAre(0, 1));
}

TEST(GgufVocab, ManyMergesAndTokensAreBounded) {
  const Metadata many = metadata(with(byte_level(), "merges", Strings(10'000'000, "a b")));
  double begin = test::cpu_seconds();
  EXPECT_THROW(tokenizer_from_gguf(many), Error);
  EXPECT_LT(test::cpu_seconds() - begin, 1.0);
  // Runs of one letter have the most ways to be put together.
  Entries entries = sentencepiece();
  auto& tokens = std::get<Strings>(entries[1].second);
  for (std::size_t n = 2; n < 6000; ++n) tokens.push_back(std::string(n, 'a'));
  std::get<Floats>(entries[2].second).resize(tokens.size(), -1);
  std::get<Ints>(entries[3].second).resize(tokens.size(), 1);
  begin = test::cpu_seconds();
  expect_refused(entries, ErrorCode::kInvalidModel, "tokens");
  EXPECT_LT(test::cpu_seconds() - begin, 4.0);  // 1 without sanitizers
}

TEST(GgufVocab, SentencePieceSpacesBytesAndControlTokens) {
  const auto tokenizer = tokenizer_from_gguf(metadata(sentencepiece()));
  const auto id = [&](const char* text) { return *tokenizer->find_token(text); };
  const EncodeOptions plain{.add_special = false};
  EXPECT_THAT(tokenizer->encode("ab"), ElementsAre(1, id("▁ab")));
  EXPECT_THAT(tokenizer->encode("", plain), ElementsAre());
  EXPECT_EQ(tokenizer->decode(tokenizer->encode("ab ab", plain)), "ab ab");
  EXPECT_EQ(tokenizer->decode(tokenizer->encode(" ab", plain)), " ab");
  EXPECT_EQ(tokenizer->decode(tokenizer->encode("ab"), true), "ab");
  // "</s>" and "<0x41>" are text, not the tokens of that name.
  for (const char* text : {"</s>", "<s>", "<0x41>", "a</s>b", "<<s>s>"}) {
    for (const TokenId token : tokenizer->encode(text, plain)) {
      EXPECT_FALSE(tokenizer->is_special(token)) << text;
    }
    EXPECT_EQ(tokenizer->decode(tokenizer->encode(text, plain)), text);
  }
  EXPECT_THAT(tokenizer->encode("</s>", {.add_special = false, .parse_special = true}),
              ElementsAre(2));
  // Bytes that are no UTF-8 come back as they were.
  const std::string broken = "a\xFF\xC0\x80 \xED\xA0\x80 \xF4\x90\x80\x80 \xE2\x82";
  EXPECT_EQ(tokenizer->decode(tokenizer->encode(broken, plain)), broken);
  EXPECT_EQ(tokenizer->bos_id(), 1);
  EXPECT_THAT(tokenizer->eog_ids(), ElementsAre(2));
  EXPECT_EQ(tokenizer->kind(), "SentencePiece BPE");
}

TEST(Detokenizer, HoldsBackIncompleteCharacters) {
  const auto tokenizer = tokenizer_from_gguf(metadata(sentencepiece()));
  const auto byte = [](int b) { return static_cast<TokenId>(3 + b); };
  Detokenizer stream(tokenizer);
  EXPECT_EQ(stream.push(byte(0xF0)), "");
  EXPECT_EQ(stream.push(byte(0x9F)), "");
  EXPECT_EQ(stream.push(byte(0x92)), "");
  EXPECT_EQ(stream.push(byte(0xA9)), "\U0001F4A9");
  EXPECT_EQ(stream.push(byte(0xE2)), "");
  EXPECT_EQ(stream.push(byte('x')), "\uFFFDx");  // it can no longer complete
  EXPECT_EQ(stream.push(byte(0xFF)), "\uFFFD");
  EXPECT_EQ(stream.push(byte(0xC3)), "");
  EXPECT_EQ(stream.flush(), "\uFFFD");
  const TokenId word = *tokenizer->find_token("▁ab");
  EXPECT_EQ(stream.push(word), "ab");  // flush() starts anew: the first space goes
  EXPECT_EQ(stream.push(word), " ab");
}

class RealVocabulary : public ::testing::TestWithParam<const char*> {};

TEST_P(RealVocabulary, NamesOfSpecialTokensAreText) {
  PIANOLA_SKIP_WITHOUT(test::gguf_path(GetParam()));
  const auto tokenizer = test::gguf_tokenizer(GetParam());
  const EncodeOptions plain{.add_special = false};
  const EncodeOptions parse{.add_special = false, .parse_special = true};
  for (TokenId id = 0; id < tokenizer->vocab_size(); ++id) {
    if (!tokenizer->is_special(id)) continue;
    const std::string name(tokenizer->token_text(id));
    EXPECT_THAT(tokenizer->encode(name, parse), ElementsAre(id));
    const std::string half = name.substr(0, name.size() / 2);
    const std::string rest = name.substr(half.size());
    for (const std::string& text : {name, " " + name, name + name, half + name + rest,
                                    "x" + name + "y", half + rest + rest}) {
      const auto ids = tokenizer->encode(text, plain);
      for (const TokenId found : ids) {
        ASSERT_FALSE(tokenizer->is_special(found)) << text;
      }
      ASSERT_EQ(tokenizer->decode(ids), text);
    }
  }
}

// 4 MB of one letter, of one space and of two letters: linear enough to be quick.
TEST_P(RealVocabulary, LongRuns) {
  PIANOLA_SKIP_WITHOUT(test::gguf_path(GetParam()));
  const auto tokenizer = test::gguf_tokenizer(GetParam());
  const double begin = test::cpu_seconds();
  for (const char* unit : {"aaaa", "    ", "abab", "\u4e00x"}) {
    std::string text;
    for (int i = 0; i < (1 << 20); ++i) text += unit;
    const auto ids = tokenizer->encode(text, {.add_special = false});
    EXPECT_EQ(tokenizer->decode(ids), text);
  }
  EXPECT_LT(test::cpu_seconds() - begin, 60.0);  // 3 without sanitizers
}

TEST_P(RealVocabulary, BytesRoundTrip) {
  PIANOLA_SKIP_WITHOUT(test::gguf_path(GetParam()));
  const auto tokenizer = test::gguf_tokenizer(GetParam());
  // 21 bytes have no token in smollm2, and those of Qwen normalise the text.
  const std::string name = GetParam();
  const bool exact = name != "smollm2" && !name.starts_with("qwen");
  std::uint32_t state = 1;
  for (int round = 0; round < 200; ++round) {
    std::string text;
    for (int i = 0; i < 300; ++i) {
      state = state * 1664525 + 1013904223;
      text += static_cast<char>(state >> 24);
    }
    const auto ids = tokenizer->encode(text, {.add_special = false});
    if (exact) {
      ASSERT_EQ(tokenizer->decode(ids), text);
    }
    Detokenizer stream(tokenizer);
    std::string joined;
    for (const TokenId id : ids) joined += stream.push(id);
    joined += stream.flush();
    ASSERT_EQ(joined, sanitize_utf8(tokenizer->decode(ids)));
  }
}

INSTANTIATE_TEST_SUITE_P(Gguf, RealVocabulary,
                         ::testing::Values("smollm2", "gpt-2", "llama-bpe", "llama-spm", "qwen2",
                                           "qwen35"),
                         [](const auto& param) {
                           std::string name = param.param;
                           std::erase(name, '-');
                           return name;
                         });

TEST(GgufVocab, SmolLm2Facts) {
  PIANOLA_SKIP_WITHOUT(test::gguf_path("smollm2"));
  const auto tokenizer = test::gguf_tokenizer("smollm2");
  EXPECT_EQ(tokenizer->vocab_size(), 49152);
  EXPECT_EQ(tokenizer->pre(), "smollm");
  EXPECT_EQ(tokenizer->kind(), "byte-level BPE");
  EXPECT_FALSE(tokenizer->add_bos());
  EXPECT_EQ(tokenizer->bos_id(), 1);
  EXPECT_EQ(tokenizer->eos_id(), 2);
  EXPECT_THAT(tokenizer->eog_ids(), ElementsAre(0, 2));
  EXPECT_TRUE(test::gguf_tokenizer("llama-bpe")->add_bos());
}

}  // namespace
}  // namespace pianola
