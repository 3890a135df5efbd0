// A row outside its engine: its tokens, and what the caches hold of them. Made by
// Engine::snapshot(), taken up by Engine::restore() of any engine with the same model, cache type
// and options that shape caches; kept in memory or in a file.
//
//   engine.snapshot(row).save("session.pianola");
//   engine.restore(row, RowSnapshot::load("session.pianola"));
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

namespace pianola {

class RowSnapshot {
 public:
  // Writes the whole file or changes nothing. Throws NotFound when it cannot be written.
  void save(const std::filesystem::path& path) const;
  // Throws NotFound when there is no such file, InvalidArgument when it is not a snapshot, is
  // damaged, or is of another version.
  static RowSnapshot load(const std::filesystem::path& path);

  // Tokens known: computed and queued.
  std::span<const std::int32_t> history() const { return history_; }
  // Tokens in the caches.
  int length() const { return header_.length; }
  // Bytes of the caches.
  std::size_t bytes() const { return data_.size(); }

 private:
  friend class Engine;
  struct Header {
    std::uint64_t fingerprint = 0;  // of the model and the shape of its caches
    std::int32_t length = 0;
    std::int32_t written = 0;
    std::int32_t folded = 0;
    std::int32_t floor = 0;
    std::int32_t input = 0;  // tokens of an encoder's input, whose caches are in the data too
  };
  Header header_;
  std::vector<std::int32_t> history_;
  std::vector<std::byte> data_;
};

}  // namespace pianola
