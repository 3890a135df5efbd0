#include "backends/host_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <fstream>
#include <limits>
#include <string>

#include "backends/paged_memory.h"
#include "base/check.h"

namespace pianola {
namespace {

class HostMemory final : public DeviceMemory {
 public:
  HostMemory(std::size_t bytes, MemoryUse use) : size_(bytes) {
    if (bytes == 0) return;
    void* address =
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (address == MAP_FAILED) {
      fail(ErrorCode::kOutOfMemory, "memory: the system refused {} bytes", bytes);
    }
    data_ = static_cast<std::byte*>(address);
    // Advice only: large pages save address translations where everything is read anyway.
    ::madvise(address, bytes, use == MemoryUse::kDense ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  }
  ~HostMemory() override {
    if (data_) ::munmap(data_, size_);
  }
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  std::byte* data() const override { return data_; }
  std::size_t size() const override { return size_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

std::atomic<std::size_t> page_bytes_of_host = 0;

// Addresses that fault until their pages are required.
class GuardedMemory final : public PagedMemory {
 public:
  GuardedMemory(std::size_t bytes, std::size_t page) : PagedMemory(bytes, page) {
    void* address = ::mmap(nullptr, pages() * page, PROT_NONE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED) {
      fail(ErrorCode::kOutOfMemory, "memory: the system refused addresses for {} bytes", bytes);
    }
    data_ = static_cast<std::byte*>(address);
  }
  ~GuardedMemory() override { ::munmap(data_, pages() * page_bytes()); }
  GuardedMemory(const GuardedMemory&) = delete;
  GuardedMemory& operator=(const GuardedMemory&) = delete;

  std::byte* data() const override { return data_; }

 private:
  void bring(std::size_t page) override {
    if (::mprotect(data_ + page * page_bytes(), page_bytes(), PROT_READ | PROT_WRITE) != 0) {
      fail(ErrorCode::kOutOfMemory, "memory: the system refused a page of {} bytes", page_bytes());
    }
  }
  void take(std::size_t page) override {
    std::byte* at = data_ + page * page_bytes();
    ::madvise(at, page_bytes(), MADV_DONTNEED);  // zeros when it comes again
    ::mprotect(at, page_bytes(), PROT_NONE);
  }

  std::byte* data_ = nullptr;
};

// The number in a file of one number; the largest value when there is none ("max", no file).
std::size_t read_number(const char* path) {
  std::ifstream file(path);
  std::size_t value = 0;
  return file >> value ? value : std::numeric_limits<std::size_t>::max();
}

std::size_t available_in_meminfo() {
  std::ifstream file("/proc/meminfo");
  std::string key;
  std::size_t kilobytes = 0;
  std::string unit;
  while (file >> key >> kilobytes) {
    std::getline(file, unit);
    if (key == "MemAvailable:") return kilobytes * 1024;
  }
  return std::numeric_limits<std::size_t>::max();
}

}  // namespace

std::unique_ptr<DeviceMemory> allocate_host_memory(std::size_t bytes, MemoryUse use) {
  const std::size_t page = host_page_bytes();
  if (use == MemoryUse::kOnDemand && page > 0 && bytes > 0) {
    return std::make_unique<GuardedMemory>(bytes, page);
  }
  return std::make_unique<HostMemory>(bytes, use);
}

void set_host_page_bytes(std::size_t bytes) { page_bytes_of_host = bytes; }
std::size_t host_page_bytes() { return page_bytes_of_host; }

std::size_t available_host_memory() {
  std::size_t available = available_in_meminfo();
  const std::size_t limit = read_number("/sys/fs/cgroup/memory.max");
  const std::size_t used = read_number("/sys/fs/cgroup/memory.current");
  if (limit != std::numeric_limits<std::size_t>::max() && used < limit) {
    available = std::min(available, limit - used);
  }
  return available;
}

}  // namespace pianola
