// Multi-head latent attention as launches.
#include "backends/cuda/kernels/latent.h"
#include "backends/cuda/step_kernels.h"

namespace pianola::cuda {
namespace {

// The matrices of a stack; where heads lie is to be filled in.
HeadProductArgs product_of(const BoundWeight& stack) {
  HeadProductArgs args;
  args.weight = packed_weight(stack);
  args.stride = stack.matrix(1) - stack.data;
  args.heads = static_cast<int>(stack.decl->experts);
  return args;
}

}  // namespace

void StepKernels::run(const LatentQkvOp& op, std::size_t, const Launch& l) const {
  const LayerCacheView cache = bound_.cache(op.cache);
  HeadProductArgs absorb = product_of(bound_.weight(op.absorb));
  const int plain = absorb.weight.cols;
  absorb.in = bound_.buffer(op.q);
  absorb.in_token = static_cast<int>(bound_.width(op.q));
  absorb.in_head = plain + cache.key_dim - cache.value_dim;
  absorb.out = bound_.buffer(op.q_out);
  absorb.out_token = static_cast<int>(bound_.width(op.q_out));
  absorb.out_head = cache.key_dim;
  absorb.count = token_count();
  absorb.tokens = tokens();
  head_products(absorb, l);

  Launch next = l;
  next.dependent = l.dependent_inside;
  finish_latents({.q = bound_.buffer(op.q),
                  .kv = bound_.buffer(op.kv),
                  .kv_norm = bound_.vector(op.kv_norm.weight),
                  .eps = op.kv_norm.eps,
                  .inverse_frequencies = bound_.vector(op.rope.inverse_frequencies),
                  .style = op.rope.style,
                  .attention_factor = op.rope.attention_factor,
                  .heads = absorb.heads,
                  .plain = plain,
                  .q_out = bound_.buffer(op.q_out),
                  .cache = cache,
                  .state = bound_.state(),
                  .tokens = tokens()},
                 next);
}

void StepKernels::run(const HeadLinearOp& op, std::size_t, const Launch& l) const {
  HeadProductArgs args = product_of(bound_.weight(op.weight));
  args.in = bound_.buffer(op.in);
  args.in_token = static_cast<int>(bound_.width(op.in));
  args.in_head = args.weight.cols;
  args.out = bound_.buffer(op.out);
  args.out_token = static_cast<int>(bound_.width(op.out));
  args.out_head = args.weight.rows;
  args.count = token_count();
  args.tokens = tokens();
  head_products(args, l);
}

}  // namespace pianola::cuda
