// What a captured round of a user's kernels needs beside them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/cuda/kernels/launch.h"
#include "pianola/graph.h"

namespace pianola::cuda {

// What the host learns of a round: pinned memory, complete when the stream is.
struct RoundReport {
  std::int32_t again;
  std::int32_t rounds;
};

// The end of a round: counts it, reports and clears `again`. In a loop, `handle` is the condition
// of its WHILE node, and is set to whether another round follows; otherwise it is null.
void end_round(LoopWords* words, RoundReport* report, const cudaGraphConditionalHandle* handle,
               const Launch& launch);

// Adds a hash of memory to *sum: equal contents give equal sums. `words` is aligned to 4 bytes.
void add_fingerprint(const void* words, std::size_t bytes, std::uint64_t* sum,
                     const Launch& launch);

}  // namespace pianola::cuda
