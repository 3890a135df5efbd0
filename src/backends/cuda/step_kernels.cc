#include "backends/cuda/step_kernels.h"

#include <algorithm>

#include "backends/cuda/kernels/gate.h"
#include "backends/cuda/kernels/packed_weight.h"
#include "backends/cuda/kernels/repack.h"
#include "backends/cuda/kernels/state.h"
#include "backends/cuda/step_experts.h"
#include "base/check.h"

namespace pianola::cuda {
namespace {

constexpr std::size_t kAlign = 256;

// Hands out aligned pieces of the scratch.
class Pieces {
 public:
  std::size_t take(std::size_t bytes) {
    const std::size_t at = bytes_;
    bytes_ += (bytes + kAlign - 1) / kAlign * kAlign;
    return at;
  }
  std::size_t bytes() const { return bytes_; }

 private:
  std::size_t bytes_ = 0;
};

std::size_t size_of(std::int64_t n) { return static_cast<std::size_t>(n); }

bool is_raw_bf16(const WeightDecl& decl) { return decl.dtype == DType::kBF16; }

// Products of a chunk by cuBLASLt need bfloat16: f16 and f32 matrices keep their precision and run
// in the order of the decode class.
bool is_gemm_form(const WeightDecl& decl) {
  return decl.dtype != DType::kF32 && decl.dtype != DType::kF16;
}

struct Sizes {
  int kv_heads = 0, heads = 0, value_dim = 0, state_heads = 0;
  std::int64_t k_width = 0, v_width = 0, ff = 0, widest = 0, unpacked = 0, score_vocab = 0;
  std::int64_t head_width = 0;
  std::size_t experts = 0;  // bytes
  bool f32_up = false;      // gate and up that are not joined, which may be in f32 in any class
};

// Whether gate and up are joined where they are multiplied, rather than by a kernel of their own.
bool joins_products(const GatedMlpOp& op, const WeightDecl* gate, const WeightDecl& up) {
  return gate && op.activation != Activation::kRelu && same_form(gate->dtype, up.dtype);
}

Sizes sizes_of(const Plan& plan, const PlanTables& tables) {
  Sizes s;
  const auto decl = [&tables](WeightId id) -> const WeightDecl& {
    return tables.weights[size_of(id.index)];
  };
  const auto product = [&](WeightId id) {
    if (!id.valid()) return;
    const WeightDecl& d = decl(id);
    s.widest = std::max(s.widest, d.cols);
    if (!is_raw_bf16(d) && is_gemm_form(d)) s.unpacked = std::max(s.unpacked, d.rows * d.cols);
  };
  for (const Op& op : plan.ops) {
    if (const auto* q = std::get_if<QkvOp>(&op)) {
      s.k_width = std::max(s.k_width, decl(q->k).rows);
      s.v_width = std::max(s.v_width, decl(q->v).rows);
      for (const WeightId id : {q->q, q->k, q->v}) product(id);
    } else if (const auto* query = std::get_if<QueryOp>(&op)) {
      product(query->q);
    } else if (const auto* a = std::get_if<AttentionOp>(&op)) {
      const AttentionSpec& spec = tables.caches.attention[size_of(a->cache.index)];
      s.heads = std::max(s.heads, a->heads);
      s.kv_heads = std::max(s.kv_heads, spec.kv_heads);
      s.value_dim = std::max(s.value_dim, spec.value_dim);
    } else if (const auto* l = std::get_if<LinearOp>(&op)) {
      product(l->weight);
    } else if (const auto* d = std::get_if<DeltaRuleOp>(&op)) {
      s.state_heads = std::max(s.state_heads, tables.caches.states[size_of(d->state.index)].heads);
    } else if (const auto* x = std::get_if<SsmOp>(&op)) {
      s.state_heads = std::max(s.state_heads, tables.caches.states[size_of(x->state.index)].heads);
    } else if (const auto* m = std::get_if<GatedMlpOp>(&op)) {
      s.ff = std::max(s.ff, decl(m->up).rows);
      const WeightDecl* gate = m->gate.valid() ? &decl(m->gate) : nullptr;
      s.f32_up = s.f32_up || (gate && !joins_products(*m, gate, decl(m->up)));
      for (const WeightId id : {m->gate, m->up, m->down}) product(id);
    } else if (const auto* r = std::get_if<RouteOp>(&op)) {
      s.experts = std::max(s.experts, route_bytes(*r, plan, tables));
    } else if (const auto* e = std::get_if<ExpertsOp>(&op)) {
      s.experts = std::max(s.experts, experts_bytes(*e, plan, tables));
      if (is_shared(decl(e->gate), decl(e->up))) {
        s.ff = std::max(s.ff, decl(e->gate).rows);
        s.widest = std::max(s.widest, decl(e->gate).cols);
      }
    } else if (const auto* h = std::get_if<LmHeadOp>(&op)) {
      s.head_width = std::max(s.head_width, decl(h->weight).cols);
    } else if (const auto* c = std::get_if<ScoreOp>(&op)) {
      s.score_vocab = std::max(s.score_vocab, decl(c->weight).rows);
      s.head_width = std::max(s.head_width, decl(c->weight).cols);
    }
  }
  return s;
}

}  // namespace

StepClass step_class(const Plan& plan, const CudaOptions& options) {
  return plan.shape.tokens <= kDecodeTokens || options.batch_invariant ? StepClass::kDecode
                                                                       : StepClass::kChunk;
}

CudaScratch plan_scratch(const Plan& plan, const PlanTables& tables, const CudaOptions& options) {
  const Sizes s = sizes_of(plan, tables);
  const std::size_t tokens = size_of(plan.shape.tokens);
  CudaScratch c;
  Pieces pieces;
  c.attention =
      pieces.take(attention_scratch_bytes(std::min(plan.shape.tokens, kDecodeTokens), s.heads,
                                          s.kv_heads, s.value_dim, tables.cache_shape.capacity));
  c.linear = pieces.take(linear_scratch_bytes(
      plan.shape.tokens, static_cast<int>(std::max({s.widest, s.ff, s.head_width}))));
  c.k = pieces.take(tokens * size_of(s.k_width) * sizeof(float));
  c.v = pieces.take(tokens * size_of(s.v_width) * sizeof(float));
  c.gate = pieces.take(tokens * size_of(s.ff) * sizeof(float));
  if (step_class(plan, options) == StepClass::kChunk) {
    c.up = pieces.take(tokens * size_of(s.ff) * (s.f32_up ? sizeof(float) : 2));
    c.normed = pieces.take(tokens * size_of(s.widest) * 2);
    c.unpacked = pieces.take(size_of(s.unpacked) * 2);
    c.gemm = pieces.take(kGemmWorkspaceBytes + kGemmWorkspaceAlignment);
  } else {
    c.up = pieces.take(tokens * size_of(s.ff) * sizeof(float));
  }
  c.logits = pieces.take(size_of(kDecodeTokens) * size_of(s.score_vocab) * sizeof(float));
  c.rates = pieces.take(tokens * size_of(s.state_heads) * sizeof(StepRates));
  c.experts = pieces.take(s.experts);
  c.bytes = pieces.bytes();
  return c;
}

StepKernels::StepKernels(const Plan& plan, const Binding& binding, const CudaOptions& options,
                         const GemmLibrary* library, int multiprocessors)
    : bound_(plan, binding),
      options_(options),
      library_(library),
      multiprocessors_(multiprocessors),
      layout_(plan_scratch(plan, binding.tables, options)),
      class_(library ? step_class(plan, options) : StepClass::kDecode) {
  choose_products();
}

void StepKernels::choose_products() {
  products_.resize(bound_.plan().ops.size());
  if (class_ == StepClass::kDecode) return;
  const auto add = [this](std::size_t op, WeightId id, GemmOut out, bool bias, bool residual) {
    if (!id.valid()) return;
    const WeightDecl& decl = *bound_.weight(id).decl;
    if (!is_gemm_form(decl)) return;
    products_[op].gemm.emplace_back(*library_, tokens(), static_cast<int>(decl.rows),
                                    static_cast<int>(decl.cols), out, bias, residual);
  };
  for (std::size_t i = 0; i < bound_.plan().ops.size(); ++i) {
    const Op& op = bound_.plan().ops[i];
    if (const auto* q = std::get_if<QkvOp>(&op)) {
      add(i, q->q, GemmOut::kF32, q->q_bias.valid(), false);
      add(i, q->k, GemmOut::kF32, q->k_bias.valid(), false);
      add(i, q->v, GemmOut::kF32, q->v_bias.valid(), false);
    } else if (const auto* query = std::get_if<QueryOp>(&op)) {
      add(i, query->q, GemmOut::kF32, query->q_bias.valid(), false);
    } else if (const auto* l = std::get_if<LinearOp>(&op)) {
      add(i, l->weight, GemmOut::kF32, l->bias.valid(), l->residual.valid());
    } else if (const auto* m = std::get_if<GatedMlpOp>(&op)) {
      add(i, m->gate, GemmOut::kBF16, false, false);
      add(i, m->up, GemmOut::kBF16, false, false);
      add(i, m->down, GemmOut::kF32, m->down_bias.valid(), m->residual.valid());
    }
  }
}

Launch StepKernels::launch(cudaStream_t stream) const {
  // Chunks keep plain edges: their kernels fill the device.
  const bool dependent = options_.dependent_launch && class_ == StepClass::kDecode;
  return {.stream = stream,
          .sms = multiprocessors_,
          .dependent = dependent,
          .dependent_inside = dependent};
}

void StepKernels::issue(cudaStream_t stream, const cudaGraphConditionalHandle* handle) const {
  issue_ops(stream, 0, op_count(), handle);
}

void StepKernels::issue_ops(cudaStream_t stream, int first, int last,
                            const cudaGraphConditionalHandle* handle) const {
  const std::vector<Op>& ops = bound_.plan().ops;
  Launch l = launch(stream);
  const bool dependent = l.dependent;
  l.dependent = false;  // the first kernel of a graph has nothing to depend on
  for (int i = first; i < last; ++i) {
    const auto index = static_cast<std::size_t>(i);
    const Op& op = ops[index];
    if (std::holds_alternative<RollbackOp>(op)) continue;  // the kernel of the EmbedOp behind it
    if (const auto* qkv = std::get_if<QkvOp>(&op)) {
      project_qkv(*qkv, index, l);
      l.dependent = dependent;
      const HeadsArgs heads = heads_args(*qkv);
      if (i + 1 < last && attends_with(*qkv, index + 1)) {
        run(std::get<AttentionOp>(ops[index + 1]), &heads, l);
        ++i;
      } else {
        finish_heads(heads, l);
      }
      continue;
    }
    if (const std::size_t together = projections(index, static_cast<std::size_t>(last));
        together > 1) {
      LinearArgs args = product(std::get<LinearOp>(op));
      for (std::size_t n = 1; n < together; ++n) {
        args.part[args.parts++] = product(std::get<LinearOp>(ops[index + n])).part[0];
      }
      multiply(args, tokens(), l);
      i += static_cast<int>(together) - 1;
    } else if (const auto* attention = std::get_if<AttentionOp>(&op)) {
      run(*attention, nullptr, l);
    } else if (std::holds_alternative<AdvanceOp>(op)) {
      AdvanceArgs args{.state = bound_.state(),
                       .samples = bound_.plan().shape.variant == StepVariant::kSample};
      args.loop = handle != nullptr;
      if (handle) args.handle = *handle;
      advance(args, l);
    } else {
      std::visit(
          [&](const auto& o) {
            if constexpr (requires { run(o, index, l); }) {
              run(o, index, l);
            } else {
              PIANOLA_CHECK(false, "{} has no kernel: check() refuses it", op_name(op));
            }
          },
          op);
    }
    l.dependent = dependent;
  }
}

void StepKernels::run(const EmbedOp& op, std::size_t index, const Launch& l) const {
  const bool rolls_back =
      index > 0 && std::holds_alternative<RollbackOp>(bound_.plan().ops[index - 1]);
  embed({.table = packed(op.table),
         .scale = op.scale,
         .out = bound_.buffer(op.out),
         .state = bound_.state(),
         .tokens = tokens(),
         .rolls_back = rolls_back},
        l);
}

void StepKernels::run(const NormOp& op, std::size_t, const Launch& l) const {
  NormArgs args = norm_args(op.in, op.norm);
  args.residual = op.residual.valid() ? bound_.buffer(op.residual) : nullptr;
  args.out = bound_.buffer(op.out);
  rms_norm(args, l);
}

NormArgs StepKernels::norm_args(BufferId in, const RmsNorm& norm) const {
  return {.in = bound_.buffer(in),
          .weight = bound_.vector(norm.weight),
          .eps = norm.eps,
          .width = static_cast<int>(bound_.width(in)),
          .count = token_count(),
          .tokens = tokens()};
}

LinearArgs StepKernels::product_args(const float* in, std::int64_t width,
                                     const RmsNorm& norm) const {
  return {.in = in,
          .in_ld = static_cast<int>(width),
          .norm = bound_.vector(norm.weight),
          .eps = norm.eps,
          .count = token_count(),
          .in_rows = tokens(),
          .scratch = scratch<std::byte>(layout_.linear)};
}

LinearArgs StepKernels::head_args(BufferId in, const RmsNorm& norm) const {
  LinearArgs args = product_args(bound_.buffer(in), bound_.width(in), norm);
  args.count = logit_count();
  args.gather = bound_.state().logit_token;
  return args;
}

void StepKernels::multiply(LinearArgs args, int count, const Launch& l) const {
  Launch next = l;
  for (int first = 0; first < count; first += kDecodeTokens) {
    multiply_tile(args, first, count, next);
    next.dependent = l.dependent_inside;
  }
}

int StepKernels::multiply_tile(LinearArgs args, int first, int count, const Launch& l) const {
  args.first = first;
  args.tokens = std::min(kDecodeTokens, count - first);
  linear(args, l);
  return args.tokens;
}

std::byte* StepKernels::gemm_workspace() const {
  const auto address = reinterpret_cast<std::uintptr_t>(scratch<std::byte>(layout_.gemm));
  return reinterpret_cast<std::byte*>((address + kGemmWorkspaceAlignment - 1) /
                                      kGemmWorkspaceAlignment * kGemmWorkspaceAlignment);
}

void* StepKernels::bf16_input(BufferId in, const RmsNorm& norm, const Launch& l) const {
  auto* x = scratch<void>(layout_.normed);
  rms_norm_bf16(norm_args(in, norm), x, l);
  return x;
}

const void* StepKernels::bf16_weight(WeightId id, const Launch& l) const {
  const PackedWeight weight = packed(id);
  if (weight.codes == Codes::kBF16) return weight.data;
  auto* out = scratch<std::byte>(layout_.unpacked);
  unpack_bf16(weight, 0, weight.rows, out, l);
  return out;
}

void StepKernels::run(const LinearOp& op, std::size_t index, const Launch& l) const {
  if (products_[index].gemm.empty()) {
    multiply(product(op), tokens(), l);
    return;
  }
  const void* x = bf16_input(op.in, op.norm.value_or(RmsNorm{}), l);
  const float* residual = op.residual.valid() ? bound_.buffer(op.residual) : nullptr;
  products_[index].gemm[0].run(bf16_weight(op.weight, l), x, bound_.vector(op.bias), residual,
                               bound_.buffer(op.out), gemm_workspace(), l.stream);
}

LinearArgs StepKernels::product(const LinearOp& op) const {
  LinearArgs args =
      product_args(bound_.buffer(op.in), bound_.width(op.in), op.norm.value_or(RmsNorm{}));
  args.part[0] = {packed(op.weight), bound_.vector(op.bias), bound_.buffer(op.out),
                  static_cast<int>(bound_.width(op.out))};
  args.residual = op.residual.valid() ? bound_.buffer(op.residual) : nullptr;
  return args;
}

std::size_t StepKernels::projections(std::size_t index, std::size_t last) const {
  const std::vector<Op>& ops = bound_.plan().ops;
  const auto* first = std::get_if<LinearOp>(&ops[index]);
  if (!first || class_ != StepClass::kDecode || first->residual.valid()) return 0;
  const std::size_t most = std::min(last - index, std::size(LinearArgs{}.part));
  std::size_t count = 1;
  for (; count < most; ++count) {
    const auto* next = std::get_if<LinearOp>(&ops[index + count]);
    if (!next || next->in != first->in || next->norm != first->norm || next->residual.valid() ||
        !same_form(packed(next->weight), packed(first->weight))) {
      break;
    }
  }
  return count;
}

void StepKernels::project_qkv(const QkvOp& op, std::size_t index, const Launch& l) const {
  const std::vector<Gemm>& gemm = products_[index].gemm;
  const Targets targets = qkv_targets(op);
  if (gemm.size() == targets.count) {
    const void* x = bf16_input(op.in, op.norm, l);
    for (std::size_t i = 0; i < targets.count; ++i) {
      const Target& to = targets.of[i];
      gemm[i].run(bf16_weight(to.weight, l), x, bound_.vector(to.bias), nullptr, to.out,
                  gemm_workspace(), l.stream);
    }
    return;
  }
  Launch next = l;
  const QkvProducts products = qkv_products(op);
  for (std::size_t i = 0; i < products.count; ++i) {
    multiply(products.args[i], tokens(), next);
    next.dependent = l.dependent_inside;
  }
}

StepKernels::QkvProducts StepKernels::qkv_products(const QkvOp& op) const {
  const Targets targets = qkv_targets(op);
  QkvProducts products;
  // Matrices of one form share a launch.
  for (std::size_t i = 0; i < targets.count;) {
    LinearArgs args = product_args(bound_.buffer(op.in), bound_.width(op.in), op.norm);
    args.parts = 0;
    const PackedWeight first = packed(targets.of[i].weight);
    for (; i < targets.count && same_form(first, packed(targets.of[i].weight)); ++i) {
      const Target& to = targets.of[i];
      const PackedWeight weight = packed(to.weight);
      args.part[args.parts++] = {weight, bound_.vector(to.bias), to.out, weight.rows};
    }
    products.args[products.count++] = args;
  }
  return products;
}

StepKernels::Targets StepKernels::qkv_targets(const QkvOp& op) const {
  Targets targets;
  const auto add = [&](const Target& target) { targets.of[targets.count++] = target; };
  if (op.q.valid()) add({op.q, op.q_bias, bound_.buffer(op.q_out)});
  add({op.k, op.k_bias, scratch<float>(layout_.k)});
  add({op.v, op.v_bias, scratch<float>(layout_.v)});
  return targets;
}

void StepKernels::run(const GatedMlpOp& op, std::size_t index, const Launch& l) const {
  const int ff = packed(op.up).rows;
  const std::vector<Gemm>& gemm = products_[index].gemm;
  if (gemm.size() == (op.gate.valid() ? 3U : 2U)) {
    void* x = bf16_input(op.in, op.norm, l);
    auto* workspace = gemm_workspace();
    GateArgs gate{.out = x, .activation = op.activation, .width = ff, .tokens = tokens()};
    const Gemm* next = gemm.data();
    const auto multiply_by = [&](WeightId weight, std::size_t to) {
      (next++)->run(bf16_weight(weight, l), x, nullptr, nullptr, scratch<void>(to), workspace,
                    l.stream);
      return scratch<void>(to);
    };
    if (op.gate.valid()) {
      gate.gate = multiply_by(op.gate, layout_.gate);
      gate.gate_bias = bound_.vector(op.gate_bias);
      gate.up = multiply_by(op.up, layout_.up);
      gate.up_bias = bound_.vector(op.up_bias);
    } else {
      gate.gate = multiply_by(op.up, layout_.gate);
      gate.gate_bias = bound_.vector(op.up_bias);
    }
    gate_bf16(gate, l);
    const float* residual = op.residual.valid() ? bound_.buffer(op.residual) : nullptr;
    next->run(bf16_weight(op.down, l), x, bound_.vector(op.down_bias), residual,
              bound_.buffer(op.out), workspace, l.stream);
    return;
  }
  Launch next = l;
  const bool dependent = l.dependent_inside;
  const WeightDecl* gate = op.gate.valid() ? bound_.weight(op.gate).decl : nullptr;
  if (joins_products(op, gate, *bound_.weight(op.up).decl)) {
    multiply(gated_product(op), tokens(), next);
  } else {
    LinearArgs args = product_args(bound_.buffer(op.in), bound_.width(op.in), op.norm);
    auto* hidden = scratch<float>(layout_.gate);
    auto* raw_up = gate ? scratch<float>(layout_.up) : hidden;
    if (gate) {
      args.part[0] = {packed(op.gate), bound_.vector(op.gate_bias), hidden, ff};
      multiply(args, tokens(), next);
      next.dependent = dependent;
    }
    args.part[0] = {packed(op.up), bound_.vector(op.up_bias), raw_up, ff};
    multiply(args, tokens(), next);
    next.dependent = dependent;
    gate_f32({.gate = hidden,
              .up = gate ? raw_up : nullptr,
              .out = hidden,
              .activation = op.activation,
              .width = ff,
              .tokens = tokens()},
             next);
  }
  next.dependent = dependent;
  multiply(down_product(op), tokens(), next);
}

LinearArgs StepKernels::gated_product(const GatedMlpOp& op) const {
  const PackedWeight gate = packed(op.gate);
  const PackedWeight up = packed(op.up);
  LinearArgs args = product_args(bound_.buffer(op.in), bound_.width(op.in), op.norm);
  args.parts = 2;
  args.end = LinearEnd::kGated;
  args.activation = op.activation;
  args.part[0] = {gate, bound_.vector(op.gate_bias), scratch<float>(layout_.gate), gate.rows};
  args.part[1] = {up, bound_.vector(op.up_bias), nullptr, up.rows};
  return args;
}

LinearArgs StepKernels::down_product(const GatedMlpOp& op) const {
  const PackedWeight down = packed(op.down);
  LinearArgs args = product_args(scratch<float>(layout_.gate), down.cols, {});
  args.part[0] = {down, bound_.vector(op.down_bias), bound_.buffer(op.out), down.rows};
  args.residual = op.residual.valid() ? bound_.buffer(op.residual) : nullptr;
  return args;
}

LinearArgs StepKernels::product(const LmHeadOp& op) const {
  const PackedWeight weight = packed(op.weight);
  LinearArgs args = head_args(op.in, op.norm);
  args.part[0] = {weight, nullptr, bound_.buffer(op.logits), weight.rows};
  return args;
}

void StepKernels::run(const LmHeadOp& op, std::size_t, const Launch& l) const {
  multiply(product(op), logit_rows(), l);
}

void StepKernels::run(const ScoreOp& op, std::size_t, const Launch& l) const {
  const PackedWeight weight = packed(op.weight);
  auto* logits = scratch<float>(layout_.logits);
  LinearArgs args = head_args(op.in, op.norm);
  args.out_first = true;
  args.part[0] = {weight, nullptr, logits, weight.rows};
  for (int first = 0; first < logit_rows(); first += kDecodeTokens) {
    const int rows = multiply_tile(args, first, logit_rows(), l);
    target_logprob({.logits = logits,
                    .vocab = weight.rows,
                    .state = bound_.state(),
                    .first = first,
                    .rows = rows},
                   l);
  }
}

void StepKernels::run(const SampleOp& op, std::size_t, const Launch& l) const {
  sample({.logits = bound_.buffer(op.logits),
          .vocab = static_cast<int>(bound_.width(op.logits)),
          .state = bound_.state(),
          .logit_rows = logit_rows()},
         l);
}

}  // namespace pianola::cuda
