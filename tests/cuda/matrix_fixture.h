// Random matrices in every form of weights, on the device.
#pragma once

#include <cmath>
#include <random>

#include "backends/cuda/kernels/packed_weight.h"
#include "backends/cuda/kernels/repack.h"
#include "cuda/cuda_fixture.h"
#include "tensor/half.h"
#include "tensor/quant_format.h"

namespace pianola::cuda {

inline std::vector<float> random_floats(std::size_t count, unsigned seed, float size = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, size);
  std::vector<float> values(count);
  for (float& v : values) v = normal(random);
  return values;
}

// A random matrix: its packed form on the device and its exact values.
struct Matrix {
  std::vector<float> values;  // [rows, cols]
  DeviceArray<std::byte> packed;
  PackedWeight view;
};

inline Matrix make_matrix(DType dtype, int rows, int cols, unsigned seed) {
  Matrix m;
  std::mt19937 random(seed);
  const std::size_t stride = row_bytes(dtype, static_cast<std::size_t>(cols));
  std::vector<std::byte> file(stride * static_cast<std::size_t>(rows));
  const auto count = static_cast<std::size_t>(rows) * static_cast<std::size_t>(cols);
  if (is_quantized(dtype)) {
    for (std::byte& byte : file) byte = static_cast<std::byte>(random());
    const DTypeInfo& info = dtype_info(dtype);
    std::normal_distribution<float> normal;
    const auto put = [&](std::byte* at, float value) {
      const std::uint16_t bits = f32_to_f16(value);
      std::memcpy(at, &bits, 2);
    };
    for (std::byte* block = file.data(); block != file.data() + file.size(); block += info.bytes) {
      const float scale = 0.01F * (1.0F + std::fabs(normal(random)));
      const bool super = info.elements == 256;
      if (dtype == DType::kQ6_K) {
        put(block + 208, 0.01F * scale);
      } else {
        put(block, super ? 0.02F * scale : scale);
        if (super || dtype == DType::kQ4_1 || dtype == DType::kQ5_1) {
          put(block + 2, (super ? 0.1F : -8.0F) * scale);
        }
      }
    }
  } else {
    const std::vector<float> values = random_floats(count, seed, 0.05F);
    for (int r = 0; r < rows; ++r) {
      quantize_row(
          dtype, values.data() + static_cast<std::size_t>(r) * static_cast<std::size_t>(cols),
          reinterpret_cast<std::uint8_t*>(file.data()) + static_cast<std::size_t>(r) * stride,
          static_cast<std::size_t>(cols));
    }
  }
  m.values.resize(count);
  dequantize_row(dtype, file.data(), m.values.data(), count);
  Codes codes = {};
  Scales scales = {};
  EXPECT_TRUE(packed_form(dtype, codes, scales));
  m.packed = DeviceArray<std::byte>(packed_bytes(codes, scales, rows, cols));
  if (scales == Scales::kNone) {
    m.packed.write(file);
  } else {
    const DeviceArray<std::byte> raw(file);
    repack(dtype, rows, cols, raw.data(), m.packed.data(), test_launch());
    check(cudaDeviceSynchronize(), "repack");
  }
  m.view = {codes,
            scales,
            rows,
            cols,
            m.packed.data(),
            scales == Scales::kNone ? nullptr : m.packed.data() + scale_offset(codes, rows, cols)};
  return m;
}

}  // namespace pianola::cuda
