// Random and hostile weights for the matrix kernels, and their exact results in double.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <vector>

#include "backends/cpu/kernels/linear.h"
#include "tensor/half.h"
#include "tensor/quant_format.h"

namespace pianola::cpu {

// Bytes at a 64-byte boundary, filled with a pattern so that reading what was not written shows.
class AlignedBytes {
 public:
  explicit AlignedBytes(std::size_t bytes)
      : bytes_(bytes), data_(static_cast<std::uint8_t*>(::operator new(bytes + 64, kAlign))) {
    std::memset(data_.get(), 0xa5, bytes + 64);
  }
  std::uint8_t* data() { return data_.get(); }
  std::size_t size() const { return bytes_; }
  // True while nothing wrote past the end.
  bool intact() const {
    for (std::size_t i = 0; i < 64; ++i) {
      if (data_.get()[bytes_ + i] != 0xa5) return false;
    }
    return true;
  }

 private:
  static constexpr std::align_val_t kAlign{64};
  struct Delete {
    void operator()(std::uint8_t* p) const { ::operator delete(p, kAlign); }
  };
  std::size_t bytes_;
  std::unique_ptr<std::uint8_t, Delete> data_;
};

// A weight matrix in the file's form, packed, and dequantised.
struct TestWeight {
  DType dtype;
  int rows;
  int cols;
  std::vector<std::uint8_t> file;
  AlignedBytes packed;
  std::vector<float> values;  // [rows, cols]
  double largest_min = 0;     // of the minimum that a kernel adds apart from the scaled values

  PackedWeight view() { return {dtype, packed.data(), rows, cols}; }
};

enum class Scales { kOrdinary, kHostile };

// Random codes; scales ordinary, or a mixture of zeros, subnormals, negatives and large values.
// The largest magnitude a file can hold is left out: products would overflow, which is right.
inline TestWeight make_weight(DType dtype, int rows, int cols, Scales scales, unsigned seed) {
  std::mt19937 random(seed);
  const std::size_t stride = row_bytes(dtype, static_cast<std::size_t>(cols));
  TestWeight w{dtype, rows, cols, {}, AlignedBytes(packed_bytes(dtype, rows, cols)), {}, 0};
  w.file.resize(stride * static_cast<std::size_t>(rows));
  std::normal_distribution<float> normal;
  const auto scale = [&] {
    const float ordinary = 0.01F * (1.0F + std::fabs(normal(random)));
    if (scales == Scales::kOrdinary) return ordinary;
    constexpr float kHostile[] = {0.0F, -0.0F, 6e-8F, 3e-5F, -1.0F, 900.0F, -0.02F, 0.5F};
    return kHostile[random() % 8];
  };
  const auto put = [&](std::uint8_t* at, float value) {
    const std::uint16_t bits = f32_to_f16(value);
    std::memcpy(at, &bits, 2);
  };
  const DTypeInfo& info = dtype_info(dtype);
  if (!is_quantized(dtype)) {
    std::vector<float> row(static_cast<std::size_t>(cols));
    for (int r = 0; r < rows; ++r) {
      for (float& v : row) v = scales == Scales::kOrdinary ? 0.05F * normal(random) : scale();
      quantize_row(dtype, row.data(), w.file.data() + static_cast<std::size_t>(r) * stride,
                   row.size());
    }
  } else {
    for (std::uint8_t& byte : w.file) byte = static_cast<std::uint8_t>(random());
    for (std::uint8_t* block = w.file.data(); block != w.file.data() + w.file.size();
         block += info.bytes) {
      if (dtype == DType::kQ6_K) {
        put(block + 208, 0.01F * scale());
        continue;
      }
      const bool super = info.elements == 256;
      put(block, super ? 0.02F * scale() : scale());
      if (super || dtype == DType::kQ4_1 || dtype == DType::kQ5_1) {
        const float min = super ? 0.1F * scale() : -8.0F * scale();
        put(block + 2, min);
        w.largest_min =
            std::max(w.largest_min, std::fabs(static_cast<double>(min)) * (super ? 63 : 1));
      }
    }
  }
  w.values.resize(static_cast<std::size_t>(rows) * static_cast<std::size_t>(cols));
  for (int r = 0; r < rows; ++r) {
    dequantize_row(dtype, w.file.data() + static_cast<std::size_t>(r) * stride,
                   w.values.data() + static_cast<std::size_t>(r) * static_cast<std::size_t>(cols),
                   static_cast<std::size_t>(cols));
  }
  pack_rows(dtype, w.file.data(), rows, cols, w.packed.data(), 0, rows);
  return w;
}

// Activations whose blocks differ in size by many powers of ten, with zeros and outliers.
inline std::vector<float> make_activations(int tokens, int cols, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<std::size_t>(tokens) * static_cast<std::size_t>(cols));
  constexpr float kSizes[] = {1.0F, 1.0F, 0.1F, 30.0F, 1e-8F, 1e4F, 0.0F, 1e-38F};
  float size = 1.0F;
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (i % 32 == 0) size = kSizes[random() % 8];
    x[i] = size * normal(random) * (random() % 64 == 0 ? 20.0F : 1.0F);
  }
  return x;
}

