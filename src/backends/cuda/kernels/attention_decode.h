// Kernels of attend(), by what a layer has.
#pragma once

#include "backends/cuda/kernels/attention.h"

namespace pianola::cuda {

struct DecodeParams;
using DecodeKernel = void (*)(DecodeParams);

DecodeKernel plain_kernel(const LayerCacheView& cache);   // neither a window nor sinks
DecodeKernel window_kernel(const LayerCacheView& cache);  // either

// For a step of one token, or null where the others serve it, too. It takes one_extra_bytes() of
// shared memory more.
DecodeKernel one_kernel(const DecodeParams& p);
constexpr std::size_t one_extra_bytes(int dim) { return 3 * static_cast<std::size_t>(dim) * 4; }

// Launches attend_lanes() for tokens first..first + tokens - 1 of the bucket, or says that the
// shape is not one of its own.
bool attend_lanes_from(const AttentionArgs& args, const HeadsArgs* heads, int first, int tokens,
                       const Launch& launch);

}  // namespace pianola::cuda
