// Prompts that share their first tokens: computed once, and every answer is that of its request
// alone.
#include "generate/prefix_pool.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <numeric>
#include <string_view>

#include "models/golden.h"
#include "pianola/generator.h"

namespace pianola {
namespace {

struct Kind {
  const char* name;
  const char* golden;
  EngineOptions options;
  bool every_length;  // rows can go back to every length
};

// How GoogleTest shows a kind.
void PrintTo(const Kind& kind, std::ostream* out) { *out << kind.name; }

std::vector<Kind> kinds() {
  const EngineOptions options{.backend = "cpu", .threads = 1, .max_seq_len = 256, .chunk = 16};
  std::vector<Kind> kinds = {{"cpu", "llama/tied", options, true},
                             {"reference", "llama/tied", options, true},
                             {"int8", "llama/tied", options, true},
                             {"experts", "qwen3_moe/all", options, true},
                             {"windows", "mistral/window", options, false},
                             {"states", "qwen3_5/hybrid", options, false},
                             {"exact_states", "qwen3_5/hybrid", options, false}};
  kinds[1].options.backend = "reference";
  kinds[2].options.cache_type = "int8";
  kinds[6].options.exact_rollback = true;
  if (std::string_view(PIANOLA_TEST_BACKENDS) == "cuda") {
    kinds.erase(kinds.begin() + 1);
    kinds[0].name = "cuda";
    // Its bits do not depend on chunks either in steps of at most 64 tokens.
    for (Kind& kind : kinds) kind.options.backend = "cuda";
  }
  return kinds;
}

Model open_golden(const std::string& name) {
  const std::vector<ModelGolden> goldens = read_all_goldens();
  const auto golden = std::ranges::find(goldens, name, &ModelGolden::name);
  if (golden == goldens.end()) throw std::runtime_error("no golden " + name);
  const auto folder =
      std::filesystem::temp_directory_path() / ("pianola_prefix_" + std::to_string(getpid()));
  Model model = Model::open(prepare_golden_file(golden->files[0], folder).string());
  std::filesystem::remove_all(folder);  // what is mapped stays
  return model;
}

// Token i of text `seed`.
std::vector<TokenId> text(int seed, int count) {
  std::vector<TokenId> tokens;
  for (int i = 0; i < count; ++i) tokens.push_back((seed * 89 + i * i * 7 + i * 13) % 190 + 3);
  return tokens;
}

// The first `shared` tokens are those of every request, and then come its own.
GenerationRequest request(int seed, int shared, int own, int max_tokens) {
  GenerationRequest r{.prompt = text(1000, shared), .max_tokens = max_tokens, .ignore_eos = true};
  const std::vector<TokenId> tail = text(seed, own);
  r.prompt.insert(r.prompt.end(), tail.begin(), tail.end());
  r.sampling.temperature = 1.0F;
  r.sampling.seed = static_cast<std::uint64_t>(seed);
  return r;
}

int reused(const std::vector<GenerationResult>& results) {
  return std::accumulate(results.begin(), results.end(), 0, [](int sum, const GenerationResult& r) {
    return sum + r.stats.reused_tokens;
  });
}

class Prefixes : public testing::TestWithParam<Kind> {
 protected:
  Engine make_engine(int slots) const {
    EngineOptions options = GetParam().options;
    options.slots = slots;
    return Engine(model_.causal(), options);
  }

  void expect_alone(const std::vector<GenerationRequest>& requests,
                    const std::vector<GenerationResult>& results) {
    ASSERT_EQ(results.size(), requests.size());
    Engine alone = make_engine(1);
    for (std::size_t i = 0; i < requests.size(); ++i) {
      Generator generator(alone, model_, requests[i]);
      std::vector<TokenId> want;
      for (const Piece& piece : generator) want.push_back(piece.token);
      EXPECT_EQ(results[i].tokens, want) << "request " << i;
      EXPECT_EQ(results[i].finish_reason, generator.finish_reason()) << "request " << i;
      EXPECT_EQ(results[i].stats.prompt_tokens, static_cast<int>(requests[i].prompt.size()));
      EXPECT_TRUE(results[i].error.empty()) << results[i].error;
    }
  }

  void expect_late_sharer(bool cancelled);

