#include "kernel_checks.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <string>

#include "backends/cpu/isa.h"
#include "backends/cpu/kernels/attention.h"
#include "backends/cpu/kernels/elementwise.h"
#include "backends/cpu/kernels/linear.h"
#include "cache/cache_type.h"
#include "cache/layer_cache.h"
#include "signals.h"
#include "tensor/dtype.h"
#include "tensor/fp8.h"
#include "tensor/half.h"
#include "tensor/quant_format.h"

namespace pianola::cli {
namespace {

using cpu::Isa;

// Sizes and places are computed as int, far from its limits, and used as std::size_t.
std::size_t size(int n) { return static_cast<std::size_t>(n); }

constexpr double kEpsilon = 0x1p-24;  // half a unit in the last place of a float near 1

template <typename T>
class Aligned {
 public:
  explicit Aligned(std::size_t count)
      : count_(std::max(count, std::size_t{1})),
        data_(static_cast<T*>(::operator new(count_ * sizeof(T), kAlign))) {
    std::memset(static_cast<void*>(data_.get()), 0, count_ * sizeof(T));
  }
  T* get() const { return data_.get(); }
  T& operator[](std::size_t i) const { return data_.get()[i]; }

 private:
  static constexpr std::align_val_t kAlign{64};
  struct Free {
    void operator()(T* p) const { ::operator delete(p, kAlign); }
  };
  std::size_t count_;
  std::unique_ptr<T, Free> data_;
};

std::vector<float> random_floats(std::size_t count, unsigned seed, float scale) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> values(count);
  for (float& v : values) v = normal(random);
  return values;
}

// The largest |found - expected| / bound. NaN sticks: it compares false with everything.
class WorstError {
 public:
  void add(double found, double expected, double bound) {
    const double error = std::fabs(found - expected) / bound;
    if (!(error <= worst_)) worst_ = std::isnan(worst_) ? worst_ : error;
  }
  double value() const { return worst_; }

