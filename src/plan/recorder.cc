#include "plan/recorder.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace pianola {

Recorder::Recorder(std::span<const WeightDecl> weights, const CacheSpecs& caches,
                   const StepShape& shape)
    : weights_(weights), caches_(caches) {
  PIANOLA_CHECK(shape.tokens >= 1 && shape.lanes >= 1 && shape.lanes <= shape.tokens &&
                    shape.logit_rows >= 1 && shape.logit_rows <= shape.tokens,
                "impossible step shape {}", to_string(shape));
  plan_.shape = shape;
}

BufferId Recorder::buffer(std::string name, Extent extent, std::int64_t width) {
  PIANOLA_CHECK(width > 0, "buffer {} has width {}", name, width);
  plan_.buffers.push_back({std::move(name), extent, width});
  return {static_cast<std::int32_t>(plan_.buffers.size()) - 1};
}

void Recorder::record(const Op& op) {
  current_ = op_name(op);
  expect(plan_.ops.empty() || !std::holds_alternative<AdvanceOp>(plan_.ops.back()),
         "nothing after advance");
  std::visit([this](const auto& o) { check(o); }, op);
  plan_.ops.push_back(op);
}

Plan Recorder::finish() {
  const bool advances = !plan_.ops.empty() && std::holds_alternative<AdvanceOp>(plan_.ops.back());
  PIANOLA_CHECK(advances != (plan_.shape.variant == StepVariant::kEncode),
                "a Plan ends with advance, but for an encoder's");
  return std::exchange(plan_, {});
}

const WeightDecl& Recorder::weight(WeightId id) const {
  expect(id.valid() && static_cast<std::size_t>(id.index) < weights_.size(), "a known weight");
  return weights_[static_cast<std::size_t>(id.index)];
}

const AttentionSpec& Recorder::cache(CacheId id) const {
  expect(id.valid() && static_cast<std::size_t>(id.index) < caches_.attention.size(),
         "a known layer cache");
  return caches_.attention[static_cast<std::size_t>(id.index)];
}

const StateSpec& Recorder::state(StateId id) const {
  expect(id.valid() && static_cast<std::size_t>(id.index) < caches_.states.size(),
         "a known state layer");
  return caches_.states[static_cast<std::size_t>(id.index)];
}

std::int64_t Recorder::width(BufferId id, Extent extent) const {
  expect(id.valid() && static_cast<std::size_t>(id.index) < plan_.buffers.size(),
         "a buffer of this plan");
  expect(plan_.buffer(id).extent == extent, "a buffer of the right extent");
  return plan_.buffer(id).width;
}

void Recorder::expect(bool condition, const char* rule) const {
  PIANOLA_CHECK(condition, "recording op {} ({}): expected {}", plan_.ops.size(), current_, rule);
}

void Recorder::expect_matrix(WeightId id, std::int64_t rows, std::int64_t cols) const {
  const WeightDecl& w = weight(id);
  expect(w.role == WeightRole::kLinear, "a matrix to multiply by, not a vector or a table");
  expect(w.experts == 1, "one matrix, not a stack");
  expect(w.rows == rows && w.cols == cols, "a matrix of the right shape");
}

void Recorder::expect_stack(WeightId id, std::int64_t experts, std::int64_t rows,
                            std::int64_t cols) const {
  const WeightDecl& w = weight(id);
  expect(w.role == WeightRole::kLinear, "matrices to multiply by, not a vector or a table");
  expect(w.experts == experts, "a matrix for each expert");
  expect(w.rows == rows && w.cols == cols, "matrices of the right shape");
}

void Recorder::expect_vector(WeightId id, std::int64_t size) const {
  const WeightDecl& w = weight(id);
  expect(w.role == WeightRole::kVector && w.cols == size, "a vector of the right size");
}

void Recorder::expect_optional_vector(WeightId id, std::int64_t size) const {
  if (id.valid()) expect_vector(id, size);
}

void Recorder::expect_norm(const RmsNorm& norm, std::int64_t size) const {
  expect_vector(norm.weight, size);
  expect(norm.eps > 0, "a positive eps");
}

void Recorder::check(const RollbackOp&) const {
  expect(plan_.ops.empty(), "nothing before rollback: tables and lengths follow from it");
}

void Recorder::expect_rope(const Rope& rope, std::int64_t head_dim) const {
  if (!rope.turns()) return;
  expect(head_dim % 2 == 0, "an even head_dim to rotate");
  const std::int64_t pairs = weight(rope.inverse_frequencies).cols;
  expect(pairs >= 1 && pairs <= head_dim / 2, "a rope of at most the head");
  expect_vector(rope.inverse_frequencies, pairs);
}

