// Memory and comparisons for tests of CUDA kernels. Every call is checked: a test that cannot use
// the GPU fails.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstring>
#include <span>
#include <vector>

#include "backends/cuda/cuda_error.h"
#include "backends/cuda/kernels/launch.h"

namespace pianola::cuda {

// A device array; new memory is filled with 0xff bytes: NaN as floats, -1 as integers.
template <typename T>
class DeviceArray {
 public:
  DeviceArray() = default;
  explicit DeviceArray(std::size_t count) : count_(count) {
    check(cudaMalloc(reinterpret_cast<void**>(&data_), bytes() + kGuard), "test memory");
    check(cudaMemset(data_, 0xff, bytes() + kGuard), "test memory");
    settle();
  }
  explicit DeviceArray(std::span<const T> values) : DeviceArray(values.size()) { write(values); }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(std::span<const T>(values)) {}
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(DeviceArray&& other) noexcept : count_(other.count_), data_(other.data_) {
    other.data_ = nullptr;
    other.count_ = 0;
  }
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }

  T* data() const { return data_; }
  std::size_t size() const { return count_; }
  std::size_t bytes() const { return count_ * sizeof(T); }

  void write(std::span<const T> values) {
    check(cudaMemcpy(data_, values.data(), values.size_bytes(), cudaMemcpyHostToDevice), "write");
    settle();
  }
  void poison() { fill(0xff); }
  void zero() { fill(0); }
  std::vector<T> read() const {
    check(cudaDeviceSynchronize(), "kernels under test");
    std::vector<T> values(count_);
    check(cudaMemcpy(values.data(), data_, bytes(), cudaMemcpyDeviceToHost), "read");
    return values;
  }
  // True while nothing wrote past the end.
  bool intact() const {
    std::vector<unsigned char> guard(kGuard);
    check(cudaMemcpy(guard.data(), reinterpret_cast<const char*>(data_) + bytes(), kGuard,
                     cudaMemcpyDeviceToHost),
          "read");
    for (const unsigned char byte : guard) {
      if (byte != 0xff) return false;
    }
    return true;
  }

 private:
  // Copies from pageable memory and memsets may return before they are done, and a stream of its
  // own does not wait for them.
  static void settle() { check(cudaDeviceSynchronize(), "test memory"); }
  void fill(int byte) {
    check(cudaMemset(data_, byte, bytes()), "test memory");
    settle();
  }

  static constexpr std::size_t kGuard = 256;
  std::size_t count_ = 0;
  T* data_ = nullptr;
};

inline int multiprocessors() {
  int count = 0;
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0), "multiprocessors");
  return count;
}

inline Launch test_launch(bool dependent = false) {
  return {.stream = nullptr, .sms = multiprocessors(), .dependent = dependent};
}

}  // namespace pianola::cuda
