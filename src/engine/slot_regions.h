// The bytes of a cache slot, region by region, for what moves whole rows: fork, snapshot, swap.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "cache/layer_cache.h"

namespace pianola {

// One region of every slot: that of slot s begins at base + s * stride.
struct SlotRegion {
  std::byte* base = nullptr;
  std::size_t stride = 0;
  std::size_t bytes = 0;  // of a slot, from its beginning

  std::byte* of(int slot) const { return base + static_cast<std::size_t>(slot) * stride; }
};

// What a row uses that has held up to `held` tokens: the blocks of its keys and values, whole
// rings, and states; its checkpoints too when asked. In a fixed order. Inputs are not the row's.
std::vector<SlotRegion> slot_regions(std::span<const LayerCacheView> caches,
                                     std::span<const StateView> states, int held,
                                     bool checkpoints = false);

// The blocks of an input of `length` tokens, by slots of inputs.
std::vector<SlotRegion> input_regions(std::span<const LayerCacheView> caches, int length);

}  // namespace pianola
