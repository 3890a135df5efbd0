// Loading: from the bytes of a GGUF file to planes of codes and scales, and from planes to
// bfloat16. Both are bound by memory; the layouts are in packed_weight.h and quant_format.h.
#include "backends/cuda/kernels/repack.h"

#include <algorithm>
#include <string>

#include "backends/cuda/kernels/unpack.cuh"
#include "pianola/error.h"

namespace pianola::cuda {
namespace {

using Byte = unsigned char;

constexpr int kThreads = 256;

// Blocks lie at any address: bytes only.
__device__ __forceinline__ std::uint32_t load_u16(const Byte* p) { return p[0] | p[1] << 8; }
__device__ __forceinline__ float half_value(std::uint32_t bits) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}

// 32 columns on their way.
struct Block {
  int code[32];
  std::uint32_t half_d = 0;  // bits, for kHalfPair
  std::uint32_t half_m = 0;
  float d[2] = {0, 0};  // kFloatPair: d, m; kFloat16: one for each 16 columns
};

__device__ __forceinline__ void read_nibbles(const Byte* p, Block& b) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    b.code[i] = p[i] & 0xF;
    b.code[i + 16] = p[i] >> 4;
  }
}

__device__ __forceinline__ void read_fifth_bits(const Byte* p, Block& b) {
  const std::uint32_t bits = load_u16(p) | load_u16(p + 2) << 16;
#pragma unroll
  for (int i = 0; i < 32; ++i) b.code[i] |= (bits >> i & 1) << 4;
}

// Scale and minimum of sub-block j from the 12 bytes of q4_k and q5_k.
__device__ __forceinline__ void read_k_scales(const Byte* block, int j, Block& b) {
  const float d = half_value(load_u16(block));
  const float m = half_value(load_u16(block + 2));
  const Byte* packed = block + 4;
  int scale;
  int min;
  if (j < 4) {
    scale = packed[j] & 0x3F;
    min = packed[j + 4] & 0x3F;
  } else {
    scale = (packed[j + 4] & 0xF) | (packed[j - 4] >> 6) << 4;
    min = packed[j + 4] >> 4 | (packed[j] >> 6) << 4;
  }
  b.d[0] = d * static_cast<float>(scale);
  b.d[1] = -(m * static_cast<float>(min));
}

// Block `index` of 32 columns of a row that starts at `row`.
template <DType kType>
__device__ __forceinline__ void read_block(const Byte* row, int index, Block& b) {
  if constexpr (kType == DType::kQ4_0) {
    const Byte* p = row + static_cast<std::size_t>(index) * 18;
    read_nibbles(p + 2, b);
    b.half_d = load_u16(p);
    // Exact, but for |d| > 8188, whose weights (from 65,504 up) become infinite and fail the row.
    b.half_m = __half_as_ushort(__float2half_rn(-8 * half_value(b.half_d)));
  } else if constexpr (kType == DType::kQ4_1) {
    const Byte* p = row + static_cast<std::size_t>(index) * 20;
    read_nibbles(p + 4, b);
    b.half_d = load_u16(p);
    b.half_m = load_u16(p + 2);
  } else if constexpr (kType == DType::kQ5_0) {
    const Byte* p = row + static_cast<std::size_t>(index) * 22;
    read_nibbles(p + 6, b);
    read_fifth_bits(p + 2, b);
#pragma unroll
    for (int i = 0; i < 32; ++i) b.code[i] -= 16;
    b.half_d = load_u16(p);
  } else if constexpr (kType == DType::kQ5_1) {
    const Byte* p = row + static_cast<std::size_t>(index) * 24;
    read_nibbles(p + 8, b);
    read_fifth_bits(p + 4, b);
    b.half_d = load_u16(p);
    b.half_m = load_u16(p + 2);
  } else if constexpr (kType == DType::kQ8_0) {
    const Byte* p = row + static_cast<std::size_t>(index) * 34;
#pragma unroll
    for (int i = 0; i < 32; ++i) b.code[i] = static_cast<std::int8_t>(p[2 + i]);
    b.half_d = load_u16(p);
  } else if constexpr (kType == DType::kQ4_K) {
    const Byte* p = row + static_cast<std::size_t>(index / 8) * 144;
    const int j = index % 8;
    const Byte* q = p + 16 + 32 * (j / 2);
#pragma unroll
    for (int i = 0; i < 32; ++i) b.code[i] = q[i] >> (4 * (j % 2)) & 0xF;
    read_k_scales(p, j, b);
  } else if constexpr (kType == DType::kQ5_K) {
    const Byte* p = row + static_cast<std::size_t>(index / 8) * 176;
    const int j = index % 8;
    const Byte* q = p + 48 + 32 * (j / 2);
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      b.code[i] = (q[i] >> (4 * (j % 2)) & 0xF) | (p[16 + i] >> j & 1) << 4;
    }
    read_k_scales(p, j, b);
  } else {
    static_assert(kType == DType::kQ6_K);
    const Byte* p = row + static_cast<std::size_t>(index / 8) * 210;
    const int run = index % 8 / 4;
    const int quarter = index % 4;
    const Byte* low = p + 64 * run + 32 * (quarter % 2);
    const Byte* high = p + 128 + 32 * run;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      b.code[i] =
          ((low[i] >> (4 * (quarter / 2)) & 0xF) | (high[i] >> (2 * quarter) & 3) << 4) - 32;
    }
    const float d = half_value(load_u16(p + 208));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      b.d[i] = d * static_cast<float>(static_cast<std::int8_t>(p[192 + 2 * (index % 8) + i]));
    }
  }
}

