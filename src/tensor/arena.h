// One block of memory that is laid out before it exists.
//
// Regions are reserved first, by size; then the arena is sealed onto memory that a backend gave,
// and every address is final. Nothing can be added, moved or freed afterwards.
//
//   Arena arena;
//   const auto keys = arena.reserve(bytes);
//   auto memory = backend.allocate(arena.size());
//   arena.seal(memory->data());
//   std::byte* p = arena.address(keys);
#pragma once

#include <cstddef>

#include "base/check.h"

namespace pianola {

class Arena {
 public:
  static constexpr std::size_t kAlignment = 128;

  // Offset of a new region of `bytes`, aligned to kAlignment. Only before seal().
  std::size_t reserve(std::size_t bytes) {
    PIANOLA_CHECK(!base_, "arena: reserve after seal");
    const std::size_t offset = size_;
    size_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return offset;
  }

  std::size_t size() const { return size_; }

  // `base` holds size() bytes and outlives the arena's users.
  void seal(std::byte* base) {
    PIANOLA_CHECK(!base_ && (base || size_ == 0), "arena: sealed twice, or onto nothing");
    base_ = base;
  }

  std::byte* address(std::size_t offset) const {
    PIANOLA_CHECK(base_, "arena: address before seal");
    return base_ + offset;
  }

 private:
  std::byte* base_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace pianola
