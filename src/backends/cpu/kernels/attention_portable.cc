#include "backends/cpu/kernels/simd_portable.h"
// After the vectors it is written over.
#include "backends/cpu/kernels/attention_body.h"

namespace pianola::cpu {

const AttentionKernels& attention_kernels_portable() { return kKernels; }

}  // namespace pianola::cpu
