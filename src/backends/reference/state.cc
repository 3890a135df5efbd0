#include <algorithm>
#include <cmath>
#include <span>

#include "backends/reference/ops.h"
#include "backends/state_walk.h"

namespace pianola::reference {
namespace {

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

double softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))); }

// out = x * factor / sqrt(sum of squares + eps)
void unit(const float* x, int n, float eps, double factor, float* out) {
  const double scale = factor / std::sqrt(dot(x, x, n) + eps);
  for (int i = 0; i < n; ++i) out[i] = static_cast<float>(x[i] * scale);
}

// The state after a step, and `out` = S' q + skip * value when there is a query.
void fold(const StateSpec& spec, const float* from, const StateStep& step, bool delta, double* u,
          float* to) {
  const std::int64_t width = spec.value_dim;
  const double decay = *step.decay;
  for (std::int64_t j = 0; j < width; ++j) {
    double known = 0;
    for (std::int64_t i = 0; from && delta && i < spec.key_dim; ++i) {
      known += decay * from[i * width + j] * step.key[i];
    }
    u[j] = *step.strength * (step.value[j] - known);
  }
  for (std::int64_t i = 0; i < spec.key_dim; ++i) {
    for (std::int64_t j = 0; j < width; ++j) {
      const double old = from ? decay * from[i * width + j] : 0.0;
      to[i * width + j] = static_cast<float>(old + step.key[i] * u[j]);
    }
  }
}

void read_state(const StateSpec& spec, const float* state, const float* query, double* sums,
                float* out) {
  std::fill_n(sums, spec.value_dim, 0.0);
  for (std::int64_t i = 0; i < spec.key_dim; ++i) {
    for (std::int64_t j = 0; j < spec.value_dim; ++j) {
      sums[j] += static_cast<double>(query[i]) * state[i * spec.value_dim + j];
    }
  }
  for (int j = 0; j < spec.value_dim; ++j) out[j] = static_cast<float>(sums[j]);
}

// Every head of every lane of the step: prepare(t, head, step) as in walk_states(), and
// finish(t, head, out) behind the output of a token's head.
template <typename Prepare, typename Finish>
void run_heads(const BoundPlan& bound, StateId id, BufferId out_id, bool delta, Prepare prepare,
               Finish finish) {
  const StepState& s = bound.state();
  const StateView& view = bound.state_cache(id);
  const StateSpec& spec = view.spec;
  auto* sums = reinterpret_cast<double*>(bound.scratch());
  auto* scratch = reinterpret_cast<float*>(sums + spec.value_dim);
  float* out = bound.buffer(out_id);
  const std::int64_t width = bound.width(out_id);
  std::fill_n(out, s.counts->tokens * width, 0.0F);
  for (std::int32_t lane = 0; lane < s.counts->lanes; ++lane) {
    const std::int32_t first = s.first_token[lane];
    for (int head = 0; head < spec.heads; ++head) {
      walk_states(
          view, s.row_of[lane], head, s.position + first, s.first_token[lane + 1] - first, scratch,
          [&](int i, const StateStep& step) { prepare(first + i, head, step); },
          [&](int i, const float* from, const StateStep& step, float* to) {
            fold(spec, from, step, delta, sums, to);
            if (!step.query) return;
            float* head_out = out + (first + i) * width + std::int64_t{head} * spec.value_dim;
            read_state(spec, to, step.query, sums, head_out);
            finish(first + i, head, head_out);
          });
    }
  }
}

}  // namespace

void run(const ShortConvOp& op, const BoundPlan& bound) {
  const StepState& s = bound.state();
  const StateView& view = bound.state_cache(op.state);
  const int width = view.spec.conv_width;
  const int taps = view.spec.conv_taps;
  const float* weight = bound.vector(op.weight);
  const float* bias = bound.vector(op.bias);
  for (std::int32_t lane = 0; lane < s.counts->lanes; ++lane) {
    const std::int32_t row = s.row_of[lane];
    const std::int32_t begin = s.first_token[lane];
    const std::int32_t end = s.first_token[lane + 1];
    for (std::int32_t t = begin; t < end; ++t) {
      float* out = bound.buffer(op.out) + std::int64_t{t} * width;
      const std::int32_t position = s.position[t];
      for (int c = 0; c < width; ++c) {
        double sum = bias ? bias[c] : 0.0;
        std::int32_t source = t;
        for (int j = 0; position >= 0 && j < taps && j <= position; ++j) {
          while (source >= begin && s.position[source] < 0) --source;
          // From this step, or from what an earlier one stored.
          const float x = source >= begin ? bound.buffer(op.in)[std::int64_t{source} * width + c]
                                          : view.conv_at(row, position - j)[c];
          sum += static_cast<double>(weight[(taps - 1 - j) * width + c]) * x;
          --source;
        }
        if (op.activation) sum = gated(*op.activation, static_cast<float>(sum), 1.0F);
        out[c] = position < 0 ? 0.0F : static_cast<float>(sum);
      }
    }
    for (std::int32_t t = begin; t < end; ++t) {
      if (s.position[t] < 0) continue;
      std::copy_n(bound.buffer(op.in) + std::int64_t{t} * width, width,
                  view.conv_at(row, s.position[t]));
    }
  }
}

