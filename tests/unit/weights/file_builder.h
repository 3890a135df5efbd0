// Model files byte by byte, right or wrong on purpose, and a folder to put them in.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "pianola/error.h"

namespace pianola::test {

// Appends little-endian numbers and length-prefixed strings, as GGUF stores them.
class Bytes {
 public:
  template <typename T>
  Bytes& number(T value) {
    static_assert(std::is_arithmetic_v<T>);
    const char* p = reinterpret_cast<const char*>(&value);
    data_.append(p, sizeof value);
    return *this;
  }
  Bytes& u8(std::uint8_t v) { return number(v); }
  Bytes& u32(std::uint32_t v) { return number(v); }
  Bytes& u64(std::uint64_t v) { return number(v); }
  Bytes& raw(std::string_view text) {
    data_.append(text);
    return *this;
  }
  Bytes& string(std::string_view text) { return u64(text.size()).raw(text); }
  Bytes& pad_to(std::size_t alignment) {
    while (data_.size() % alignment != 0) data_ += '\0';
    return *this;
  }
  Bytes& zeros(std::size_t n) {
    data_.append(n, '\0');
    return *this;
  }

  const std::string& str() const { return data_; }
  std::span<const std::byte> span() const { return std::as_bytes(std::span(data_)); }

 private:
  std::string data_;
};

// One GGUF header: pieces are given as they are to be written.
struct Gguf {
  std::uint32_t version = 3;
  std::vector<std::string> keys;     // each: key, type, value
  std::vector<std::string> tensors;  // each: name, rank, dims, type, offset
  std::size_t alignment = 32;
  std::size_t data_bytes = 0;
  std::int64_t extra_keys = 0;  // added to the counts that the header claims
  std::int64_t extra_tensors = 0;

  static std::string tensor(std::string_view name, const std::vector<std::uint64_t>& dims,
                            std::uint32_t type, std::uint64_t offset) {
    Bytes b;
    b.string(name).u32(static_cast<std::uint32_t>(dims.size()));
    for (const std::uint64_t d : dims) b.u64(d);
    return b.u32(type).u64(offset).str();
  }

  Bytes build() const {
    Bytes b;
    b.raw("GGUF").u32(version);
    b.u64(tensors.size() + static_cast<std::uint64_t>(extra_tensors));
    b.u64(keys.size() + static_cast<std::uint64_t>(extra_keys));
    for (const std::string& k : keys) b.raw(k);
    for (const std::string& t : tensors) b.raw(t);
    if (data_bytes > 0) b.pad_to(alignment).zeros(data_bytes);
    return b;
  }
};

inline Bytes safetensors(std::string_view header, std::size_t data_bytes) {
  return Bytes().string(header).zeros(data_bytes);
}

// The message of the Error that `f` throws; fails the test when it throws none.
inline std::string error_of(const std::function<void()>& f, ErrorCode* code = nullptr) {
  try {
    f();
  } catch (const Error& e) {
    if (code) *code = e.code();
    return e.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

// A folder that is removed at the end of the test.
class TempFolder {
 public:
  TempFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "pianola-test-XXXXXX").string();
    if (!::mkdtemp(name.data())) throw std::runtime_error("cannot make " + name);
    path_ = name;
  }
  ~TempFolder() {
    std::error_code ec;
    std::filesystem::remove_all(path_, ec);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path write(const std::string& name, std::string_view text) const {
    std::filesystem::create_directories((path_ / name).parent_path());
    std::ofstream(path_ / name, std::ios::binary) << text;
    return path_ / name;
  }

 private:
  std::filesystem::path path_;
};

// Processor time since its construction: a busy machine does not make a test slow.
class CpuTimer {
 public:
  double seconds() const {
    return static_cast<double>(std::clock() - start_) / static_cast<double>(CLOCKS_PER_SEC);
  }

 private:
  std::clock_t start_ = std::clock();
};

// Where real model files are kept: $PIANOLA_CACHE, or ~/.cache/pianola.
inline std::filesystem::path cache_folder() {
  if (const char* cache = std::getenv("PIANOLA_CACHE")) return cache;
  const char* home = std::getenv("HOME");
  return std::filesystem::path(home ? home : "/") / ".cache" / "pianola";
}

}  // namespace pianola::test
