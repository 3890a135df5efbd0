// Checkpoints of states: which lengths are kept, and that a row goes on from them to the bit.
#include <gtest/gtest.h>

#include "cache/rows.h"
#include "expect_error.h"
#include "pianola/engine.h"

namespace pianola {
namespace {

EngineOptions engine_options(int slots, int checkpoints, bool exact) {
  return {.backend = "cpu",
          .threads = 1,
          .max_seq_len = 150,
          .slots = slots,
          .chunk = 16,
          .rollback_depth = 4,
          .exact_rollback = exact,
          .checkpoints = checkpoints};
}

// Steps of 16 tokens, checkpoints of multiples of the rollback depth, 4, with 3 places.
class Checkpoints : public testing::TestWithParam<bool> {
 protected:
  static Engine make_engine(int places, int slots = 2) {
    const EngineOptions options = engine_options(slots, places, GetParam());
    return Engine(tiny_model("qwen3_5/hybrid"), options);
  }
  static int prompted(Engine& engine, int tokens) {
    const int row = engine.open_row(sampled(3));
    engine.append(row, text_tokens(1, 0, tokens));
    while (engine.length(row) < tokens) engine.step({&row, 1});
    return row;
  }
  // The lengths that can be kept, besides those of the last few tokens.
  static std::vector<int> kept_below(const Engine& engine, int row, int length) {
    std::vector<int> kept;
    for (int n = 1; n < length; ++n) {
      if (engine.keepable(row, n) == n) kept.push_back(n);
    }
    return kept;
  }
  static void expect_alone(Engine& engine, int row) {
    const std::vector<TokenId> known = history(engine, row);
    Engine fresh = make_engine(0, 1);
    const int alone = fresh.open_row(sampled(3));
    fresh.append(alone, known);
    EXPECT_EQ(say(engine, row, 4), say(fresh, alone, 4));
  }
};

INSTANTIATE_TEST_SUITE_P(Rollback, Checkpoints, testing::Bool(),
                         [](const auto& exact) { return exact.param ? "Exact" : "Compact"; });

// The newest is never dropped; of the others the one whose neighbours are closest, the first of
// equals. Before the first there is 0.
TEST_P(Checkpoints, WhenTheyAreFullTheClosestNeighboursLoseTheOneBetween) {
  const struct {
    int tokens;
    std::vector<int> kept;
  } cases[] = {{48, {16, 32}},     // and 48, which is within the last tokens
               {64, {32, 48}},     // 16 went: 32 - 0 and 48 - 16 are equal
               {80, {32, 64}},     // 48 went: 64 - 32 is less than 48 - 0
               {96, {32, 80}},     // 64 went: 80 - 32 is less than 64 - 0
               {112, {32, 96}},    // 80 went: 96 - 32 is less than 80 - 0
               {128, {32, 112}}};  // 96 went: 112 - 32 is less than 96 - 0
  for (const auto& c : cases) {
    Engine engine = make_engine(3);
    const int row = prompted(engine, c.tokens);
    EXPECT_EQ(kept_below(engine, row, c.tokens - 8), c.kept) << c.tokens;
  }
}

TEST_P(Checkpoints, OnePlaceHoldsTheNewestAndNoPlaceNone) {
  Engine one = make_engine(1);
  const int row = prompted(one, 96);
  for (int i = 0; i < 20; ++i) one.step();  // decoding takes none
  EXPECT_EQ(kept_below(one, row, 100), std::vector<int>{96});
  Engine none = make_engine(0);
  EXPECT_EQ(kept_below(none, prompted(none, 96), 88), std::vector<int>());
}

TEST_P(Checkpoints, ARowGoesOnFromOne) {
  Engine engine = make_engine(3);
  const int row = prompted(engine, 96);
  engine.keep_first(row, 80);
  EXPECT_EQ(engine.max_rewind(row), 0);
  EXPECT_EQ(engine.length(row), 80);
  expect_error(ErrorCode::kContextOverflow, "let go", [&] { engine.append(row, {}); });
  engine.append(row, text_tokens(2, 0, 3));
  expect_alone(engine, row);
}

TEST_P(Checkpoints, AndBackAgain) {
  Engine engine = make_engine(3);
  const int row = prompted(engine, 96);  // 32, 80, 96
  for (const int n : {80, 80, 32, 32}) {
    engine.keep_first(row, n);
    engine.append(row, text_tokens(2, n, 17));
    while (engine.length(row) < n + 17) engine.step();
    EXPECT_EQ(engine.keepable(row, n), n);
    expect_alone(engine, row);
  }
  engine.keep_first(row, 32);
  EXPECT_EQ(engine.keepable(row, 31), 0);
  expect_error(ErrorCode::kContextOverflow, "let go", [&] { engine.keep_first(row, 31); });
  EXPECT_EQ(engine.length(row), 32);
  engine.append(row, text_tokens(0, 0, 1));
  expect_alone(engine, row);
}

TEST_P(Checkpoints, ARowIsForkedAtOne) {
  Engine engine = make_engine(3, 3);
  const int row = prompted(engine, 96);  // 32, 80, 96
  expect_error(ErrorCode::kContextOverflow, "let go", [&] { engine.fork(row, 1, sampled(3), 79); });
  expect_error(ErrorCode::kContextOverflow, "cannot keep",
               [&] { engine.fork(row, 1, sampled(3), 98); });  // it holds 97, one not computed
  EXPECT_EQ(engine.length(row), 96);
  std::vector<int> forks = engine.fork(row, 2, sampled(3), 80);  // every free slot
  ASSERT_EQ(forks.size(), 2U);
  EXPECT_TRUE(engine.fork(row, 1, sampled(3), 80).empty());
  for (const int fork : forks) {
    EXPECT_EQ(engine.length(fork), 80);
    EXPECT_EQ(engine.max_rewind(fork), 0);
    EXPECT_TRUE(std::ranges::equal(engine.history(fork), engine.history(row).first(80)));
    engine.append(fork, text_tokens(2, fork, 7));
  }
  engine.close_row(row);           // its checkpoints go, and the forks do not mind
  expect_alone(engine, forks[0]);  // the other one draws as choice 1
  EXPECT_EQ(engine.keepable(forks[0], 80), 0);
  expect_error(ErrorCode::kContextOverflow, "let go",
               [&] { engine.fork(forks[0], 1, sampled(3), 32); });
  const std::vector<int> empty = engine.fork(forks[0], 1, sampled(3), 0);
  ASSERT_EQ(empty.size(), 1U);
  EXPECT_EQ(engine.length(empty[0]), 0);
  engine.append(empty[0], text_tokens(2, 0, 20));
  expect_alone(engine, empty[0]);
}

TEST_P(Checkpoints, EndWithTheTokensTheyAreOf) {
  Engine engine = make_engine(3);
  const int row = prompted(engine, 96);
  engine.keep_first(row, 80);
  EXPECT_EQ(engine.keepable(row, 80), 80);
  engine.append(row, text_tokens(2, 0, 20));  // 96 again, and of other tokens
  while (engine.length(row) < 112) engine.step();
  EXPECT_EQ(engine.keepable(row, 99), 96);
  engine.keep_first(row, 96);
  engine.append(row, text_tokens(2, 90, 5));
  expect_alone(engine, row);
  engine.reset(row);
  engine.append(row, text_tokens(2, 0, 100));
  while (engine.length(row) < 10) engine.step();
  EXPECT_EQ(engine.keepable(row, 90), 90);  // queued, and nothing is lost
  engine.reset(row);
  engine.append(row, text_tokens(2, 0, 12));
  while (engine.length(row) < 12) engine.step();
  EXPECT_EQ(engine.keepable(row, 7), 0);  // none of the old ones
}

TEST_P(Checkpoints, AreSwappedWithTheirRowsAndNotForked) {
  Engine engine = make_engine(3, 3);
  const int a = prompted(engine, 96);
  const int b = prompted(engine, 48);
  engine.swap(a, b);
  EXPECT_EQ(kept_below(engine, b, 88), (std::vector<int>{32, 80}));
  EXPECT_EQ(kept_below(engine, a, 40), (std::vector<int>{16, 32}));
  const std::vector<int> forks = engine.fork(b, 1, sampled(3));
  ASSERT_EQ(forks.size(), 1U);
  EXPECT_EQ(engine.keepable(forks[0], 88), 0);
  engine.keep_first(b, 32);
  engine.keep_first(a, 16);
  for (const int row : {a, b}) {
    engine.append(row, text_tokens(2, row, 7));
    expect_alone(engine, row);
  }
}

}  // namespace
}  // namespace pianola
