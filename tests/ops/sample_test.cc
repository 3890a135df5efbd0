// Choosing tokens: the distribution against transformers' processors and warpers, and the edges
// that they do not have.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "backends/reference/ops.h"
#include "base/json_reader.h"
#include "base/mapped_file.h"

namespace pianola::reference {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

TokenId draw(const std::vector<float>& logits, RowState& row, const std::vector<TokenId>& history) {
  std::vector<std::byte> scratch(sample_scratch_bytes(static_cast<std::int64_t>(logits.size())),
                                 std::byte{0xFF});
  row.history_length = static_cast<std::int32_t>(history.size());
  return sample_token(logits, row, history, scratch.data());
}

RowState row_with(float temperature) {
  RowState row;
  row.sampling.temperature = temperature;
  row.sampling.penalty_window = -1;
  return row;
}

std::vector<double> numbers(const boost::json::value& value) {
  std::vector<double> out;
  for (const auto& v : value.as_array()) out.push_back(v.to_number<double>());
  return out;
}

// Draws many times and compares frequencies with the golden's probabilities: every frequency within
// five standard deviations (and a token that cannot come never comes). Seeds are fixed.
TEST(SampleToken, DistributionsAreThoseOfTransformers) {
  const std::string path = std::string(PIANOLA_SOURCE_DIR) + "/tests/ops/sampling_golden.json";
  const boost::json::value golden = parse_json(read_text_file(path, 1 << 20), path);
  constexpr int kDraws = 4000;
  for (const auto& value : golden.at("cases").as_array()) {
    const JsonObject params(value.at("params"), "params");
    SCOPED_TRACE(boost::json::serialize(value.at("params")));
    RowState row = row_with(static_cast<float>(params.find_float("temperature").value_or(1.0)));
    row.sampling.top_k = static_cast<int>(params.find_int("top_k").value_or(0));
    row.sampling.top_p = static_cast<float>(params.find_float("top_p").value_or(1.0));
    row.sampling.min_p = static_cast<float>(params.find_float("min_p").value_or(0.0));
    row.sampling.repeat_penalty =
        static_cast<float>(params.find_float("repeat_penalty").value_or(1.0));
    std::vector<float> logits;
    for (const double x : numbers(value.at("logits"))) logits.push_back(static_cast<float>(x));
    std::vector<TokenId> history;
    for (const double x : numbers(value.at("history"))) history.push_back(static_cast<TokenId>(x));
    const std::vector<double> want = numbers(value.at("probabilities"));
    std::vector<int> counts(logits.size());
    for (int i = 0; i < kDraws; ++i) {
      row.sampling.seed = static_cast<std::uint64_t>(i);
      const TokenId token = draw(logits, row, history);
      ASSERT_GE(token, 0);
      ++counts[static_cast<std::size_t>(token)];
    }
    for (std::size_t i = 0; i < want.size(); ++i) {
      const double deviation = std::sqrt(want[i] * (1 - want[i]) / kDraws);
      EXPECT_NEAR(static_cast<double>(counts[i]) / kDraws, want[i], 5 * deviation + 1e-9) << i;
    }
  }
}

TEST(SampleToken, GreedyTakesTheLowestOfEquals) {
  RowState row = row_with(0);
  EXPECT_EQ(draw({1, 3, 2, 3}, row, {}), 1);
  EXPECT_EQ(draw({-5, -kInfinity, -5}, row, {}), 0);
}

TEST(SampleToken, OneCandidateIsGreedyAtAnyTemperature) {
  const std::vector<float> logits = {0.5F, 2, 2, 1};
  for (int seed = 0; seed < 50; ++seed) {
    RowState k = row_with(10);
    k.sampling.seed = static_cast<std::uint64_t>(seed);
    k.sampling.top_k = 1;
    EXPECT_EQ(draw(logits, k, {}), 1);
    RowState p = k;
    p.sampling.top_k = 0;
    p.sampling.top_p = 1e-6F;
    EXPECT_EQ(draw(logits, p, {}), 1);
    RowState cold = row_with(1e-30F);
    cold.sampling.seed = k.sampling.seed;
    EXPECT_EQ(draw({0.5F, 2, 1.75F, 1}, cold, {}), 1);  // equals would share the draw
  }
}

TEST(SampleToken, WhatIsNotADistributionFailsTheRow) {
  for (const float temperature : {0.0F, 1.0F}) {
    RowState row = row_with(temperature);
    EXPECT_EQ(draw({1, NAN, 2}, row, {}), -1);
    EXPECT_EQ(draw({1, kInfinity, 2}, row, {}), -1);
    EXPECT_EQ(draw({-kInfinity, -kInfinity}, row, {}), -1);
    EXPECT_EQ(draw({-kInfinity, -3}, row, {}), 1);
  }
}

TEST(SampleToken, BiasCanForceAndForbid) {
  RowState row = row_with(1);
  row.bias_count = 2;
  row.bias[0] = {0, -kInfinity};
  row.bias[1] = {2, 100};
  for (int seed = 0; seed < 20; ++seed) {
    row.sampling.seed = static_cast<std::uint64_t>(seed);
    EXPECT_EQ(draw({50, 1, 1}, row, {}), 2);
  }
}

// OpenAI: logit - presence - frequency * count; only the last tokens of the window count.
TEST(SampleToken, PenaltiesCountTheWindow) {
  const std::vector<TokenId> history = {0, 0, 0, 1, 2};
  RowState row = row_with(0);
  row.sampling.frequency_penalty = 1;
  EXPECT_EQ(draw({2.5F, 0, 0, 0}, row, history), 3);      // 2.5 - 3 < 0
  EXPECT_EQ(draw({3.5F, 0, 0, 0}, row, history), 0);      // 3.5 - 3 > 0
  row.sampling.penalty_window = 3;                        // one 0, a 1 and a 2
  EXPECT_EQ(draw({1.5F, 0, 0, 0.25F}, row, history), 0);  // 1.5 - 1 > 0.25
  EXPECT_EQ(draw({1.125F, 0, 0, 0.25F}, row, history), 3);
  row.sampling.frequency_penalty = 0;
  row.sampling.presence_penalty = 1;
  row.sampling.penalty_window = -1;
  EXPECT_EQ(draw({1.5F, 0, 0, 0.25F}, row, history), 0);  // once, however often it came
  row.sampling.penalty_window = 0;
  row.sampling.presence_penalty = 2;
  EXPECT_EQ(draw({1, 0, 0, 0.5F}, row, history), 0);  // no window: no penalty
}

TEST(SampleToken, TheDrawDependsOnSeedChoiceAndPositionOnly) {
  const std::vector<float> logits(64, 0.0F);
  RowState row = row_with(1);
  row.sampling.seed = 9;
  const TokenId first = draw(logits, row, {1, 2, 3});
  EXPECT_EQ(draw(logits, row, {7, 8, 9}), first);
  int changed = 0;
  for (std::uint32_t choice = 1; choice <= 20; ++choice) {
    row.sampling.choice = choice;
    changed += draw(logits, row, {1, 2, 3}) != first;
  }
  EXPECT_GT(changed, 15);
}

TEST(LogProbability, IsLogSoftmax) {
  EXPECT_NEAR(log_probability(std::vector<float>{0, 0, 0, 0}, 2), std::log(0.25), 1e-12);
  EXPECT_NEAR(log_probability(std::vector<float>{1000, 999}, 0), -std::log1p(std::exp(-1.0)),
              1e-12);
}

}  // namespace
}  // namespace pianola::reference
