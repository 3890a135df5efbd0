// The engine on a GPU: executors agree bit for bit over thousands of steps, a loop allocates and
// captures nothing, ends when its rows or its caller say so, and leaves the host idle.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <set>
#include <thread>

#include "backends/cuda/cuda_error.h"
#include "cuda/counted_new.h"
#include "cuda/engine_fixture.h"
#include "engine/engine_audit.h"

namespace pianola::cuda {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Of all threads of this process, those of the driver included.
double cpu_seconds() {
  rusage use = {};
  getrusage(RUSAGE_SELF, &use);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return seconds(use.ru_utime) + seconds(use.ru_stime);
}

// --- Executors ---------------------------------------------------------------------------------

// Rows whose decoding crosses the edges of blocks, clusters and splits: 64, 128, 256 and 2048, each
// from a prompt that ends before, at or behind one.
struct Scenario {
  const char* name;
  std::vector<RowPlan> rows;
};

constexpr int kCapacity = 4096;

std::vector<Scenario> scenarios() {
  const auto rows = [](const std::vector<int>& lengths, auto limit_of) {
    std::vector<RowPlan> plans;
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      const int seed = static_cast<int>(100 * lengths.size() + i);
      const int limit = std::min(kCapacity, limit_of(static_cast<int>(i), lengths[i]));
      plans.push_back({prompt(seed, lengths[i]), sampled(seed, limit)});
    }
    return plans;
  };
  std::vector<int> many;
  for (int i = 0; i < 64; ++i) {
    constexpr int kEdges[] = {1, 60, 63, 64, 124, 127, 252, 255, 1020, 2030, 2046, 2047};
    many.push_back(kEdges[i % 12] + i / 12);
  }
  return {
      {"1 row", rows({40}, [](int, int) { return kCapacity; })},
      {"3 rows in the bucket of 4",
       rows({60, 124, 2040}, [](int i, int) { return i == 2 ? kCapacity : 2200 + 100 * i; })},
      {"8 rows", rows({62, 63, 64, 126, 127, 254, 255, 2046},
                      [](int i, int length) { return length + 2050 - 13 * i; })},
      {"64 rows", rows(many, [](int i, int length) { return length + 1500 + 5 * i; })},
  };
}

class CudaEngine : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { model_ = tiny_llama(GetParam()); }

  std::shared_ptr<const CausalModel> model_;
};

TEST_P(CudaEngine, EveryExecutorGivesTheSameBitsOverTenThousandSteps) {
  const std::vector<Scenario> all = scenarios();
  std::vector<std::vector<RowTrace>> expected;  // by scenario
  for (const Executor& executor : kExecutors) {
    SCOPED_TRACE(executor.name);
    Engine engine(model_, {.backend = "cuda",
                           .max_seq_len = kCapacity,
                           .slots = 64,
                           .eager = executor.eager,
                           .dependent_launch = executor.dependent});
    std::uint64_t rounds = 0;
    const Clock::time_point begin = Clock::now();
    for (std::size_t s = 0; s < all.size(); ++s) {
      SCOPED_TRACE(all[s].name);
      Session session(engine, all[s].rows);
      session.decode(executor.drive);
      rounds += session.rounds();
      if (executor.drive == Drive::kStep) {
        EXPECT_EQ(session.launches(), session.rounds());
      } else {  // at most as many rounds a launch as events fit the ring
        EXPECT_LE(session.launches(), session.rounds() / 32 + 2);
      }
      const std::vector<RowTrace> traces = session.close();
      if (s == expected.size()) {
        expected.push_back(traces);
        continue;
      }
      int wrong = 0;
      for (std::size_t row = 0; row < traces.size() && wrong < 3; ++row) {
        const std::string what = difference(traces[row], expected[s][row]);
        wrong += !what.empty();
        EXPECT_EQ(what, "") << "row " << row << ", prompt of " << all[s].rows[row].prompt.size();
      }
    }
    EXPECT_GE(rounds, 10000U);
    std::printf("  %-34s %llu rounds, %.1f s\n", executor.name,
                static_cast<unsigned long long>(rounds), seconds_since(begin));
  }
  for (std::size_t s = 0; s < all.size(); ++s) {  // what they agree on is a full run
    for (std::size_t row = 0; row < all[s].rows.size(); ++row) {
      const RowPlan& plan = all[s].rows[row];
      EXPECT_EQ(expected[s][row].status, RowStatus::kLength);
      EXPECT_EQ(expected[s][row].tokens.size() + plan.prompt.size(),
                static_cast<std::size_t>(plan.options.max_length));
    }
  }
}

