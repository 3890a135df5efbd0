// Kernels of attend(), by what a layer has.
#pragma once

#include "backends/cuda/kernels/attention.h"

namespace pianola::cuda {

struct DecodeParams;
using DecodeKernel = void (*)(DecodeParams);

DecodeKernel plain_kernel(const LayerCacheView& cache);   // neither a window nor sinks
DecodeKernel window_kernel(const LayerCacheView& cache);  // either

}  // namespace pianola::cuda