struct RepackArgs {
  const Byte* source = nullptr;  // [rows, source_stride bytes]
  std::byte* codes = nullptr;    // [rows, code_stride bytes]
  std::byte* scales = nullptr;   // [rows, scale_stride bytes]
  std::size_t source_stride = 0;
  std::size_t code_stride = 0;
  std::size_t scale_stride = 0;
  int rows = 0;
  int blocks = 0;        // in a row of the source
  int scale_blocks = 0;  // that a row of scales has room for: the padded ones and more
};

// Column j of the order in which lane t holds a block.
__device__ __forceinline__ constexpr int lane_column(int t, int j) {
  return j < 4 ? 4 * t + j : 12 + 4 * t + j;
}

// One thread a block of 32 columns, those of the padding included.
template <DType kType, Codes kCodes, Scales kScales>
__global__ void __launch_bounds__(kThreads) repack_kernel(RepackArgs args) {
  allow_next();
  wait_for_previous();
  const long long item = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x;
  const int row = static_cast<int>(item / args.scale_blocks);
  const int index = static_cast<int>(item % args.scale_blocks);
  if (row >= args.rows) return;
  Block b;
#pragma unroll
  for (int i = 0; i < 32; ++i) b.code[i] = 0;
  if (index < args.blocks) {
    read_block<kType>(args.source + static_cast<std::size_t>(row) * args.source_stride, index, b);
  }

  constexpr int kBlocks = kCodes == Codes::kInt4 ? 4 : 2;  // in a group
  const std::size_t group = static_cast<std::size_t>(index / kBlocks) * 64;
  if (group < args.code_stride) {
    std::byte* codes = args.codes + static_cast<std::size_t>(row) * args.code_stride + group;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      std::uint32_t word[2] = {0, 0};
      if constexpr (kCodes == Codes::kInt4) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          word[0] |= static_cast<std::uint32_t>(b.code[lane_column(t, j)])
                     << (4 * (j / 2 + 4 * (j % 2)));
        }
        reinterpret_cast<std::uint32_t*>(codes)[t * 4 + index % 4] = word[0];
      } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          word[j / 4] |= static_cast<std::uint32_t>(b.code[lane_column(t, j)] & 0xFF)
                         << (8 * (j % 4));
        }
        reinterpret_cast<uint2*>(codes)[t * 2 + index % 2] = make_uint2(word[0], word[1]);
      }
    }
  }
  std::byte* scales = args.scales + static_cast<std::size_t>(row) * args.scale_stride;
  if constexpr (kScales == Scales::kHalfPair) {
    reinterpret_cast<std::uint32_t*>(scales)[index] = b.half_d | b.half_m << 16;
  } else {
    reinterpret_cast<float2*>(scales)[index] = make_float2(b.d[0], b.d[1]);
  }
}

