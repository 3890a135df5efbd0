// The ops of state layers as launches.
#include "backends/cuda/kernels/state.h"
#include "backends/cuda/step_kernels.h"

namespace pianola::cuda {

void StepKernels::run(const ShortConvOp& op, std::size_t, const Launch& l) const {
  short_conv({.in = bound_.buffer(op.in),
              .weight = bound_.vector(op.weight),
              .bias = bound_.vector(op.bias),
              .silu = op.activation.has_value(),
              .out = bound_.buffer(op.out),
              .view = bound_.state_cache(op.state),
              .state = bound_.state(),
              .lanes = bound_.plan().shape.lanes,
              .tokens = tokens()},
             l);
}

template <typename Op>
FoldArgs StepKernels::fold_args(const Op& op, BufferId in, BufferId rate) const {
  FoldArgs args;
  args.in = bound_.buffer(in);
  args.in_width = static_cast<int>(bound_.width(in));
  args.rate = bound_.buffer(rate);
  args.a_log = bound_.vector(op.a_log);
  args.dt_bias = bound_.vector(op.dt_bias);
  args.out = bound_.buffer(op.out);
  args.rates = scratch<StepRates>(layout_.rates);
  args.view = bound_.state_cache(op.state);
  args.state = bound_.state();
  args.lanes = bound_.plan().shape.lanes;
  return args;
}

void StepKernels::run(const DeltaRuleOp& op, std::size_t, const Launch& l) const {
  FoldArgs args = fold_args(op, op.qkv, op.decay);
  const int keys = op.key_heads * args.view.spec.key_dim;
  args.rule = StateRule::kDelta;
  args.key_at = keys;
  args.query_at = 0;
  args.value_at = 2 * keys;
  args.key_heads = op.key_heads;
  args.group = op.group;
  args.beta = bound_.buffer(op.beta);
  args.eps = op.eps;
  fold_states(args, l);
}

void StepKernels::run(const SsmOp& op, std::size_t, const Launch& l) const {
  FoldArgs args = fold_args(op, op.xbc, op.dt);
  const StateSpec& spec = args.view.spec;
  const int values = spec.heads * spec.value_dim;
  args.rule = StateRule::kSsm;
  args.key_at = values;
  args.query_at = values + op.groups * spec.key_dim;
  args.value_at = 0;
  args.key_heads = op.groups;
  args.group = spec.heads / op.groups;
  args.skip = bound_.vector(op.skip);
  args.dt_min = op.dt_min;
  args.dt_max = op.dt_max;
  fold_states(args, l);
}

void StepKernels::run(const GateOp& op, std::size_t, const Launch& l) const {
  sigmoid_gate({.in = bound_.buffer(op.in),
                .gate = bound_.buffer(op.gate),
                .out = bound_.buffer(op.out),
                .width = static_cast<int>(bound_.width(op.in)),
                .count = token_count(),
                .tokens = tokens()},
               l);
}

void StepKernels::run(const GatedNormOp& op, std::size_t, const Launch& l) const {
  const std::int64_t width = bound_.width(op.in);
  gated_norm({.in = bound_.buffer(op.in),
              .gate = bound_.buffer(op.gate),
              .weight = bound_.vector(op.norm.weight),
              .out = bound_.buffer(op.out),
              .eps = op.norm.eps,
              .width = static_cast<int>(width),
              .group = op.group,
              .own_weights = bound_.weight(op.norm.weight).decl->cols == width,
              .gate_first = op.gate_first,
              .count = token_count(),
              .tokens = tokens()},
             l);
}

}  // namespace pianola::cuda