// --- No work after warm-up ---------------------------------------------------------------------

TEST_P(CudaEngine, AHundredThousandRoundsAllocateAndCaptureNothing) {
  Engine engine(model_, {.backend = "cuda", .max_seq_len = kCapacity, .slots = 3});
  std::vector<int> rows;
  for (int i = 0; i < 3; ++i) {
    rows.push_back(engine.open_row(sampled(i, kCapacity)));
    engine.append(rows.back(), prompt(i, 20));
  }
  const auto again = [&](std::size_t count) {  // back to short texts, whose last token comes again
    for (std::size_t i = 0; i < rows.size(); ++i) {
      engine.keep_first(rows[i], 8);
      if (i < count) engine.append(rows[i], {});
    }
  };
  std::size_t events = 0;
  const auto decode = [&](Drive drive, std::uint64_t rounds) {
    const std::uint64_t until = engine.counters().steps + rounds;
    for (std::size_t turn = 0; engine.counters().steps < until; ++turn) {
      again(turn % 3 + 1);  // one row, two, and three of the bucket of four
      while (engine.has_work() && engine.counters().steps < until) {
        events += compute(engine, drive).size();
      }
    }
  };
  for (const Drive drive : {Drive::kStep, Drive::kLoop, Drive::kStream}) decode(drive, 100);
  decode(Drive::kLoop, 20000);

  check(cudaDeviceSynchronize(), "warm-up");
  const std::size_t memory = free_memory();
  const EngineCounters before = engine.counters();
  const std::size_t blocks = allocation_count();
  decode(Drive::kLoop, 100000);
  decode(Drive::kStream, 10000);
  decode(Drive::kStep, 3000);
  again(0);  // ends what still runs
  const std::size_t new_blocks = allocation_count() - blocks;
  const EngineCounters after = engine.counters();
  check(cudaDeviceSynchronize(), "the rounds");
  EXPECT_EQ(new_blocks, 0U) << "blocks from operator new";
  EXPECT_EQ(free_memory(), memory);
  EXPECT_EQ(after.captures, before.captures);
  EXPECT_EQ(after.capture_bytes, before.capture_bytes);
  EXPECT_EQ(after.plans, before.plans);
  EXPECT_EQ(after.address_hash, before.address_hash);
  EXPECT_GE(after.steps - before.steps, 113000U);
  EXPECT_GE(events, 113000U);
}

TEST_P(CudaEngine, RoundsOpByOpAllocateNothing) {
  Engine engine(model_, {.backend = "cuda", .max_seq_len = kCapacity, .slots = 3, .eager = true});
  const int row = engine.open_row(sampled(1, kCapacity));
  engine.append(row, prompt(1, 20));
  const auto decode = [&](std::uint64_t rounds) {
    const std::uint64_t until = engine.counters().steps + rounds;
    while (engine.counters().steps < until) engine.run(50);
  };
  decode(100);
  const std::size_t blocks = allocation_count();
  decode(1000);
  EXPECT_EQ(allocation_count() - blocks, 0U) << "blocks from operator new";
  EXPECT_TRUE(engine.has_work());
}

TEST(CudaEngineCounter, CountsAllocations) {
  const std::size_t before = allocation_count();
  auto* block = new std::vector<int>(100);
  EXPECT_GE(allocation_count() - before, 2U);
  delete block;
}

// --- Ends of rows in the loop ------------------------------------------------------------------

