// Worker threads with a fixed partition: the caller is worker 0, and every run() gives worker i of
// n the same share, so results never depend on timing. Between two runs, and at a barrier, a thread
// spins for about 50 µs and then sleeps in the kernel, so that a peer the machine does not schedule
// costs time but no processor, and a pool larger than the machine still makes progress.
//
//   ThreadPool pool(2);
//   pool.run([&](int worker, int workers) { ...; pool.barrier(); ... });
#pragma once

#include <memory>
#include <type_traits>

namespace pianola {

// Processors this process may run on (its affinity mask): the largest pool that is worth having.
int usable_cpus();

class ThreadPool {
 public:
  enum class Pinning {
    kNone,
    // Worker i > 0 stays on the i-th usable processor, if there is one for each worker and the
    // system permits it; otherwise nothing happens. Worker 0 is the caller's thread and is left
    // alone: it is not ours.
    kOnePerCpu,
  };

  // `threads` ≥ 1, the caller included. InvalidArgument otherwise or when threads cannot be made.
  explicit ThreadPool(int threads, Pinning pinning = Pinning::kNone);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const;

  // Calls function(worker, workers) on every worker and returns when all are done. Not reentrant;
  // one caller at a time. Allocates nothing. The function must not throw.
  template <typename F>
  void run(F&& function) {
    run_erased([](void* f, int worker,
                  int workers) { (*static_cast<std::remove_reference_t<F>*>(f))(worker, workers); },
               const_cast<void*>(static_cast<const void*>(&function)));
  }

  // Inside run(): waits until every worker has arrived. Writes before it are visible after it.
  void barrier();

 private:
  using Function = void (*)(void*, int worker, int workers);
  void run_erased(Function function, void* context);

  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace pianola
