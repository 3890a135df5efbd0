// What taking back costs a captured step, in an engine. PIANOLA_TIMING_MODEL names a model of full
// attention to take the time of; without it, a tiny one, beside which anything weighs much.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "cuda/engine_fixture.h"

namespace pianola::cuda {
namespace {

constexpr int kCount = 8;
constexpr int kSteps = 64;

double median(std::vector<double> times) {
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

TEST(EngineRollbackTiming, AStepThatTakesEightBack) {
  const char* path = std::getenv("PIANOLA_TIMING_MODEL");
  const auto model = path ? CausalModel::open(path) : tiny_llama("f16");
  for (const int rows : {1, 8}) {
    Engine engine(model, {.backend = "cuda", .max_seq_len = 1024, .slots = rows});
    for (int i = 0; i < rows; ++i) {
      engine.open_row({});
      engine.append(i, prompt(i, kSteps * kCount));
    }
    while (engine.step().size() < static_cast<std::size_t>(rows)) {
    }
    for (int i = 0; i < rows; ++i) {
      ASSERT_EQ(engine.length(i) + 1, static_cast<int>(engine.history(i).size()));
    }
    const std::uint64_t captures = engine.counters().captures;
    const int length = engine.length(0);
    const std::vector<int> counts(static_cast<std::size_t>(rows), kCount);
    // In turns, so that both are of the same lengths.
    std::vector<double> with;
    std::vector<double> without;
    for (int i = 0; i < kSteps; ++i) {
      const auto begin = std::chrono::steady_clock::now();
      if (i % 2 == 0) engine.rollback(counts);
      ASSERT_EQ(engine.step().size(), static_cast<std::size_t>(rows));
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
      (i % 2 == 0 ? with : without).push_back(seconds.count());
    }
    EXPECT_EQ(engine.length(0), length + kSteps - kSteps / 2 * kCount);
    EXPECT_EQ(engine.counters().captures, captures);
    std::printf("%d rows: a step %.2f us, one that takes %d back of each %.2f us (%+.2f %%)\n",
                rows, median(without) * 1e6, kCount, median(with) * 1e6,
                (median(with) / median(without) - 1) * 100);
  }
}

}  // namespace
}  // namespace pianola::cuda
