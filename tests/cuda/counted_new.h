// Counts the blocks that C++ code of this program takes from the heap, on all threads. The driver's
// own calls of malloc do not count.
#pragma once

#include <cstddef>

namespace pianola {

std::size_t allocation_count();

}  // namespace pianola
