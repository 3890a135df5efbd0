#include "backends/cpu/kernels/simd_portable.h"
// After the vectors it is written over.
#include "backends/cpu/kernels/state_body.h"

namespace pianola::cpu {

const StateKernels& state_portable() { return kStateKernels; }

}  // namespace pianola::cpu
