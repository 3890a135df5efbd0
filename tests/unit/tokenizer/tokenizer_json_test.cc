// tokenizer.json: what is read, what is refused by name, and that hostile files cost no time.
#include "tokenizer/tokenizer_json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "pianola/error.h"
#include "tokenizer_json_cases.h"

namespace pianola {
namespace {

using test::expect_refused;
using test::load;
using ::testing::ElementsAre;

// A character-level document; members in `parts` come first, so that a test can replace them.
std::string document(const std::string& vocab, const std::string& merges,
                     const std::string& parts = "") {
  std::string text = "{" + parts;
  const auto add = [&](const std::string& key, const std::string& value) {
    if (parts.find("\"" + key + "\":") == std::string::npos) {
      text += (text.size() > 1 && text.back() != ',' ? "," : "") + ("\"" + key + "\":") + value;
    }
  };
  add("model", R"({"type":"BPE","vocab":{)" + vocab + R"(},"merges":[)" + merges + "]}");
  add("decoder", R"({"type":"Fuse"})");
  return text + "}";
}

constexpr const char* kAbc = R"("a":0,"b":1,"c":2,"ab":3,"abc":4," ":5)";
constexpr const char* kAbcMerges = R"("a b",["ab","c"])";

TEST(TokenizerJson, MergesAsStringsAndPairs) {
  const auto tokenizer = load(document(kAbc, kAbcMerges));
  const EncodeOptions plain{.add_special = false};
  EXPECT_THAT(tokenizer->encode("abcab", plain), ElementsAre(4, 3));
  EXPECT_THAT(tokenizer->encode("cba?", plain), ElementsAre(2, 1, 0));  // no unk: dropped
  EXPECT_EQ(tokenizer->decode(std::vector<TokenId>{4, 5, 3}), "abc ab");
  EXPECT_EQ(tokenizer->vocab_size(), 6);
  EXPECT_EQ(tokenizer->find_token("abc"), 4);
  EXPECT_EQ(tokenizer->find_token("abd"), std::nullopt);
  EXPECT_THROW(tokenizer->token_text(6), Error);
  EXPECT_THROW(tokenizer->token_text(-1), Error);
}

TEST(TokenizerJson, RefusesByName) {
  const auto with = [](const std::string& parts) { return document(kAbc, kAbcMerges, parts); };
  const ErrorCode kNo = ErrorCode::kUnsupported;
  expect_refused(with(R"("model":{"type":"WordPiece","vocab":{}})"), kNo, "'WordPiece'");
  expect_refused(with(R"("normalizer":{"type":"Lowercase"})"), kNo, "'Lowercase'");
  expect_refused(with(R"("normalizer":{"type":"Sequence","normalizers":[{"type":"NFKC"}]})"), kNo,
                 "'NFKC'");
  expect_refused(
      with(R"("normalizer":{"type":"Replace","pattern":{"Regex":" {3,}"},"content":"x"})"), kNo,
      "' {3,}'");
  expect_refused(with(R"("pre_tokenizer":{"type":"BertPreTokenizer"})"), kNo, "'BertPreTokenizer'");
  expect_refused(with(R"("pre_tokenizer":{"type":"Split","pattern":{"Regex":"(a+)+$"},)"
                      R"("behavior":"Isolated","invert":false})"),
                 kNo, "'(a+)+$'");
  expect_refused(with(R"("post_processor":{"type":"BertProcessing"})"), kNo, "'BertProcessing'");
  expect_refused(with(R"("decoder":{"type":"CTC"})"), kNo, "'CTC'");
  expect_refused(with(R"("decoder":null)"), kNo, "no decoder");
  expect_refused(with(R"("decoder":{"type":"ByteLevel"})"), kNo, "does not undo");
  expect_refused(
      with(R"("model":{"type":"BPE","vocab":{"a":0},"merges":[],"end_of_word_suffix":"</w>"})"),
      kNo, "end_of_word_suffix");
}

TEST(TokenizerJson, RefusesWhatIsMalformed) {
  const ErrorCode kBad = ErrorCode::kInvalidModel;
  expect_refused("", kBad, "JSON");
  expect_refused("[]", kBad, "object");
  expect_refused("{}", kBad, "model");
  expect_refused(document(kAbc, R"("a z")"), kBad, "'z', no token");
  expect_refused(document(kAbc, R"("b c")"), kBad, "'bc', no token");
  expect_refused(document(kAbc, R"("a b c")"), kBad, "expected two tokens");
  expect_refused(document(kAbc, R"(["a"])"), kBad, "expected two tokens");
  expect_refused(document(kAbc, "3"), kBad, "expected two tokens");
  expect_refused(document(R"("a":-1)", ""), kBad, "-1");
  expect_refused(document(R"("a":1.5)", ""), kBad, "1.5");
  expect_refused(document(R"("a":99999999999)", ""), kBad, "99999999999");
  expect_refused(document(R"("a":1000000)", ""), kBad, "1 tokens with ids up to 1000000");
  expect_refused(document(R"("a":0,"b":0)", ""), kBad, "names both");
  expect_refused(document(R"("a":0,"a":1)", ""), kBad, "duplicate key");
  expect_refused(document("", ""), kBad, "0 tokens");
  const auto added = [](const std::string& token) {
    return document(kAbc, "", R"("added_tokens":[)" + token + "]");
  };
  expect_refused(added(R"({"id":9,"content":"","special":true})"), kBad, "0 bytes");
  expect_refused(added(R"({"id":-3,"content":"x"})"), kBad, "-3");
  expect_refused(added(R"({"id":1,"content":"x"})"), kBad, "names both");
  expect_refused(added(R"({"id":9,"content":"a"})"), kBad, "'a' has id 9");
  expect_refused(added(R"({"id":9,"content":")" + std::string(600, 'x') + "\"}"), kBad, "600");
  expect_refused(document(kAbc, "",
                          R"("post_processor":{"type":"TemplateProcessing","single":[)"
                          R"({"SpecialToken":{"id":"a","type_id":0}},{"Sequence":{"id":"A"}}],)"
                          R"("special_tokens":{"a":{"id":"a","ids":[77],"tokens":["a"]}}})"),
                 kBad, "77");
}

TEST(TokenizerJson, HolesAreTokensWithoutText) {
  const auto tokenizer = load(document(R"("a":0,"b":7)", ""));
  EXPECT_EQ(tokenizer->vocab_size(), 8);
  EXPECT_EQ(tokenizer->decode(std::vector<TokenId>{0, 3, 7}), "ab");
}

TEST(TokenizerJson, BoundedLoading) {
  const ErrorCode kBad = ErrorCode::kInvalidModel;
  std::string merges;
  for (int i = 0; i < 10'000'000; ++i) merges += "\"a\",";
  merges += "\"a\"";
  expect_refused(document(kAbc, merges), kBad, "values");
  merges.clear();
  for (int i = 0; i < 10'000'000; ++i) merges += "\"a b\",";
  merges += "\"a b\"";
  expect_refused(document(kAbc, merges), kBad,
                 merges.size() > kMaxTokenizerJson ? "bytes" : "values");
  const std::string megabyte(1 << 20, 'x');
  expect_refused(document("\"" + megabyte + "\":0", ""), kBad, "a string of");
  expect_refused(document("\"" + std::string(20000, 'x') + "\":0", ""), kBad, "20000 bytes");
  expect_refused(std::string(100'000, '['), kBad, "JSON");
}

TEST(TokenizerJson, ReplaceCannotMultiplyText) {
  const auto replace = [](const std::string& from, const std::string& to) {
    return R"({"type":"Replace","pattern":{"String":")" + from + R"("},"content":")" + to + "\"}";
  };
  const auto with = [](const std::string& steps) {
    return document(kAbc, "", R"("normalizer":{"type":"Sequence","normalizers":[)" + steps + "]}");
  };
  expect_refused(with(replace("a", std::string(17, 'a'))), ErrorCode::kInvalidModel, "longer");
  std::string steps = replace("a", "aa");
  for (int i = 0; i < 4; ++i) steps += "," + replace("a", "aa");
  expect_refused(with(steps), ErrorCode::kInvalidModel, "32 times longer");
  expect_refused(with(replace("", "a")), ErrorCode::kInvalidModel, "empty pattern");
  EXPECT_EQ(load(with(replace("a", "bb")))->encode("aa").size(), 4U);
}

// What the reference does with the flags of an added token.
TEST(TokenizerJson, AddedTokenFlags) {
  const auto tokenizer =
      load(document(R"("a":0,"b":1," ":2,"<":3,">":4,"x":5)", "", R"("added_tokens":[
    {"id":10,"content":"<l>","special":true,"lstrip":true,"normalized":false},
    {"id":11,"content":"<r>","special":true,"rstrip":true,"normalized":false},
    {"id":12,"content":"ab","special":false,"single_word":true,"normalized":false},
    {"id":13,"content":"<x>","special":false,"normalized":false},
    {"id":14,"content":"<x>a","special":false,"normalized":false}])"));
  const EncodeOptions parse{.add_special = false, .parse_special = true};
  const EncodeOptions plain{.add_special = false};
  EXPECT_THAT(tokenizer->encode("a  <l> b", parse), ElementsAre(0, 10, 2, 1));
  EXPECT_THAT(tokenizer->encode("a <r>  b", parse), ElementsAre(0, 2, 11, 1));
  EXPECT_THAT(tokenizer->encode("ab", plain), ElementsAre(12));
  EXPECT_THAT(tokenizer->encode("ab ab", plain), ElementsAre(12, 2, 12));
  EXPECT_THAT(tokenizer->encode("abb", plain), ElementsAre(0, 1, 1));
  EXPECT_THAT(tokenizer->encode("<x>b<x>a", plain), ElementsAre(13, 1, 14));  // the longest
  EXPECT_THAT(tokenizer->encode("<x>", plain), ElementsAre(13));
  EXPECT_TRUE(tokenizer->is_special(10));
  EXPECT_FALSE(tokenizer->is_special(13));
  for (const TokenId id : tokenizer->encode("<l><r> <l", plain)) {
    EXPECT_FALSE(tokenizer->is_special(id));
  }
}

TEST(TokenizerJson, MergesNeverMakeControlTokens) {
  const auto tokenizer = load(document(R"("<":0,"s":1,">":2,"<s":3,"<s>":4)", R"("< s","<s >")",
                                       R"("added_tokens":[{"id":4,"content":"<s>","special":true,)"
                                       R"("normalized":false}])"));
  EXPECT_THAT(tokenizer->encode("<s>", {.add_special = false}), ElementsAre(3, 2));
  EXPECT_THAT(tokenizer->encode("<s>", {.add_special = false, .parse_special = true}),
              ElementsAre(4));
}

TEST(TokenizerJson, FolderNamesTheSpecialTokens) {
  const auto folder = std::filesystem::path(::testing::TempDir()) / "pianola_tokenizer_folder";
  std::filesystem::create_directories(folder);
  const auto write = [&](const char* name, const std::string& text) {
    std::ofstream(folder / name) << text;
  };
  write("tokenizer.json", document(kAbc, kAbcMerges,
                                   R"("added_tokens":[)"
                                   R"({"id":6,"content":"<s>","special":true},)"
                                   R"({"id":7,"content":"</s>","special":true},)"
                                   R"({"id":8,"content":"<|im_end|>","special":true},)"
                                   R"({"id":9,"content":"<stop>","special":true}])"));
  write("tokenizer_config.json", R"({"bos_token":{"content":"<s>"},"eos_token":"</s>",)"
                                 R"("add_bos_token":true,"tokenizer_class":"LlamaTokenizer"})");
  write("generation_config.json", R"({"eos_token_id":[7,9]})");
  const auto tokenizer = tokenizer_from_folder(folder);
  EXPECT_EQ(tokenizer->bos_id(), 6);
  EXPECT_EQ(tokenizer->eos_id(), 7);
  EXPECT_EQ(tokenizer->pad_id(), std::nullopt);
  EXPECT_THAT(tokenizer->eog_ids(), ElementsAre(7, 8, 9));
  EXPECT_TRUE(tokenizer->is_eog(8));
  EXPECT_TRUE(tokenizer->add_bos());
  EXPECT_FALSE(tokenizer->add_eos());
  EXPECT_THAT(tokenizer->encode("abc"), ElementsAre(6, 4));
  write("generation_config.json", R"({"eos_token_id":[70]})");
  EXPECT_THROW(tokenizer_from_folder(folder), Error);
  std::filesystem::remove_all(folder);
  EXPECT_THROW(tokenizer_from_folder(folder), Error);
}

}  // namespace
}  // namespace pianola