// Prepares x and runs the kernel the way the backend does: rows cut for `workers`, tokens too.
struct RunOptions {
  Isa isa = Isa::kPortable;
  int workers = 1;
  LinearWrite write = LinearWrite::kStore;
};
inline std::vector<float> run_linear(TestWeight& weight, const float* x, std::ptrdiff_t ldx,
                                     int tokens, const RunOptions& options,
                                     std::vector<float> y = {}) {
  const ActivationKind kind = activation_kind(weight.dtype, options.isa);
  AlignedBytes prepared(activation_bytes(kind, tokens, weight.cols));
  for (int i = 0; i < options.workers; ++i) {
    prepare_activations(kind, options.isa, x, ldx, tokens, weight.cols, prepared.data(),
                        tokens * i / options.workers, tokens * (i + 1) / options.workers);
  }
  AlignedBytes scratch(linear_scratch_bytes(weight.dtype, options.isa, tokens, weight.cols));
  if (y.empty()) {
    y.assign(static_cast<std::size_t>(tokens) * static_cast<std::size_t>(weight.rows), NAN);
  }
  for (int i = 0; i < options.workers; ++i) {
    const RowRange range = worker_rows(weight.rows, i, options.workers);
    linear(weight.view(), prepared.data(), tokens, range.begin, range.end, y.data(), weight.rows,
           scratch.data(), options.isa, options.write);
  }
  EXPECT_TRUE(prepared.intact() && scratch.intact() && weight.packed.intact());
  return y;
}

// The exact result of one output, and how far a kernel may be from it.
//
// Eight-bit activations are off by at most half a step, d / 2 with d = max|x| / 127 of the block,
// so the result by sum |w| d / 2 (values below 1e-30 count as zero). Block sums are exact integers.
// What is left is f32 rounding: two sums a block, a few more to form each, each at most 2^-24 of
// the sum of the magnitudes, which for types with a minimum are those of the scaled value and of
// the minimum apart. bfloat16 rounds an activation by at most 2^-9 of it, and the instruction
// flushes subnormals.
struct Expected {
  double value = 0;
  double bound = 0;
};
inline Expected expect_output(const TestWeight& weight, ActivationKind kind, const float* x,
                              int row) {
  const float* w =
      weight.values.data() + static_cast<std::size_t>(row) * static_cast<std::size_t>(weight.cols);
  Expected e;
  double magnitude = 0;
  for (int b = 0; b < weight.cols; b += 32) {
    const int end = std::min(weight.cols, b + 32);
    double largest = 0;
    double weights = 0;
    for (int k = b; k < end; ++k) {
      const double a = x[k];
      largest = std::max(largest, std::fabs(a));
      weights += std::fabs(static_cast<double>(w[k]));
      e.value += w[k] * a;
      magnitude += (std::fabs(static_cast<double>(w[k])) + 2 * weight.largest_min) * std::fabs(a);
    }
    if (kind == ActivationKind::kInt8) {
      e.bound += weights * (largest / 254.0 * (1 + 1e-6) + 1e-30);
      magnitude += weight.largest_min * largest;
    }
  }
  constexpr double kEpsilon = 0x1p-24;
  if (kind == ActivationKind::kInt8) {
    e.bound += (2.0 * weight.cols / 32 + 8) * kEpsilon * 2 * magnitude;
  } else {
    e.bound += (weight.cols / 4.0 + 8) * kEpsilon * magnitude + weight.cols * 1e-37;
  }
  if (kind == ActivationKind::kBf16) e.bound += magnitude * 0x1p-8 + weight.cols * 1e-35;
  return e;
}

}  // namespace pianola::cpu
