// Where the buffers of a Plan lie in one workspace: buffers that are never alive at the same time
// share bytes.
#pragma once

#include <cstddef>
#include <vector>

#include "plan/plan.h"

namespace pianola {

struct WorkspacePlan {
  std::vector<std::size_t> offsets;  // of each buffer
  std::size_t bytes = 0;
};

// A buffer lives from the first op that names it to the last. First fit by size, largest first;
// deterministic.
WorkspacePlan plan_workspace(const Plan& plan);

}  // namespace pianola
