// A file mapped read-only into memory.
//
//   MappedFile file("model.gguf");          // NotFound, InvalidModel when it cannot be mapped
//   auto bytes = file.bytes();              // valid as long as `file` lives
//   file.drop(offset, size);                // pages no longer needed: give them back
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>

namespace pianola {

class MappedFile {
 public:
  MappedFile() = default;
  // Throws NotFound when the path does not exist, InvalidArgument when it is a folder or cannot be
  // read. An empty file maps to an empty span.
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return {data_, size_}; }
  const std::filesystem::path& path() const { return path_; }

  // Tells the kernel that whole pages inside [offset, offset + size) will not be read again soon.
  // Reading them later is correct, only slower. Out of range is clipped.
  void drop(std::size_t offset, std::size_t size) const noexcept;

 private:
  std::filesystem::path path_;
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

// The whole of a small text file. Throws NotFound, and InvalidArgument when it is larger than
// `limit` bytes or cannot be read.
std::string read_text_file(const std::filesystem::path& path, std::size_t limit);

}  // namespace pianola
