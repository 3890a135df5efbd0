// Everything an engine will hold, sized before anything is allocated: tables, Plans, and the arenas
// that they will be bound to. `plan` prints it; Engine builds it.
#pragma once

#include <memory>
#include <vector>

#include "backends/backend.h"
#include "cache/static_cache.h"
#include "models/model.h"
#include "pianola/engine.h"
#include "plan/step_state.h"
#include "weights/weight_loader.h"

namespace pianola {

// The steps to record: decode in powers of two up to `slots`, prompt chunks, and what the options
// ask for besides. A step takes the smallest that holds it.
std::vector<StepShape> step_shapes(const EngineOptions& options);

// And those of an encoder over inputs of up to max_input_len tokens.
std::vector<StepShape> encode_shapes(const EngineOptions& options);

// Tokens in one step of the logits variant.
int logits_chunk_of(const EngineOptions& options);

class EngineLayout {
 public:
  // Validates the options, chooses max_seq_len when it is 0, records every Plan and sizes all
  // memory. Throws InvalidArgument, Unsupported, and OutOfMemory (with the table) when it does not
  // fit.
  EngineLayout(const CausalModel& model, const EngineOptions& options, const Backend& backend);

  // Self-referring (arenas, tables): made in place and not moved.
  EngineLayout(const EngineLayout&) = delete;
  EngineLayout& operator=(const EngineLayout&) = delete;

  const EngineOptions& options() const { return options_; }  // with max_seq_len chosen
  const CacheLayout& cache_layout() const { return cache_layout_; }
  const MemoryPlan& memory() const { return memory_; }
  const ModelTables& tables() const { return tables_; }
  const std::vector<Plan>& plans() const { return plans_; }
  const StaticCache& cache() const { return *cache_; }
  const StepLimits& limits() const { return limits_; }  // of the largest step in every respect
  const StepStateLayout& state() const { return state_; }
  WeightStore& weights() { return *weights_; }

  Arena& weight_arena() { return weight_arena_; }
  Arena& cache_arena() { return cache_arena_; }
  std::size_t workspace_bytes() const { return workspace_bytes_; }
  std::size_t scratch_bytes() const { return scratch_bytes_; }

 private:
  EngineOptions options_;
  ModelTables tables_;
  CacheLayout cache_layout_;
  std::vector<Plan> plans_;
  StepLimits limits_;
  StepStateLayout state_;
  Arena weight_arena_;
  Arena cache_arena_;
  std::unique_ptr<WeightStore> weights_;
  std::unique_ptr<StaticCache> cache_;
  std::size_t workspace_bytes_ = 0;
  std::size_t scratch_bytes_ = 0;
  MemoryPlan memory_;
};

}  // namespace pianola
