#include "backends/cpu/cpu_scratch.h"

#include <algorithm>
#include <set>

#include "backends/cpu/expert_groups.h"
#include "backends/cpu/kernels/attention.h"
#include "backends/cpu/kernels/linear.h"
#include "backends/reference/ops.h"
#include "backends/state_walk.h"
#include "tensor/arena.h"

namespace pianola::cpu {
namespace {

// The largest need of each kind over the ops of a Plan.
struct Needs {
  const Plan& plan;
  const PlanTables& tables;
  Isa isa;
  int workers;

  std::int64_t widest_input = 0;
  std::int64_t rope_half = 0;
  std::set<std::int32_t> ropes;  // their frequencies
  std::int64_t kv_width = 0;
  std::int64_t hidden = 0;  // gates of all tokens or routes
  std::int64_t scores = 0;
  std::int64_t expert_parts = 0;
  std::size_t group_bytes = 0;
  std::size_t expert_activation_bytes = 0;
  std::int64_t score_vocab = 0;
  std::size_t head_activation_bytes = 0;
  std::size_t activation_bytes = 0;
  std::size_t own_activation_bytes = 0;
  std::size_t linear_bytes = 0;
  std::size_t attention_bytes = 0;
  std::size_t sample_bytes = 0;
  std::size_t state_floats = 0;

  int tokens() const { return plan.shape.tokens; }
  const WeightDecl& decl(WeightId id) const {
    return tables.weights[static_cast<std::size_t>(id.index)];
  }

  void matrix(WeightId id) {
    const WeightDecl& w = decl(id);
    const DType dtype = w.role == WeightRole::kRouter ? DType::kF32 : w.dtype;
    const int cols = static_cast<int>(w.cols);
    const ActivationKind kind = activation_kind(dtype, isa);
    widest_input = std::max(widest_input, w.cols);
    activation_bytes = std::max(activation_bytes, cpu::activation_bytes(kind, tokens(), cols));
    own_activation_bytes =
        std::max(own_activation_bytes, cpu::activation_bytes(kind, kOwnTokens, cols));
    for (const int n : {1, tokens()}) {
      linear_bytes = std::max(linear_bytes, linear_scratch_bytes(dtype, isa, n, cols));
    }
  }
  // Of a stack: its activations lie by group.
  void stack(WeightId id, int slots) {
    const WeightDecl& w = decl(id);
    const int cols = static_cast<int>(w.cols);
    widest_input = std::max(widest_input, w.cols);
    expert_activation_bytes = std::max(
        expert_activation_bytes, cpu::activation_bytes(activation_kind(w.dtype, isa), slots, cols));
    for (const int n : {1, tokens()}) {
      linear_bytes = std::max(linear_bytes, linear_scratch_bytes(w.dtype, isa, n, cols));
    }
  }

  // Of a stack with a matrix a head.
  void heads(WeightId id) {
    const WeightDecl& w = decl(id);
    const int cols = static_cast<int>(w.cols);
    widest_input = std::max(widest_input, w.cols);
    head_activation_bytes =
        std::max(head_activation_bytes,
                 cpu::activation_bytes(activation_kind(w.dtype, isa), tokens(), cols));
    for (const int n : {1, tokens()}) {
      linear_bytes = std::max(linear_bytes, linear_scratch_bytes(w.dtype, isa, n, cols));
    }
  }
  void rope(const Rope& r) {
    if (!r.turns()) return;
    rope_half = std::max(rope_half, decl(r.inverse_frequencies).cols);
    ropes.insert(r.inverse_frequencies.index);
  }

