#include "backends/cuda/device.h"

#include <cuda.h>

#include <cstring>

#include "backends/cuda/cuda_error.h"
#include "base/check.h"

namespace pianola::cuda {
namespace {

// Left free beside what is planned: captured graphs, modules, libraries.
constexpr std::size_t kReserve = std::size_t{512} << 20;
constexpr int kLeastCapability = 80;

// The driver's functions for reserved addresses, found at run time so that nothing links to it.
class VirtualMemory {
 public:
  static const VirtualMemory& get() {
    static const VirtualMemory functions;
    return functions;
  }

  decltype(&cuMemGetAllocationGranularity) granularity = nullptr;
  decltype(&cuMemAddressReserve) reserve = nullptr;
  decltype(&cuMemAddressFree) free_address = nullptr;
  decltype(&cuMemCreate) create = nullptr;
  decltype(&cuMemRelease) release = nullptr;
  decltype(&cuMemMap) map = nullptr;
  decltype(&cuMemUnmap) unmap = nullptr;
  decltype(&cuMemSetAccess) set_access = nullptr;

 private:
  VirtualMemory() {
    find("cuMemGetAllocationGranularity", granularity);
    find("cuMemAddressReserve", reserve);
    find("cuMemAddressFree", free_address);
    find("cuMemCreate", create);
    find("cuMemRelease", release);
    find("cuMemMap", map);
    find("cuMemUnmap", unmap);
    find("cuMemSetAccess", set_access);
  }
  template <typename F>
  static void find(const char* name, F& function) {
    void* address = nullptr;
    cudaDriverEntryPointQueryResult result = {};
    check(cudaGetDriverEntryPointByVersion(name, &address, 12000, cudaEnableDefault, &result),
          name);
    if (result != cudaDriverEntryPointSuccess || !address) {
      fail(ErrorCode::kDevice, "cuda: the driver has no {}; it is too old", name);
    }
    function = reinterpret_cast<F>(address);
  }
};

void check_driver(CUresult status, const char* what) {
  if (status == CUDA_SUCCESS) return;
  fail(status == CUDA_ERROR_OUT_OF_MEMORY ? ErrorCode::kOutOfMemory : ErrorCode::kDevice,
       "cuda: {}: driver error {}", what, static_cast<int>(status));
}

class MappedMemory final : public DeviceMemory {
 public:
  MappedMemory(int device, std::size_t bytes) : size_(bytes) {
    if (bytes == 0) return;
    const VirtualMemory& f = VirtualMemory::get();
    CUmemAllocationProp property = {};
    property.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    property.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    property.location.id = device;
    std::size_t unit = 0;
    check_driver(f.granularity(&unit, &property, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
                 "memory granularity");
    mapped_ = (bytes + unit - 1) / unit * unit;
    try {
      check_driver(f.reserve(&address_, mapped_, 0, 0, 0), "reserving addresses");
      check_driver(f.create(&pages_, mapped_, &property, 0), "allocating device memory");
      has_pages_ = true;
      check_driver(f.map(address_, mapped_, 0, pages_, 0), "mapping device memory");
      is_mapped_ = true;
      CUmemAccessDesc access = {};
      access.location = property.location;
      access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
      check_driver(f.set_access(address_, mapped_, &access, 1), "device memory access");
      check(cudaMemset(data(), 0, bytes), "clearing device memory");
      check(cudaDeviceSynchronize(), "clearing device memory");
    } catch (...) {
      release();
      throw;
    }
  }
  ~MappedMemory() override { release(); }
  std::byte* data() const override { return reinterpret_cast<std::byte*>(address_); }
  std::size_t size() const override { return size_; }

 private:
  void release() noexcept {
    const VirtualMemory& f = VirtualMemory::get();
    if (is_mapped_) f.unmap(address_, mapped_);
    if (has_pages_) f.release(pages_);
    if (address_) f.free_address(address_, mapped_);
    is_mapped_ = has_pages_ = false;
    address_ = 0;
  }

  std::size_t size_;
  std::size_t mapped_ = 0;
  CUdeviceptr address_ = 0;
  CUmemGenericAllocationHandle pages_ = 0;
  bool has_pages_ = false;
  bool is_mapped_ = false;
};

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
         "cuda: {} has compute capability {}.{}; the kernels need 8.0 or newer", property.name,
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

std::unique_ptr<DeviceMemory> Device::allocate(std::size_t bytes, MemoryUse use) {
  if (use == MemoryUse::kShared) return std::make_unique<PinnedMemory>(bytes);
  return std::make_unique<MappedMemory>(index_, bytes);
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
