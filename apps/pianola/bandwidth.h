// How fast this machine reads memory: what decoding can be measured against.
#pragma once

#include <cstddef>

namespace pianola::cli {

struct Bandwidth {
  double bytes_per_second = 0;  // the best of a few passes
  std::size_t buffer_bytes = 0;
};

// Reads a buffer several times as large as the last-level cache (where the system says how large
// that is; at least 256 MiB, at most 1 GiB and a quarter of the memory that is free) with all
// threads at once. Takes about a second.
Bandwidth measure_read_bandwidth(int threads);

}  // namespace pianola::cli
