// A few neighbouring elements of a head as plain kernels read them: as they lie in a cache, and as
// floats.
#pragma once

#include <cstdint>

#include "backends/cuda/kernels/attention_common.cuh"

namespace pianola::cuda {

inline constexpr int kWide = 8;  // elements of a head that a lane reads at a time

// Neighbours as they lie in a cache.
template <typename T>
struct Piece {
  static constexpr int kWords = kWide * static_cast<int>(sizeof(T)) / 4;
  std::uint32_t word[kWords];

  __device__ __forceinline__ void load(const T* from) {
    if constexpr (kWords == 2) {
      const uint2 two = __ldcg(reinterpret_cast<const uint2*>(from));
      word[0] = two.x;
      word[1] = two.y;
    } else {
#pragma unroll
      for (int i = 0; i < kWords; i += 4) {
        const uint4 four = __ldcg(reinterpret_cast<const uint4*>(from) + i / 4);
        word[i] = four.x;
        word[i + 1] = four.y;
        word[i + 2] = four.z;
        word[i + 3] = four.w;
      }
    }
  }
  __device__ __forceinline__ void widen(float (&x)[kWide]) const {
#pragma unroll
    for (int i = 0; i < kWide / 2; ++i) {
      float2 pair;
      if constexpr (kWords == 8) {
        pair = make_float2(__uint_as_float(word[2 * i]), __uint_as_float(word[2 * i + 1]));
      } else if constexpr (kWords == 4) {
        pair = unpack<T>(word[i]);
      } else {
        pair = unpack<T>(static_cast<std::uint16_t>(word[i / 2] >> (16 * (i % 2))));
      }
      x[2 * i] = pair.x;
      x[2 * i + 1] = pair.y;
    }
  }
};

}  // namespace pianola::cuda
