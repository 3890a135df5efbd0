// Every family, in every form of its files, against transformers: whole rows, any chunking, token
// by token, and two rows of different lengths in one step. On the reference backend, on the CPU
// backend with each instruction set that the machine has, and on a GPU. Some with caches that
// round, against transformers with caches that round alike.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <ostream>

#include "backends/cpu/isa.h"
#include "models/golden.h"
#include "models/model.h"
#include "pianola/engine.h"

namespace pianola {
namespace {

struct Case {
  std::string backend;
  std::string isa;  // of the CPU backend
  std::size_t golden = 0;
  std::size_t file = 0;
  std::string cache_type = "f32";
};

// How GoogleTest shows a case.
void PrintTo(const Case& c, std::ostream* out) {
  *out << c.backend << " " << c.isa << " " << c.cache_type;
}

// How far logits may be from transformers' float32 ones: the largest difference, and the root mean
// square over a case.
struct Tolerance {
  double largest = 0;
  double rms = 0;
};

Tolerance operator+(const Tolerance& a, const Tolerance& b) {
  return {a.largest + b.largest, a.rms + b.rms};
}

// The other row of the tolerance table: how far logits with an 8-bit cache may be from those with a
// float32 one. Measured, a quarter added: int8 0.31 and 0.023 (mistral/window), fp8 0.48 and 0.053
// (llama/untied), by transformers and by every backend.
Tolerance cost_of_cache(const std::string& cache_type) {
  if (cache_type == "int8") return {.largest = 0.4, .rms = 0.029};
  if (cache_type == "fp8") return {.largest = 0.6, .rms = 0.067};
  return {};
}

const std::vector<ModelGolden>& goldens() {
  static const std::vector<ModelGolden> all = read_all_goldens();
  return all;
}

std::vector<Case> cases(const std::string& backend, const std::vector<std::string>& isas) {
  std::vector<Case> result;
  for (const std::string& isa : isas) {
    for (std::size_t g = 0; g < goldens().size(); ++g) {
      for (std::size_t f = 0; f < goldens()[g].files.size(); ++f) {
        result.push_back({backend, isa, g, f});
      }
      for (const auto& [type, rows] : goldens()[g].rounded_rows) {
        result.push_back({backend, isa, g, 0, type});
      }
    }
  }
  return result;
}

std::vector<std::string> cpu_isas() {
  std::vector<std::string> names;
  for (const cpu::Isa isa : cpu::supported_isas()) names.emplace_back(cpu::isa_name(isa));
  return names;
}

bool has_states(const ModelGolden& golden) {
  return golden.name.starts_with("bamba/") || golden.name.starts_with("qwen3_5/") ||
         golden.name.starts_with("qwen3_next/");
}

// The tolerance table. The weights of all forms are the same numbers, so what is left is rounding
// of activations, and each bar is what somebody else does with the same model:
//   floats         2e-4, ten times transformers' float32 against its own float64
//   bfloat16       transformers in bfloat16 (which rounds more: every intermediate)
//   block formats  llama.cpp, which rounds activations to 8 bits in blocks of 32 as well; where it
//                  was not measured, transformers with activations rounded so
// A cache that rounds adds nothing to floats, since transformers' cache rounds alike: 1.3e-5 was
// measured. Activations in bfloat16 are rounded to other steps of it, which is what rounding costs.
// Those of the CUDA backend have 16 bits of mantissa: of some thousand elements one falls to the
// neighbouring step, and its error is at most a tenth of what rounding all of them costs. State
// layers raise e to what a projection says, so those 16 bits show: their bar is what the 8 bits of
// bfloat16 cost transformers, divided by 2^8.
Tolerance tolerance_of(const Case& c, const std::string& weight_type) {
  constexpr Tolerance kFloat{.largest = 2e-4, .rms = 4e-5};
  // "f16 + f32": files whose routers are kept in f32.
  if (c.backend == "reference" || weight_type == "f32" || weight_type == "f16" ||
      weight_type == "f16 + f32") {
    if (c.backend != "cuda") return kFloat;
    const Tolerance cost = cost_of_cache(c.cache_type);
    const ModelGolden& golden = goldens()[c.golden];
    const double rms = has_states(golden) ? golden.bfloat16_rms / 256 : kFloat.rms;
    return Tolerance{(has_states(golden) ? 10 * rms : kFloat.largest) + cost.largest / 10,
                     rms + cost.rms / 10};
  }
  const ModelGolden& golden = goldens()[c.golden];
  // Rounding is noise: two engines that round alike, in another order, draw it anew. A quarter more
  // is what 65 positions, whose errors go together, may differ by.
  constexpr double kNoise = 1.25;
  const double llama_cpp = golden.files[c.file].llama_cpp_rms;
  const double blocks = llama_cpp > 0 ? llama_cpp : golden.int8_rms;
  const double rms = kNoise * (weight_type == "bf16" ? golden.bfloat16_rms : blocks);
  // A single logit of these sharp little models may be ten times the root mean square away.
  return cost_of_cache(c.cache_type) + Tolerance{.largest = 10 * rms, .rms = rms};
}

std::string case_name(const testing::TestParamInfo<Case>& info) {
  const ModelGolden& golden = goldens()[info.param.golden];
  std::string name = golden.name + "_" + golden.files[info.param.file].form;
  name += "_" + info.param.backend;
  if (!info.param.isa.empty()) name += "_" + info.param.isa;
  if (info.param.cache_type != "f32") name += "_" + info.param.cache_type;
  std::replace(name.begin(), name.end(), '/', '_');
  return name;
}

class ModelLogitsTest : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    golden_ = &goldens()[GetParam().golden];
    rows_ = GetParam().cache_type == "f32" ? golden_->rows
                                           : golden_->rounded_rows.at(GetParam().cache_type);
    const GoldenFile& file = golden_->files[GetParam().file];
    scratch_ =
        std::filesystem::temp_directory_path() /
        ("pianola_golden_" + std::to_string(getpid()) + "_" + std::to_string(GetParam().golden));
    model_ = CausalModel::open(prepare_golden_file(file, scratch_));
    tolerance_ = tolerance_of(GetParam(), model_->weight_types());
    ASSERT_GT(tolerance_.rms, 0) << "nothing to compare " << model_->weight_types() << " with";
  }
  void TearDown() override { std::filesystem::remove_all(scratch_); }

