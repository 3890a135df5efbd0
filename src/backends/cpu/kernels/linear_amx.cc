// Block types with int8 tiles, for many tokens.
#include "backends/cpu/kernels/packed_blocks_avx512.h"

namespace pianola::cpu {

void linear_amx(const LinearCall& call) { linear_avx512(call); }

}  // namespace pianola::cpu
