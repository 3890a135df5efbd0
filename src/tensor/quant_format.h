// The block formats of GGUF, decoded and encoded one row at a time in plain scalar code.
//
//   dequantize_row(DType::kQ4_1, src, dst, 576);   // exactly what the `gguf` Python package gives
//   quantize_row(DType::kQ8_0, src, dst, 576);     // for tests and conversion
//
// This is the specification: loaders and the reference backend use it, kernels are tested against
// it. Rows hold whole blocks (see dtype.h); `src` and `dst` may have any alignment on the packed
// side.
//
// Layouts, little endian, f16 scales d and m; "q" are unsigned codes of the given width:
//   q4_0  d, 16 bytes: byte i holds value i (low) and i + 16 (high)          x = d (q - 8)
//   q4_1  d, m, as q4_0                                                      x = d q + m
//   q5_0  d, 4 bytes (bit i: fifth bit of value i), 16 bytes as q4_0         x = d (q - 16)
//   q5_1  d, m, as q5_0                                                      x = d q + m
//   q8_0  d, 32 signed bytes                                                 x = d q
//   q4_k  d, m, 12 bytes of eight 6-bit (scale, min) pairs, 128 bytes: 32 bytes for each pair of
//         32-value sub-blocks, low nibbles first                             x = d s q - m n
//   q5_k  as q4_k with 32 bytes before the nibbles: bit s of byte i is the fifth bit of value i of
//         sub-block s
//   q6_k  128 bytes low nibbles, 64 bytes high bit pairs, 16 signed scales, d x = d s (q - 32)
#pragma once

#include <cstddef>

#include "tensor/dtype.h"

namespace pianola {

// Decodes `n` values. Types: f32, f16, bf16 and all block types; others are Unsupported.
void dequantize_row(DType dtype, const void* src, float* dst, std::size_t n);

// Encodes `n` values. f16, bf16, q4_0, q4_1, q5_0, q5_1 and q8_0 give the bytes of the `gguf`
// Python package; q4_k, q5_k and q6_k use a plain min-max fit (good enough for test models, not
// tuned). The input must be finite for the block types.
void quantize_row(DType dtype, const float* src, void* dst, std::size_t n);

// Scale and minimum of sub-block `j` (0 to 7) from the 12 packed bytes of q4_k and q5_k.
struct KScale {
  unsigned char scale;
  unsigned char min;
};
KScale unpack_k_scale(const unsigned char* packed, int j);

}  // namespace pianola
