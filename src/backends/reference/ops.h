// The specification of every op: scalar code, f32 storage, sums in double. Slow and obviously
// right; every other backend is tested against it.
#pragma once

#include <span>

#include "backends/backend.h"

namespace pianola::reference {

void run(const RollbackOp& op, const BoundPlan& bound);
void run(const EmbedOp& op, const BoundPlan& bound);
void run(const NormOp& op, const BoundPlan& bound);
void run(const LinearOp& op, const BoundPlan& bound);
void run(const QkvOp& op, const BoundPlan& bound);
void run(const QueryOp& op, const BoundPlan& bound);
void run(const LatentQkvOp& op, const BoundPlan& bound);
void run(const HeadLinearOp& op, const BoundPlan& bound);
void run(const AttentionOp& op, const BoundPlan& bound);
void run(const ShortConvOp& op, const BoundPlan& bound);
void run(const DeltaRuleOp& op, const BoundPlan& bound);
void run(const SsmOp& op, const BoundPlan& bound);
void run(const GateOp& op, const BoundPlan& bound);
void run(const GatedNormOp& op, const BoundPlan& bound);
void run(const GatedMlpOp& op, const BoundPlan& bound);
void run(const RouteOp& op, const BoundPlan& bound);
void run(const ExpertsOp& op, const BoundPlan& bound);
void run(const LmHeadOp& op, const BoundPlan& bound);
void run(const ScoreOp& op, const BoundPlan& bound);
void run(const SampleOp& op, const BoundPlan& bound);
void run(const AdvanceOp& op, const BoundPlan& bound);

// Bytes of scratch that the op needs.
std::size_t scratch_bytes(const Op& op, const Plan& plan, const PlanTables& tables);

// out = x / sqrt(mean(x²) + eps) * weight. `out` may be `x`.
void rms_norm(std::span<const float> x, const float* weight, float eps, float* out);

// Sum of a[i] * b[i].
double dot(const float* a, const float* b, std::int64_t n);

// act(gate) * up.
float gated(Activation activation, float gate, float up);

// The experts that RouteOp chooses by its scores, and their weights in the same order, to out
// [2 * top_k]. `choice_bias` is the op's, or null. A NaN counts as the smallest key; what it is
// part of becomes NaN.
void choose_experts(const RouteOp& op, std::span<const float> scores, const float* choice_bias,
                    float* out);

// One head of one position in a cache of any element type, `dim` elements, and its store with
// rounding to nearest even. `scale` is the one of an int8 head, otherwise null.
void load_head(DType dtype, const std::byte* elements, const float* scale, int dim, float* head);
void store_head(DType dtype, const float* head, int dim, std::byte* elements, float* scale);

// Chooses a token from `logits`, or -1 when one of them is NaN or +inf, or no candidate is left.
// Order, as transformers: bias, repetition, presence and frequency penalties over the window,
// temperature, top-k, top-p, min-p; then one draw over what is kept, in order of ids. Ties go to
// the lower id. `history` holds the row's tokens; `scratch` holds sample_scratch_bytes(vocab).
TokenId sample_token(std::span<const float> logits, const RowState& row,
                     std::span<const TokenId> history, std::byte* scratch);
std::size_t sample_scratch_bytes(std::int64_t vocab);

// log softmax(logits)[token].
double log_probability(std::span<const float> logits, TokenId token);

// True when a round that feeds itself has nothing left to do.
bool all_lanes_stopped(const StepState& state);
// True when another round could overflow the ring.
bool ring_is_full(const StepState& state);

// Program::begin() and wait() for executors whose loop is on the host.
class HostRounds {
 public:
  void begin(const StepState& state, int max_rounds);
  // One round, and the end when no other may follow.
  std::optional<RunResult> next(Program& program, const StepState& state);

 private:
  std::optional<RunResult> end(const StepState& state) const;

  int max_rounds_ = 0;
  int rounds_ = 0;
};

}  // namespace pianola::reference
