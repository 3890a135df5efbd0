// Answers of a model with an encoder: a prompt is what the encoder reads.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "base/utf8.h"
#include "expect_error.h"
#include "models/golden.h"
#include "pianola/generator.h"

namespace pianola {
namespace {

std::filesystem::path folder_of(const std::string& name) { return golden_folder() / "t5" / name; }

struct Answers {
  std::vector<std::vector<TokenId>> inputs;
  std::vector<std::vector<TokenId>> answers;  // greedy, by transformers
};

Answers read_answers(const std::string& name) {
  const boost::json::value root =
      parse_json(read_text_file(folder_of(name) / "golden.json", 1 << 20), name);
  Answers all;
  for (const auto& ids : root.at("inputs").as_array()) all.inputs.push_back(read_ids(ids));
  for (const auto& ids : root.at("answers").as_array()) all.answers.push_back(read_ids(ids));
  return all;
}

EngineOptions options(int slots) {
  // CMake says which backends this program tests: those of any machine, or the one of a GPU.
  const bool on_gpu = std::string_view(PIANOLA_TEST_BACKENDS) == "cuda";
  return {.backend = on_gpu ? "cuda" : "cpu",
          .threads = 1,
          .max_seq_len = 64,
          .slots = slots,
          .max_input_len = 160,
          .cache_type = "f32"};
}

class EncoderAnswers : public testing::TestWithParam<const char*> {
 protected:
  std::vector<GenerationRequest> requests(int max_tokens) const {
    std::vector<GenerationRequest> all;
    for (const auto& input : golden_.inputs) {
      all.push_back({.prompt = input, .max_tokens = max_tokens});
    }
    return all;
  }

  const Answers golden_ = read_answers(GetParam());
  const Model model_ = Model::open((folder_of(GetParam()) / "hf").string());
};

TEST_P(EncoderAnswers, AreThoseOfTransformers) {
  const auto count = static_cast<int>(golden_.answers[0].size());
  Engine engine(model_.causal(), options(2));  // fewer slots than requests
  const auto results = generate(engine, model_, requests(count));
  for (std::size_t i = 0; i < results.size(); ++i) {
    EXPECT_EQ(results[i].error, "");
    EXPECT_EQ(results[i].tokens, golden_.answers[i]) << i;
    EXPECT_EQ(results[i].stats.prompt_tokens, static_cast<int>(golden_.inputs[i].size()));
    EXPECT_EQ(results[i].stats.reused_tokens, 0);
  }
}

// The row of a conversation takes another input, and keeps what it said of the last one.
TEST_P(EncoderAnswers, OneRowAfterTheOther) {
  Engine engine(model_.causal(), options(1));
  const int row = engine.open_row({});
  for (std::size_t i = 0; i < golden_.inputs.size(); ++i) {
    Generator answer(engine, model_, row, requests(5)[i]);
    std::vector<TokenId> tokens;
    while (const auto piece = answer.next()) tokens.push_back(piece->token);
    EXPECT_EQ(tokens,
              std::vector<TokenId>(golden_.answers[i].begin(), golden_.answers[i].begin() + 5));
    EXPECT_EQ(engine.history(row).size(), 6U);
    EXPECT_EQ(engine.history(row)[0], engine.decoder_start_token());
  }
}

TEST_P(EncoderAnswers, PromptsThatDoNotFitAreRefusedAlone) {
  Engine engine(model_.causal(), options(2));
  std::vector<GenerationRequest> all = requests(3);
  all[0].prompt.assign(161, 5);
  const auto results = generate(engine, model_, all);
  EXPECT_EQ(results[0].finish_reason, FinishReason::kFailed);
  EXPECT_NE(results[0].error.find("an input of 161 tokens"), std::string::npos) << results[0].error;
  EXPECT_EQ(results[1].tokens.size(), 3U);
}

INSTANTIATE_TEST_SUITE_P(Cases, EncoderAnswers, testing::Values("gated", "relu"));

// A tokenizer that nothing here reads is no reason not to take token ids.
TEST(EncoderTokenizer, MayBeUnknown) {
  const auto folder =
      std::filesystem::temp_directory_path() / ("pianola_unknown_" + std::to_string(getpid()));
  std::filesystem::copy(folder_of("relu") / "hf", folder);
  std::ofstream(folder / "tokenizer.json") << R"({"model": {"type": "WordPiece", "vocab": {}}})";
  const Model model = Model::open(folder.string());
  EXPECT_FALSE(model.has_tokenizer());
  expect_error(ErrorCode::kUnsupported, "only token ids can be (--ids)",
               [&] { model.tokenizer(); });
  expect_error(ErrorCode::kUnsupported, "WordPiece", [&] { model.tokenizer(); });
  std::filesystem::remove_all(folder);
}

// Each token but the unknown one is a character, so that the text of an input and of an answer are
// known.
TEST(EncoderTokenizer, TakesTextAndAnswersText) {
  const Answers golden = read_answers("relu");
  const auto character = [](TokenId id) {
    std::string text;
    append_utf8(text, 0x4E00 + static_cast<char32_t>(id));
    return text;
  };
  const auto text_of = [&](const std::vector<TokenId>& ids) {
    std::string text;
    for (const TokenId id : ids) text += character(id);
    return text;
  };
  constexpr TokenId kTokens = 128;
  TokenId unknown = 0;
  const auto& input = golden.inputs[0];
  const auto& answer = golden.answers[0];
  const auto has = [&](const std::vector<TokenId>& ids) {
    return std::find(ids.begin(), ids.end(), unknown) != ids.end();
  };
  while (has(input) || has(answer)) ++unknown;
  ASSERT_LT(unknown, kTokens);
  std::string vocab;
  for (TokenId id = 0; id < kTokens; ++id) {
    vocab += (id > 0 ? ",[\"" : "[\"") + character(id) + "\",-5]";
  }
  const auto folder =
      std::filesystem::temp_directory_path() / ("pianola_unigram_" + std::to_string(getpid()));
  std::filesystem::copy(folder_of("relu") / "hf", folder);
  std::ofstream(folder / "tokenizer.json")
      << R"({"model":{"type":"Unigram","unk_id":)" << unknown << R"(,"vocab":[)" << vocab
      << R"(]},"decoder":{"type":"Fuse"}})";
  const Model model = Model::open(folder.string());
  std::vector<GenerationRequest> requests(1);
  requests[0].prompt = model.tokenizer().encode(text_of(input));
  requests[0].max_tokens = static_cast<int>(answer.size());
  EXPECT_EQ(requests[0].prompt, input);
  Engine engine(model.causal(), options(1));
  const auto results = generate(engine, model, requests);
  EXPECT_EQ(results[0].error, "");
  EXPECT_EQ(results[0].tokens, answer);
  EXPECT_EQ(results[0].text, text_of(answer));
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace pianola
