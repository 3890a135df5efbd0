// What tests may see of an engine that its users may not: memory, caches, tables.
#pragma once

#include "engine/engine_impl.h"

namespace pianola {

class EngineTestAccess {
 public:
  static Engine::Impl& impl(Engine& engine) { return *engine.impl_; }

  // The bytes of one slot of one layer's keys or values, wherever they lie.
  static std::vector<std::byte> keys(Engine& engine, int layer, int slot) {
    const LayerCacheView& view = impl(engine).caches[static_cast<std::size_t>(layer)];
    return read(engine, view.key_slot(slot), view.key_slot_bytes);
  }
  static std::vector<std::byte> values(Engine& engine, int layer, int slot) {
    const LayerCacheView& view = impl(engine).caches[static_cast<std::size_t>(layer)];
    return read(engine, view.value_slot(slot), view.value_slot_bytes);
  }
  static std::vector<std::byte> read(Engine& engine, const std::byte* from, std::size_t bytes) {
    std::vector<std::byte> copy(bytes);
    each_resident(engine, from, bytes, [&](std::size_t at, std::size_t count) {
      impl(engine).backend->read(copy.data() + at, from + at, count);
    });
    return copy;
  }
  static void write(Engine& engine, std::byte* to, std::span<const std::byte> bytes) {
    each_resident(engine, to, bytes.size(), [&](std::size_t at, std::size_t count) {
      impl(engine).backend->write(to + at, bytes.data() + at, count);
    });
  }
  // The parts of some memory that can be touched: of caches, what has pages. What has none reads as
  // zeros, and keeps nothing.
  template <typename Use>
  static void each_resident(Engine& engine, const std::byte* from, std::size_t bytes, Use&& use) {
    const DeviceMemory& caches = *impl(engine).cache_memory;
    if (from < caches.data() || from >= caches.data() + caches.size()) return use(0, bytes);
    const auto begin = static_cast<std::size_t>(from - caches.data());
    for (MemoryRange rest{begin, begin + bytes}; rest.begin < rest.end;) {
      const MemoryRange range = caches.first_resident(rest);
      if (range.begin == range.end) return;
      use(range.begin - begin, range.end - range.begin);
      rest.begin = range.end;
    }
  }
  static int layers(Engine& engine) { return static_cast<int>(impl(engine).caches.size()); }
};

}  // namespace pianola
