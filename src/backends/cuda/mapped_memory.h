// Device memory behind reserved ranges of addresses: all of it at once, or page by page.
#pragma once

#include <cuda_runtime.h>

#include <memory>

#include "backends/backend.h"

namespace pianola::cuda {

// What mappings are multiples of.
std::size_t memory_granularity(int device);

// Zeroed. Throws OutOfMemory; nothing is left behind.
std::unique_ptr<DeviceMemory> map_memory(int device, std::size_t bytes);

// Addresses alone: pages come when they are required, zeroed in order with `stream`.
std::unique_ptr<DeviceMemory> reserve_memory(int device, std::size_t bytes, cudaStream_t stream);

}  // namespace pianola::cuda
