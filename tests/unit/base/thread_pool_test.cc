#include "base/thread_pool.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <array>
#include <atomic>
#include <chrono>
#include <numeric>
#include <thread>
#include <vector>

#include "pianola/error.h"

namespace pianola {
namespace {

// Sizes below, at and far above the number of processors of a small machine.
class ThreadPoolSizes : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, ThreadPoolSizes, testing::Values(1, 2, 3, 8, 16));

TEST_P(ThreadPoolSizes, EveryWorkerRunsOnceWithItsOwnNumber) {
  const int size = GetParam();
  ThreadPool pool(size);
  EXPECT_EQ(pool.size(), size);
  std::vector<int> calls(static_cast<std::size_t>(size));  // plain ints: run() must order them
  for (int round = 1; round <= 50; ++round) {
    pool.run([&](int worker, int workers) {
      EXPECT_EQ(workers, size);
      ++calls[static_cast<std::size_t>(worker)];
    });
    for (const int count : calls) ASSERT_EQ(count, round);
  }
}

TEST_P(ThreadPoolSizes, WorkerZeroIsTheCaller) {
  ThreadPool pool(GetParam());
  const std::thread::id caller = std::this_thread::get_id();
  pool.run([&](int worker, int) { EXPECT_EQ(std::this_thread::get_id() == caller, worker == 0); });
}

// Each worker writes its own cell and, after the barrier, reads its neighbour's: a barrier that
// lets anyone through early shows as a stale value here and as a race under ThreadSanitizer.
TEST_P(ThreadPoolSizes, BarriersOrderWritesAcrossManyPhases) {
  const int size = GetParam();
  const int phases = size > 4 ? 100 : 1000;
  ThreadPool pool(size);
  std::vector<int> cells(static_cast<std::size_t>(size));
  std::atomic<int> wrong{0};
  pool.run([&](int worker, int workers) {
    for (int phase = 1; phase <= phases; ++phase) {
      cells[static_cast<std::size_t>(worker)] = phase;
      pool.barrier();
      const int neighbour = (worker + 1) % workers;
      if (cells[static_cast<std::size_t>(neighbour)] != phase) ++wrong;
      pool.barrier();
    }
  });
  EXPECT_EQ(wrong.load(), 0);
}

TEST(ThreadPool, WakesWorkersThatSleep) {
  ThreadPool pool(2);
  std::array<int, 2> calls{};
  for (int i = 0; i < 5; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // far beyond the spinning
    pool.run([&](int worker, int) { ++calls[static_cast<std::size_t>(worker)]; });
  }
  EXPECT_EQ(calls, (std::array<int, 2>{5, 5}));
}

TEST(ThreadPool, ABarrierWaitsForALatePeer) {
  ThreadPool pool(2);
  bool late = false;
  bool seen = false;
  pool.run([&](int worker, int) {
    if (worker == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      late = true;
    }
    pool.barrier();
    if (worker == 0) seen = late;
  });
  EXPECT_TRUE(seen);
}

double cpu_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// Neither an idle pool nor one that waits for a slow worker burns a processor.
TEST(ThreadPool, WaitingSleeps) {
  ThreadPool pool(3);
  pool.run([](int, int) {});
  const double before = cpu_seconds();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  pool.run([&](int worker, int) {
    if (worker == 1) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    pool.barrier();
  });
  EXPECT_LT(cpu_seconds() - before, 0.1);
}

TEST(ThreadPool, PoolsAreIndependent) {
  ThreadPool outer(2);
  std::atomic<int> calls{0};
  outer.run([&](int, int) {
    ThreadPool inner(2);
    inner.run([&](int, int) { ++calls; });
  });
  EXPECT_EQ(calls.load(), 4);
}

TEST(ThreadPool, ManyAreMadeAndJoined) {
  for (int i = 0; i < 50; ++i) {
    ThreadPool pool(1 + i % 4);
    if (i % 3 != 0) pool.run([](int, int) {});
  }
}

TEST(ThreadPool, RunsConstAndTemporaryFunctions) {
  ThreadPool pool(2);
  std::atomic<int> calls{0};
  const auto function = [&](int, int) { ++calls; };
  pool.run(function);
  pool.run([&](int, int) { ++calls; });
  EXPECT_EQ(calls.load(), 4);
}

TEST(ThreadPool, PinningNeverFails) {
  for (const int size : {1, usable_cpus(), usable_cpus() + 1}) {
    ThreadPool pool(size, ThreadPool::Pinning::kOnePerCpu);
    std::atomic<int> calls{0};
    pool.run([&](int, int) { ++calls; });
    EXPECT_EQ(calls.load(), size);
  }
}

TEST(ThreadPool, RefusesImpossibleSizes) {
  for (const int size : {0, -1, 1 << 20}) {
    try {
      const ThreadPool pool(size);
      ADD_FAILURE() << size << " threads were accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_NE(std::string(error.what()).find(std::to_string(size)), std::string::npos);
    }
  }
}

}  // namespace
}  // namespace pianola
