// Packed weights against the host's decoding of the same bytes. Values are exact in every form: the
// product of a scale and a code has at most 23 bits, so the host rounds once (where a minimum is
// added) and so do we.
#include "backends/cuda/kernels/repack.h"

#include <cmath>
#include <cstdio>
#include <random>

#include "cuda/cuda_fixture.h"
#include "tensor/half.h"
#include "tensor/quant_format.h"

namespace pianola::cuda {
namespace {

constexpr DType kBlockTypes[] = {DType::kQ4_0, DType::kQ4_1, DType::kQ5_0, DType::kQ5_1,
                                 DType::kQ8_0, DType::kQ4_K, DType::kQ5_K, DType::kQ6_K};
constexpr DType kPlainTypes[] = {DType::kF32, DType::kF16, DType::kBF16};

// Any finite half; those of q4_0 so that eight times as much is one, too.
std::uint16_t random_half(std::mt19937& random, DType dtype) {
  while (true) {
    const auto bits = static_cast<std::uint16_t>(random());
    const float value = f16_to_f32(bits);
    if (!std::isfinite(value)) continue;
    if (dtype == DType::kQ4_0 && std::fabs(value) > 8188) continue;
    return bits;
  }
}

// Bytes of a file: [rows, row_bytes]. Every code and sub-scale occurs.
std::vector<std::byte> random_source(DType dtype, int rows, int cols, std::mt19937& random) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(rows) *
                               row_bytes(dtype, static_cast<std::size_t>(cols)));
  for (std::byte& b : bytes) b = static_cast<std::byte>(random());
  const auto put_half = [&](std::size_t at) {
    const std::uint16_t half = random_half(random, dtype);
    std::memcpy(bytes.data() + at, &half, 2);
  };
  if (dtype == DType::kF32) {
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < bytes.size(); i += 4) {
      const float v = normal(random);
      std::memcpy(bytes.data() + i, &v, 4);
    }
  } else if (dtype == DType::kF16) {
    for (std::size_t i = 0; i < bytes.size(); i += 2) put_half(i);
  } else if (dtype == DType::kBF16) {
    for (std::size_t i = 0; i < bytes.size(); i += 2) {
      const std::uint16_t v = f32_to_bf16(f16_to_f32(random_half(random, dtype)));
      std::memcpy(bytes.data() + i, &v, 2);
    }
  } else {
    for (std::size_t i = 0; i < bytes.size(); i += dtype_info(dtype).bytes) {
      const bool has_minimum = dtype == DType::kQ4_1 || dtype == DType::kQ5_1 ||
                               dtype == DType::kQ4_K || dtype == DType::kQ5_K;
      put_half(dtype == DType::kQ6_K ? i + 208 : i);
      if (has_minimum) put_half(i + 2);
    }
  }
  return bytes;
}

std::vector<float> decode(DType dtype, const std::vector<std::byte>& source, int rows, int cols) {
  const auto width = static_cast<std::size_t>(cols);
  std::vector<float> values(static_cast<std::size_t>(rows) * width);
  for (std::size_t r = 0; r < static_cast<std::size_t>(rows); ++r) {
    dequantize_row(dtype, source.data() + r * row_bytes(dtype, width), values.data() + r * width,
                   width);
  }
  return values;
}

template <typename T>
T load(const std::byte* p) {
  T value;
  std::memcpy(&value, p, sizeof(T));
  return value;
}

