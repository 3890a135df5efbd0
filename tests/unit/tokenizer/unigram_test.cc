// Unigram vocabularies made here: what the search chooses, what is refused by name, and that long
// texts take time in proportion. Exact ids on real text: oracle_test.cc.
#include "tokenizer/unigram.h"

#include <gmock/gmock.h>

#include <cmath>

#include "pianola/error.h"
#include "tokenizer/charsmap.h"
#include "tokenizer_json_cases.h"

namespace pianola {
namespace {

using test::expect_refused;
using test::load;
using ::testing::ElementsAre;

constexpr const char* kPieces =
    R"(["<unk>",0],["▁",-3],["a",-2],["b",-2.5],["ab",-4.4],["ba",-6],["<0x41>",-20])";

std::string document(const std::string& vocab, const std::string& model = R"("unk_id":0)",
                     const std::string& normalizer = "null") {
  return R"({"model":{"type":"Unigram",)" + model + R"(,"vocab":[)" + vocab +
         R"(]},"normalizer":)" + normalizer +
         R"(,"decoder":{"type":"Metaspace","replacement":"▁","prepend_scheme":"never"}})";
}

std::string charsmap(const std::string& base64) {
  return R"({"type":"Precompiled","precompiled_charsmap":")" + base64 + "\"}";
}

TEST(Unigram, TakesTheLargestSumOfScores) {
  const auto tokenizer = load(document(kPieces));
  const EncodeOptions plain{.add_special = false};
  EXPECT_EQ(tokenizer->kind(), "SentencePiece unigram");
  EXPECT_THAT(tokenizer->encode("ab", plain), ElementsAre(4));      // -4.4 above -2 - 2.5
  EXPECT_THAT(tokenizer->encode("ba", plain), ElementsAre(3, 2));   // -2.5 - 2 above -6
  EXPECT_THAT(tokenizer->encode("aba", plain), ElementsAre(4, 2));  // -6.4 above -8
  EXPECT_THAT(tokenizer->encode("", plain), ElementsAre());
  EXPECT_EQ(tokenizer->decode(std::vector<TokenId>{4, 1, 2}), "ab a");
}

TEST(Unigram, UnknownCharactersAreOne) {
  const auto tokenizer = load(document(kPieces));
  const EncodeOptions plain{.add_special = false};
  EXPECT_THAT(tokenizer->encode("a\u00e9\u4e2d\xff"
                                "b",
                                plain),
              ElementsAre(2, 0, 3));
  EXPECT_THAT(tokenizer->encode("<unk>", plain), ElementsAre(0));
  const auto bytes = load(document(kPieces, R"("unk_id":0,"byte_fallback":true)"));
  EXPECT_THAT(bytes->encode("aAAb", plain), ElementsAre(2, 6, 6, 3));
  EXPECT_THAT(bytes->encode("aACb", plain), ElementsAre(2, 0, 3));  // not all have a byte token
}

TEST(Unigram, TextNeverBecomesAControlToken) {
  std::string json = document(R"(["<unk>",0],["<s>",0],["<",-3],["s",-3],[">",-3])");
  json.insert(1, R"("added_tokens":[{"id":1,"content":"<s>","special":true}],)");
  const auto tokenizer = load(json);
  EXPECT_THAT(tokenizer->encode("<s>", {.add_special = false}), ElementsAre(2, 3, 4));
  EXPECT_THAT(tokenizer->encode("<s>", {.add_special = false, .parse_special = true}),
              ElementsAre(1));
}

TEST(Unigram, RefusesWhatIsMalformed) {
  const ErrorCode kBad = ErrorCode::kInvalidModel;
  const ErrorCode kNo = ErrorCode::kUnsupported;
  expect_refused(document(""), kBad, "0 tokens");
  expect_refused(document(R"(["a"])"), kBad, "vocab[0]: expected a piece and its score");
  expect_refused(document(R"(["a",1],["b","1"])"), kBad, "vocab[1]: expected a piece");
  expect_refused(document(R"(["a",1],[1,1])"), kBad, "vocab[1]: expected a piece");
  expect_refused(document(R"(["a",1],{"b":1})"), kBad, "vocab[1]: expected a piece");
  expect_refused(document(R"(["a",1],["b",1e999])"), kBad, "");
  expect_refused(document(R"(["a",1])"), kBad, "no pieces");
  expect_refused(document(kPieces, R"("unk_id":7)"), kBad, "id 7 of 7 tokens");
  expect_refused(document(kPieces, R"("unk_id":-1)"), kBad, "-1");
  expect_refused(document(kPieces, R"("unk_id":"<unk>")"), kBad, "unk_id");
  expect_refused(document(kPieces, R"("unk_id":null)"), kNo, "unk_id");
  expect_refused(document(kPieces, R"("byte_fallback":false)"), kNo, "unk_id");
  expect_refused(document(kPieces, R"("unk_id":0,"byte_fallback":3)"), kBad, "byte_fallback");
  expect_refused(document(R"(["<unk>",0],[")" + std::string(513, 'x') + R"(",-1])"), kBad,
                 "513 bytes");
  std::string json = document(kPieces);
  json.insert(1, R"("pre_tokenizer":{"type":"ByteLevel"},)");
  expect_refused(json, kNo, "ByteLevel");
}

TEST(Unigram, RefusesMalformedCharsmaps) {
  const ErrorCode kBad = ErrorCode::kInvalidModel;
  const auto refused = [&](const std::string& base64, const std::string& words) {
    expect_refused(document(kPieces, R"("unk_id":0)", charsmap(base64)), kBad, words);
  };
  refused("", "0 bytes");
  refused("AAAA", "no precompiled charsmap");
  refused("AAA", "no base64");
  refused("A===", "no base64");
  refused("AA*A", "no base64");
  refused("AAAAAA==", "a trie of 0");
  refused("CAAAAAAAAAA=", "a trie of 8");
  refused("BAAAAAAAAAA=", "do not end");
  refused("BAAAAAAAAAD/AA==", "no UTF-8");
  refused("BAAAAAkAAIAA", "a replacement at 9 of 1 bytes");
  expect_refused(document(kPieces, R"("unk_id":0)", R"({"type":"Precompiled"})"), kBad,
                 "precompiled_charsmap");
  EXPECT_THAT(load(document(kPieces, R"("unk_id":0)", charsmap("BAAAAAAAAAAA")))
                  ->encode("ab", {.add_special = false}),
              ElementsAre(4));  // a map of nothing
}

TEST(Unigram, Base64) {
  EXPECT_EQ(decode_base64("", "x"), "");
  EXPECT_EQ(decode_base64("Zg==", "x"), "f");
  EXPECT_EQ(decode_base64("Zm8=", "x"), "fo");
  EXPECT_EQ(decode_base64("Zm9vYmFy", "x"), "foobar");
  EXPECT_EQ(decode_base64("+/8=", "x"), "\xFB\xFF");
}

// A text without a gap between pieces, one of gaps only, and one that is unknown throughout.
TEST(Unigram, LongTextsTakeLinearTime) {
  std::string vocab = R"(["<unk>",0],["b",-1])";
  for (std::size_t n = 1; n <= 64; ++n) {
    vocab +=
        R"(,[")" + std::string(n, 'a') + R"(",)" + std::to_string(-1 - static_cast<int>(n)) + "]";
  }
  const auto tokenizer = load(document(vocab));
  const EncodeOptions plain{.add_special = false};
  const double begin = test::cpu_seconds();
  EXPECT_EQ(tokenizer->encode(std::string(1 << 19, 'a'), plain).size(), (1U << 19) / 64);
  EXPECT_EQ(tokenizer->encode(std::string(1 << 19, 'b'), plain).size(), 1U << 19);
  EXPECT_EQ(tokenizer->encode(std::string(1 << 19, 'c'), plain).size(), 1U);
  EXPECT_LT(test::cpu_seconds() - begin, 10.0);  // 1 without sanitizers
}

}  // namespace
}  // namespace pianola