void Recorder::check(const EmbedOp& op) const {
  const std::int64_t out = width(op.out, Extent::kTokens);
  expect(weight(op.table).role == WeightRole::kEmbedding && weight(op.table).cols == out,
         "an embedding table as wide as its output");
  expect(op.scale > 0, "a positive scale");
}

void Recorder::check(const NormOp& op) const {
  const std::int64_t in = width(op.in, Extent::kTokens);
  expect_norm(op.norm, in);
  expect(width(op.out, Extent::kTokens) == in, "equal widths");
  if (op.residual.valid()) {
    expect(width(op.residual, Extent::kTokens) == in, "a residual as wide as the output");
    expect(op.in != op.out && op.in != op.residual, "input apart from residual and output");
  }
}

void Recorder::check(const LinearOp& op) const {
  const std::int64_t out = width(op.out, Extent::kTokens);
  expect_matrix(op.weight, out, width(op.in, Extent::kTokens));
  if (op.norm) expect_norm(*op.norm, width(op.in, Extent::kTokens));
  expect_optional_vector(op.bias, out);
  if (op.residual.valid()) {
    expect(width(op.residual, Extent::kTokens) == out, "a residual as wide as the output");
  }
  expect(op.in != op.out, "input and output apart");
}

void Recorder::check(const QkvOp& op) const {
  const std::int64_t in = width(op.in, Extent::kTokens);
  const AttentionSpec& kv = cache(op.cache);
  expect(!kv.latent, "a cache of keys and values");
  expect_norm(op.norm, in);
  expect_matrix(op.k, std::int64_t{kv.kv_heads} * kv.key_dim, in);
  expect_matrix(op.v, std::int64_t{kv.kv_heads} * kv.value_dim, in);
  expect_optional_vector(op.k_bias, std::int64_t{kv.kv_heads} * kv.key_dim);
  expect_optional_vector(op.v_bias, std::int64_t{kv.kv_heads} * kv.value_dim);
  if (op.q_norm) expect_norm(*op.q_norm, kv.key_dim);
  if (op.k_norm) expect_norm(*op.k_norm, kv.key_dim);
  expect(op.q.valid() == op.q_out.valid(), "queries with a place to go");
  if (op.q.valid()) {
    const std::int64_t q = width(op.q_out, Extent::kTokens);
    expect_matrix(op.q, q, in);
    expect_optional_vector(op.q_bias, q);
    expect(op.in != op.q_out, "input and output apart");
    expect(q % kv.key_dim == 0, "whole query heads");
  }
  expect_rope(op.rope, kv.key_dim);
}

void Recorder::check(const QueryOp& op) const {
  const std::int64_t in = width(op.in, Extent::kTokens);
  const std::int64_t q = width(op.q_out, Extent::kTokens);
  expect_norm(op.norm, in);
  expect_matrix(op.q, q, in);
  expect_optional_vector(op.q_bias, q);
  if (op.q_norm) expect_norm(*op.q_norm, op.head_dim);
  expect(op.in != op.q_out, "input and output apart");
  expect(op.head_dim > 0 && q % op.head_dim == 0, "whole query heads");
  expect_rope(op.rope, op.head_dim);
}

void Recorder::check(const LatentQkvOp& op) const {
  const AttentionSpec& kv = cache(op.cache);
  const WeightDecl& absorb = weight(op.absorb);
  const std::int64_t turned = kv.key_dim - kv.value_dim;
  expect(kv.latent && kv.kv_heads == 1 && turned > 0, "a latent cache with a part that turns");
  expect(kv.holds == CacheHolds::kTokens, "a cache of the row's own tokens");
  expect_stack(op.absorb, absorb.experts, kv.value_dim, absorb.cols);
  expect(width(op.q, Extent::kTokens) == absorb.experts * (absorb.cols + turned),
         "queries of all heads");
  expect(width(op.kv, Extent::kTokens) == kv.key_dim, "a latent and a part that turns");
  expect_norm(op.kv_norm, kv.value_dim);
  expect(op.rope.turns(), "a rope that turns");
  expect_rope(op.rope, turned);
  expect(2 * weight(op.rope.inverse_frequencies).cols == turned, "a rope of that part");
  expect(width(op.q_out, Extent::kTokens) == absorb.experts * kv.key_dim,
         "queries of all heads for the latent");
  expect(op.q != op.q_out && op.kv != op.q_out, "inputs and output apart");
}

