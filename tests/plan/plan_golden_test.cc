// The Plan that each family records for one token, as text. Not an oracle (tests/models is): a
// change here is to be read, and accepted with
//
//   PIANOLA_UPDATE_GOLDEN=1 build/release/tests/plan_golden_test
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>

#include "models/golden.h"
#include "models/model.h"
#include "pianola/engine.h"

namespace pianola {
namespace {

// Below the folder of the models' goldens.
std::string file_of(const std::string& family) {
  if (family == "mistral") return "mistral/full/q8_0.gguf";
  if (family == "gpt_oss") return "gpt_oss/mixed/f16.gguf";
  if (family == "qwen2_moe") return "qwen2_moe/shared/hf";
  if (family == "qwen3_moe") return "qwen3_moe/some/hf";
  if (family == "qwen3_next") return "qwen3_next/experts/hf";
  if (family == "qwen3_5" || family == "bamba") return family + "/hybrid/hf";
  if (family == "t5") return "t5/gated/hf";
  if (family == "t5_relu") return "t5/relu/hf";
  if (family == "deepseek_v2") return "deepseek/v2_lite/hf";
  if (family == "deepseek_v3") return "deepseek/v3/hf";
  return family + "/tied/q8_0.gguf";
}

class PlanGoldenTest : public testing::TestWithParam<const char*> {};

TEST_P(PlanGoldenTest, DecodesOneToken) {
  const std::string family = GetParam();
  const auto path = golden_folder() / file_of(family);
  const auto model = CausalModel::open(path);
  EngineOptions options{.backend = "reference", .max_seq_len = 64};
  const bool encodes = model->config().encoder.num_layers > 0;
  if (encodes) options.max_input_len = 64;
  std::string text = Engine::plan_text(*model, options, "tokens=1 ");
  if (encodes) text += Engine::plan_text(*model, options, " encode");
  const auto golden =
      std::filesystem::path(PIANOLA_SOURCE_DIR) / "tests/plan/golden" / (family + ".txt");
  if (std::getenv("PIANOLA_UPDATE_GOLDEN")) {
    std::ofstream(golden) << text;
    GTEST_SKIP() << "wrote " << golden;
  }
  EXPECT_EQ(text, read_text_file(golden, 1 << 20)) << "the Plan of " << family << " has changed";
  EXPECT_EQ(text.find("layers.0.q_bias") != std::string::npos,
            family.starts_with("qwen2") || family == "gpt_oss");
  EXPECT_EQ(text.find(".q_norm") != std::string::npos, family.starts_with("qwen3"));
  EXPECT_EQ(text.find("delta_rule") != std::string::npos,
            family == "qwen3_next" || family == "qwen3_5");
  EXPECT_EQ(text.find("latent_qkv") != std::string::npos, family.starts_with("deepseek"));
  EXPECT_EQ(text.find("ssm  ") != std::string::npos, family == "bamba");
  EXPECT_EQ(text.find("over the input") != std::string::npos, encodes);
  EXPECT_EQ(text.find("rope=") == std::string::npos, encodes);
}

INSTANTIATE_TEST_SUITE_P(Families, PlanGoldenTest,
                         testing::Values("llama", "mistral", "qwen2", "qwen3", "gpt_oss",
                                         "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5", "bamba",
                                         "deepseek_v2", "deepseek_v3", "t5", "t5_relu"));

}  // namespace
}  // namespace pianola
