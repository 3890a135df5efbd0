// A StepState on the host and the same one on the device, copied whole between them.
#pragma once

#include <cstring>
#include <memory>

#include "cuda/cuda_fixture.h"
#include "plan/step_state.h"

namespace pianola::cuda {

class MirroredState {
 public:
  explicit MirroredState(const StepLimits& limits)
      : layout_(limits),
        host_memory_(allocate(layout_.bytes())),
        host_shared_(allocate(layout_.shared_bytes())),
        device_memory_(layout_.bytes()) {
    check(cudaMallocHost(reinterpret_cast<void**>(&device_shared_), layout_.shared_bytes()),
          "pinned test memory");
    host = layout_.bind(host_memory_.get(), host_shared_.get());
    device = layout_.bind(device_memory_.data(), device_shared_);
  }
  ~MirroredState() { cudaFreeHost(device_shared_); }
  MirroredState(const MirroredState&) = delete;
  MirroredState& operator=(const MirroredState&) = delete;

  // From the host to the device, and back when the kernels are through.
  void upload() {
    check(cudaMemcpy(device_memory_.data(), host_memory_.get(), layout_.bytes(),
                     cudaMemcpyHostToDevice),
          "upload");
    // A copy from pageable memory may return before it has arrived, and streams of their own do
    // not wait for it.
    check(cudaDeviceSynchronize(), "upload");
    std::memcpy(device_shared_, host_shared_.get(), layout_.shared_bytes());
  }
  void download() {
    check(cudaDeviceSynchronize(), "kernels under test");
    check(cudaMemcpy(host_memory_.get(), device_memory_.data(), layout_.bytes(),
                     cudaMemcpyDeviceToHost),
          "download");
    std::memcpy(host_shared_.get(), device_shared_, layout_.shared_bytes());
  }

  StepState host;
  StepState device;

 private:
  struct Free {
    void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t{128}); }
  };
  using Memory = std::unique_ptr<std::byte[], Free>;
  static Memory allocate(std::size_t bytes) {
    auto* p = static_cast<std::byte*>(::operator new[](bytes, std::align_val_t{128}));
    std::memset(p, 0, bytes);
    return Memory(p);
  }

  StepStateLayout layout_;
  Memory host_memory_;
  Memory host_shared_;
  DeviceArray<std::byte> device_memory_;
  std::byte* device_shared_ = nullptr;
};

// One token a lane, one lane a row, a logit row each.
inline void fill_decode_tables(const StepState& s, int rows) {
  *s.counts = {.tokens = rows, .lanes = rows, .logit_rows = rows, .feed = 0};
  for (int r = 0; r < rows; ++r) {
    s.position[r] = 0;
    s.lane_of[r] = s.row_of[r] = s.logit_token[r] = s.first_token[r] = r;
    s.first_token[r + 1] = r + 1;
  }
}

}  // namespace pianola::cuda
