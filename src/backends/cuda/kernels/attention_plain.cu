// Layers that attend to all positions, without sinks.
#include "backends/cuda/kernels/attention_decode.cuh"

namespace pianola::cuda {

DecodeKernel plain_kernel(const LayerCacheView& cache) { return decode_kernel<true>(cache); }

}  // namespace pianola::cuda
