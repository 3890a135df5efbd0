// Packs rows as a file has them into the panels of packed_layout.h.
#include <algorithm>
#include <cstring>

#include "backends/cpu/kernels/linear.h"
#include "backends/cpu/kernels/packed_layout.h"
#include "base/check.h"
#include "tensor/half.h"
#include "tensor/quant_format.h"

namespace pianola::cpu {
namespace {

using Byte = std::uint8_t;

// One block of one row, taken apart: 32 unsigned values.
struct RowBlock {
  Byte q[kBlock];
};

void nibbles(const Byte* p, Byte* q) {
  for (int i = 0; i < 16; ++i) {
    q[i] = static_cast<Byte>(p[i] & 15);
    q[i + 16] = static_cast<Byte>(p[i] >> 4);
  }
}

void fifth_bits(const Byte* p, Byte* q) {
  for (int i = 0; i < kBlock; ++i)
    q[i] = static_cast<Byte>(q[i] | ((p[i / 8] >> (i % 8)) & 1) << 4);
}

// The packed place of one row in one block.
struct Slot {
  Byte* part;    // this block's part of the chunk header
  Byte* header;  // the chunk's header
  int row;       // 0..15
  int index;     // block in chunk
};

void put_half(Byte* base, int row, const Byte* half) { std::memcpy(base + 2 * row, half, 2); }

// The six bits of scale and minimum j of a Q4_K or Q5_K super-block.
void scale_and_min(const Byte* s, int j, Byte* scale, Byte* min) {
  if (j < 4) {
    *scale = static_cast<Byte>(s[j] & 63);
    *min = static_cast<Byte>(s[j + 4] & 63);
  } else {
    *scale = static_cast<Byte>((s[j + 4] & 15) | ((s[j - 4] >> 6) << 4));
    *min = static_cast<Byte>((s[j + 4] >> 4) | ((s[j] >> 6) << 4));
  }
}

// Takes block `j` of the chunk whose file bytes start at `source` apart, and stores its scales.
void read_block(DType dtype, const Byte* source, const Slot& slot, RowBlock& out) {
  const int j = slot.index;
  const Byte* block = source + static_cast<std::size_t>(j) * dtype_info(dtype).bytes;
  switch (dtype) {
    case DType::kQ4_0:
      put_half(slot.part, slot.row, block);
      nibbles(block + 2, out.q);
      return;
    case DType::kQ4_1:
      put_half(slot.part, slot.row, block);
      put_half(slot.part + 32, slot.row, block + 2);
      nibbles(block + 4, out.q);
      return;
    case DType::kQ5_0:
      put_half(slot.part, slot.row, block);
      nibbles(block + 6, out.q);
      fifth_bits(block + 2, out.q);
      return;
    case DType::kQ5_1:
      put_half(slot.part, slot.row, block);
      put_half(slot.part + 32, slot.row, block + 2);
      nibbles(block + 8, out.q);
      fifth_bits(block + 4, out.q);
      return;
    case DType::kQ8_0:
      put_half(slot.part, slot.row, block);
      for (int i = 0; i < kBlock; ++i) out.q[i] = static_cast<Byte>(block[2 + i] ^ 0x80);
      return;
    case DType::kQ4_K:
    case DType::kQ5_K: {
      put_half(slot.header, slot.row, source);
      put_half(slot.header + 32, slot.row, source + 2);
      scale_and_min(source + 4, j, slot.part + slot.row, slot.part + 16 + slot.row);
      const bool five = dtype == DType::kQ5_K;
      const Byte* quants = source + (five ? 48 : 16) + j / 2 * 32;
      const Byte* high = source + 16;
      for (int i = 0; i < kBlock; ++i) {
        out.q[i] = static_cast<Byte>(j % 2 == 0 ? quants[i] & 15 : quants[i] >> 4);
        if (five) out.q[i] = static_cast<Byte>(out.q[i] | ((high[i] >> j) & 1) << 4);
      }
      return;
    }
    case DType::kQ6_K: {
      put_half(slot.header, slot.row, source + 208);
      slot.part[slot.row] = source[192 + 2 * j];
      slot.part[16 + slot.row] = source[192 + 2 * j + 1];
      const int half = j / 4;   // 128 values: 64 bytes of low bits, 32 of high bits
      const int group = j % 4;  // 32 values
      const Byte* low = source + 64 * half + 32 * (group % 2);
      const Byte* high = source + 128 + 32 * half;
      for (int i = 0; i < kBlock; ++i) {
        const int nibble = group < 2 ? low[i] & 15 : low[i] >> 4;
        out.q[i] = static_cast<Byte>(nibble | ((high[i] >> (2 * group)) & 3) << 4);
      }
      return;
    }
    default:
      return;
  }
}

// Scatters one row's values into the words of a block.
void store_block(const PackedFormat& format, const RowBlock& in, int row, Byte* quants) {
  if (format.bits == 8) {
    for (int w = 0; w < 8; ++w) std::memcpy(quants + 64 * w + 4 * row, in.q + 4 * w, 4);
    return;
  }
  if (format.bits == 5) {
    for (int i = 0; i < 4; ++i) {
      int plane = 0;
      for (int w = 0; w < 8; ++w) plane |= (in.q[4 * w + i] >> 4) << w;
      quants[4 * row + i] = static_cast<Byte>(plane);
    }
    quants += 64;
  }
  if (format.bits == 6) {
    for (int p = 0; p < 2; ++p) {
      for (int i = 0; i < 4; ++i) {
        int plane = 0;
        for (int w = 0; w < 4; ++w) plane |= (in.q[16 * p + 4 * w + i] >> 4) << (2 * w);
        quants[64 * p + 4 * row + i] = static_cast<Byte>(plane);
      }
    }
    quants += 128;
  }
  for (int w = 0; w < 4; ++w) {
    for (int i = 0; i < 4; ++i) {
      quants[64 * w + 4 * row + i] =
          static_cast<Byte>((in.q[4 * w + i] & 15) | (in.q[4 * (w + 4) + i] & 15) << 4);
    }
  }
}

// Rows past `rows` are left as zeros, whose results nobody reads.
void pack_block_panel(DType dtype, const Byte* source, int rows, int cols, Byte* panel) {
  const PackedFormat format = packed_format(dtype);
  const int blocks = cols / kBlock;
  const std::size_t stride = row_bytes(dtype, static_cast<std::size_t>(cols));
  const std::size_t chunk_bytes =
      row_bytes(dtype, std::max<std::size_t>(dtype_info(dtype).elements, kBlock * kChunkBlocks));
  if (rows < kPanelRows) std::memset(panel, 0, panel_bytes(format, blocks));
  for (int chunk = 0; chunk * kChunkBlocks < blocks; ++chunk) {
    const int n = std::min(kChunkBlocks, blocks - chunk * kChunkBlocks);
    const int header_bytes = chunk_header_bytes(format, n);
    std::memset(panel, 0, static_cast<std::size_t>(header_bytes));
    for (int row = 0; row < rows; ++row) {
      const Byte* in = source + static_cast<std::size_t>(row) * stride +
                       static_cast<std::size_t>(chunk) * chunk_bytes;
      for (int j = 0; j < n; ++j) {
        RowBlock block;
        const Slot slot{panel + format.header + j * format.header_per_block, panel, row, j};
        read_block(dtype, in, slot, block);
        store_block(format, block, row, panel + header_bytes + j * format.quants);
      }
    }
    panel += header_bytes + n * format.quants;
  }
}

// `size` is that of an element; `pairs` interleaves two k for each row.
void pack_float_panel(const Byte* source, std::size_t size, int rows, int cols, bool pairs,
                      Byte* panel) {
  const std::size_t wide = static_cast<std::size_t>(cols);
  std::memset(panel, 0, size * static_cast<std::size_t>(padded_cols(cols)) * kPanelRows);
  for (std::size_t k = 0; k < wide; ++k) {
    for (std::size_t row = 0; row < static_cast<std::size_t>(rows); ++row) {
      const std::size_t at = pairs ? (k / 2 * kPanelRows + row) * 2 + k % 2 : k * kPanelRows + row;
      std::memcpy(panel + at * size, source + (row * wide + k) * size, size);
    }
  }
}

// Value k of row `row` in a block's quants, unsigned: what store_block() put there.
int load_value(const PackedFormat& format, const Byte* quants, int row, int k) {
  const int w = k / 4;
  const int at = 4 * row + k % 4;
  if (format.bits == 8) return quants[64 * w + at];
  int high = 0;
  if (format.bits == 5) {
    high = (quants[at] >> w) & 1;
    quants += 64;
  } else if (format.bits == 6) {
    high = (quants[64 * (w / 4) + at] >> (2 * (w % 4))) & 3;
    quants += 128;
  }
  return ((quants[64 * (w % 4) + at] >> (4 * (w / 4))) & 15) | high << 4;
}

float load_half(const Byte* base, int row) {
  std::uint16_t bits;
  std::memcpy(&bits, base + 2 * row, 2);
  return f16_to_f32(bits);
}

void unpack_block_row(DType dtype, const Byte* panel, int row, int cols, float* out) {
  const PackedFormat format = packed_format(dtype);
  const int zero = 1 << format.bias_shift;
  for (int blocks = cols / kBlock; blocks > 0; blocks -= kChunkBlocks) {
    const int n = std::min(kChunkBlocks, blocks);
    const Byte* quants = panel + chunk_header_bytes(format, n);
    for (int j = 0; j < n; ++j, quants += format.quants, out += kBlock) {
      const Byte* part = panel + format.header + j * format.header_per_block;
      float scale[2];
      if (format.halves) {
        const float d = load_half(panel, row);
        for (int half = 0; half < 2; ++half)
          scale[half] = d * static_cast<float>(static_cast<std::int8_t>(part[16 * half + row]));
      } else {
        scale[0] = scale[1] = load_half(part, row);
      }
      for (int k = 0; k < kBlock; ++k)
        out[k] = scale[k / 16] * static_cast<float>(load_value(format, quants, row, k) - zero);
    }
    panel = quants;
  }
}

void unpack_float_row(DType dtype, const Byte* panel, int row, int cols, float* out) {
  const std::size_t size = dtype_info(dtype).bytes;
  const bool pairs = dtype == DType::kBF16;
  Byte values[kBlock * sizeof(float)];
  for (int begin = 0; begin < cols; begin += kBlock) {
    const int n = std::min(kBlock, cols - begin);
    for (int i = 0; i < n; ++i) {
      const int k = begin + i;
      const int at = pairs ? (k / 2 * kPanelRows + row) * 2 + k % 2 : k * kPanelRows + row;
      std::memcpy(values + static_cast<std::size_t>(i) * size,
                  panel + static_cast<std::size_t>(at) * size, size);
    }
    dequantize_row(dtype, values, out + begin, static_cast<std::size_t>(n));
  }
}

std::size_t one_panel_bytes(DType dtype, std::int64_t cols) {
  if (is_quantized(dtype))
    return panel_bytes(packed_format(dtype), static_cast<int>(cols) / kBlock);
  return static_cast<std::size_t>(padded_cols(static_cast<int>(cols))) * kPanelRows *
         dtype_info(dtype).bytes;
}

}  // namespace

bool linear_supported(DType dtype, std::int64_t rows, std::int64_t cols) {
  if (dtype == DType::kI32 || dtype == DType::kI64) return false;
  constexpr std::int64_t kMost = (std::int64_t{1} << 31) - 64;
  return rows >= 1 && cols >= 1 && rows <= kMost && cols <= kMost &&
         cols % dtype_info(dtype).elements == 0;
}

std::size_t packed_bytes(DType dtype, std::int64_t rows, std::int64_t cols) {
  return static_cast<std::size_t>((rows + kPanelRows - 1) / kPanelRows) *
         one_panel_bytes(dtype, cols);
}

void pack_rows(DType dtype, const void* source, std::int64_t rows, std::int64_t cols, void* packed,
               std::int64_t row_begin, std::int64_t row_end) {
  PIANOLA_CHECK(linear_supported(dtype, rows, cols), "cannot pack {} [{}, {}]", dtype_name(dtype),
                rows, cols);
  PIANOLA_CHECK(row_begin % kPanelRows == 0 && (row_end % kPanelRows == 0 || row_end == rows) &&
                    row_begin >= 0 && row_end <= rows,
                "rows {} to {} of {} are not whole panels", row_begin, row_end, rows);
  const std::size_t stride = row_bytes(dtype, static_cast<std::size_t>(cols));
  const std::size_t panel_size = one_panel_bytes(dtype, cols);
  const int width = static_cast<int>(cols);
  for (std::int64_t row = row_begin; row < row_end; row += kPanelRows) {
    const Byte* in = static_cast<const Byte*>(source) + static_cast<std::size_t>(row) * stride;
    Byte* panel =
        static_cast<Byte*>(packed) + static_cast<std::size_t>(row / kPanelRows) * panel_size;
    const int n = static_cast<int>(std::min<std::int64_t>(kPanelRows, rows - row));
    if (!is_quantized(dtype)) {
      pack_float_panel(in, dtype_info(dtype).bytes, n, width, dtype == DType::kBF16, panel);
    } else {
      pack_block_panel(dtype, in, n, width, panel);
    }
  }
}

bool unpack_supported(DType dtype) {
  return linear_supported(dtype, 1, dtype_info(dtype).elements) &&
         (!is_quantized(dtype) || !packed_format(dtype).has_min);
}

void unpack_row(DType dtype, const void* packed, std::int64_t cols, std::int64_t row, float* out) {
  PIANOLA_CHECK(unpack_supported(dtype), "cannot unpack {}", dtype_name(dtype));
  const Byte* panel = static_cast<const Byte*>(packed) +
                      static_cast<std::size_t>(row / kPanelRows) * one_panel_bytes(dtype, cols);
  const int in_panel = static_cast<int>(row % kPanelRows);
  if (is_quantized(dtype)) {
    unpack_block_row(dtype, panel, in_panel, static_cast<int>(cols), out);
  } else {
    unpack_float_row(dtype, panel, in_panel, static_cast<int>(cols), out);
  }
}

}  // namespace pianola::cpu
