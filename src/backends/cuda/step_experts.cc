#include "backends/cuda/step_experts.h"

#include "backends/cuda/kernels/experts.h"
#include "backends/cuda/kernels/packed_weight.h"
#include "backends/cuda/kernels/route.h"
#include "backends/cuda/step_kernels.h"

namespace pianola::cuda {
namespace {

const WeightDecl& decl_of(const PlanTables& tables, WeightId id) {
  return tables.weights[static_cast<std::size_t>(id.index)];
}

ExpertStack stack_of(const BoundWeight& weight, const float* bias) {
  return {.weight = packed_weight(weight),
          .stride = static_cast<std::int64_t>(weight.matrix(1) - weight.data),
          .bias = bias};
}

}  // namespace

bool is_shared(const WeightDecl& gate, const WeightDecl& up) {
  return gate.experts == 1 && same_form(gate.dtype, up.dtype);
}

std::size_t experts_bytes(const ExpertsOp& op, const Plan& plan, const PlanTables& tables) {
  const WeightDecl& gate = decl_of(tables, op.gate);
  const WeightDecl& up = decl_of(tables, op.up);
  const WeightDecl& down = decl_of(tables, op.down);
  if (is_shared(gate, up)) {
    return static_cast<std::size_t>(plan.shape.tokens * down.rows) * sizeof(float);
  }
  return experts_scratch_bytes({.tokens = plan.shape.tokens,
                                .experts = static_cast<int>(gate.experts),
                                .top_k = static_cast<int>(plan.buffer(op.routing).width / 2),
                                .width = static_cast<int>(gate.cols),
                                .ff = static_cast<int>(gate.rows),
                                .out_width = static_cast<int>(down.rows),
                                .mixed = !same_form(gate.dtype, up.dtype)});
}

std::size_t route_bytes(const RouteOp& op, const Plan& plan, const PlanTables& tables) {
  return static_cast<std::size_t>(plan.shape.tokens * decl_of(tables, op.weight).rows) *
         sizeof(float);
}

void StepKernels::run(const RouteOp& op, std::size_t, const Launch& l) const {
  const BoundWeight& router = bound_.weight(op.weight);
  RouteArgs args;
  args.in = bound_.buffer(op.in);
  if (op.norm) {
    args.norm = bound_.vector(op.norm->weight);
    args.eps = op.norm->eps;
  }
  args.router = router.f32();
  args.bias = bound_.vector(op.bias);
  args.width = static_cast<int>(bound_.width(op.in));
  args.experts = static_cast<int>(router.decl->rows);
  args.top_k = op.top_k;
  args.score = op.score;
  args.out = bound_.buffer(op.out);
  args.scores = scratch<float>(layout_.experts);
  args.state = bound_.state();
  args.tokens = tokens();
  route(args, l, {.bias = bound_.vector(op.choice_bias), .groups = op.groups, .scale = op.scale});
}

void StepKernels::run(const ExpertsOp& op, std::size_t, const Launch& l) const {
  if (is_shared(*bound_.weight(op.gate).decl, *bound_.weight(op.up).decl)) {
    return run_shared(op, l);
  }
  ExpertsArgs args;
  args.gate = stack_of(bound_.weight(op.gate), bound_.vector(op.gate_bias));
  args.up = stack_of(bound_.weight(op.up), bound_.vector(op.up_bias));
  args.down = stack_of(bound_.weight(op.down), bound_.vector(op.down_bias));
  args.activation = op.activation;
  args.experts = static_cast<int>(bound_.weight(op.gate).decl->experts);
  args.top_k = static_cast<int>(bound_.width(op.routing) / 2);
  args.in = bound_.buffer(op.in);
  args.norm = bound_.vector(op.norm.weight);
  args.eps = op.norm.eps;
  args.routing = bound_.buffer(op.routing);
  args.residual = op.residual.valid() ? bound_.buffer(op.residual) : nullptr;
  args.out = bound_.buffer(op.out);
  args.count = token_count();
  args.scratch = scratch<std::byte>(layout_.experts);
  args.tokens = tokens();
  run_experts(args, l);
}

void StepKernels::run_shared(const ExpertsOp& op, const Launch& l) const {
  const GatedMlpOp mlp = {.in = op.in,
                          .norm = op.norm,
                          .gate = op.gate,
                          .up = op.up,
                          .down = op.down,
                          .gate_bias = op.gate_bias,
                          .up_bias = op.up_bias,
                          .down_bias = op.down_bias,
                          .activation = op.activation,
                          .residual = {},
                          .out = op.out};
  auto* parts = scratch<float>(layout_.experts);
  Launch next = l;
  multiply(gated_product(mlp), tokens(), next);
  next.dependent = l.dependent_inside;
  LinearArgs down = down_product(mlp);
  down.part[0].out = parts;
  multiply(down, tokens(), next);
  sum_experts({.parts = parts,
               .routing = bound_.buffer(op.routing),
               .residual = op.residual.valid() ? bound_.buffer(op.residual) : nullptr,
               .out = bound_.buffer(op.out),
               .count = token_count(),
               .width = down.part[0].ld,
               .top_k = 1,
               .tokens = tokens()},
              next);
}

}  // namespace pianola::cuda
