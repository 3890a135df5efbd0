#include "backends/cpu/kernels/simd_avx512.h"
// After the vectors it is written over.
#include "backends/cpu/kernels/state_body.h"

namespace pianola::cpu {

const StateKernels& state_avx512() { return kStateKernels; }

}  // namespace pianola::cpu
