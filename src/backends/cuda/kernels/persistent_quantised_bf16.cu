#include "backends/cuda/kernels/persistent_choose.cuh"

namespace pianola::cuda::persistent {

Kernel quantised_bf16(int dim, int groups, int depth) {
  return choose<true, __nv_bfloat16>(dim, groups, depth);
}

}  // namespace pianola::cuda::persistent
