#include "backends/cuda/cuda_error.h"

#include "base/check.h"

namespace pianola::cuda {

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  const ErrorCode code =
      status == cudaErrorMemoryAllocation ? ErrorCode::kOutOfMemory : ErrorCode::kDevice;
  fail(code, "cuda: {}: {} ({})", what, cudaGetErrorString(status), cudaGetErrorName(status));
}

void require(bool ok, const char* rule) {
  if (!ok) fail(ErrorCode::kInternal, "cuda: {}", rule);
}

}  // namespace pianola::cuda