void run(const DeltaRuleOp& op, const BoundPlan& bound) {
  const StateSpec& spec = bound.state_cache(op.state).spec;
  const std::int64_t keys = std::int64_t{op.key_heads} * spec.key_dim;
  run_heads(
      bound, op.state, op.out, true,
      [&](std::int32_t t, int head, const StateStep& step) {
        const float* q = bound.buffer(op.qkv) + t * bound.width(op.qkv) +
                         std::int64_t{head / op.group % op.key_heads} * spec.key_dim;
        const float* v = bound.buffer(op.qkv) + t * bound.width(op.qkv) + 2 * keys +
                         std::int64_t{head} * spec.value_dim;
        unit(q, spec.key_dim, op.eps, 1.0 / std::sqrt(static_cast<double>(spec.key_dim)),
             step.query);
        unit(q + keys, spec.key_dim, op.eps, 1.0, step.key);
        std::copy_n(v, spec.value_dim, step.value);
        const std::int64_t at = std::int64_t{t} * spec.heads + head;
        const double rate = softplus(static_cast<double>(bound.buffer(op.decay)[at]) +
                                     bound.vector(op.dt_bias)[head]);
        *step.decay = static_cast<float>(
            std::exp(-std::exp(static_cast<double>(bound.vector(op.a_log)[head])) * rate));
        *step.strength = static_cast<float>(sigmoid(bound.buffer(op.beta)[at]));
      },
      [](std::int32_t, int, float*) {});
}

void run(const SsmOp& op, const BoundPlan& bound) {
  const StateSpec& spec = bound.state_cache(op.state).spec;
  const std::int64_t values = std::int64_t{spec.heads} * spec.value_dim;
  const auto x_of = [&](std::int32_t t, int head) {
    return bound.buffer(op.xbc) + t * bound.width(op.xbc) + std::int64_t{head} * spec.value_dim;
  };
  run_heads(
      bound, op.state, op.out, false,
      [&](std::int32_t t, int head, const StateStep& step) {
        const float* b = bound.buffer(op.xbc) + t * bound.width(op.xbc) + values +
                         std::int64_t{head / (spec.heads / op.groups)} * spec.key_dim;
        std::copy_n(b, spec.key_dim, step.key);
        std::copy_n(b + std::int64_t{op.groups} * spec.key_dim, spec.key_dim, step.query);
        std::copy_n(x_of(t, head), spec.value_dim, step.value);
        const double dt = std::clamp(
            softplus(static_cast<double>(bound.buffer(op.dt)[std::int64_t{t} * spec.heads + head]) +
                     bound.vector(op.dt_bias)[head]),
            static_cast<double>(op.dt_min), static_cast<double>(op.dt_max));
        *step.decay = static_cast<float>(
            std::exp(-std::exp(static_cast<double>(bound.vector(op.a_log)[head])) * dt));
        *step.strength = static_cast<float>(dt);
      },
      [&](std::int32_t t, int head, float* out) {
        const float* x = x_of(t, head);
        for (int j = 0; j < spec.value_dim; ++j) out[j] += bound.vector(op.skip)[head] * x[j];
      });
}

void run(const GateOp& op, const BoundPlan& bound) {
  const std::int64_t count = bound.state().counts->tokens * bound.width(op.in);
  for (std::int64_t i = 0; i < count; ++i) {
    bound.buffer(op.out)[i] =
        static_cast<float>(bound.buffer(op.in)[i] * sigmoid(bound.buffer(op.gate)[i]));
  }
}

void run(const GatedNormOp& op, const BoundPlan& bound) {
  const std::int64_t width = bound.width(op.in);
  const auto group = static_cast<std::size_t>(op.group);
  auto* gate = reinterpret_cast<float*>(bound.scratch());
  const bool own_weights = bound.weight(op.norm.weight).decl->cols == width;
  for (std::int32_t t = 0; t < bound.state().counts->tokens; ++t) {
    for (std::int64_t at = 0; at < width; at += op.group) {
      const float* in = bound.buffer(op.in) + t * width + at;
      const float* z = bound.buffer(op.gate) + t * width + at;
      const float* weight = bound.vector(op.norm.weight) + (own_weights ? at : 0);
      float* out = bound.buffer(op.out) + t * width + at;
      for (std::size_t i = 0; i < group; ++i) gate[i] = gated(Activation::kSilu, z[i], 1.0F);
      if (op.gate_first) {
        for (std::size_t i = 0; i < group; ++i) gate[i] *= in[i];
        rms_norm({gate, group}, weight, op.norm.eps, out);
      } else {
        rms_norm({in, group}, weight, op.norm.eps, out);
        for (std::size_t i = 0; i < group; ++i) out[i] *= gate[i];
      }
    }
  }
}

}  // namespace pianola::reference
