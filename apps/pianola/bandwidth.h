// How fast this machine reads memory: what decoding can be measured against.
//
//   BandwidthMeter meter(threads);
//   meter.measure();                                  // bytes per second, now
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/thread_pool.h"

namespace pianola::cli {

// Holds a buffer several times as large as the last-level cache (where the system says how large
// that is; at least 256 MiB, at most 1 GiB and a quarter of the memory that is free).
class BandwidthMeter {
 public:
  explicit BandwidthMeter(int threads);

  // The best of a few reads of the whole buffer, with all threads at once. Takes a fraction of a
  // second. Throws Interrupted after Ctrl-C.
  double measure();
  std::size_t buffer_bytes() const { return words_ * sizeof(std::uint64_t); }

 private:
  ThreadPool pool_;
  std::size_t words_;
  std::unique_ptr<std::uint64_t[]> buffer_;
};

}  // namespace pianola::cli
