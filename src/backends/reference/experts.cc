#include <algorithm>
#include <array>
#include <bitset>
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

// The best groups, ties to the lower number.
template <typename Key>
std::bitset<kMaxRouteGroups> choose_groups(const RouteGroups& groups, std::size_t group_size,
                                           const Key& key) {
  std::array<double, kMaxRouteGroups> sums{};
  const auto count = static_cast<std::size_t>(groups.count);
  for (std::size_t g = 0; g < count; ++g) {
    std::size_t last = 0;
    for (int rank = 0; rank < groups.best; ++rank) {
      std::size_t best = group_size;
      for (std::size_t i = 0; i < group_size; ++i) {
        const float k = key(g * group_size + i);
        const float before = key(g * group_size + last);
        const bool after = rank == 0 || k < before || (k == before && i > last);
        if (after && (best == group_size || k > key(g * group_size + best))) best = i;
      }
      last = best;
      sums[g] += key(g * group_size + best);
    }
  }
  std::bitset<kMaxRouteGroups> chosen;
  for (std::int32_t rank = 0; rank < groups.chosen; ++rank) {
    std::size_t best = count;
    for (std::size_t g = 0; g < count; ++g) {
      if (!chosen[g] && (best == count || sums[g] > sums[best])) best = g;
    }
    chosen.set(best);
  }
  return chosen;
}

}  // namespace

void choose_experts(const RouteOp& op, std::span<const float> scores, const float* choice_bias,
                    float* out) {
  const auto sigmoid = [](float s) {
    return static_cast<float>(1.0 / (1.0 + std::exp(-static_cast<double>(s))));
  };
  constexpr float kLeast = -std::numeric_limits<float>::infinity();
  const auto key = [&](std::size_t e) {
    const float k = choice_bias ? sigmoid(scores[e]) + choice_bias[e] : scores[e];
    return std::isnan(k) ? kLeast : k;
  };
  std::bitset<kMaxRouteGroups> groups;
  groups.set();
  const std::size_t group_size = scores.size() / static_cast<std::size_t>(op.groups.count);
  if (op.groups.count > 1) {
    groups = choose_groups(op.groups, group_size, key);
  }
  // The best of those that come after `last`: smaller, or as large and behind it.
  const auto next_best = [&](int rank, std::size_t last) {
    std::size_t best = scores.size();
    for (std::size_t e = 0; e < scores.size(); ++e) {
      if (!groups[e / group_size]) continue;
      const bool after = rank == 0 || key(e) < key(last) || (key(e) == key(last) && e > last);
      if (after && (best == scores.size() || key(e) > key(best))) best = e;
    }
    return best;
  };
  float* weights = out + op.top_k;
  std::size_t last = 0;
  for (int rank = 0; rank < op.top_k; ++rank) {
    last = next_best(rank, last);
    out[rank] = static_cast<float>(last);
    weights[rank] = scores[last];
  }
  const std::span<float> chosen(weights, static_cast<std::size_t>(op.top_k));
  if (op.score == RouteScore::kSigmoid || op.score == RouteScore::kSigmoidOfChosen) {
    double total = 1e-20;  // as transformers has it: no division by zero
    for (float& w : chosen) {
      w = sigmoid(w);
      total += w;
    }
    if (op.score == RouteScore::kSigmoid) total = 1;
    for (float& w : chosen) w = static_cast<float>(w / total * op.scale);
    return;
  }
  const std::span<const float> summed =
      op.score == RouteScore::kSoftmax ? scores : std::span<const float>(chosen);
  const double max = *std::ranges::max_element(summed);
  double total = 0;
  for (const float s : summed) total += std::exp(s - max);
  for (float& w : chosen) w = static_cast<float>(std::exp(w - max) / total * op.scale);
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
    choose_experts(op, {scores, static_cast<std::size_t>(experts)}, bound.vector(op.choice_bias),
                   out);
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
