// head_products() and finish_latents(): what lies around attend_latent().
#include <algorithm>

#include "backends/cuda/kernels/attention_common.cuh"
#include "backends/cuda/kernels/latent.h"
#include "backends/cuda/kernels/linear.h"
#include "backends/cuda/kernels/unpack.cuh"

namespace pianola::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// --- Products. A group of lanes takes a few rows of one head's matrix, eight neighbours a lane at
// a time, on one token or on a few. ---

constexpr int kRows = 4;
constexpr int kColumns = 8;
constexpr int kTokenTile = 8;

// Lanes of a group: as many as a row has pieces for, a power of two.
int lanes_of(int cols) {
  int lanes = 1;
  while (lanes < 32 && lanes * kColumns < cols) lanes *= 2;
  return lanes;
}

// Rows on x, heads on y, tokens on z.
template <Codes kCodes, Scales kScales, int kTokens>
__global__ void __launch_bounds__(kThreads)
    head_products_kernel(const __grid_constant__ HeadProductArgs args, PackedRows weight,
                         int lanes) {
  allow_next();
  const int thread = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  const int row = thread / lanes * kRows;
  const int head = static_cast<int>(blockIdx.y);
  const int first = static_cast<int>(blockIdx.z) * kTokens;
  weight.codes += head * args.stride;
  if constexpr (kScales != Scales::kNone) weight.scales += head * args.stride;
  wait_for_previous();
  const int live = min(args.tokens, __ldcg(args.count)) - first;
  if (live <= 0) return;
  const float* in = args.in + static_cast<std::size_t>(first) * args.in_token +
                    static_cast<std::size_t>(head) * args.in_head;
  float sums[kTokens][kRows] = {};
  for (int col = thread % lanes * kColumns; col < weight.cols; col += lanes * kColumns) {
    float w[kRows][kColumns];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      // Beyond the last row: that one again, and its sum goes nowhere.
      unpack_values<kCodes, kScales>(weight, min(row + r, args.weight.rows - 1), col, w[r]);
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (t >= live) break;
      const float* from = in + static_cast<std::size_t>(t) * args.in_token + col;
      const float4 low = load_activation4(from);
      const float4 high = load_activation4(from + 4);
      const float x[kColumns] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int i = 0; i < kColumns; ++i) sums[t][r] = __fmaf_rn(w[r][i], x[i], sums[t][r]);
      }
    }
  }
  float* out = args.out + static_cast<std::size_t>(first) * args.out_token +
               static_cast<std::size_t>(head) * args.out_head;
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float sum = sums[t][r];
      for (int offset = lanes / 2; offset; offset >>= 1) {
        sum = __fadd_rn(sum, __shfl_xor_sync(kAllLanes, sum, offset));
      }
      if (t < live && row + r < args.weight.rows && thread % lanes == 0) {
        out[static_cast<std::size_t>(t) * args.out_token + row + r] = sum;
      }
    }
  }
}

// --- The end of latents. ---

// The same in every thread, and the sum's order fixed by the number of threads.
__device__ __forceinline__ float block_sum(float v, float (&partial)[kWarps]) {
  v = warp_sum(v);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = v;
  __syncthreads();
  float sum = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum = __fadd_rn(sum, partial[w]);
  return sum;
}

__device__ __forceinline__ float block_max(float v, float (&partial)[kWarps]) {
  v = warp_max(v);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = v;
  __syncthreads();
  float most = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) most = fmaxf(most, partial[w]);
  return most;
}

// Turns pair `pair` of the part at `from` into the one at `to`.
__device__ __forceinline__ void turn_pair(const float* from, float* to, RopeStyle style, int pair,
                                          int half, const Turn& t) {
  const int i = pair_first(style, pair, half);
  const int j = pair_second(style, pair, half);
  const float a = load_activation(from + i);
  const float b = load_activation(from + j);
  to[i] = __fmaf_rn(a, t.cos, -__fmul_rn(b, t.sin));
  to[j] = __fmaf_rn(b, t.cos, __fmul_rn(a, t.sin));
}

