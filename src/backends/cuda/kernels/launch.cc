#include "backends/cuda/kernels/launch.h"

namespace pianola::cuda {
namespace {

constexpr std::size_t kSharedWithoutAsking = 48 * 1024;
constexpr unsigned kClusterWithoutAsking = 8;

// What a kernel has to be allowed before a grid asks for it.
void allow(const char* name, const void* kernel, const Grid& grid) {
  if (grid.shared_bytes > kSharedWithoutAsking) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(grid.shared_bytes)),
          name);
  }
  // A multiprocessor changes how much of its memory is shared only when it is empty: a kernel that
  // asked for little would keep the next one's blocks from starting beside its own.
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                             cudaSharedmemCarveoutMaxShared),
        name);
  if (grid.cluster > kClusterWithoutAsking) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), name);
  }
}

}  // namespace

void launch_function(const Launch& launch, const char* name, const void* kernel, const Grid& grid,
                     void** parameters) {
  allow(name, kernel, grid);
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

int clusters_of(const char* name, const void* kernel, const Grid& grid) {
  allow(name, kernel, grid);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {grid.cluster, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = grid.blocks;
  config.blockDim = grid.threads;
  config.dynamicSmemBytes = grid.shared_bytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  check(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config), name);
  return clusters;
}

CUtensorMap boxes_of(const void* matrix, int rows, int row_bytes, int box_rows, int box_bytes,
                     int side_by_side) {
  static const auto encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(
      driver_function("cuTensorMapEncodeTiled", 12000));
  const cuuint64_t size[3] = {static_cast<cuuint64_t>(box_bytes), static_cast<cuuint64_t>(rows),
                              static_cast<cuuint64_t>(row_bytes / box_bytes)};
  const cuuint64_t stride[2] = {static_cast<cuuint64_t>(row_bytes),
                                static_cast<cuuint64_t>(box_bytes)};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(box_bytes), static_cast<cuuint32_t>(box_rows),
                             static_cast<cuuint32_t>(side_by_side)};
  const cuuint32_t step[3] = {1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, const_cast<void*>(matrix), size, stride, box,
             step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  require(result == CUDA_SUCCESS, "a matrix that the copy engine does not take");
  return map;
}

}  // namespace pianola::cuda
