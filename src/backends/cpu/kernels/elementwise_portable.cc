#include "backends/cpu/kernels/simd_portable.h"
// After the vectors it is written over.
#include "backends/cpu/kernels/elementwise_body.h"

namespace pianola::cpu {

const Elementwise& elementwise_portable() { return kElementwise; }

}  // namespace pianola::cpu
