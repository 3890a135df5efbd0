#include "engine/program_cache.h"

#include <algorithm>

namespace pianola {

ProgramCache::ProgramCache(const std::vector<Plan>& plans, Backend& backend,
                           const Binding& binding) {
  for (const Plan& plan : plans) entries_.push_back({&plan, backend.compile(plan, binding)});
  std::stable_sort(entries_.begin(), entries_.end(), [](const Entry& a, const Entry& b) {
    return a.plan->shape.tokens < b.plan->shape.tokens;
  });
}

const ProgramCache::Entry* ProgramCache::find(const StepCounts& counts, StepVariant variant) const {
  for (const Entry& entry : entries_) {
    const StepShape& shape = entry.plan->shape;
    if (shape.variant == variant && shape.tokens >= counts.tokens && shape.lanes >= counts.lanes &&
        shape.logit_rows >= counts.logit_rows) {
      return &entry;
    }
  }
  return nullptr;
}

std::uint64_t ProgramCache::address_certificate() const {
  std::uint64_t hash = 0;
  for (const Entry& entry : entries_) hash = hash * 31 + entry.program->address_certificate();
  return hash;
}

}  // namespace pianola
