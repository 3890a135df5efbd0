// Hashing for vocabularies: an open-addressing map from 64-bit keys, and a hash of byte strings.
//
//   FlatMap<Merge> merges;
//   merges.reserve(n);
//   merges.put(pair_key(left, right), {rank, id});
//   if (const Merge* merge = merges.find(key)) ...
//
// Hashes are salted once per process, so that a hostile file cannot choose keys that collide; no
// result depends on the salt.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string_view>
#include <vector>

namespace pianola {

__extension__ using Uint128 = unsigned __int128;

inline std::uint64_t fold_multiply(std::uint64_t a, std::uint64_t b) {
  const Uint128 product = static_cast<Uint128>(a) * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

inline std::uint64_t hash_salt() {
  static const std::uint64_t salt = [] {
    std::random_device device;
    return (static_cast<std::uint64_t>(device()) << 32 | device()) | 1;
  }();
  return salt;
}

inline std::uint64_t hash_bytes(std::string_view text, std::uint64_t salt) {
  const char* p = text.data();
  std::size_t n = text.size();
  std::uint64_t h = salt ^ (n * 0x9E3779B97F4A7C15U);
  for (; n >= 8; p += 8, n -= 8) {
    std::uint64_t word;
    std::memcpy(&word, p, 8);
    h = fold_multiply(h ^ word, 0xD6E8FEB86659FD93U ^ salt);
  }
  std::uint64_t word = 0;
  if (n != 0) std::memcpy(&word, p, n);
  return fold_multiply(h ^ word, 0xA0761D6478BD642FU ^ salt);
}

template <typename V>
class FlatMap {
 public:
  // Room for n keys without growing.
  void reserve(std::size_t n) {
    const std::size_t wanted = std::bit_ceil(n * 2 + 8);
    if (wanted > slots_.size()) rehash(wanted);
  }

  // Sets the value of a key (any but 2^64 - 1). The last value put for a key stays.
  void put(std::uint64_t key, const V& value) {
    if ((size_ + 1) * 2 > slots_.size()) rehash(slots_.empty() ? 16 : slots_.size() * 2);
    std::size_t i = start(key);
    while (slots_[i].key != kEmpty && slots_[i].key != key) i = (i + 1) & mask_;
    if (slots_[i].key == kEmpty) ++size_;
    slots_[i] = {key, value};
  }

  const V* find(std::uint64_t key) const {
    if (slots_.empty()) return nullptr;
    for (std::size_t i = start(key);; i = (i + 1) & mask_) {
      if (slots_[i].key == key) return &slots_[i].value;
      if (slots_[i].key == kEmpty) return nullptr;
    }
  }

  std::size_t size() const { return size_; }

 private:
  static constexpr std::uint64_t kEmpty = ~std::uint64_t{0};
  struct Slot {
    std::uint64_t key = kEmpty;
    V value{};
  };

  std::size_t start(std::uint64_t key) const {
    return static_cast<std::size_t>(fold_multiply(key ^ salt_, 0x9E3779B97F4A7C15U)) & mask_;
  }

  void rehash(std::size_t slots) {
    std::vector<Slot> old(slots);
    old.swap(slots_);
    mask_ = slots - 1;
    for (const Slot& slot : old) {
      if (slot.key == kEmpty) continue;
      std::size_t i = start(slot.key);
      while (slots_[i].key != kEmpty) i = (i + 1) & mask_;
      slots_[i] = slot;
    }
  }

  std::vector<Slot> slots_;
  std::size_t mask_ = 0;
  std::size_t size_ = 0;
  std::uint64_t salt_ = hash_salt();
};

}  // namespace pianola
