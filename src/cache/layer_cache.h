// The kinds of layer cache: what a model declares of each (specs), and what kernels see (views).
//
// Keys and values are block-major, [slots, capacity / 64, kv_heads, 64, dim]: a token's pages are
// few, so mapping on demand pays, and the 64 positions of one head lie together.
//
// int8 elements are multiples of a scale, one f32 for each position and head of the keys and one of
// the values: the largest magnitude / 127, computed when they are appended. The scales of a slot
// lie behind its elements, [capacity / 64, kv_heads, 64]. A head that holds NaN or an infinity has
// the scale NaN.
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
  std::size_t key_slot_bytes = 0;  // stride from slot to slot, scales included
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

// Whether elements of this type are multiples of a scale that lies beside them.
inline bool has_scales(DType dtype) { return dtype == DType::kI8; }

// Bytes of one slot's keys or values without their scales: where the scales begin.
inline std::size_t cache_element_bytes(DType dtype, int capacity, int kv_heads, int dim) {
  return static_cast<std::size_t>(capacity) * static_cast<std::size_t>(kv_heads) *
         row_bytes(dtype, static_cast<std::size_t>(dim));
}

// Bytes of one slot's keys or values with their scales.
inline std::size_t cache_slot_bytes(DType dtype, int capacity, int kv_heads, int dim) {
  const std::size_t scales =
      has_scales(dtype) ? cache_element_bytes(DType::kF32, capacity, kv_heads, 1) : 0;
  return cache_element_bytes(dtype, capacity, kv_heads, dim) + scales;
}

// The first position that a token at `position` attends to.
inline int window_begin(int position, int window) {
  return window > 0 && position >= window ? position - window + 1 : 0;
}

// Element index of (position, kv_head, 0) inside a slot; of a ring, give position % capacity. With
// dim = 1, the index of its scale.
inline std::size_t cache_index(int position, int kv_head, int kv_heads, int dim) {
  const auto block = static_cast<std::size_t>(position / kCacheBlock);
  const auto inner = static_cast<std::size_t>(position % kCacheBlock);
  return ((block * static_cast<std::size_t>(kv_heads) + static_cast<std::size_t>(kv_head)) *
              kCacheBlock +
          inner) *
         static_cast<std::size_t>(dim);
}

}  // namespace pianola
