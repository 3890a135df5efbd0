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

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>

#include "tensor/dtype.h"

namespace pianola {

// Positions in one block of a cache.
inline constexpr int kCacheBlock = 64;

// Attention over earlier positions: over all of them, where rollback needs nothing and only the
// length moves; or, with a window, over the last `window` ones, the token's own among them. Then
// the cache is a ring that holds a few more positions than the window, and position p lies where
// p % capacity does.
//
// What an encoder has made of an input is a cache too: decoding reads all of it and adds nothing,
// so that rollback needs nothing, and rows that go on from one input share its slot.
enum class CacheHolds : std::uint8_t {
  kTokens,  // of a row, in the row's slot
  kInput,   // keys and values of an encoder's output: a slot an input
  kStep,    // of the encoder's step at hand, where its layers take turns: a slot a lane, in f32
};

struct AttentionSpec {
  int kv_heads = 0;
  int key_dim = 0;
  int value_dim = 0;
  int window = 0;  // 0: no window
  CacheHolds holds = CacheHolds::kTokens;
  // Multi-head latent attention: the values are the first value_dim elements of the keys, stored
  // once for all heads.
  bool latent = false;
};

// Inputs that an output of a short convolution may read.
inline constexpr int kMaxConvTaps = 16;

// A state that every token is folded into: linear attention or a state-space layer (a matrix a
// head), and the last inputs of the short convolution before it. Sizes do not depend on the row's
// length. Kept in f32 whatever the element type of the attention caches.
struct StateSpec {
  int heads = 0;  // 0: a short convolution alone
  int key_dim = 0;
  int value_dim = 0;
  int conv_width = 0;  // channels of the convolution; 0: none
  int conv_taps = 0;   // inputs that one of its outputs reads, its own among them

  std::size_t state_size() const {
    return static_cast<std::size_t>(key_dim) * static_cast<std::size_t>(value_dim);
  }
  // Floats of all heads, and of the inputs that the next output of the convolution reads besides
  // its own: what a row's future needs to know.
  std::size_t states_size() const { return static_cast<std::size_t>(heads) * state_size(); }
  std::size_t conv_inputs_size() const {
    return conv_width > 0
               ? static_cast<std::size_t>(conv_taps - 1) * static_cast<std::size_t>(conv_width)
               : 0;
  }
  // Floats that fold one token into a head's state once more: its key, its value, the factor that
  // the state decays by, and the strength of what is added.
  std::size_t step_size() const {
    return static_cast<std::size_t>(key_dim) + static_cast<std::size_t>(value_dim) + 2;
  }
};

// The layer caches that a stack needs; a CacheId counts the first, a StateId the second.
struct CacheSpecs {
  std::span<const AttentionSpec> attention;
  std::span<const StateSpec> states;

  CacheSpecs() = default;
  CacheSpecs(std::span<const AttentionSpec> attention_in, std::span<const StateSpec> states_in)
      : attention(attention_in), states(states_in) {}
  // A stack without state layers.
  template <typename Range>
    requires std::convertible_to<const Range&, std::span<const AttentionSpec>>
  CacheSpecs(const Range& attention_in) : attention(attention_in) {}
};

// How state layers go back by up to k = rollback_depth tokens.
enum class StateRollback : std::uint8_t {
  kExact,    // the states after each of the last k + 1 tokens are kept
  kCompact,  // two older states, and what each token since folded in: folded in again, in the same
             // order, when tokens were taken back
};

// What all layers of a stack share.
struct CacheShape {
  DType dtype = DType::kF16;
  int slots = 1;
  int capacity = 0;        // tokens a slot can hold, a multiple of kCacheBlock
  int input_capacity = 0;  // the same of an input

