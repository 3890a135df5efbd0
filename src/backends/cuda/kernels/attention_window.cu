// Layers with a window or sinks.
#include "backends/cuda/kernels/attention_decode.cuh"

namespace pianola::cuda {

DecodeKernel window_kernel(const LayerCacheView& cache) { return decode_kernel<false>(cache); }

}  // namespace pianola::cuda
