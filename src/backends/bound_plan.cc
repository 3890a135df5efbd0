#include "backends/address_hash.h"
#include "backends/backend.h"

namespace pianola {

BoundPlan::BoundPlan(const Plan& plan, const Binding& binding)
    : plan_(&plan),
      weights_(binding.weights.begin(), binding.weights.end()),
      caches_(binding.caches.begin(), binding.caches.end()),
      states_(binding.states.begin(), binding.states.end()),
      state_(binding.state),
      workspace_(binding.workspace),
      offsets_(plan_workspace(plan).offsets),
      scratch_(binding.scratch) {}

std::uint64_t BoundPlan::address_certificate() const {
  AddressHash hash;
  for (const BoundWeight& weight : weights_) hash.add(weight.data);
  for (const LayerCacheView& cache : caches_) {
    hash.add(cache.keys);
    hash.add(cache.values);
  }
  for (const StateView& state : states_) {
    for (const float* part : {state.anchor, state.steps, state.newest, state.conv}) hash.add(part);
    hash.add(state.newest_length);
  }
  for (const void* table :
       {static_cast<const void*>(state_.row), static_cast<const void*>(state_.history),
        static_cast<const void*>(state_.rollback), static_cast<const void*>(state_.went_back),
        static_cast<const void*>(state_.counts), static_cast<const void*>(state_.token),
        static_cast<const void*>(state_.position), static_cast<const void*>(state_.ring)}) {
    hash.add(table);
  }
  for (const std::size_t offset : offsets_) hash.add(workspace_ + offset);
  hash.add(scratch_);
  return hash.value();
}

}  // namespace pianola