 private:
  double worst_ = 0;
};

// --- Linear ------------------------------------------------------------------------------------

struct Matrix {
  int rows;
  int cols;
  std::vector<std::uint8_t> file;
  std::vector<float> values;
};

Matrix make_matrix(DType dtype, int rows, int cols) {
  const std::size_t stride = row_bytes(dtype, static_cast<std::size_t>(cols));
  Matrix m{rows, cols, std::vector<std::uint8_t>(stride * static_cast<std::size_t>(rows)),
           std::vector<float>(static_cast<std::size_t>(rows) * static_cast<std::size_t>(cols))};
  const auto source = random_floats(m.values.size(), 1, 0.05F);
  const auto width = static_cast<std::size_t>(cols);
  for (std::size_t r = 0; r < static_cast<std::size_t>(rows); ++r) {
    quantize_row(dtype, source.data() + r * width, m.file.data() + r * stride, width);
    dequantize_row(dtype, m.file.data() + r * stride, m.values.data() + r * width, width);
  }
  return m;
}

// How far the kernel may be from the exact product of row and input: what rounding the inputs does,
// and single-precision sums.
double linear_bound(const float* row, const float* x, int cols, cpu::ActivationKind kind) {
  constexpr int kBlock = 32;
  double bound = 0;
  for (int begin = 0; begin < cols; begin += kBlock) {
    double largest_weight = 0;
    double largest_input = 0;
    double product = 0;
    const int end = std::min(begin + kBlock, cols);
    for (int i = begin; i < end; ++i) {
      largest_weight = std::max(largest_weight, std::fabs(static_cast<double>(row[i])));
      largest_input = std::max(largest_input, std::fabs(static_cast<double>(x[i])));
      product += std::fabs(static_cast<double>(row[i]) * x[i]);
    }
    bound += product * cols * kEpsilon;
    // Scale and minimum of a block may be applied apart: the largest weight stands for both.
    if (kind == cpu::ActivationKind::kInt8) {
      bound += largest_weight * (end - begin) * largest_input / 254 * 1.01;
    } else if (kind == cpu::ActivationKind::kBf16) {
      bound += product * 0x1p-8;
    }
  }
  return bound + 1e-30;
}

double check_linear(DType dtype, Isa isa, int tokens) {
  constexpr int kRows = 72;  // four panels and a half
  constexpr int kCols = 512;
  const Matrix m = make_matrix(dtype, kRows, kCols);
  Aligned<std::byte> packed(cpu::packed_bytes(dtype, kRows, kCols));
  cpu::pack_rows(dtype, m.file.data(), kRows, kCols, packed.get(), 0, kRows);
  const auto x = random_floats(size(tokens * kCols), 2, 1);
  const cpu::ActivationKind kind = cpu::activation_kind(dtype, isa);
  Aligned<std::byte> activations(cpu::activation_bytes(kind, tokens, kCols));
  cpu::prepare_activations(kind, isa, x.data(), kCols, tokens, kCols, activations.get(), 0, tokens);
  Aligned<std::byte> scratch(cpu::linear_scratch_bytes(dtype, isa, tokens, kCols));
  std::vector<float> y(size(tokens * kRows));
  cpu::linear({dtype, packed.get(), kRows, kCols}, activations.get(), tokens, 0, kRows, y.data(),
              kRows, scratch.get(), isa);
  WorstError worst;
  for (int t = 0; t < tokens; ++t) {
    for (int r = 0; r < kRows; ++r) {
      const float* row = m.values.data() + r * kCols;
      const float* input = x.data() + t * kCols;
      double sum = 0;
      for (int i = 0; i < kCols; ++i) sum += static_cast<double>(row[i]) * input[i];
      worst.add(y[size(t * kRows + r)], sum, linear_bound(row, input, kCols, kind));
    }
  }
  return worst.value();
}

// --- Attention ---------------------------------------------------------------------------------

// What a cache makes of numbers, heads of `dim`.
std::vector<float> as_stored(DType dtype, std::vector<float> data, int dim) {
  for (std::size_t at = 0; at < data.size(); at += size(dim)) {
    float scale = 0;  // of int8
    for (std::size_t i = at; i < at + size(dim); ++i) scale = std::max(scale, std::fabs(data[i]));
    scale /= 127;
    for (std::size_t i = at; i < at + size(dim); ++i) {
      float& x = data[i];
      if (dtype == DType::kF16) x = f16_to_f32(f32_to_f16(x));
      if (dtype == DType::kBF16) x = bf16_to_f32(f32_to_bf16(x));
      if (dtype == DType::kF8E4M3) x = e4m3_to_f32(f32_to_e4m3(x));
      if (dtype == DType::kI8) x = std::nearbyint(x / scale) * scale;
    }
  }
  return data;
}

// One sequence longer than a split of the kernel; the last tokens of it are asked for.
double check_attention(DType dtype, Isa isa) {
  constexpr int kHeads = 6, kKvHeads = 2, kDim = 64, kLength = 300, kCapacity = 320, kQueries = 3;
  const std::size_t bytes = cache_slot_bytes(dtype, kCapacity, kKvHeads, kDim);
  Aligned<std::byte> keys(bytes);
  Aligned<std::byte> values(bytes);
  const cpu::KvCache cache{keys.get(), values.get(), dtype, kCapacity, kKvHeads, kDim};
  const auto k = random_floats(std::size_t{kLength} * kKvHeads * kDim, 3, 1);
  const auto v = random_floats(k.size(), 4, 1);
  const auto q = random_floats(std::size_t{kQueries} * kHeads * kDim, 5, 1);
  std::vector<std::int32_t> positions(kLength);
  for (int i = 0; i < kLength; ++i) positions[static_cast<std::size_t>(i)] = i;
  const std::vector<std::int32_t> slots(kLength, 0);
  cpu::append({.isa = isa,
               .cache = cache,
               .tokens = kLength,
               .positions = positions.data(),
               .slots = slots.data(),
               .keys = k.data(),
               .values = v.data(),
               .stride = kKvHeads * kDim},
              0, 1);
  std::vector<float> out(q.size());
  const float scale = 0.125F;
  const cpu::AttentionArgs args{.isa = isa,
                                .cache = cache,
                                .tokens = kQueries,
                                .heads = kHeads,
                                .scale = scale,
                                .positions = positions.data() + kLength - kQueries,
                                .slots = slots.data(),
                                .queries = q.data(),
                                .query_stride = kHeads * kDim,
                                .output = out.data(),
                                .output_stride = kHeads * kDim};
  Aligned<std::byte> scratch(cpu::attention_scratch_bytes(cache, kHeads, kQueries, 1));
  cpu::attend(args, scratch.get(), 0, 1);
  if (cpu::attention_needs_combine(args, 1)) cpu::combine(args, scratch.get(), 0, 1);

  const auto stored_k = as_stored(dtype, k, kDim);
  const auto stored_v = as_stored(dtype, v, kDim);
  WorstError worst;
  for (int t = 0; t < kQueries; ++t) {
    const int length = kLength - kQueries + t + 1;
    for (int h = 0; h < kHeads; ++h) {
      const int kv = h / (kHeads / kKvHeads);
      const float* query = q.data() + (t * kHeads + h) * kDim;
      const auto at = [&](const std::vector<float>& data, int position, int i) {
        return static_cast<double>(data[size((position * kKvHeads + kv) * kDim + i)]);
      };
      std::vector<double> weights(static_cast<std::size_t>(length));
      double largest = -1e30;
      for (int p = 0; p < length; ++p) {
        double dot = 0;
        for (int i = 0; i < kDim; ++i) dot += static_cast<double>(query[i]) * at(stored_k, p, i);
        weights[static_cast<std::size_t>(p)] = dot * static_cast<double>(scale);
        largest = std::max(largest, weights[static_cast<std::size_t>(p)]);
      }
      double total = 0;
      for (double& w : weights) total += w = std::exp(w - largest);
      for (int i = 0; i < kDim; ++i) {
        double sum = 0;
        for (int p = 0; p < length; ++p)
          sum += weights[static_cast<std::size_t>(p)] * at(stored_v, p, i);
        worst.add(out[size((t * kHeads + h) * kDim + i)], sum / total, 2e-5);
      }
    }
  }
  return worst.value();
}

// --- Elementwise -------------------------------------------------------------------------------

double check_rms_norm(const cpu::Elementwise& f) {
  constexpr int kWidth = 579;  // no multiple of any vector
  const auto x = random_floats(kWidth, 6, 2);
  const auto weight = random_floats(kWidth, 7, 1);
  std::vector<float> y(kWidth);
  f.rms_norm(x.data(), weight.data(), 1e-5F, kWidth, y.data());
  double squares = 0;
  for (const float v : x) squares += static_cast<double>(v) * v;
  const double factor = 1 / std::sqrt(squares / kWidth + 1e-5);
  WorstError worst;
  for (std::size_t i = 0; i < kWidth; ++i) {
    const double expected = static_cast<double>(x[i]) * factor * static_cast<double>(weight[i]);
    worst.add(y[i], expected, std::fabs(expected) * 32 * kEpsilon + 1e-30);
  }
  return worst.value();
}

double check_gate(const cpu::Elementwise& f) {
  constexpr int kWidth = 579;
  const auto gate = random_floats(kWidth, 8, 4);
  const auto up = random_floats(kWidth, 9, 1);
  std::vector<float> y(kWidth);
  f.gate(gate.data(), up.data(), kWidth, y.data());
  WorstError worst;
  for (std::size_t i = 0; i < kWidth; ++i) {
    const auto g = static_cast<double>(gate[i]);
    const double expected = g / (1 + std::exp(-g)) * static_cast<double>(up[i]);
    worst.add(y[i], expected, std::fabs(expected) * 32 * kEpsilon + 1e-30);
  }
  return worst.value();
}

double check_softmax(const cpu::Elementwise& f) {
  constexpr int kWidth = 4099;
  const auto x = random_floats(kWidth, 10, 5);
  std::vector<float> y(kWidth);
  cpu::softmax(f, x.data(), kWidth, y.data());
  const double largest = *std::max_element(x.begin(), x.end());
  double total = 0;
  for (const float v : x) total += std::exp(static_cast<double>(v) - largest);
  WorstError worst;
  for (std::size_t i = 0; i < kWidth; ++i) {
    const double expected = std::exp(static_cast<double>(x[i]) - largest) / total;
    // x - largest is rounded, and e^ makes a relative error of that absolute one.
    worst.add(y[i], expected, expected * 64 * kEpsilon + 1e-37);
  }
  return worst.value();
}

double check_max_element(const cpu::Elementwise& f) {
  const auto x = random_floats(4099, 11, 5);
  const cpu::MaxElement found = f.max_element(x.data(), static_cast<int>(x.size()));
  const auto expected = std::max_element(x.begin(), x.end()) - x.begin();
  return found.index == expected && found.value == x[static_cast<std::size_t>(expected)] ? 0 : 2;
}

double check_rope(const cpu::Elementwise& f, bool pairs) {
  constexpr int kHeads = 3, kDim = 64, kHalf = kDim / 2;
  auto x = random_floats(kHeads * kDim, 12, 1);
  const auto before = x;
  std::vector<float> cosines(kHalf), sines(kHalf);
  for (int i = 0; i < kHalf; ++i) {
    cosines[static_cast<std::size_t>(i)] = static_cast<float>(std::cos(0.37 * i));
    sines[static_cast<std::size_t>(i)] = static_cast<float>(std::sin(0.37 * i));
  }
  (pairs ? f.rope_pairs : f.rope_halves)(cosines.data(), sines.data(), kHalf, kHeads, kDim,
                                         x.data());
  WorstError worst;
  for (int h = 0; h < kHeads; ++h) {
    for (int i = 0; i < kHalf; ++i) {
      const auto a = size(h * kDim + (pairs ? 2 * i : i));
      const auto b = size(h * kDim + (pairs ? 2 * i + 1 : i + kHalf));
      const double c = cosines[static_cast<std::size_t>(i)];
      const double s = sines[static_cast<std::size_t>(i)];
      const double length = std::fabs(before[a]) + std::fabs(before[b]);
      worst.add(x[a], before[a] * c - before[b] * s, length * 4 * kEpsilon);
      worst.add(x[b], before[a] * s + before[b] * c, length * 4 * kEpsilon);
    }
  }
  return worst.value();
}

}  // namespace

