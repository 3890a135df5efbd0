// Every family, in every form of its files, against transformers: whole rows, any chunking, token
// by token, and two rows of different lengths in one step.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <numeric>

#include "backends/backend.h"
#include "models/golden.h"
#include "models/model.h"
#include "pianola/engine.h"

namespace pianola {
namespace {

struct Case {
  std::string backend;
  std::size_t golden = 0;
  std::size_t file = 0;
};

const std::vector<ModelGolden>& goldens() {
  static const std::vector<ModelGolden> all = read_all_goldens();
  return all;
}

std::vector<Case> cases(const std::string& backend) {
  std::vector<Case> result;
  for (std::size_t g = 0; g < goldens().size(); ++g) {
    for (std::size_t f = 0; f < goldens()[g].files.size(); ++f) result.push_back({backend, g, f});
  }
  return result;
}

std::string case_name(const testing::TestParamInfo<Case>& info) {
  const ModelGolden& golden = goldens()[info.param.golden];
  std::string name = golden.name + "_" + golden.files[info.param.file].form;
  std::replace(name.begin(), name.end(), '/', '_');
  return name;
}

class ModelLogitsTest : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    golden_ = &goldens()[GetParam().golden];
    const GoldenFile& file = golden_->files[GetParam().file];
    scratch_ =
        std::filesystem::temp_directory_path() /
        ("pianola_golden_" + std::to_string(getpid()) + "_" + std::to_string(GetParam().golden));
    model_ = CausalModel::open(prepare_golden_file(file, scratch_));
  }
  void TearDown() override { std::filesystem::remove_all(scratch_); }

  Engine make_engine(int slots = 1) const {
    return Engine(model_, {.backend = GetParam().backend,
                           .threads = 1,
                           .max_seq_len = golden_->max_seq_len,
                           .slots = slots,
                           .chunk = 32,
                           .cache_type = "f32",
                           .score = true,
                           .logits = true});
  }

  // The weights of all forms are the same numbers and the golden is float32, so this is what float
  // arithmetic in another order may do: transformers itself is within 2e-5 of its own float64.
  static constexpr double kTolerance = 2e-4;

  void expect_logits(std::span<const float> got, std::span<const float> want,
                     const std::string& where) const {
    ASSERT_EQ(got.size(), want.size());
    double worst = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
      ASSERT_TRUE(std::isfinite(got[i])) << where << ", value " << i;
      worst = std::max(worst, std::abs(static_cast<double>(got[i]) - want[i]));
    }
    EXPECT_LE(worst, kTolerance) << where;
  }

  // Runs a row of the golden through logits() in pieces of the given sizes, repeated as needed.
  void run_in_pieces(Engine& engine, const GoldenRow& row, const std::vector<int>& pieces) {
    const int id = engine.open_row({});
    ASSERT_GE(id, 0);
    const auto vocab = static_cast<std::size_t>(golden_->vocab_size);
    std::size_t position = 0;
    for (std::size_t i = 0; position < row.tokens.size(); ++i) {
      const auto piece = static_cast<std::size_t>(pieces[i % pieces.size()]);
      const std::size_t count = std::min(piece, row.tokens.size() - position);
      const auto got = engine.logits(id, std::span(row.tokens).subspan(position, count));
      expect_logits(got, std::span(row.values).subspan(position * vocab, count * vocab),
                    "position " + std::to_string(position) + ", piece of " + std::to_string(count));
      position += count;
    }
    engine.close_row(id);
  }

  const ModelGolden* golden_ = nullptr;
  std::shared_ptr<const CausalModel> model_;
  std::filesystem::path scratch_;
};

TEST_P(ModelLogitsTest, ReadsTheSameSizes) {
  EXPECT_EQ(model_->config().vocab_size, golden_->vocab_size);
  EXPECT_EQ(make_engine().max_seq_len(), golden_->max_seq_len);
}

TEST_P(ModelLogitsTest, LargestChunks) {
  Engine engine = make_engine();
  for (const GoldenRow& row : golden_->rows) run_in_pieces(engine, row, {engine.logits_chunk()});
}

TEST_P(ModelLogitsTest, TokenByToken) {
  Engine engine = make_engine();
  for (const GoldenRow& row : golden_->rows) run_in_pieces(engine, row, {1});
}

TEST_P(ModelLogitsTest, AnyChunks) {
  Engine engine = make_engine();
  for (const std::vector<int>& pieces :
       {std::vector<int>{7}, std::vector<int>{1, 16, 3}, std::vector<int>{31, 1, 2}}) {
    for (const GoldenRow& row : golden_->rows) run_in_pieces(engine, row, pieces);
  }
}

TEST_P(ModelLogitsTest, Scores) {
  Engine engine = make_engine();
  for (const GoldenRow& row : golden_->rows) {
    const std::vector<float> got = engine.score(row.tokens);
    ASSERT_EQ(got.size(), row.tokens.size() - 1);
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_NEAR(got[i], log_probability(row.logits(i), row.tokens[i + 1]), kTolerance) << i;
    }
  }
}

// Checks what a step said about the token after `position` of a row.
void expect_event(const TokenEvent& event, const GoldenRow& row, std::size_t position,
                  double tolerance) {
  const std::span<const float> want = row.logits(position);
  ASSERT_GE(event.token, 0);
  const auto chosen = want[static_cast<std::size_t>(event.token)];
  EXPECT_NEAR(chosen, want[static_cast<std::size_t>(best_token(want))], 2 * tolerance);
  EXPECT_NEAR(event.logprob, log_probability(want, event.token), tolerance);
}

// Prompts of unequal lengths in one ragged step, then each next token of both rows in decode steps
// of two lanes, until the shorter row ends; then the other alone.
TEST_P(ModelLogitsTest, TwoRowsInOneStep) {
  Engine engine = make_engine(2);
  const SamplingParams greedy{.logprobs = true};
  const std::array<std::size_t, 2> prompts = {11, 4};
  std::array<int, 2> ids{};
  std::array<std::size_t, 2> known = prompts;
  for (std::size_t r = 0; r < 2; ++r) {
    ids[r] = engine.open_row({.sampling = greedy});
    ASSERT_GE(ids[r], 0);
    engine.append(ids[r], std::span(golden_->rows[r].tokens).first(prompts[r]));
  }
  while (engine.has_work()) {
    const std::span<const TokenEvent> view = engine.step();
    const std::vector<TokenEvent> events(view.begin(), view.end());
    ASSERT_FALSE(events.empty());
    for (const TokenEvent& event : events) {
      const std::size_t r = event.row == ids[0] ? 0 : 1;
      SCOPED_TRACE("row " + std::to_string(r) + " after " + std::to_string(known[r]));
      const GoldenRow& row = golden_->rows[r];
      expect_event(event, row, known[r] - 1, kTolerance);
      engine.keep_first(ids[r], static_cast<int>(known[r]));
      if (known[r] == row.tokens.size()) continue;
      engine.append(ids[r], std::span(row.tokens).subspan(known[r], 1));
      ++known[r];
    }
  }
  for (std::size_t r = 0; r < 2; ++r) EXPECT_EQ(known[r], golden_->rows[r].tokens.size());
}

INSTANTIATE_TEST_SUITE_P(Reference, ModelLogitsTest, testing::ValuesIn(cases("reference")),
                         case_name);

}  // namespace
}  // namespace pianola
