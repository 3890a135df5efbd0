// Rope tables against transformers' (rope_golden.json, made by tools/golden/make_rope.py).
#include "models/rope.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/json_reader.h"
#include "base/mapped_file.h"
#include "pianola/error.h"

namespace pianola {
namespace {

// The table is computed in the same float32 steps, so only the last place of the power may differ
// (torch's vectorised pow), and what blending makes of that.
constexpr double kTolerance = 3e-7;

TEST(RopeTest, AgreesWithTransformers) {
  const std::string text =
      read_text_file(PIANOLA_SOURCE_DIR "/tests/unit/models/rope_golden.json", 1 << 20);
  const boost::json::value golden = parse_json(text, "rope_golden.json");
  int tables = 0;
  for (const boost::json::value& item : golden.at("cases").as_array()) {
    SCOPED_TRACE(item.at("name").as_string().c_str());
    const ModelConfig config = parse_hf_config(item.at("config"));
    for (const boost::json::value& table : item.at("tables").as_array()) {
      const auto length = table.at("max_seq_len").as_int64();
      SCOPED_TRACE(length);
      const std::vector<float> got = rope_inverse_frequencies(config.rope, config.head_dim, length);
      const boost::json::array& want = table.at("inv_freq").as_array();
      ASSERT_EQ(got.size(), want.size());
      for (std::size_t i = 0; i < got.size(); ++i) {
        const double expected = want[i].to_number<double>();
        EXPECT_NEAR(got[i], expected, kTolerance * expected) << "pair " << i;
      }
      const double scale = table.at("attention_scale").to_number<double>();
      EXPECT_NEAR(rope_attention_scale(config.rope), scale, kTolerance * scale);
      ++tables;
    }
  }
  EXPECT_EQ(tables, 21);
}

TEST(RopeTest, DynamicIsTheDefaultUpToTheOriginalLength) {
  RopeConfig rope{.kind = RopeKind::kDynamic, .factor = 2.0};
  rope.original_max_position_embeddings = 64;
  const std::vector<float> plain = rope_inverse_frequencies(RopeConfig{}, 16, 64);
  EXPECT_EQ(rope_inverse_frequencies(rope, 16, 1), plain);
  EXPECT_EQ(rope_inverse_frequencies(rope, 16, 64), plain);
  EXPECT_NE(rope_inverse_frequencies(rope, 16, 65), plain);
  // One pair has exponent 0: no base matters, and none divides by zero.
  EXPECT_EQ(rope_inverse_frequencies(rope, 2, 4096), std::vector<float>{1.0F});
}

TEST(RopeTest, FactorsDivideTheFrequencies) {
  std::vector<float> inv_freq = {1.0F, 0.5F};
  apply_rope_factors(inv_freq, std::vector<float>{1.0F, 4.0F});
  EXPECT_EQ(inv_freq, (std::vector<float>{1.0F, 0.125F}));
}

TEST(RopeTest, WrongFactorsAreRefused) {
  std::vector<float> inv_freq = {1.0F, 0.5F};
  EXPECT_THROW(apply_rope_factors(inv_freq, std::vector<float>{1.0F}), Error);
  for (const float bad : {0.0F, -1.0F, std::numeric_limits<float>::infinity(), std::nanf("")}) {
    EXPECT_THROW(apply_rope_factors(inv_freq, std::vector<float>{1.0F, bad}), Error) << bad;
  }
}

}  // namespace
}  // namespace pianola
