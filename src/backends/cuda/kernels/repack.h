// Weights on their way to the device: block formats into planes, any form to bfloat16.
#pragma once

#include "backends/cuda/kernels/launch.h"
#include "backends/cuda/kernels/packed_weight.h"

namespace pianola::cuda {

// `source` holds rows * row_bytes(dtype, cols) bytes of a block format on the device; `destination`
// packed_bytes() on the device, any content before.
void repack(DType dtype, int rows, int cols, const std::byte* source, std::byte* destination,
            const Launch& launch);

// out [rows, cols] bfloat16, row-major, for products by cuBLASLt. Values are rounded to nearest.
void unpack_bf16(const PackedWeight& weight, int first_row, int rows, void* out,
                 const Launch& launch);

}  // namespace pianola::cuda