  void operator()(const RollbackOp&) {}
  void operator()(const EmbedOp&) {}
  void operator()(const NormOp&) {}
  void operator()(const LinearOp& op) { matrix(op.weight); }
  void operator()(const QkvOp& op) {
    if (op.q.valid()) matrix(op.q);
    matrix(op.k);
    matrix(op.v);
    kv_width = std::max({kv_width, decl(op.k).rows, decl(op.v).rows});
    rope(op.rope);
  }
  void operator()(const QueryOp& op) {
    matrix(op.q);
    rope(op.rope);
  }
  void operator()(const LatentQkvOp& op) {
    heads(op.absorb);
    kv_width = std::max(kv_width, plan.buffer(op.kv).width);
    rope(op.rope);
  }
  void operator()(const HeadLinearOp& op) { heads(op.weight); }
  void operator()(const AttentionOp& op) {
    const AttentionSpec& kv = tables.caches.attention[static_cast<std::size_t>(op.cache.index)];
    const KvCache cache{.dtype = tables.cache_shape.type_of(kv),
                        .capacity = tables.cache_shape.positions(kv),
                        .kv_heads = kv.kv_heads,
                        .head_dim = kv.key_dim,
                        .window = kv.window,
                        .latent_dim = kv.latent ? kv.value_dim : 0};
    attention_bytes =
        std::max(attention_bytes, attention_scratch_bytes(cache, op.heads, tokens(), workers));
  }
  void state(StateId id) {
    state_floats = std::max(
        state_floats,
        StateStep::scratch_floats(tables.caches.states[static_cast<std::size_t>(id.index)]));
  }
  void operator()(const ShortConvOp&) {}
  void operator()(const DeltaRuleOp& op) { state(op.state); }
  void operator()(const SsmOp& op) { state(op.state); }
  void operator()(const GateOp&) {}
  void operator()(const GatedNormOp&) {}
  void operator()(const GatedMlpOp& op) {
    if (op.gate.valid()) matrix(op.gate);
    matrix(op.up);
    matrix(op.down);
    hidden = std::max(hidden, tokens() * decl(op.up).rows);
  }
  void operator()(const RouteOp& op) {
    matrix(op.weight);
    scores = std::max(scores, tokens() * decl(op.weight).rows);
  }
  void operator()(const ExpertsOp& op) {
    const int top_k = static_cast<int>(plan.buffer(op.routing).width / 2);
    const int experts = static_cast<int>(decl(op.gate).experts);
    const std::int64_t routes = std::int64_t{tokens()} * top_k;
    const int slots = ExpertGroups::most_slots(tokens(), top_k, experts);
    for (const WeightId id : {op.gate, op.up, op.down}) stack(id, slots);
    hidden = std::max(hidden, routes * decl(op.gate).rows);
    expert_parts = std::max(expert_parts, routes * plan.buffer(op.out).width);
    group_bytes = std::max(group_bytes, ExpertGroups::bytes(tokens(), top_k, experts));
  }
  void operator()(const LmHeadOp& op) { matrix(op.weight); }
  void operator()(const ScoreOp& op) {
    matrix(op.weight);
    score_vocab = std::max(score_vocab, decl(op.weight).rows);
  }
  void operator()(const SampleOp& op) {
    sample_bytes = reference::sample_scratch_bytes(plan.buffer(op.logits).width);
  }
  void operator()(const AdvanceOp&) {}
};

}  // namespace

CpuScratch plan_cpu_scratch(const Plan& plan, const PlanTables& tables, Isa isa, int workers) {
  Needs needs{plan, tables, isa, workers};
  for (const Op& op : plan.ops) std::visit(needs, op);

  const auto tokens = static_cast<std::size_t>(plan.shape.tokens);
  const auto count = static_cast<std::size_t>(workers);
  const auto floats = [](std::int64_t n) { return static_cast<std::size_t>(n) * sizeof(float); };
  const auto aligned = [](std::size_t n) {
    return (n + Arena::kAlignment - 1) / Arena::kAlignment * Arena::kAlignment;
  };
  CpuScratch s;
  Arena arena;
  for (std::size_t* table : {&s.slots, &s.input_slots, &s.input_ends}) {
    *table = arena.reserve(tokens * sizeof(std::int32_t));
  }
  s.rope_bytes = aligned(tokens * 2 * floats(needs.rope_half));
  s.rope = arena.reserve(needs.ropes.size() * s.rope_bytes);
  s.normed = arena.reserve(std::max(tokens, kOwnTokens * count) * floats(needs.widest_input));
  s.activation_bytes = aligned(needs.activation_bytes);
  s.activations = arena.reserve(3 * s.activation_bytes);
  s.own_activation_bytes = aligned(needs.own_activation_bytes);
  s.own_activations = arena.reserve(3 * count * s.own_activation_bytes);
  s.keys = arena.reserve(tokens * floats(needs.kv_width));
  s.values = arena.reserve(tokens * floats(needs.kv_width));
  s.head_activation_bytes = aligned(needs.head_activation_bytes);
  s.head_activations = arena.reserve(count * s.head_activation_bytes);
  s.gate = arena.reserve(floats(needs.hidden));
  s.up = arena.reserve(floats(needs.hidden));
  s.scores = arena.reserve(floats(needs.scores));
  s.group_bytes = aligned(needs.group_bytes);
  s.groups = arena.reserve(count * s.group_bytes);
  s.expert_activations = arena.reserve(needs.expert_activation_bytes);
  s.expert_parts = arena.reserve(floats(needs.expert_parts));
  s.logits = arena.reserve(kScoreTile * floats(needs.score_vocab));
  s.sample_bytes = aligned(needs.sample_bytes);
  s.sample = arena.reserve(count * s.sample_bytes);
  s.attention = arena.reserve(needs.attention_bytes);
  s.linear_bytes = aligned(needs.linear_bytes);
  s.linear = arena.reserve(count * s.linear_bytes);
  s.state_bytes = aligned(needs.state_floats * sizeof(float));
  s.state = arena.reserve(count * s.state_bytes);
  s.bytes = arena.size();
  return s;
}

}  // namespace pianola::cpu
