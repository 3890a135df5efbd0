// Matrix kernels of the CPU backend: y[t, n] = sum_k W[n, k] * x[t, k] for float and GGUF block
// weights.
//
// Weights are packed once at load (packed_layout.h says how); activations are prepared once per
// input and shared by every matrix that reads it; linear() then computes any range of rows.
//
//   std::vector<std::byte> packed(packed_bytes(DType::kQ4_1, rows, cols));      // 64-byte aligned
//   pack_rows(DType::kQ4_1, gguf_data, rows, cols, packed.data(), 0, rows);
//   PackedWeight w{DType::kQ4_1, packed.data(), rows, cols};
//   const ActivationKind kind = activation_kind(w.dtype, isa);
//   prepare_activations(kind, isa, x, ldx, tokens, cols, activations, 0, tokens);
//   linear(w, activations, tokens, 0, rows, y, ldy, scratch, isa);
//
// Invariants, all tested:
// - One order: a result depends on its row of W, its row of x and the Isa, and on nothing else, bit
//   for bit: not on the number of tokens, the neighbours, or how rows are split over threads.
// - A NaN or infinity in x makes every output of that token NaN or infinite, and no other token's.
// - Nothing here allocates, and nothing writes outside the rows, tokens and buffers it was given.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/cpu/isa.h"
#include "tensor/dtype.h"

namespace pianola::cpu {

// Rows of W are packed in panels of 16; row ranges handed to the kernels start at multiples of it.
inline constexpr int kPanelRows = 16;

struct PackedWeight {
  DType dtype = DType::kF32;
  const void* data = nullptr;  // packed_bytes() bytes, 64-byte aligned
  int rows = 0;
  int cols = 0;
};

// Whether these kernels take such a weight: one of F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0,
// Q4_K, Q5_K, Q6_K, rows and cols ≥ 1, and cols whole blocks of the type.
bool linear_supported(DType dtype, std::int64_t rows, std::int64_t cols);

// Bytes of the packed form: that of the file, plus 0 to 2.8 % by type, plus rows padded to 16.
std::size_t packed_bytes(DType dtype, std::int64_t rows, std::int64_t cols);

// Packs rows [row_begin, row_end) of `source` (the whole matrix as the file has it, [rows, cols]).
// row_begin is a multiple of 16, row_end too or equal to rows; ranges may run on several threads.
void pack_rows(DType dtype, const void* source, std::int64_t rows, std::int64_t cols, void* packed,
               std::int64_t row_begin, std::int64_t row_end);

// Whether unpack_row() takes a type: floats and block types without a minimum, whose values are one
// product.
bool unpack_supported(DType dtype);

// Row `row` of a packed matrix of `cols` columns as floats, bit for bit what dequantize_row() makes
// of the file's row: a tied embedding is looked up in the head, and needs no second copy.
void unpack_row(DType dtype, const void* packed, std::int64_t cols, std::int64_t row, float* out);

// What a weight type wants to multiply with.
enum class ActivationKind : std::uint8_t {
  kInt8,  // 8 bits and an f32 scale per 32 values: all block types
  kF32,   // floats as they are
  kBf16,  // rounded to bfloat16: BF16 weights on Isa::kAvx512Bf16, where that dot product pays
};

ActivationKind activation_kind(DType weight, Isa isa);
std::size_t activation_bytes(ActivationKind kind, int tokens, int cols);

// Prepares tokens [token_begin, token_end) of x [tokens, ldx]. Ranges may run on several threads;
// `tokens` is the number that linear() will be given. `out` is 64-byte aligned.
void prepare_activations(ActivationKind kind, Isa isa, const float* x, std::ptrdiff_t ldx,
                         int tokens, int cols, void* out, int token_begin, int token_end);

// Bytes of scratch that each thread's linear() needs, 64-byte aligned; may be 0.
std::size_t linear_scratch_bytes(DType dtype, Isa isa, int tokens, int cols);

// What linear() does with its result.
enum class LinearWrite : std::uint8_t {
  kStore,       // y = Wx
  kAccumulate,  // y += Wx, one rounding after the sum: a residual stream
};

// Rows [row_begin, row_end) for all tokens into y [tokens, ldy], at y[t * ldy + n]. row_begin is a
// multiple of 16, row_end too or equal to rows.
void linear(const PackedWeight& weight, const void* activations, int tokens, int row_begin,
            int row_end, float* y, std::ptrdiff_t ldy, void* scratch, Isa isa,
            LinearWrite write = LinearWrite::kStore);

// The rows of worker `worker` of `workers`: whole panels, as even as they go.
struct RowRange {
  int begin = 0;
  int end = 0;
};
RowRange worker_rows(int rows, int worker, int workers);

}  // namespace pianola::cpu
