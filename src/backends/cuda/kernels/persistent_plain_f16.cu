#include "backends/cuda/kernels/persistent_choose.cuh"

namespace pianola::cuda::persistent {

Kernel plain_f16(int dim, int groups, int depth) {
  return choose<false, __half>(dim, groups, depth);
}

}  // namespace pianola::cuda::persistent
