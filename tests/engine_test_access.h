// What tests may see of an engine that its users may not: memory, caches, tables.
#pragma once

#include "engine/engine_impl.h"

namespace pianola {

class EngineTestAccess {
 public:
  static Engine::Impl& impl(Engine& engine) { return *engine.impl_; }

  // The bytes of one slot of one layer's keys or values.
  static std::span<std::byte> keys(Engine& engine, int layer, int slot) {
    const LayerCacheView& view = impl(engine).caches[static_cast<std::size_t>(layer)];
    return {view.key_slot(slot), view.key_slot_bytes};
  }
  static std::span<std::byte> values(Engine& engine, int layer, int slot) {
    const LayerCacheView& view = impl(engine).caches[static_cast<std::size_t>(layer)];
    return {view.value_slot(slot), view.value_slot_bytes};
  }
  static int layers(Engine& engine) { return static_cast<int>(impl(engine).caches.size()); }
};

}  // namespace pianola
