// The attention kernels against double precision on fresh random inputs. Every cache position that
// no token has written holds NaN, as do outputs before a launch and the scratch beyond its counters.
#include "backends/cuda/kernels/attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "backends/cuda/kernels/attention_common.cuh"
#include "tensor/half.h"

namespace pianola::cuda {
namespace {

void ok(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

template <typename T>
class DeviceArray {
 public:
  DeviceArray() = default;
  explicit DeviceArray(const std::vector<T>& host) : size_(host.size()) {
    ok(cudaMalloc(reinterpret_cast<void**>(&data_), std::max<std::size_t>(size_, 1) * sizeof(T)));
    write(host);
  }
  DeviceArray(DeviceArray&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~DeviceArray() { cudaFree(data_); }

  T* get() const { return data_; }
  void write(const std::vector<T>& host) {
    ok(cudaMemcpy(data_, host.data(), size_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  std::vector<T> read() const {
    std::vector<T> host(size_);
    ok(cudaMemcpy(host.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
  }

 private:
  T* data_ = nullptr;
  std::size_t size_ = 0;
};

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Shape {
  DType dtype = DType::kBF16;
  int heads = 4;
  int kv_heads = 2;
  int key_dim = 64;
  int value_dim = 64;
  int capacity = 320;
  int slots = 4;
  RopeStyle style = RopeStyle::kHalf;
  bool norms = false;
  float attention_factor = 1;

  std::size_t element() const { return dtype == DType::kF32 ? 4 : 2; }
  std::size_t keys() const { return std::size_t(slots) * capacity * kv_heads * key_dim; }
  std::size_t values() const { return std::size_t(slots) * capacity * kv_heads * value_dim; }
  float scale() const { return 1.0F / std::sqrt(static_cast<float>(key_dim)); }
  std::string name() const {
    return std::string(dtype_name(dtype)) + " " + std::to_string(heads) + "/" +
           std::to_string(kv_heads) + " heads of " + std::to_string(key_dim) + "/" +
           std::to_string(value_dim);
  }
};

// dtype_name() lives in a source file that this test does not need.
}  // namespace
}  // namespace pianola::cuda
