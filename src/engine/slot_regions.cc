#include "engine/slot_regions.h"

#include <algorithm>

namespace pianola {
namespace {

// The blocks in use of a layer's elements, and of the scales behind them.
void add_blocks(const LayerCacheView& view, int held, std::vector<SlotRegion>& regions) {
  const auto all = static_cast<std::size_t>(view.capacity / kCacheBlock);
  const std::size_t blocks =
      std::min(all, static_cast<std::size_t>((held + kCacheBlock - 1) / kCacheBlock));
  const auto add = [&](std::byte* base, std::size_t stride, int dim) {
    const std::size_t elements = cache_element_bytes(view.dtype, view.capacity, view.kv_heads, dim);
    regions.push_back({base, stride, elements / all * blocks});
    if (stride == elements) return;
    regions.push_back({base + elements, stride, (stride - elements) / all * blocks});
  };
  add(view.keys, view.key_slot_bytes, view.key_dim);
  if (!view.latent) add(view.values, view.value_slot_bytes, view.value_dim);
}

}  // namespace

std::vector<SlotRegion> input_regions(std::span<const LayerCacheView> caches, int length) {
  std::vector<SlotRegion> regions;
  if (length == 0) return regions;
  for (const LayerCacheView& view : caches) {
    if (view.holds == CacheHolds::kInput) add_blocks(view, length, regions);
  }
  return regions;
}

std::vector<SlotRegion> slot_regions(std::span<const LayerCacheView> caches,
                                     std::span<const StateView> states, int held,
                                     bool checkpoints) {
  std::vector<SlotRegion> regions;
  if (held == 0) return regions;
  for (const LayerCacheView& view : caches) {
    if (view.holds == CacheHolds::kTokens) add_blocks(view, held, regions);
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
