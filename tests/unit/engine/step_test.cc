// What the engine promises of steps: which rows they serve, that run() is many of them, and that
// the memory is what the plan said.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>

#include "engine_test_access.h"
#include "expect_error.h"
#include "models/golden.h"
#include "models/model.h"

namespace pianola {
namespace {

std::shared_ptr<const CausalModel> tiny_model() {
  return CausalModel::open(golden_folder() / "llama/untied/f32.gguf");
}

EngineOptions options(int slots, const char* backend = "reference") {
  return {.backend = backend, .threads = 1, .max_seq_len = 96, .slots = slots, .chunk = 16};
}

std::vector<TokenId> prompt(int seed, int count) {
  std::vector<TokenId> ids;
  for (int i = 0; i < count; ++i) ids.push_back((seed * 53 + i * 31 + 7) % 190);
  return ids;
}

RowOptions sampled(int seed, int max_length) {
  RowOptions o{.max_length = max_length};
  o.sampling.temperature = 1;
  o.sampling.seed = static_cast<std::uint64_t>(seed);
  return o;
}

std::vector<TokenId> history(const Engine& engine, int row) {
  return {engine.history(row).begin(), engine.history(row).end()};
}

std::vector<TokenId> alone(int seed, int prompt_tokens, int max_length) {
  Engine engine(tiny_model(), options(1));
  const int row = engine.open_row(sampled(seed, max_length));
  engine.append(row, prompt(seed, prompt_tokens));
  while (engine.has_work()) engine.step();
  return history(engine, row);
}

TEST(EngineStep, RowsAreServedApart) {
  Engine engine(tiny_model(), options(3));
  const int a = engine.open_row(sampled(1, 50));
  const int b = engine.open_row(sampled(2, 40));
  engine.append(a, prompt(1, 37));  // three chunks
  engine.append(b, prompt(2, 5));
  // b runs to its end while a has only begun; then in turns that do not divide each other.
  engine.step({&a, 1});
  const int begun = engine.length(a);
  EXPECT_EQ(begun, 16);
  for (int i = 0; i < 7; ++i) {
    for (const TokenEvent& event : engine.step({&b, 1})) EXPECT_EQ(event.row, b);
  }
  EXPECT_EQ(engine.length(a), begun);
  for (int i = 0; engine.has_work(); ++i) {
    const int row = i % 3 == 0 ? b : a;
    engine.step({&row, 1});
  }
  EXPECT_EQ(history(engine, a), alone(1, 37, 50));
  EXPECT_EQ(history(engine, b), alone(2, 5, 40));
}

TEST(EngineStep, RowsThatAreNotOpenAreRefused) {
  Engine engine(tiny_model(), options(2));
  const int row = engine.open_row({});
  engine.close_row(row);
  for (const int bad : {row, 1, 2, 99, -1, std::numeric_limits<int>::min()}) {
    expect_error(ErrorCode::kInvalidArgument, "not open", [&] { engine.step({&bad, 1}); });
    expect_error(ErrorCode::kInvalidArgument, "not open", [&] { engine.run(5, {&bad, 1}); });
    expect_error(ErrorCode::kInvalidArgument, "not open", [&] { engine.status(bad); });
    expect_error(ErrorCode::kInvalidArgument, "not open", [&] { engine.history(bad); });
    expect_error(ErrorCode::kInvalidArgument, "not open", [&] { engine.length(bad); });
    expect_error(ErrorCode::kInvalidArgument, "not open", [&] { engine.keep_first(bad, 0); });
    expect_error(ErrorCode::kInvalidArgument, "not open", [&] { engine.drop_last(bad, 0); });
    expect_error(ErrorCode::kInvalidArgument, "not open", [&] { engine.reset(bad); });
    expect_error(ErrorCode::kInvalidArgument, "not open", [&] { engine.configure_row(bad, {}); });
    expect_error(ErrorCode::kInvalidArgument, "not open",
                 [&] { engine.append(bad, prompt(1, 1)); });
    expect_error(ErrorCode::kInvalidArgument, "not open", [&] { engine.close_row(bad); });
  }
  EXPECT_TRUE(engine.step().empty());  // no rows, no work: no step
  EXPECT_EQ(engine.counters().steps, 0U);
}

TEST(EngineStep, RunIsThatManySteps) {
  for (const char* backend : {"reference", "cpu"}) {
    Engine stepped(tiny_model(), options(2, backend));
    Engine run(tiny_model(), options(2, backend));
    for (Engine* engine : {&stepped, &run}) {
      for (const int seed : {1, 2}) {
        const int row = engine->open_row(sampled(seed, seed == 1 ? 30 : 14));
        engine->append(row, prompt(seed, 6 + seed));
      }
    }
    std::vector<TokenEvent> want;
    std::vector<TokenEvent> got;
    const auto add = [](std::vector<TokenEvent>& to, std::span<const TokenEvent> events) {
      to.insert(to.end(), events.begin(), events.end());
    };
    add(want, stepped.step());
    add(got, run.run(100));  // one round: there are prompts
    for (const int rounds : {1, 2, 3, 5, 100}) {
      for (int i = 0; i < rounds && stepped.has_work(); ++i) add(want, stepped.step());
      add(got, run.run(rounds));
      ASSERT_EQ(got.size(), want.size()) << backend << ", " << rounds;
      for (const int row : {0, 1}) {
        EXPECT_EQ(run.length(row), stepped.length(row));
        EXPECT_EQ(run.status(row), stepped.status(row));
        EXPECT_EQ(history(run, row), history(stepped, row));
      }
    }
    EXPECT_FALSE(run.has_work());
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_EQ(got[i].row, want[i].row) << i;
      EXPECT_EQ(got[i].token, want[i].token) << i;
      EXPECT_EQ(got[i].status, want[i].status) << i;
    }
    EXPECT_EQ(run.counters().steps, stepped.counters().steps);
    EXPECT_EQ(run.counters().tokens, stepped.counters().tokens);
  }
}

TEST(EngineStep, RunNeedsARound) {
  Engine engine(tiny_model(), options(1));
  expect_error(ErrorCode::kInvalidArgument, "0 rounds", [&] { engine.run(0); });
  expect_error(ErrorCode::kInvalidArgument, "-1 rounds", [&] { engine.run(-1); });
}

TEST(EngineStep, ALimitAtOrBelowThePromptGivesOneToken) {
  for (const int limit : {1, 9, 10, 11}) {
    Engine engine(tiny_model(), options(1));
    const int row = engine.open_row({.max_length = limit});
    engine.append(row, prompt(1, 10));
    while (engine.has_work()) engine.step();
    EXPECT_EQ(engine.status(row), RowStatus::kLength);
    EXPECT_EQ(engine.history(row).size(), 11U) << limit;
  }
}

TEST(EngineStep, DroppingIsBoundedForEveryInt) {
  Engine engine(tiny_model(), options(1));
  const int row = engine.open_row({});
  engine.append(row, prompt(1, 10));
  for (const int n : {-1, 11, std::numeric_limits<int>::min(), std::numeric_limits<int>::max()}) {
    expect_error(ErrorCode::kContextOverflow, "10 tokens", [&] { engine.drop_last(row, n); });
    expect_error(ErrorCode::kContextOverflow, "10 tokens",
                 [&] { engine.keep_first(row, n < 0 ? n : std::max(n, 11)); });
  }
  EXPECT_EQ(engine.history(row).size(), 10U);
  engine.drop_last(row, 10);
  EXPECT_TRUE(engine.history(row).empty());
}

// New parameters take effect from the next token on, and the row keeps its tokens.
TEST(EngineStep, ConfigureKeepsTheTokens) {
  Engine engine(tiny_model(), options(1));
  RowOptions o{.max_length = 20};
  o.sampling.logit_bias = {{5, 1e6F}, {6, -1e6F}};
  const int row = engine.open_row(o);
  engine.append(row, prompt(1, 10));
  while (engine.has_work()) engine.step();
  o.max_length = 30;
  o.sampling.logit_bias = {{6, 1e6F}};  // a shorter list: nothing is left of the longer
  engine.configure_row(row, o);
  EXPECT_EQ(engine.status(row), RowStatus::kIdle);
  engine.append(row, {});
  while (engine.has_work()) engine.step();
  std::vector<TokenId> want = prompt(1, 10);
  want.insert(want.end(), 10, 5);
  want.insert(want.end(), 10, 6);
  EXPECT_EQ(history(engine, row), want);
}

TEST(EngineMemory, WhatIsAllocatedIsWhatWasPlanned) {
  for (const char* backend : {"reference", "cpu"}) {
    EngineOptions o = options(3, backend);
    o.score = o.logits = true;
    const auto model = tiny_model();
    const MemoryPlan plan = Engine::plan(*model, o);
    Engine engine(model, o);
    const auto& e = EngineTestAccess::impl(engine);
    EXPECT_EQ(e.weight_memory->size(), plan.weights);
    EXPECT_EQ(e.cache_memory->size(), plan.cache);
    EXPECT_EQ(e.state_memory->size() + e.shared_memory->size(), plan.state);
    EXPECT_EQ(e.work_memory->size(), plan.workspace);
    EXPECT_EQ(plan.total, plan.weights + plan.cache + plan.state + plan.workspace);
    EXPECT_GE(plan.cache, plan.cache_per_slot * 3);
    EXPECT_GT(plan.available, plan.total);
    for (const char* word : {"weights", "cache", "state", "workspace", "total", "it fits"}) {
      EXPECT_NE(plan.to_string().find(word), std::string::npos) << word;
    }
  }
}

// Without max_seq_len: the model's own, or less so that all of it fits, whatever takes the rest.
// An embedding table is used in the file, unless the head holds the same tensor in a packed form
// that the backend reads rows from.
TEST(EngineMemory, WhatIsUsedInPlaceIsWhatIsCounted) {
  struct Case {
    const char* file;
    const char* backend;
    bool in_place;
  };
  for (const Case& c : {Case{"llama/tied/q8_0.gguf", "cpu", false},
                        {"llama/tied/f16.gguf", "cpu", false},
                        {"llama/untied/f32.gguf", "cpu", true},
                        {"llama/tied/q8_0.gguf", "reference", true}}) {
    SCOPED_TRACE(std::string(c.file) + " " + c.backend);
    const auto model = CausalModel::open(golden_folder() / c.file);
    Engine engine(model, options(1, c.backend));
    auto& e = EngineTestAccess::impl(engine);
    const ModelTables& tables = e.layout.tables();
    const auto index = static_cast<std::size_t>(tables.embedding.index);
    const auto table = tables.weights[index].source_bytes();
    EXPECT_EQ(Engine::plan(*model, options(1, c.backend)).mapped, c.in_place ? table : 0U);
    const std::byte* data = e.layout.weights().bound()[index].data;
    const std::byte* own = e.weight_memory->data();
    EXPECT_EQ(data < own || data >= own + e.weight_memory->size(), c.in_place);
  }
}

TEST(EngineMemory, TheDefaultLengthFits) {
  const auto model = tiny_model();
  EngineOptions o = options(4, "cpu");
  o.max_seq_len = 0;
  EXPECT_EQ(Engine::plan(*model, o).max_seq_len, model->config().max_position_embeddings);
  const std::size_t all = Engine::plan(*model, o).total;
  o.max_seq_len = 64;
  const std::size_t least = Engine::plan(*model, o).total;
  o.max_seq_len = 0;
  ASSERT_LT(least, all);
  int last = 64;
  for (std::size_t limit = least; limit <= all; limit += (all - least) / 16) {
    o.memory_limit = limit;
    const MemoryPlan plan = Engine::plan(*model, o);
    EXPECT_TRUE(plan.fits()) << plan.to_string();
    EXPECT_GE(plan.max_seq_len, last) << "less with more memory";
    last = plan.max_seq_len;
  }
  o.memory_limit = all;
  EXPECT_EQ(Engine::plan(*model, o).max_seq_len, model->config().max_position_embeddings);
  o.memory_limit = least - 1;
  EXPECT_FALSE(Engine::plan(*model, o).fits());
  expect_error(ErrorCode::kOutOfMemory, "it does not fit", [&] { Engine(model, o); });
}

// What a window's layers take does not grow with the sequence, and a window that no row outgrows is
// full attention.
TEST(EngineMemory, AWindowBoundsItsLayers) {
  const auto folder =
      std::filesystem::temp_directory_path() / ("pianola_window_" + std::to_string(getpid()));
  std::filesystem::create_directories(folder);
  const auto source = golden_folder() / "mistral/full/hf";
  for (const auto& entry : std::filesystem::directory_iterator(source)) {
    std::filesystem::copy_file(entry.path(), folder / entry.path().filename(),
                               std::filesystem::copy_options::overwrite_existing);
  }
  std::string config = read_text_file(source / "config.json", 1 << 20);
  const std::string none = "\"sliding_window\": null";
  ASSERT_NE(config.find(none), std::string::npos);
  config.replace(config.find(none), none.size(), "\"sliding_window\": 100");
  std::ofstream(folder / "config.json") << config;
  const auto model = CausalModel::open(folder);
  const auto bytes = [&](int max_seq_len, int chunk) {
    return Engine::plan(*model,
                        {.backend = "reference", .max_seq_len = max_seq_len, .chunk = chunk})
        .cache_per_slot;
  };
  EXPECT_EQ(Engine::plan(*model, {.backend = "reference"}).max_seq_len, 256);
  EXPECT_EQ(bytes(4096, 29), 2 * bytes(64, 29));
  EXPECT_EQ(bytes(4096, 30), 3 * bytes(64, 30));
  EXPECT_EQ(bytes(100, 100), bytes(128, 28));
  std::filesystem::remove_all(folder);
}

TEST(EngineOptionsBounds, ThreadsAboveTheLimitAreRefused) {
  for (const int threads : {1025, 1 << 30, std::numeric_limits<int>::min()}) {
    EngineOptions o = options(1, "cpu");
    o.threads = threads;
    expect_error(ErrorCode::kInvalidArgument, "threads", [&] { Engine(tiny_model(), o); });
  }
}

}  // namespace
}  // namespace pianola
