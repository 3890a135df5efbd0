// The tables of elementwise.h, one for each instruction set.
#pragma once

#include "backends/cpu/kernels/elementwise.h"

namespace pianola::cpu {

const Elementwise& elementwise_portable();
const Elementwise& elementwise_avx2();
const Elementwise& elementwise_avx512();

}  // namespace pianola::cpu
