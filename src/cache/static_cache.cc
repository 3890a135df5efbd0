#include "cache/static_cache.h"

#include <algorithm>

#include "cache/cache_type.h"

namespace pianola {
namespace {

int whole_blocks(int positions) {
  return (positions + kCacheBlock - 1) / kCacheBlock * kCacheBlock;
}

}  // namespace

CacheLayout::CacheLayout(std::span<const AttentionSpec> layers, const CacheOptions& options)
    : layers_(layers.begin(), layers.end()), options_(options) {
  if (options.max_seq_len < 1 || options.max_seq_len > (1 << 24)) {
    fail(ErrorCode::kInvalidArgument, "cache: max_seq_len must be 1 to {}, found {}", 1 << 24,
         options.max_seq_len);
  }
  if (options.slots < 1 || options.slots > 4096) {
    fail(ErrorCode::kInvalidArgument, "cache: slots must be 1 to 4096, found {}", options.slots);
  }
  if (!is_cache_type(options.dtype)) {
    fail(ErrorCode::kUnsupported, "cache: element type {}, expected {}", dtype_name(options.dtype),
         cache_type_names());
  }
  capacity_ = whole_blocks(options.max_seq_len);
}

int CacheLayout::capacity(int layer) const {
  const int window = layers_[static_cast<std::size_t>(layer)].window;
  if (window == 0 || window >= capacity_) return capacity_;
  return std::min(capacity_,
                  whole_blocks(window + std::max(options_.rollback_depth, options_.chunk - 1)));
}

int CacheLayout::least_kept(int written) const {
  int least = 0;
  for (int layer = 0; layer < static_cast<int>(layers_.size()); ++layer) {
    const int evicted = written - capacity(layer);  // positions below are gone
    if (evicted > 0) {
      least = std::max(least, evicted + layers_[static_cast<std::size_t>(layer)].window - 1);
    }
  }
  return least;
}

std::size_t CacheLayout::key_bytes(int layer) const {
  const AttentionSpec& spec = layers_[static_cast<std::size_t>(layer)];
  return cache_slot_bytes(options_.dtype, capacity(layer), spec.kv_heads, spec.key_dim);
}

std::size_t CacheLayout::value_bytes(int layer) const {
  const AttentionSpec& spec = layers_[static_cast<std::size_t>(layer)];
  return cache_slot_bytes(options_.dtype, capacity(layer), spec.kv_heads, spec.value_dim);
}

std::size_t CacheLayout::bytes_per_slot() const {
  std::size_t bytes = 0;
  for (int layer = 0; layer < static_cast<int>(layers_.size()); ++layer) {
    bytes += key_bytes(layer) + value_bytes(layer);
  }
  return bytes;
}

std::size_t CacheLayout::total_bytes() const {
  return bytes_per_slot() * static_cast<std::size_t>(options_.slots);
}

StaticCache::StaticCache(const CacheLayout& layout, Arena& arena)
    : layout_(layout), arena_(&arena) {
  const auto slots = static_cast<std::size_t>(layout.options().slots);
  for (int layer = 0; layer < static_cast<int>(layout.layers().size()); ++layer) {
    const std::size_t keys = arena.reserve(layout.key_bytes(layer) * slots);
    const std::size_t values = arena.reserve(layout.value_bytes(layer) * slots);
    regions_.push_back({keys, values});
  }
}

LayerCacheView StaticCache::layer(int index) const {
  const AttentionSpec& spec = layout_.layers()[static_cast<std::size_t>(index)];
  const Region& region = regions_[static_cast<std::size_t>(index)];
  return {.dtype = layout_.options().dtype,
          .kv_heads = spec.kv_heads,
          .key_dim = spec.key_dim,
          .value_dim = spec.value_dim,
          .capacity = layout_.capacity(index),
          .window = spec.window,
          .key_slot_bytes = layout_.key_bytes(index),
          .value_slot_bytes = layout_.value_bytes(index),
          .keys = arena_->address(region.keys),
          .values = arena_->address(region.values)};
}

}  // namespace pianola