TEST_P(CudaEngine, RowsOfOneLaunchEndAtTheirOwnRounds) {
  constexpr int kRows = 6;
  Engine engine(model_, {.backend = "cuda", .max_seq_len = 512, .slots = 8});
  std::vector<RowPlan> plans;
  std::vector<RowTrace> expected;
  for (int i = 0; i < kRows; ++i) {
    RowPlan plan{prompt(300 + i, 9 + 11 * i), sampled(300 + i, 9 + 11 * i + 120)};
    RowTrace whole = play(engine, {plan}, Drive::kStep)[0];
    std::size_t count = static_cast<std::size_t>(20 + 18 * i);  // tokens that the row may give
    if (i % 2 == 0) {
      plan.options.max_length = static_cast<int>(plan.prompt.size() + count);
    } else {  // stops at the next token that is new to it
      std::set<TokenId> seen(whole.tokens.begin(),
                             whole.tokens.begin() + static_cast<std::ptrdiff_t>(count));
      while (count < whole.tokens.size() && seen.contains(whole.tokens[count])) ++count;
      ASSERT_LT(count, whole.tokens.size()) << "a text without a new token";
      const TokenId stop = whole.tokens[count++];
      if (i == 3) {  // the last of as many as there can be
        for (TokenId t = 0; t < kVocab; ++t) {
          const bool full = plan.options.stop_tokens.size() + 1 == kMaxStopTokens;
          if (!full && t != stop && !seen.contains(t)) plan.options.stop_tokens.push_back(t);
        }
      }
      plan.options.stop_tokens.push_back(stop);
    }
    plans.push_back(plan);
    expected.push_back(play(engine, {plan}, Drive::kStep)[0]);
    ASSERT_EQ(expected.back().tokens.size(), count);
    ASSERT_EQ(expected.back().status, i % 2 ? RowStatus::kStopToken : RowStatus::kLength);
  }
  Session session(engine, plans);
  session.decode(Drive::kLoop);
  EXPECT_EQ(session.launches(), 1U);
  std::size_t longest = 0;
  const std::vector<RowTrace> traces = session.close();
  for (int i = 0; i < kRows; ++i) {
    const auto row = static_cast<std::size_t>(i);
    EXPECT_EQ(difference(traces[row], expected[row]), "") << "row " << i;
    longest = std::max(longest, traces[row].tokens.size());
  }
  EXPECT_EQ(session.rounds(), longest - 1);  // the first token came with the prompt
}

TEST_P(CudaEngine, NanInTheLoopFailsItsRowAndNoOther) {
  Engine engine(model_, {.backend = "cuda", .max_seq_len = 256, .slots = 4});
  std::vector<RowPlan> plans;
  std::vector<RowTrace> expected;
  for (int i = 0; i < 3; ++i) {
    plans.push_back({prompt(400 + i, 30 + 40 * i), sampled(400 + i, 200)});
    expected.push_back(play(engine, {plans.back()}, Drive::kStep)[0]);
  }
  Session session(engine, plans);
  EngineAudit::poison_slot(engine, 1, 0);
  session.decode(Drive::kLoop);
  const std::vector<RowTrace> traces = session.close();
  EXPECT_EQ(difference(traces[0], expected[0]), "");
  EXPECT_EQ(difference(traces[2], expected[2]), "");
  EXPECT_EQ(traces[1].status, RowStatus::kFailed);
  ASSERT_EQ(traces[1].tokens.size(), 2U);  // that of the prompt, and the failure
  EXPECT_EQ(traces[1].tokens[0], expected[1].tokens[0]);
  EXPECT_EQ(traces[1].tokens[1], -1);

  // The slot is as good as before.
  EngineAudit::poison_slot(engine, 0, 0);
  EXPECT_EQ(difference(play(engine, {plans[1]}, Drive::kLoop)[0], expected[1]), "");
}

INSTANTIATE_TEST_SUITE_P(Forms, CudaEngine, testing::Values("f16", "q8_0"));

// --- The host beside a loop --------------------------------------------------------------------

class CudaHost : public testing::Test {
 protected:
  static constexpr int kPrompt = 16;

