#include "cache/static_cache.h"

namespace pianola {
namespace {

std::size_t slot_bytes(int capacity, int kv_heads, int dim, DType dtype) {
  return static_cast<std::size_t>(capacity) * static_cast<std::size_t>(kv_heads) *
         row_bytes(dtype, static_cast<std::size_t>(dim));
}

}  // namespace

CacheLayout::CacheLayout(std::span<const FullAttentionSpec> layers, const CacheOptions& options)
    : layers_(layers.begin(), layers.end()), options_(options) {
  if (options.max_seq_len < 1 || options.max_seq_len > (1 << 24)) {
    fail(ErrorCode::kInvalidArgument, "cache: max_seq_len must be 1 to {}, found {}", 1 << 24,
         options.max_seq_len);
  }
  if (options.slots < 1 || options.slots > 4096) {
    fail(ErrorCode::kInvalidArgument, "cache: slots must be 1 to 4096, found {}", options.slots);
  }
  if (options.dtype != DType::kF32 && options.dtype != DType::kF16 &&
      options.dtype != DType::kBF16) {
    fail(ErrorCode::kUnsupported, "cache: element type {} (there are f32, f16 and bf16)",
         dtype_name(options.dtype));
  }
  capacity_ = (options.max_seq_len + kCacheBlock - 1) / kCacheBlock * kCacheBlock;
}

std::size_t CacheLayout::key_bytes(int layer) const {
  const FullAttentionSpec& spec = layers_[static_cast<std::size_t>(layer)];
  return slot_bytes(capacity_, spec.kv_heads, spec.key_dim, options_.dtype);
}

std::size_t CacheLayout::value_bytes(int layer) const {
  const FullAttentionSpec& spec = layers_[static_cast<std::size_t>(layer)];
  return slot_bytes(capacity_, spec.kv_heads, spec.value_dim, options_.dtype);
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
  const FullAttentionSpec& spec = layout_.layers()[static_cast<std::size_t>(index)];
  const Region& region = regions_[static_cast<std::size_t>(index)];
  return {.dtype = layout_.options().dtype,
          .kv_heads = spec.kv_heads,
          .key_dim = spec.key_dim,
          .value_dim = spec.value_dim,
          .capacity = layout_.capacity(),
          .key_slot_bytes = layout_.key_bytes(index),
          .value_slot_bytes = layout_.value_bytes(index),
          .keys = arena_->address(region.keys),
          .values = arena_->address(region.values)};
}

}  // namespace pianola
