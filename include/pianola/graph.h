// Captures a forward of your own once and replays it: one graph a round, or one graph for a whole
// generation, whose rounds follow each other on the device without the host.
//
//   StaticKvCache cache({...});
//   GraphRunner runner(cache);
//   runner.capture([&](CudaStream stream, LoopWords* loop) {
//     my_attention<<<grid, block, 0, stream>>>(cache.layer<float>(0), cache.lengths(), ...);
//     my_sampling<<<1, 32, 0, stream>>>(..., loop);   // loop->again = 1: another round follows
//   });
//   while (runner.replay()) {}                        // a launch a round; or
//   LoopResult result = runner.run(1000);             // one launch for all rounds
//
// A forward is a callable that launches the kernels of one round on the stream that it is given.
// capture() calls it three times, and nothing of it runs then: whatever changes from round to round
// (tokens, positions, lengths) lies in device memory. It may fork streams from that stream by
// events and join them again. capture() refuses, and keeps what was captured before:
//   InvalidArgument  the forward allocates or frees memory, waits for the device, launches on a
//                    stream that is not captured, launches nothing, or one of its calls fails
//   Unsupported      it holds what cannot run in a loop on the device, such as a host function
// A launch is refused, and nothing changes, with
//   ContextOverflow  a slot may not hold what the round appends
//   InvalidArgument  the cache is not at the addresses that were captured; a loop is running
//
// The stream blocks the default stream and is blocked by it, so that cudaMemcpy() before and after
// a round needs no care. One capture at a time in a process, and no other thread uses the default
// stream meanwhile: CUDA would refuse both. Not thread-safe but for stop().
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "pianola/cache.h"
#include "pianola/error.h"

struct CUstream_st;

namespace pianola {

using CudaStream = CUstream_st*;  // cudaStream_t

// Between the rounds of a loop: on the device, at an address that never changes.
struct LoopWords {
  std::int32_t again;       // a kernel sets it to ask for another round; cleared after each round
  std::int32_t rounds;      // done since begin()
  std::int32_t max_rounds;  // the loop ends there
  std::int32_t yield;       // nonzero: the loop ends after this round
};

struct GraphRunnerOptions {
  int appends = 1;              // most tokens that a round adds to a slot; 0: none
  std::vector<int> slots = {};  // that rounds append to; empty: all
  bool loop = true;             // capture the loop as well: begin(), run()
};

// Why a loop ended: no kernel asked for another round; max_rounds; stop(); or a slot may be full.
enum class LoopEnd : std::uint8_t { kDone, kBound, kStopped, kFull };

struct LoopResult {
  int rounds = 0;
  LoopEnd end = LoopEnd::kDone;
};

class GraphRunner {
 public:
  using Forward = std::function<void(CudaStream stream, LoopWords* loop)>;

  // The cache outlives the runner. Throws Unsupported in a build without CUDA, InvalidArgument when
  // the cache is not on a GPU or for slots out of range.
  explicit GraphRunner(StaticKvCache& cache, const GraphRunnerOptions& options = {});
  ~GraphRunner();
  GraphRunner(GraphRunner&&) noexcept;
  GraphRunner& operator=(GraphRunner&&) noexcept;

  void capture(Forward forward);
  bool captured() const;
  // Of the graph of one round, pianola's own included.
  std::size_t nodes() const;

  // One round, complete when they return; true when a kernel asked for another. eager() calls the
  // forward and makes no use of a graph: to compare.
  bool replay();
  bool eager();

  // Rounds on the device until none is asked for, at most max_rounds, and no more than every slot
  // has room for.
  LoopResult run(int max_rounds);
  // The same without waiting: poll() is empty while the loop runs, wait() waits for its end.
  void begin(int max_rounds);
  std::optional<LoopResult> poll();
  LoopResult wait();
  // Ends the loop after the round at hand.
  void stop();

  // The slots that rounds append to from now on; empty: all.
  void set_slots(const std::vector<int>& slots);
  CudaStream stream() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace pianola
