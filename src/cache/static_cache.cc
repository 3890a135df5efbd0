#include "cache/static_cache.h"

#include <algorithm>

#include "cache/cache_type.h"

namespace pianola {
namespace {

int whole_blocks(int positions) {
  return (positions + kCacheBlock - 1) / kCacheBlock * kCacheBlock;
}

// Bytes of one slot of a state layer.
struct StateBytes {
  std::size_t anchor = 0;
  std::size_t steps = 0;
  std::size_t newest = 0;
  std::size_t newest_length = 0;
  std::size_t conv = 0;
  std::size_t checkpoint = 0;

  explicit StateBytes(const StateView& view) {
    const auto heads = static_cast<std::size_t>(view.spec.heads);
    const std::size_t states = view.spec.states_size() * sizeof(float);
    anchor = states * static_cast<std::size_t>(view.anchors);
    steps = heads * view.spec.step_size() * static_cast<std::size_t>(view.step_capacity) *
            sizeof(float);
    newest = view.interval > 1 ? states : 0;
    newest_length = view.interval > 1 ? heads * sizeof(std::int32_t) : 0;
    conv = static_cast<std::size_t>(view.conv_capacity) *
           static_cast<std::size_t>(view.spec.conv_width) * sizeof(float);
    checkpoint = static_cast<std::size_t>(view.checkpoints) *
                 (states + view.spec.conv_inputs_size() * sizeof(float));
  }
  std::size_t sum() const { return anchor + steps + newest + newest_length + conv + checkpoint; }
};

}  // namespace

CacheLayout::CacheLayout(const CacheSpecs& layers, const CacheOptions& options)
    : layers_(layers.attention.begin(), layers.attention.end()),
      states_(layers.states.begin(), layers.states.end()),
      options_(options) {
  if (options.max_seq_len < 1 || options.max_seq_len > (1 << 24)) {
    fail(ErrorCode::kInvalidArgument, "cache: max_seq_len must be 1 to {}, found {}", 1 << 24,
         options.max_seq_len);
  }
  if (options.slots < 1 || options.slots > 4096) {
    fail(ErrorCode::kInvalidArgument, "cache: slots must be 1 to 4096, found {}", options.slots);
  }
  if (options.rollback_depth < 0 || options.rollback_depth > (1 << 20)) {
    fail(ErrorCode::kInvalidArgument, "cache: rollback_depth must be 0 to {}, found {}", 1 << 20,
         options.rollback_depth);
  }
  if (options.checkpoints < 0 || options.checkpoints > 1024) {
    fail(ErrorCode::kInvalidArgument, "cache: checkpoints must be 0 to 1024, found {}",
         options.checkpoints);
  }
  if (options.max_input_len < 0 || options.max_input_len > (1 << 24)) {
    fail(ErrorCode::kInvalidArgument, "cache: max_input_len must be 0 to {}, found {}", 1 << 24,
         options.max_input_len);
  }
  if (!is_cache_type(options.dtype)) {
    fail(ErrorCode::kUnsupported, "cache: element type {}, expected {}", dtype_name(options.dtype),
         cache_type_names());
  }
  capacity_ = whole_blocks(options.max_seq_len);
  input_capacity_ = whole_blocks(options.max_input_len);
}

int CacheLayout::slots(int layer) const {
  const CacheHolds holds = layers_[static_cast<std::size_t>(layer)].holds;
  return holds == CacheHolds::kStep ? 1 : options_.slots;
}

int CacheLayout::capacity(int layer) const {
  const AttentionSpec& spec = layers_[static_cast<std::size_t>(layer)];
  if (spec.holds != CacheHolds::kTokens) return input_capacity_;
  const int window = spec.window;
  if (window == 0 || window >= capacity_) return capacity_;
  return std::min(capacity_,
                  whole_blocks(window + std::max(options_.rollback_depth, options_.chunk - 1)));
}

int CacheLayout::least_kept_by_windows(int written) const {
  int least = 0;
  for (int layer = 0; layer < static_cast<int>(layers_.size()); ++layer) {
    const AttentionSpec& spec = layers_[static_cast<std::size_t>(layer)];
    const int evicted = written - capacity(layer);  // positions below are gone
    if (spec.holds == CacheHolds::kTokens && evicted > 0) {
      least = std::max(least, evicted + spec.window - 1);
    }
  }
  return least;
}

int CacheLayout::least_kept_by_states(int written) const {
  if (states_.empty()) return 0;
  const StateView view = state_shape(0);  // the same anchors in all of them
  return std::max(0, (written / view.interval - view.anchors + 1) * view.interval);
}

bool CacheLayout::has_rings() const {
  for (int layer = 0; layer < static_cast<int>(layers_.size()); ++layer) {
    const AttentionSpec& spec = layers_[static_cast<std::size_t>(layer)];
    if (spec.holds == CacheHolds::kTokens && capacity(layer) < capacity_) return true;
  }
  return false;
}

int CacheLayout::most_ahead() const {
  return !states_.empty() || has_rings() ? std::max(1, options_.rollback_depth) : capacity_;
}

int CacheLayout::checkpoint_interval() const {
  return states_.empty() ? 1 : state_shape(0).interval;
}

StateView CacheLayout::state_shape(int layer) const {
  StateView view{.spec = states_[static_cast<std::size_t>(layer)],
                 .checkpoints = options_.checkpoints};
  const int depth = options_.rollback_depth;
  if (options_.state_rollback == StateRollback::kCompact && depth > 1) {
    view.interval = depth;
    view.anchors = 2;
    view.step_capacity = view.anchors * view.interval;
  } else {
    view.anchors = depth + 1;
  }
  if (view.spec.conv_width > 0) {
    view.conv_capacity = view.spec.conv_taps - 1 + view.anchors * view.interval - 1;
    view.conv_capacity = std::max(view.conv_capacity, 1);
  }
  return view;
}

std::size_t CacheLayout::key_bytes(int layer) const {
  const AttentionSpec& spec = layers_[static_cast<std::size_t>(layer)];
  return cache_slot_bytes(shape().type_of(spec), capacity(layer), spec.kv_heads, spec.key_dim);
}

std::size_t CacheLayout::value_bytes(int layer) const {
  const AttentionSpec& spec = layers_[static_cast<std::size_t>(layer)];
  if (spec.latent) return 0;
  return cache_slot_bytes(shape().type_of(spec), capacity(layer), spec.kv_heads, spec.value_dim);
}

std::size_t CacheLayout::bytes_per_slot() const {
  std::size_t bytes = 0;
  for (int layer = 0; layer < static_cast<int>(layers_.size()); ++layer) {
    if (layers_[static_cast<std::size_t>(layer)].holds == CacheHolds::kStep) continue;
    bytes += key_bytes(layer) + value_bytes(layer);
  }
  for (int layer = 0; layer < static_cast<int>(states_.size()); ++layer) {
    bytes += StateBytes(state_shape(layer)).sum();
  }
  return bytes;
}

std::size_t CacheLayout::bytes_per_input() const {
  std::size_t bytes = 0;
  for (int layer = 0; layer < static_cast<int>(layers_.size()); ++layer) {
    if (layers_[static_cast<std::size_t>(layer)].holds != CacheHolds::kInput) continue;
    bytes += key_bytes(layer) + value_bytes(layer);
  }
  return bytes;
}

std::size_t CacheLayout::total_bytes() const {
  std::size_t bytes = bytes_per_slot() * static_cast<std::size_t>(options_.slots);
  for (int layer = 0; layer < static_cast<int>(layers_.size()); ++layer) {
    if (layers_[static_cast<std::size_t>(layer)].holds != CacheHolds::kStep) continue;
    bytes += key_bytes(layer) + value_bytes(layer);
  }
  return bytes;
}

StaticCache::StaticCache(const CacheLayout& layout, Arena& arena)
    : layout_(layout), arena_(&arena) {
  const auto slots = static_cast<std::size_t>(layout.options().slots);
  for (int layer = 0; layer < static_cast<int>(layout.layers().size()); ++layer) {
    const auto own = static_cast<std::size_t>(layout.slots(layer));
    const std::size_t keys = arena.reserve(layout.key_bytes(layer) * own);
    const std::size_t values = arena.reserve(layout.value_bytes(layer) * own);
    regions_.push_back({keys, values});
  }
  for (int layer = 0; layer < static_cast<int>(layout.states().size()); ++layer) {
    const StateBytes bytes(layout.state_shape(layer));
    state_regions_.push_back({.anchor = arena.reserve(bytes.anchor * slots),
                              .steps = arena.reserve(bytes.steps * slots),
                              .newest = arena.reserve(bytes.newest * slots),
                              .newest_length = arena.reserve(bytes.newest_length * slots),
                              .conv = arena.reserve(bytes.conv * slots),
                              .checkpoint = arena.reserve(bytes.checkpoint * slots)});
  }
}

std::size_t StaticCache::first_token_bytes(std::size_t page) const {
  std::vector<bool> pages((arena_->size() + page - 1) / page);
  const auto add = [&](std::size_t offset, std::size_t bytes) {
    for (std::size_t i = offset / page; i * page < offset + bytes; ++i) pages[i] = true;
  };
  const DType dtype = layout_.options().dtype;
  for (int layer = 0; layer < static_cast<int>(regions_.size()); ++layer) {
    const AttentionSpec& spec = layout_.layers()[static_cast<std::size_t>(layer)];
    const Region& region = regions_[static_cast<std::size_t>(layer)];
    if (spec.holds != CacheHolds::kTokens) {
      const auto own = static_cast<std::size_t>(layout_.slots(layer));
      add(region.keys, layout_.key_bytes(layer) * own);
      add(region.values, layout_.value_bytes(layer) * own);
      continue;
    }
    const auto add_block = [&](std::size_t offset, int dim) {
      add(offset, cache_element_bytes(dtype, kCacheBlock, spec.kv_heads, dim));
      if (!has_scales(dtype)) return;
      add(offset + cache_element_bytes(dtype, layout_.capacity(layer), spec.kv_heads, dim),
          cache_element_bytes(DType::kF32, kCacheBlock, spec.kv_heads, 1));
    };
    add_block(region.keys, spec.key_dim);
    if (!spec.latent) add_block(region.values, spec.value_dim);
  }
  if (!state_regions_.empty()) {
    const std::size_t first = state_regions_.front().anchor;
    add(first, arena_->size() - first);
  }
  return static_cast<std::size_t>(std::ranges::count(pages, true)) * page;
}

StateView StaticCache::state(int index) const {
  const StateRegion& region = state_regions_[static_cast<std::size_t>(index)];
  const auto floats = [this](std::size_t offset) {
    return reinterpret_cast<float*>(arena_->address(offset));
  };
  StateView view = layout_.state_shape(index);
  view.anchor = floats(region.anchor);
  view.steps = floats(region.steps);
  view.newest = floats(region.newest);
  view.newest_length = reinterpret_cast<std::int32_t*>(arena_->address(region.newest_length));
  view.conv = floats(region.conv);
  view.checkpoint = floats(region.checkpoint);
  return view;
}

LayerCacheView StaticCache::layer(int index) const {
  const AttentionSpec& spec = layout_.layers()[static_cast<std::size_t>(index)];
  const Region& region = regions_[static_cast<std::size_t>(index)];
  return {.dtype = layout_.shape().type_of(spec),
          .kv_heads = spec.kv_heads,
          .key_dim = spec.key_dim,
          .value_dim = spec.value_dim,
          .capacity = layout_.capacity(index),
          .window = spec.window,
          .holds = spec.holds,
          .slots = layout_.slots(index),
          .key_slot_bytes = layout_.key_bytes(index),
          .value_slot_bytes = spec.latent ? layout_.key_bytes(index) : layout_.value_bytes(index),
          .keys = arena_->address(region.keys),
          .values = arena_->address(spec.latent ? region.keys : region.values),
          .latent = spec.latent};
}

}  // namespace pianola
