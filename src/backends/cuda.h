// The CUDA backend, as the registry sees it. Built with CUDA or without, the same two functions:
// cuda/ or cuda_stub.cc defines them.
#pragma once

#include <memory>

#include "backends/backend.h"

namespace pianola::cuda {

bool built_in();
// Throws Unsupported when this build has no CUDA, Device when there is no usable GPU.
std::unique_ptr<Backend> make_cuda_backend(const BackendOptions& options);

}  // namespace pianola::cuda
