// Choosing tokens: every draw against transformers' processors and warpers, and the edges
// that they do not have.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <vector>

#include "backends/reference/ops.h"
#include "base/json_reader.h"
#include "base/mapped_file.h"
#include "plan/recorder.h"

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

// What transformers keeps of some logits, and how likely each is. Ids ascend.
struct Golden {
  std::string name;
  std::vector<float> logits;
  std::vector<TokenId> history;
  RowState row;
  std::vector<TokenId> kept;
  std::vector<double> probabilities;
};

float number_or_minus_infinity(const boost::json::value& value) {
  return value.is_null() ? -kInfinity : value.to_number<float>();
}

Golden read_golden(const boost::json::value& value, const boost::json::array& logits) {
  Golden g;
  const auto number = [&](const char* key) { return value.at(key).to_number<float>(); };
  for (const auto& x : logits.at(value.at("logits").to_number<std::size_t>()).as_array()) {
    g.logits.push_back(number_or_minus_infinity(x));
  }
  g.row = row_with(number("temperature"));
  g.row.sampling.top_k = value.at("top_k").to_number<int>();
  g.row.sampling.top_p = number("top_p");
  g.row.sampling.min_p = number("min_p");
  g.row.sampling.repeat_penalty = number("repeat_penalty");
  for (const auto& bias : value.at("bias").as_array()) {
    g.row.bias[g.row.bias_count++] = {bias.at(0).to_number<TokenId>(),
                                      number_or_minus_infinity(bias.at(1))};
  }
  for (const auto& id : value.at("history").as_array()) {
    g.history.push_back(id.to_number<TokenId>());
  }
  for (const auto& id : value.at("kept").as_array()) g.kept.push_back(id.to_number<TokenId>());
  for (const auto& p : value.at("probabilities").as_array()) {
    g.probabilities.push_back(p.to_number<double>());
  }
  boost::json::object name = value.as_object();
  for (const char* key : {"history", "kept", "probabilities"}) name.erase(key);
  g.name = boost::json::serialize(name);
  return g;
}

std::vector<Golden> read_goldens() {
  const std::string path = std::string(PIANOLA_SOURCE_DIR) + "/tests/ops/golden/sampling.json";
  const boost::json::value root = parse_json(read_text_file(path, 1 << 20), path);
  std::vector<Golden> goldens;
  for (const auto& value : root.at("cases").as_array()) {
    goldens.push_back(read_golden(value, root.at("logits").as_array()));
  }
  return goldens;
}

// The token that a draw in order of ids must give, or -1 when it falls too near to a border of the
// golden's rounded probabilities to tell.
TokenId expected_token(const Golden& g, double uniform) {
  double end = 0;
  for (std::size_t i = 0; i < g.kept.size(); ++i) {
    end += g.probabilities[i];
    if (std::abs(uniform - end) < 1e-5) return -1;
    if (uniform < end) return g.kept[i];
  }
  return -1;
}

// Each draw is compared with the inverse of the golden's distribution at the row's random number,
// so a candidate too many or too few shows in all draws behind it, however unlikely it is itself.
TEST(SampleToken, DrawsAreThoseOfTransformersDistributions) {
  for (Golden& g : read_goldens()) {
    SCOPED_TRACE(g.name);
    ASSERT_FALSE(g.kept.empty());
    int compared = 0;
    for (std::uint64_t seed = 0; seed < 200; ++seed) {
      g.row.sampling.seed = seed;
      const TokenId want =
          expected_token(g, uniform_random(seed, 0, static_cast<std::uint32_t>(g.history.size()),
                                           RandomPurpose::kSample));
      if (want < 0) continue;
      ++compared;
      ASSERT_EQ(draw(g.logits, g.row, g.history), want) << "seed " << seed;
    }
    EXPECT_GT(compared, 190);
  }
}

