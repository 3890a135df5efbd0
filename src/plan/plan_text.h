// A Plan as text: one line an op, the same for every backend. For review (golden files) and for
// `pianola inspect`; not an oracle.
#pragma once

#include <span>
#include <string>

#include "cache/layer_cache.h"
#include "plan/plan.h"

namespace pianola {

// The tables are those the Plan was recorded against.
std::string plan_text(const Plan& plan, std::span<const WeightDecl> weights,
                      const CacheSpecs& caches);

}  // namespace pianola
