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

void* driver_function(const char* name, int version) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult result = {};
  check(cudaGetDriverEntryPointByVersion(name, &address, static_cast<unsigned>(version),
                                         cudaEnableDefault, &result),
        name);
  if (result != cudaDriverEntryPointSuccess || !address) {
    fail(ErrorCode::kDevice, "cuda: the driver has no {}; it is too old", name);
  }
  return address;
}

}  // namespace pianola::cuda
