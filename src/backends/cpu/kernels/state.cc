#include "backends/cpu/kernels/state.h"

namespace pianola::cpu {

const StateKernels& state_kernels(Isa isa) {
#if defined(__x86_64__)
  if (isa >= Isa::kAvx512) return state_avx512();
  if (isa >= Isa::kAvx2) return state_avx2();
#endif
  return state_portable();
}

}  // namespace pianola::cpu
