#include "backends/cpu/cpu_program.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "backends/cache_reach.h"
#include "backends/cpu/kernels/rope.h"
#include "backends/reference/ops.h"
#include "base/check.h"
#include "plan/relative_bias.h"
#include "tensor/quant_format.h"

namespace pianola::cpu {
namespace {

// The bucket of every offset up to the distance from which on there is one.
std::vector<std::int32_t> bucket_table(const RelativeBias& bias) {
  std::vector<std::int32_t> buckets;
  for (int offset = -bias.max_distance; offset <= bias.max_distance; ++offset) {
    buckets.push_back(relative_bucket(bias, offset));
  }
  return buckets;
}

// What the op turns heads by; null when it does not.
const Rope* rope_of(const Op& op) {
  if (const auto* qkv = std::get_if<QkvOp>(&op)) return &qkv->rope;
  if (const auto* query = std::get_if<QueryOp>(&op)) return &query->rope;
  if (const auto* latent = std::get_if<LatentQkvOp>(&op)) return &latent->rope;
  return nullptr;
}

}  // namespace

CpuProgram::CpuProgram(const Plan& plan, const Binding& binding, Isa isa, ThreadPool& pool)
    : bound_(plan, binding),
      isa_(isa),
      f_(elementwise(isa)),
      states_(state_kernels(isa)),
      pool_(pool),
      layout_(plan_cpu_scratch(plan, binding.tables, isa, pool.size())) {
  PIANOLA_CHECK(layout_.bytes <= binding.scratch_bytes, "scratch of {} bytes, {} needed",
                binding.scratch_bytes, layout_.bytes);
  for (const BoundWeight& weight : binding.weights) {
    if (weight.decl->role == WeightRole::kLinear || weight.decl->role == WeightRole::kRouter) {
      widest_ = std::max(widest_, static_cast<int>(weight.decl->cols));
    }
  }
  for (const LayerCacheView& cache : binding.caches) {
    has_inputs_ = has_inputs_ || cache.holds != CacheHolds::kTokens;
  }
  for (const Op& op : plan.ops) {
    const auto* attention = std::get_if<AttentionOp>(&op);
    if (attention && attention->bias) buckets_[attention] = bucket_table(*attention->bias);
    const Rope* rope = rope_of(op);
    if (!rope || !rope->turns()) continue;
    if (rope_index(*rope) == static_cast<int>(ropes_.size())) ropes_.push_back(rope);
  }
}

int CpuProgram::rope_index(const Rope& rope) const {
  const auto found = std::find_if(ropes_.begin(), ropes_.end(), [&rope](const Rope* known) {
    return known->inverse_frequencies == rope.inverse_frequencies;
  });
  return static_cast<int>(found - ropes_.begin());
}

float* CpuProgram::rope_rows(const Rope& rope) const {
  return scratch<float>(layout_.rope +
                        static_cast<std::size_t>(rope_index(rope)) * layout_.rope_bytes);
}

void CpuProgram::replay_ops(std::size_t first, std::size_t last) {
  // In front of the workers: what each of them begins with follows from it.
  const auto* rollback = std::get_if<RollbackOp>(&bound_.plan().ops[first]);
  if (rollback) reference::run(*rollback, bound_);
  pool_.run([this, first, last](int index, int count) {
    const Worker w{index, count};
    if (first == 0) begin_step(w);
    for (std::size_t i = first; i < last; ++i) {
      std::visit([this, w](const auto& o) { execute(o, w); }, bound_.plan().ops[i]);
    }
  });
}

CpuProgram::Range CpuProgram::share(int n, Worker w) {
  return {static_cast<int>(std::int64_t{n} * w.index / w.count),
          static_cast<int>(std::int64_t{n} * (w.index + 1) / w.count)};
}

// --- Embedding, and what the step's tables imply ----------------------------------------------

void CpuProgram::begin_step(Worker w) {
  const StepState& s = bound_.state();
  const Range range = share(tokens(), w);
  for (int t = range.begin; t < range.end; ++t) {
    scratch<std::int32_t>(layout_.slots)[t] = s.row_of[s.lane_of[t]];
    if (!has_inputs_) continue;
    scratch<std::int32_t>(layout_.input_slots)[t] = slot_of(s, CacheHolds::kInput, t);
    scratch<std::int32_t>(layout_.input_ends)[t] = end_of(s, CacheHolds::kInput, t);
  }
  if (range.begin == range.end) return;
  for (const Rope* rope : ropes_) {
    const BoundWeight& frequencies = bound_.weight(rope->inverse_frequencies);
    const int half = static_cast<int>(frequencies.decl->cols);
    rope_table(s.position + range.begin, range.end - range.begin, frequencies.f32(), half,
               rope->attention_factor, rope_rows(*rope) + std::int64_t{range.begin} * 2 * half);
  }
}

void CpuProgram::execute(const EmbedOp& op, Worker w) {
  const StepState& s = bound_.state();
  const BoundWeight& table = bound_.weight(op.table);
  const auto width = static_cast<std::size_t>(bound_.width(op.out));
  const std::size_t stride = row_bytes(table.layout.dtype, width);
  const Range range = share(tokens(), w);
  for (int t = range.begin; t < range.end; ++t) {
    float* out = bound_.buffer(op.out) + static_cast<std::size_t>(t) * width;
    if (s.position[t] < 0) {
      std::fill_n(out, width, 0.0F);
    } else if (table.layout.mapped) {
      dequantize_row(table.layout.dtype, table.data + static_cast<std::size_t>(s.token[t]) * stride,
                     out, width);
    } else {  // the packed head of a model with tied embeddings
      unpack_row(table.layout.dtype, table.data, static_cast<std::int64_t>(width), s.token[t], out);
    }
    if (op.scale != 1) f_.scale(out, op.scale, static_cast<int>(width), out);
  }
  pool_.barrier();
}

void CpuProgram::execute(const NormOp& op, Worker w) {
  const std::int64_t width = bound_.width(op.in);
  const Range range = share(tokens(), w);
  for (int t = range.begin; t < range.end; ++t) {
    const int n = static_cast<int>(width);
    float* out = bound_.buffer(op.out) + t * width;
    float* normed = op.residual.valid() ? scratch<float>(layout_.normed) + t * width : out;
    f_.rms_norm(bound_.buffer(op.in) + t * width, bound_.vector(op.norm.weight), op.norm.eps, n,
                normed);
    if (!op.residual.valid()) continue;
    if (op.out != op.residual) std::copy_n(bound_.buffer(op.residual) + t * width, n, out);
    f_.add(normed, n, out);
  }
  pool_.barrier();
}

// --- Matrices ---------------------------------------------------------------------------------

template <typename Row>
CpuProgram::Prepared CpuProgram::prepare(Worker w, int tokens, int cols, Row row,
                                         const RmsNorm* norm,
                                         std::initializer_list<WeightId> readers) {
  const bool own = tokens <= kOwnTokens;
  const Range range = own ? Range{0, tokens} : share(tokens, w);
  Prepared prepared;
  prepared.tokens = tokens;
  const float* x = nullptr;
  std::ptrdiff_t ldx = cols;
  if (norm) {
    float* normed =
        scratch<float>(layout_.normed) + (own ? std::int64_t{w.index} * kOwnTokens * widest_ : 0);
    for (int t = range.begin; t < range.end; ++t) {
      f_.rms_norm(row(t), bound_.vector(norm->weight), norm->eps, cols,
                  normed + std::int64_t{t} * cols);
    }
    x = normed;
  } else {
    x = row(0);
    if (tokens > 1) ldx = row(1) - row(0);
  }
  for (const WeightId id : readers) {
    const ActivationKind kind = activation_kind(bound_.weight(id).layout.dtype, isa_);
    const auto k = static_cast<std::size_t>(kind);
    if (prepared.of_kind[k]) continue;
    const auto worker = static_cast<std::size_t>(w.index);
    auto* out = scratch<std::byte>(own ? layout_.own_activations +
                                             (worker * 3 + k) * layout_.own_activation_bytes
                                       : layout_.activations + k * layout_.activation_bytes);
    if (range.begin < range.end) {
      prepare_activations(kind, isa_, x, ldx, tokens, cols, out, range.begin, range.end);
    }
    prepared.of_kind[k] = out;
  }
  if (!own) pool_.barrier();
  return prepared;
}

PackedWeight CpuProgram::packed(WeightId id, int expert) const {
  const BoundWeight& weight = bound_.weight(id);
  return {weight.layout.dtype, weight.matrix(expert), static_cast<int>(weight.decl->rows),
          static_cast<int>(weight.decl->cols)};
}

CpuProgram::Gate CpuProgram::gate_of(Activation activation) const {
  switch (activation) {
    case Activation::kSilu:
      return f_.gate;
    case Activation::kGeluTanh:
      return f_.gate_gelu;
    case Activation::kClampedSwish:
      return f_.gate_clamped;
    case Activation::kRelu:
      return f_.gate_relu;
  }
  PIANOLA_CHECK(false, "activation {}", static_cast<int>(activation));
}

void CpuProgram::multiply(Worker w, WeightId weight, const Prepared& x, Range rows, float* y,
                          std::int64_t ldy, LinearWrite write) {
  if (rows.begin >= rows.end || x.tokens == 0) return;
  const PackedWeight matrix = packed(weight);
  const auto kind = static_cast<std::size_t>(activation_kind(matrix.dtype, isa_));
  linear(
      matrix, x.of_kind[kind], x.tokens, rows.begin, rows.end, y, ldy,
      scratch<std::byte>(layout_.linear + static_cast<std::size_t>(w.index) * layout_.linear_bytes),
      isa_, write);
}

void CpuProgram::project(Worker w, WeightId weight, WeightId bias, const Prepared& x,
                         const float* residual, float* out) {
  const int width = static_cast<int>(bound_.weight(weight).decl->rows);
  const RowRange own = worker_rows(width, w.index, w.count);
  const std::size_t count = static_cast<std::size_t>(std::max(own.end - own.begin, 0));
  if (residual && residual != out) {
    for (int t = 0; t < x.tokens; ++t) {
      const std::int64_t at = std::int64_t{t} * width + own.begin;
      std::copy_n(residual + at, count, out + at);
    }
  }
  multiply(w, weight, x, {own.begin, own.end}, out, width,
           residual ? LinearWrite::kAccumulate : LinearWrite::kStore);
  if (const float* b = bound_.vector(bias)) {
    for (int t = 0; t < x.tokens; ++t) {
      f_.add(b + own.begin, static_cast<int>(count), out + std::int64_t{t} * width + own.begin);
    }
  }
}

void CpuProgram::execute(const LinearOp& op, Worker w) {
  const std::int64_t cols = bound_.width(op.in);
  const float* in = bound_.buffer(op.in);
  const Prepared x =
      prepare(w, tokens(), static_cast<int>(cols), [&](int t) { return in + t * cols; },
              op.norm ? &*op.norm : nullptr, {op.weight});
  project(w, op.weight, op.bias, x, op.residual.valid() ? bound_.buffer(op.residual) : nullptr,
          bound_.buffer(op.out));
  pool_.barrier();
}

void CpuProgram::execute(const GatedMlpOp& op, Worker w) {
  const std::int64_t cols = bound_.width(op.in);
  const int ff = static_cast<int>(bound_.weight(op.up).decl->rows);
  const float* in = bound_.buffer(op.in);
  float* gate = scratch<float>(layout_.gate);
  float* up = scratch<float>(layout_.up);
  const bool gated = op.gate.valid();
  const WeightId first = gated ? op.gate : op.up;
  const Prepared x = prepare(w, tokens(), static_cast<int>(cols),
                             [&](int t) { return in + t * cols; }, &op.norm, {first, op.up});
  project(w, first, gated ? op.gate_bias : op.up_bias, x, nullptr, gate);
  if (gated) project(w, op.up, op.up_bias, x, nullptr, up);
  const RowRange own = worker_rows(ff, w.index, w.count);
  const auto activate = gate_of(op.activation);
  for (int t = 0; t < tokens() && own.begin < own.end; ++t) {
    const std::int64_t at = std::int64_t{t} * ff + own.begin;
    if (!gated) std::fill(up + at, up + at + own.end - own.begin, 1.0F);
    activate(gate + at, up + at, own.end - own.begin, gate + at);
  }
  pool_.barrier();
  const Prepared h = prepare(w, tokens(), ff, [&](int t) { return gate + std::int64_t{t} * ff; },
                             nullptr, {op.down});
  project(w, op.down, op.down_bias, h, op.residual.valid() ? bound_.buffer(op.residual) : nullptr,
          bound_.buffer(op.out));
  pool_.barrier();
}

void CpuProgram::execute(const RouteOp& op, Worker w) {
  const StepState& s = bound_.state();
  const std::int64_t cols = bound_.width(op.in);
  const float* in = bound_.buffer(op.in);
  const int experts = packed(op.weight).rows;
  float* scores = scratch<float>(layout_.scores);
  const Prepared x =
      prepare(w, tokens(), static_cast<int>(cols), [&](int t) { return in + t * cols; },
              op.norm ? &*op.norm : nullptr, {op.weight});
  project(w, op.weight, op.bias, x, nullptr, scores);
  pool_.barrier();
  const Range range = share(tokens(), w);
  for (int t = range.begin; t < range.end; ++t) {
    float* out = bound_.buffer(op.out) + std::int64_t{t} * 2 * op.top_k;
    if (s.position[t] < 0) {
      std::fill_n(out, op.top_k, -1.0F);
      std::fill_n(out + op.top_k, op.top_k, 0.0F);
    } else {
      reference::choose_experts(
          op, {scores + std::int64_t{t} * experts, static_cast<std::size_t>(experts)},
          bound_.vector(op.choice_bias), out);
    }
  }
  pool_.barrier();
}

// --- Attention --------------------------------------------------------------------------------

KvCache CpuProgram::kv_cache(CacheId id) const {
  const LayerCacheView& view = bound_.cache(id);
  return {view.keys,     view.values,  view.dtype,  view.capacity,
          view.kv_heads, view.key_dim, view.window, view.latent ? view.value_dim : 0};
}

const std::int32_t* CpuProgram::slots_of(CacheId id) const {
  switch (bound_.cache(id).holds) {
    case CacheHolds::kTokens:
      return scratch<std::int32_t>(layout_.slots);
    case CacheHolds::kInput:
      return scratch<std::int32_t>(layout_.input_slots);
    case CacheHolds::kStep:
      return bound_.state().lane_of;
  }
  PIANOLA_CHECK(false, "a cache of no kind");
}

void CpuProgram::execute(const QkvOp& op, Worker w) {
  const std::int64_t cols = bound_.width(op.in);
  const float* in = bound_.buffer(op.in);
  const Prepared x =
      prepare(w, tokens(), static_cast<int>(cols), [&](int t) { return in + t * cols; }, &op.norm,
              {op.q.valid() ? op.q : op.k, op.k, op.v});
  // The rows of q, k and v, one after the other, are shared out as those of one matrix.
  struct Part {
    WeightId weight;
    float* out;
  };
  const std::array<Part, 3> all = {{{op.q, op.q.valid() ? bound_.buffer(op.q_out) : nullptr},
                                    {op.k, scratch<float>(layout_.keys)},
                                    {op.v, scratch<float>(layout_.values)}}};
  const std::span<const Part> parts = std::span(all).subspan(op.q.valid() ? 0 : 1);
  int panels = 0;
  for (const Part& part : parts) {
    panels += (packed(part.weight).rows + kPanelRows - 1) / kPanelRows;
  }
  const Range own = share(panels, w);
  int first = 0;
  for (const Part& part : parts) {
    const int rows = packed(part.weight).rows;
    const int count = (rows + kPanelRows - 1) / kPanelRows;
    const int begin = std::clamp(own.begin - first, 0, count) * kPanelRows;
    const int end = std::min(std::clamp(own.end - first, 0, count) * kPanelRows, rows);
    multiply(w, part.weight, x, {begin, end}, part.out, rows);
    first += count;
  }
  pool_.barrier();

  const StepState& s = bound_.state();
  const Range range = share(tokens(), w);
  if (range.begin < range.end) {
    const KvCache cache = kv_cache(op.cache);
    const std::ptrdiff_t stride = std::ptrdiff_t{cache.kv_heads} * cache.head_dim;
    const int kv_width = static_cast<int>(stride);
    const Heads q = op.q.valid()
                        ? Heads{bound_.buffer(op.q_out), static_cast<int>(bound_.width(op.q_out)),
                                op.q_bias, op.q_norm, true}
                        : Heads{};
    const std::array<Heads, 3> heads = {
        {q,
         {scratch<float>(layout_.keys), kv_width, op.k_bias, op.k_norm, true},
         {scratch<float>(layout_.values), kv_width, op.v_bias, std::nullopt, false}}};
    finish_heads(heads, op.rope, cache.head_dim, range);
    append({.isa = isa_,
            .cache = cache,
            .tokens = range.end - range.begin,
            .positions = s.position + range.begin,
            .slots = slots_of(op.cache) + range.begin,
            .keys = scratch<float>(layout_.keys) + range.begin * stride,
            .values = scratch<float>(layout_.values) + range.begin * stride,
            .stride = stride},
           0, 1);
  }
  pool_.barrier();
}

void CpuProgram::execute(const QueryOp& op, Worker w) {
  const std::int64_t cols = bound_.width(op.in);
  const float* in = bound_.buffer(op.in);
  const Prepared x = prepare(w, tokens(), static_cast<int>(cols),
                             [&](int t) { return in + t * cols; }, &op.norm, {op.q});
  project(w, op.q, WeightId{}, x, nullptr, bound_.buffer(op.q_out));
  pool_.barrier();
  const Heads q{bound_.buffer(op.q_out), static_cast<int>(bound_.width(op.q_out)), op.q_bias,
                op.q_norm, true};
  finish_heads({&q, 1}, op.rope, op.head_dim, share(tokens(), w));
  pool_.barrier();
}

void CpuProgram::finish_heads(std::span<const Heads> parts, const Rope& rope, int dim,
                              Range range) {
  const bool turns = rope.turns();
  const int half = turns ? static_cast<int>(bound_.weight(rope.inverse_frequencies).decl->cols) : 0;
  const auto rotate = rope.style == RopeStyle::kHalf ? f_.rope_halves : f_.rope_pairs;
  const float* table = turns ? rope_rows(rope) : nullptr;
  for (int t = range.begin; t < range.end; ++t) {
    const float* cosines = table + std::int64_t{t} * 2 * half;
    for (const Heads& part : parts) {
      if (part.width == 0) continue;
      float* x = part.x + std::int64_t{t} * part.width;
      if (part.bias.valid()) f_.add(bound_.vector(part.bias), part.width, x);
      if (part.norm) {
        for (float* head = x; head < x + part.width; head += dim) {
          f_.rms_norm(head, bound_.vector(part.norm->weight), part.norm->eps, dim, head);
        }
      }
      if (part.rotate && turns) rotate(cosines, cosines + half, half, part.width / dim, dim, x);
    }
  }
}

AttentionArgs CpuProgram::attention_args(const AttentionOp& op) const {
  const bool over_input = bound_.cache(op.cache).holds != CacheHolds::kTokens;
  AttentionBias bias;
  if (op.bias) {
    bias = {bound_.vector(op.bias->table), buckets_.at(&op).data(), op.bias->max_distance};
  }
  return {.isa = isa_,
          .cache = kv_cache(op.cache),
          .tokens = tokens(),
          .heads = op.heads,
          .scale = op.scale,
          .positions = bound_.state().position,
          .slots = slots_of(op.cache),
          .queries = bound_.buffer(op.q),
          .query_stride = bound_.width(op.q),
          .output = bound_.buffer(op.out),
          .output_stride = bound_.width(op.out),
          .sinks = bound_.vector(op.sinks),
          .ends = over_input ? scratch<std::int32_t>(layout_.input_ends) : nullptr,
          .bias = bias};
}

void CpuProgram::execute(const AttentionOp& op, Worker w) {
  const AttentionArgs args = attention_args(op);
  auto* partial = scratch<std::byte>(layout_.attention);
  attend(args, partial, w.index, w.count);
  if (attention_needs_combine(args, w.count)) {
    pool_.barrier();
    combine(args, partial, w.index, w.count);
  }
  pool_.barrier();
}

// --- The end of a step ------------------------------------------------------------------------

void CpuProgram::execute(const LmHeadOp& op, Worker w) {
  const StepState& s = bound_.state();
  const std::int64_t cols = bound_.width(op.in);
  const float* in = bound_.buffer(op.in);
  if (s.counts->logit_rows == 0) return;
  const Prepared x =
      prepare(w, s.counts->logit_rows, static_cast<int>(cols),
              [&](int r) { return in + s.logit_token[r] * cols; }, &op.norm, {op.weight});
  project(w, op.weight, WeightId{}, x, nullptr, bound_.buffer(op.logits));
  pool_.barrier();
}

void CpuProgram::execute(const ScoreOp& op, Worker w) {
  const StepState& s = bound_.state();
  const std::int64_t cols = bound_.width(op.in);
  const float* in = bound_.buffer(op.in);
  const int vocab = packed(op.weight).rows;
  float* logits = scratch<float>(layout_.logits);
  for (int first = 0; first < s.counts->logit_rows; first += kScoreTile) {
    const int count = std::min(kScoreTile, s.counts->logit_rows - first);
    const Prepared x =
        prepare(w, count, static_cast<int>(cols),
                [&](int r) { return in + s.logit_token[first + r] * cols; }, &op.norm, {op.weight});
    project(w, op.weight, WeightId{}, x, nullptr, logits);
    pool_.barrier();
    const Range range = share(count, w);
    for (int r = range.begin; r < range.end; ++r) {
      s.logprob[first + r] = static_cast<float>(
          log_softmax_at(f_, logits + std::int64_t{r} * vocab, vocab, s.target[first + r]));
    }
    pool_.barrier();
  }
}

void CpuProgram::execute(const SampleOp& op, Worker w) {
  const StepState& s = bound_.state();
  const int vocab = static_cast<int>(bound_.width(op.logits));
  auto* working =
      scratch<std::byte>(layout_.sample + static_cast<std::size_t>(w.index) * layout_.sample_bytes);
  const Range range = share(s.counts->logit_rows, w);
  for (int r = range.begin; r < range.end; ++r) {
    const std::int32_t t = s.logit_token[r];
    if (s.position[t] < 0) continue;
    const std::int32_t row_index = s.row_of[s.lane_of[t]];
    const RowState& row = s.row[row_index];
    const SamplingState& p = row.sampling;
    const float* logits = bound_.buffer(op.logits) + std::int64_t{r} * vocab;
    const bool penalties =
        p.penalty_window != 0 &&
        (p.repeat_penalty != 1 || p.presence_penalty != 0 || p.frequency_penalty != 0);
    if (!(p.temperature > 0) && row.bias_count == 0 && !penalties) {
      const MaxElement best = f_.max_element(logits, vocab);
      s.sampled[r] = std::isfinite(best.value) ? best.index : -1;
    } else {
      s.sampled[r] =
          reference::sample_token({logits, static_cast<std::size_t>(vocab)}, row,
                                  {s.history + std::int64_t{row_index} * s.history_stride,
                                   static_cast<std::size_t>(row.history_length)},
                                  working);
    }
    s.logprob[r] = p.want_logprob && s.sampled[r] >= 0
                       ? static_cast<float>(log_softmax_at(f_, logits, vocab, s.sampled[r]))
                       : 0.0F;
  }
  pool_.barrier();
}

void CpuProgram::execute(const AdvanceOp& op, Worker w) {
  if (w.index == 0) reference::run(op, bound_);
}

}  // namespace pianola::cpu