// Column `col` of a row, padding included, read as packed_weight.h says.
float packed_value(Codes codes, Scales scales, const std::byte* row_codes,
                   const std::byte* row_scales, int col) {
  const int block = col / 32;
  const int in_block = col % 32;
  const int t = in_block % 16 / 4;
  const int j = in_block % 4 + in_block / 16 * 4;
  int code;
  if (codes == Codes::kInt4) {
    const auto word = load<std::uint32_t>(row_codes + block / 4 * 64 + t * 16 + block % 4 * 4);
    code = static_cast<int>(word >> (4 * (j / 2 + 4 * (j % 2))) & 0xF);
  } else {
    code = load<std::int8_t>(row_codes + block / 2 * 64 + t * 16 + block % 2 * 8 + j);
  }
  switch (scales) {
    case Scales::kHalfPair:
      return f16_to_f32(load<std::uint16_t>(row_scales + block * 4)) * static_cast<float>(code) +
             f16_to_f32(load<std::uint16_t>(row_scales + block * 4 + 2));
    case Scales::kFloatPair:
      return load<float>(row_scales + block * 8) * static_cast<float>(code) +
             load<float>(row_scales + block * 8 + 4);
    default:
      return load<float>(row_scales + block * 8 + in_block / 16 * 4) * static_cast<float>(code);
  }
}

std::vector<int> widths(DType dtype) {
  if (dtype_info(dtype).elements == 256) return {256, 512, 768, 1280};
  return {32, 64, 96, 128, 160, 256, 576};
}

// A matrix of a block type on the device, from a source at an odd address.
struct Packed {
  DeviceArray<std::byte> memory;
  PackedWeight weight;
};

Packed pack(DType dtype, const std::vector<std::byte>& source, int rows, int cols) {
  Packed p;
  p.weight.rows = rows;
  p.weight.cols = cols;
  EXPECT_TRUE(packed_form(dtype, p.weight.codes, p.weight.scales));
  p.memory = DeviceArray<std::byte>(packed_bytes(p.weight.codes, p.weight.scales, rows, cols));
  p.weight.data = p.memory.data();
  if (!is_quantized(dtype)) {
    p.memory.write(source);
    return p;
  }
  p.weight.scale_data = p.memory.data() + scale_offset(p.weight.codes, rows, cols);
  DeviceArray<std::byte> file(source.size() + 1);
  check(cudaMemcpy(file.data() + 1, source.data(), source.size(), cudaMemcpyHostToDevice), "file");
  repack(dtype, rows, cols, file.data() + 1, p.memory.data(), test_launch());
  check(cudaDeviceSynchronize(), "repack");
  return p;
}

TEST(Repack, SmallBlockTypesKeepTheirValues) {
  std::mt19937 random(1);
  constexpr int kRows = 5;
  for (const DType dtype : kBlockTypes) {
    for (const int cols : widths(dtype)) {
      SCOPED_TRACE(std::string(dtype_name(dtype)) + " cols " + std::to_string(cols));
      const auto source = random_source(dtype, kRows, cols, random);
      const auto want = decode(dtype, source, kRows, cols);
      const Packed p = pack(dtype, source, kRows, cols);
      const auto memory = p.memory.read();
      ASSERT_TRUE(p.memory.intact());
      const Codes codes = p.weight.codes;
      const Scales scales = p.weight.scales;
      const std::size_t code_stride = code_row_bytes(codes, cols);
      const std::size_t scale_stride = scale_row_bytes(scales, codes, cols);
      for (int r = 0; r < kRows; ++r) {
        const auto row = static_cast<std::size_t>(r);
        const std::byte* row_codes = memory.data() + row * code_stride;
        const std::byte* row_scales =
            memory.data() + scale_offset(codes, kRows, cols) + row * scale_stride;
        for (int c = 0; c < padded_cols(codes, cols); ++c) {
          const float value = packed_value(codes, scales, row_codes, row_scales, c);
          const float expected =
              c < cols ? want[row * static_cast<std::size_t>(cols) + static_cast<std::size_t>(c)]
                       : 0.0F;
          ASSERT_EQ(value, expected) << "row " << r << " col " << c;
        }
        // Padding: codes and scales of 0, to the end of the row of scales.
        const std::size_t blocks = static_cast<std::size_t>(cols) / 32;
        const std::size_t block_bytes = scales == Scales::kHalfPair ? 4 : 8;
        for (std::size_t i = blocks * block_bytes; i < scale_stride; ++i) {
          ASSERT_EQ(row_scales[i], std::byte{0}) << "row " << r << " scale byte " << i;
        }
      }
    }
  }
}

