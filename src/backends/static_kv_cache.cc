// StaticKvCache: the caches of src/cache on memory of any backend, with lengths beside them.
#include <algorithm>
#include <utility>

#include "backends/address_hash.h"
#include "backends/backend.h"
#include "base/check.h"
#include "cache/static_cache.h"
#include "pianola/cache.h"

namespace pianola {
namespace {

constexpr int kMostLayers = 4096;
constexpr int kMostHeads = 4096;
constexpr int kMostDim = 1 << 16;
constexpr double kMostElements = 1e17;

DType dtype_of(KvType type) {
  switch (type) {
    case KvType::kF32:
      return DType::kF32;
    case KvType::kF16:
      return DType::kF16;
    case KvType::kBF16:
      return DType::kBF16;
  }
  fail(ErrorCode::kInvalidArgument, "cache: element type {} (there are f32, f16 and bf16)",
       static_cast<int>(type));
}

void check_dimension(std::size_t layer, const char* what, int value, int most) {
  if (value < 1 || value > most) {
    fail(ErrorCode::kInvalidArgument, "cache: layer {}: {} must be 1 to {}, found {}", layer, what,
         most, value);
  }
}

CacheLayout layout_of(const KvCacheOptions& options) {
  if (options.layers.empty() || options.layers.size() > kMostLayers) {
    fail(ErrorCode::kInvalidArgument, "cache: there must be 1 to {} layers, found {}", kMostLayers,
         options.layers.size());
  }
  std::vector<AttentionSpec> specs;
  double elements = 0;  // of one position: in 64 bits, the product of the largest options wraps
  for (const KvLayerShape& shape : options.layers) {
    check_dimension(specs.size(), "kv_heads", shape.kv_heads, kMostHeads);
    check_dimension(specs.size(), "key_dim", shape.key_dim, kMostDim);
    check_dimension(specs.size(), "value_dim", shape.value_dim, kMostDim);
    specs.push_back(
        {.kv_heads = shape.kv_heads, .key_dim = shape.key_dim, .value_dim = shape.value_dim});
    elements += static_cast<double>(shape.kv_heads) * (shape.key_dim + shape.value_dim);
  }
  if (elements * options.max_seq_len * options.slots > kMostElements) {
    fail(ErrorCode::kInvalidArgument, "cache: {:.3g} elements are more than any device holds",
         elements * options.max_seq_len * options.slots);
  }
  return {specs,
          {.max_seq_len = options.max_seq_len,
           .slots = options.slots,
           .dtype = dtype_of(options.type)}};
}

// The regions of a cache: sizes before there is memory, addresses afterwards.
struct Regions {
  explicit Regions(const KvCacheOptions& options)
      : layout(layout_of(options)),
        cache(layout, arena),
        lengths(arena.reserve(static_cast<std::size_t>(options.slots) * sizeof(std::int32_t))) {}
  // `cache` refers to `arena`.
  Regions(const Regions&) = delete;
  Regions& operator=(const Regions&) = delete;

  KvCacheBytes bytes() const { return {layout.bytes_per_slot(), arena.size()}; }

  CacheLayout layout;
  Arena arena;
  StaticCache cache;
  std::size_t lengths;  // [slots] int32
};

std::string mebibytes(std::size_t bytes) {
  return fmt::format("{} bytes ({:.1f} MiB)", bytes, static_cast<double>(bytes) / (1 << 20));
}

}  // namespace

const char* kv_type_name(KvType type) noexcept {
  switch (type) {
    case KvType::kF32:
      return "f32";
    case KvType::kF16:
      return "f16";
    case KvType::kBF16:
      return "bf16";
  }
  return "unknown";
}

std::string KvCacheBytes::to_string() const {
  return fmt::format("  cache, one slot  {}\n  cache, total     {}\n", mebibytes(per_slot),
                     mebibytes(total));
}

struct StaticKvCache::Impl {
  explicit Impl(const KvCacheOptions& given) : options(given), regions(given) {
    backend = make_backend(options.backend, {.threads = 1, .device = options.device});
    const std::size_t available = backend->available_memory();
    if (regions.arena.size() > available) {
      fail(ErrorCode::kOutOfMemory, "cache: it does not fit, {} are available\n{}",
           mebibytes(available), regions.bytes().to_string());
    }
    memory = backend->allocate(regions.arena.size(), MemoryUse::kSparse);
    regions.arena.seal(memory->data());
    lengths = reinterpret_cast<std::int32_t*>(regions.arena.address(regions.lengths));
    bound.resize(static_cast<std::size_t>(options.slots));
    certificate = certify();
  }

  std::uint64_t certify() const {
    AddressHash hash;
    for (int i = 0; i < static_cast<int>(options.layers.size()); ++i) {
      const LayerCacheView view = regions.cache.layer(i);
      hash.add(view.keys);
      hash.add(view.values);
      for (const int size : {view.kv_heads, view.key_dim, view.value_dim, view.capacity}) {
        hash.add_word(static_cast<std::uint64_t>(size));
      }
      hash.add_word(static_cast<std::uint64_t>(view.dtype));
    }
    hash.add(lengths);
    hash.add_word(static_cast<std::uint64_t>(options.slots));
    hash.add_word(static_cast<std::uint64_t>(options.max_seq_len));
    return hash.value();
  }

  int& bound_of(int slot) {
    if (slot < 0 || slot >= options.slots) {
      fail(ErrorCode::kInvalidArgument, "cache: slot {}; there are {}", slot, options.slots);
    }
    return bound[static_cast<std::size_t>(slot)];
  }