  Model model_ = open_golden(GetParam().golden);
};

INSTANTIATE_TEST_SUITE_P(Kinds, Prefixes, testing::ValuesIn(kinds()),
                         [](const auto& kind) { return kind.param.name; });

TEST_P(Prefixes, ASystemPromptIsComputedOnce) {
  constexpr int kShared = 50;
  std::vector<GenerationRequest> requests;
  for (int i = 0; i < 8; ++i) requests.push_back(request(i, kShared, 1 + 5 * i, 3 + i));
  for (const int slots : {1, 3, 8}) {
    SCOPED_TRACE(slots);
    Engine engine = make_engine(slots);
    const auto results = generate(engine, model_, requests);
    expect_alone(requests, results);
    EXPECT_EQ(results[0].stats.reused_tokens, 0);
    if (GetParam().every_length) {
      for (std::size_t i = 1; i < results.size(); ++i) {
        EXPECT_GE(results[i].stats.reused_tokens, kShared) << "request " << i;
      }
    }
    const int prompts = std::accumulate(
        results.begin(), results.end(), 0,
        [](int sum, const GenerationResult& r) { return sum + r.stats.prompt_tokens; });
    Engine apart = make_engine(slots);
    const auto computed = generate(apart, model_, requests, {}, {.least_shared = 0});
    expect_alone(requests, computed);
    EXPECT_EQ(reused(computed), 0);
    EXPECT_GE(apart.counters().tokens, static_cast<std::uint64_t>(prompts));
    if (GetParam().every_length) {
      EXPECT_LE(engine.counters().tokens + 6 * kShared, apart.counters().tokens);
    }
    for (int row = 0; row < slots; ++row) EXPECT_EQ(engine.open_row({}), row);
  }
}

// Rows with windows and states can be copied where they are, if not where they have been.
TEST_P(Prefixes, TheSamePromptManyTimes) {
  std::vector<GenerationRequest> requests;
  for (int i = 0; i < 5; ++i) {
    requests.push_back(request(3, 60, 10, 12));
    requests.back().sampling.seed = static_cast<std::uint64_t>(i);
  }
  Engine engine = make_engine(5);
  const auto results = generate(engine, model_, requests);
  expect_alone(requests, results);
  for (std::size_t i = 1; i < results.size(); ++i) EXPECT_GE(results[i].stats.reused_tokens, 69);
}

// A row that is over goes back to a checkpoint at the end of a chunk.
TEST_P(Prefixes, ARowThatIsOverIsContinued) {
  std::vector<GenerationRequest> requests;
  for (int i = 0; i < 4; ++i) requests.push_back(request(i, 96, 20, 10));
  Engine engine = make_engine(1);
  const auto results = generate(engine, model_, requests);
  expect_alone(requests, results);
  if (std::string(GetParam().golden) == "mistral/window") return;
  for (std::size_t i = 1; i < results.size(); ++i) EXPECT_GE(results[i].stats.reused_tokens, 64);
}

// The tails take rows far beyond what they share before anybody could copy it.
TEST_P(Prefixes, LongTails) {
  std::vector<GenerationRequest> requests;
  for (int i = 0; i < 5; ++i) requests.push_back(request(i, 40, 120, 4));
  Engine engine = make_engine(3);
  expect_alone(requests, generate(engine, model_, requests));
}

// The row that they share with has answered for long, so that only a checkpoint keeps the prompt.
void Prefixes::expect_late_sharer(bool cancelled) {
  Engine engine = make_engine(2);
  PrefixPool pool(engine, 16);
  const GenerationRequest first = request(1, 96, 0, 0);
  const GenerationRequest late = request(2, 96, 10, 0);
  const auto run_to = [](Engine& e, int row, int length) {
    while (e.length(row) < length) e.step(std::span<const int>(&row, 1));
  };
  const int source = pool.take(first.prompt);
  engine.append(source, first.prompt);
  run_to(engine, source, 96 + 130);
  const int row = pool.take(late.prompt);
  ASSERT_GE(row, 0);
  ASSERT_NE(row, source);
  if (std::string_view(GetParam().golden) != "mistral/window") {
    EXPECT_GE(engine.length(row), 64);
  }
  const auto go_on = [&](Engine& e, int r) {
    const auto from = static_cast<std::size_t>(e.length(r));
    e.append(r, std::span(late.prompt).subspan(from));
    run_to(e, r, static_cast<int>(late.prompt.size()) + 12);
    return std::vector<TokenId>(e.history(r).begin(), e.history(r).end());
  };
  if (cancelled) pool.give_back(source, false);
  const std::vector<TokenId> said = go_on(engine, row);
  if (!cancelled) run_to(engine, source, 96 + 140);
  Engine alone = make_engine(2);
  const int again = alone.open_row({});
  EXPECT_EQ(said, go_on(alone, again));
  if (cancelled) return;
  const int undisturbed = alone.open_row({});
  alone.append(undisturbed, first.prompt);
  run_to(alone, undisturbed, 96 + 140);
  EXPECT_TRUE(std::ranges::equal(engine.history(source), alone.history(undisturbed)));
}

TEST_P(Prefixes, ALateSharerOfALiveRow) { expect_late_sharer(false); }
// Its answer is cancelled before the other one goes on.
TEST_P(Prefixes, ALateSharerOfARowThatIsCancelled) { expect_late_sharer(true); }

TEST_P(Prefixes, AnswersThatEndEarly) {
  std::vector<GenerationRequest> requests;
  for (int i = 0; i < 10; ++i) requests.push_back(request(i, 50, 3 + i, 6));
  requests[0].prompt[49] = 1 << 20;   // refused: outside the vocabulary
  requests[4].prompt = text(7, 300);  // refused: too long
  requests[5].max_tokens = 0;
  requests[6].prompt = requests[5].prompt;
  requests[7].prompt.resize(50);  // no token of its own
  requests[8].prompt = text(1000, 20);
  Engine engine = make_engine(3);
  const auto results =
      generate(engine, model_, requests, [](std::size_t i, const Piece&) { return i % 4 != 1; });
  Engine alone = make_engine(1);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    if (i == 0 || i == 4) {
      EXPECT_EQ(results[i].finish_reason, FinishReason::kFailed);
      EXPECT_FALSE(results[i].error.empty());
      continue;
    }
    Generator generator(alone, model_, requests[i]);
    std::vector<TokenId> want;
    for (const Piece& piece : generator) want.push_back(piece.token);
    if (i % 4 == 1 && i != 5) want.resize(1);
    EXPECT_EQ(results[i].tokens, want) << "request " << i;
  }
  for (int row = 0; row < 3; ++row) EXPECT_EQ(engine.open_row({}), row);
}

// An answer that another prompt goes on from: a conversation's next turn, and one that branches off
// inside the answer.
TEST_P(Prefixes, TurnsAfterAnAnswer) {
  Engine engine = make_engine(1);
  std::vector<GenerationRequest> requests = {request(1, 50, 10, 30)};
  std::vector<TokenId> next = requests[0].prompt;
  const auto first = generate(engine, model_, requests);
  const std::vector<TokenId>& answer = first[0].tokens;
  next.insert(next.end(), answer.begin(), answer.end());
  for (const std::size_t said : {answer.size(), answer.size() - 5, answer.size() / 2}) {
    requests.push_back(request(2, 0, 0, 8));
    requests.back().prompt.assign(next.begin(),
                                  next.begin() + 60 + static_cast<std::ptrdiff_t>(said));
    requests.back().prompt.push_back(5);
  }
  const auto results = generate(engine, model_, requests);
  expect_alone(requests, results);
  EXPECT_GE(results[1].stats.reused_tokens, 60 + 29);
}

class Pool : public testing::Test {
 protected:
  Engine make_engine(int slots) const {
    return Engine(
        model_.causal(),
        {.backend = "cpu", .threads = 1, .max_seq_len = 128, .slots = slots, .chunk = 16});
  }
  // Takes a row for the prompt, and computes it.
  static int computed(Engine& engine, PrefixPool& pool, const std::vector<TokenId>& prompt) {
    const int row = pool.take(prompt);
    if (row < 0) return row;
    const auto known = engine.history(row);
    const auto shared = std::ranges::mismatch(prompt, known).in1 - prompt.begin();
    engine.keep_first(row, static_cast<int>(shared));
    engine.append(row, std::span(prompt).subspan(static_cast<std::size_t>(shared)));
    while (engine.length(row) < static_cast<int>(prompt.size())) {
      engine.step(std::span<const int>(&row, 1));
    }
    return row;
  }
  static std::vector<TokenId> prompt(int shared_seed, int shared, int seed, int own) {
    std::vector<TokenId> tokens = text(shared_seed, shared);
    const std::vector<TokenId> tail = text(seed, own);
    tokens.insert(tokens.end(), tail.begin(), tail.end());
    return tokens;
  }

