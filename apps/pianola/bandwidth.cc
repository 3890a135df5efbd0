#include "bandwidth.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>

#include "signals.h"

namespace pianola::cli {
namespace {

constexpr std::size_t kLine = 64;
constexpr int kPasses = 3;

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

// Where a worker's part begins: whole lines.
std::size_t share(std::size_t words, int worker, int workers) {
  return words / 8 * static_cast<std::size_t>(worker) / static_cast<std::size_t>(workers) * 8;
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

BandwidthMeter::BandwidthMeter(int threads)
    : pool_(threads, ThreadPool::Pinning::kOnePerCpu),
      words_(buffer_size() / sizeof(std::uint64_t)),
      buffer_(std::make_unique_for_overwrite<std::uint64_t[]>(words_)) {
  // Each worker touches its own part first: its pages are then near it.
  pool_.run([&](int worker, int workers) {
    const std::size_t end = share(words_, worker + 1, workers);
    for (std::size_t i = share(words_, worker, workers); i < end; ++i) buffer_[i] = i;
  });
}

double BandwidthMeter::measure() {
  double best = 0;
  for (int pass = 0; pass < kPasses; ++pass) {
    throw_if_interrupted();
    std::atomic<std::uint64_t> sum = 0;  // used, or nothing need be read
    const auto begin = std::chrono::steady_clock::now();
    pool_.run([&](int worker, int workers) {
      const std::size_t first = share(words_, worker, workers);
      sum += read_all(buffer_.get() + first, share(words_, worker + 1, workers) - first);
    });
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    best = std::max(best, static_cast<double>(buffer_bytes()) / seconds.count());
  }
  return best;
}

}  // namespace pianola::cli