void Recorder::check(const HeadLinearOp& op) const {
  const WeightDecl& w = weight(op.weight);
  expect_stack(op.weight, w.experts, w.rows, w.cols);
  expect(width(op.in, Extent::kTokens) == w.experts * w.cols &&
             width(op.out, Extent::kTokens) == w.experts * w.rows,
         "buffers of all heads");
  expect(op.in != op.out, "input and output apart");
}

void Recorder::check(const AttentionOp& op) const {
  const AttentionSpec& kv = cache(op.cache);
  expect(op.heads > 0 && op.heads % kv.kv_heads == 0, "heads a multiple of kv_heads");
  expect(kv.window == 0 || kv.holds == CacheHolds::kTokens, "a window over a row's own tokens");
  expect(op.scale > 0, "a positive scale");
  expect(width(op.q, Extent::kTokens) == std::int64_t{op.heads} * kv.key_dim,
         "queries of all heads");
  expect(width(op.out, Extent::kTokens) == std::int64_t{op.heads} * kv.value_dim,
         "outputs of all heads");
  expect_optional_vector(op.sinks, op.heads);
  expect(op.q != op.out, "input and output apart");
  if (!op.bias) return;
  const RelativeBias& bias = *op.bias;
  expect_vector(bias.table, std::int64_t{bias.buckets} * op.heads);
  const int one_way = bias.both_directions ? bias.buckets / 2 : bias.buckets;
  expect(one_way >= 2 && one_way / 2 < bias.max_distance, "buckets for near and far distances");
  expect(!bias.both_directions || bias.buckets % 2 == 0, "as many buckets either way");
  expect(bias.both_directions == (kv.holds != CacheHolds::kTokens),
         "buckets both ways as positions");
}

void Recorder::check(const ShortConvOp& op) const {
  const StateSpec& spec = state(op.state);
  expect(spec.conv_width > 0 && spec.conv_taps > 0, "a state layer with a convolution");
  expect(width(op.in, Extent::kTokens) == spec.conv_width &&
             width(op.out, Extent::kTokens) == spec.conv_width,
         "buffers of all channels");
  expect_vector(op.weight, std::int64_t{spec.conv_width} * spec.conv_taps);
  expect_optional_vector(op.bias, spec.conv_width);
  expect(op.in != op.out, "input and output apart");
}

void Recorder::check(const DeltaRuleOp& op) const {
  const StateSpec& spec = state(op.state);
  expect(spec.heads > 0 && op.key_heads > 0 && op.group > 0 &&
             spec.heads % (std::int64_t{op.key_heads} * op.group) == 0,
         "heads a multiple of key_heads groups");
  const std::int64_t values = std::int64_t{spec.heads} * spec.value_dim;
  expect(width(op.qkv, Extent::kTokens) == 2 * std::int64_t{op.key_heads} * spec.key_dim + values,
         "queries, keys and values of all heads");
  expect(width(op.decay, Extent::kTokens) == spec.heads &&
             width(op.beta, Extent::kTokens) == spec.heads,
         "a decay and a beta for each head");
  expect_vector(op.a_log, spec.heads);
  expect_vector(op.dt_bias, spec.heads);
  expect(op.eps > 0, "a positive eps");
  expect(width(op.out, Extent::kTokens) == values, "outputs of all heads");
  expect(op.out != op.qkv && op.out != op.decay && op.out != op.beta, "inputs and output apart");
}

void Recorder::check(const SsmOp& op) const {
  const StateSpec& spec = state(op.state);
  expect(spec.heads > 0 && op.groups > 0 && spec.heads % op.groups == 0,
         "heads a multiple of groups");
  const std::int64_t values = std::int64_t{spec.heads} * spec.value_dim;
  expect(width(op.xbc, Extent::kTokens) == 2 * std::int64_t{op.groups} * spec.key_dim + values,
         "x, B and C of all heads and groups");
  expect(width(op.dt, Extent::kTokens) == spec.heads, "a step size for each head");
  for (const WeightId id : {op.a_log, op.dt_bias, op.skip}) expect_vector(id, spec.heads);
  expect(op.dt_min >= 0 && op.dt_min <= op.dt_max, "dt_min at most dt_max");
  expect(width(op.out, Extent::kTokens) == values, "outputs of all heads");
  expect(op.out != op.xbc && op.out != op.dt, "inputs and output apart");
}

void Recorder::check(const GateOp& op) const {
  const std::int64_t in = width(op.in, Extent::kTokens);
  expect(width(op.gate, Extent::kTokens) == in && width(op.out, Extent::kTokens) == in,
         "equal widths");
  expect(op.gate != op.out, "gate and output apart");
}

