// elementwise.h, written once over the vectors of simd_*.h; included by exactly one .cc file for
// each instruction set, after that header.
#pragma once

#include <cstdint>

#include "backends/cpu/kernels/elementwise_kernels.h"

namespace pianola::cpu {
namespace {

using F = Simd::F;
constexpr int kLanes = Simd::kLanes;

// Calls step(i, load, store) for whole vectors and once more for what is left, where load and store
// touch only elements that exist.
template <typename Step>
inline void for_vectors(int n, Step step) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    step(i, [](const float* p) { return Simd::load(p); }, [](float* p, F v) { Simd::store(p, v); });
  }
  if (i < n) {
    const int rest = n - i;
    step(
        i, [rest](const float* p) { return Simd::load_first(p, rest); },
        [rest](float* p, F v) { Simd::store_first(p, v, rest); });
  }
}

void rms_norm(const float* x, const float* weight, float eps, int n, float* y) {
  // Four sums, so that the additions overlap.
  F sums[4] = {Simd::zero(), Simd::zero(), Simd::zero(), Simd::zero()};
  int i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int j = 0; j < 4; ++j) {
      const F v = Simd::load(x + i + j * kLanes);
      sums[j] = Simd::fma(v, v, sums[j]);
    }
  }
  for_vectors(n - i, [&](int j, auto load, auto) {
    const F v = load(x + i + j);
    sums[0] = Simd::fma(v, v, sums[0]);
  });
  const float sum =
      Simd::reduce_add(Simd::add(Simd::add(sums[0], sums[1]), Simd::add(sums[2], sums[3])));
  const F scale = Simd::set(1.0F / __builtin_sqrtf(sum / static_cast<float>(n) + eps));
  for_vectors(n, [&](int j, auto load, auto store) {
    store(y + j, Simd::mul(Simd::mul(load(x + j), scale), load(weight + j)));
  });
}

void add(const float* x, int n, float* y) {
  for_vectors(
      n, [&](int i, auto load, auto store) { store(y + i, Simd::add(load(y + i), load(x + i))); });
}

void add_scaled(const float* x, float factor, int n, float* y) {
  const F f = Simd::set(factor);
  for_vectors(n, [&](int i, auto load, auto store) {
    store(y + i, Simd::fma(load(x + i), f, load(y + i)));
  });
}

void gate(const float* gate, const float* up, int n, float* y) {
  const F one = Simd::set(1.0F);
  for_vectors(n, [&](int i, auto load, auto store) {
    const F g = load(gate + i);
    const F sigmoid = Simd::div(g, Simd::add(one, Simd::exp(Simd::sub(Simd::zero(), g))));
    store(y + i, Simd::mul(sigmoid, load(up + i)));
  });
}

// gelu(x) by tanh is x / (1 + e^-2u) with u = sqrt(2 / pi) (x + 0.044715 x³).
void gate_gelu(const float* gate, const float* up, int n, float* y) {
  const F one = Simd::set(1.0F);
  const F linear = Simd::set(-1.5957691F);  // -2 sqrt(2 / pi)
  const F cubic = Simd::set(-0.071354814F);
  for_vectors(n, [&](int i, auto load, auto store) {
    const F g = load(gate + i);
    const F square = Simd::mul(g, g);
    const F exponent = Simd::mul(g, Simd::fma(square, cubic, linear));
    const F gelu = Simd::div(g, Simd::add(one, Simd::exp(exponent)));
    store(y + i, Simd::mul(gelu, load(up + i)));
  });
}

void gate_sigmoid(const float* gate, const float* x, int n, float* y) {
  const F one = Simd::set(1.0F);
  for_vectors(n, [&](int i, auto load, auto store) {
    const F e = Simd::exp(Simd::sub(Simd::zero(), load(gate + i)));
    store(y + i, Simd::div(load(x + i), Simd::add(one, e)));
  });
}

// The largest of two gives its second operand when one is NaN: so a NaN passes both clamps.
void gate_clamped(const float* gate, const float* up, int n, float* y) {
  const F one = Simd::set(1.0F);
  const F low = Simd::set(-7.0F);
  const auto at_most_7 = [&](F x) {
    return Simd::sub(Simd::zero(), Simd::max(low, Simd::sub(Simd::zero(), x)));
  };
  for_vectors(n, [&](int i, auto load, auto store) {
    const F g = at_most_7(load(gate + i));
    const F u = Simd::max(low, at_most_7(load(up + i)));
    const F swish = Simd::div(g, Simd::add(one, Simd::exp(Simd::mul(g, Simd::set(-1.702F)))));
    store(y + i, Simd::mul(swish, Simd::add(u, one)));
  });
}

void gate_relu(const float* gate, const float* up, int n, float* y) {
  for_vectors(n, [&](int i, auto load, auto store) {
    store(y + i, Simd::mul(Simd::max(Simd::zero(), load(gate + i)), load(up + i)));
  });
}

void scale(const float* x, float factor, int n, float* y) {
  const F f = Simd::set(factor);
  for_vectors(n, [&](int i, auto load, auto store) { store(y + i, Simd::mul(load(x + i), f)); });
}