  Engine make_engine(int slots = 1) const {
    return make_engine(slots, GetParam().backend, GetParam().isa);
  }
  Engine make_engine(int slots, const std::string& backend, const std::string& isa) const {
    return Engine(model_, {.backend = backend,
                           .threads = 1,
                           .isa = isa,
                           .max_seq_len = golden_->max_seq_len,
                           .slots = slots,
                           .chunk = 32,
                           .cache_type = GetParam().cache_type,
                           .score = true,
                           .logits = true});
  }

  // Collects differences of logits over a test.
  struct Differences {
    double largest = 0;
    double squares = 0;
    std::size_t count = 0;
  };

  static void compare(std::span<const float> got, std::span<const float> want,
                      Differences& differences) {
    ASSERT_EQ(got.size(), want.size());
    for (std::size_t i = 0; i < got.size(); ++i) {
      ASSERT_TRUE(std::isfinite(got[i])) << "value " << i;
      const double difference = std::abs(static_cast<double>(got[i]) - want[i]);
      differences.largest = std::max(differences.largest, difference);
      differences.squares += difference * difference;
    }
    differences.count += got.size();
  }

  static void expect_within(const Differences& differences, const Tolerance& tolerance) {
    ASSERT_GT(differences.count, 0U);
    const double rms = std::sqrt(differences.squares / static_cast<double>(differences.count));
    RecordProperty("largest", std::to_string(differences.largest));
    RecordProperty("rms", std::to_string(rms));
    EXPECT_LE(differences.largest, tolerance.largest);
    EXPECT_LE(rms, tolerance.rms);
  }

  // Runs a row of the golden through logits() in pieces of the given sizes, repeated as needed.
  void run_in_pieces(Engine& engine, const GoldenRow& row, const std::vector<int>& pieces,
                     Differences& differences) {
    const int id = engine.open_row({});
    ASSERT_GE(id, 0);
    const auto vocab = static_cast<std::size_t>(golden_->vocab_size);
    std::size_t position = 0;
    for (std::size_t i = 0; position < row.tokens.size(); ++i) {
      const auto piece = static_cast<std::size_t>(pieces[i % pieces.size()]);
      const std::size_t count = std::min(piece, row.tokens.size() - position);
      const auto got = engine.logits(id, std::span(row.tokens).subspan(position, count));
      SCOPED_TRACE("position " + std::to_string(position) + ", piece of " + std::to_string(count));
      compare(got, std::span(row.values).subspan(position * vocab, count * vocab), differences);
      position += count;
    }
    engine.close_row(id);
  }

  void run_rows_in_pieces(Engine& engine, const std::vector<int>& pieces) {
    Differences differences;
    for (const GoldenRow& row : rows_) run_in_pieces(engine, row, pieces, differences);
    expect_within(differences, tolerance_);
  }

