// The products of experts: one kernel for every form of weights.
//
// Work comes in units: a few tiles of eight rows of one expert, on the routes of one segment. Each
// team of warps (as many as columns have slices) takes a run of neighbouring units. Which weights
// they are is known only on the device and only after the kernel before, so loads begin there; they
// travel through a ring in shared memory, every thread its own 16 bytes, across units.
#pragma once

#include <type_traits>

#include "backends/cuda/kernels/activation.cuh"
#include "backends/cuda/kernels/experts_forms.h"
#include "backends/cuda/kernels/experts_math.cuh"
#include "backends/cuda/kernels/linear_operand.cuh"

namespace pianola::cuda::products {

// 16 bytes of zeros when not `inside`.
__device__ __forceinline__ void copy_or_clear(void* to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(
                   static_cast<std::uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from), "r"(inside ? 16 : 0)
               : "memory");
}
template <int kBytes>
__device__ __forceinline__ void copy_scale(void* to, const void* from, bool inside) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(
                   static_cast<std::uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from), "n"(kBytes), "r"(inside ? kBytes : 0)
               : "memory");
}

template <Codes codes, Scales scales, ExpertProduct product, int kGroups>
struct ExpertTiling {
  static constexpr bool kQuantised = scales != Scales::kNone;
  static constexpr int kTiles = product == ExpertProduct::kSum ? 1 : kGroups == 1 ? 2 : 4;
  static constexpr int kDepth = 16 / kTiles;  // steps on their way: 64 KB
  // Rows whose results a unit gives.
  static constexpr int kUnitTiles = product == ExpertProduct::kGated ? kTiles / 2 : kTiles;
  static constexpr int kUnitRows = kUnitTiles * kTileRows;
  static constexpr int kTokens = 8 * kGroups;
  // Of a lane, a tile and a step.
  static constexpr int kScaleBytes = !kQuantised ? 0 : ScaleWords<codes, scales>::kWide ? 8 : 4;
  static constexpr int kRingBytes = kDepth * kTiles * kThreads * (16 + kScaleBytes);
  // Partial results of one unit, in floats; kSum has one more factor, its ranks.
  static constexpr int kPartial =
      product == ExpertProduct::kSum ? kWarps * kTileRows : kWarps * kTokens * kTiles * kTileRows;
};

