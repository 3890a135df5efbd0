#include "backends/backend.h"

namespace pianola {

BoundPlan::BoundPlan(const Plan& plan, const Binding& binding)
    : plan_(&plan),
      weights_(binding.weights.begin(), binding.weights.end()),
      caches_(binding.caches.begin(), binding.caches.end()),
      state_(binding.state),
      workspace_(binding.workspace),
      offsets_(plan_workspace(plan).offsets),
      scratch_(binding.scratch) {}

std::uint64_t BoundPlan::address_certificate() const {
  std::uint64_t hash = 0xcbf29ce484222325ULL;  // FNV-1a over the addresses
  const auto add = [&hash](const void* address) {
    hash = (hash ^ reinterpret_cast<std::uintptr_t>(address)) * 0x100000001b3ULL;
  };
  for (const BoundWeight& weight : weights_) add(weight.data);
  for (const LayerCacheView& cache : caches_) {
    add(cache.keys);
    add(cache.values);
  }
  for (const void* table :
       {static_cast<const void*>(state_.row), static_cast<const void*>(state_.history),
        static_cast<const void*>(state_.counts), static_cast<const void*>(state_.token),
        static_cast<const void*>(state_.position), static_cast<const void*>(state_.ring)}) {
    add(table);
  }
  for (const std::size_t offset : offsets_) add(workspace_ + offset);
  add(scratch_);
  return hash;
}

}  // namespace pianola
