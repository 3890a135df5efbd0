#include "bandwidth.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/thread_pool.h"
#include "signals.h"

namespace pianola::cli {
namespace {

constexpr std::size_t kLine = 64;
constexpr int kPasses = 8;

// Loads every word. The hint far ahead is what the matrix kernels use as well.
std::uint64_t read_all(const std::uint64_t* words, std::size_t count) {
  std::uint64_t sums[8] = {};
  for (std::size_t i = 0; i + 8 <= count; i += 8) {
    __builtin_prefetch(words + i + 512);
    for (std::size_t j = 0; j < 8; ++j) sums[j] += words[i + j];
  }
  std::uint64_t sum = 0;
  for (const std::uint64_t s : sums) sum += s;
  return sum;
}

std::size_t buffer_size() {
  const long cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
  const auto free_memory = static_cast<std::size_t>(sysconf(_SC_AVPHYS_PAGES)) *
                           static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  std::size_t bytes = cache > 0 ? static_cast<std::size_t>(cache) * 4 : 0;
  bytes = std::clamp(bytes, std::size_t{256} << 20, std::size_t{1} << 30);
  bytes = std::min(bytes, std::max(free_memory / 4, std::size_t{16} << 20));
  return bytes / kLine * kLine;
}

}  // namespace

Bandwidth measure_read_bandwidth(int threads) {
  ThreadPool pool(threads, ThreadPool::Pinning::kOnePerCpu);
  const std::size_t bytes = buffer_size();
  const std::size_t words = bytes / sizeof(std::uint64_t);
  const auto buffer = std::make_unique_for_overwrite<std::uint64_t[]>(words);
  std::vector<std::uint64_t> sums(static_cast<std::size_t>(threads) * 8);
  const auto share = [words](int worker, int workers) {
    return words / 8 * static_cast<std::size_t>(worker) / static_cast<std::size_t>(workers) * 8;
  };
  // Each worker touches its own part first: its pages are then near it.
  pool.run([&](int worker, int workers) {
    for (std::size_t i = share(worker, workers); i < share(worker + 1, workers); ++i) {
      buffer[i] = i;
    }
  });
  double best = 0;
  for (int pass = 0; pass < kPasses; ++pass) {
    throw_if_interrupted();
    const auto begin = std::chrono::steady_clock::now();
    pool.run([&](int worker, int workers) {
      const std::size_t first = share(worker, workers);
      sums[static_cast<std::size_t>(worker) * 8] +=
          read_all(buffer.get() + first, share(worker + 1, workers) - first);
    });
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    best = std::max(best, static_cast<double>(bytes) / seconds.count());
  }
  // The sums must be used, or nothing need be read.
  volatile std::uint64_t sink = sums.front();
  static_cast<void>(sink);
  return {best, bytes};
}

}  // namespace pianola::cli
