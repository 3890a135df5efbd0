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

class PlanGoldenTest : public testing::TestWithParam<const char*> {};

TEST_P(PlanGoldenTest, DecodesOneToken) {
  const std::string family = GetParam();
  const auto path = golden_folder() / family /
                    (family == "llama"     ? "tied"
                     : family == "mistral" ? "full"
                                           : "tied") /
                    "q8_0.gguf";
  const auto model = CausalModel::open(path);
  const std::string text =
      Engine::plan_text(*model, {.backend = "reference", .max_seq_len = 64}, "tokens=1 ");
  const auto golden =
      std::filesystem::path(PIANOLA_SOURCE_DIR) / "tests/plan/golden" / (family + ".txt");
  if (std::getenv("PIANOLA_UPDATE_GOLDEN")) {
    std::ofstream(golden) << text;
    GTEST_SKIP() << "wrote " << golden;
  }
  EXPECT_EQ(text, read_text_file(golden, 1 << 20)) << "the Plan of " << family << " has changed";
  EXPECT_EQ(text.find("layers.0.q_bias") != std::string::npos, family == "qwen2");
  EXPECT_EQ(text.find("layers.0.q_norm") != std::string::npos, family == "qwen3");
}

INSTANTIATE_TEST_SUITE_P(Families, PlanGoldenTest,
                         testing::Values("llama", "mistral", "qwen2", "qwen3"));

}  // namespace
}  // namespace pianola
