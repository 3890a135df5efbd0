// state.h, written once over the vectors of simd_*.h; included by exactly one .cc file for each
// instruction set, after that header.
#pragma once

#include "backends/cpu/kernels/state.h"

namespace pianola::cpu {
namespace {

using F = Simd::F;
constexpr int kLanes = Simd::kLanes;

// Columns of a state that are worked on together: kVectors whole vectors, or with `rest` the first
// `rest` lanes of one.
template <int kVectors>
struct Columns {
  int rest = 0;

  F load(const float* p, int v) const {
    return rest > 0 ? Simd::load_first(p, rest) : Simd::load(p + v * kLanes);
  }
  void store(float* p, int v, F x) const {
    rest > 0 ? Simd::store_first(p, x, rest) : Simd::store(p + v * kLanes, x);
  }
};

// Two passes over the rows: what the state says of the key, then the new state and what it says of
// the query. Sums go over the rows in order.
template <int kVectors>
inline void fold_columns(const Columns<kVectors> columns, const float* from, const StateStep& step,
                         int key_dim, int value_dim, bool delta, int at, float* to, float* out) {
  const F decay = Simd::set(*step.decay);
  const F strength = Simd::set(*step.strength);
  F u[kVectors];
  for (int v = 0; v < kVectors; ++v) u[v] = columns.load(step.value + at, v);
  if (from && delta) {
    F known[kVectors];
    for (int v = 0; v < kVectors; ++v) known[v] = Simd::zero();
    for (int i = 0; i < key_dim; ++i) {
      const F key = Simd::set(step.key[i]);
      for (int v = 0; v < kVectors; ++v) {
        known[v] = Simd::fma(key, columns.load(from + i * value_dim + at, v), known[v]);
      }
    }
    for (int v = 0; v < kVectors; ++v) u[v] = Simd::sub(u[v], Simd::mul(decay, known[v]));
  }
  F sum[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    u[v] = Simd::mul(strength, u[v]);
    sum[v] = Simd::zero();
  }
  for (int i = 0; i < key_dim; ++i) {
    const F key = Simd::set(step.key[i]);
    const F query = Simd::set(step.query ? step.query[i] : 0.0F);
    for (int v = 0; v < kVectors; ++v) {
      const F old = from ? columns.load(from + i * value_dim + at, v) : Simd::zero();
      const F next = Simd::fma(key, u[v], Simd::mul(decay, old));
      columns.store(to + i * value_dim + at, v, next);
      sum[v] = Simd::fma(query, next, sum[v]);
    }
  }
  if (!step.query) return;
  for (int v = 0; v < kVectors; ++v) columns.store(out + at, v, sum[v]);
}

void fold(const float* from, const StateStep& step, int key_dim, int value_dim, bool delta,
          float* to, float* out) {
  constexpr int kVectors = 4;
  int at = 0;
  for (; at + kVectors * kLanes <= value_dim; at += kVectors * kLanes) {
    fold_columns(Columns<kVectors>{}, from, step, key_dim, value_dim, delta, at, to, out);
  }
  for (; at + kLanes <= value_dim; at += kLanes) {
    fold_columns(Columns<1>{}, from, step, key_dim, value_dim, delta, at, to, out);
  }
  if (at < value_dim) {
    fold_columns(Columns<1>{value_dim - at}, from, step, key_dim, value_dim, delta, at, to, out);
  }
}

void conv(const float* const* x, const float* weight, std::ptrdiff_t stride, int taps,
          const float* bias, bool silu, int n, float* out) {
  for (int c = 0; c < n; c += kLanes) {
    const Columns<1> columns{n - c < kLanes ? n - c : 0};
    F sum = bias ? columns.load(bias + c, 0) : Simd::zero();
    for (int j = 0; j < taps; ++j) {
      if (x[j])
        sum = Simd::fma(columns.load(weight + j * stride + c, 0), columns.load(x[j] + c, 0), sum);
    }
    if (silu) {
      const F e = Simd::exp(Simd::sub(Simd::zero(), sum));
      sum = Simd::div(sum, Simd::add(Simd::set(1.0F), e));
    }
    columns.store(out + c, 0, sum);
  }
}

constexpr StateKernels kStateKernels = {fold, conv};

}  // namespace
}  // namespace pianola::cpu
