// Memory of the machine itself, for the backends that compute there.
#pragma once

#include <memory>

#include "backends/backend.h"

namespace pianola {

// Zeroed, page-aligned, touched only when written. Throws OutOfMemory.
std::unique_ptr<DeviceMemory> allocate_host_memory(std::size_t bytes, MemoryUse use);

// What this process may still allocate: the machine's available memory or what its control group
// leaves, whichever is less.
std::size_t available_host_memory();

}  // namespace pianola