TEST(Repack, SmallUnpackRoundsToNearest) {
  std::mt19937 random(2);
  constexpr int kRows = 37;
  const auto compare = [&](DType dtype, int cols) {
    SCOPED_TRACE(std::string(dtype_name(dtype)) + " cols " + std::to_string(cols));
    const auto source = random_source(dtype, kRows, cols, random);
    const auto want = decode(dtype, source, kRows, cols);
    const Packed p = pack(dtype, source, kRows, cols);
    const auto width = static_cast<std::size_t>(cols);
    for (const auto& [first, rows] : {std::pair{0, kRows}, {0, 1}, {5, 20}, {kRows - 1, 1}}) {
      DeviceArray<std::uint16_t> out(static_cast<std::size_t>(rows) * width);
      unpack_bf16(p.weight, first, rows, out.data(), test_launch());
      const auto got = out.read();
      ASSERT_TRUE(out.intact());
      for (std::size_t i = 0; i < got.size(); ++i) {
        const float exact = want[static_cast<std::size_t>(first) * width + i];
        // Values, not bits: a zero may lose its sign.
        ASSERT_EQ(bf16_to_f32(got[i]), bf16_to_f32(f32_to_bf16(exact)))
            << "from row " << first << ": row " << i / width << " col " << i % width;
      }
    }
  };
  for (const DType dtype : kBlockTypes) {
    for (const int cols : widths(dtype)) compare(dtype, cols);
  }
  for (const DType dtype : kPlainTypes) {
    for (const int cols : {1, 7, 8, 33, 64, 1000, 2056}) compare(dtype, cols);
  }
}

TEST(Repack, FormsOfEveryType) {
  Codes codes;
  Scales scales;
  for (const DType dtype : kPlainTypes) {
    ASSERT_TRUE(packed_form(dtype, codes, scales));
    EXPECT_EQ(scales, Scales::kNone);
    EXPECT_EQ(packed_bytes(codes, scales, 3, 10), 3 * row_bytes(dtype, 10));
  }
  EXPECT_FALSE(packed_form(DType::kI64, codes, scales));
  // Two rows of 160 columns: two groups of 128; codes 128 bytes a row, scales 8 blocks of 4.
  EXPECT_EQ(packed_bytes(Codes::kInt4, Scales::kHalfPair, 2, 160), 256U + 2 * 32);
  EXPECT_EQ(packed_bytes(Codes::kInt8, Scales::kHalfPair, 2, 64), 256U + 2 * 16);
}

// --- timing ---

TEST(RepackTiming, Unpack) {
  std::mt19937 random(3);
  constexpr int kRows = 14336;
  constexpr int kCols = 4096;
  DeviceArray<std::uint16_t> out(static_cast<std::size_t>(kRows) * kCols);
  cudaEvent_t begin;
  cudaEvent_t end;
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  for (const DType dtype : {DType::kQ4_0, DType::kQ4_K, DType::kQ8_0, DType::kQ6_K, DType::kF16}) {
    const Packed p = pack(dtype, random_source(dtype, kRows, kCols, random), kRows, kCols);
    constexpr int kTimes = 10;
    float ms = 0;
    for (int pass = 0; pass < 2; ++pass) {  // the first one warms up
      check(cudaEventRecord(begin, nullptr), "record");
      for (int i = 0; i < kTimes; ++i) unpack_bf16(p.weight, 0, kRows, out.data(), test_launch());
      check(cudaEventRecord(end, nullptr), "record");
      check(cudaEventSynchronize(end), "unpack");
      check(cudaEventElapsedTime(&ms, begin, end), "time");
    }
    const double bytes = static_cast<double>(p.memory.bytes() + out.bytes()) * kTimes;
    std::printf("unpack %s [%d, %d]: %.1f us, %.0f GB/s\n", dtype_name(dtype), kRows, kCols,
                1e3 * ms / kTimes, bytes / ms / 1e6);
  }
  check(cudaEventDestroy(begin), "event");
  check(cudaEventDestroy(end), "event");
}

}  // namespace
}  // namespace pianola::cuda
