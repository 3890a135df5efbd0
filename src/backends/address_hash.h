// A hash of addresses and sizes (FNV-1a, a word at a time): equal before and after any use of what
// must not move.
#pragma once

#include <cstdint>

namespace pianola {

class AddressHash {
 public:
  void add_word(std::uint64_t word) { value_ = (value_ ^ word) * 0x100000001b3ULL; }
  void add(const void* address) { add_word(reinterpret_cast<std::uintptr_t>(address)); }
  std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 0xcbf29ce484222325ULL;
};

}  // namespace pianola
