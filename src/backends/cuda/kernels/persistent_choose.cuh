// One set of instances of the kernel of persistent.h.
#pragma once

#include "backends/cuda/kernels/persistent_kernel.cuh"
#include "backends/cuda/kernels/persistent_kernels.h"

namespace pianola::cuda::persistent {

template <bool kQuantised, typename T, int kHeadDim>
Kernel choose_depth(int groups, int depth) {
  if (groups == 1 && depth == 6) return persistent_kernel<kQuantised, T, kHeadDim, 1, 6>;
  if (groups == 1 && depth == 3) return persistent_kernel<kQuantised, T, kHeadDim, 1, 3>;
  if (groups == 4 && depth == 3) return persistent_kernel<kQuantised, T, kHeadDim, 4, 3>;
  if constexpr (!kQuantised) {
    if (groups == 1 && depth == 10) return persistent_kernel<kQuantised, T, kHeadDim, 1, 10>;
  }
  return nullptr;
}

template <bool kQuantised, typename T>
Kernel choose(int dim, int groups, int depth) {
  return dim == 64    ? choose_depth<kQuantised, T, 64>(groups, depth)
         : dim == 128 ? choose_depth<kQuantised, T, 128>(groups, depth)
                      : nullptr;
}

}  // namespace pianola::cuda::persistent
