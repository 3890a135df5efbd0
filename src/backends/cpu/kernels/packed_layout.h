// How packed weights and prepared activations lie in memory. For the kernels only.
//
// Weights: panels of 16 rows, one after the other, each a single stream along k.
//
//   Block types: a panel is chunks of up to 8 blocks of 32 values (a chunk is a super-block of the
//   K types). A chunk is a header (scales; padded to 64 bytes) and then, for each block, quants:
//     word w (0..7) is 64 bytes: byte 4 * row + i holds the value of k = 4 * w + i, unsigned
//     4 bits: 4 words of nibbles; word w in the low nibbles of p[w], word w + 4 in the high ones
//     5 bits: first a plane of 64 bytes whose bit w is the fifth bit of word w; then the nibbles
//     6 bits: first two planes, bits 2 (w % 4) and up of plane w / 4; then the nibbles
//     8 bits: 8 words, value + 128
//   so that one load, a mask and one `vpdpbusd` with four broadcast activations serve 16 rows, and
//   an unpacked block is a tile operand of the matrix extension as it stands.
//   Headers, for each block: Q4_0, Q5_0, Q8_0 d[16] as f16; Q4_1, Q5_1 d[16] and m[16] as f16.
//   Q4_K, Q5_K: d[16], dmin[16] as f16, then for each block scale[16] and min[16] as bytes.
//   Q6_K: d[16] as f16 and 32 bytes unused, then for each block two scale[16] as signed bytes.
//
//   F32, F16: [k][16 rows]. BF16: [k / 2][16 rows][2]. k is padded to a multiple of 8 with zeros.
//
// Activations: tiles of `width` = min(tokens, 16) tokens, each a stream along k. kInt8: records of
//   one block: q[width][32] int8, d[width] f32, s[width] f32, n[width] i32, h[width] i32, where
//   x ≈ d * q, s = d * sum(q), n = -sum(q) and h = -sum(first 16 of q). kF32: [k][width].
//   kBf16: [k / 2][width][2]. The unused tokens of the last tile are zeros.
//
// The per-ISA files are compiled with different flags, so everything here is a constant, plain data
// or `static`: an inline function shared between them could be linked from the wrong one.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tensor/dtype.h"

namespace pianola::cpu {

constexpr int kBlock = 32;       // values of k in a block
constexpr int kChunkBlocks = 8;  // blocks in a chunk
constexpr int kTileTokens = 16;
constexpr int kFloatStep = 8;   // float panels are padded to this many k
constexpr int kActRecord = 48;  // bytes of one block of one token
// Bytes of a block expanded for the tiles: 8 words of int8, then d[16] and m[16] as f32.
constexpr int kExpandedBlock = 640;

// How far ahead of the weights to prefetch into the second-level cache. Beyond what the hardware
// does for itself this gave a quarter more from the third level and a third more from memory
// (Emerald Rapids); 1 to 8 KiB were alike.
constexpr int kPrefetchBytes = 4096;

// Facts about a block type's packed form.
struct PackedFormat {
  int header;            // bytes of a chunk's header before the blocks' parts
  int header_per_block;  // bytes of a block's part
  int quants;            // bytes of a block's quants
  int bits;
  int bias_shift;  // log2 of the value that stands for zero; 0 for types with a minimum
  bool has_min;
  bool halves;  // a scale for each 16 values
};

static constexpr PackedFormat packed_format(DType dtype) {
  switch (dtype) {
    case DType::kQ4_0:
      return {0, 32, 256, 4, 3, false, false};
    case DType::kQ4_1:
      return {0, 64, 256, 4, 0, true, false};
    case DType::kQ5_0:
      return {0, 32, 320, 5, 4, false, false};
    case DType::kQ5_1:
      return {0, 64, 320, 5, 0, true, false};
    case DType::kQ8_0:
      return {0, 32, 512, 8, 7, false, false};
    case DType::kQ4_K:
      return {64, 32, 256, 4, 0, true, false};
    case DType::kQ5_K:
      return {64, 32, 320, 5, 0, true, false};
    case DType::kQ6_K:
      return {64, 32, 384, 6, 5, false, true};
    default:
      return {};
  }
}

static constexpr int chunk_header_bytes(const PackedFormat& format, int blocks) {
  return (format.header + format.header_per_block * blocks + 63) / 64 * 64;
}

static constexpr std::size_t panel_bytes(const PackedFormat& format, int blocks) {
  const int full = blocks / kChunkBlocks;
  const int rest = blocks % kChunkBlocks;
  std::size_t bytes = static_cast<std::size_t>(full) *
                      static_cast<std::size_t>(chunk_header_bytes(format, kChunkBlocks) +
                                               kChunkBlocks * format.quants);
  if (rest != 0) {
    bytes += static_cast<std::size_t>(chunk_header_bytes(format, rest) + rest * format.quants);
  }
  return bytes;
}

static constexpr int padded_cols(int cols) {
  return (cols + kFloatStep - 1) / kFloatStep * kFloatStep;
}

// One call of linear(), for the per-ISA entry points.
struct LinearCall {
  DType dtype;
  const std::uint8_t* weight;
  int rows;
  int cols;
  const std::uint8_t* activations;
  int tokens;
  int row_begin;
  int row_end;
  float* y;
  std::ptrdiff_t ldy;
  std::uint8_t* scratch;
  bool accumulate;
};

// One call of prepare_activations().
struct PrepareCall {
  const float* x;
  std::ptrdiff_t ldx;
  int tokens;
  int cols;
  std::uint8_t* out;
  int token_begin;
  int token_end;
};

// Tokens from which the tiles win over VNNI.
constexpr int kAmxTokens = kTileTokens;

// Panels that the tile path expands at a time: about half a megabyte, so that they and the
// activations of some tokens stay in the second-level cache. Even, because panels go in pairs.
static constexpr int expanded_panels(int blocks) {
  const int fit = (512 << 10) / (blocks * kExpandedBlock) / 2 * 2;
  return fit < 2 ? 2 : (fit > 16 ? 16 : fit);
}

void linear_portable(const LinearCall& call);
void linear_avx2(const LinearCall& call);
void linear_avx512(const LinearCall& call);      // every type, f32 activations for BF16
void linear_avx512bf16(const LinearCall& call);  // BF16 with kBf16 activations
void linear_amx(const LinearCall& call);         // block types, 16 tokens or more

void prepare_f32(const PrepareCall& call);
void prepare_bf16(const PrepareCall& call);
void prepare_int8_portable(const PrepareCall& call);
void prepare_int8_avx2(const PrepareCall& call);
void prepare_int8_avx512(const PrepareCall& call);

}  // namespace pianola::cpu
