// The arithmetic of attention, written once over the vectors of simd_*.h; included by exactly one
// .cc file for each instruction set, after that header.
//
// One order. The score of a row and a key is computed as kLanes partial sums (lane i adds the
// products at i, i + kLanes, i + 2 * kLanes, ...), which are then folded by the distances kLanes /
// 2,
// ..., 2, 1. With few rows the lanes of a vector are these partial sums; with many rows the keys
// are transposed and the lanes of a vector are keys, each partial sum a vector of its own. Both
// give the same bits, so a token does not depend on how many others are computed with it.
// Everything else goes position by position for each row.
#pragma once

#include <cstdint>

#include "backends/cpu/kernels/attention_kernels.h"

namespace pianola::cpu {
namespace {

using F = Simd::F;
constexpr int kLanes = Simd::kLanes;
// From this many rows on, transposing the keys pays.
constexpr int kManyRows = 12;

struct LoadF32 {
  using Element = float;
  static F at(const Element* p) { return Simd::load(p); }
};
struct LoadF16 {
  using Element = std::uint16_t;
  static F at(const Element* p) { return Simd::load_f16(p); }
};
struct LoadBf16 {
  using Element = std::uint16_t;
  static F at(const Element* p) { return Simd::load_bf16(p); }
};
// Without its scale, which goes to the scores, and of values to the weights: once a position.
struct LoadI8 {
  using Element = std::int8_t;
  static F at(const Element* p) { return Simd::load_i8(p); }
};
struct LoadE4m3 {
  using Element = std::uint8_t;
  static F at(const Element* p) { return Simd::load_e4m3(p); }
};

// Fetches the memory `ahead` of the kLanes elements at p: they come a cache line at a time, so of
// the vectors in one line only the first asks. Where a line starts is a matter of d alone when rows
// are whole lines, and of no importance when they are not.
template <typename Element>
inline void fetch_ahead(const Element* p, int d, std::ptrdiff_t ahead) {
  constexpr int kLine = 64 / sizeof(Element);
  if (d % kLine == 0) __builtin_prefetch(reinterpret_cast<const char*>(p) + ahead);
}

// --- Scores, few rows: the lanes of a vector are partial sums. ---

// kDim is head_dim where it is one of the common ones, known to the compiler, and 0 otherwise.

// Partial sums of kRows rows with kKeys keys that are kStride apart.
template <typename Load, int kDim, int kRows, int kKeys, int kStride>
inline void partial_sums(const typename Load::Element* keys, int head_dim, const float* queries,
                         std::ptrdiff_t ahead, F (&sums)[kKeys][kRows]) {
  const int dim = kDim > 0 ? kDim : head_dim;
  for (int k = 0; k < kKeys; ++k) {
    for (int r = 0; r < kRows; ++r) sums[k][r] = Simd::zero();
  }
  for (int d = 0; d < dim; d += kLanes) {
    F key[kKeys];
    for (int k = 0; k < kKeys; ++k) {
      key[k] = Load::at(keys + k * kStride * dim + d);
      fetch_ahead(keys + k * kStride * dim + d, d, ahead);
    }
    for (int r = 0; r < kRows; ++r) {
      const F query = Simd::load(queries + r * dim + d);
      for (int k = 0; k < kKeys; ++k) sums[k][r] = Simd::fma(query, key[k], sums[k][r]);
    }
  }
}

// Scores of the keys first, first + kBit, first + 2 * kBit, ... below kLanes, each still spread
// over the lanes that differ from it in bits below kBit. Keys at or beyond `count` are not read.
template <typename Load, int kDim, int kRows, int kBit>
inline void folded_scores(const typename Load::Element* keys, int count, int head_dim,
                          const float* queries, std::ptrdiff_t ahead, int first, F (&out)[kRows]) {
  if (first >= count) {
    for (int r = 0; r < kRows; ++r) out[r] = Simd::zero();
    return;
  }
  if constexpr (kBit == kLanes / 2) {
    const auto* from = keys + first * (kDim > 0 ? kDim : head_dim);
    if (first + kBit < count) {
      F sums[2][kRows];
      partial_sums<Load, kDim, kRows, 2, kBit>(from, head_dim, queries, ahead, sums);
      for (int r = 0; r < kRows; ++r) out[r] = Simd::fold<kBit>(sums[0][r], sums[1][r]);
    } else {
      F sums[1][kRows];
      partial_sums<Load, kDim, kRows, 1, kBit>(from, head_dim, queries, ahead, sums);
      for (int r = 0; r < kRows; ++r) out[r] = Simd::fold<kBit>(sums[0][r], Simd::zero());
    }
  } else {
    F other[kRows];
    folded_scores<Load, kDim, kRows, kBit * 2>(keys, count, head_dim, queries, ahead, first, out);
    folded_scores<Load, kDim, kRows, kBit * 2>(keys, count, head_dim, queries, ahead, first + kBit,
                                               other);
    for (int r = 0; r < kRows; ++r) out[r] = Simd::fold<kBit>(out[r], other[r]);
  }
}

template <typename Load, int kDim, int kRows>
void scores_of_rows(const AttentionBlock& b, int row) {
  const std::ptrdiff_t ahead = row == 0 ? b.ahead : 0;
  const auto* keys = static_cast<const typename Load::Element*>(b.keys);
  const float* queries = b.queries + row * b.head_dim;
  for (int key = 0; key < b.max_count; key += kLanes) {
    F out[kRows];
    const int left = b.max_count - key;
    // Two calls, so that the common one has no conditions left.
    if (left >= kLanes) {
      folded_scores<Load, kDim, kRows, 1>(keys + key * b.head_dim, kLanes, b.head_dim, queries,
                                          ahead, 0, out);
    } else {
      folded_scores<Load, 0, kRows, 1>(keys + key * b.head_dim, left, b.head_dim, queries, ahead, 0,
                                       out);
    }
    for (int r = 0; r < kRows; ++r) {
      Simd::store(b.scores + (row + r) * kBlockPositions + key, out[r]);
    }
  }
}

template <typename Load, int kDim>
void scores_of_few(const AttentionBlock& b) {
  int row = 0;
  for (; row + 4 <= b.rows; row += 4) scores_of_rows<Load, kDim, 4>(b, row);
  if (b.rows - row == 3) scores_of_rows<Load, kDim, 3>(b, row);
  if (b.rows - row == 2) scores_of_rows<Load, kDim, 2>(b, row);
  if (b.rows - row == 1) scores_of_rows<Load, kDim, 1>(b, row);
}

// --- Scores, many rows: the lanes of a vector are keys. ---

template <int kBit>
inline void transpose_stage(F (&x)[kLanes]) {
  for (int i = 0; i < kLanes; ++i) {
    if ((i & kBit) == 0) Simd::exchange<kBit>(x[i], x[i + kBit]);
  }
}

// tile[d, key] = keys[key, d]; columns at or beyond max_count, as far as tile_scores reads, are
// zero.
template <typename Load>
void transpose_keys(const AttentionBlock& b) {
  constexpr int kStep = kLanes * Simd::kTileVectors;
  const auto* keys = static_cast<const typename Load::Element*>(b.keys);
  const int end = (b.max_count + kStep - 1) / kStep * kStep;
  for (int key = 0; key < end; key += kLanes) {
    for (int d = 0; d < b.head_dim; d += kLanes) {
      F x[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        x[i] = key + i < b.max_count ? Load::at(keys + (key + i) * b.head_dim + d) : Simd::zero();
      }
      if constexpr (kLanes == 16) transpose_stage<8>(x);
      transpose_stage<4>(x);
      transpose_stage<2>(x);
      transpose_stage<1>(x);
      for (int i = 0; i < kLanes; ++i) Simd::store(b.tile + (d + i) * kBlockPositions + key, x[i]);
    }
  }
}

// The partial sums `lane` + multiples of kBit, folded, of kRows rows and kVectors vectors of keys.
template <int kRows, int kVectors, int kBit>
inline void folded_tile(const float* tile, int head_dim, const float* queries, int lane,
                        F (&out)[kRows][kVectors]) {
  if constexpr (kBit == kLanes) {
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVectors; ++v) out[r][v] = Simd::zero();
    }
    for (int d = lane; d < head_dim; d += kLanes) {
      F key[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        key[v] = Simd::load(tile + d * kBlockPositions + v * kLanes);
      }
      for (int r = 0; r < kRows; ++r) {
        const F query = Simd::set(queries[r * head_dim + d]);
        for (int v = 0; v < kVectors; ++v) out[r][v] = Simd::fma(query, key[v], out[r][v]);
      }
    }
  } else {
    F other[kRows][kVectors];
    folded_tile<kRows, kVectors, kBit * 2>(tile, head_dim, queries, lane, out);
    folded_tile<kRows, kVectors, kBit * 2>(tile, head_dim, queries, lane + kBit, other);
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVectors; ++v) out[r][v] = Simd::add(out[r][v], other[r][v]);
    }
  }
}

