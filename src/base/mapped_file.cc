#include "base/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "base/check.h"

namespace pianola {
namespace {

// Opens a regular file and gives its size; throws a readable error otherwise.
std::pair<int, std::size_t> open_file(const std::filesystem::path& path) {
  // Without O_NONBLOCK, opening a named pipe would wait for a writer for ever.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) {
    const ErrorCode code =
        errno == ENOENT || errno == ENOTDIR ? ErrorCode::kNotFound : ErrorCode::kInvalidArgument;
    fail(code, "{}: cannot open: {}", path.string(), std::strerror(errno));
  }
  struct stat info = {};
  if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    ::close(fd);
    fail(ErrorCode::kInvalidArgument, "{}: not a regular file", path.string());
  }
  return {fd, static_cast<std::size_t>(info.st_size)};
}

}  // namespace

MappedFile::MappedFile(const std::filesystem::path& path) : path_(path) {
  const auto [fd, size] = open_file(path);
  if (size > 0) {
    void* address = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (address == MAP_FAILED) {
      const int reason = errno;
      ::close(fd);
      fail(ErrorCode::kInvalidArgument, "{}: cannot map {} bytes: {}", path.string(), size,
           std::strerror(reason));
    }
    // A few rows of a large table must not bring two megabytes each into this process.
    ::madvise(address, size, MADV_NOHUGEPAGE);
    data_ = static_cast<const std::byte*>(address);
    size_ = size;
  }
  ::close(fd);
}

MappedFile::~MappedFile() {
  if (data_) ::munmap(const_cast<std::byte*>(data_), size_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

void MappedFile::drop(std::size_t offset, std::size_t size) const noexcept {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::size_t begin = (std::min(offset, size_) + page - 1) / page * page;
  const std::size_t end =
      std::min(size_, offset + std::min(size, size_ - std::min(offset, size_))) / page * page;
  if (begin < end) ::madvise(const_cast<std::byte*>(data_) + begin, end - begin, MADV_DONTNEED);
}

std::string read_text_file(const std::filesystem::path& path, std::size_t limit) {
  const auto [fd, size] = open_file(path);
  std::string text;
  if (size > limit) {
    ::close(fd);
    fail(ErrorCode::kInvalidArgument, "{}: {} bytes, at most {} are read", path.string(), size,
         limit);
  }
  text.resize(size);
  std::size_t done = 0;
  while (done < size) {
    const ssize_t n = ::read(fd, text.data() + done, size - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    done += static_cast<std::size_t>(n);
  }
  ::close(fd);
  if (done != size)
    fail(ErrorCode::kInvalidArgument, "{}: could not be read to its end", path.string());
  return text;
}

}  // namespace pianola
