#include "backends/cpu/kernels/simd_avx2.h"
// After the vectors it is written over.
#include "backends/cpu/kernels/elementwise_body.h"

namespace pianola::cpu {

const Elementwise& elementwise_avx2() { return kElementwise; }

}  // namespace pianola::cpu
