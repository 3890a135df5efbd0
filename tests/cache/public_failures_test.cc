// Faults that users of other engines have reported, replayed here: each test is named after its row
// in docs/public-failures.md, which says where the others are tested.
#include <gtest/gtest.h>
#include <malloc.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <set>

#include "backend_here.h"
#include "cache/rows.h"
#include "engine/engine_audit.h"
#include "engine/slot_regions.h"
#include "engine_test_access.h"
#include "expect_error.h"
#include "pianola/engine.h"
#include "sanitized.h"

namespace pianola {
namespace {

constexpr const char* kFull = "llama/untied";
constexpr const char* kWindow = "mistral/window";  // 16 positions in every layer
constexpr const char* kMixed = "gemma3/mixed";     // two layers with a window of 16, one without
constexpr const char* kHybrid = "qwen3_5/hybrid";  // three layers of linear attention, one full
constexpr const char* kExperts = "gpt_oss/mixed";  // a mixture of experts, windows and sinks

class PublicFailures : public testing::TestWithParam<const char*> {  // a backend
 protected:
  void SetUp() override {
    const std::string& missing = missing_backend(GetParam());
    if (!missing.empty()) GTEST_SKIP() << missing;
  }
  // Bits are compared between any two ways to the same tokens.
  static EngineOptions options() {
    return {.backend = GetParam(),
            .threads = 1,
            .max_seq_len = 160,
            .chunk = 32,
            .rollback_depth = 8,
            .logits = true,
            .batch_invariant = true};
  }
  static EngineOptions with(const std::function<void(EngineOptions&)>& change) {
    EngineOptions o = options();
    change(o);
    return o;
  }
  static EngineOptions with_slots(int slots) {
    return with([slots](EngineOptions& o) { o.slots = slots; });
  }
  static Engine make_engine(const std::string& model, const EngineOptions& o = options()) {
    return Engine(tiny_model(model), o);
  }
  // What a new engine says after these tokens.
  static Said alone(const std::string& model, const std::vector<TokenId>& tokens,
                    const RowOptions& row_options, int count, EngineOptions o = options()) {
    o.slots = 1;
    Engine engine = make_engine(model, o);
    const int row = engine.open_row(row_options);
    engine.append(row, tokens);
    return say(engine, row, count);
  }
  // Computes tokens of an idle row; their number may be beyond a chunk.
  static void feed(Engine& engine, int row, const std::vector<TokenId>& tokens) {
    const auto chunk = static_cast<std::size_t>(engine.logits_chunk());
    for (std::size_t done = 0; done < tokens.size(); done += chunk) {
      engine.logits(row, std::span(tokens).subspan(done, std::min(chunk, tokens.size() - done)));
    }
  }
  // A row of `model` that holds the first tokens of a text and has nothing queued.
  static int fed(Engine& engine, int text, int count) {
    const int row = engine.open_row(sampled(3));
    feed(engine, row, text_tokens(text, 0, count));
    return row;
  }
  // The logits after all that a row holds and one more token.
  static std::vector<float> next_logits(Engine& engine, int row, TokenId token) {
    const auto logits = engine.logits(row, {&token, 1});
    return {logits.begin(), logits.end()};
  }
  // And of a new engine.
  static std::vector<float> fresh_logits(const std::string& model,
                                         const std::vector<TokenId>& tokens, TokenId token,
                                         EngineOptions o = options()) {
    o.slots = 1;
    o.chunk = 64;
    Engine engine = make_engine(model, o);
    const int row = engine.open_row({});
    feed(engine, row, tokens);
    return next_logits(engine, row, token);
  }
  static void expect_same_addresses(const Engine& engine, const EngineCounters& before) {
    const EngineCounters now = engine.counters();
    EXPECT_EQ(now.address_hash, before.address_hash);
    EXPECT_EQ(now.plans, before.plans);
    EXPECT_EQ(now.captures, before.captures);
  }
  // All bytes of a slot.
  static std::vector<std::byte> slot_bytes(Engine& engine, int slot) {
    auto& e = EngineTestAccess::impl(engine);
    std::vector<std::byte> bytes;
    for (const SlotRegion& region : slot_regions(e.caches, e.states, engine.max_seq_len(), true)) {
      const auto part = EngineTestAccess::read(engine, region.of(slot), region.bytes);
      bytes.insert(bytes.end(), part.begin(), part.end());
    }
    return bytes;
  }
  // Proposes `count` tokens of a text and keeps the first `kept` of them.
  static void propose(Engine& engine, int row, int text, int count, int kept) {
    const int length = engine.length(row);
    feed(engine, row, text_tokens(text, length, count));
    engine.keep_first(row, length + kept);
  }
};

// CMake says which backends this program tests: those of any machine, or the one of a GPU.
std::vector<const char*> backends() {
  if (std::string_view(PIANOLA_TEST_BACKENDS) == "cuda") return {"cuda"};
  return {"cpu", "reference"};
}

INSTANTIATE_TEST_SUITE_P(Backends, PublicFailures, testing::ValuesIn(backends()),
                         [](const auto& backend) { return std::string(backend.param); });

// --- Values frozen at capture, and random numbers

TEST_P(PublicFailures, B004Int8ReadsEveryBlockThatThereIs) {
  const EngineOptions o = with([](EngineOptions& e) {
    e.cache_type = "int8";
    e.max_seq_len = 640;
  });
  Engine engine = make_engine(kFull, o);
  engine.close_row(fed(engine, 0, 40));  // one block
  const int row = fed(engine, 1, 570);   // nine
  std::vector<TokenId> tokens = text_tokens(1, 0, 570);
  const std::vector<float> logits = next_logits(engine, row, 5);
  EXPECT_EQ(logits, fresh_logits(kFull, tokens, 5, o));
  for (const std::size_t changed : {3U, 64U * 4U, 64U * 8U + 3U}) {  // its block counts
    std::vector<TokenId> other = tokens;
    other[changed] = (other[changed] + 1) % 250;
    EXPECT_NE(logits, fresh_logits(kFull, other, 5, o)) << changed;
  }
}

TEST_P(PublicFailures, B005OneProgramForEveryPosition) {
  const EngineOptions o = with([](EngineOptions& e) { e.max_seq_len = 600; });
  Engine engine = make_engine(kFull, o);
  const EngineCounters before = engine.counters();
  const int row = engine.open_row(sampled(1));
  engine.append(row, text_tokens(1, 0, 4));
  while (engine.has_work()) engine.run(1000);
  EXPECT_EQ(engine.length(row), 599);
  expect_same_addresses(engine, before);
}

// Logits as flat as they get: then draws are uniform over 256 tokens. 99.9 % of honest generators
// stay below the limits.
TEST_P(PublicFailures, B007ReplaysDrawDifferentNumbers) {
  RowOptions o = sampled(5);
  o.sampling.temperature = 100;
  EngineOptions long_rows = with_slots(2);
  long_rows.max_seq_len = 1100;
  Engine engine = make_engine(kFull, long_rows);
  const int vocab = engine.vocab_size();
  std::vector<TokenId> drawn[2];
  for (std::vector<TokenId>& draws : drawn) {
    const int row = engine.open_row(o);
    engine.append(row, text_tokens(1, 0, 1));
    draws = say(engine, row, 1024).tokens;
  }
  EXPECT_EQ(drawn[0], drawn[1]);  // the same seed, in another slot
  std::vector<int> counts(16);
  int repeats = 0;
  for (std::size_t i = 0; i < drawn[0].size(); ++i) {
    ++counts[static_cast<std::size_t>(drawn[0][i] * 16 / vocab)];
    repeats += i > 0 && drawn[0][i] == drawn[0][i - 1] ? 1 : 0;
  }
  double chi_squared = 0;
  for (const int count : counts) chi_squared += (count - 64.0) * (count - 64.0) / 64.0;
  EXPECT_LT(chi_squared, 37.7);  // 15 degrees of freedom
  EXPECT_LE(repeats, 12);        // 4 are expected
}

TEST_P(PublicFailures, B008ASeedCountsFromTheNextToken) {
  Engine engine = make_engine(kFull);
  const EngineCounters before = engine.counters();
  const int row = engine.open_row(sampled(1));
  engine.append(row, text_tokens(1, 0, 9));
  say(engine, row, 10);
  for (const std::uint64_t seed : {2U, 3U, 1U}) {
    const std::vector<TokenId> known = history(engine, row);
    engine.configure_row(row, sampled(seed));
    EXPECT_EQ(go_on(engine, row, 6), alone(kFull, known, sampled(seed), 6)) << seed;
  }
  expect_same_addresses(engine, before);
}

// --- Padding, dummy slots, unused lanes

TEST_P(PublicFailures, B020PaddedLanesLeaveStatesAlone) {
  for (const bool exact : {false, true}) {
    EngineOptions o = with_slots(4);
    o.exact_rollback = exact;
    Engine engine = make_engine(kHybrid, o);
    for (int row = 0; row < 3; ++row) {  // in the bucket of four
      ASSERT_EQ(engine.open_row(sampled(1)), row);
      engine.append(row, text_tokens(row, 0, 10));
    }
    const std::vector<std::byte> unused = slot_bytes(engine, 3);
    for (int i = 0; i < 20; ++i) engine.step();
    EXPECT_EQ(slot_bytes(engine, 3), unused);
    Engine single =
        make_engine(kHybrid, with([exact](EngineOptions& e) { e.exact_rollback = exact; }));
    const int alone = single.open_row(sampled(1));
    single.append(alone, text_tokens(0, 0, 10));
    for (int i = 0; i < 20; ++i) single.step();
    EXPECT_EQ(slot_bytes(engine, 0), slot_bytes(single, alone)) << "exact " << exact;
  }
}

TEST_P(PublicFailures, B021PaddingMakesNoNanWithFp8AndExperts) {
  EngineOptions o = with_slots(8);
  o.cache_type = "fp8";
  Engine engine = make_engine(kExperts, o);
  EngineAudit::poison(engine);
  std::vector<Said> said(8);
  for (int row = 0; row < 5; ++row) {
    ASSERT_EQ(engine.open_row(sampled(1)), row);
    engine.append(row, text_tokens(row, 0, 3 + 5 * row));
  }
  for (int i = 0; i < 12; ++i) {
    for (const TokenEvent& event : engine.step()) {
      EXPECT_TRUE(std::isfinite(event.logprob));
      said[static_cast<std::size_t>(event.row)].add(event);
    }
  }
  for (int row = 0; row < 5; ++row) {
    const Said& found = said[static_cast<std::size_t>(row)];
    EXPECT_EQ(found, alone(kExperts, text_tokens(row, 0, 3 + 5 * row), sampled(1),
                           static_cast<int>(found.tokens.size()), o))
        << row;
  }
}

// Padding needs no slot: it works when every slot is taken.
TEST_P(PublicFailures, B024PaddingTakesNoSlot) {
  Engine engine = make_engine(kHybrid, with_slots(3));
  for (int row = 0; row < 3; ++row) {
    ASSERT_EQ(engine.open_row(sampled(1)), row);
    engine.append(row, text_tokens(row, 0, 6));
  }
  EXPECT_EQ(engine.open_row({}), -1);
  std::vector<Said> said(3);
  while (said[0].tokens.size() < 10) {
    for (const TokenEvent& event : engine.step()) {
      said[static_cast<std::size_t>(event.row)].add(event);
    }
  }
  for (int row = 0; row < 3; ++row) {
    EXPECT_EQ(said[static_cast<std::size_t>(row)],
              alone(kHybrid, text_tokens(row, 0, 6), sampled(1), 10));
  }
}

// One replay a round, at and on both sides of each bucket's size.
TEST_P(PublicFailures, B025ABucketAtItsLimitIsOneStep) {
  Engine engine = make_engine(kFull, with_slots(9));
  for (int rows = 1; rows <= 9; ++rows) {
    const int row = engine.open_row(sampled(1));
    engine.append(row, text_tokens(rows, 0, 4));
    say(engine, row, 1);
    const std::uint64_t steps = engine.counters().steps;
    EXPECT_EQ(engine.step().size(), static_cast<std::size_t>(rows));
    EXPECT_EQ(engine.counters().steps, steps + 1);
  }
}

TEST_P(PublicFailures, B029ABatchShrinksFrom32To12) {
  Engine engine = make_engine(kFull, with_slots(32));
  std::vector<Said> said(32);
  const auto limit = [](int row) { return row < 12 ? 40 : 6 + row * 7 % 19; };
  for (int row = 0; row < 32; ++row) {
    RowOptions o = sampled(static_cast<std::uint64_t>(row));
    o.max_length = limit(row);
    ASSERT_EQ(engine.open_row(o), row);
    engine.append(row, text_tokens(row, 0, 5));
  }
  while (engine.has_work()) {
    for (const TokenEvent& event : engine.step()) {
      said[static_cast<std::size_t>(event.row)].add(event);
    }
  }
  for (int row = 0; row < 32; ++row) {
    EXPECT_EQ(said[static_cast<std::size_t>(row)],
              alone(kFull, text_tokens(row, 0, 5), sampled(static_cast<std::uint64_t>(row)),
                    limit(row) - 5))
        << row;
  }
}

TEST_P(PublicFailures, B030ActiveSlotsChangeFromStepToStep) {
  Engine engine = make_engine(kHybrid, with_slots(4));
  const EngineCounters before = engine.counters();
  std::vector<Said> said(4);
  for (int row = 0; row < 4; ++row) {
    engine.append(engine.open_row(sampled(1)), text_tokens(row, 0, 5 + row));
  }
  for (int i = 0; i < 60; ++i) {
    std::vector<int> active;
    for (int row = 0; row < 4; ++row) {
      if ((1 + i * 7 % 15) >> row & 1) active.push_back(row);
    }
    for (const TokenEvent& event : engine.step(active)) {
      said[static_cast<std::size_t>(event.row)].add(event);
    }
  }
  for (int row = 0; row < 4; ++row) {
    const Said& found = said[static_cast<std::size_t>(row)];
    EXPECT_GT(found.tokens.size(), 20U);
    EXPECT_EQ(found, alone(kHybrid, text_tokens(row, 0, 5 + row), sampled(1),
                           static_cast<int>(found.tokens.size())));
  }
  expect_same_addresses(engine, before);
}

// Eight rows, then three of them, then eight again: nothing is left of those that went (B032), and
// nothing of the larger batch (B138).
TEST_P(PublicFailures, B032B138ASmallerBatchSeesNothingOfALargerOne) {
  Engine engine = make_engine(kHybrid, with_slots(8));
  std::vector<int> rows;
  const auto open = [&](int text) {
    rows.push_back(engine.open_row(sampled(1)));
    engine.append(rows.back(), text_tokens(text, 0, 12));
  };
  const auto expect_next = [&] {
    std::vector<std::vector<TokenId>> known;
    for (const int row : rows) known.push_back(history(engine, row));
    std::vector<Said> said(8);
    for (int i = 0; i < 6; ++i) {
      for (const TokenEvent& event : engine.step()) {
        said[static_cast<std::size_t>(event.row)].add(event);
      }
    }
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const Said& found = said[static_cast<std::size_t>(rows[i])];
      EXPECT_EQ(found, alone(kHybrid, known[i], sampled(1), static_cast<int>(found.tokens.size())));
    }
  };
  for (int text = 0; text < 8; ++text) open(text);
  expect_next();
  while (rows.size() > 3) {
    engine.close_row(rows[rows.size() / 2]);
    rows.erase(rows.begin() + static_cast<std::ptrdiff_t>(rows.size() / 2));
  }
  expect_next();
  for (int text = 8; text < 13; ++text) open(text);
  expect_next();
}

// --- States that are not undone

TEST_P(PublicFailures, B041AHundredRewindsMoveNothing) {
  for (const char* model : {kFull, kWindow, kHybrid}) {
    Engine engine = make_engine(model);
    const EngineCounters before = engine.counters();
    const int row = fed(engine, 1, 40);
    for (int i = 0; i < 100; ++i) {
      feed(engine, row, text_tokens(i, 0, 3));
      engine.keep_first(row, 40);
    }
    expect_same_addresses(engine, before);
    EXPECT_EQ(next_logits(engine, row, 5), fresh_logits(model, text_tokens(1, 0, 40), 5)) << model;
  }
}

// Proposals of which 3 are kept, then a step without any, then 2: as a run that proposes nothing.
TEST_P(PublicFailures, B043StatesFollowWhatIsAccepted) {
  for (const bool exact : {false, true}) {
    const EngineOptions o = with([exact](EngineOptions& e) { e.exact_rollback = exact; });
    Engine engine = make_engine(kHybrid, o);
    const int row = fed(engine, 1, 21);
    for (const int kept : {3, 0, 2, 3, 0, 2, 4, 1}) {
      if (kept > 0) {
        propose(engine, row, 1, 4, kept);
      } else {
        feed(engine, row, text_tokens(1, engine.length(row), 1));
      }
      Engine plain = make_engine(kHybrid, o);
      const std::vector<TokenId> known = history(engine, row);
      EXPECT_EQ(known, text_tokens(1, 0, static_cast<int>(known.size())));
      const int other = plain.open_row(sampled(3));
      for (const TokenId token : known) plain.logits(other, {&token, 1});
      EXPECT_EQ(next_logits(engine, row, 9), next_logits(plain, other, 9));
      engine.drop_last(row, 1);
    }
  }
}

TEST_P(PublicFailures, B045ASnapshotAfterARejectionGoesOn) {
  Engine engine = make_engine(kHybrid, with_slots(2));
  const int row = fed(engine, 1, 37);
  propose(engine, row, 1, 6, 2);
  const int other = engine.open_row(sampled(3));
  engine.restore(other, engine.snapshot(row));
  EXPECT_EQ(next_logits(engine, other, 9), fresh_logits(kHybrid, text_tokens(1, 0, 39), 9));
  EXPECT_EQ(next_logits(engine, row, 9), fresh_logits(kHybrid, text_tokens(1, 0, 39), 9));
}

TEST_P(PublicFailures, B046FiftyRejectionsLeaveThePlainState) {
  for (const bool exact : {false, true}) {
    const EngineOptions o = with([exact](EngineOptions& e) { e.exact_rollback = exact; });
    Engine engine = make_engine(kHybrid, o);
    const int row = fed(engine, 1, 19);
    for (int i = 0; i < 50; ++i) {
      propose(engine, row, 7 + i, 5, 0);
      feed(engine, row, text_tokens(1, engine.length(row), 1));
    }
    EXPECT_EQ(next_logits(engine, row, 9), fresh_logits(kHybrid, text_tokens(1, 0, 69), 9, o));
  }
}

TEST_P(PublicFailures, B048ARewindBeyondTheDepthIsRefusedAndChangesNothing) {
  for (const bool exact : {false, true}) {
    Engine engine = make_engine(kHybrid, with([exact](EngineOptions& e) {
                                  e.exact_rollback = exact;
                                  e.rollback_depth = 2;
                                  e.checkpoints = 0;
                                }));
    const int row = fed(engine, 1, 31);
    const std::vector<std::byte> bytes = slot_bytes(engine, row);
    expect_error(ErrorCode::kContextOverflow, "let go", [&] { engine.drop_last(row, 5); });
    EXPECT_EQ(engine.length(row), 31);
    EXPECT_EQ(slot_bytes(engine, row), bytes);
    EXPECT_EQ(next_logits(engine, row, 9), fresh_logits(kHybrid, text_tokens(1, 0, 31), 9));
  }
}

// An edit near the end of a long prompt computes what follows the last checkpoint before it.
TEST_P(PublicFailures, B049AnEditComputesFromTheCheckpointOn) {
  constexpr int kPrompt = 1000;
  const EngineOptions o = with([](EngineOptions& e) {
    e.max_seq_len = 1100;
    e.chunk = 64;
  });
  Engine engine = make_engine(kHybrid, o);
  const int row = engine.open_row(sampled(3));
  engine.append(row, text_tokens(1, 0, kPrompt));
  say(engine, row, 30);
  const int kept = engine.keepable(row, kPrompt - 8);
  EXPECT_GE(kept, kPrompt - 8 - 64 - 8);  // no further than a chunk and an interval
  engine.keep_first(row, kept);
  std::vector<TokenId> edited = text_tokens(1, 0, kPrompt - 8);
  for (const TokenId token : text_tokens(2, 0, 8)) edited.push_back(token);
  const std::uint64_t tokens = engine.counters().tokens;
  engine.append(row, std::span(edited).subspan(static_cast<std::size_t>(kept)));
  const Said said = say(engine, row, 1);
  EXPECT_EQ(engine.counters().tokens - tokens, static_cast<std::uint64_t>(kPrompt - kept));
  EXPECT_EQ(said, alone(kHybrid, edited, sampled(3), 1, o));
}

TEST_P(PublicFailures, B052OddAndEvenNumbersOfStepsAreUndone) {
  for (const bool exact : {false, true}) {
    const EngineOptions o = with([exact](EngineOptions& e) { e.exact_rollback = exact; });
    Engine engine = make_engine(kHybrid, o);
    for (int steps = 1; steps <= 8; ++steps) {
      const int row = fed(engine, steps, 20 + steps);
      for (int i = 0; i < steps; ++i) feed(engine, row, text_tokens(99, i, 1));
      engine.drop_last(row, steps);
      EXPECT_EQ(next_logits(engine, row, 9),
                fresh_logits(kHybrid, text_tokens(steps, 0, 20 + steps), 9, o))
          << steps;
      engine.close_row(row);
    }
  }
}

// Bursts of 5 from inside the window to far beyond it.
TEST_P(PublicFailures, B054BurstsCrossTheWindow) {
  Engine engine = make_engine(kWindow);
  const int row = fed(engine, 1, 8);
  while (engine.length(row) < 100) {
    propose(engine, row, 1, 5, 2);
    const int length = engine.length(row);
    if (length % 4 != 0 && (length < 14 || length > 20)) continue;
    EXPECT_EQ(next_logits(engine, row, 9), fresh_logits(kWindow, text_tokens(1, 0, length), 9))
        << length;
    engine.drop_last(row, 1);
  }
}

// What the proposals have pushed out of the window comes back with them.
TEST_P(PublicFailures, B056AWindowGoesBackAfterItHasForgotten) {
  for (const int length : {20, 63, 64, 65, 130}) {
    for (int kept = 0; kept <= 5; ++kept) {
      Engine engine = make_engine(kWindow);
      const int row = fed(engine, 1, length);
      propose(engine, row, 1, 5, kept);
      EXPECT_EQ(next_logits(engine, row, 9),
                fresh_logits(kWindow, text_tokens(1, 0, length + kept), 9))
          << length << " " << kept;
    }
  }
}

TEST_P(PublicFailures, B057RollbackIsDeclaredAtLoad) {
  for (const int depth : {0, -1}) {
    expect_error(ErrorCode::kInvalidArgument, "rollback_depth", [&] {
      make_engine(kHybrid, with([depth](EngineOptions& e) { e.rollback_depth = depth; }));
    });
  }
}

TEST_P(PublicFailures, B058AWindowForgetsWhenTokensComeInThrees) {
  const auto bytes = [](int max_seq_len) {
    EngineOptions o = options();
    o.max_seq_len = max_seq_len;
    return Engine::plan(*tiny_model(kWindow), o).cache_per_slot;
  };
  EXPECT_EQ(bytes(128), bytes(16384));
  Engine engine = make_engine(kWindow);
  const int row = engine.open_row(sampled(3));
  for (int length = 0; length < 150; length += 3) feed(engine, row, text_tokens(1, length, 3));
  EXPECT_EQ(next_logits(engine, row, 9), fresh_logits(kWindow, text_tokens(1, 0, 150), 9));
}

TEST_P(PublicFailures, B060LogitsAfterARewindAreThoseOfWhatIsKept) {
  for (const char* model : {kFull, kMixed, kHybrid}) {
    Engine engine = make_engine(model);
    const int row = fed(engine, 1, 30);
    feed(engine, row, text_tokens(2, 0, 10));
    engine.drop_last(row, 5);
    std::vector<TokenId> known = text_tokens(1, 0, 30);
    for (const TokenId token : text_tokens(2, 0, 4)) known.push_back(token);
    const TokenId last = text_token(2, 4);
    EXPECT_EQ(history(engine, row).back(), last);
    engine.drop_last(row, 1);
    EXPECT_EQ(next_logits(engine, row, last), fresh_logits(model, known, last)) << model;
  }
}

TEST_P(PublicFailures, B062KeepAndDropAreTwoVerbsWithBounds) {
  Engine engine = make_engine(kFull);
  const auto row_of_three = [&] { return fed(engine, 1, 3); };
  int row = row_of_three();
  engine.drop_last(row, 0);
  EXPECT_EQ(engine.length(row), 3);
  expect_error(ErrorCode::kContextOverflow, "drop the last 5", [&] { engine.drop_last(row, 5); });
  expect_error(ErrorCode::kContextOverflow, "keep the first 9", [&] { engine.keep_first(row, 9); });
  EXPECT_EQ(history(engine, row), text_tokens(1, 0, 3));
  EXPECT_EQ(next_logits(engine, row, 9), fresh_logits(kFull, text_tokens(1, 0, 3), 9));
  engine.close_row(row);
  row = row_of_three();
  engine.keep_first(row, 0);
  EXPECT_EQ(engine.length(row), 0);
  feed(engine, row, text_tokens(2, 0, 2));
  EXPECT_EQ(next_logits(engine, row, 9), fresh_logits(kFull, text_tokens(2, 0, 2), 9));
}

// Kept states and kept inputs: the same answers, and the bytes of each are known before loading.
TEST_P(PublicFailures, B065B145BothKindsOfRollbackAgreeAndSayWhatTheyTake) {
  EngineOptions inputs = with_slots(8);
  EngineOptions states = inputs;
  states.exact_rollback = true;
  const auto model = tiny_model(kHybrid);
  EXPECT_LT(Engine::plan(*model, inputs).cache_per_slot,
            Engine::plan(*model, states).cache_per_slot);
  Engine one = make_engine(kHybrid, inputs);
  Engine other = make_engine(kHybrid, states);
  EXPECT_EQ(one.memory().cache_per_slot, Engine::plan(*model, inputs).cache_per_slot);
  for (int row = 0; row < 8; ++row) {
    for (Engine* engine : {&one, &other}) {
      ASSERT_EQ(fed(*engine, row, 12 + row), row);
      propose(*engine, row, row, 8, row % 4);
    }
    EXPECT_EQ(next_logits(one, row, 9), next_logits(other, row, 9)) << row;
  }
}

// Four rows, each of which accepts another number of proposals in every round.
TEST_P(PublicFailures, B068RowsAcceptDifferentNumbers) {
  for (const char* model : {kFull, kMixed, kHybrid}) {
    Engine engine = make_engine(model, with_slots(4));
    for (int row = 0; row < 4; ++row) ASSERT_EQ(fed(engine, row, 10 + row), row);
    for (int round = 0; round < 8; ++round) {
      int lengths[4];
      for (int row = 0; row < 4; ++row) {  // in one step, with a token sampled behind them
        lengths[row] = engine.length(row);
        engine.append(row, text_tokens(row, lengths[row], 5));
      }
      EXPECT_EQ(engine.step().size(), 4U);
      for (int row = 0; row < 4; ++row) {
        engine.keep_first(row, lengths[row] + (row + round * 3) % 6);
      }
    }
    for (int row = 0; row < 4; ++row) {
      const std::vector<TokenId> known = history(engine, row);
      EXPECT_EQ(known, text_tokens(row, 0, static_cast<int>(known.size())));
      EXPECT_EQ(next_logits(engine, row, 9), fresh_logits(model, known, 9)) << model << row;
    }
  }
}

TEST_P(PublicFailures, B070AllAcceptedLeavesNoHole) {
  for (const char* model : {kFull, kHybrid}) {
    Engine engine = make_engine(model, with_slots(2));
    const int row = fed(engine, 1, 20);
    propose(engine, row, 1, 5, 5);
    feed(engine, row, text_tokens(1, 25, 1));
    const int plain = engine.open_row(sampled(3));
    for (const TokenId token : text_tokens(1, 0, 26)) engine.logits(plain, {&token, 1});
    auto& e = EngineTestAccess::impl(engine);
    for (std::size_t layer = 0; layer < e.caches.size(); ++layer) {
      EXPECT_EQ(EngineTestAccess::keys(engine, static_cast<int>(layer), row),
                EngineTestAccess::keys(engine, static_cast<int>(layer), plain));
      EXPECT_EQ(EngineTestAccess::values(engine, static_cast<int>(layer), row),
                EngineTestAccess::values(engine, static_cast<int>(layer), plain));
    }
    EXPECT_EQ(next_logits(engine, row, 9), next_logits(engine, plain, 9)) << model;
  }
}

// --- Reuse, positions and windows

TEST_P(PublicFailures, B101ASecondTurnIsOneLongRun) {
  for (const char* model : {kFull, kMixed, kHybrid}) {
    Engine engine = make_engine(model);
    const int row = engine.open_row(sampled(3));
    engine.append(row, text_tokens(1, 0, 10));
    say(engine, row, 5);
    engine.append(row, text_tokens(2, 0, 7));
    const std::vector<TokenId> known = history(engine, row);
    EXPECT_EQ(known.size(), 22U);
    EXPECT_EQ(say(engine, row, 5), alone(model, known, sampled(3), 5)) << model;
  }
}

TEST_P(PublicFailures, B102PromptsThatEndAtTheWindowsEdge) {
  for (const int prompt : {14, 15, 16, 17, 31, 32, 33}) {
    Engine engine = make_engine(kWindow);
    const int row = fed(engine, 1, prompt);
    for (int i = 0; i < 3; ++i) {
      const int length = prompt + i;
      EXPECT_EQ(next_logits(engine, row, text_token(1, length)),
                fresh_logits(kWindow, text_tokens(1, 0, length), text_token(1, length)))
          << prompt << " + " << i;
    }
  }
}

TEST_P(PublicFailures, B131OverflowIsRefusedAndTheNextRequestWorks) {
  for (const char* model : {kMixed, kHybrid}) {
    const EngineOptions o = with([](EngineOptions& e) { e.max_seq_len = 16; });
    Engine engine = make_engine(model, o);
    const int row = engine.open_row(sampled(3));
    expect_error(ErrorCode::kContextOverflow, "16",
                 [&] { engine.append(row, text_tokens(1, 0, 17)); });
    EXPECT_TRUE(engine.healthy());
    EXPECT_FALSE(engine.has_work());
    engine.append(row, text_tokens(2, 0, 9));
    EXPECT_EQ(say(engine, row, 4), alone(model, text_tokens(2, 0, 9), sampled(3), 4)) << model;
  }
}

// A row that runs into its capacity stops there, and its neighbour's bytes are what they were.
TEST_P(PublicFailures, B132ALongAnswerStopsAtTheCapacity) {
  for (const char* model : {kFull, kHybrid}) {
    EngineOptions o = with_slots(3);
    o.max_seq_len = 32;
    Engine engine = make_engine(model, o);
    ASSERT_EQ(engine.open_row({}), 0);
    const int row = engine.open_row(sampled(3));
    const std::vector<std::byte> before[2] = {slot_bytes(engine, 0), slot_bytes(engine, 2)};
    engine.append(row, text_tokens(1, 0, 20));
    for (int i = 0; i < 40; ++i) engine.run(1 + i % 3);
    EXPECT_EQ(engine.status(row), RowStatus::kLength);
    EXPECT_EQ(engine.history(row).size(), 32U);
    EXPECT_EQ(slot_bytes(engine, 0), before[0]);
    EXPECT_EQ(slot_bytes(engine, 2), before[1]);
  }
}

TEST_P(PublicFailures, B133TheCapacityIsTheOneThatWasAskedFor) {
  Engine engine = make_engine(kFull, with([](EngineOptions& e) { e.max_seq_len = 2048; }));
  EXPECT_EQ(engine.max_seq_len(), 2048);
  EXPECT_EQ(engine.memory().max_seq_len, 2048);
  const EngineCounters before = engine.counters();
  const int row = engine.open_row(sampled(3));
  engine.append(row, text_tokens(1, 0, 32));
  say(engine, row, 16);
  engine.reset(row);
  engine.append(row, text_tokens(1, 0, 500));
  say(engine, row, 16);
  expect_same_addresses(engine, before);
}

TEST_P(PublicFailures, B148TwentyRoundsOfAppendAndRewind) {
  for (const char* model : {kFull, kMixed, kHybrid}) {
    Engine engine = make_engine(model);
    const EngineCounters before = engine.counters();
    const int row = fed(engine, 1, 10);
    for (int round = 0; round < 20; ++round) {
      feed(engine, row, text_tokens(50 + round, 0, 1 + round % 8));
      engine.drop_last(row, 1 + round % 8);
      feed(engine, row, text_tokens(1, engine.length(row), 1 + round % 3));
      const int length = engine.length(row);
      EXPECT_EQ(next_logits(engine, row, 9), fresh_logits(model, text_tokens(1, 0, length), 9))
          << model << " " << round;
      engine.drop_last(row, 1);
    }
    expect_same_addresses(engine, before);
  }
}

// --- Re-capture, leaks, and cost

// Chunks of 16, prompts of 5 to 60 tokens, and a second call after the first: all is recorded at
// load.
TEST_P(PublicFailures, B160B161NothingIsRecordedAfterLoading) {
  Engine engine = make_engine(kFull, with([](EngineOptions& e) { e.chunk = 16; }));
  const EngineCounters before = engine.counters();
  for (int prompt = 5; prompt <= 64; prompt += prompt < 60 ? 5 : 4) {
    for (int call = 0; call < 2; ++call) {
      const int row = engine.open_row(sampled(1));
      engine.append(row, text_tokens(1, 0, prompt));
      say(engine, row, 2);
      engine.close_row(row);
      expect_same_addresses(engine, before);
    }
  }
}

#ifndef PIANOLA_TEST_SANITIZED
// From the third request to the hundredth the heap does not grow by the smallest block each; blocks
// that malloc keeps for the next caller count as used, so that it may grow by a few. Nor does a
// GPU's memory, which nobody else uses.
TEST_P(PublicFailures, B165B177RequestsLeaveNothingBehind) {
  Engine engine = make_engine(kHybrid, with_slots(2));
  const Backend& backend = *EngineTestAccess::impl(engine).backend;
  std::size_t after_three = 0;
  std::size_t free_after_three = 0;
  for (int request = 0; request < 100; ++request) {
    const int row = engine.open_row(sampled(1));
    engine.append(row, text_tokens(request, 0, 5 + request % 20));
    for (int i = 0; i < 4; ++i) engine.step();
    const std::vector<int> forks = engine.fork(row, 1, {});
    engine.close_row(forks.at(0));
    engine.close_row(row);
    if (request != 3) continue;
    after_three = mallinfo2().uordblks;
    free_after_three = backend.available_memory();
  }
  EXPECT_LT(mallinfo2().uordblks, after_three + std::size_t{96} * 16);
  if (std::string_view(GetParam()) == "cuda") {
    EXPECT_GE(backend.available_memory(), free_after_three);
  }
}
#endif

// No mask, no table: what a step works in does not hold a position of the capacity for each token.
TEST_P(PublicFailures, B164NoTableOfCapacityTimesCapacity) {
  const auto workspace = [](int capacity) {
    EngineOptions o = with_slots(8);
    o.max_seq_len = capacity;
    return Engine::plan(*tiny_model(kFull), o).workspace;
  };
  const std::size_t small = workspace(1024);
  const std::size_t large = workspace(32768);
  EXPECT_LE(large - small,
            std::size_t{32768} * 8 * 4 * sizeof(float));  // scores of 8 rows, 4 heads
}

// Steps of one row and of four, in turns; steps of one token and of several, in turns (B176).
TEST_P(PublicFailures, B166B176ProgramsTakeTurns) {
  Engine engine = make_engine(kHybrid, with_slots(4));
  const EngineCounters before = engine.counters();
  for (int row = 0; row < 4; ++row) ASSERT_EQ(fed(engine, row, 9), row);
  for (int i = 0; i < 40; ++i) {
    for (int row = 0; row < 4; ++row) {
      if (i % 2 == 0 && row > 0) continue;
      engine.append(row, text_tokens(row, engine.length(row), 1 + i * row % 3));
    }
    engine.step();
    for (int row = 0; row < 4; ++row) engine.keep_first(row, engine.length(row));
  }
  for (int row = 0; row < 4; ++row) {
    const int length = engine.length(row);
    EXPECT_GT(length, 25);
    EXPECT_EQ(next_logits(engine, row, 9), fresh_logits(kHybrid, text_tokens(row, 0, length), 9));
  }
  expect_same_addresses(engine, before);
}

// --- Later additions

TEST_P(PublicFailures, B200EverySplitOfAPromptGivesTheSameState) {
  for (const bool exact : {false, true}) {
    const EngineOptions o = with([exact](EngineOptions& e) { e.exact_rollback = exact; });
    const std::vector<float> want = fresh_logits(kHybrid, text_tokens(1, 0, 16), 9, o);
    for (const std::vector<int>& split :
         {std::vector<int>{16}, {8, 8}, {5, 5, 6}, {1, 15}, {15, 1}, std::vector<int>(16, 1)}) {
      Engine engine = make_engine(kHybrid, o);
      const int row = engine.open_row({});
      for (const int count : split) feed(engine, row, text_tokens(1, engine.length(row), count));
      EXPECT_EQ(next_logits(engine, row, 9), want) << split.size() << " parts";
    }
  }
}

// Four proposals, then m plain steps, then 1 to 4 tokens are taken back: exact, or refused.
TEST_P(PublicFailures, B201ARollbackAfterPlainStepsIsExactOrRefused) {
  for (const bool exact : {false, true}) {
    const EngineOptions o = with([exact](EngineOptions& e) {
      e.exact_rollback = exact;
      e.rollback_depth = 3;
      e.checkpoints = 0;
    });
    Engine engine = make_engine(kHybrid, o);
    for (int plain = 0; plain <= 3; ++plain) {
      for (int back = 1; back <= 4; ++back) {
        const int row = fed(engine, 1, 14);
        feed(engine, row, text_tokens(1, 14, 4));
        for (int i = 0; i < plain; ++i) feed(engine, row, text_tokens(1, 18 + i, 1));
        if (back > engine.max_rewind(row)) {
          EXPECT_GT(back, 3);
          expect_error(ErrorCode::kContextOverflow, "let go", [&] { engine.drop_last(row, back); });
        } else {
          engine.drop_last(row, back);
        }
        const int length = engine.length(row);
        EXPECT_EQ(next_logits(engine, row, 9),
                  fresh_logits(kHybrid, text_tokens(1, 0, length), 9, o))
            << plain << " " << back;
        engine.close_row(row);
      }
    }
  }
}

// B202: inside the ring of inputs exact, beyond it an error. B204: the same call on windows and
// states.
TEST_P(PublicFailures, B202B204ARollbackIsExactInsideItsRingAndAnErrorBeyond) {
  for (const char* model : {kWindow, kMixed, kHybrid}) {
    const EngineOptions o = with([](EngineOptions& e) {
      e.rollback_depth = 16;
      e.checkpoints = 0;
    });
    Engine engine = make_engine(model, o);
    for (const int back : {1, 2, 15, 16, 17, 20, 33, 60, 100}) {
      const int row = fed(engine, 1, 120);
      if (back > engine.max_rewind(row)) {
        EXPECT_GT(back, 16);
        expect_error(ErrorCode::kContextOverflow, "let go", [&] { engine.drop_last(row, back); });
        EXPECT_EQ(engine.length(row), 120);
      } else {
        engine.drop_last(row, back);
        EXPECT_EQ(next_logits(engine, row, 9),
                  fresh_logits(model, text_tokens(1, 0, 120 - back), 9, o))
            << model << " " << back;
      }
      engine.close_row(row);
    }
  }
}

// Only lengths move, so the cost does not know how long the row is.
TEST_P(PublicFailures, B205ARollbackTouchesNoByteOfTheCaches) {
  for (const char* model : {kFull, kMixed, kHybrid}) {
    Engine engine = make_engine(model);
    const int row = fed(engine, 1, 128);
    const std::vector<std::byte> bytes = slot_bytes(engine, row);
    const EngineCounters before = engine.counters();
    engine.drop_last(row, 2);
    EXPECT_EQ(slot_bytes(engine, row), bytes) << model;
    EXPECT_EQ(engine.counters().tokens, before.tokens);
    EXPECT_EQ(engine.counters().steps, before.steps);
  }
}

TEST_P(PublicFailures, B206OneLengthDrivesLayersWithWindowsAndWithout) {
  for (const int prompt : {20, 61, 64, 100}) {
    Engine engine = make_engine(kMixed);
    const int row = fed(engine, 1, prompt);
    propose(engine, row, 1, 4, 1);
    EXPECT_EQ(next_logits(engine, row, 9), fresh_logits(kMixed, text_tokens(1, 0, prompt + 1), 9))
        << prompt;
  }
}

TEST_P(PublicFailures, B212AResetMovesNothing) {
  for (const char* model : {kFull, kHybrid}) {
    Engine engine = make_engine(model);
    const EngineCounters before = engine.counters();
    const int row = fed(engine, 1, 50);
    for (int text = 2; text < 5; ++text) {
      engine.reset(row);
      feed(engine, row, text_tokens(text, 0, 20));
      EXPECT_EQ(next_logits(engine, row, 9), fresh_logits(model, text_tokens(text, 0, 20), 9));
    }
    expect_same_addresses(engine, before);
  }
}

}  // namespace
}  // namespace pianola