// Tokens on x; the heads of queries are shared out over y, and the first block of a token takes its
// latent besides.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    finish_latents_kernel(const __grid_constant__ LatentHeadsArgs args) {
  __shared__ Turn turns[kMaxLatentKeyDim / 2];
  __shared__ float key[kMaxLatentKeyDim];
  __shared__ float partial[2][kWarps];
  allow_next();
  const LayerCacheView& cache = args.cache;
  const int token = static_cast<int>(blockIdx.x);
  const int tid = static_cast<int>(threadIdx.x);
  const int rank = cache.value_dim;
  const int turned = cache.key_dim - rank;
  const int half = turned / 2;
  const int share = static_cast<int>(gridDim.y);
  const int own = static_cast<int>(blockIdx.y);
  wait_for_previous();
  if (token >= min(args.tokens, __ldcg(&args.state.counts->tokens))) return;
  const int position = __ldcg(args.state.position + token);
  float* q_out = args.q_out + static_cast<std::size_t>(token) * args.heads * cache.key_dim;
  if (position < 0) {
    for (int i = own * kThreads + tid; i < args.heads * cache.key_dim; i += share * kThreads) {
      q_out[i] = 0;
    }
    return;
  }
  for (int pair = tid; pair < half; pair += kThreads) {
    turns[pair] = turn(position, __ldg(args.inverse_frequencies + pair), args.attention_factor);
  }
  __syncthreads();

  const float* q = args.q + static_cast<std::size_t>(token) * args.heads * (args.plain + turned);
  for (int i = own * kThreads + tid; i < args.heads * half; i += share * kThreads) {
    const int head = i / half;
    const int pair = i - head * half;
    turn_pair(q + head * (args.plain + turned) + args.plain, q_out + head * cache.key_dim + rank,
              args.style, pair, half, turns[pair]);
  }
  if (own != 0) return;

  const float* kv = args.kv + static_cast<std::size_t>(token) * cache.key_dim;
  float squares = 0;
  for (int d = tid; d < rank; d += kThreads) {
    const float x = load_activation(kv + d);
    squares = __fmaf_rn(x, x, squares);
  }
  const float mean = __fdiv_rn(block_sum(squares, partial[0]), static_cast<float>(rank));
  const float norm = __fdiv_rn(1.0F, __fsqrt_rn(__fadd_rn(mean, args.eps)));
  for (int d = tid; d < rank; d += kThreads) {
    key[d] = __fmul_rn(__fmul_rn(load_activation(kv + d), norm), __ldg(args.kv_norm + d));
  }
  for (int pair = tid; pair < half; pair += kThreads) {
    turn_pair(kv + rank, key + rank, args.style, pair, half, turns[pair]);
  }
  __syncthreads();

  const int row = cache_slot(args.state, CacheHolds::kTokens, token);
  const int place = cache.window > 0 ? position % cache.capacity : position;
  T* to = key_slot<T>(cache, row) + cache_offset(place, 0, 1, cache.key_dim);
  if constexpr (kScaled<T>) {
    float most = 0;
    bool finite = true;
    for (int d = tid; d < cache.key_dim; d += kThreads) {
      most = fmaxf(most, fabsf(key[d]));
      finite = finite && isfinite(key[d]);
    }
    const bool all_finite = __syncthreads_and(finite ? 1 : 0) != 0;
    const float scale = int8_scale(block_max(most, partial[1]), all_finite);
    for (int d = tid; d < cache.key_dim; d += kThreads) to[d] = int8_multiple(key[d], scale);
    if (tid == 0) key_scales(cache, row)[cache_offset(place, 0, 1, 1)] = scale;
  } else {
    for (int d = tid; d < cache.key_dim; d += kThreads) to[d] = to_cache<T>(key[d]);
  }
}

using FinishKernel = void (*)(LatentHeadsArgs);

FinishKernel finish_kernel(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return finish_latents_kernel<float>;
    case DType::kF16:
      return finish_latents_kernel<__half>;
    case DType::kI8:
      return finish_latents_kernel<std::int8_t>;
    case DType::kF8E4M3:
      return finish_latents_kernel<Fp8>;
    default:
      return finish_latents_kernel<__nv_bfloat16>;
  }
}

}  // namespace

void head_products(const HeadProductArgs& args, const Launch& launch) {
  const PackedWeight& w = args.weight;
  require(w.cols % kColumns == 0 && args.in_token % 4 == 0 && args.in_head % 4 == 0,
          "head_products: a width without a kernel");
  const int lanes = lanes_of(w.cols);
  const int groups = (w.rows + kRows - 1) / kRows;
  const int tile = args.tokens == 1 ? 1 : kTokenTile;
  const dim3 grid(static_cast<unsigned>((groups * lanes + kThreads - 1) / kThreads),
                  static_cast<unsigned>(args.heads),
                  static_cast<unsigned>((args.tokens + tile - 1) / tile));
  with_form(w, [&](auto form) {
    using F = decltype(form);
    if constexpr (F::kCount == kColumns) {
      launch_kernel(launch, "head_products",
                    tile == 1 ? head_products_kernel<F::kCodes, F::kScales, 1>
                              : head_products_kernel<F::kCodes, F::kScales, kTokenTile>,
                    grid, dim3(kThreads), 0, args, packed_rows(w), lanes);
    }
  });
}

void finish_latents(const LatentHeadsArgs& args, const Launch& launch) {
  const LayerCacheView& cache = args.cache;
  require(cache.latent && cache.kv_heads == 1 && latent_supported(cache.key_dim, cache.value_dim),
          "finish_latents: a cache without a kernel");
  const int pairs = args.heads * (cache.key_dim - cache.value_dim) / 2;
  const int share =
      args.tokens > kDecodeTokens ? 1 : std::clamp((pairs + kThreads - 1) / kThreads, 1, 8);
  launch_kernel(launch, "finish_latents", finish_kernel(cache.dtype),
                dim3(static_cast<unsigned>(args.tokens), static_cast<unsigned>(share)),
                dim3(kThreads), 0, args);
}

}  // namespace pianola::cuda
