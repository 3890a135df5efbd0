// Kernels of attend(), by what a layer has.
#pragma once

#include "backends/cuda/kernels/attention.h"

namespace pianola::cuda {

struct DecodeParams;
using DecodeKernel = void (*)(DecodeParams);

DecodeKernel plain_kernel(const LayerCacheView& cache);   // neither a window nor sinks
DecodeKernel window_kernel(const LayerCacheView& cache);  // either

// Launches attend_one(), or says that the shape is not one of its own: tokens first..first + tokens
// - 1 of the bucket.
bool attend_one_from(const AttentionArgs& args, const HeadsArgs* heads, int first, int tokens,
                     const Launch& launch);

}  // namespace pianola::cuda