template <int kRows>
void tile_scores_of_rows(const AttentionBlock& b, int row) {
  constexpr int kVectors = Simd::kTileVectors;
  for (int key = 0; key < b.max_count; key += kVectors * kLanes) {
    F out[kRows][kVectors];
    folded_tile<kRows, kVectors, 1>(b.tile + key, b.head_dim, b.queries + row * b.head_dim, 0, out);
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVectors; ++v) {
        Simd::store(b.scores + (row + r) * kBlockPositions + key + v * kLanes, out[r][v]);
      }
    }
  }
}

void tile_scores(const AttentionBlock& b) {
  int row = 0;
  for (; row + Simd::kTileRows <= b.rows; row += Simd::kTileRows) {
    tile_scores_of_rows<Simd::kTileRows>(b, row);
  }
  for (; row < b.rows; ++row) tile_scores_of_rows<1>(b, row);
}

// --- Softmax: scores become weights; m and acc move to the new maximum. ---

// x times the scales of the positions from `first` on; what is beyond max_count is not read.
inline F scaled(const AttentionBlock& b, F x, const float* scales, int first) {
  if (scales == nullptr) return x;
  const int left = b.max_count - first;
  if (left >= kLanes) return Simd::mul(x, Simd::load(scales + first));
  return left <= 0 ? x : Simd::mul(x, Simd::load_first(scales + first, left));
}