  int read_length(int slot) {
    int& upper = bound_of(slot);
    std::int32_t length = 0;
    backend->read(&length, lengths + slot, sizeof(length));
    return upper = length;
  }

  void write_length(int slot, int n) {
    const std::int32_t length = n;
    backend->write(lengths + slot, &length, sizeof(length));
    read_length(slot);  // waits: the caller's kernels may run on any stream
  }

  // The least that still fits behind the upper bounds. All lengths are read again when that is less
  // than `wanted`: slots may have stopped, or have been moved by kernels.
  int room(std::span<const int> slots, int wanted) {
    const auto least = [&] {
      int result = options.max_seq_len;
      for (const int slot : slots) result = std::min(result, options.max_seq_len - bound_of(slot));
      return result;
    };
    if (least() < wanted) backend->read(bound.data(), lengths, bound.size() * sizeof(std::int32_t));
    return least();
  }

  [[noreturn]] void overflow(int slot, int length, int n) const {
    fail(ErrorCode::kContextOverflow,
         "cache: slot {} holds {} of {} tokens; {} more do not fit: reset it, go back, or make the "
         "cache with a larger max_seq_len",
         slot, length, options.max_seq_len, n);
  }

  KvCacheOptions options;
  Regions regions;
  std::unique_ptr<Backend> backend;
  std::unique_ptr<DeviceMemory> memory;
  std::int32_t* lengths = nullptr;  // [slots] on the device
  std::vector<std::int32_t> bound;  // [slots] no length is larger
  std::uint64_t certificate = 0;
};

KvCacheBytes StaticKvCache::plan(const KvCacheOptions& options) { return Regions(options).bytes(); }

StaticKvCache::StaticKvCache(const KvCacheOptions& options)
    : impl_(std::make_unique<Impl>(options)) {}
StaticKvCache::~StaticKvCache() = default;
StaticKvCache::StaticKvCache(StaticKvCache&& other) noexcept = default;
StaticKvCache& StaticKvCache::operator=(StaticKvCache&& other) noexcept = default;

StaticKvCache::Impl& StaticKvCache::impl() const {
  if (!impl_) fail(ErrorCode::kInvalidArgument, "cache: used after it was moved from");
  return *impl_;
}

const KvCacheOptions& StaticKvCache::options() const { return impl().options; }
KvCacheBytes StaticKvCache::bytes() const { return impl().regions.bytes(); }
std::span<std::byte> StaticKvCache::memory() const {
  return {impl().memory->data(), impl().memory->size()};
}
std::int32_t* StaticKvCache::lengths() const { return impl().lengths; }
std::uint64_t StaticKvCache::address_certificate() const noexcept {
  return impl_ ? impl_->certificate : 0;
}

StaticKvCache::RawLayer StaticKvCache::raw_layer(int index, KvType type) const {
  const Impl& i = impl();
  const int layers = static_cast<int>(i.options.layers.size());
  if (index < 0 || index >= layers) {
    fail(ErrorCode::kInvalidArgument, "cache: layer {}; there are {}", index, layers);
  }
  if (type != i.options.type) {
    fail(ErrorCode::kInvalidArgument,
         "cache: layer {} holds {} and was asked for as {}: a cache has one element type", index,
         kv_type_name(i.options.type), kv_type_name(type));
  }
  const LayerCacheView view = i.regions.cache.layer(index);
  return {view.keys, view.values, i.options.layers[static_cast<std::size_t>(index)], view.capacity};
}

int StaticKvCache::length(int slot) const { return impl().read_length(slot); }

void StaticKvCache::advance(int slot, int n) {
  Impl& i = impl();
  const int length = i.read_length(slot);
  if (n < 0) fail(ErrorCode::kInvalidArgument, "cache: advance by {}", n);
  if (n > i.options.max_seq_len - length) i.overflow(slot, length, n);
  i.write_length(slot, length + n);
}

void StaticKvCache::allow(std::span<const int> slots, int n) {
  Impl& i = impl();
  if (n < 0) fail(ErrorCode::kInvalidArgument, "cache: allow {} tokens", n);
  if (i.room(slots, n) < n) {
    for (const int slot : slots) {
      if (n > i.options.max_seq_len - i.bound_of(slot)) i.overflow(slot, i.bound_of(slot), n);
    }
  }
  for (const int slot : slots) i.bound_of(slot) += n;
}

int StaticKvCache::room(std::span<const int> slots) const {
  return impl().room(slots, impl().options.max_seq_len + 1);
}

void StaticKvCache::reset(int slot) {
  impl().bound_of(slot);  // refuses a slot that is not there
  impl().write_length(slot, 0);
}

void StaticKvCache::keep_first(int slot, int n) {
  const int length = impl().read_length(slot);
  if (n < 0 || n > length) {
    fail(ErrorCode::kContextOverflow, "cache: slot {} holds {} tokens; its first {} cannot be kept",
         slot, length, n);
  }
  impl().write_length(slot, n);
}

void StaticKvCache::drop_last(int slot, int n) {
  const int length = impl().read_length(slot);
  if (n < 0 || n > length) {
    fail(ErrorCode::kContextOverflow,
         "cache: slot {} holds {} tokens; its last {} cannot be dropped", slot, length, n);
  }
  impl().write_length(slot, length - n);
}

}  // namespace pianola
