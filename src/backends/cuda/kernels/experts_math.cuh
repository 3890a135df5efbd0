// How the results of experts are kept and added up: what every route to them shares, so that all
// give the same bits.
#pragma once

#include "backends/cuda/kernels/device.cuh"

namespace pianola::cuda::products {

// The weighted results of a token's experts, added in the order of ranks.
struct ExpertSum {
  float value = 0;
  bool any = false;
  __device__ __forceinline__ void add(float weight, float y) {
    value = any ? __fmaf_rn(weight, y, value) : __fmul_rn(weight, y);
    any = true;
  }
  __device__ __forceinline__ float plus(float residual) const {
    return any ? __fadd_rn(value, residual) : residual;
  }
};

// Element (row, c) of activations kept as operand words: four columns are the high parts of the
// first two, their low parts, and the same of the other two, as activation_words() has them.
__device__ __forceinline__ void store_hidden(std::uint16_t* words, int row, int cols, int c,
                                             float value) {
  const __nv_bfloat16 high = __float2bfloat16_rn(value);
  const __nv_bfloat16 low = __float2bfloat16_rn(value - __bfloat162float(high));
  std::uint16_t* at =
      words + (static_cast<std::int64_t>(row) * (cols / 4) + c / 4) * 8 + c % 4 / 2 * 4 + c % 2;
  at[0] = __bfloat16_as_ushort(high);
  at[2] = __bfloat16_as_ushort(low);
}

}  // namespace pianola::cuda::products
