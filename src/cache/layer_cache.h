// The kinds of layer cache: what a model declares of each (specs), and what kernels see (views).
//
// Keys and values are block-major, [slots, capacity / 64, kv_heads, 64, dim]: a token's pages are
// few, so mapping on demand pays, and the 64 positions of one head lie together.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tensor/dtype.h"

namespace pianola {

// Positions in one block of a cache.
inline constexpr int kCacheBlock = 64;

// Attention over earlier positions: over all of them, where rollback needs nothing and only the
// length moves; or, with a window, over the last `window` ones, the token's own among them. Then
// the cache is a ring that holds a few more positions than the window, and position p lies where
// p % capacity does.
struct AttentionSpec {
  int kv_heads = 0;
  int key_dim = 0;
  int value_dim = 0;
  int window = 0;  // 0: no window
};

// What all layers of a stack share.
struct CacheShape {
  DType dtype = DType::kF16;
  int slots = 1;
  int capacity = 0;  // tokens a slot can hold, a multiple of kCacheBlock
};

// One layer's buffers at their final addresses.
struct LayerCacheView {
  DType dtype = DType::kF16;
  int kv_heads = 0;
  int key_dim = 0;
  int value_dim = 0;
  int capacity = 0;                // positions a slot holds, a multiple of kCacheBlock
  int window = 0;                  // 0: no window, and every position is below capacity
  std::size_t key_slot_bytes = 0;  // stride from slot to slot
  std::size_t value_slot_bytes = 0;
  std::byte* keys = nullptr;    // [slots, capacity / 64, kv_heads, 64, key_dim]
  std::byte* values = nullptr;  // [slots, capacity / 64, kv_heads, 64, value_dim]

  std::byte* key_slot(int slot) const {
    return keys + static_cast<std::size_t>(slot) * key_slot_bytes;
  }
  std::byte* value_slot(int slot) const {
    return values + static_cast<std::size_t>(slot) * value_slot_bytes;
  }
};

// The first position that a token at `position` attends to.
inline int window_begin(int position, int window) {
  return window > 0 && position >= window ? position - window + 1 : 0;
}

// Element index of (position, kv_head, 0) inside a slot; of a ring, give position % capacity.
inline std::size_t cache_index(int position, int kv_head, int kv_heads, int dim) {
  const auto block = static_cast<std::size_t>(position / kCacheBlock);
  const auto inner = static_cast<std::size_t>(position % kCacheBlock);
  return ((block * static_cast<std::size_t>(kv_heads) + static_cast<std::size_t>(kv_head)) *
              kCacheBlock +
          inner) *
         static_cast<std::size_t>(dim);
}

}  // namespace pianola
