// Values of a packed weight, a few neighbouring columns at a time: what unpack_bf16 and embed
// share.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/cuda/kernels/device.cuh"
#include "backends/cuda/kernels/packed_weight.h"
#include "pianola/error.h"

namespace pianola::cuda {

// A PackedWeight as a kernel reads it.
struct PackedRows {
  const std::byte* codes = nullptr;   // [rows, code_stride bytes]
  const std::byte* scales = nullptr;  // [rows, scale_stride bytes]
  std::size_t code_stride = 0;
  std::size_t scale_stride = 0;
  int cols = 0;
};

inline PackedRows packed_rows(const PackedWeight& w) {
  return {w.data, w.scale_data, code_row_bytes(w.codes, w.cols),
          w.scales == Scales::kNone ? 0 : scale_row_bytes(w.scales, w.codes, w.cols), w.cols};
}

// Columns that one thread reads at a time: eight when that is a whole number of 16-byte pieces of
// every row, else one.
inline bool in_eights(const PackedWeight& w) { return w.cols % 8 == 0; }

template <typename T>
__device__ __forceinline__ T load_as(const std::byte* p) {
  return __ldg(reinterpret_cast<const T*>(p));
}

__device__ __forceinline__ float2 half_pair(std::uint32_t bits) {
  return __half22float2(*reinterpret_cast<const __half2*>(&bits));
}

// value[j] = element (row, col + j) of a matrix of plain elements.
template <Codes kCodes, int kCount>
__device__ __forceinline__ void unpack_plain(const PackedRows& w, int row, int col,
                                             float (&value)[kCount]) {
  const std::byte* p = w.codes + static_cast<std::size_t>(row) * w.code_stride;
  if constexpr (kCodes == Codes::kF32) {
    p += static_cast<std::size_t>(col) * 4;
    if constexpr (kCount == 8) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float4 v = load_as<float4>(p + 16 * i);
        value[4 * i] = v.x;
        value[4 * i + 1] = v.y;
        value[4 * i + 2] = v.z;
        value[4 * i + 3] = v.w;
      }
    } else {
      value[0] = load_as<float>(p);
    }
  } else {
    p += static_cast<std::size_t>(col) * 2;
    const auto low = [](std::uint32_t pair) {
      return kCodes == Codes::kBF16 ? bf16_low(pair) : half_pair(pair).x;
    };
    const auto high = [](std::uint32_t pair) {
      return kCodes == Codes::kBF16 ? bf16_high(pair) : half_pair(pair).y;
    };
    if constexpr (kCount == 8) {
      const uint4 v = load_as<uint4>(p);
      const std::uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        value[2 * i] = low(pairs[i]);
        value[2 * i + 1] = high(pairs[i]);
      }
    } else {
      value[0] = low(load_as<std::uint16_t>(p));
    }
  }
}

// The same of block codes; `col` is a multiple of eight. Eight neighbours are half of what lanes t
// and t + 1 of a block hold.
template <Codes kCodes, Scales kScales>
__device__ __forceinline__ void unpack_block(const PackedRows& w, int row, int col,
                                             float (&value)[8]) {
  constexpr int kBlocks = kCodes == Codes::kInt4 ? 4 : 2;  // in a group
  const int block = col / 32;
  const int eighth = col / 8 % 4;  // of the block
  const int t = eighth % 2 * 2;
  const int half = eighth / 2;
  const std::byte* codes = w.codes + static_cast<std::size_t>(row) * w.code_stride +
                           static_cast<std::size_t>(block / kBlocks) * 64;
  const std::byte* scales = w.scales + static_cast<std::size_t>(row) * w.scale_stride;
  float d;
  float m = 0;
  if constexpr (kScales == Scales::kHalfPair) {
    const float2 pair = half_pair(load_as<std::uint32_t>(scales + block * 4));
    d = pair.x;
    m = pair.y;
  } else if constexpr (kScales == Scales::kFloatPair) {
    const float2 pair = load_as<float2>(scales + block * 8);
    d = pair.x;
    m = pair.y;
  } else {
    d = load_as<float>(scales + (block * 2 + half) * 4);
  }
#pragma unroll
  for (int lane = 0; lane < 2; ++lane) {
    int code[4];
    if constexpr (kCodes == Codes::kInt4) {
      const auto word = load_as<std::uint32_t>(codes + ((t + lane) * 4 + block % 4) * 4);
#pragma unroll
      for (int j = 0; j < 4; ++j) code[j] = word >> (8 * half + 4 * (j / 2) + 16 * (j % 2)) & 0xF;
    } else {
      const auto word = load_as<std::uint32_t>(codes + ((t + lane) * 2 + block % 2) * 8 + 4 * half);
#pragma unroll
      for (int j = 0; j < 4; ++j) code[j] = static_cast<std::int8_t>(word >> (8 * j) & 0xFF);
    }
    // Products are exact in f32, so fusing changes nothing.
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      value[4 * lane + j] = fmaf(d, static_cast<float>(code[j]), m);
    }
  }
}

template <Codes kCodes, Scales kScales, int kCount>
__device__ __forceinline__ void unpack_values(const PackedRows& w, int row, int col,
                                              float (&value)[kCount]) {
  if constexpr (kScales == Scales::kNone) {
    unpack_plain<kCodes>(w, row, col, value);
  } else {
    unpack_block<kCodes, kScales>(w, row, col, value);
  }
}

// A form and the columns a thread reads, known at compile time.
template <Codes kFormCodes, Scales kFormScales, int kFormCount>
struct Form {
  static constexpr Codes kCodes = kFormCodes;
  static constexpr Scales kScales = kFormScales;
  static constexpr int kCount = kFormCount;
};

// Calls f with the Form of `w`.
template <typename F>
void with_form(const PackedWeight& w, F&& f) {
  const auto plain = [&](auto eight, auto one) { in_eights(w) ? f(eight) : f(one); };
  const auto is = [&](Codes c, Scales s) { return w.codes == c && w.scales == s; };
  if (is(Codes::kF32, Scales::kNone)) {
    plain(Form<Codes::kF32, Scales::kNone, 8>{}, Form<Codes::kF32, Scales::kNone, 1>{});
  } else if (is(Codes::kF16, Scales::kNone)) {
    plain(Form<Codes::kF16, Scales::kNone, 8>{}, Form<Codes::kF16, Scales::kNone, 1>{});
  } else if (is(Codes::kBF16, Scales::kNone)) {
    plain(Form<Codes::kBF16, Scales::kNone, 8>{}, Form<Codes::kBF16, Scales::kNone, 1>{});
  } else if (is(Codes::kInt4, Scales::kHalfPair)) {
    f(Form<Codes::kInt4, Scales::kHalfPair, 8>{});
  } else if (is(Codes::kInt4, Scales::kFloatPair)) {
    f(Form<Codes::kInt4, Scales::kFloatPair, 8>{});
  } else if (is(Codes::kInt8, Scales::kHalfPair)) {
    f(Form<Codes::kInt8, Scales::kHalfPair, 8>{});
  } else if (is(Codes::kInt8, Scales::kFloatPair)) {
    f(Form<Codes::kInt8, Scales::kFloatPair, 8>{});
  } else if (is(Codes::kInt8, Scales::kFloat16)) {
    f(Form<Codes::kInt8, Scales::kFloat16, 8>{});
  } else {
    throw Error(ErrorCode::kInternal, "packed weight: codes and scales that do not go together");
  }
}

}  // namespace pianola::cuda
