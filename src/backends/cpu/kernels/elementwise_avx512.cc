#include "backends/cpu/kernels/simd_avx512.h"
// After the vectors it is written over.
#include "backends/cpu/kernels/elementwise_body.h"

namespace pianola::cpu {

const Elementwise& elementwise_avx512() { return kElementwise; }

}  // namespace pianola::cpu
