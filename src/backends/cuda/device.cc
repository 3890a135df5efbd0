#include "backends/cuda/device.h"

#include <cstring>

#include "backends/cuda/cuda_error.h"
#include "backends/cuda/mapped_memory.h"
#include "base/check.h"

namespace pianola::cuda {
namespace {

// Left free beside what is planned: captured graphs, modules, libraries.
constexpr std::size_t kReserve = std::size_t{512} << 20;
constexpr int kLeastCapability = 90;  // clusters of thread blocks, dependent launches

class PinnedMemory final : public DeviceMemory {
 public:
  explicit PinnedMemory(std::size_t bytes) : size_(bytes) {
    void* data = nullptr;
    check(cudaHostAlloc(&data, bytes, cudaHostAllocMapped | cudaHostAllocPortable),
          "allocating pinned host memory");
    data_ = static_cast<std::byte*>(data);
    std::memset(data_, 0, bytes);
  }
  ~PinnedMemory() override { cudaFreeHost(data_); }
  std::byte* data() const override { return data_; }
  std::size_t size() const override { return size_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t size_;
};

}  // namespace

Device::Device(int index) : index_(index) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess || count == 0) {
    // What the runtime says when there is no driver at all is that it is too old.
    fail(ErrorCode::kDevice, "cuda: no usable GPU ({})",
         status == cudaSuccess                   ? "none is present"
         : status == cudaErrorInsufficientDriver ? "no NVIDIA driver, or one older than CUDA 13"
                                                 : cudaGetErrorString(status));
  }
  if (index < 0 || index >= count) {
    fail(ErrorCode::kInvalidArgument, "cuda: device {} was asked for; there are {}", index, count);
  }
  check(cudaSetDevice(index), "choosing the device");
  cudaDeviceProp property = {};
  check(cudaGetDeviceProperties(&property, index), "device properties");
  if (property.major * 10 + property.minor < kLeastCapability) {
    fail(ErrorCode::kUnsupported,
         "cuda: {} has compute capability {}.{}; the kernels need 9.0 or newer", property.name,
         property.major, property.minor);
  }
  name_ = fmt::format("{} (compute capability {}.{}, {} multiprocessors, {:.0f} GiB)",
                      property.name, property.major, property.minor, property.multiProcessorCount,
                      static_cast<double>(property.totalGlobalMem) / (1 << 30));
  multiprocessors_ = property.multiProcessorCount;
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream");
  check(cudaStreamCreateWithFlags(&beside_, cudaStreamNonBlocking), "making a stream");
  void* pinned = nullptr;
  check(cudaHostAlloc(&pinned, kStagingBytes + sizeof(std::int32_t), cudaHostAllocDefault),
        "allocating pinned host memory");
  staging_ = static_cast<std::byte*>(pinned);
  word_ = reinterpret_cast<std::int32_t*>(staging_ + kStagingBytes);
}

Device::~Device() {
  cudaFreeHost(staging_);
  if (beside_) cudaStreamDestroy(beside_);
  if (stream_) cudaStreamDestroy(stream_);
}

std::size_t Device::available_memory() const {
  std::size_t available = 0;
  std::size_t total = 0;
  check(cudaMemGetInfo(&available, &total), "asking for free memory");
  return available > kReserve ? available - kReserve : 0;
}

std::size_t Device::page_bytes() const { return memory_granularity(index_); }

std::unique_ptr<DeviceMemory> Device::allocate(std::size_t bytes, MemoryUse use) {
  if (use == MemoryUse::kShared) return std::make_unique<PinnedMemory>(bytes);
  if (use == MemoryUse::kOnDemand && bytes > 0) {
    return reserve_memory(index_, bytes, stream_);
  }
  return map_memory(index_, bytes);
}

void Device::write(void* device, const void* host, std::size_t bytes) {
  if (bytes > kStagingBytes / 4) {
    check(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream_),
          "copy to the device");
    synchronize();
    return;
  }
  constexpr std::size_t kAlign = 16;
  if (staged_ + bytes > kStagingBytes) synchronize();
  std::memcpy(staging_ + staged_, host, bytes);
  check(cudaMemcpyAsync(device, staging_ + staged_, bytes, cudaMemcpyHostToDevice, stream_),
        "copy to the device");
  staged_ += (bytes + kAlign - 1) / kAlign * kAlign;
}

void Device::read(void* host, const void* device, std::size_t bytes) {
  check(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, stream_),
        "copy from the device");
  synchronize();
}

void Device::copy(void* to, const void* from, std::size_t bytes) {
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_), "copy on the device");
}

void Device::write_word_beside(std::int32_t* device, std::int32_t value, cudaEvent_t after) {
  *word_ = value;
  if (after) check(cudaStreamWaitEvent(beside_, after), "waiting for an event");
  check(cudaMemcpyAsync(device, word_, sizeof(value), cudaMemcpyHostToDevice, beside_),
        "copy to the device");
  check(cudaStreamSynchronize(beside_), "copy to the device");
}

void Device::synchronize() {
  check(cudaStreamSynchronize(stream_), "waiting for the device");
  staged_ = 0;
}

}  // namespace pianola::cuda
