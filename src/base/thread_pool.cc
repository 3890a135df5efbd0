#include "base/thread_pool.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

#include "base/check.h"

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace pianola {
namespace {

constexpr int kMaxThreads = 1024;
constexpr std::chrono::microseconds kSpinTime(50);

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits until `word` differs from `old`: some spinning first, then sleep. A pool with more threads
// than processors does not spin, because whom it waits for may need the processor it spins on.
void wait_for_change(const std::atomic<std::uint32_t>& word, std::uint32_t old, bool spin) {
  if (spin) {
    constexpr int kChecksPerClockRead = 64;
    const auto deadline = std::chrono::steady_clock::now() + kSpinTime;
    do {
      for (int i = 0; i < kChecksPerClockRead; ++i) {
        if (word.load(std::memory_order_acquire) != old) return;
        relax();
      }
    } while (std::chrono::steady_clock::now() < deadline);
  } else {
    for (int i = 0; i < 4; ++i) {
      if (word.load(std::memory_order_acquire) != old) return;
      std::this_thread::yield();
    }
  }
  while (word.load(std::memory_order_acquire) == old) word.wait(old, std::memory_order_acquire);
}

#if defined(__linux__)
// Keeps `thread` on the index-th usable processor. Not being allowed to is no error.
void pin(std::thread& thread, int index) {
  cpu_set_t usable;
  if (::sched_getaffinity(0, sizeof usable, &usable) != 0) return;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &usable) || index-- > 0) continue;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    ::pthread_setaffinity_np(thread.native_handle(), sizeof one, &one);
    return;
  }
}
#else
void pin(std::thread&, int) {}
#endif

}  // namespace

int usable_cpus() {
#if defined(__linux__)
  cpu_set_t usable;
  if (::sched_getaffinity(0, sizeof usable, &usable) == 0) return CPU_COUNT(&usable);
#endif
  const unsigned count = std::thread::hardware_concurrency();
  return count == 0 ? 1 : static_cast<int>(count);
}

// Every word that one thread writes while others read it has a cache line of its own.
struct ThreadPool::State {
  int size = 1;
  bool spin = true;
  bool stop = false;
  Function function = nullptr;
  void* context = nullptr;
  std::vector<std::thread> threads;

  alignas(64) std::atomic<std::uint32_t> epoch{0};    // changes when there is something to run
  alignas(64) std::atomic<std::uint32_t> arrived{0};  // workers at the current barrier
  alignas(64) std::atomic<std::uint32_t> phase{0};    // changes when a barrier opens

  void barrier() {
    // Read before arriving: the phase cannot change until this thread has arrived.
    const std::uint32_t current = phase.load(std::memory_order_relaxed);
    const auto last = static_cast<std::uint32_t>(size - 1);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) == last) {
      arrived.store(0, std::memory_order_relaxed);
      phase.store(current + 1, std::memory_order_release);
      phase.notify_all();
    } else {
      wait_for_change(phase, current, spin);
    }
  }

  void work(int worker) {
    for (std::uint32_t seen = 0;; ++seen) {
      wait_for_change(epoch, seen, spin);
      if (stop) return;
      function(context, worker, size);
      barrier();
    }
  }

  void wake() {
    epoch.fetch_add(1, std::memory_order_release);
    epoch.notify_all();
  }

  void join() {
    stop = true;
    wake();
    for (std::thread& thread : threads) thread.join();
  }
};

ThreadPool::ThreadPool(int threads, Pinning pinning) : state_(std::make_unique<State>()) {
  if (threads < 1 || threads > kMaxThreads) {
    fail(ErrorCode::kInvalidArgument, "thread pool: {} threads, expected 1 to {}", threads,
         kMaxThreads);
  }
  const int cpus = usable_cpus();
  state_->size = threads;
  state_->spin = threads <= cpus;
  state_->threads.reserve(static_cast<std::size_t>(threads) - 1);
  try {
    for (int i = 1; i < threads; ++i) {
      state_->threads.emplace_back([state = state_.get(), i] { state->work(i); });
      if (pinning == Pinning::kOnePerCpu && threads <= cpus) pin(state_->threads.back(), i);
    }
  } catch (const std::system_error& error) {
    const std::size_t made = state_->threads.size();
    state_->join();
    fail(ErrorCode::kInvalidArgument,
         "thread pool: the system made only {} of {} threads ({}); ask for fewer", made + 1,
         threads, error.what());
  }
}

ThreadPool::~ThreadPool() { state_->join(); }

int ThreadPool::size() const { return state_->size; }

void ThreadPool::run_erased(Function function, void* context) {
  State& state = *state_;
  if (state.size == 1) return function(context, 0, 1);
  state.function = function;
  state.context = context;
  state.wake();
  function(context, 0, state.size);
  state.barrier();
}

void ThreadPool::barrier() {
  if (state_->size > 1) state_->barrier();
}

}  // namespace pianola
