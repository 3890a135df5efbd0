#include "tensor/quant_format.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "pianola/error.h"
#include "tensor/half.h"

namespace pianola {
namespace {

using Bytes = std::vector<unsigned char>;

struct Record {
  DType dtype;
  bool decode;
  std::vector<float> floats;
  Bytes bytes;
};

// See tools/golden/quant_format_golden.py for the file.
std::vector<Record> read_golden() {
  std::ifstream in(PIANOLA_SOURCE_DIR "/tests/unit/tensor/golden/quant_format.bin",
                   std::ios::binary);
  const std::string data{std::istreambuf_iterator<char>(in), {}};
  std::vector<Record> records;
  std::size_t at = 0;
  while (at < data.size()) {
    std::uint32_t head[3];
    std::memcpy(head, data.data() + at + 8, sizeof head);
    Record r{parse_dtype(std::string(data.c_str() + at, strnlen(data.c_str() + at, 8))).value(),
             head[0] == 1, std::vector<float>(head[1]), Bytes(head[2])};
    at += 20;
    std::memcpy(r.floats.data(), data.data() + at, 4 * r.floats.size());
    at += 4 * r.floats.size();
    std::memcpy(r.bytes.data(), data.data() + at, r.bytes.size());
    at += r.bytes.size();
    records.push_back(std::move(r));
  }
  return records;
}

TEST(QuantFormat, DecodesBitForBitAsTheGgufPackage) {
  int types = 0;
  for (const Record& r : read_golden()) {
    if (!r.decode) continue;
    ++types;
    std::vector<float> out(r.floats.size());
    dequantize_row(r.dtype, r.bytes.data(), out.data(), out.size());
    for (std::size_t i = 0; i < out.size(); ++i) {
      ASSERT_EQ(std::bit_cast<std::uint32_t>(out[i]), std::bit_cast<std::uint32_t>(r.floats[i]))
          << dtype_name(r.dtype) << " value " << i << ": " << out[i] << " for " << r.floats[i];
    }
  }
  EXPECT_EQ(types, 10);
}

TEST(QuantFormat, EncodesByteForByteAsTheGgufPackage) {
  int types = 0;
  for (const Record& r : read_golden()) {
    if (r.decode) continue;
    ++types;
    Bytes out(r.bytes.size());
    quantize_row(r.dtype, r.floats.data(), out.data(), r.floats.size());
    EXPECT_EQ(out, r.bytes) << dtype_name(r.dtype);
  }
  EXPECT_EQ(types, 7);
}

TEST(QuantFormat, ReadsRowsAtAnyAddress) {
  for (const Record& r : read_golden()) {
    Bytes shifted(r.bytes.size() + 1);
    std::memcpy(shifted.data() + 1, r.bytes.data(), r.bytes.size());
    std::vector<float> a(r.floats.size());
    std::vector<float> b(r.floats.size());
    dequantize_row(r.dtype, r.bytes.data(), a.data(), a.size());
    dequantize_row(r.dtype, shifted.data() + 1, b.data(), b.size());
    EXPECT_EQ(std::memcmp(a.data(), b.data(), 4 * a.size()), 0) << dtype_name(r.dtype);
  }
}

// The largest error of a code, relative to the spread of the values it covers: half a step, and
// what rounding the scales adds.
TEST(QuantFormat, RoundTripStaysWithinAStep) {
  const struct {
    DType dtype;
    double steps;
    std::size_t block;
  } cases[] = {{DType::kQ4_0, 8, 32},   {DType::kQ4_1, 15, 32},  {DType::kQ5_0, 16, 32},
               {DType::kQ5_1, 31, 32},  {DType::kQ8_0, 127, 32}, {DType::kQ4_K, 15, 256},
               {DType::kQ5_K, 31, 256}, {DType::kQ6_K, 32, 256}};
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0.0F, 0.02F);
  std::vector<float> x(4096);
  for (float& v : x) v = normal(random);
  for (const auto& c : cases) {
    Bytes packed(row_bytes(c.dtype, x.size()));
    std::vector<float> y(x.size());
    quantize_row(c.dtype, x.data(), packed.data(), x.size());
    dequantize_row(c.dtype, packed.data(), y.data(), y.size());
    for (std::size_t at = 0; at < x.size(); at += c.block) {
      double low = 0;
      double high = 0;
      for (std::size_t i = at; i < at + c.block; ++i) {
        low = std::min(low, static_cast<double>(x[i]));
        high = std::max(high, static_cast<double>(x[i]));
      }
      for (std::size_t i = at; i < at + c.block; ++i) {
        ASSERT_LE(std::fabs(x[i] - y[i]), 1.05 * (high - low) / c.steps)
            << dtype_name(c.dtype) << " value " << i;
      }
    }
  }
}

TEST(QuantFormat, EncodesExtremeInputWithoutUndefinedBehaviour) {
  for (int t = 0; t <= static_cast<int>(DType::kQ6_K); ++t) {
    const auto dtype = static_cast<DType>(t);
    for (const float v : {3e38F, 1e-45F, 1e-38F, 0.0F}) {
      std::vector<float> x(256, v);
      x[3] = -v;
      Bytes packed(row_bytes(dtype, x.size()));
      quantize_row(dtype, x.data(), packed.data(), x.size());
    }
  }
}

TEST(QuantFormat, RefusesPartBlocksAndIntegers) {
  float x[33] = {};
  Bytes bytes(400);
  EXPECT_THROW(dequantize_row(DType::kQ8_0, bytes.data(), x, 33), Error);
  EXPECT_THROW(dequantize_row(DType::kI32, bytes.data(), x, 32), Error);
  EXPECT_THROW(quantize_row(DType::kU8, x, bytes.data(), 32), Error);
  dequantize_row(DType::kQ8_0, nullptr, nullptr, 0);
}

}  // namespace
}  // namespace pianola