  const ModelGolden* golden_ = nullptr;
  std::vector<GoldenRow> rows_;  // of the golden, or with a cache that rounds
  std::shared_ptr<const CausalModel> model_;
  std::filesystem::path scratch_;
  Tolerance tolerance_;
};

TEST_P(ModelLogitsTest, ReadsTheSameSizes) {
  EXPECT_EQ(model_->config().vocab_size, golden_->vocab_size);
  EXPECT_EQ(make_engine().max_seq_len(), golden_->max_seq_len);
}

TEST_P(ModelLogitsTest, LargestChunks) {
  Engine engine = make_engine();
  run_rows_in_pieces(engine, {engine.logits_chunk()});
}

TEST_P(ModelLogitsTest, TokenByToken) {
  Engine engine = make_engine();
  run_rows_in_pieces(engine, {1});
}

TEST_P(ModelLogitsTest, AnyChunks) {
  Engine engine = make_engine();
  for (const std::vector<int>& pieces :
       {std::vector<int>{7}, std::vector<int>{1, 16, 3}, std::vector<int>{31, 1, 2}}) {
    run_rows_in_pieces(engine, pieces);
  }
}

TEST_P(ModelLogitsTest, Scores) {
  Engine engine = make_engine();
  for (const GoldenRow& row : rows_) {
    const std::vector<float> got = engine.score(row.tokens);
    ASSERT_EQ(got.size(), row.tokens.size() - 1);
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_NEAR(got[i], log_probability(row.logits(i), row.tokens[i + 1]), tolerance_.largest)
          << i;
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
    engine.append(ids[r], std::span(rows_[r].tokens).first(prompts[r]));
  }
  while (engine.has_work()) {
    const std::span<const TokenEvent> view = engine.step();
    const std::vector<TokenEvent> events(view.begin(), view.end());
    ASSERT_FALSE(events.empty());
    for (const TokenEvent& event : events) {
      const std::size_t r = event.row == ids[0] ? 0 : 1;
      SCOPED_TRACE("row " + std::to_string(r) + " after " + std::to_string(known[r]));
      const GoldenRow& row = rows_[r];
      expect_event(event, row, known[r] - 1, tolerance_.largest);
      engine.keep_first(ids[r], static_cast<int>(known[r]));
      if (known[r] == row.tokens.size()) continue;
      engine.append(ids[r], std::span(row.tokens).subspan(known[r], 1));
      ++known[r];
    }
  }
  for (std::size_t r = 0; r < 2; ++r) EXPECT_EQ(known[r], rows_[r].tokens.size());
}

class EightBitCacheTest : public ModelLogitsTest {};

TEST_P(EightBitCacheTest, IsNearAFloatOne) {
  Engine engine = make_engine();
  Differences differences;
  for (const GoldenRow& row : golden_->rows) run_in_pieces(engine, row, {32}, differences);
  expect_within(differences, cost_of_cache(GetParam().cache_type) + tolerance_);
}

TEST_P(EightBitCacheTest, IsThatOfTheReference) {
  Engine engine = make_engine();
  Engine reference = make_engine(1, "reference", "");
  Differences differences;
  for (const GoldenRow& row : rows_) {
    GoldenRow want{row.tokens, {}};
    const int id = reference.open_row({});
    for (std::size_t at = 0; at < row.tokens.size();) {
      const std::size_t count =
          std::min(row.tokens.size() - at, static_cast<std::size_t>(reference.logits_chunk()));
      const auto logits = reference.logits(id, std::span(row.tokens).subspan(at, count));
      want.values.insert(want.values.end(), logits.begin(), logits.end());
      at += count;
    }
    reference.close_row(id);
    run_in_pieces(engine, want, {32}, differences);
  }
  expect_within(differences, tolerance_);
}

// CMake says which backends this program tests: those of any machine, or the one of a GPU.
std::vector<Case> all_cases() {
  if (std::string_view(PIANOLA_TEST_BACKENDS) == "cuda") return cases("cuda", {""});
  std::vector<Case> all = cases("reference", {""});
  const std::vector<Case> cpu = cases("cpu", cpu_isas());
  all.insert(all.end(), cpu.begin(), cpu.end());
  return all;
}

std::vector<Case> cases_that_round() {
  std::vector<Case> rounding = all_cases();
  std::erase_if(rounding, [](const Case& c) { return c.cache_type == "f32"; });
  return rounding;
}

INSTANTIATE_TEST_SUITE_P(Backends, ModelLogitsTest, testing::ValuesIn(all_cases()), case_name);
INSTANTIATE_TEST_SUITE_P(Backends, EightBitCacheTest, testing::ValuesIn(cases_that_round()),
                         case_name);

}  // namespace
}  // namespace pianola