template <Codes codes, Scales scales, ExpertProduct product, int kGroups, bool kDirect>
__global__ void __launch_bounds__(kThreads, !kDirect && kGroups == 1 ? 2 : 1)
    experts_kernel(const ExpertParams p) {
  using S = Step<codes>;
  using T = ExpertTiling<codes, scales, product, kGroups>;
  constexpr bool kQuantised = T::kQuantised;
  constexpr bool kGated = product == ExpertProduct::kGated;
  constexpr bool kSums = product == ExpertProduct::kSum;
  constexpr int kTiles = T::kTiles;
  constexpr int kDepth = T::kDepth;
  static_assert(!kDirect || kGroups == 1);
  static_assert(!kSums || kDirect);
  using ScaleWord = std::conditional_t<T::kScaleBytes == 8, uint2, std::uint32_t>;
  extern __shared__ __align__(16) std::byte memory[];
  uint4* ring = reinterpret_cast<uint4*>(memory) + threadIdx.x;  // [depth][tile][thread]
  auto* scale_ring =
      reinterpret_cast<ScaleWord*>(memory + kDepth * kTiles * kThreads * 16) + threadIdx.x;
  auto* partials = reinterpret_cast<float*>(memory + T::kRingBytes);
  const int unit_partials = T::kPartial * (kSums ? p.top_k : 1);
  auto* staged = reinterpret_cast<uint4*>(partials + 2 * unit_partials);  // of a direct launch
  __shared__ int chosen[kDirect ? kMostDirectRoutes : 1];
  __shared__ float chosen_weight[kDirect ? kMostDirectRoutes : 1];
  __shared__ float squares[kDirect ? kWarps : 1];

  allow_next();
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int g = lane / 4;  // row of a tile as weights are loaded; token as results lie
  const int t = lane % 4;
  const int slice = warp & (p.slices - 1);
  const int team = warp / p.slices;  // warps that work on the same tiles
  const int teams = kWarps / p.slices;
  const int per_team = kThreads / teams;
  const int rank_in_team = static_cast<int>(threadIdx.x) - team * per_team;
  const int step_begin = slice_begin(p.steps, p.slices, slice);
  const int step_end = slice_begin(p.steps, p.slices, slice + 1);
  const int quads = p.cols / 4;

  float4 norm[kHeld];
  if constexpr (kDirect && kGated) {
    load_norm(p.norm, p.cols, step_begin * S::kCols, step_end * S::kCols, lane, norm);
  }
  wait_for_previous();

  int segments = p.top_k;
  if constexpr (kDirect) {
    const int live = __ldcg(p.count);
    const int rank = min(static_cast<int>(threadIdx.x), p.top_k - 1);
    const float expert = load_activation(p.routing + rank);
    const float weight = load_activation(p.routing + p.top_k + rank);
    if (live <= p.first) return;
    if (static_cast<int>(threadIdx.x) == rank) {
      chosen[rank] = static_cast<int>(expert);
      chosen_weight[rank] = weight;
    }
    if constexpr (kSums) {
      const int words = p.top_k * quads;
      for (int i = threadIdx.x; i < words; i += kThreads) copy_async(staged + i, p.words + i);
      commit_copies();
    }
    __syncthreads();
  } else {
    segments = __ldcg(p.segment_count);
  }

  // Units of this team. Every team of a block makes the same number of turns: they meet at
  // barriers.
  const unsigned units =
      static_cast<unsigned>(kSums ? p.segment_units : segments * p.segment_units);
  const unsigned workers = gridDim.x * teams;
  const unsigned worker = blockIdx.x * teams + team;
  const int unit_begin = static_cast<int>(static_cast<std::uint64_t>(units) * worker / workers);
  const int unit_end = static_cast<int>(static_cast<std::uint64_t>(units) * (worker + 1) / workers);
  const int ranks = kSums ? p.top_k : 1;  // turns of one unit
  const int turns = static_cast<int>((units + workers - 1) / workers) * ranks;

  struct Work {
    Segment segment;  // no expert: nothing to do
    int row = 0;
    int index = 0;  // of the segment
  };
  const auto work_of = [&](int turn) {
    Work w;
    w.segment.expert = -1;
    const int unit = unit_begin + turn / ranks;
    if (unit >= unit_end) return w;
    if constexpr (kSums) {
      w.index = turn % ranks;
      w.row = unit * T::kUnitRows;
    } else {
      w.index = unit / p.segment_units;
      w.row = unit % p.segment_units * T::kUnitRows;
    }
    if constexpr (kDirect) {
      w.segment = {chosen[w.index], w.index, chosen[w.index] >= 0 ? 1 : 0, 0};
    } else {
      const int4 v = __ldcg(reinterpret_cast<const int4*>(p.segments) + w.index);
      w.segment = {v.x, v.y, v.z, 0};
    }
    return w;
  };

  // Loading runs ahead of computing, by kDepth steps and across turns.
  const std::byte* code[kTiles];
  const std::byte* scale[kQuantised ? kTiles : 1];
  bool exists[kTiles];
  int load_turn = 0;
  int load_step = step_begin;
  const auto set_tiles = [&] {
    const Work w = load_turn < turns ? work_of(load_turn) : Work{{-1, 0, 0, 0}, 0, 0};
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const ExpertMatrix& m = p.matrix[kGated ? n % 2 : 0];
      const int first_row = w.row + (kGated ? n / 2 : n) * kTileRows;
      exists[n] = w.segment.expert >= 0 && first_row < p.rows;
      // Rows beyond the matrix read its last one: their results are not stored.
      const int row = exists[n] ? min(first_row + g, p.rows - 1) : 0;
      const std::int64_t matrix = exists[n] ? w.segment.expert * m.stride : 0;
      code[n] =
          m.codes + matrix + static_cast<std::int64_t>(p.code_row) * row + step_begin * 64 + 16 * t;
      if constexpr (kQuantised) {
        using Words = ScaleWords<codes, scales>;
        const int word = Words::kRowBytes == 8 ? t & 1 : t;
        scale[n] = m.scales + matrix + static_cast<std::int64_t>(p.scale_row) * row +
                   step_begin * Words::kRowBytes + word * T::kScaleBytes;
      }
    }
  };
  const auto load_one = [&](int slot) {
    // Rows of f32, f16 and bf16 end where the matrix ends; those of codes are padded.
    const bool inside = kQuantised || load_step * S::kCols + column<codes>(0, t) < p.cols;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const bool here = exists[n] && inside;
      copy_or_clear(ring + (slot * kTiles + n) * kThreads, code[n], here);
      code[n] += 64;
      if constexpr (kQuantised) {
        copy_scale<T::kScaleBytes>(scale_ring + (slot * kTiles + n) * kThreads, scale[n], here);
        scale[n] += ScaleWords<codes, scales>::kRowBytes;
      }
    }
    commit_copies();
    if (++load_step == step_end) {
      load_step = step_begin;
      ++load_turn;
      set_tiles();
    }
  };
  set_tiles();
