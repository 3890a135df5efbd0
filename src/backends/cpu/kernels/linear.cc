// Chooses the kernel of a call, and checks what would otherwise write outside the caller's memory.
#include "backends/cpu/kernels/linear.h"

#include <algorithm>

#include "backends/cpu/kernels/packed_layout.h"
#include "base/check.h"

namespace pianola::cpu {
namespace {

int blocks_of(int cols) { return (cols + kBlock - 1) / kBlock; }

// Tokens are stored in tiles; all but a single partial tile are 16 wide.
int stored_tokens(int tokens) {
  return tokens < kTileTokens ? tokens : (tokens + kTileTokens - 1) / kTileTokens * kTileTokens;
}

}  // namespace

ActivationKind activation_kind(DType weight, Isa isa) {
  if (is_quantized(weight)) return ActivationKind::kInt8;
  // Twice the speed of f32 on Zen 4. On Intel's cores, which are those with tiles, it is no faster
  // than f32 at batch 1 and a quarter slower in prefill (measured), and it rounds: f32 there.
  if (weight == DType::kBF16 && isa == Isa::kAvx512Bf16) return ActivationKind::kBf16;
  return ActivationKind::kF32;
}

std::size_t activation_bytes(ActivationKind kind, int tokens, int cols) {
  const std::size_t stored = static_cast<std::size_t>(stored_tokens(tokens));
  if (kind == ActivationKind::kInt8) {
    return stored * static_cast<std::size_t>(blocks_of(cols)) * kActRecord;
  }
  return stored * static_cast<std::size_t>(padded_cols(cols)) *
         (kind == ActivationKind::kF32 ? 4U : 2U);
}

void prepare_activations(ActivationKind kind, Isa isa, const float* x, std::ptrdiff_t ldx,
                         int tokens, int cols, void* out, int token_begin, int token_end) {
  PIANOLA_CHECK(token_begin >= 0 && token_end <= tokens, "tokens {} to {} of {}", token_begin,
                token_end, tokens);
  const PrepareCall call{x,           ldx,      tokens, cols, static_cast<std::uint8_t*>(out),
                         token_begin, token_end};
  if (kind == ActivationKind::kF32) return prepare_f32(call);
  if (kind == ActivationKind::kBf16) return prepare_bf16(call);
  PIANOLA_CHECK(cols % kBlock == 0, "{} columns are not whole blocks of {}", cols, kBlock);
#if defined(__x86_64__)
  if (isa >= Isa::kAvx512) return prepare_int8_avx512(call);
  if (isa == Isa::kAvx2) return prepare_int8_avx2(call);
#endif
  prepare_int8_portable(call);
}

std::size_t linear_scratch_bytes(DType dtype, Isa isa, int tokens, int cols) {
  if (!is_quantized(dtype) || isa < Isa::kAmx || tokens < kAmxTokens) return 0;
  return static_cast<std::size_t>(expanded_panels(cols / kBlock)) *
         static_cast<std::size_t>(cols / kBlock) * kExpandedBlock;
}

void linear(const PackedWeight& weight, const void* activations, int tokens, int row_begin,
            int row_end, float* y, std::ptrdiff_t ldy, void* scratch, Isa isa, LinearWrite write) {
  PIANOLA_CHECK(row_begin >= 0 && row_begin % kPanelRows == 0 && row_end <= weight.rows &&
                    (row_end % kPanelRows == 0 || row_end == weight.rows),
                "rows {} to {} of {} are not whole panels", row_begin, row_end, weight.rows);
  if (row_begin >= row_end || tokens <= 0) return;
  const LinearCall call{weight.dtype,
                        static_cast<const std::uint8_t*>(weight.data),
                        weight.rows,
                        weight.cols,
                        static_cast<const std::uint8_t*>(activations),
                        tokens,
                        row_begin,
                        row_end,
                        y,
                        ldy,
                        static_cast<std::uint8_t*>(scratch),
                        write == LinearWrite::kAccumulate};
#if defined(__x86_64__)
  if (activation_kind(weight.dtype, isa) == ActivationKind::kBf16) return linear_avx512bf16(call);
  if (isa >= Isa::kAmx && is_quantized(weight.dtype) && tokens >= kAmxTokens) {
    return linear_amx(call);
  }
  if (isa >= Isa::kAvx512) return linear_avx512(call);
  if (isa == Isa::kAvx2) return linear_avx2(call);
#endif
  linear_portable(call);
}

RowRange worker_rows(int rows, int worker, int workers) {
  const std::int64_t panels = (rows + kPanelRows - 1) / kPanelRows;
  const int begin = static_cast<int>(panels * worker / workers) * kPanelRows;
  const int end = static_cast<int>(panels * (worker + 1) / workers) * kPanelRows;
  return {std::min(begin, rows), std::min(end, rows)};
}

}  // namespace pianola::cpu
