// How every kernel of this backend is launched. All launches of a step are made on one stream and
// captured from it; nothing that changes from token to token is an argument.
//
// With `dependent`, a kernel may start while the one before it still runs (programmatic dependent
// launch): it calls wait_for_previous() before it reads anything another kernel of the step writes,
// and every kernel calls it, so that none can overtake the one before the last.
#pragma once

#include <cuda_runtime.h>

#include <utility>

#include "backends/cuda/cuda_error.h"

namespace pianola::cuda {

struct Launch {
  cudaStream_t stream = nullptr;
  int sms = 1;                    // multiprocessors of the device
  bool dependent = false;         // programmatic dependent launch edge from the kernel before
  bool dependent_inside = false;  // the same between the kernels of one op
};

// Throws Device naming the kernel when the launch is refused.
template <typename... Params, typename... Args>
void launch_kernel(const Launch& launch, const char* name, void (*kernel)(Params...), dim3 grid,
                   dim3 block, std::size_t shared_bytes, Args&&... args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = launch.stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = launch.dependent ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(std::forward<Args>(args))...),
        name);
}

}  // namespace pianola::cuda