  Model model_ = open_golden("llama/tied");
};

TEST_F(Pool, CopiesARowThatIsInUse) {
  Engine engine = make_engine(2);
  PrefixPool pool(engine, 16);
  const int a = computed(engine, pool, prompt(1, 20, 2, 10));
  const int b = pool.take(prompt(1, 20, 3, 10));
  ASSERT_EQ(a, 0);
  ASSERT_EQ(b, 1);
  EXPECT_EQ(std::vector<TokenId>(engine.history(b).begin(), engine.history(b).begin() + 20),
            text(1, 20));
  EXPECT_GE(engine.length(b), 20);
  EXPECT_EQ(pool.take(prompt(1, 20, 4, 10)), -1);  // no slot
  pool.give_back(b, false);
  EXPECT_EQ(pool.take(prompt(1, 15, 4, 10)), 1);  // too little is shared
  EXPECT_EQ(engine.length(1), 0);
}

TEST_F(Pool, KeptRowsGoWhenTheirSlotsAreNeeded) {
  Engine engine = make_engine(3);
  PrefixPool pool(engine, 16);
  for (int i = 0; i < 3; ++i) ASSERT_EQ(computed(engine, pool, prompt(i, 20, 9, 5)), i);
  for (const int row : {2, 0, 1}) pool.give_back(row, true);
  EXPECT_EQ(engine.open_row({}), -1);            // all are kept
  EXPECT_EQ(pool.take(prompt(0, 20, 8, 5)), 0);  // continued in place
  EXPECT_EQ(pool.take(prompt(7, 20, 8, 5)), 2);  // nothing shared: the oldest goes
  EXPECT_EQ(engine.length(2), 0);
  EXPECT_EQ(computed(engine, pool, prompt(0, 20, 6, 5)), 1);  // a copy of row 0: row 1 goes
  EXPECT_EQ(pool.take(prompt(0, 20, 6, 5)), -1);
  pool.give_back(1, true);
  pool.close_kept();
  EXPECT_EQ(engine.open_row({}), 1);
}

TEST_F(Pool, WaitsForWhatARowIsAboutToCompute) {
  Engine engine = make_engine(2);
  PrefixPool pool(engine, 16);
  const std::vector<TokenId> first = prompt(1, 60, 2, 10);
  const std::vector<TokenId> second = prompt(1, 60, 3, 10);
  EXPECT_FALSE(pool.should_wait(first));
  const int row = pool.take(first);
  EXPECT_FALSE(pool.should_wait(second));  // nothing queued yet
  engine.append(row, first);
  EXPECT_TRUE(pool.should_wait(second));
  EXPECT_FALSE(pool.should_wait(prompt(5, 60, 3, 10)));
  EXPECT_FALSE(pool.should_wait(prompt(1, 12, 3, 60)));  // shares too little
  while (engine.length(row) < 60) {
    EXPECT_EQ(pool.should_wait(second), engine.length(row) < 60);
    engine.step();
  }
  EXPECT_FALSE(pool.should_wait(second));
  engine.keep_first(row, 30);  // and idle: nothing more comes
  EXPECT_FALSE(pool.should_wait(second));
  EXPECT_FALSE(PrefixPool(engine, 0).should_wait(second));
}

TEST_F(Pool, ARowThatStoppedInsideThePrefix) {
  Engine engine = make_engine(2);
  PrefixPool pool(engine, 16);
  const int row = pool.take(text(1, 60));
  engine.append(row, text(1, 60));
  while (engine.length(row) < 32) engine.step();
  engine.keep_first(row, 40);  // of which 32 are computed
  pool.give_back(row, true);
  const int next = pool.take(text(1, 80));
  ASSERT_GE(next, 0);
  EXPECT_NE(next, row);
  EXPECT_EQ(engine.length(next), 32);
}

TEST_F(Pool, LeavesNothingOpen) {
  Engine engine = make_engine(3);
  {
    PrefixPool pool(engine, 16);
    ASSERT_EQ(computed(engine, pool, text(1, 30)), 0);
    ASSERT_EQ(computed(engine, pool, text(2, 30)), 1);
    ASSERT_EQ(computed(engine, pool, text(3, 30)), 2);
    pool.give_back(0, true);
    engine.close_row(2);  // by somebody else
  }
  for (int row = 0; row < 3; ++row) EXPECT_EQ(engine.open_row({}), row);
  EXPECT_THROW(PrefixPool(engine, -1), Error);
  PrefixPool pool(engine, 16);
  EXPECT_EQ(pool.take({}), -1);
}

}  // namespace
}  // namespace pianola