void rope_halves(const float* cosines, const float* sines, int half, int heads, int head_dim,
                 float* x) {
  for (int h = 0; h < heads; ++h, x += head_dim) {
    for_vectors(half, [&](int i, auto load, auto store) {
      const F a = load(x + i);
      const F b = load(x + half + i);
      const F c = load(cosines + i);
      const F s = load(sines + i);
      store(x + i, Simd::sub(Simd::mul(a, c), Simd::mul(b, s)));
      store(x + half + i, Simd::add(Simd::mul(b, c), Simd::mul(a, s)));
    });
  }
}

// A loop that compilers vectorise well enough by themselves; the same order as above.
void rope_pairs(const float* cosines, const float* sines, int half, int heads, int head_dim,
                float* x) {
  for (int h = 0; h < heads; ++h, x += head_dim) {
    for (int i = 0; i < half; ++i) {
      const float a = x[2 * i];
      const float b = x[2 * i + 1];
      x[2 * i] = a * cosines[i] - b * sines[i];
      x[2 * i + 1] = b * cosines[i] + a * sines[i];
    }
  }
}

double sum_exp(const float* x, float offset, int n) {
  constexpr int kBlock = 256;
  const F shift = Simd::set(offset);
  double total = 0;
  for (int first = 0; first < n; first += kBlock) {
    const int size = n - first < kBlock ? n - first : kBlock;
    F sum = Simd::zero();
    for_vectors(size, [&](int i, auto load, auto) {
      const F e = Simd::exp(Simd::sub(load(x + first + i), shift));
      // Lanes past the end would count as e^-offset.
      sum = Simd::add(sum, size - i < kLanes ? Simd::select_first(size - i, e, Simd::zero()) : e);
    });
    total += static_cast<double>(Simd::reduce_add(sum));
  }
  return total;
}

void exp(const float* x, float offset, float factor, int n, float* y) {
  for_vectors(n, [&](int i, auto load, auto store) {
    const F e = Simd::exp(Simd::sub(load(x + i), Simd::set(offset)));
    store(y + i, Simd::mul(e, Simd::set(factor)));
  });
}

// The largest of each block first, then the first element that equals it: no lane keeps an index.
MaxElement max_element(const float* x, int n) {
  constexpr int kBlock = 512;
  MaxElement best{0, x[0]};
  for (int first = 0; first < n; first += kBlock) {
    const int size = n - first < kBlock ? n - first : kBlock;
    F top = Simd::set(x[first]);
    F nan = Simd::zero();  // NaN in a lane that has met one
    for_vectors(size, [&](int i, auto load, auto) {
      F v = load(x + first + i);
      if (size - i < kLanes) v = Simd::select_first(size - i, v, Simd::set(x[first]));
      nan = Simd::add(nan, Simd::quiet_zero(v));
      top = Simd::max(top, v);
    });
    const float marker = Simd::reduce_add(nan);
    if (marker != marker) {
      for (int i = first;; ++i) {
        if (x[i] != x[i]) return {i, x[i]};
      }
    }
    const float value = Simd::reduce_max(top);
    if (value > best.value || first == 0) {
      int i = first;
      while (!(x[i] == value)) ++i;
      best = {i, value};
    }
  }
  return best;
}

void to_f32(DType from, const void* x, int n, float* y) {
  if (from == DType::kF32) {
    for_vectors(n, [&](int i, auto load, auto store) {
      store(y + i, load(static_cast<const float*>(x) + i));
    });
    return;
  }
  const auto* half = static_cast<const std::uint16_t*>(x);
  const auto convert = [from](const std::uint16_t* p) {
    return from == DType::kF16 ? Simd::load_f16(p) : Simd::load_bf16(p);
  };
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) Simd::store(y + i, convert(half + i));
  if (i == n) return;
  std::uint16_t rest[kLanes] = {};
  for (int j = 0; j < n - i; ++j) rest[j] = half[i + j];
  Simd::store_first(y + i, convert(rest), n - i);
}

void from_f32(DType to, const float* x, int n, void* y) {
  if (to == DType::kF32) {
    for_vectors(
        n, [&](int i, auto load, auto store) { store(static_cast<float*>(y) + i, load(x + i)); });
    return;
  }
  auto* half = static_cast<std::uint16_t*>(y);
  const auto convert = [to](std::uint16_t* p, F v) {
    to == DType::kF16 ? Simd::store_f16(p, v) : Simd::store_bf16(p, v);
  };
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) convert(half + i, Simd::load(x + i));
  if (i == n) return;
  std::uint16_t rest[kLanes];
  convert(rest, Simd::load_first(x + i, n - i));
  for (int j = 0; j < n - i; ++j) half[i + j] = rest[j];
}

constexpr Elementwise kElementwise = {
    rms_norm, add,         add_scaled, gate,    gate_gelu, gate_sigmoid, gate_clamped, gate_relu,
    scale,    rope_halves, rope_pairs, sum_exp, exp,       max_element,  to_f32,       from_f32};

}  // namespace
}  // namespace pianola::cpu
