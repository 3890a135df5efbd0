#include <algorithm>
#include <cmath>
#include <limits>

#include "backends/reference/ops.h"

namespace pianola::reference {
namespace {

// y = W x + bias for the matrix of one expert, in f32.
void expert_matvec(const BoundWeight& stack, std::int64_t expert, const float* biases,
                   const float* x, float* y) {
  const std::int64_t rows = stack.decl->rows;
  const std::int64_t cols = stack.decl->cols;
  const auto* matrix = reinterpret_cast<const float*>(stack.matrix(expert));
  for (std::int64_t n = 0; n < rows; ++n) {
    double sum = dot(matrix + n * cols, x, cols);
    if (biases) sum += biases[expert * rows + n];
    y[n] = static_cast<float>(sum);
  }
}

}  // namespace

void choose_experts(std::span<const float> scores, int top_k, RouteScore score, float* out) {
  const auto key = [&scores](std::size_t e) {
    return std::isnan(scores[e]) ? -std::numeric_limits<float>::infinity() : scores[e];
  };
  float* weights = out + top_k;
  std::size_t last = 0;
  for (int rank = 0; rank < top_k; ++rank) {
    // The best of those that come after the last one: smaller, or as large and behind it.
    std::size_t best = scores.size();
    for (std::size_t e = 0; e < scores.size(); ++e) {
      const bool after = rank == 0 || key(e) < key(last) || (key(e) == key(last) && e > last);
      if (after && (best == scores.size() || key(e) > key(best))) best = e;
    }
    last = best;
    out[rank] = static_cast<float>(best);
    weights[rank] = scores[best];
  }
  if (score == RouteScore::kSigmoid) {
    for (int rank = 0; rank < top_k; ++rank) {
      weights[rank] =
          static_cast<float>(1.0 / (1.0 + std::exp(-static_cast<double>(weights[rank]))));
    }
    return;
  }
  const std::span<const float> summed =
      score == RouteScore::kSoftmax
          ? scores
          : std::span<const float>(weights, static_cast<std::size_t>(top_k));
  const double max = weights[0];
  double total = 0;
  for (const float s : summed) total += std::exp(s - max);
  for (int rank = 0; rank < top_k; ++rank) {
    weights[rank] = static_cast<float>(std::exp(weights[rank] - max) / total);
  }
}

void run(const RouteOp& op, const BoundPlan& bound) {
  const StepState& s = bound.state();
  const BoundWeight& router = bound.weight(op.weight);
  const float* bias = bound.vector(op.bias);
  const std::int64_t width = bound.width(op.in);
  const std::int64_t experts = router.decl->rows;
  auto* normed = reinterpret_cast<float*>(bound.scratch());
  float* scores = normed + width;
  for (std::int32_t t = 0; t < s.counts->tokens; ++t) {
    float* out = bound.buffer(op.out) + t * bound.width(op.out);
    if (s.position[t] < 0) {
      std::fill_n(out, op.top_k, -1.0F);
      std::fill_n(out + op.top_k, op.top_k, 0.0F);
      continue;
    }
    const float* x = bound.buffer(op.in) + t * width;
    if (op.norm) {
      rms_norm({x, static_cast<std::size_t>(width)}, bound.vector(op.norm->weight), op.norm->eps,
               normed);
      x = normed;
    }
    for (std::int64_t e = 0; e < experts; ++e) {
      scores[e] =
          static_cast<float>(dot(router.f32() + e * width, x, width) + (bias ? bias[e] : 0.0F));
    }
    choose_experts({scores, static_cast<std::size_t>(experts)}, op.top_k, op.score, out);
  }
}

void run(const ExpertsOp& op, const BoundPlan& bound) {
  const std::int64_t in = bound.width(op.in);
  const std::int64_t out = bound.width(op.out);
  const std::int64_t top_k = bound.width(op.routing) / 2;
  const std::int64_t ff = bound.weight(op.gate).decl->rows;
  auto* sums = reinterpret_cast<double*>(bound.scratch());
  auto* normed = reinterpret_cast<float*>(sums + out);
  float* gate = normed + in;
  float* up = gate + ff;
  for (std::int32_t t = 0; t < bound.state().counts->tokens; ++t) {
    const float* chosen = bound.buffer(op.routing) + t * 2 * top_k;
    rms_norm({bound.buffer(op.in) + t * in, static_cast<std::size_t>(in)},
             bound.vector(op.norm.weight), op.norm.eps, normed);
    std::fill_n(sums, out, 0.0);
    for (std::int64_t rank = 0; rank < top_k; ++rank) {
      const auto expert = static_cast<std::int64_t>(chosen[rank]);
      if (expert < 0) continue;
      expert_matvec(bound.weight(op.gate), expert, bound.vector(op.gate_bias), normed, gate);
      expert_matvec(bound.weight(op.up), expert, bound.vector(op.up_bias), normed, up);
      for (std::int64_t i = 0; i < ff; ++i) gate[i] = gated(op.activation, gate[i], up[i]);
      const BoundWeight& down = bound.weight(op.down);
      const auto* matrix = reinterpret_cast<const float*>(down.matrix(expert));
      const float* bias = bound.vector(op.down_bias);
      for (std::int64_t n = 0; n < out; ++n) {
        const double y = dot(matrix + n * ff, gate, ff) + (bias ? bias[expert * out + n] : 0.0F);
        sums[n] += chosen[top_k + rank] * y;
      }
    }
    const float* residual = op.residual.valid() ? bound.buffer(op.residual) + t * out : nullptr;
    float* y = bound.buffer(op.out) + t * out;
    for (std::int64_t n = 0; n < out; ++n) {
      y[n] = static_cast<float>(sums[n] + (residual ? residual[n] : 0.0F));
    }
  }
}

}  // namespace pianola::reference