#pragma unroll 1
  for (int i = 0; i < kDepth; ++i) load_one(i);

  float token_scale = 1;  // of a direct launch
  if constexpr (kDirect && kGated) {
    if (team == 0) {
      const float square = warp_sum(
          convert_slice<codes>(p.norm, p.cols, p.in, step_begin * S::kCols, step_end * S::kCols,
                               norm, lane, [&](int c, const uint4& words) {
                                 if (c < p.cols) staged[c / 4] = words;
                               }));
      if (lane == 0) squares[warp] = square;
    }
    __syncthreads();
    const float sum = add_slices(p.slices, [&](int s) { return squares[s]; });
    token_scale = rsqrtf(sum / static_cast<float>(p.cols) + p.eps);
  } else if constexpr (kDirect) {
    wait_copies<kDepth>();
    __syncthreads();
  }

  float acc[kTiles][kGroups][4];
  const auto clear = [&] {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int m = 0; m < kGroups; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[n][m][i] = 0;
      }
    }
  };
  clear();

  int slot = 0;
  int known = -1;           // the segment whose routes are known
  int source[kGroups];      // row of the activations of token g of each group, or -1
  float held_residual = 0;  // of kSum
  for (int turn = 0; turn < turns; ++turn) {
    const Work work = work_of(turn);
    const int count = work.segment.expert < 0 ? 0 : work.segment.count;
    if constexpr (!kDirect) {
      if (count > 0 && work.index != known) {
        known = work.index;
#pragma unroll
        for (int m = 0; m < kGroups; ++m) {
          const int i = 8 * m + g;
          source[m] = -1;
          if (i < count) {
            const int route = __ldcg(p.routes + work.segment.first + i);
            source[m] = p.words_by_route ? route : route / p.top_k;
          }
        }
      }
    }
    const int rank = kSums ? turn % ranks : 0;
    if constexpr (kSums) {
      const int row = work.row + rank_in_team;
      if (rank == 0 && rank_in_team < kTileRows && unit_begin + turn / ranks < unit_end &&
          row < p.rows && p.residual) {
        held_residual = __ldcg(p.residual + row);
      }
    }

    const auto activations = [&](int step, int j, int m) -> uint4 {
      const int c = step * S::kCols + column<codes>(j, t);
      uint4 v = make_uint4(0, 0, 0, 0);
      if constexpr (kDirect) {
        if (g == 0 && c < p.cols) v = staged[(kSums ? rank * quads : 0) + c / 4];
      } else {
        if (source[m] >= 0 && c < p.cols) {
          v = __ldcg(p.words + static_cast<std::int64_t>(source[m]) * quads + c / 4);
        }
      }
      return v;
    };
    // Of plain weights, the activations of the next step: on their way while this one's are used.
    uint4 ahead[kQuantised ? 1 : S::kProducts][kQuantised ? 1 : kGroups];
    const auto load_ahead = [&](int step) {
      if constexpr (!kQuantised) {
#pragma unroll
        for (int j = 0; j < S::kProducts; ++j) {
#pragma unroll
          for (int m = 0; m < kGroups; ++m) {
            if (m * 8 < count) ahead[j][m] = activations(step, j, m);
          }
        }
      }
    };
    if (count > 0) load_ahead(step_begin);
    for (int step = step_begin; step < step_end; ++step) {
      wait_copies<kDepth - 1>();
      if (count > 0) {
        uint4 weights[kTiles];
#pragma unroll
        for (int n = 0; n < kTiles; ++n) weights[n] = ring[(slot * kTiles + n) * kThreads];
        if constexpr (kQuantised) {
          ScaleWords<codes, scales> words[kTiles];
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
            const ScaleWord v = scale_ring[(slot * kTiles + n) * kThreads];
            if constexpr (T::kScaleBytes == 8) {
              words[n].set(v);
            } else {
              words[n].set(make_uint2(v, 0));
            }
          }
          multiply_blocks<codes, scales>(acc, weights, words, kTiles, count, t,
                                         [&](int j, int m) { return activations(step, j, m); });
        } else {
          uint4 a[S::kProducts][kGroups];
#pragma unroll
          for (int j = 0; j < S::kProducts; ++j) {
#pragma unroll
            for (int m = 0; m < kGroups; ++m) a[j][m] = ahead[j][m];
          }
          if (step + 1 < step_end) load_ahead(step + 1);
#pragma unroll
          for (int j = 0; j < S::kProducts; ++j) {
#pragma unroll
            for (int m = 0; m < kGroups; ++m) {
              if (m * 8 >= count) continue;
              const std::uint32_t words[4] = {a[j][m].x, a[j][m].y, a[j][m].z, a[j][m].w};
#pragma unroll
              for (int n = 0; n < kTiles; ++n) {
#pragma unroll
                for (int part = 0; part < S::kParts; ++part) {
                  std::uint32_t b0 = 0;
                  std::uint32_t b1 = 0;
                  operand<codes>(weights[n], j, part, b0, b1);
                  mma_bf16(acc[n][m], words, b0, b1);
                }
              }
            }
          }
        }
      }
      load_one(slot);  // into the slot that was just read
      slot = slot + 1 == kDepth ? 0 : slot + 1;
    }

    // Partial results of even and odd units use different halves, so that one barrier is enough.
    const int first_warp = team * p.slices;
    float* partial = partials + (turn / ranks & 1) * unit_partials;
    if constexpr (kSums) {
      // High and low parts of the token lie in the same lane.
      if (g == 0) {
        float* mine = partial + rank * T::kPartial + warp * kTileRows;
        *reinterpret_cast<float2*>(mine + 2 * t) =
            make_float2(acc[0][0][0] + acc[0][0][2], acc[0][0][1] + acc[0][0][3]);
      }
      clear();
      if (rank + 1 < ranks) continue;
      __syncthreads();
      const int row = work.row + rank_in_team;
      if (unit_begin + turn / ranks >= unit_end || rank_in_team >= kTileRows || row >= p.rows) {
        continue;
      }
      ExpertSum sum;
      for (int r = 0; r < ranks; ++r) {
        if (chosen[r] < 0) continue;
        const float* of_rank = partial + r * T::kPartial + first_warp * kTileRows + rank_in_team;
        float y = add_slices(p.slices, [&](int s) { return of_rank[s * kTileRows]; });
        const float* bias = p.matrix[0].bias;
        if (bias) y += __ldg(bias + static_cast<std::int64_t>(chosen[r]) * p.rows + row);
        sum.add(chosen_weight[r], y);
      }
      p.out[row] = sum.plus(p.residual ? held_residual : 0.0F);
    } else {
      float* mine = partial + warp * T::kTokens * kTiles * kTileRows;
#pragma unroll
      for (int m = 0; m < kGroups; ++m) {
        if (8 * m + g >= count) continue;
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          *reinterpret_cast<float2*>(mine + ((8 * m + g) * kTiles + n) * kTileRows + 2 * t) =
              make_float2(acc[n][m][0] + acc[n][m][2], acc[n][m][1] + acc[n][m][3]);
        }
      }
      clear();
      __syncthreads();
      const int outputs = T::kUnitRows * count;
      for (int o = rank_in_team; o < outputs; o += per_team) {
        const int tile = o / kTileRows % T::kUnitTiles;
        const int token = o / T::kUnitRows;
        const int row = work.row + tile * kTileRows + o % kTileRows;
        if (row >= p.rows) continue;
        const int route = kDirect ? work.index : __ldcg(p.routes + work.segment.first + token);
        float scale_out = token_scale;
        if (!kDirect && p.inverse_rms) scale_out = __ldcg(p.inverse_rms + route / p.top_k);
        const auto total = [&](int which, int matrix) {
          float y = __fmul_rn(
              scale_out, add_slices(p.slices, [&](int s) {
                return partial[(((first_warp + s) * T::kTokens + token) * kTiles + which) *
                                   kTileRows +
                               o % kTileRows];
              }));
          const float* bias = p.matrix[matrix].bias;
          if (bias) {
            y += __ldg(bias + static_cast<std::int64_t>(work.segment.expert) * p.rows + row);
          }
          return y;
        };
        if constexpr (kGated) {
          const float y = activate(p.activation, total(2 * tile, 0), total(2 * tile + 1, 1));
          store_hidden(p.hidden, route, p.rows, row, y);
        } else {
          p.parts[static_cast<std::int64_t>(route) * p.rows + row] = total(tile, 0);
        }
      }
    }
  }
  wait_copies<0>();
}

}  // namespace pianola::cuda::products
