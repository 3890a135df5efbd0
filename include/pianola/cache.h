// Static key/value caches for a forward of your own: allocated once, at addresses that never
// change, so that a captured graph can use them for ever.
//
//   StaticKvCache cache({.layers = {16, {.kv_heads = 8, .key_dim = 64, .value_dim = 64}},
//                        .max_seq_len = 4096, .slots = 2, .type = KvType::kBF16});
//   my_append<<<...>>>(cache.layer<__nv_bfloat16>(3), cache.lengths(), ...);
//   GraphRunner runner(cache);                      // pianola/graph.h
//
// A slot is the place of one sequence. lengths()[slot], a word on the device, is the number of
// tokens that it holds: kernels read their position there, write keys and values at that position,
// and move the word when the token is complete. What lies beyond a length is never read, so going
// back and emptying a slot move the word and touch nothing else.
//
// Not thread-safe. The calls that read or move lengths wait for the device, and are made while
// nothing that uses the cache runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "pianola/error.h"

// Functions for host and device: CUDA's qualifiers, where the compiler has them.
#ifdef __host__
#define PIANOLA_HOST_DEVICE __host__ __device__
#else
#define PIANOLA_HOST_DEVICE
#endif

struct __half;         // NOLINT(bugprone-reserved-identifier): CUDA's name
struct __nv_bfloat16;  // NOLINT(bugprone-reserved-identifier): CUDA's name

namespace pianola {

// Caches of the engine have int8 and fp8 as well; here a cache has no scales.
enum class KvType : std::uint8_t { kF32, kF16, kBF16 };
const char* kv_type_name(KvType type) noexcept;  // "f32", "f16", "bf16"

// The KvType of a C++ type. Specialise it for a 16-bit type of your own.
template <typename T>
struct KvTypeOf;
template <>
struct KvTypeOf<float> {
  static constexpr KvType kType = KvType::kF32;
};
template <>
struct KvTypeOf<__half> {
  static constexpr KvType kType = KvType::kF16;
};
template <>
struct KvTypeOf<__nv_bfloat16> {
  static constexpr KvType kType = KvType::kBF16;
};

// Positions in one block of a cache.
inline constexpr int kKvBlock = 64;

// Element index of (position, kv_head, 0) inside a slot, whose keys (or values) are
// [capacity / 64, kv_heads, 64, dim]: the 64 positions of one head and block lie together.
PIANOLA_HOST_DEVICE constexpr std::size_t kv_index(int position, int kv_head, int kv_heads,
                                                   int dim) {
  const std::size_t block = static_cast<std::size_t>(position / kKvBlock);
  const std::size_t inner = static_cast<std::size_t>(position % kKvBlock);
  const std::size_t heads = static_cast<std::size_t>(kv_heads);
  const std::size_t plane = block * heads + static_cast<std::size_t>(kv_head);
  return (plane * kKvBlock + inner) * static_cast<std::size_t>(dim);
}

// One layer's keys and values, passed to kernels by value.
template <typename T>
struct KvLayer {
  T* keys = nullptr;    // [slots, capacity / 64, kv_heads, 64, key_dim]
  T* values = nullptr;  // [slots, capacity / 64, kv_heads, 64, value_dim]
  int kv_heads = 0;
  int key_dim = 0;
  int value_dim = 0;
  int capacity = 0;  // positions in a slot: max_seq_len rounded up to whole blocks

