// ExpertsOp on the CPU: the tokens of a step stand together by expert, so that each expert's
// weights are read once, and each token's results are added up in the order of its ranks.
#include <algorithm>

#include "backends/cpu/cpu_program.h"

namespace pianola::cpu {

void CpuProgram::execute(const ExpertsOp& op, Worker w) {
  const int experts = static_cast<int>(bound_.weight(op.gate).decl->experts);
  const int top_k = static_cast<int>(bound_.width(op.routing) / 2);
  const ExpertGroups groups(
      scratch<std::byte>(layout_.groups + static_cast<std::size_t>(w.index) * layout_.group_bytes),
      bound_.buffer(op.routing), tokens(), top_k, experts);
  prepare_expert_inputs(op, groups, w);
  pool_.barrier();
  gate_experts(op, groups, w);
  pool_.barrier();
  prepare_expert_hidden(op, groups, w);
  pool_.barrier();
  add_experts(op, groups, w);
  pool_.barrier();
}

std::byte* CpuProgram::expert_activations(WeightId reader, const ExpertGroup& group) const {
  const BoundWeight& weight = bound_.weight(reader);
  return scratch<std::byte>(layout_.expert_activations +
                            activation_bytes(activation_kind(weight.layout.dtype, isa_),
                                             group.first_slot,
                                             static_cast<int>(weight.decl->cols)));
}

// A worker takes whole tokens: it norms one once and hands it to each of its experts.
void CpuProgram::prepare_expert_inputs(const ExpertsOp& op, const ExpertGroups& groups, Worker w) {
  const int cols = static_cast<int>(bound_.width(op.in));
  const int top_k = static_cast<int>(bound_.width(op.routing) / 2);
  const ActivationKind kind = activation_kind(bound_.weight(op.gate).layout.dtype, isa_);
  float* normed = scratch<float>(layout_.normed) + std::int64_t{w.index} * kOwnTokens * widest_;
  const Range range = share(tokens(), w);
  for (int t = range.begin; t < range.end; ++t) {
    const float* experts = bound_.buffer(op.routing) + std::int64_t{t} * 2 * top_k;
    bool is_normed = false;
    for (int rank = 0; rank < top_k; ++rank) {
      const int place = groups.place(t, rank);
      if (place < 0) continue;
      if (!is_normed) {
        f_.rms_norm(bound_.buffer(op.in) + std::int64_t{t} * cols, bound_.vector(op.norm.weight),
                    op.norm.eps, cols, normed);
        is_normed = true;
      }
      const ExpertGroup& group = groups.group_of(static_cast<int>(experts[rank]));
      const int slot = place - group.first;
      prepare_activations(kind, isa_, normed, 0, group.count, cols,
                          expert_activations(op.gate, group), slot, slot + 1);
    }
  }
}

void CpuProgram::gate_experts(const ExpertsOp& op, const ExpertGroups& groups, Worker w) {
  const int ff = static_cast<int>(bound_.weight(op.gate).decl->rows);
  const Gate activate = gate_of(op.activation);
  float* gates = scratch<float>(layout_.gate);
  float* ups = scratch<float>(layout_.up);
  groups.for_share((ff + kPanelRows - 1) / kPanelRows, w.index, w.count,
                   [&](const ExpertGroup& group, int begin, int end) {
                     const Range rows{begin * kPanelRows, std::min(end * kPanelRows, ff)};
                     multiply_group(w, op.gate, op.gate_bias, group, rows, gates);
                     multiply_group(w, op.up, op.up_bias, group, rows, ups);
                     for (int route = group.first; route < group.first + group.count; ++route) {
                       const std::int64_t at = std::int64_t{route} * ff + rows.begin;
                       activate(gates + at, ups + at, rows.end - rows.begin, gates + at);
                     }
                   });
}

void CpuProgram::prepare_expert_hidden(const ExpertsOp& op, const ExpertGroups& groups, Worker w) {
  const int ff = static_cast<int>(bound_.weight(op.down).decl->cols);
  const ActivationKind kind = activation_kind(bound_.weight(op.down).layout.dtype, isa_);
  const float* hidden = scratch<float>(layout_.gate);
  const Range range = share(groups.routes(), w);
  for (const ExpertGroup& group : groups.all()) {
    const int begin = std::clamp(range.begin - group.first, 0, group.count);
    const int end = std::clamp(range.end - group.first, 0, group.count);
    if (begin == end) continue;
    prepare_activations(kind, isa_, hidden + std::int64_t{group.first} * ff, ff, group.count, ff,
                        expert_activations(op.down, group), begin, end);
  }
}

// A worker has the same columns of every route, so it can add them up without waiting.
void CpuProgram::add_experts(const ExpertsOp& op, const ExpertGroups& groups, Worker w) {
  const int width = static_cast<int>(bound_.width(op.out));
  const int top_k = static_cast<int>(bound_.width(op.routing) / 2);
  const RowRange own = worker_rows(width, w.index, w.count);
  const int n = own.end - own.begin;
  if (n <= 0) return;
  float* parts = scratch<float>(layout_.expert_parts);
  for (const ExpertGroup& group : groups.all()) {
    multiply_group(w, op.down, op.down_bias, group, {own.begin, own.end}, parts);
  }
  for (int t = 0; t < tokens(); ++t) {
    const float* weights = bound_.buffer(op.routing) + std::int64_t{t} * 2 * top_k + top_k;
    const std::int64_t at = std::int64_t{t} * width + own.begin;
    float* out = bound_.buffer(op.out) + at;
    if (!op.residual.valid()) {
      std::fill_n(out, n, 0.0F);
    } else if (op.residual != op.out) {
      std::copy_n(bound_.buffer(op.residual) + at, n, out);
    }
    float* sum = nullptr;
    for (int rank = 0; rank < top_k; ++rank) {
      const int place = groups.place(t, rank);
      if (place < 0) continue;
      float* part = parts + std::int64_t{place} * width + own.begin;
      if (sum) {
        f_.add_scaled(part, weights[rank], n, sum);
      } else {
        sum = part;
        f_.scale(part, weights[rank], n, sum);
      }
    }
    if (sum) f_.add(sum, n, out);
  }
}

void CpuProgram::multiply_group(Worker w, WeightId stack, WeightId bias, const ExpertGroup& group,
                                Range rows, float* y) {
  const PackedWeight matrix = packed(stack, group.expert);
  y += std::int64_t{group.first} * matrix.rows;
  linear(
      matrix, expert_activations(stack, group), group.count, rows.begin, rows.end, y, matrix.rows,
      scratch<std::byte>(layout_.linear + static_cast<std::size_t>(w.index) * layout_.linear_bytes),
      isa_);
  const float* biases = bound_.vector(bias);
  if (!biases) return;
  for (int i = 0; i < group.count; ++i) {
    f_.add(biases + std::int64_t{group.expert} * matrix.rows + rows.begin, rows.end - rows.begin,
           y + std::int64_t{i} * matrix.rows + rows.begin);
  }
}

}  // namespace pianola::cpu