// The same without using how a token is drawn: chi-square of frequencies, cells of at least eight
// expected draws (rarer tokens share one), below the value that chance passes once in 10,000.
TEST(SampleToken, FrequenciesAreThoseOfTransformersDistributions) {
  constexpr int kDraws = 500;
  for (Golden& g : read_goldens()) {
    SCOPED_TRACE(g.name);
    std::vector<int> counts(g.logits.size());
    for (int i = 0; i < kDraws; ++i) {
      g.row.sampling.seed = 1000000 + static_cast<std::uint64_t>(i);
      const TokenId token = draw(g.logits, g.row, g.history);
      ASSERT_TRUE(std::binary_search(g.kept.begin(), g.kept.end(), token)) << token;
      ++counts[static_cast<std::size_t>(token)];
    }
    double chi = 0;
    double freedom = -1;
    double rare_expected = 0;
    int rare_count = 0;
    const auto cell = [&](double expected, int count) {
      chi += (count - expected) * (count - expected) / expected;
      ++freedom;
    };
    for (std::size_t i = 0; i < g.kept.size(); ++i) {
      const double expected = g.probabilities[i] * kDraws;
      const int count = counts[static_cast<std::size_t>(g.kept[i])];
      if (expected >= 8) {
        cell(expected, count);
      } else {
        rare_expected += expected;
        rare_count += count;
      }
    }
    if (rare_expected >= 8) cell(rare_expected, rare_count);
    if (freedom < 1) continue;
    // Wilson and Hilferty: the cube root of chi-square over its freedom is nearly normal.
    const double spread = 2 / (9 * freedom);
    EXPECT_LT(chi, freedom * std::pow(1 - spread + 3.72 * std::sqrt(spread), 3));
  }
}

// Transformers keeps all of equals at the k-th place, and what its sort leaves at top-p's border;
// here exactly k stay, the lowest ids.
TEST(SampleToken, CutsBetweenEqualsKeepTheLowestIds) {
  const std::vector<float> logits = {1, 2, 1, 2, 1, 2, -3};
  const auto support = [&](RowState row) {
    std::set<TokenId> seen;
    for (std::uint64_t seed = 0; seed < 400; ++seed) {
      row.sampling.seed = seed;
      seen.insert(draw(logits, row, {}));
    }
    return seen;
  };
  RowState row = row_with(1);
  row.sampling.top_k = 2;
  EXPECT_EQ(support(row), (std::set<TokenId>{1, 3}));
  row.sampling.top_k = 4;
  EXPECT_EQ(support(row), (std::set<TokenId>{0, 1, 3, 5}));
  row.sampling.top_k = 0;
  row.sampling.top_p = 0.3F;  // one of the three best has 0.24
  EXPECT_EQ(support(row), (std::set<TokenId>{1, 3}));
  row.sampling.top_k = 6;
  row.sampling.top_p = 0.75F;  // the three best have 0.73 of six
  EXPECT_EQ(support(row), (std::set<TokenId>{0, 1, 3, 5}));
  row.sampling.top_k = 0;
  row.sampling.top_p = 1;
  row.sampling.min_p = 1;  // all that are as likely as the best
  EXPECT_EQ(support(row), (std::set<TokenId>{1, 3, 5}));
}

TEST(SampleToken, ExtremeTemperatures) {
  RowState row = row_with(std::numeric_limits<float>::denorm_min());
  EXPECT_EQ(draw({-3, -2, -5}, row, {}), 1);  // every quotient overflows
  EXPECT_EQ(draw({3, 8, 5}, row, {}), 1);
  row.sampling.temperature = 1e30F;  // uniform
  std::set<TokenId> seen;
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    row.sampling.seed = seed;
    seen.insert(draw({-50, 50, -kInfinity, 0}, row, {}));
  }
  EXPECT_EQ(seen, (std::set<TokenId>{0, 1, 3}));
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

// The op on a backend: ten rows in one step, each with its own parameters and history. The last
// token is masked: its row must not be touched.
class SampleOnBackend {
 public:
  static constexpr int kRows = 10;
  static constexpr int kVocab = 200;

  explicit SampleOnBackend(const std::string& name) : backend_(make_backend(name, {.threads = 3})) {
    Recorder recorder({}, {}, {.tokens = kRows, .lanes = kRows, .logit_rows = kRows});
    logits_ = recorder.buffer("logits", Extent::kLogitRows, kVocab);
    recorder.record(SampleOp{.logits = logits_});
    recorder.record(AdvanceOp{});
    plan_ = recorder.finish();
    const StepStateLayout layout({kRows, 64, kRows, kRows, kRows});
    state_memory_ = backend_->allocate(layout.bytes(), MemoryUse::kSparse);
    shared_memory_ = backend_->allocate(layout.shared_bytes(), MemoryUse::kShared);
    state_ = layout.bind(state_memory_->data(), shared_memory_->data());
    workspace_ = backend_->allocate(plan_workspace(plan_).bytes, MemoryUse::kDense);
    const std::size_t scratch_bytes = backend_->scratch_bytes(plan_, {});
    scratch_ = backend_->allocate(scratch_bytes, MemoryUse::kDense);
    program_ = backend_->compile(plan_, {.state = state_,
                                         .workspace = workspace_->data(),
                                         .scratch = scratch_->data(),
                                         .scratch_bytes = scratch_bytes});
  }

