// Kernels for tests of the engine: one that ends a device's context, and one with a plain number
// among its arguments.
#pragma once

#include <cuda_runtime.h>

namespace pianola::cuda {

// Returns at once; from the moment the kernel traps, every call on the device fails.
cudaError_t launch_trap(cudaStream_t stream);

// *address = value, written by `blocks` blocks.
cudaError_t launch_store(cudaStream_t stream, int* address, int value, unsigned blocks);

}  // namespace pianola::cuda
