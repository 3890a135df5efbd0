// Rows, limits and refusals of the engine, on a tiny checkpoint.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "expect_error.h"
#include "models/golden.h"
#include "models/model.h"
#include "pianola/engine.h"
#include "plan/step_state.h"

namespace pianola {
namespace {

std::shared_ptr<const CausalModel> tiny_model() {
  return CausalModel::open(golden_folder() / "llama/untied/f32.gguf");
}

EngineOptions tiny_options() {
  return {.backend = "reference", .max_seq_len = 64, .slots = 2, .chunk = 16};
}

std::vector<TokenId> tokens(int count) {
  std::vector<TokenId> ids;
  for (int i = 0; i < count; ++i) ids.push_back((i * 31 + 7) % 200);
  return ids;
}

void run_all(Engine& engine) {
  while (engine.has_work()) engine.step();
}

TEST(EngineOptions, OutOfRangeIsRefused) {
  const auto model = tiny_model();
  const auto refuse = [&](auto change, const std::string& part) {
    EngineOptions o = tiny_options();
    change(o);
    expect_error(ErrorCode::kInvalidArgument, part, [&] { Engine(model, o); });
  };
  refuse([](EngineOptions& o) { o.backend = "nope"; }, "cpu, reference");
  refuse([](EngineOptions& o) { o.slots = 0; }, "slots");
  refuse([](EngineOptions& o) { o.chunk = 0; }, "chunk");
  refuse([](EngineOptions& o) { o.max_seq_len = -1; }, "max_seq_len");
  refuse([](EngineOptions& o) { o.threads = -1; }, "threads");
  refuse([](EngineOptions& o) { o.cache_type = "q4_0"; }, "cache_type");
  refuse([](EngineOptions& o) { o.cache_type = "i8"; }, "f16, bf16, f32, int8 or fp8");
  refuse(
      [](EngineOptions& o) {
        o.backend = "cpu";
        o.isa = "mmx";
      },
      "mmx");
}

// What would change nothing is refused, before a device is looked for.
TEST(EngineOptions, WithoutEffectIsRefused) {
  const auto model = tiny_model();
  const auto refuse = [&](auto change, const std::string& part) {
    for (const char* backend : {"cpu", "reference"}) {
      EngineOptions o = tiny_options();
      o.backend = backend;
      change(o);
      expect_error(ErrorCode::kInvalidArgument, part, [&] { Engine(model, o); });
      expect_error(ErrorCode::kInvalidArgument, part, [&] { Engine::plan(*model, o); });
      expect_error(ErrorCode::kInvalidArgument, part, [&] { Engine::plan_text(*model, o); });
    }
  };
  refuse([](EngineOptions& o) { o.eager = true; }, "eager has no effect");
  refuse([](EngineOptions& o) { o.check_each = true; }, "check_each has no effect");
  refuse([](EngineOptions& o) { o.dependent_launch = false; }, "dependent_launch has no effect");
  EngineOptions o = tiny_options();
  o.backend = "cuda";
  o.check_each = true;
  expect_error(ErrorCode::kInvalidArgument, "check_each without eager", [&] { Engine(model, o); });
  // Its promise holds on every other backend.
  o = tiny_options();
  o.batch_invariant = true;
  EXPECT_NO_THROW(Engine(model, o));
}

TEST(EngineMemory, WhatDoesNotFitIsRefusedWithTheTable) {
  const auto model = tiny_model();
  EngineOptions o = tiny_options();
  const MemoryPlan plan = Engine::plan(*model, o);
  EXPECT_EQ(plan.total, plan.weights + plan.cache + plan.state + plan.workspace);
  o.memory_limit = plan.total - 1;
  expect_error(ErrorCode::kOutOfMemory, "it does not fit", [&] { Engine(model, o); });
  o.memory_limit = plan.total;
  Engine engine(model, o);
  EXPECT_EQ(engine.memory().total, plan.total);
}

TEST(EngineRows, SlotsAreTakenAndGivenBack) {
  Engine engine(tiny_model(), tiny_options());
  const int a = engine.open_row({});
  const int b = engine.open_row({});
  EXPECT_NE(a, b);
  EXPECT_EQ(engine.open_row({}), -1);
  engine.close_row(a);
  EXPECT_EQ(engine.open_row({}), a);
  engine.close_row(b);
  expect_error(ErrorCode::kInvalidArgument, "not open", [&] { engine.append(b, tokens(1)); });
  expect_error(ErrorCode::kInvalidArgument, "not open", [&] { engine.status(7); });
  expect_error(ErrorCode::kInvalidArgument, "not open", [&] { engine.close_row(-1); });
}

// Counted before anything is allocated, the scales of int8 with the rest.
TEST(EngineOptions, CacheTypesTakeTheirBytes) {
  const auto model = tiny_model();
  const auto per_slot = [&](const char* type) {
    EngineOptions o = tiny_options();
    o.cache_type = type;
    const MemoryPlan plan = Engine::plan(*model, o);
    EXPECT_EQ(Engine(model, o).memory().cache_per_slot, plan.cache_per_slot);
    return plan.cache_per_slot;
  };
  constexpr std::size_t kHeads = 2 * 2 * 2 * 64;  // layers, keys and values, heads, positions
  EXPECT_EQ(per_slot("f32"), kHeads * 16 * 4);
  EXPECT_EQ(per_slot("f16"), kHeads * 16 * 2);
  EXPECT_EQ(per_slot("int8"), kHeads * (16 + 4));
  EXPECT_EQ(per_slot("fp8"), kHeads * 16);
}

class EngineOverflow : public testing::TestWithParam<const char*> {};  // type of cache
INSTANTIATE_TEST_SUITE_P(CacheTypes, EngineOverflow, testing::Values("f16", "int8", "fp8"),
                         [](const auto& type) { return std::string(type.param); });

TEST_P(EngineOverflow, ChangesNothing) {
  EngineOptions options = tiny_options();
  options.cache_type = GetParam();
  Engine engine(tiny_model(), options);
  const int row = engine.open_row({});
  engine.append(row, tokens(60));
  expect_error(ErrorCode::kContextOverflow, "64", [&] { engine.append(row, tokens(5)); });
  EXPECT_EQ(engine.history(row).size(), 60U);
  expect_error(ErrorCode::kInvalidArgument, "vocabulary",
               [&] { engine.append(row, std::vector<TokenId>{1, 1 << 20}); });
  EXPECT_EQ(engine.history(row).size(), 60U);
  engine.append(row, tokens(4));  // exactly full
  run_all(engine);
  EXPECT_EQ(engine.status(row), RowStatus::kLength);
  EXPECT_EQ(engine.length(row), 64);
  EXPECT_EQ(engine.history(row).size(), 65U);  // one answer, not in the cache
  expect_error(ErrorCode::kContextOverflow, "64", [&] { engine.append(row, tokens(1)); });
}

TEST(EngineRows, LimitsAndStopTokens) {
  Engine engine(tiny_model(), tiny_options());
  const int row = engine.open_row({.max_length = 20});
  engine.append(row, tokens(10));
  run_all(engine);
  EXPECT_EQ(engine.history(row).size(), 20U);
  const std::vector<TokenId> all(engine.history(row).begin(), engine.history(row).end());
  // Stop at the first occurrence of a token that is known to come.
  const TokenId stop = all[14];
  const auto first = std::find(all.begin() + 10, all.end(), stop) - all.begin();
  engine.configure_row(row, {.stop_tokens = {stop}});
  engine.keep_first(row, 10);
  EXPECT_EQ(engine.status(row), RowStatus::kIdle);
  engine.append(row, {});
  run_all(engine);
  EXPECT_EQ(engine.status(row), RowStatus::kStopToken);
  EXPECT_EQ(static_cast<std::ptrdiff_t>(engine.history(row).size()), first + 1);
}

TEST(EngineRows, MovingBackIsBounded) {
  Engine engine(tiny_model(), tiny_options());
  const int row = engine.open_row({.max_length = 12});
  engine.append(row, tokens(8));
  run_all(engine);
  expect_error(ErrorCode::kContextOverflow, "13", [&] { engine.keep_first(row, 13); });
  expect_error(ErrorCode::kContextOverflow, "-1", [&] { engine.keep_first(row, -1); });
  expect_error(ErrorCode::kContextOverflow, "13", [&] { engine.drop_last(row, 13); });
  EXPECT_EQ(engine.history(row).size(), 12U);
  engine.drop_last(row, 2);
  EXPECT_EQ(engine.history(row).size(), 10U);
  engine.reset(row);
  EXPECT_EQ(engine.length(row), 0);
  expect_error(ErrorCode::kInvalidArgument, "no tokens", [&] { engine.append(row, {}); });
}

TEST(EngineRows, ListsAreBounded) {
  Engine engine(tiny_model(), tiny_options());
  RowOptions o;
  o.stop_tokens.assign(kMaxStopTokens, 1);
  o.sampling.logit_bias.assign(kMaxLogitBias, {1, 0.5F});
  const int row = engine.open_row(o);
  ASSERT_GE(row, 0);
  o.stop_tokens.push_back(1);
  expect_error(ErrorCode::kInvalidArgument, "stop tokens", [&] { engine.configure_row(row, o); });
  o.stop_tokens.clear();
  o.sampling.logit_bias.push_back({1, 0.5F});
  expect_error(ErrorCode::kInvalidArgument, "logit_bias", [&] { engine.configure_row(row, o); });
  o.sampling.logit_bias = {{1 << 20, 1.0F}};
  expect_error(ErrorCode::kInvalidArgument, "vocabulary", [&] { engine.configure_row(row, o); });
  o.sampling.logit_bias = {{1, std::numeric_limits<float>::quiet_NaN()}};
  expect_error(ErrorCode::kInvalidArgument, "logit_bias", [&] { engine.configure_row(row, o); });
}

TEST(EngineSampling, ForbiddenAndForcedTokens) {
  Engine engine(tiny_model(), tiny_options());
  RowOptions o{.max_length = 12};
  o.sampling.logit_bias = {{42, 1e6F}};
  const int row = engine.open_row(o);
  engine.append(row, tokens(8));
  run_all(engine);
  for (std::size_t i = 8; i < 12; ++i) EXPECT_EQ(engine.history(row)[i], 42);
  // Without any candidate the row fails, and no token is written.
  o.sampling.logit_bias.clear();
  for (TokenId id = 0; id < engine.vocab_size(); ++id) {
    o.sampling.logit_bias.push_back({id, -std::numeric_limits<float>::infinity()});
  }
  ASSERT_LE(o.sampling.logit_bias.size(), static_cast<std::size_t>(kMaxLogitBias));
  engine.configure_row(row, o);
  engine.keep_first(row, 8);
  engine.append(row, {});
  run_all(engine);
  EXPECT_EQ(engine.status(row), RowStatus::kFailed);
  EXPECT_EQ(engine.history(row).size(), 8U);
}

TEST(EngineScore, IsTheLogSoftmaxOfTheLogits) {
  EngineOptions o = tiny_options();
  o.score = o.logits = true;
  Engine engine(tiny_model(), o);
  const auto ids = tokens(16);
  const int row = engine.open_row({});
  const auto logits = engine.logits(row, ids);
  const std::vector<float> scores = engine.score(ids);
  ASSERT_EQ(scores.size(), 15U);
  const auto vocab = static_cast<std::size_t>(engine.vocab_size());
  for (std::size_t i = 0; i < scores.size(); ++i) {
    EXPECT_NEAR(scores[i], log_probability(logits.subspan(i * vocab, vocab), ids[i + 1]), 1e-5);
  }
  expect_error(ErrorCode::kInvalidArgument, "16", [&] { engine.logits(row, tokens(17)); });
}

TEST(EngineScore, NeedsItsSteps) {
  Engine engine(tiny_model(), tiny_options());
  expect_error(ErrorCode::kInvalidArgument, "score", [&] { engine.score(tokens(4)); });
  const int row = engine.open_row({});
  expect_error(ErrorCode::kInvalidArgument, "logits", [&] { engine.logits(row, tokens(4)); });
}

TEST(SamplingParams, OutOfRangeIsRefused) {
  const auto refuse = [](auto change, const std::string& field) {
    SamplingParams p;
    change(p);
    expect_error(ErrorCode::kInvalidArgument, field, [&] { validate(p); });
  };
  refuse([](SamplingParams& p) { p.temperature = -1; }, "temperature");
  refuse([](SamplingParams& p) { p.temperature = NAN; }, "temperature");
  refuse([](SamplingParams& p) { p.temperature = 1e30F; }, "temperature");
  refuse([](SamplingParams& p) { p.top_k = -1; }, "top_k");
  refuse([](SamplingParams& p) { p.top_p = 0; }, "top_p");
  refuse([](SamplingParams& p) { p.top_p = 1.5F; }, "top_p");
  refuse([](SamplingParams& p) { p.min_p = 2; }, "min_p");
  refuse([](SamplingParams& p) { p.repeat_penalty = 0; }, "repeat_penalty");
  refuse([](SamplingParams& p) { p.presence_penalty = 3; }, "presence_penalty");
  refuse([](SamplingParams& p) { p.frequency_penalty = NAN; }, "frequency_penalty");
  refuse([](SamplingParams& p) { p.penalty_window = -2; }, "penalty_window");
}

}  // namespace
}  // namespace pianola
