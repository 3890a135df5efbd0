#include "backends/cuda/kernels/persistent_choose.cuh"

namespace pianola::cuda::persistent {

Kernel plain_bf16(int dim, int groups, int depth) {
  return choose<false, __nv_bfloat16>(dim, groups, depth);
}

}  // namespace pianola::cuda::persistent
