#include <algorithm>
#include <cmath>

#include "backends/reference/ops.h"
#include "backends/state_walk.h"
#include "base/check.h"
#include "tensor/quant_format.h"

namespace pianola::reference {
namespace {

// y[n] = W x (+ bias) (+ residual): W is [rows, cols] in f32, dequantised at load.
void matvec(const BoundWeight& weight, const float* bias, const float* x, const float* residual,
            float* y) {
  const std::int64_t cols = weight.decl->cols;
  for (std::int64_t n = 0; n < weight.decl->rows; ++n) {
    double sum = dot(weight.f32() + n * cols, x, cols);
    if (bias) sum += bias[n];
    if (residual) sum += residual[n];
    y[n] = static_cast<float>(sum);
  }
}

// Normalises the token that logit row r reads, into the scratch.
std::span<const float> normed_logit_row(const BoundPlan& bound, BufferId in, const RmsNorm& norm,
                                        std::int64_t r) {
  const std::int64_t width = bound.width(in);
  auto* out = reinterpret_cast<float*>(bound.scratch());
  rms_norm(
      {bound.buffer(in) + bound.state().logit_token[r] * width, static_cast<std::size_t>(width)},
      bound.vector(norm.weight), norm.eps, out);
  return {out, static_cast<std::size_t>(width)};
}

}  // namespace

float gated(Activation activation, float gate, float up) {
  const double g = gate;
  switch (activation) {
    case Activation::kSilu:
      return static_cast<float>(g / (1.0 + std::exp(-g)) * up);
    case Activation::kGeluTanh: {
      const double u = std::sqrt(2.0 / M_PI) * (g + 0.044715 * g * g * g);
      return static_cast<float>(0.5 * g * (1.0 + std::tanh(u)) * up);
    }
    case Activation::kRelu:
      return g < 0 ? 0 * up : gate * up;  // a NaN passes
    case Activation::kClampedSwish: {
      // Comparisons that let a NaN through.
      constexpr double kLimit = 7.0;
      const double clamped = g > kLimit ? kLimit : g;
      const double u = up > kLimit ? kLimit : up < -kLimit ? -kLimit : up;
      return static_cast<float>(clamped / (1.0 + std::exp(-1.702 * clamped)) * (u + 1.0));
    }
  }
  PIANOLA_CHECK(false, "activation {}", static_cast<int>(activation));
}

double dot(const float* a, const float* b, std::int64_t n) {
  double sums[4] = {};
  std::int64_t i = 0;
  for (; i + 4 <= n; i += 4) {
    for (int j = 0; j < 4; ++j) sums[j] += static_cast<double>(a[i + j]) * b[i + j];
  }
  for (; i < n; ++i) sums[0] += static_cast<double>(a[i]) * b[i];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

void rms_norm(std::span<const float> x, const float* weight, float eps, float* out) {
  const auto n = static_cast<std::int64_t>(x.size());
  const double mean = dot(x.data(), x.data(), n) / static_cast<double>(n);
  const double scale = 1.0 / std::sqrt(mean + eps);
  for (std::int64_t i = 0; i < n; ++i) {
    out[i] = static_cast<float>(x[static_cast<std::size_t>(i)] * scale * weight[i]);
  }
}

void run(const EmbedOp& op, const BoundPlan& bound) {
  const StepState& s = bound.state();
  const BoundWeight& table = bound.weight(op.table);
  const auto width = static_cast<std::size_t>(bound.width(op.out));
  const std::size_t stride = row_bytes(table.layout.dtype, width);
  for (std::int32_t t = 0; t < s.counts->tokens; ++t) {
    float* out = bound.buffer(op.out) + static_cast<std::size_t>(t) * width;
    if (s.position[t] < 0) {
      std::fill_n(out, width, 0.0F);
    } else {
      dequantize_row(table.layout.dtype, table.data + static_cast<std::size_t>(s.token[t]) * stride,
                     out, width);
      for (std::size_t i = 0; i < width; ++i) out[i] *= op.scale;
    }
  }
}

void run(const NormOp& op, const BoundPlan& bound) {
  const std::int64_t width = bound.width(op.in);
  for (std::int32_t t = 0; t < bound.state().counts->tokens; ++t) {
    float* out = bound.buffer(op.out) + t * width;
    const float* residual = op.residual.valid() ? bound.buffer(op.residual) + t * width : nullptr;
    auto* normed = residual ? reinterpret_cast<float*>(bound.scratch()) : out;
    rms_norm({bound.buffer(op.in) + t * width, static_cast<std::size_t>(width)},
             bound.vector(op.norm.weight), op.norm.eps, normed);
    for (std::int64_t i = 0; residual && i < width; ++i) out[i] = residual[i] + normed[i];
  }
}

void run(const LinearOp& op, const BoundPlan& bound) {
  const std::int64_t in = bound.width(op.in);
  const std::int64_t out = bound.width(op.out);
  auto* normed = reinterpret_cast<float*>(bound.scratch());
  for (std::int32_t t = 0; t < bound.state().counts->tokens; ++t) {
    const float* x = bound.buffer(op.in) + t * in;
    if (op.norm) {
      rms_norm({x, static_cast<std::size_t>(in)}, bound.vector(op.norm->weight), op.norm->eps,
               normed);
      x = normed;
    }
    matvec(bound.weight(op.weight), bound.vector(op.bias), x,
           op.residual.valid() ? bound.buffer(op.residual) + t * out : nullptr,
           bound.buffer(op.out) + t * out);
  }
}

void run(const HeadLinearOp& op, const BoundPlan& bound) {
  const BoundWeight& weight = bound.weight(op.weight);
  const std::int64_t rows = weight.decl->rows;
  const std::int64_t cols = weight.decl->cols;
  for (std::int32_t t = 0; t < bound.state().counts->tokens; ++t) {
    const float* x = bound.buffer(op.in) + t * bound.width(op.in);
    float* y = bound.buffer(op.out) + t * bound.width(op.out);
    for (std::int64_t h = 0; h < weight.decl->experts; ++h, x += cols, y += rows) {
      const auto* matrix = reinterpret_cast<const float*>(weight.matrix(h));
      for (std::int64_t n = 0; n < rows; ++n) {
        y[n] = static_cast<float>(dot(matrix + n * cols, x, cols));
      }
    }
  }
}

void run(const GatedMlpOp& op, const BoundPlan& bound) {
  const std::int64_t in = bound.width(op.in);
  const std::int64_t out = bound.width(op.out);
  const std::int64_t ff = bound.weight(op.up).decl->rows;
  auto* normed = reinterpret_cast<float*>(bound.scratch());
  float* gate = normed + in;
  float* up = gate + ff;
  for (std::int32_t t = 0; t < bound.state().counts->tokens; ++t) {
    rms_norm({bound.buffer(op.in) + t * in, static_cast<std::size_t>(in)},
             bound.vector(op.norm.weight), op.norm.eps, normed);
    matvec(bound.weight(op.up), bound.vector(op.up_bias), normed, nullptr, up);
    if (op.gate.valid()) {
      matvec(bound.weight(op.gate), bound.vector(op.gate_bias), normed, nullptr, gate);
      for (std::int64_t i = 0; i < ff; ++i) gate[i] = gated(op.activation, gate[i], up[i]);
    } else {
      for (std::int64_t i = 0; i < ff; ++i) gate[i] = gated(op.activation, up[i], 1.0F);
    }
    matvec(bound.weight(op.down), bound.vector(op.down_bias), gate,
           op.residual.valid() ? bound.buffer(op.residual) + t * out : nullptr,
           bound.buffer(op.out) + t * out);
  }
}

void run(const LmHeadOp& op, const BoundPlan& bound) {
  const std::int64_t vocab = bound.width(op.logits);
  for (std::int32_t r = 0; r < bound.state().counts->logit_rows; ++r) {
    const auto x = normed_logit_row(bound, op.in, op.norm, r);
    matvec(bound.weight(op.weight), nullptr, x.data(), nullptr,
           bound.buffer(op.logits) + r * vocab);
  }
}

void run(const ScoreOp& op, const BoundPlan& bound) {
  const StepState& s = bound.state();
  const BoundWeight& head = bound.weight(op.weight);
  for (std::int32_t r = 0; r < s.counts->logit_rows; ++r) {
    const auto x = normed_logit_row(bound, op.in, op.norm, r);
    auto* logits = reinterpret_cast<float*>(bound.scratch()) + x.size();
    matvec(head, nullptr, x.data(), nullptr, logits);
    s.logprob[r] = static_cast<float>(
        log_probability({logits, static_cast<std::size_t>(head.decl->rows)}, s.target[r]));
  }
}

std::size_t scratch_bytes(const Op& op, const Plan& plan, const PlanTables& tables) {
  const auto weight = [&](WeightId id) -> const WeightDecl& {
    return tables.weights[static_cast<std::size_t>(id.index)];
  };
  const auto state_scratch = [&](StateId id) {
    const StateSpec& spec = tables.caches.states[static_cast<std::size_t>(id.index)];
    return static_cast<std::size_t>(spec.value_dim) * sizeof(double) +
           StateStep::scratch_floats(spec) * sizeof(float);
  };
  std::int64_t floats = 0;
  std::size_t bytes = 0;
  if (const auto* qkv = std::get_if<QkvOp>(&op)) {
    floats = plan.buffer(qkv->in).width + weight(qkv->k).rows + weight(qkv->v).rows;
  } else if (const auto* query = std::get_if<QueryOp>(&op)) {
    floats = plan.buffer(query->in).width;
  } else if (const auto* latent = std::get_if<LatentQkvOp>(&op)) {
    floats = plan.buffer(latent->kv).width;
  } else if (const auto* attention = std::get_if<AttentionOp>(&op)) {
    const AttentionSpec& cache =
        tables.caches.attention[static_cast<std::size_t>(attention->cache.index)];
    bytes = static_cast<std::size_t>(cache.value_dim) * sizeof(double);
    floats = tables.cache_shape.positions(cache) + std::max(cache.key_dim, cache.value_dim);
  } else if (const auto* norm = std::get_if<NormOp>(&op)) {
    floats = norm->residual.valid() ? plan.buffer(norm->in).width : 0;
  } else if (const auto* linear = std::get_if<LinearOp>(&op)) {
    floats = linear->norm ? plan.buffer(linear->in).width : 0;
  } else if (const auto* delta = std::get_if<DeltaRuleOp>(&op)) {
    bytes = state_scratch(delta->state);
  } else if (const auto* ssm = std::get_if<SsmOp>(&op)) {
    bytes = state_scratch(ssm->state);
  } else if (const auto* gated = std::get_if<GatedNormOp>(&op)) {
    floats = gated->group;
  } else if (const auto* mlp = std::get_if<GatedMlpOp>(&op)) {
    floats = plan.buffer(mlp->in).width + 2 * weight(mlp->up).rows;
  } else if (const auto* route = std::get_if<RouteOp>(&op)) {
    floats = plan.buffer(route->in).width + weight(route->weight).rows;
  } else if (const auto* experts = std::get_if<ExpertsOp>(&op)) {
    bytes = static_cast<std::size_t>(plan.buffer(experts->out).width) * sizeof(double);
    floats = plan.buffer(experts->in).width + 2 * weight(experts->gate).rows;
  } else if (const auto* head = std::get_if<LmHeadOp>(&op)) {
    floats = plan.buffer(head->in).width;
  } else if (const auto* score = std::get_if<ScoreOp>(&op)) {
    floats = plan.buffer(score->in).width + weight(score->weight).rows;
  } else if (const auto* sample = std::get_if<SampleOp>(&op)) {
    bytes = sample_scratch_bytes(plan.buffer(sample->logits).width);
  }
  return bytes + static_cast<std::size_t>(floats) * sizeof(float);
}

}  // namespace pianola::reference
