#include "backends/cuda.h"
#include "base/check.h"

namespace pianola::cuda {

bool built_in() { return false; }

std::unique_ptr<Backend> make_cuda_backend(const BackendOptions&) {
  fail(ErrorCode::kUnsupported,
       "backend 'cuda': this build has no CUDA; configure with -DPIANOLA_CUDA=ON on a machine with "
       "the CUDA toolkit");
}

}  // namespace pianola::cuda
