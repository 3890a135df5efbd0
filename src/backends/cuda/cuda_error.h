// CUDA status codes as pianola errors.
#pragma once

#include <cuda_runtime.h>

namespace pianola::cuda {

// Throws Error (Device, or OutOfMemory for an allocation that did not fit) naming `what` and the
// runtime's own words, unless `status` is success.
void check(cudaError_t status, const char* what);

// Throws Error (Internal) unless `ok`: for kernel files, whose compiler cannot read our format
// strings.
void require(bool ok, const char* rule);

}  // namespace pianola::cuda
