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
    impl(engine).backend->read(copy.data(), from, bytes);
    return copy;
  }
  static void write(Engine& engine, std::byte* to, std::span<const std::byte> bytes) {
    impl(engine).backend->write(to, bytes.data(), bytes.size());
  }
  static int layers(Engine& engine) { return static_cast<int>(impl(engine).caches.size()); }
};

}  // namespace pianola
