// The ops of state layers on the CPU.
#include <algorithm>
#include <array>
#include <cmath>

#include "backends/cpu/cpu_program.h"
#include "base/check.h"

namespace pianola::cpu {
namespace {

float sigmoid(float x) { return 1.0F / (1.0F + std::exp(-x)); }

float softplus(float x) { return std::max(x, 0.0F) + std::log1p(std::exp(-std::abs(x))); }

// out = x * factor / sqrt(sum of squares + eps)
void unit(const float* x, int n, float eps, float factor, float* out) {
  double sum = 0;
  for (int i = 0; i < n; ++i) sum += static_cast<double>(x[i]) * x[i];
  const float scale = factor / std::sqrt(static_cast<float>(sum) + eps);
  for (int i = 0; i < n; ++i) out[i] = x[i] * scale;
}

}  // namespace

template <typename Prepare, typename Finish>
void CpuProgram::fold_heads(StateId id, BufferId out_id, bool delta, Worker w, Prepare prepare,
                            Finish finish) {
  const StepState& s = bound_.state();
  const StateView& view = bound_.state_cache(id);
  const StateSpec& spec = view.spec;
  float* out = bound_.buffer(out_id);
  const std::int64_t width = bound_.width(out_id);
  auto* working =
      scratch<float>(layout_.state + static_cast<std::size_t>(w.index) * layout_.state_bytes);
  // The lanes' heads one after the other, shared out.
  const Range own = share(s.counts->lanes * spec.heads, w);
  for (int item = own.begin; item < own.end; ++item) {
    const int lane = item / spec.heads;
    const int head = item % spec.heads;
    const int first = s.first_token[lane];
    const int count = s.first_token[lane + 1] - first;
    const auto out_of = [&](int t) {
      return out + t * width + std::int64_t{head} * spec.value_dim;
    };
    for (int t = first; t < first + count; ++t) {
      if (s.position[t] < 0) std::fill_n(out_of(t), spec.value_dim, 0.0F);
    }
    walk_states(
        view, s.row_of[lane], head, s.position + first, count, working,
        [&](int i, const StateStep& step) { prepare(first + i, head, step); },
        [&](int i, const float* from, const StateStep& step, float* to) {
          float* head_out = step.query ? out_of(first + i) : nullptr;
          states_.fold(from, step, spec.key_dim, spec.value_dim, delta, to, head_out);
          if (step.query) finish(first + i, head, head_out);
        });
  }
  pool_.barrier();
}

void CpuProgram::execute(const DeltaRuleOp& op, Worker w) {
  const StateSpec& spec = bound_.state_cache(op.state).spec;
  const std::int64_t keys = std::int64_t{op.key_heads} * spec.key_dim;
  const float query_scale = 1.0F / std::sqrt(static_cast<float>(spec.key_dim));
  fold_heads(
      op.state, op.out, true, w,
      [&](int t, int head, const StateStep& step) {
        const float* qkv = bound_.buffer(op.qkv) + t * bound_.width(op.qkv);
        const float* q = qkv + std::int64_t{head / op.group % op.key_heads} * spec.key_dim;
        unit(q, spec.key_dim, op.eps, query_scale, step.query);
        unit(q + keys, spec.key_dim, op.eps, 1.0F, step.key);
        std::copy_n(qkv + 2 * keys + std::int64_t{head} * spec.value_dim, spec.value_dim,
                    step.value);
        const std::int64_t at = std::int64_t{t} * spec.heads + head;
        const float rate = softplus(bound_.buffer(op.decay)[at] + bound_.vector(op.dt_bias)[head]);
        *step.decay = std::exp(-std::exp(bound_.vector(op.a_log)[head]) * rate);
        *step.strength = sigmoid(bound_.buffer(op.beta)[at]);
      },
      [](int, int, float*) {});
}

void CpuProgram::execute(const SsmOp& op, Worker w) {
  const StateSpec& spec = bound_.state_cache(op.state).spec;
  const std::int64_t values = std::int64_t{spec.heads} * spec.value_dim;
  const auto x_of = [&](int t, int head) {
    return bound_.buffer(op.xbc) + t * bound_.width(op.xbc) + std::int64_t{head} * spec.value_dim;
  };
  fold_heads(
      op.state, op.out, false, w,
      [&](int t, int head, const StateStep& step) {
        const float* b = bound_.buffer(op.xbc) + t * bound_.width(op.xbc) + values +
                         std::int64_t{head / (spec.heads / op.groups)} * spec.key_dim;
        std::copy_n(b, spec.key_dim, step.key);
        std::copy_n(b + std::int64_t{op.groups} * spec.key_dim, spec.key_dim, step.query);
        std::copy_n(x_of(t, head), spec.value_dim, step.value);
        const float dt =
            std::clamp(softplus(bound_.buffer(op.dt)[std::int64_t{t} * spec.heads + head] +
                                bound_.vector(op.dt_bias)[head]),
                       op.dt_min, op.dt_max);
        *step.decay = std::exp(-std::exp(bound_.vector(op.a_log)[head]) * dt);
        *step.strength = dt;
      },
      [&](int t, int head, float* out) {
        const float* x = x_of(t, head);
        const float skip = bound_.vector(op.skip)[head];
        for (int j = 0; j < spec.value_dim; ++j) out[j] += skip * x[j];
      });
}

void CpuProgram::execute(const ShortConvOp& op, Worker w) {
  const StepState& s = bound_.state();
  const StateView& view = bound_.state_cache(op.state);
  const int width = view.spec.conv_width;
  const int taps = view.spec.conv_taps;
  const float* in = bound_.buffer(op.in);
  // Each worker has its own channels, so that it reads a row's stored inputs before it stores new
  // ones.
  const Range own = share(width, w);
  const int count = own.end - own.begin;
  const float* weight = bound_.vector(op.weight) + own.begin;
  const float* bias = bound_.vector(op.bias);
  std::array<const float*, kMaxConvTaps> x;
  for (int lane = 0; lane < s.counts->lanes && count > 0; ++lane) {
    const int row = s.row_of[lane];
    const int begin = s.first_token[lane];
    const int end = s.first_token[lane + 1];
    for (int t = begin; t < end; ++t) {
      float* out = bound_.buffer(op.out) + std::int64_t{t} * width + own.begin;
      const std::int32_t position = s.position[t];
      if (position < 0) {
        std::fill_n(out, count, 0.0F);
        continue;
      }
      int source = t;  // the token whose input is read, while it is one of this step
      for (int j = 0; j < taps; ++j) {
        while (source >= begin && s.position[source] < 0) --source;
        const float* input = nullptr;
        if (source >= begin) {
          input = in + std::int64_t{source} * width;
        } else if (position >= j) {
          input = view.conv_at(row, position - j);
        }
        x[static_cast<std::size_t>(taps - 1 - j)] = input ? input + own.begin : nullptr;
        --source;
      }
      states_.conv(x.data(), weight, width, taps, bias ? bias + own.begin : nullptr,
                   op.activation.has_value(), count, out);
    }
    for (int t = begin; t < end; ++t) {
      if (s.position[t] < 0) continue;
      std::copy_n(in + std::int64_t{t} * width + own.begin, count,
                  view.conv_at(row, s.position[t]) + own.begin);
    }
  }
  pool_.barrier();
}

void CpuProgram::execute(const GateOp& op, Worker w) {
  const std::int64_t width = bound_.width(op.in);
  const Range range = share(tokens(), w);
  const std::int64_t at = range.begin * width;
  f_.gate_sigmoid(bound_.buffer(op.gate) + at, bound_.buffer(op.in) + at,
                  static_cast<int>((range.end - range.begin) * width), bound_.buffer(op.out) + at);
  pool_.barrier();
}

void CpuProgram::execute(const GatedNormOp& op, Worker w) {
  const std::int64_t width = bound_.width(op.in);
  const int groups = static_cast<int>(width / op.group);
  const bool own_weights = bound_.weight(op.norm.weight).decl->cols == width;
  const Range range = share(tokens() * groups, w);
  for (int item = range.begin; item < range.end; ++item) {
    const std::int64_t at = std::int64_t{item} * op.group;
    const float* weight =
        bound_.vector(op.norm.weight) + (own_weights ? item % groups * op.group : 0);
    const float* in = bound_.buffer(op.in) + at;
    const float* gate = bound_.buffer(op.gate) + at;
    float* out = bound_.buffer(op.out) + at;
    if (op.gate_first) {
      f_.gate(gate, in, op.group, out);
      f_.rms_norm(out, weight, op.norm.eps, op.group, out);
    } else {
      f_.rms_norm(in, weight, op.norm.eps, op.group, out);
      f_.gate(gate, out, op.group, out);
    }
  }
  pool_.barrier();
}

}  // namespace pianola::cpu