template <DType kType, Codes kCodes, Scales kScales>
void launch_repack(int rows, int cols, const std::byte* source, std::byte* destination,
                   const Launch& launch) {
  RepackArgs args;
  args.source = reinterpret_cast<const Byte*>(source);
  args.codes = destination;
  args.scales = destination + scale_offset(kCodes, rows, cols);
  args.source_stride = row_bytes(kType, static_cast<std::size_t>(cols));
  args.code_stride = code_row_bytes(kCodes, cols);
  args.scale_stride = scale_row_bytes(kScales, kCodes, cols);
  args.rows = rows;
  args.blocks = cols / 32;
  args.scale_blocks = static_cast<int>(args.scale_stride / (kScales == Scales::kHalfPair ? 4 : 8));
  const long long items = static_cast<long long>(rows) * args.scale_blocks;
  launch_kernel(launch, "repack", repack_kernel<kType, kCodes, kScales>,
                dim3(static_cast<unsigned>((items + kThreads - 1) / kThreads)), dim3(kThreads), 0,
                args);
}

// Rows on y, pieces of kCount columns on x.
template <Codes kCodes, Scales kScales, int kCount>
__global__ void __launch_bounds__(kThreads)
    unpack_kernel(PackedRows w, int first_row, int rows, std::uint16_t* out) {
  allow_next();
  wait_for_previous();
  const int col = (blockIdx.x * kThreads + threadIdx.x) * kCount;
  if (col >= w.cols) return;
  for (int row = blockIdx.y; row < rows; row += gridDim.y) {
    float value[kCount];
    unpack_values<kCodes, kScales>(w, first_row + row, col, value);
    std::uint16_t* to = out + static_cast<std::size_t>(row) * w.cols + col;
    if constexpr (kCount == 8) {
      *reinterpret_cast<uint4*>(to) =
          make_uint4(pack_bf16(value[0], value[1]), pack_bf16(value[2], value[3]),
                     pack_bf16(value[4], value[5]), pack_bf16(value[6], value[7]));
    } else {
      *to = __bfloat16_as_ushort(__float2bfloat16_rn(value[0]));
    }
  }
}

}  // namespace

void repack(DType dtype, int rows, int cols, const std::byte* source, std::byte* destination,
            const Launch& launch) {
  const auto run = [&](auto kernel) { kernel(rows, cols, source, destination, launch); };
  switch (dtype) {
    case DType::kQ4_0:
      return run(launch_repack<DType::kQ4_0, Codes::kInt4, Scales::kHalfPair>);
    case DType::kQ4_1:
      return run(launch_repack<DType::kQ4_1, Codes::kInt4, Scales::kHalfPair>);
    case DType::kQ5_0:
      return run(launch_repack<DType::kQ5_0, Codes::kInt8, Scales::kHalfPair>);
    case DType::kQ5_1:
      return run(launch_repack<DType::kQ5_1, Codes::kInt8, Scales::kHalfPair>);
    case DType::kQ8_0:
      return run(launch_repack<DType::kQ8_0, Codes::kInt8, Scales::kHalfPair>);
    case DType::kQ4_K:
      return run(launch_repack<DType::kQ4_K, Codes::kInt4, Scales::kFloatPair>);
    case DType::kQ5_K:
      return run(launch_repack<DType::kQ5_K, Codes::kInt8, Scales::kFloatPair>);
    case DType::kQ6_K:
      return run(launch_repack<DType::kQ6_K, Codes::kInt8, Scales::kFloat16>);
    default:
      throw Error(ErrorCode::kInternal,
                  std::string("repack: ") + dtype_name(dtype) + " is not a block type");
  }
}

void unpack_bf16(const PackedWeight& weight, int first_row, int rows, void* out,
                 const Launch& launch) {
  if (rows == 0) return;
  with_form(weight, [&](auto form) {
    using F = decltype(form);
    const int pieces = (weight.cols + F::kCount - 1) / F::kCount;
    const auto x = static_cast<unsigned>((pieces + kThreads - 1) / kThreads);
    // A few rows a thread once the device is full.
    const auto full = static_cast<unsigned>(std::max(1, launch.sms * 16)) / x + 1;
    const unsigned y = std::min({static_cast<unsigned>(rows), full, 65535U});
    launch_kernel(launch, "unpack_bf16", unpack_kernel<F::kCodes, F::kScales, F::kCount>,
                  dim3(x, y), dim3(kThreads), 0, packed_rows(weight), first_row, rows,
                  static_cast<std::uint16_t*>(out));
  });
}

}  // namespace pianola::cuda
