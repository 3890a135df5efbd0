#include "backends/cpu/kernels/simd_avx2.h"
// After the vectors it is written over.
#include "backends/cpu/kernels/attention_body.h"

namespace pianola::cpu {

const AttentionKernels& attention_kernels_avx2() { return kKernels; }

}  // namespace pianola::cpu