  // [key_dim], of one token and head.
  PIANOLA_HOST_DEVICE constexpr T* key(int slot, int position, int kv_head) const {
    return keys + slot_index(slot, key_dim) + kv_index(position, kv_head, kv_heads, key_dim);
  }
  // [value_dim]
  PIANOLA_HOST_DEVICE constexpr T* value(int slot, int position, int kv_head) const {
    return values + slot_index(slot, value_dim) + kv_index(position, kv_head, kv_heads, value_dim);
  }
  PIANOLA_HOST_DEVICE constexpr std::size_t slot_index(int slot, int dim) const {
    return static_cast<std::size_t>(slot) * static_cast<std::size_t>(capacity) *
           static_cast<std::size_t>(kv_heads) * static_cast<std::size_t>(dim);
  }
};

struct KvLayerShape {
  int kv_heads = 0;
  int key_dim = 0;
  int value_dim = 0;
};

struct KvCacheOptions {
  std::vector<KvLayerShape> layers = {};  // heads and widths may differ from layer to layer
  int max_seq_len = 0;                    // tokens a slot can hold: the ceiling of all later calls
  int slots = 1;
  KvType type = KvType::kF16;
  std::string backend = "cuda";  // or "cpu", "reference": memory of the host
  int device = 0;                // of the cuda backend
};

// What a cache takes, in bytes.
struct KvCacheBytes {
  std::size_t per_slot = 0;  // keys and values of all layers
  std::size_t total = 0;     // of all slots, with lengths and alignment: what is allocated
  // Two lines for people.
  std::string to_string() const;
};

class StaticKvCache {
 public:
  // What a cache would take; allocates nothing. Throws InvalidArgument for options out of range.
  static KvCacheBytes plan(const KvCacheOptions& options);

  // Allocates everything, zeroed; every length is 0. Throws OutOfMemory with the plan, before
  // anything is allocated, when the device has less; Unsupported for a backend that is not in this
  // build; Device when there is no usable GPU.
  explicit StaticKvCache(const KvCacheOptions& options);
  ~StaticKvCache();
  // Addresses go with the contents: a GraphRunner that captured a cache refuses the object that was
  // moved from or assigned to.
  StaticKvCache(StaticKvCache&& other) noexcept;
  StaticKvCache& operator=(StaticKvCache&& other) noexcept;

  const KvCacheOptions& options() const;
  KvCacheBytes bytes() const;
  // Everything that was allocated: memory of the device.
  std::span<std::byte> memory() const;

  // Throws InvalidArgument when there is no such layer, or when the cache holds another type than
  // T.
  template <typename T>
  KvLayer<T> layer(int index) const {
    const RawLayer raw = raw_layer(index, KvTypeOf<T>::kType);
    return {static_cast<T*>(raw.keys), static_cast<T*>(raw.values), raw.shape.kv_heads,
            raw.shape.key_dim,         raw.shape.value_dim,         raw.capacity};
  }
  // [slots] on the device: tokens in each slot. Kernels read and move them.
  std::int32_t* lengths() const;
  // A hash of every address, and of what lies there: equal before and after any use.
  std::uint64_t address_certificate() const noexcept;

  // Tokens in a slot, read from the device.
  int length(int slot) const;
  // Counts n tokens whose keys and values a kernel has written behind the length: for kernels that
  // leave lengths() alone. Throws ContextOverflow naming length, request and capacity.
  void advance(int slot, int n);
  // Says that kernels may now add up to n tokens to each of these distinct slots, moving lengths()
  // themselves. Throws ContextOverflow when one of them is too long for it; then nothing has
  // changed. Looks at the device only when what earlier calls allowed would not fit.
  void allow(std::span<const int> slots, int n);
  // How many tokens allow() would let be added to each of these slots.
  int room(std::span<const int> slots) const;

  // Empty, and as good as new.
  void reset(int slot);
  // Forgets all but the first n tokens, 0 <= n <= length, or the last n. Throws ContextOverflow
  // when there are fewer; then nothing has changed.
  void keep_first(int slot, int n);
  void drop_last(int slot, int n);

 private:
  struct RawLayer {
    void* keys;
    void* values;
    KvLayerShape shape;
    int capacity;
  };
  struct Impl;
  RawLayer raw_layer(int index, KvType type) const;
  Impl& impl() const;

  std::unique_ptr<Impl> impl_;
};

}  // namespace pianola