  CudaHost() : engine_(deep_.model(), {.backend = "cuda", .max_seq_len = 2048, .slots = 2}) {
    row_ = engine_.open_row(sampled(0, 2048));
    engine_.append(row_, prompt(1, kPrompt));
    engine_.step();
  }
  void begin_again() {
    engine_.keep_first(row_, kPrompt);
    engine_.append(row_, {});
  }
  std::uint64_t published() {
    return std::atomic_ref(*EngineTestAccess::impl(engine_).state.ring_head)
        .load(std::memory_order_acquire);
  }
  double seconds_per_round() {
    begin_again();
    engine_.run(10);
    begin_again();
    const Clock::time_point begin = Clock::now();
    engine_.run(200);
    return seconds_since(begin) / 200;
  }

  DeepModel deep_;
  Engine engine_;
  int row_ = 0;
};

// Any call that changes a row ends a run that streams: the round at hand may finish, and one more
// may have begun before the request arrived.
TEST_F(CudaHost, ACancelledRunEndsWithinARound) {
  constexpr int kTrials = 50;
  const double round = seconds_per_round();
  int late = 0;
  std::uint64_t most = 0;
  double slowest = 0;
  for (int trial = 0; trial < kTrials; ++trial) {
    begin_again();
    const std::uint64_t steps = engine_.counters().steps;
    const std::uint64_t first = published();
    ASSERT_FALSE(engine_.stream({&row_, 1}).empty());
    std::this_thread::sleep_for(std::chrono::microseconds(137 * trial));
    const std::uint64_t before = published();
    const Clock::time_point begin = Clock::now();
    const int other = engine_.open_row({});
    const double elapsed = seconds_since(begin);
    const std::uint64_t after = published();
    engine_.close_row(other);
    EXPECT_EQ(engine_.counters().steps - steps, after - first) << "a round, an event";
    ASSERT_LT(after - first, 1000U) << "the run ended by itself";
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    EXPECT_EQ(published(), after) << "it goes on";
    late += after - before > 2;
    most = std::max(most, after - before);
    slowest = std::max(slowest, elapsed);
  }
  std::printf("  a round takes %.3f ms; after a request at most %llu rounds, %.3f ms\n",
              round * 1e3, static_cast<unsigned long long>(most), slowest * 1e3);
  EXPECT_GT(round, 100e-6) << "too fast a model to tell";
  EXPECT_LE(late, 2) << "of " << kTrials << "; the host may lose its processor in between";
}

// The word that asks a run to end is written behind the one that begins it, however soon.
TEST_F(CudaHost, AStopRightBehindItsBeginIsNotLost) {
  seconds_per_round();
  auto& e = EngineTestAccess::impl(engine_);
  for (int trial = 0; trial < 200; ++trial) {
    begin_again();
    const std::uint64_t first = published();
    e.begin_run({}, 1000);
    e.settle();
    ASSERT_LT(published() - first, 100U) << "trial " << trial;
  }
}

TEST_F(CudaHost, ALoopLeavesTheHostIdle) {
  seconds_per_round();
  for (const Drive drive : {Drive::kLoop, Drive::kStream}) {
    double wall = 0;
    double cpu = 0;
    std::uint64_t rounds = 0;
    while (wall < 1.0) {
      begin_again();
      const std::uint64_t steps = engine_.counters().steps;
      const double cpu_begin = cpu_seconds();
      const Clock::time_point begin = Clock::now();
      while (engine_.has_work()) compute(engine_, drive);
      wall += seconds_since(begin);
      cpu += cpu_seconds() - cpu_begin;
      engine_.step();  // counts the rounds of a run that streamed
      rounds += engine_.counters().steps - steps;
    }
    std::printf("  %s: %llu rounds in %.2f s, %.3f s of host time: %.1f %% of a core\n",
                drive == Drive::kLoop ? "run" : "stream", static_cast<unsigned long long>(rounds),
                wall, cpu, 100 * cpu / wall);
    EXPECT_LE(cpu, 0.05 * wall);
  }
}

}  // namespace
}  // namespace pianola::cuda
