// Which kernels do a mixture of experts, and what scratch they need.
#pragma once

#include "backends/backend.h"

namespace pianola::cuda {

// A shared expert, which every token gets, is a gated MLP whose result a token takes a part of: it
// is computed as one.
bool is_shared(const WeightDecl& gate, const WeightDecl& up);
std::size_t experts_bytes(const ExpertsOp& op, const Plan& plan, const PlanTables& tables);
std::size_t route_bytes(const RouteOp& op, const Plan& plan, const PlanTables& tables);

}  // namespace pianola::cuda