void Recorder::check(const GatedNormOp& op) const {
  const std::int64_t in = width(op.in, Extent::kTokens);
  expect(width(op.gate, Extent::kTokens) == in && width(op.out, Extent::kTokens) == in,
         "equal widths");
  expect(op.group > 0 && in % op.group == 0, "whole groups");
  expect_norm(op.norm, weight(op.norm.weight).cols == in ? in : op.group);
  expect(op.gate != op.out, "gate and output apart");
}

void Recorder::check(const GatedMlpOp& op) const {
  const std::int64_t in = width(op.in, Extent::kTokens);
  const std::int64_t ff = weight(op.up).rows;
  const std::int64_t out = width(op.out, Extent::kTokens);
  expect_norm(op.norm, in);
  if (op.gate.valid()) {
    expect_matrix(op.gate, ff, in);
  } else {
    expect(op.activation != Activation::kClampedSwish && !op.gate_bias.valid(),
           "an activation that needs no gate");
  }
  expect_matrix(op.up, ff, in);
  expect_matrix(op.down, out, ff);
  expect_optional_vector(op.gate_bias, ff);
  expect_optional_vector(op.up_bias, ff);
  expect_optional_vector(op.down_bias, out);
  if (op.residual.valid()) {
    expect(width(op.residual, Extent::kTokens) == out, "a residual as wide as the output");
  }
}

void Recorder::check(const RouteOp& op) const {
  const std::int64_t in = width(op.in, Extent::kTokens);
  const WeightDecl& router = weight(op.weight);
  if (op.norm) expect_norm(*op.norm, in);
  expect(router.role == WeightRole::kRouter && router.cols == in, "a router of the right width");
  expect_optional_vector(op.bias, router.rows);
  expect(op.top_k >= 1 && op.top_k <= router.rows, "from one to all experts chosen");
  expect_optional_vector(op.choice_bias, router.rows);
  expect(!op.choice_bias.valid() || op.score == RouteScore::kSigmoid ||
             op.score == RouteScore::kSigmoidOfChosen,
         "a choice_bias with sigmoid scores");
  const RouteGroups& g = op.groups;
  expect(g.count >= 1 && g.count <= kMaxRouteGroups && router.rows % g.count == 0,
         "groups that divide the experts, not too many");
  const std::int64_t group = router.rows / g.count;
  expect(g.chosen >= 1 && g.chosen <= g.count && g.chosen * group >= op.top_k,
         "enough experts in the chosen groups");
  expect(g.best >= 1 && g.best <= group, "as many keys as a group has");
  expect(op.scale > 0, "a positive scale");
  expect(width(op.out, Extent::kTokens) == 2 * std::int64_t{op.top_k},
         "an expert and a weight for each that is chosen");
  expect(op.in != op.out, "input and output apart");
}

void Recorder::check(const ExpertsOp& op) const {
  const std::int64_t in = width(op.in, Extent::kTokens);
  const std::int64_t out = width(op.out, Extent::kTokens);
  const std::int64_t experts = weight(op.gate).experts;
  const std::int64_t ff = weight(op.gate).rows;
  expect_norm(op.norm, in);
  const auto routes_these = [&](const Op& before) {
    const auto* route = std::get_if<RouteOp>(&before);
    return route && route->out == op.routing && weight(route->weight).rows == experts;
  };
  expect(std::any_of(plan_.ops.begin(), plan_.ops.end(), routes_these),
         "a routing over as many experts");
  expect_stack(op.gate, experts, ff, in);
  expect_stack(op.up, experts, ff, in);
  expect_stack(op.down, experts, out, ff);
  expect_optional_vector(op.gate_bias, experts * ff);
  expect_optional_vector(op.up_bias, experts * ff);
  expect_optional_vector(op.down_bias, experts * out);
  if (op.residual.valid()) {
    expect(width(op.residual, Extent::kTokens) == out, "a residual as wide as the output");
  }
  expect(op.routing != op.in && op.routing != op.out && op.routing != op.residual,
         "the routing apart from everything else");
}

void Recorder::check(const LmHeadOp& op) const {
  const std::int64_t in = width(op.in, Extent::kTokens);
  expect_norm(op.norm, in);
  expect_matrix(op.weight, width(op.logits, Extent::kLogitRows), in);
}

void Recorder::check(const ScoreOp& op) const {
  const std::int64_t in = width(op.in, Extent::kTokens);
  expect_norm(op.norm, in);
  expect_matrix(op.weight, weight(op.weight).rows, in);
}

void Recorder::check(const SampleOp& op) const { width(op.logits, Extent::kLogitRows); }

void Recorder::check(const AdvanceOp&) const {}

}  // namespace pianola
