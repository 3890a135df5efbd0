// How every kernel of this backend is launched. All launches of a step are made on one stream and
// captured from it; nothing that changes from token to token is an argument.
//
// With `dependent`, a kernel may start while the one before it still runs (programmatic dependent
// launch): it calls wait_for_previous() before it reads anything another kernel of the step writes,
// and every kernel calls it, so that none can overtake the one before the last.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <tuple>
#include <utility>

#include "backends/cuda/cuda_error.h"

namespace pianola::cuda {

struct Launch {
  cudaStream_t stream = nullptr;
  int sms = 1;                    // multiprocessors of the device
  bool dependent = false;         // programmatic dependent launch edge from the kernel before
  bool dependent_inside = false;  // the same between the kernels of one op
};

struct Grid {
  dim3 blocks;
  dim3 threads;
  std::size_t shared_bytes = 0;
  unsigned cluster = 1;      // thread blocks of a cluster, up to 16
  bool cooperative = false;  // all thread blocks on the device at once, or an error
};

// Parameters are copied. Throws Device naming the kernel when the launch is refused.
void launch_function(const Launch& launch, const char* name, const void* kernel, const Grid& grid,
                     void** parameters);

// Clusters of such a grid that the device, idle, runs at once; 0 if it runs none.
int clusters_of(const char* name, const void* kernel, const Grid& grid);
template <typename... Params>
int clusters_at_once(const char* name, void (*kernel)(Params...), const Grid& grid) {
  return clusters_of(name, reinterpret_cast<const void*>(kernel), grid);
}

// How the copy engine cuts boxes of box_rows x box_bytes out of a matrix of rows of bytes, so many
// side by side at a time, and lays them out one behind the other, each in its pattern of 128 bytes.
// A row is a multiple of box_bytes; what lies beyond the matrix reads as 0.
CUtensorMap boxes_of(const void* matrix, int rows, int row_bytes, int box_rows, int box_bytes,
                     int side_by_side);

template <typename... Params, typename... Args>
void launch_grid(const Launch& launch, const char* name, void (*kernel)(Params...),
                 const Grid& grid, Args&&... args) {
  std::tuple<Params...> values(static_cast<Params>(std::forward<Args>(args))...);
  std::apply(
      [&](Params&... value) {
        void* parameters[] = {&value...};
        launch_function(launch, name, reinterpret_cast<const void*>(kernel), grid, parameters);
      },
      values);
}

template <typename... Params, typename... Args>
void launch_kernel(const Launch& launch, const char* name, void (*kernel)(Params...), dim3 blocks,
                   dim3 threads, std::size_t shared_bytes, Args&&... args) {
  launch_grid(launch, name, kernel,
              Grid{.blocks = blocks, .threads = threads, .shared_bytes = shared_bytes},
              std::forward<Args>(args)...);
}

}  // namespace pianola::cuda
