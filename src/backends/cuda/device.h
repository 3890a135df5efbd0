// One GPU: its streams, its memory on reserved address ranges, and copies in order with what it
// computes.
#pragma once

#include <cuda_runtime.h>

#include <memory>
#include <string>
#include <vector>

#include "backends/backend.h"

namespace pianola::cuda {

class Device {
 public:
  // Throws Device when there is no such GPU or its driver is too old, Unsupported when it is older
  // than the kernels that were built.
  explicit Device(int index);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const std::string& name() const { return name_; }
  int multiprocessors() const { return multiprocessors_; }
  cudaStream_t stream() const { return stream_; }

  // What this process may still allocate, less a reserve for captured graphs and for libraries.
  std::size_t available_memory() const;
  // Of kOnDemand memory, whose pages come when they are required.
  std::size_t page_bytes() const;
  // Zeroed. kShared is host memory that the device reaches at the same address; the rest is device
  // memory mapped behind a reserved range of addresses. Throws OutOfMemory; nothing is left behind.
  std::unique_ptr<DeviceMemory> allocate(std::size_t bytes, MemoryUse use);

  // In order on stream(). The host's bytes are taken before it returns; small writes do not wait.
  void write(void* device, const void* host, std::size_t bytes);
  void read(void* host, const void* device, std::size_t bytes);
  void copy(void* to, const void* from, std::size_t bytes);
  // One word, beside whatever stream() is doing, and behind `after` when there is one.
  void write_word_beside(std::int32_t* device, std::int32_t value, cudaEvent_t after = nullptr);
  void synchronize();

 private:
  static constexpr std::size_t kStagingBytes = std::size_t{1} << 20;

  int index_;
  std::string name_;
  int multiprocessors_ = 0;
  cudaStream_t stream_ = nullptr;
  cudaStream_t beside_ = nullptr;
  std::byte* staging_ = nullptr;  // pinned; written front to back, then again after a wait
  std::size_t staged_ = 0;
  std::int32_t* word_ = nullptr;  // pinned
};

}  // namespace pianola::cuda
