// Attention as launches: which kernel, and what it is told.
#include "backends/cuda/kernels/attention_encoder.h"
#include "backends/cuda/kernels/latent.h"
#include "backends/cuda/step_kernels.h"

namespace pianola::cuda {

bool StepKernels::takes_encoder_kernel(const AttentionOp& op) const {
  return op.bias || bound_.cache(op.cache).holds != CacheHolds::kTokens;
}

bool StepKernels::attends_with(const QkvOp& qkv, std::size_t next) const {
  const std::vector<Op>& ops = bound_.plan().ops;
  const auto* attention = next < ops.size() ? std::get_if<AttentionOp>(&ops[next]) : nullptr;
  return attention && class_ == StepClass::kDecode && tokens() <= kDecodeTokens &&
         attention->cache == qkv.cache && attention->q == qkv.q_out &&
         !takes_encoder_kernel(*attention);
}

template <typename Op>
HeadsArgs StepKernels::query_args(const Op& op) const {
  HeadsArgs h;
  if (op.q.valid()) h.q = h.q_out = bound_.buffer(op.q_out);
  if (op.q_norm) {
    h.q_norm = bound_.vector(op.q_norm->weight);
    h.q_norm_eps = op.q_norm->eps;
  }
  h.style = op.rope.style;
  if (op.rope.turns()) {
    h.inverse_frequencies = bound_.vector(op.rope.inverse_frequencies);
    h.turned = static_cast<int>(2 * bound_.weight(op.rope.inverse_frequencies).decl->cols);
    h.attention_factor = op.rope.attention_factor;
  }
  h.state = bound_.state();
  h.tokens = tokens();
  return h;
}

HeadsArgs StepKernels::heads_args(const QkvOp& op) const {
  HeadsArgs h = query_args(op);
  h.k = scratch<float>(layout_.k);
  h.v = scratch<float>(layout_.v);
  if (op.k_norm) {
    h.k_norm = bound_.vector(op.k_norm->weight);
    h.k_norm_eps = op.k_norm->eps;
  }
  h.cache = bound_.cache(op.cache);
  if (op.q.valid()) h.heads = static_cast<int>(bound_.width(op.q_out)) / h.cache.key_dim;
  return h;
}

// Heads of queries beside a cache of none.
HeadsArgs StepKernels::heads_args(const QueryOp& op) const {
  HeadsArgs h = query_args(op);
  h.cache.key_dim = op.head_dim;
  h.cache.value_dim = op.head_dim;
  h.heads = static_cast<int>(bound_.width(op.q_out)) / op.head_dim;
  return h;
}

void StepKernels::run(const QueryOp& op, std::size_t index, const Launch& l) const {
  Launch next = l;
  if (products_[index].gemm.empty()) {
    LinearArgs args = product_args(bound_.buffer(op.in), bound_.width(op.in), op.norm);
    const PackedWeight weight = packed(op.q);
    args.part[0] = {weight, bound_.vector(op.q_bias), bound_.buffer(op.q_out), weight.rows};
    multiply(args, tokens(), next);
    next.dependent = l.dependent_inside;
  } else {
    const void* x = bf16_input(op.in, op.norm, l);
    products_[index].gemm[0].run(bf16_weight(op.q, l), x, bound_.vector(op.q_bias), nullptr,
                                 bound_.buffer(op.q_out), gemm_workspace(), l.stream);
  }
  finish_heads(heads_args(op), next);
}

AttentionArgs StepKernels::attention_args(const AttentionOp& op) const {
  AttentionArgs args;
  args.q = bound_.buffer(op.q);
  args.out = bound_.buffer(op.out);
  args.heads = op.heads;
  args.scale = op.scale;
  args.sinks = bound_.vector(op.sinks);
  args.cache = bound_.cache(op.cache);
  args.state = bound_.state();
  args.tokens = tokens();
  args.scratch = scratch<std::byte>(layout_.attention);
  return args;
}

void StepKernels::run(const AttentionOp& op, const HeadsArgs* heads, const Launch& l) const {
  const AttentionArgs args = attention_args(op);
  if (args.cache.latent) {
    attend_latent(args, l);
  } else if (takes_encoder_kernel(op)) {
    EncoderAttentionArgs encoder{.attention = args, .bias = {}};
    if (op.bias) encoder.bias = bias_steps(*op.bias, bound_.vector(op.bias->table));
    attend_encoder(encoder, l);
  } else if (class_ == StepClass::kDecode) {
    attend(args, heads, l);
  } else {
    attend_chunk(args, l);
  }
}

}  // namespace pianola::cuda