std::vector<KernelCheck> check_kernels() {
  std::vector<KernelCheck> checks;
  for (const Isa isa : cpu::supported_isas()) {
    const auto add = [&](std::string kernel, double error) {
      throw_if_interrupted();
      checks.push_back({std::move(kernel), cpu::isa_name(isa), error});
    };
    for (const DType dtype :
         {DType::kF32, DType::kF16, DType::kBF16, DType::kQ4_0, DType::kQ4_1, DType::kQ5_0,
          DType::kQ5_1, DType::kQ8_0, DType::kQ4_K, DType::kQ5_K, DType::kQ6_K}) {
      add(std::string("linear ") + dtype_name(dtype), check_linear(dtype, isa, 1));
      add(std::string("linear ") + dtype_name(dtype) + " x37", check_linear(dtype, isa, 37));
    }
    for (const DType dtype : kCacheTypes) {
      add(std::string("attention ") + dtype_name(dtype), check_attention(dtype, isa));
    }
    const cpu::Elementwise& f = cpu::elementwise(isa);
    add("rms_norm", check_rms_norm(f));
    add("gate", check_gate(f));
    add("softmax", check_softmax(f));
    add("max_element", check_max_element(f));
    add("rope halves", check_rope(f, false));
    add("rope pairs", check_rope(f, true));
  }
  return checks;
}

}  // namespace pianola::cli