void weigh(const AttentionBlock& b, int row) {
  constexpr int kVectors = kBlockPositions / kLanes;
  float* scores = b.scores + row * kBlockPositions;
  F s[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    s[v] = scaled(b, Simd::load(scores + v * kLanes), b.key_scales, v * kLanes);
  }
  if (b.biases != nullptr) {
    const float* biases = b.biases + row * kBlockPositions;
    for (int v = 0; v < kVectors; ++v) s[v] = Simd::add(s[v], Simd::load(biases + v * kLanes));
  }
  if (b.skips != nullptr && b.skips[row] > 0) {
    for (int v = 0; v < kVectors; ++v) {
      int skipped = b.skips[row] - v * kLanes;
      skipped = skipped < 0 ? 0 : skipped > kLanes ? kLanes : skipped;
      s[v] = Simd::select_first(skipped, Simd::set(-__builtin_huge_valf()), s[v]);
    }
  }
  if (b.counts[row] < kBlockPositions) {
    // What the row does not attend to may be anything, NaN included: it is replaced, not
    // multiplied.
    for (int v = 0; v < kVectors; ++v) {
      int valid = b.counts[row] - v * kLanes;
      valid = valid < 0 ? 0 : valid > kLanes ? kLanes : valid;
      s[v] = Simd::select_first(valid, s[v], Simd::set(-__builtin_huge_valf()));
    }
  }
  F top = s[0];
  for (int v = 1; v < kVectors; ++v) top = Simd::max(top, s[v]);
  const float block_m = Simd::reduce_max(top);
  const float old_m = b.m[row];
  const float new_m = block_m > old_m ? block_m : old_m;

  float* acc = b.acc + row * (b.value_dim + kSumLanes);
  if (new_m != old_m) {
    b.m[row] = new_m;
    const F shrink = Simd::exp2_of_negative(Simd::set(old_m - new_m));
    for (int d = 0; d < b.value_dim + kLanes; d += kLanes) {
      Simd::store(acc + d, Simd::mul(Simd::load(acc + d), shrink));
    }
  }
  F sum = Simd::load(acc + b.value_dim);
  for (int v = 0; v < kVectors; ++v) {
    const F e = Simd::exp2_of_negative(Simd::sub(s[v], Simd::set(new_m)));
    Simd::store(scores + v * kLanes, scaled(b, e, b.value_scales, v * kLanes));
    sum = Simd::add(sum, e);
  }
  Simd::store(acc + b.value_dim, sum);
}

