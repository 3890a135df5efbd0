// Where a Program of the CPU backend keeps what no op names: prepared activations, heads before
// they go to the cache, gates, partial attention. Laid out per Plan, one region a purpose, so that
// the phases of an op need no allocation.
#pragma once

#include <array>
#include <cstddef>

#include "backends/backend.h"
#include "backends/cpu/isa.h"

namespace pianola::cpu {

// Rows of logits that ScoreOp holds at a time.
inline constexpr int kScoreTile = 16;
// Steps of up to this many tokens prepare activations in every worker for itself: cheaper than
// handing them over.
inline constexpr int kOwnTokens = 2;

// Byte offsets into the scratch.
struct CpuScratch {
  std::size_t slots = 0;        // [T] int32: cache slot of each token
  std::size_t input_slots = 0;  // [T] int32: where the input of its row is
  std::size_t input_ends = 0;   // [T] int32: and how long; 0 for padding
  std::size_t rope = 0;         // [T, 2, half] for each kind of rope
  std::size_t rope_bytes = 0;
  std::size_t normed = 0;  // [max(T, kOwnTokens * workers), widest]
  std::size_t activations =
      0;  // of one kind; three regions, then one of kOwnTokens a worker and kind
  std::size_t activation_bytes = 0;
  std::size_t own_activations = 0;
  std::size_t own_activation_bytes = 0;
  std::size_t keys = 0;    // [T, kv_heads * key_dim]
  std::size_t values = 0;  // the same
  // Activations of one head of all tokens: one region a worker.
  std::size_t head_activations = 0;
  std::size_t head_activation_bytes = 0;
  std::size_t gate = 0;    // [T, ff], or [routes, ff] of experts
  std::size_t up = 0;      // the same
  std::size_t scores = 0;  // [T, experts]
  std::size_t groups = 0;  // ExpertGroups, one region a worker
  std::size_t group_bytes = 0;
  std::size_t expert_activations = 0;  // of all groups
  std::size_t expert_parts = 0;        // [routes, width]
  std::size_t logits = 0;              // [kScoreTile, vocab] for ScoreOp
  std::size_t sample = 0;              // one region a worker
  std::size_t sample_bytes = 0;
  std::size_t attention = 0;
  std::size_t linear = 0;  // one region a worker
  std::size_t linear_bytes = 0;
  std::size_t state = 0;  // a step that is folded into a state: one region a worker
  std::size_t state_bytes = 0;
  std::size_t bytes = 0;  // in all
};

CpuScratch plan_cpu_scratch(const Plan& plan, const PlanTables& tables, Isa isa, int workers);

}  // namespace pianola::cpu
