// In which order experts are chosen.
#pragma once

#include "backends/cuda/kernels/device.cuh"

namespace pianola::cuda {

// A NaN counts as the smallest score.
__device__ __forceinline__ float rank_key(float score) { return isnan(score) ? -INFINITY : score; }
// Whether expert (key a, id i) is chosen before (b, j).
__device__ __forceinline__ bool before(float a, int i, float b, int j) {
  return a > b || (a == b && i < j);
}

}  // namespace pianola::cuda