// --- Weighted values. ---

// acc += weights * values for kRows rows, kVectors vectors from element d on, positions first..end.
template <typename Load, int kRows, int kVectors, bool kAhead>
inline void add_values(const AttentionBlock& b, const typename Load::Element* values, int row,
                       int d, int first, int end) {
  F acc[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      acc[r][v] = Simd::load(b.acc + (row + r) * (b.value_dim + kSumLanes) + d + v * kLanes);
    }
  }
  const float* weights = b.scores + row * kBlockPositions;
  for (int j = first; j < end; ++j) {
    F value[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      value[v] = Load::at(values + j * b.head_dim + d + v * kLanes);
      if constexpr (kAhead) {
        fetch_ahead(values + j * b.head_dim + d + v * kLanes, d + v * kLanes, b.ahead);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      const F weight = Simd::set(weights[r * kBlockPositions + j]);
      for (int v = 0; v < kVectors; ++v) acc[r][v] = Simd::fma(weight, value[v], acc[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      Simd::store(b.acc + (row + r) * (b.value_dim + kSumLanes) + d + v * kLanes, acc[r][v]);
    }
  }
}

// kVectors vectors of kRows rows, the positions that all have, first..end, together, and what comes
// before and after them row by row: a row adds its positions in order.
template <typename Load, int kRows, int kVectors, bool kAhead>
inline void add_values_at(const AttentionBlock& b, const typename Load::Element* values, int row,
                          int d, int first, int end) {
  for (int r = row; first > 0 && r < row + kRows; ++r) {
    const int stop = b.counts[r] < first ? b.counts[r] : first;
    if (b.skips[r] < stop) {
      add_values<Load, 1, kVectors, false>(b, values, r, d, b.skips[r], stop);
    }
  }
  add_values<Load, kRows, kVectors, kAhead>(b, values, row, d, first, end);
  for (int r = row; r < row + kRows; ++r) {
    if (b.counts[r] > end) add_values<Load, 1, kVectors, false>(b, values, r, d, end, b.counts[r]);
  }
}

template <typename Load, int kRows, bool kAhead>
void add_values_of_rows(const AttentionBlock& b, const typename Load::Element* values, int row) {
  constexpr int kVectors = 4;
  int first = 0;
  int end = b.counts[row];
  for (int r = row; r < row + kRows; ++r) {
    if (b.counts[r] < end) end = b.counts[r];
    if (b.skips != nullptr && b.skips[r] > first) first = b.skips[r];
  }
  if (end < first) end = first;
  int d = 0;
  for (; d + kVectors * kLanes <= b.value_dim; d += kVectors * kLanes) {
    add_values_at<Load, kRows, kVectors, kAhead>(b, values, row, d, first, end);
  }
  for (; d < b.value_dim; d += kLanes) {
    add_values_at<Load, kRows, 1, kAhead>(b, values, row, d, first, end);
  }
}

template <typename Load, bool kAhead>
void add_all_values(const AttentionBlock& b, const typename Load::Element* values) {
  int row = 0;
  // Only the first rows fetch what comes next: for the others it is there.
  if (b.rows >= 4) {
    add_values_of_rows<Load, 4, kAhead>(b, values, 0);
    for (row = 4; row + 4 <= b.rows; row += 4) {
      add_values_of_rows<Load, 4, false>(b, values, row);
    }
    if (b.rows - row == 3) add_values_of_rows<Load, 3, false>(b, values, row);
    if (b.rows - row == 2) add_values_of_rows<Load, 2, false>(b, values, row);
    if (b.rows - row == 1) add_values_of_rows<Load, 1, false>(b, values, row);
    return;
  }
  if (b.rows == 3) add_values_of_rows<Load, 3, kAhead>(b, values, 0);
  if (b.rows == 2) add_values_of_rows<Load, 2, kAhead>(b, values, 0);
  if (b.rows == 1) add_values_of_rows<Load, 1, kAhead>(b, values, 0);
}

template <typename Load>
void block_of(const AttentionBlock& b) {
  const auto* values = static_cast<const typename Load::Element*>(b.values);
  if (b.rows < kManyRows) {
    if (b.head_dim == 64) {
      scores_of_few<Load, 64>(b);
    } else if (b.head_dim == 128) {
      scores_of_few<Load, 128>(b);
    } else {
      scores_of_few<Load, 0>(b);
    }
  } else {
    transpose_keys<Load>(b);
    tile_scores(b);
  }
  for (int row = 0; row < b.rows; ++row) {
    if (b.counts[row] > 0) weigh(b, row);
  }
  if (b.rows < kManyRows) {
    add_all_values<Load, true>(b, values);
  } else if (b.dtype == DType::kF32) {
    add_all_values<Load, false>(b, values);
  } else {
    // Converted once for all rows; the keys in the tile are no longer needed.
    const int n = b.max_count * b.head_dim;
    for (int i = 0; i < n; i += kLanes) Simd::store(b.tile + i, Load::at(values + i));
    add_all_values<LoadF32, false>(b, b.tile);
  }
}

void attend_block(const AttentionBlock& b) {
  if (b.dtype == DType::kF32) {
    block_of<LoadF32>(b);
  } else if (b.dtype == DType::kF16) {
    block_of<LoadF16>(b);
  } else if (b.dtype == DType::kBF16) {
    block_of<LoadBf16>(b);
  } else if (b.dtype == DType::kI8) {
    block_of<LoadI8>(b);
  } else {
    block_of<LoadE4m3>(b);
  }
}

void merge_split(int value_dim, float m, const float* acc, float* total_m, float* total_acc) {
  const float new_m = *total_m > m ? *total_m : m;
  const F total_factor = Simd::exp2_of_negative(Simd::set(*total_m - new_m));
  const F factor = Simd::exp2_of_negative(Simd::set(m - new_m));
  *total_m = new_m;
  for (int d = 0; d < value_dim + kLanes; d += kLanes) {
    const F total = Simd::mul(Simd::load(total_acc + d), total_factor);
    Simd::store(total_acc + d, Simd::fma(Simd::load(acc + d), factor, total));
  }
}

void finish_row(int value_dim, const float* acc, float* output) {
  const F divisor = Simd::set(Simd::reduce_add(Simd::load(acc + value_dim)));
  for (int d = 0; d < value_dim; d += kLanes) {
    Simd::store(output + d, Simd::div(Simd::load(acc + d), divisor));
  }
}

void scale_row(int n, const float* x, float scale, float* y) {
  for (int i = 0; i < n; i += kLanes) {
    Simd::store(y + i, Simd::mul(Simd::load(x + i), Simd::set(scale)));
  }
}

void store_row(DType dtype, int n, const float* x, void* y) {
  for (int i = 0; i < n; i += kLanes) {
    const F v = Simd::load(x + i);
    if (dtype == DType::kF32) {
      Simd::store(static_cast<float*>(y) + i, v);
    } else if (dtype == DType::kF16) {
      Simd::store_f16(static_cast<std::uint16_t*>(y) + i, v);
    } else {
      Simd::store_bf16(static_cast<std::uint16_t*>(y) + i, v);
    }
  }
}

void store_row_int8(int n, const float* x, std::int8_t* y, float* scale) {
  F top = Simd::zero();
  F not_finite = Simd::zero();  // NaN where something was
  for (int i = 0; i < n; i += kLanes) {
    const F v = Simd::load(x + i);
    top = Simd::max(top, Simd::max(v, Simd::sub(Simd::zero(), v)));
    not_finite = Simd::add(not_finite, Simd::mul(v, Simd::zero()));
  }
  constexpr float kLeast = 0x1p-126F;  // below, the scale itself would be coarse
  const float largest = Simd::reduce_max(top) / 127.0F;
  const float sum = Simd::reduce_add(not_finite);
  *scale = sum != sum ? __builtin_nanf("") : largest < kLeast ? 0.0F : largest;
  for (int i = 0; i < n; i += kLanes) {
    const F multiples =
        *scale > 0.0F ? Simd::div(Simd::load(x + i), Simd::set(*scale)) : Simd::zero();
    Simd::store_i8(y + i, multiples);
  }
}

constexpr AttentionKernels kKernels = {kLanes,    attend_block, merge_split,   finish_row,
                                       scale_row, store_row,    store_row_int8};

}  // namespace
}  // namespace pianola::cpu
