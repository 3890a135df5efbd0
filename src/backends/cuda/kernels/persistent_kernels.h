// Which kernels there are for persistent.h; persistent_*.cu instantiate them.
#pragma once

#include "tensor/dtype.h"

namespace pianola::cuda::persistent {

struct Program;
using Kernel = void (*)(Program);

// For heads of `dim` (64 or 128), `groups` of eight tokens (1 or 4) and a ring of `depth` chunks;
// null if there is none.
Kernel plain_f16(int dim, int groups, int depth);
Kernel plain_bf16(int dim, int groups, int depth);
Kernel quantised_f16(int dim, int groups, int depth);
Kernel quantised_bf16(int dim, int groups, int depth);

}  // namespace pianola::cuda::persistent
