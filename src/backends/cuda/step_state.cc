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

void StepKernels::run(const DeltaRuleOp& op, std::size_t, const Launch& l) const {
  const StateView& view = bound_.state_cache(op.state);
  const int keys = op.key_heads * view.spec.key_dim;
  fold_states({.rule = StateRule::kDelta,
               .in = bound_.buffer(op.qkv),
               .in_width = static_cast<int>(bound_.width(op.qkv)),
               .key_at = keys,
               .query_at = 0,
               .value_at = 2 * keys,
               .key_heads = op.key_heads,
               .rate = bound_.buffer(op.decay),
               .beta = bound_.buffer(op.beta),
               .a_log = bound_.vector(op.a_log),
               .dt_bias = bound_.vector(op.dt_bias),
               .eps = op.eps,
               .out = bound_.buffer(op.out),
               .rates = scratch<StepRates>(layout_.rates),
               .view = view,
               .state = bound_.state(),
               .lanes = bound_.plan().shape.lanes},
              l);
}

void StepKernels::run(const SsmOp& op, std::size_t, const Launch& l) const {
  const StateView& view = bound_.state_cache(op.state);
  const int values = view.spec.heads * view.spec.value_dim;
  fold_states({.rule = StateRule::kSsm,
               .in = bound_.buffer(op.xbc),
               .in_width = static_cast<int>(bound_.width(op.xbc)),
               .key_at = values,
               .query_at = values + op.groups * view.spec.key_dim,
               .value_at = 0,
               .key_heads = op.groups,
               .rate = bound_.buffer(op.dt),
               .a_log = bound_.vector(op.a_log),
               .dt_bias = bound_.vector(op.dt_bias),
               .skip = bound_.vector(op.skip),
               .dt_min = op.dt_min,
               .dt_max = op.dt_max,
               .out = bound_.buffer(op.out),
               .rates = scratch<StepRates>(layout_.rates),
               .view = view,
               .state = bound_.state(),
               .lanes = bound_.plan().shape.lanes},
              l);
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
