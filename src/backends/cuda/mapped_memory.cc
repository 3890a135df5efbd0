#include "backends/cuda/mapped_memory.h"

#include <cuda.h>

#include <vector>

#include "backends/cuda/cuda_error.h"
#include "backends/paged_memory.h"
#include "base/check.h"

namespace pianola::cuda {
namespace {

// The driver's functions for reserved addresses.
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
    function = reinterpret_cast<F>(driver_function(name, 12000));
  }
};

void check_driver(CUresult status, const char* what) {
  if (status == CUDA_SUCCESS) return;
  fail(status == CUDA_ERROR_OUT_OF_MEMORY ? ErrorCode::kOutOfMemory : ErrorCode::kDevice,
       "cuda: {}: driver error {}", what, static_cast<int>(status));
}

CUmemAllocationProp on_device(int device) {
  CUmemAllocationProp property = {};
  property.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  property.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  property.location.id = device;
  return property;
}

CUmemAccessDesc read_and_write(const CUmemAllocationProp& property) {
  CUmemAccessDesc access = {};
  access.location = property.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  return access;
}

class MappedMemory final : public DeviceMemory {
 public:
  MappedMemory(int device, std::size_t bytes) : size_(bytes) {
    if (bytes == 0) return;
    const VirtualMemory& f = VirtualMemory::get();
    const CUmemAllocationProp property = on_device(device);
    const std::size_t unit = memory_granularity(device);
    mapped_ = (bytes + unit - 1) / unit * unit;
    try {
      check_driver(f.reserve(&address_, mapped_, 0, 0, 0), "reserving addresses");
      check_driver(f.create(&pages_, mapped_, &property, 0), "allocating device memory");
      has_pages_ = true;
      check_driver(f.map(address_, mapped_, 0, pages_, 0), "mapping device memory");
      is_mapped_ = true;
      const CUmemAccessDesc access = read_and_write(property);
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

class ReservedMemory final : public PagedMemory {
 public:
  ReservedMemory(int device, std::size_t bytes, cudaStream_t stream)
      : PagedMemory(bytes, memory_granularity(device)),
        property_(on_device(device)),
        stream_(stream) {
    const std::size_t addresses = pages() * page_bytes();
    if (VirtualMemory::get().reserve(&address_, addresses, 0, 0, 0) != CUDA_SUCCESS) {
      fail(ErrorCode::kOutOfMemory, "cuda: the driver refused {} bytes of addresses for caches",
           addresses);
    }
    handles_.resize(pages());
  }
  ~ReservedMemory() override {
    cudaStreamSynchronize(stream_);
    for (std::size_t page = 0; page < pages(); ++page) {
      if (is_resident(page)) unmap(page);
    }
    VirtualMemory::get().free_address(address_, pages() * page_bytes());
  }
  ReservedMemory(const ReservedMemory&) = delete;
  ReservedMemory& operator=(const ReservedMemory&) = delete;

  std::byte* data() const override { return reinterpret_cast<std::byte*>(address_); }

 private:
  CUdeviceptr at(std::size_t page) const { return address_ + page * page_bytes(); }

  // A graph that was captured before finds the page: it is the device that looks addresses up.
  void bring(std::size_t page) override {
    const VirtualMemory& f = VirtualMemory::get();
    CUmemGenericAllocationHandle handle = 0;
    check_driver(f.create(&handle, page_bytes(), &property_, 0), "allocating device memory");
    bool is_mapped = false;
    try {
      check_driver(f.map(at(page), page_bytes(), 0, handle, 0), "mapping device memory");
      is_mapped = true;
      const CUmemAccessDesc access = read_and_write(property_);
      check_driver(f.set_access(at(page), page_bytes(), &access, 1), "device memory access");
      check(cudaMemsetAsync(reinterpret_cast<void*>(at(page)), 0, page_bytes(), stream_),
            "clearing device memory");
    } catch (...) {
      if (is_mapped) f.unmap(at(page), page_bytes());
      f.release(handle);
      throw;
    }
    handles_[page] = handle;
  }
  void take(std::size_t page) override { unmap(page); }
  void finish_work() override { check(cudaStreamSynchronize(stream_), "waiting for the device"); }

  void unmap(std::size_t page) {
    const VirtualMemory& f = VirtualMemory::get();
    f.unmap(at(page), page_bytes());
    f.release(handles_[page]);
  }

  CUmemAllocationProp property_;
  cudaStream_t stream_;
  CUdeviceptr address_ = 0;
  std::vector<CUmemGenericAllocationHandle> handles_;  // of resident pages
};

}  // namespace

std::size_t memory_granularity(int device) {
  const CUmemAllocationProp property = on_device(device);
  std::size_t unit = 0;
  check_driver(
      VirtualMemory::get().granularity(&unit, &property, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
      "memory granularity");
  return unit;
}

std::unique_ptr<DeviceMemory> map_memory(int device, std::size_t bytes) {
  return std::make_unique<MappedMemory>(device, bytes);
}

std::unique_ptr<DeviceMemory> reserve_memory(int device, std::size_t bytes, cudaStream_t stream) {
  return std::make_unique<ReservedMemory>(device, bytes, stream);
}

}  // namespace pianola::cuda
