// Every Program an engine can run, compiled at load. find() takes the smallest that holds a step.
#pragma once

#include <memory>
#include <vector>

#include "backends/backend.h"

namespace pianola {

class ProgramCache {
 public:
  // Compiles each plan. The plans outlive the cache.
  ProgramCache(const std::vector<Plan>& plans, Backend& backend, const Binding& binding);

  struct Entry {
    const Plan* plan = nullptr;
    std::unique_ptr<Program> program;
  };

  // The entry of the right variant with the fewest tokens that holds the counts; null when there is
  // none.
  const Entry* find(const StepCounts& counts, StepVariant variant) const;

  std::size_t size() const { return entries_.size(); }
  // A hash of every address in every Program.
  std::uint64_t address_certificate() const;

 private:
  std::vector<Entry> entries_;  // by number of tokens
};

}  // namespace pianola
