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

// A function of the driver, found at run time so that nothing links to it; as of this version of
// CUDA, 12040 for 12.4. Throws Error (Device) when the driver has none.
void* driver_function(const char* name, int version);

}  // namespace pianola::cuda
