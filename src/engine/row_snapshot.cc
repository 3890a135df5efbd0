#include "pianola/snapshot.h"

#include <unistd.h>

#include <cstring>
#include <fstream>
#include <string>

#include "base/check.h"

namespace pianola {
namespace {

// The file: this, then the tokens, then the bytes of the caches. Little-endian.
struct FileHeader {
  char magic[8] = {'P', 'I', 'A', 'N', 'O', 'L', 'A', 'S'};
  std::uint32_t version = 2;
  std::uint32_t history = 0;
  std::uint64_t data = 0;
  std::uint64_t checksum = 0;  // of all that follows this field
  std::uint64_t fingerprint = 0;
  std::int32_t length = 0;
  std::int32_t written = 0;
  std::int32_t folded = 0;
  std::int32_t floor = 0;
  std::int32_t input = 0;
  std::int32_t unused = 0;
};

constexpr std::size_t kSummedFrom = offsetof(FileHeader, fingerprint);

// FNV-1a over words of eight bytes, the last one padded with zeros.
std::uint64_t add_to_checksum(std::uint64_t sum, const void* bytes, std::size_t size) {
  const auto* at = static_cast<const std::byte*>(bytes);
  for (std::size_t done = 0; done < size; done += sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    std::memcpy(&word, at + done, std::min(sizeof(word), size - done));
    sum = (sum ^ word) * 0x100000001b3ULL;
    sum ^= sum >> 29;  // a product alone would not carry high bits down
  }
  return sum;
}

std::uint64_t checksum_of(const FileHeader& header, std::span<const std::int32_t> history,
                          std::span<const std::byte> data) {
  const auto* fields = reinterpret_cast<const std::byte*>(&header) + kSummedFrom;
  std::uint64_t sum = add_to_checksum(0xcbf29ce484222325ULL, fields, sizeof(header) - kSummedFrom);
  sum = add_to_checksum(sum, history.data(), history.size_bytes());
  return add_to_checksum(sum, data.data(), data.size_bytes());
}

[[noreturn]] void fail_damaged(const std::filesystem::path& path, const std::string& what) {
  fail(ErrorCode::kInvalidArgument, "{}: not a usable snapshot: {}", path.string(), what);
}

}  // namespace

void RowSnapshot::save(const std::filesystem::path& path) const {
  FileHeader header;
  header.history = static_cast<std::uint32_t>(history_.size());
  header.data = data_.size();
  header.fingerprint = header_.fingerprint;
  header.length = header_.length;
  header.written = header_.written;
  header.folded = header_.folded;
  header.floor = header_.floor;
  header.input = header_.input;
  header.checksum = checksum_of(header, history_, data_);
  // Beside its place first, so that a full disk does not cost the snapshot that was there.
  std::filesystem::path beside = path;
  beside += "." + std::to_string(getpid()) + ".part";
  std::ofstream file(beside, std::ios::binary | std::ios::trunc);
  const auto write = [&file](const void* bytes, std::size_t size) {
    file.write(static_cast<const char*>(bytes), static_cast<std::streamsize>(size));
  };
  write(&header, sizeof(header));
  write(history_.data(), history_.size() * sizeof(std::int32_t));
  write(data_.data(), data_.size());
  file.close();
  std::error_code error;
  if (file) std::filesystem::rename(beside, path, error);
  if (!file || error) {
    std::error_code ignored;
    std::filesystem::remove(beside, ignored);
    fail(ErrorCode::kNotFound, "{}: the snapshot cannot be written", path.string());
  }
}

RowSnapshot RowSnapshot::load(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) fail(ErrorCode::kNotFound, "{}: cannot be opened", path.string());
  std::error_code error;
  const std::uintmax_t size = std::filesystem::file_size(path, error);
  FileHeader header;
  const FileHeader expected;
  if (error || size < sizeof(header) ||
      !file.read(reinterpret_cast<char*>(&header), sizeof(header)) ||
      std::memcmp(header.magic, expected.magic, sizeof(header.magic)) != 0) {
    fail_damaged(path, "it does not begin like one");
  }
  if (header.version != expected.version) {
    fail_damaged(path, fmt::format("it is of version {}, this is version {}", header.version,
                                   expected.version));
  }
  const std::uintmax_t tokens = std::uintmax_t{header.history} * sizeof(std::int32_t);
  const std::uintmax_t rest = size - sizeof(header);
  if (tokens > rest || header.data != rest - tokens) {
    fail_damaged(path, fmt::format("it has {} bytes behind its header, which speaks of {} and {}",
                                   rest, tokens, header.data));
  }
  RowSnapshot snapshot;
  snapshot.history_.resize(header.history);
  snapshot.data_.resize(header.data);
  file.read(reinterpret_cast<char*>(snapshot.history_.data()),
            static_cast<std::streamsize>(tokens));
  file.read(reinterpret_cast<char*>(snapshot.data_.data()),
            static_cast<std::streamsize>(header.data));
  if (!file) fail_damaged(path, "it ends too soon");
  if (checksum_of(header, snapshot.history_, snapshot.data_) != header.checksum) {
    fail_damaged(path, "its checksum is wrong");
  }
  snapshot.header_ = {header.fingerprint, header.length, header.written,
                      header.folded,      header.floor,  header.input};
  return snapshot;
}

}  // namespace pianola
