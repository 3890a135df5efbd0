#include "backends/cuda/kernels/launch.h"

#include <cstdlib>

namespace pianola::cuda {
namespace {

constexpr std::size_t kSharedWithoutAsking = 48 * 1024;
constexpr unsigned kClusterWithoutAsking = 8;

}  // namespace

void launch_function(const Launch& launch, const char* name, const void* kernel, const Grid& grid,
                     void** parameters) {
  static const char* carveout = std::getenv("PIANOLA_CARVEOUT");
  if (carveout) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                               std::atoi(carveout)),
          name);
  }
  if (grid.shared_bytes > kSharedWithoutAsking) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(grid.shared_bytes)),
          name);
  }
  if (grid.cluster > kClusterWithoutAsking) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), name);
  }
  cudaLaunchAttribute attributes[3] = {};
  unsigned count = 0;
  if (grid.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {grid.cluster, 1, 1};
  }
  if (grid.cooperative) {
    attributes[count].id = cudaLaunchAttributeCooperative;
    attributes[count++].val.cooperative = 1;
  }
  if (launch.dependent) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = grid.blocks;
  config.blockDim = grid.threads;
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = launch.stream;
  config.attrs = attributes;
  config.numAttrs = count;
  check(cudaLaunchKernelExC(&config, kernel, parameters), name);
}

}  // namespace pianola::cuda
