// The multiplications of rows_kernel: how its operands lie in shared memory, its loop over a slice,
// and how the sums leave. Tensor cores read activations from shared memory themselves, once for 64
// rows of weights (wgmma). The bits are those of mma.sync in the other routes: a product of 16
// terms has them whatever the instruction and the order of its terms.
#pragma once

#include "backends/cuda/kernels/barriers.cuh"
#include "backends/cuda/kernels/linear_one.cuh"
#include "backends/cuda/kernels/warpgroup.cuh"

namespace pianola::cuda::products {

// A stage of a warp's ring: two boxes each of two tiles, side by side.
inline constexpr int kRowsTiles = 2;
inline constexpr int kRowsBoxes = 2;
inline constexpr int kRowsTileBytes = kTileRows * kBoxBytes;
inline constexpr int kRowsStageBytes = kRowsTiles * kRowsBoxes * kRowsTileBytes;
inline constexpr int kRowsStageSteps = kRowsBoxes * kBoxBytes / 64;

// A lane's weights of a stage: its row of each tile, [step][tile].
struct StageWeights {
  uint4 word[kRowsStageSteps][kRowsTiles];

  __device__ __forceinline__ void load(const unsigned char* stage, int row, int t) {
    const unsigned char* from = stage + row * kBoxBytes;
    const int chunk[2] = {(t ^ row) * 16, ((t + 4) ^ row) * 16};
#pragma unroll
    for (int i = 0; i < kRowsStageSteps; ++i) {
#pragma unroll
      for (int n = 0; n < kRowsTiles; ++n) {
        word[i][n] = *reinterpret_cast<const uint4*>(
            from + (n * kRowsBoxes + i / 2) * kRowsTileBytes + chunk[i % 2]);
      }
    }
  }
};

// A group of four warps multiplies 16 rows each: rows box_row(g) of a warp's two tiles are rows g
// and g + 8 of its part.
template <Codes codes, int kGroups>
struct RowsMath {
  using S = Step<codes>;
  static constexpr Codes kCodes = codes;
  static constexpr int kTokens = 8 * kGroups;
  static constexpr int kTogether = 4;  // warps that multiply together
  // Of four activations that a lane converts at once.
  static constexpr int kQuads = kGroups == 1 || kGroups == 8 ? 8 : 16;
  // Weights on their way, and sums of a turn, of which there should be few.
  static constexpr int kRingBytes = (kGroups == 1 ? 96 : 64) * 1024;
  static constexpr int kPartialBytes = (kGroups == 1 ? 40 : 64) * 1024;

  // Of one slice: [half of a product's columns][high parts of the tokens, then low ones] of eight
  // columns, two of each lane t, with a gap against bank conflicts behind each half.
  static constexpr int kHalfBytes = 2 * kTokens * 16 + 16;
  static constexpr __host__ __device__ int staged_bytes(int steps) {
    return steps * S::kProducts * 2 * kHalfBytes;
  }
  static __device__ __forceinline__ void stage(unsigned char* staged, int product, int t, int token,
                                               const uint4& words) {
    unsigned char* to = staged + product * 2 * kHalfBytes + token * 16 + t * 4;
    *reinterpret_cast<std::uint32_t*>(to) = words.x;
    *reinterpret_cast<std::uint32_t*>(to + kTokens * 16) = words.y;
    *reinterpret_cast<std::uint32_t*>(to + kHalfBytes) = words.z;
    *reinterpret_cast<std::uint32_t*>(to + kHalfBytes + kTokens * 16) = words.w;
  }
  static __device__ __forceinline__ void end_staging() { fence_shared(); }

  // Sums of a tile: [row][token], with a gap against bank conflicts behind each row.
  static constexpr int kRowFloats = kTokens + 4;
  static constexpr int kTileFloats = kTileRows * kRowFloats;
  static __device__ __forceinline__ int sum_place(int row, int token) {
    return row * kRowFloats + token;
  }

  float acc[2 * kGroups][4] = {};  // of eight tokens' high parts, then of their low ones

  template <typename Next, typename Done>
  __device__ __forceinline__ void multiply(const unsigned char* staged, int steps, const Next& next,
                                           const Done& done) {
    std::uint64_t operands = core_matrices(staged, kHalfBytes, 8 * 16);
    // A product's weights stay where they are until it is over, so two stages take turns.
    const auto stage = [&](StageWeights& weights) {
      const int lane = threadIdx.x % 32;
      weights.load(next(), box_row(lane / 4), lane % 4);
      begin_products();
#pragma unroll
      for (int i = 0; i < kRowsStageSteps * S::kProducts; ++i) {
#pragma unroll
        for (int part = 0; part < S::kParts; ++part) {
          std::uint32_t a[4];
          operand<codes>(weights.word[i / S::kProducts][0], i % S::kProducts, part, a[0], a[2]);
          operand<codes>(weights.word[i / S::kProducts][1], i % S::kProducts, part, a[1], a[3]);
          product_of_group<kGroups>(acc, a, operands + i * (2 * kHalfBytes / 16));
        }
      }
      end_products();
      __syncwarp();
      done();
      wait_products<1>();
      operands += kRowsStageSteps * S::kProducts * (2 * kHalfBytes / 16);
    };
    StageWeights first;
    StageWeights second;
    int step = 0;
    if (steps / kRowsStageSteps % 2 != 0) {
      stage(first);
      wait_products<0>();
      step = kRowsStageSteps;
    }
#pragma unroll 1
    for (; step < steps; step += 2 * kRowsStageSteps) {
      stage(first);
      stage(second);
    }
    wait_products<0>();
  }

  // To the slice's sums of the pass, of which `tiles` are wanted.
  __device__ __forceinline__ void send_sums(std::uint32_t to, std::uint32_t signal, int tiles,
                                            int tokens) const {
    const int t = threadIdx.x % 4;
    to += (box_row(threadIdx.x % 32 / 4) * kRowFloats + 2 * t) * 4;
#pragma unroll
    for (int n = 0; n < kRowsTiles; ++n) {
      if (n >= tiles) continue;
#pragma unroll
      for (int m = 0; m < kGroups; ++m) {
        const int token = 8 * m + 2 * t;
        const std::uint32_t at = to + (n * kTileFloats + 8 * m) * 4;
        const float even = acc[m][2 * n] + acc[kGroups + m][2 * n];
        const float odd = acc[m][2 * n + 1] + acc[kGroups + m][2 * n + 1];
        if (token + 1 < tokens) {
          send(at, make_float2(even, odd), signal);
        } else if (token < tokens) {
          send(at, even, signal);
        }
      }
    }
  }
};

}  // namespace pianola::cuda::products
