// Memory of the machine itself, for the backends that compute there.
#pragma once

#include <memory>

#include "backends/backend.h"

namespace pianola {

// Zeroed, page-aligned, touched only when written. Throws OutOfMemory.
std::unique_ptr<DeviceMemory> allocate_host_memory(std::size_t bytes, MemoryUse use);

// For tests: memory for MemoryUse::kOnDemand that is made from now on behaves as a device's does.
// Its pages have this many bytes, a multiple of the system's, and cannot be touched before they are
// required. 0, as it is at first: they come when they are touched.
void set_host_page_bytes(std::size_t bytes);
std::size_t host_page_bytes();

// What this process may still allocate: the machine's available memory or what its control group
// leaves, whichever is less.
std::size_t available_host_memory();

}  // namespace pianola
