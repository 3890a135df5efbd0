// The layers of a decode step as one kernel: its thread blocks stay on the device from the first
// product to the last, and weights keep streaming into shared memory while ops wait for each other.
#pragma once

#include <memory>
#include <vector>

#include "backends/cuda/kernels/attention.h"
#include "backends/cuda/kernels/linear.h"

namespace pianola::cuda {

// One op of the step: a product, or the end of its heads with their attention.
struct PersistentOp {
  bool attends = false;
  LinearArgs linear;        // without `scratch` and `first`
  HeadsArgs heads;          // if it attends
  AttentionArgs attention;  // if it attends
};

inline constexpr int kPersistentTokens = 32;

// The bits are those of linear() and attend(): slices and ranks are added in the same order.
//
// Thread blocks form clusters of eight. Each block of a cluster takes one slice of the columns of
// all the rows that its cluster computes, and sends its sums to the block that adds the slices of a
// row. A counter in device memory says how many blocks have finished an op.
class PersistentStep {
 public:
  // The ops' addresses are kept; `tokens` is the bucket's. Throws Unsupported, saying why, when the
  // ops cannot be one kernel on this device; Device.
  PersistentStep(const std::vector<PersistentOp>& ops, int tokens);
  ~PersistentStep();
  PersistentStep(const PersistentStep&) = delete;
  PersistentStep& operator=(const PersistentStep&) = delete;

  void launch(const Launch& launch) const;
  int clusters() const { return clusters_; }

 private:
  struct Layout;
  struct Free {
    void operator()(std::byte* memory) const;
  };

  std::unique_ptr<std::byte, Free> tables_;  // device memory
  int clusters_ = 0;
  std::unique_ptr<const Layout> layout_;
};

}  // namespace pianola::cuda