  void set(int r, const Golden& golden, bool masked) {
    RowState& row = state_.row[r];
    row = golden.row;
    row.history_length = static_cast<std::int32_t>(golden.history.size());
    row.max_length = 64;
    std::copy(golden.history.begin(), golden.history.end(),
              state_.history + std::int64_t{r} * state_.history_stride);
    std::copy(golden.logits.begin(), golden.logits.end(),
              reinterpret_cast<float*>(workspace_->data()) + std::ptrdiff_t{r} * kVocab);
    *state_.counts = {.tokens = kRows, .lanes = kRows, .logit_rows = kRows};
    state_.position[r] = masked ? -1 : row.history_length - 1;
    state_.lane_of[r] = state_.row_of[r] = state_.logit_token[r] = r;
    state_.first_token[r] = r;
    state_.first_token[r + 1] = r + 1;
    state_.sampled[r] = -77;
  }
  const StepState& replay() {
    program_->replay();
    return state_;
  }

 private:
  std::unique_ptr<Backend> backend_;
  Plan plan_;
  BufferId logits_;
  std::unique_ptr<DeviceMemory> state_memory_, shared_memory_, workspace_, scratch_;
  StepState state_;
  std::unique_ptr<Program> program_;
};

TEST(SampleOp, BackendsChooseTheSameTokens) {
  std::vector<Golden> goldens = read_goldens();
  for (std::size_t i = 0; i < goldens.size(); ++i) {           // what the goldens do not have
    if (goldens[i].history.empty()) goldens[i].history = {5};  // a row has a token at least
    SamplingState& p = goldens[i].row.sampling;
    p.seed = i;
    p.want_logprob = i % 2;
    if (i % 5 == 0) p.temperature = 0;
    if (i % 7 == 0) p.presence_penalty = 1;
    if (i % 10 == 5) goldens[i].row.bias_count = 0;
  }
  goldens[3].logits[40] = NAN;
  goldens[10].logits[199] = kInfinity;
  goldens[10].row.bias_count = 0;
  SampleOnBackend reference("reference");
  SampleOnBackend cpu("cpu");
  constexpr int kRows = SampleOnBackend::kRows;
  for (std::size_t first = 0; first + kRows <= goldens.size(); first += kRows) {
    for (int r = 0; r < kRows; ++r) {
      const Golden& golden = goldens[first + static_cast<std::size_t>(r)];
      reference.set(r, golden, r == kRows - 1);
      cpu.set(r, golden, r == kRows - 1);
    }
    const StepState& want = reference.replay();
    const StepState& got = cpu.replay();
    for (int r = 0; r < kRows - 1; ++r) {
      Golden& g = goldens[first + static_cast<std::size_t>(r)];
      SCOPED_TRACE(g.name);
      EXPECT_EQ(want.sampled[r], draw(g.logits, g.row, g.history));
      EXPECT_EQ(got.sampled[r], want.sampled[r]);
      EXPECT_NEAR(got.logprob[r], want.logprob[r], 1e-5);
      EXPECT_EQ(got.row[r].status, want.row[r].status);
      EXPECT_EQ(want.row[r].status == RowStatus::kFailed, want.sampled[r] < 0);
      EXPECT_EQ(want.row[r].history_length,
                static_cast<int>(g.history.size()) + (want.sampled[r] >= 0));
    }
    for (const StepState& s : {want, got}) {
      EXPECT_EQ(s.sampled[kRows - 1], -77);
      EXPECT_EQ(s.row[kRows - 1].length, 0);
    }
  }
}

TEST(LogProbability, IsLogSoftmax) {
  EXPECT_NEAR(log_probability(std::vector<float>{0, 0, 0, 0}, 2), std::log(0.25), 1e-12);
  EXPECT_NEAR(log_probability(std::vector<float>{1000, 999}, 0), -std::log1p(std::exp(-1.0)),
              1e-12);
}

}  // namespace
}  // namespace pianola::reference