  DType type_of(const AttentionSpec& spec) const {
    return spec.holds == CacheHolds::kStep ? DType::kF32 : dtype;
  }
  // Positions in a slot of a layer without a window.
  int positions(const AttentionSpec& spec) const {
    return spec.holds == CacheHolds::kTokens ? capacity : input_capacity;
  }
};

// One layer's buffers at their final addresses.
struct LayerCacheView {
  DType dtype = DType::kF16;
  int kv_heads = 0;
  int key_dim = 0;
  int value_dim = 0;
  int capacity = 0;  // positions a slot holds, a multiple of kCacheBlock
  int window = 0;    // 0: no window, and every position is below capacity
  CacheHolds holds = CacheHolds::kTokens;
  int slots = 1;
  std::size_t key_slot_bytes = 0;  // stride from slot to slot, scales included
  std::size_t value_slot_bytes = 0;
  std::byte* keys = nullptr;    // [slots, capacity / 64, kv_heads, 64, key_dim]
  std::byte* values = nullptr;  // [slots, capacity / 64, kv_heads, 64, value_dim]
  bool latent = false;          // values are the keys: the first value_dim elements of each

  std::byte* key_slot(int slot) const {
    return keys + static_cast<std::size_t>(slot) * key_slot_bytes;
  }
  std::byte* value_slot(int slot) const {
    return values + static_cast<std::size_t>(slot) * value_slot_bytes;
  }
  // Elements from the values of one position to those of the next.
  int value_stride() const { return latent ? key_dim : value_dim; }
};

// One state layer's buffers at their final addresses.
//
// An anchor is the state after n tokens, n a multiple of `interval`; the last `anchors` of them are
// kept. With an interval above 1 there are besides the steps since the oldest anchor, a ring by
// position, and the newest state, with the number of tokens in it. The state after 0 tokens is zero
// and stored nowhere. So the row's length alone says what is valid: nothing is shifted, copied or
// marked when it moves back.
struct StateView {
  StateSpec spec;
  int interval = 1;
  int anchors = 1;
  int step_capacity = 0;                  // steps kept; 0 with an interval of 1
  int conv_capacity = 0;                  // inputs of the convolution kept
  float* anchor = nullptr;                // [slots, anchors, heads, key_dim, value_dim]
  float* steps = nullptr;                 // [slots, heads, step_capacity, step_size]
  float* newest = nullptr;                // [slots, heads, key_dim, value_dim]
  std::int32_t* newest_length = nullptr;  // [slots, heads]
  float* conv = nullptr;                  // [slots, conv_capacity, conv_width]
  // Anchors of long ago, with the conv_taps - 1 inputs before them; the engine says of which
  // lengths. No kernel reads them.
  int checkpoints = 0;
  float* checkpoint = nullptr;  // [slots, checkpoints, states_size + conv_inputs_size]

  // Of one head in one slot; `length` is a multiple of the interval.
  float* anchor_at(int slot, int head, int length) const {
    const auto place = static_cast<std::size_t>(length / interval % anchors);
    const std::size_t states =
        static_cast<std::size_t>(slot) * static_cast<std::size_t>(anchors) + place;
    return anchor + states * spec.states_size() +
           static_cast<std::size_t>(head) * spec.state_size();
  }
  float* newest_at(int slot, int head) const {
    return newest + index(slot, head) * spec.state_size();
  }
  std::int32_t* newest_length_at(int slot, int head) const {
    return newest_length + index(slot, head);
  }
  // What the token at `position` folded into the state of one head.
  float* step_at(int slot, int head, int position) const {
    const auto place = static_cast<std::size_t>(position % step_capacity);
    return steps +
           (index(slot, head) * static_cast<std::size_t>(step_capacity) + place) * spec.step_size();
  }
  // The convolution's input at `position`.
  float* conv_at(int slot, int position) const {
    return conv + (static_cast<std::size_t>(slot) * static_cast<std::size_t>(conv_capacity) +
                   static_cast<std::size_t>(position % conv_capacity)) *
                      static_cast<std::size_t>(spec.conv_width);
  }
  float* checkpoint_at(int slot, int place) const {
    const std::size_t i = static_cast<std::size_t>(slot) * static_cast<std::size_t>(checkpoints) +
                          static_cast<std::size_t>(place);
    return checkpoint + i * (spec.states_size() + spec.conv_inputs_size());
  }

 private:
  std::size_t index(int slot, int head) const {
    return static_cast<std::size_t>(slot) * static_cast<std::size_t>(spec.heads) +
           static_cast<std::size_t>(head);
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
