// The matrix kernels in plain C++, written so that a compiler can vectorise over the 16 rows.
// One code path for any number of tokens, which is what makes the order of operations one.
#include <algorithm>
#include <cstring>

#include "backends/cpu/kernels/packed_layout.h"
#include "tensor/half.h"

namespace pianola::cpu {
namespace {

using Byte = std::uint8_t;
constexpr int kRows = 16;

float half_to_float(const Byte* p) {
  std::uint16_t bits = 0;
  std::memcpy(&bits, p, 2);
  return f16_to_f32(bits);
}

// A block of 16 rows taken apart: words as packed, scales as floats. Without halves a == b.
struct Block {
  Byte w[512];
  float a[kRows];  // scale of the first 16 values
  float b[kRows];  // scale of the others
  float m[kRows];  // minimum
};

void unpack_quants(const PackedFormat& format, const Byte* p, Byte* w) {
  if (format.bits == 8) {
    std::memcpy(w, p, 512);
    return;
  }
  const Byte* nibbles = p + (format.bits - 4) * 64;
  for (int i = 0; i < 256; ++i) {
    w[i] = static_cast<Byte>(nibbles[i] & 15);
    w[i + 256] = static_cast<Byte>(nibbles[i] >> 4);
  }
  for (int word = 0; word < 8 && format.bits > 4; ++word) {
    const bool five = format.bits == 5;
    const Byte* plane = five ? p : p + word / 4 * 64;
    const int shift = five ? word : word % 4 * 2;
    const int mask = five ? 1 : 3;
    for (int i = 0; i < 64; ++i) {
      w[64 * word + i] = static_cast<Byte>(w[64 * word + i] | ((plane[i] >> shift) & mask) << 4);
    }
  }
}

// `part` is the block's part of the header.
void unpack(const PackedFormat& format, const Byte* header, const Byte* part, const Byte* quants,
            Block& out) {
  unpack_quants(format, quants, out.w);
  for (int r = 0; r < kRows; ++r) {
    if (format.halves) {
      const float d = half_to_float(header + 2 * r);
      out.a[r] = d * static_cast<float>(static_cast<std::int8_t>(part[r]));
      out.b[r] = d * static_cast<float>(static_cast<std::int8_t>(part[16 + r]));
    } else if (format.header != 0) {
      out.a[r] = half_to_float(header + 2 * r) * static_cast<float>(part[r]);
      out.m[r] = -(half_to_float(header + 32 + 2 * r) * static_cast<float>(part[16 + r]));
    } else {
      out.a[r] = half_to_float(part + 2 * r);
      if (format.has_min) out.m[r] = half_to_float(part + 32 + 2 * r);
    }
  }
}

// sums[r] += the words [begin, end) of row r times the activations.
void dot(const Byte* w, const std::int8_t* q, int begin, int end, std::int32_t* sums) {
  for (int word = begin; word < end; ++word) {
    for (int r = 0; r < kRows; ++r) {
      const Byte* v = w + 64 * word + 4 * r;
      const std::int8_t* x = q + 4 * word;
      sums[r] += v[0] * x[0] + v[1] * x[1] + v[2] * x[2] + v[3] * x[3];
    }
  }
}

// One token's record of one block.
struct Token {
  std::int8_t q[kBlock];
  float d;
  float s;
  std::int32_t n;
  std::int32_t h;
};

Token read_token(const Byte* record, int width, int at) {
  Token token;
  const Byte* meta = record + width * kBlock + at * 4;
  std::memcpy(token.q, record + at * kBlock, kBlock);
  std::memcpy(&token.d, meta, 4);
  std::memcpy(&token.s, meta + width * 4, 4);
  std::memcpy(&token.n, meta + width * 8, 4);
  std::memcpy(&token.h, meta + width * 12, 4);
  return token;
}

void add_block(const PackedFormat& format, const Block& block, const Token& x, float* acc) {
  std::int32_t first[kRows];
  const std::int32_t bias = 1 << format.bias_shift;
  const int split = format.halves ? 4 : 8;
  const std::int32_t start = format.halves ? x.h : x.n;
  std::fill_n(first, kRows, format.has_min ? 0 : start * bias);
  dot(block.w, x.q, 0, split, first);
  for (int r = 0; r < kRows; ++r) {
    if (format.has_min) acc[r] += block.m[r] * x.s;
    acc[r] += block.a[r] * x.d * static_cast<float>(first[r]);
  }
  if (!format.halves) return;
  std::int32_t second[kRows];
  std::fill_n(second, kRows, (x.n - x.h) * bias);
  dot(block.w, x.q, 4, 8, second);
  for (int r = 0; r < kRows; ++r) acc[r] += block.b[r] * x.d * static_cast<float>(second[r]);
}

void block_tile(const PackedFormat& format, const Byte* panel, const Byte* activations, int width,
                int tokens, int blocks, float (*acc)[kRows]) {
  Block block = {};
  for (int b = 0; b < blocks;) {
    const int n = std::min(kChunkBlocks, blocks - b);
    const int header_bytes = chunk_header_bytes(format, n);
    for (int j = 0; j < n; ++j, ++b, activations += width * kActRecord) {
      unpack(format, panel, panel + format.header + j * format.header_per_block,
             panel + header_bytes + j * format.quants, block);
      for (int t = 0; t < tokens; ++t) {
        add_block(format, block, read_token(activations, width, t), acc[t]);
      }
    }
    panel += header_bytes + n * format.quants;
  }
}

// The weights of 16 rows at k.
void float_weights(DType dtype, const Byte* panel, int k, float* w) {
  for (int r = 0; r < kRows; ++r) {
    const Byte* at = panel + (static_cast<std::ptrdiff_t>(k) * kRows + r) * 2;
    if (dtype == DType::kF32) {
      std::memcpy(w + r, panel + (static_cast<std::ptrdiff_t>(k) * kRows + r) * 4, 4);
    } else if (dtype == DType::kF16) {
      w[r] = half_to_float(at);
    } else {
      std::uint16_t bits = 0;
      std::memcpy(&bits, panel + ((static_cast<std::ptrdiff_t>(k) / 2 * kRows + r) * 2 + k % 2) * 2,
                  2);
      w[r] = bf16_to_f32(bits);
    }
  }
}

// Four running sums by k mod 4, added in pairs at the end: the order of the vector kernels.
void float_tile(DType dtype, const Byte* panel, const float* x, int width, int tokens, int cols,
                float (*acc)[kRows]) {
  float sums[kTileTokens][4][kRows] = {};
  float w[kRows];
  for (int k = 0; k < cols; ++k) {
    float_weights(dtype, panel, k, w);
    for (int t = 0; t < tokens; ++t) {
      const float value = x[static_cast<std::ptrdiff_t>(k) * width + t];
      for (int r = 0; r < kRows; ++r) sums[t][k % 4][r] += w[r] * value;
    }
  }
  for (int t = 0; t < tokens; ++t) {
    for (int r = 0; r < kRows; ++r) {
      acc[t][r] = (sums[t][0][r] + sums[t][1][r]) + (sums[t][2][r] + sums[t][3][r]);
    }
  }
}

}  // namespace

void linear_portable(const LinearCall& call) {
  const bool blocky = is_quantized(call.dtype);
  const PackedFormat format = packed_format(call.dtype);
  const int blocks = call.cols / kBlock;
  const int cols = padded_cols(call.cols);
  const std::size_t panel_size =
      blocky ? panel_bytes(format, blocks)
             : static_cast<std::size_t>(cols) * kRows * dtype_info(call.dtype).bytes;
  const std::size_t token_size = static_cast<std::size_t>(blocky ? blocks * kActRecord : cols * 4);
  for (int row = call.row_begin; row < call.row_end; row += kRows) {
    const Byte* panel = call.weight + static_cast<std::size_t>(row / kRows) * panel_size;
    const int rows = std::min(kRows, call.row_end - row);
    for (int token = 0; token < call.tokens; token += kTileTokens) {
      const int n = std::min(kTileTokens, call.tokens - token);
      const int width = std::min(kTileTokens, call.tokens);
      const Byte* x = call.activations + static_cast<std::size_t>(token) * token_size;
      float acc[kTileTokens][kRows] = {};
      if (blocky) {
        block_tile(format, panel, x, width, n, blocks, acc);
      } else {
        float_tile(call.dtype, panel, reinterpret_cast<const float*>(x), width, n, cols, acc);
      }
      for (int t = 0; t < n; ++t) {
        float* y = call.y + (token + t) * call.ldy + row;
        for (int r = 0; r < rows; ++r) y[r] = call.accumulate ? y[r] + acc[t][r] : acc[t][r];
      }
    }
  }
}

}  // namespace pianola::cpu
