// What moves whole rows: fork, swap, snapshot and restore. A row that was moved goes
// on as if it had been alone from its first token, to the bit; what is refused changes nothing.
#include <gtest/gtest.h>
#include <unistd.h>

#include <limits>

#include "cache/rows.h"
#include "engine_test_access.h"
#include "expect_error.h"
#include "pianola/engine.h"

namespace pianola {
namespace {

struct Stack {
  std::string name;
  std::string model;
  std::string cache_type = "f16";
  bool exact = false;
};

void PrintTo(const Stack& stack, std::ostream* out) { *out << stack.name; }

std::vector<Stack> stacks() {
  return {{"full", "llama/untied"},     {"int8", "llama/untied", "int8"},
          {"window", "mistral/window"}, {"experts", "gpt_oss/mixed"},
          {"hybrid", "qwen3_5/hybrid"}, {"exact", "qwen3_5/hybrid", "f16", true}};
}

EngineOptions engine_options(const Stack& stack, int slots) {
  return {.backend = "cpu",
          .threads = 1,
          .max_seq_len = 150,
          .slots = slots,
          .chunk = 16,
          .cache_type = stack.cache_type,
          .rollback_depth = 4,
          .exact_rollback = stack.exact,
          .checkpoints = 3};
}

class RowVerbs : public testing::TestWithParam<Stack> {
 protected:
  static Engine make_engine(int slots) {
    return Engine(tiny_model(GetParam().model), engine_options(GetParam(), slots));
  }
  // What an engine that has held nothing else says after these tokens.
  static Said alone(const std::vector<TokenId>& tokens, const RowOptions& options, int count) {
    Engine engine = make_engine(1);
    const int row = engine.open_row(options);
    engine.append(row, tokens);
    return say(engine, row, count);
  }
  // A row that has said something.
  static int begin_row(Engine& engine, int text, int tokens, const RowOptions& options) {
    const int row = engine.open_row(options);
    engine.append(row, text_tokens(text, 0, tokens));
    say(engine, row, 5);
    return row;
  }
};

INSTANTIATE_TEST_SUITE_P(Stacks, RowVerbs, testing::ValuesIn(stacks()),
                         [](const auto& stack) { return stack.param.name; });

TEST_P(RowVerbs, ForksAreTheRowAloneAndTheirChoicesCountUp) {
  Engine engine = make_engine(4);
  const int row = begin_row(engine, 1, 90, sampled(3));
  const std::vector<TokenId> known = history(engine, row);
  const std::vector<int> forks = engine.fork(row, 3, sampled(8, 5));
  ASSERT_EQ(forks.size(), 3U);
  for (const int fork : forks) {
    EXPECT_EQ(engine.status(fork), RowStatus::kIdle);
    EXPECT_EQ(history(engine, fork), known);
    EXPECT_EQ(engine.length(fork), engine.length(row));
    engine.append(fork, {});
  }
  std::vector<Said> said(4);
  while (engine.has_work()) {
    for (const TokenEvent& event : engine.run(8)) {
      said[static_cast<std::size_t>(event.row)].add(event);
    }
  }
  const int count = 150 - static_cast<int>(known.size());
  EXPECT_EQ(said[static_cast<std::size_t>(row)], alone(known, sampled(3), count));
  for (std::uint32_t i = 0; i < 3; ++i) {
    EXPECT_EQ(said[static_cast<std::size_t>(forks[i])], alone(known, sampled(8, 5 + i), count))
        << i;
  }
}

TEST_P(RowVerbs, AForkTakesQueuedTokensAlong) {
  Engine engine = make_engine(2);
  const int row = engine.open_row(sampled(1));
  engine.append(row, text_tokens(2, 0, 40));
  engine.step();
  ASSERT_EQ(engine.length(row), 16);
  const std::vector<int> forks = engine.fork(row, 1, sampled(2));
  ASSERT_EQ(forks.size(), 1U);
  EXPECT_EQ(engine.length(forks[0]), 16);
  EXPECT_EQ(history(engine, forks[0]), text_tokens(2, 0, 40));
  EXPECT_EQ(go_on(engine, forks[0], 6), alone(text_tokens(2, 0, 40), sampled(2), 6));
  EXPECT_EQ(engine.length(row), 16);
  EXPECT_EQ(say(engine, row, 6), alone(text_tokens(2, 0, 40), sampled(1), 6));
}

TEST_P(RowVerbs, AForkGoesBackAsFarAsItsRow) {
  Engine engine = make_engine(2);
  const int row = begin_row(engine, 1, 90, sampled(3));
  const std::vector<int> forks = engine.fork(row, 1, sampled(4));
  ASSERT_EQ(forks.size(), 1U);
  const int rewind = engine.max_rewind(row);
  EXPECT_GE(rewind, 4);
  EXPECT_EQ(engine.max_rewind(forks[0]), rewind);
  engine.drop_last(forks[0], rewind);
  const std::vector<TokenId> kept = history(engine, forks[0]);
  engine.append(forks[0], text_tokens(3, 0, 2));
  std::vector<TokenId> changed = kept;
  for (const TokenId token : text_tokens(3, 0, 2)) changed.push_back(token);
  EXPECT_EQ(say(engine, forks[0], 6), alone(changed, sampled(4), 6));
}

TEST_P(RowVerbs, SwappedRowsGoOnWithTheirOptions) {
  Engine engine = make_engine(3);
  const int a = begin_row(engine, 1, 100, sampled(3));
  const int b = begin_row(engine, 2, 7, sampled(4));
  const int empty = engine.open_row(sampled(5));
  const std::vector<TokenId> of_a = history(engine, a);
  const std::vector<TokenId> of_b = history(engine, b);
  engine.swap(a, b);
  EXPECT_EQ(history(engine, a), of_b);
  EXPECT_EQ(history(engine, b), of_a);
  engine.swap(empty, b);
  EXPECT_EQ(history(engine, b), std::vector<TokenId>());
  engine.swap(a, a);
  EXPECT_EQ(say(engine, a, 8), alone(of_b, sampled(4), 8));
  EXPECT_EQ(say(engine, empty, 8), alone(of_a, sampled(3), 8));
  engine.append(b, text_tokens(0, 0, 20));
  EXPECT_EQ(say(engine, b, 3), alone(text_tokens(0, 0, 20), sampled(5), 3));
}

// A device may be a round ahead of what the caller has seen: the tokens follow their row.
TEST_P(RowVerbs, TokensThatNobodyHasSeenAreSwappedWithTheirRows) {
  Engine engine = make_engine(2);
  const int rows[2] = {begin_row(engine, 1, 30, sampled(3)), begin_row(engine, 2, 7, sampled(4))};
  const std::vector<TokenId> known[2] = {history(engine, rows[0]), history(engine, rows[1])};
  Said said[2];
  for (const TokenEvent& event : engine.stream()) said[event.row].add(event);
  EngineTestAccess::impl(engine).running->wait();  // a round goes by
  engine.swap(rows[0], rows[1]);
  EXPECT_EQ(engine.history(0).size(), known[1].size() + 2);
  const int first = 0;
  const auto events = engine.step({&first, 1});
  ASSERT_EQ(events.size(), 1U);
  EXPECT_EQ(events[0].row, 0);
  said[1].add(events[0]);
  engine.swap(rows[0], rows[1]);
  const int other = 0;
  for (const TokenEvent& event : engine.step({&other, 1})) said[event.row].add(event);
  EXPECT_EQ(said[0], alone(known[0], sampled(3), 2));
  EXPECT_EQ(said[1], alone(known[1], sampled(4), 2));
}

TEST_P(RowVerbs, ASnapshotGoesOnElsewhere) {
  const auto file =
      std::filesystem::temp_directory_path() / ("pianola_snapshot_" + std::to_string(getpid()));
  Engine engine = make_engine(1);
  const int row = begin_row(engine, 1, 90, sampled(3));
  const RowSnapshot snapshot = engine.snapshot(row);
  const std::vector<TokenId> known = history(engine, row);
  snapshot.save(file);
  const Said next = alone(known, sampled(3), 8);
  EXPECT_EQ(say(engine, row, 8), next);  // the row itself is as it was
  EngineOptions longer = engine_options(GetParam(), 2);
  longer.max_seq_len = 240;
  Engine other(tiny_model(GetParam().model), longer);
  begin_row(other, 2, 120, sampled(9));
  const int in_memory = begin_row(other, 0, 130, sampled(3));
  other.restore(in_memory, snapshot);
  EXPECT_EQ(other.status(in_memory), RowStatus::kIdle);
  EXPECT_EQ(history(other, in_memory), known);
  EXPECT_EQ(go_on(other, in_memory, 8), next);
  other.restore(in_memory, RowSnapshot::load(file));
  EXPECT_EQ(go_on(other, in_memory, 8), next);
  EXPECT_TRUE(std::filesystem::remove(file));
}

// Going back after a restore: what the snapshot holds of it, and no more.
TEST_P(RowVerbs, ARestoredRowGoesBackAsFarAsTheOneItWas) {
  Engine engine = make_engine(1);
  const int row = begin_row(engine, 1, 120, sampled(3));
  engine.drop_last(row, 3);
  const std::vector<TokenId> known = history(engine, row);
  const int rewind = engine.max_rewind(row);
  const RowSnapshot snapshot = engine.snapshot(row);
  engine.reset(row);
  engine.restore(row, snapshot);
  EXPECT_EQ(engine.max_rewind(row), rewind);
  engine.drop_last(row, rewind);
  std::vector<TokenId> shorter = known;
  shorter.resize(known.size() - static_cast<std::size_t>(rewind));
  if (shorter.empty()) {
    EXPECT_EQ(engine.length(row), 0);
    return;
  }
  engine.append(row, text_tokens(0, 0, 1));
  shorter.push_back(text_token(0, 0));
  EXPECT_EQ(say(engine, row, 6), alone(shorter, sampled(3), 6));
}

// With its last token, which is in no cache.
TEST_P(RowVerbs, ARowAtItsCapacityIsSavedAndRestored) {
  Engine engine = make_engine(2);
  const int row = engine.open_row(sampled(3));
  engine.append(row, text_tokens(1, 0, 150));
  say(engine, row, 1);
  EXPECT_EQ(engine.status(row), RowStatus::kLength);
  const std::vector<TokenId> known = history(engine, row);
  ASSERT_EQ(known.size(), 151U);
  const int other = engine.open_row(sampled(3));
  engine.restore(other, engine.snapshot(row));
  EXPECT_EQ(history(engine, other), known);
  EXPECT_EQ(engine.length(other), 150);
  expect_error(ErrorCode::kContextOverflow, "150", [&] { engine.append(other, {}); });
  engine.drop_last(other, 3);
  EXPECT_EQ(go_on(engine, other, 1), alone({known.begin(), known.begin() + 148}, sampled(3), 1));
}

// To compute the last token again is to go back by one: what was overwritten is still gone.
TEST_P(RowVerbs, GoingOnFromTheLastTokenBringsNothingBack) {
  EngineOptions options = engine_options(GetParam(), 1);
  options.logits = true;
  Engine engine(tiny_model(GetParam().model), options);
  for (int tokens = 60; tokens < 130; tokens += 5) {
    const int row = engine.open_row(sampled(1));
    for (int done = 0; done < tokens; done += 5) {
      engine.logits(row, text_tokens(1, done, 5));  // leaves nothing to compute
    }
    const int rewind = engine.max_rewind(row);
    engine.append(row, {});
    EXPECT_EQ(engine.length(row), tokens - 1);
    EXPECT_EQ(engine.max_rewind(row), rewind) << tokens;
    engine.drop_last(row, std::min(rewind, tokens - 1));
    std::vector<TokenId> known = history(engine, row);
    known.push_back(text_token(0, 0));
    engine.append(row, text_tokens(0, 0, 1));
    EXPECT_EQ(say(engine, row, 3), alone(known, sampled(1), 3)) << tokens;
    engine.close_row(row);
  }
}

TEST(Fork, TooFewSlotsOrBadOptionsChangeNothing) {
  Engine engine(tiny_model("llama/untied"), engine_options(stacks()[0], 3));
  const int row = engine.open_row(sampled(1));
  engine.append(row, text_tokens(1, 0, 30));
  say(engine, row, 2);
  const std::vector<TokenId> known = history(engine, row);
  EXPECT_TRUE(engine.fork(row, 3, {}).empty());
  for (const int count : {0, -1, 4, std::numeric_limits<int>::min()}) {
    expect_error(ErrorCode::kInvalidArgument, "expected 1 to 3",
                 [&] { engine.fork(row, count, {}); });
  }
  expect_error(ErrorCode::kInvalidArgument, "max_length",
               [&] { engine.fork(row, 2, {.max_length = 151}); });
  expect_error(ErrorCode::kInvalidArgument, "not open", [&] { engine.fork(1, 1, {}); });
  EXPECT_EQ(history(engine, row), known);
  EXPECT_EQ(engine.status(row), RowStatus::kRunning);
  EXPECT_EQ(engine.fork(row, 2, {}).size(), 2U);  // both places are still free
  EXPECT_TRUE(engine.fork(row, 1, {}).empty());
}

TEST(Swap, NeedsOpenRows) {
  Engine engine(tiny_model("llama/untied"), engine_options(stacks()[0], 2));
  const int row = engine.open_row({});
  for (const int bad : {1, 2, -1}) {
    expect_error(ErrorCode::kInvalidArgument, "not open", [&] { engine.swap(row, bad); });
    expect_error(ErrorCode::kInvalidArgument, "not open", [&] { engine.swap(bad, row); });
  }
}

}  // namespace
}  // namespace pianola
