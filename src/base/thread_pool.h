// Worker threads with a fixed partition: the caller is worker 0, and every run() gives worker i of
// n the same share, so results never depend on timing. Between two runs workers spin for a short
// while and then sleep.
//
//   ThreadPool pool(2);
//   pool.run([&](int worker, int workers) { ...; pool.barrier(); ... });
#pragma once

#include <memory>

namespace pianola {

class ThreadPool {
 public:
  // `threads` ≥ 1, the caller included. InvalidArgument otherwise or when threads cannot be made.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const;

  // Calls function(worker, workers) on every worker and returns when all are done. Not reentrant;
  // one caller at a time. Allocates nothing. The function must not throw.
  template <typename F>
  void run(F&& function) {
    run_erased([](void* f, int worker, int workers) { (*static_cast<F*>(f))(worker, workers); },
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
