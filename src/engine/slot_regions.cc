#include "engine/slot_regions.h"

#include <algorithm>

namespace pianola {

std::vector<SlotRegion> slot_regions(std::span<const LayerCacheView> caches,
                                     std::span<const StateView> states, int held,
                                     bool checkpoints) {
  std::vector<SlotRegion> regions;
  if (held == 0) return regions;
  for (const LayerCacheView& view : caches) {
    const auto all = static_cast<std::size_t>(view.capacity / kCacheBlock);
    const std::size_t blocks =
        std::min(all, static_cast<std::size_t>((held + kCacheBlock - 1) / kCacheBlock));
    regions.push_back({view.keys, view.key_slot_bytes, view.key_slot_bytes / all * blocks});
    regions.push_back({view.values, view.value_slot_bytes, view.value_slot_bytes / all * blocks});
  }
  const auto add = [&regions](auto* base, std::size_t elements) {
    const std::size_t bytes = elements * sizeof(*base);
    if (bytes > 0) regions.push_back({reinterpret_cast<std::byte*>(base), bytes, bytes});
  };
  for (const StateView& view : states) {
    const std::size_t all_heads = view.spec.states_size();
    const auto heads = static_cast<std::size_t>(view.spec.heads);
    add(view.anchor, all_heads * static_cast<std::size_t>(view.anchors));
    add(view.steps, heads * view.spec.step_size() * static_cast<std::size_t>(view.step_capacity));
    if (view.interval > 1) {
      add(view.newest, all_heads);
      add(view.newest_length, heads);
    }
    add(view.conv, static_cast<std::size_t>(view.conv_capacity) *
                       static_cast<std::size_t>(view.spec.conv_width));
    if (checkpoints) {
      add(view.checkpoint,
          static_cast<std::size_t>(view.checkpoints) * (all_heads + view.spec.conv_inputs_size()));
    }
  }
  return regions;
}

}  // namespace pianola
