// linear() by form of the weights, one translation unit each.
#pragma once

#include "backends/cuda/kernels/linear.h"

namespace pianola::cuda::products {

void linear_float(const LinearArgs& args, const Launch& launch);
void linear_bf16(const LinearArgs& args, const Launch& launch);
void linear_int4(const LinearArgs& args, const Launch& launch);
void linear_int8(const LinearArgs& args, const Launch& launch);

}  // namespace pianola::cuda::products
