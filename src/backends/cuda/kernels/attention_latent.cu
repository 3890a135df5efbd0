// attend_latent(): plain f32 arithmetic, one kernel for every cache.
//
// A block of eight warps serves one head of one token, or two heads in large steps, which then
// share what is read of the cache. The lanes of a warp hold a key together, eight neighbours of
// every 256 elements each, and use it twice: for the score, and its first elements as the value.
// Warps take units of some positions in turn, by their numbers; what they have summed is added in
// order. Every operation is spelled out, so that the kernels for one head and for two give the same
// bits.
#include "backends/cuda/kernels/attention_common.cuh"
#include "backends/cuda/kernels/cache_piece.cuh"
#include "backends/cuda/kernels/latent.h"
#include "backends/cuda/kernels/linear.h"

namespace pianola::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kPieceStep = 32 * kWide;  // elements from one piece of a lane to its next

template <typename T, int kPieces, int kHeads>
struct LatentItem {
  static constexpr int kUnit = sizeof(T) == 4 ? 2 : 4;  // positions that a warp has on their way
  static_assert(kCacheBlock % kUnit == 0);

  struct Shared {
    float2 score[kWarps][kHeads];  // largest (base 2), and the sum of the weights
    alignas(16) float sums[kWarps][kPieces * kPieceStep];  // of one head at a time
  };

  const AttentionArgs& args;
  Shared& shared;
  int token;
  int first;  // head
  int lane;
  int warp;
  int slot = 0;
  int begin = 0;
  int end = 0;  // of the positions; 0: a masked token
  float q[kHeads][kPieces][kWide];
  float sums[kHeads][kPieces][kWide];
  float most[kHeads];
  float total[kHeads];

  __device__ __forceinline__ LatentItem(const AttentionArgs& of, Shared& memory)
      : args(of), shared(memory) {
    token = static_cast<int>(blockIdx.x);
    first = static_cast<int>(blockIdx.y) * kHeads;
    lane = static_cast<int>(threadIdx.x) & 31;
    warp = static_cast<int>(threadIdx.x) / 32;
  }

  // The first element of a piece of this lane.
  __device__ __forceinline__ int at(int piece) const { return piece * kPieceStep + lane * kWide; }

  __device__ __forceinline__ void find_positions() {
    const StepState& s = args.state;
    const int position = __ldcg(s.position + token);
    if (position < 0) return;
    slot = cache_slot(s, CacheHolds::kTokens, token);
    end = position + 1;
    begin = args.cache.window > 0 ? max(end - args.cache.window, 0) : 0;
  }

  __device__ __forceinline__ void load_queries() {
    const int dim = args.cache.key_dim;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const float* from = args.q + (static_cast<std::size_t>(token) * args.heads + first + h) * dim;
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        float4 low = make_float4(0, 0, 0, 0);
        float4 high = low;
        if (at(p) < dim) {
          low = load_activation4(from + at(p));
          high = load_activation4(from + at(p) + 4);
        }
        const float x[kWide] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int e = 0; e < kWide; ++e) {
          q[h][p][e] = x[e];
          sums[h][p][e] = 0;
        }
      }
      most[h] = kNoScore;
      total[h] = 0;
    }
  }

  // Positions from `base` on, those in [begin, end). All lanes of a warp have the same ones.
  __device__ __forceinline__ void add_unit(int base) {
    const LayerCacheView& cache = args.cache;
    const int place = cache.window > 0 ? base % cache.capacity : base;
    const T* keys = key_slot<T>(cache, slot) + cache_offset(place, 0, 1, cache.key_dim);
    Piece<T> k[kUnit][kPieces] = {};
    float k_scale[kUnit];
#pragma unroll
    for (int u = 0; u < kUnit; ++u) {
      const bool inside = base + u >= begin && base + u < end;
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        if (inside && at(p) < cache.key_dim) k[u][p].load(keys + u * cache.key_dim + at(p));
      }
      k_scale[u] = 1;
      if constexpr (kScaled<T>) {
        const std::size_t scale_at = cache_offset(place, 0, 1, 1) + u;
        k_scale[u] = inside ? __ldcg(key_scales(cache, slot) + scale_at) : 0.0F;
      }
    }

    float scores[kHeads][kUnit];
#pragma unroll
    for (int u = 0; u < kUnit; ++u) {
      float dot[kHeads] = {};
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        float x[kWide];
        k[u][p].widen(x);
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
#pragma unroll
          for (int e = 0; e < kWide; ++e) dot[h] = __fmaf_rn(q[h][p][e], x[e], dot[h]);
        }
      }
      const bool inside = base + u >= begin && base + u < end;
      const float scale = __fmul_rn(__fmul_rn(args.scale, kLog2e), k_scale[u]);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
#pragma unroll
        for (int offset = 16; offset; offset >>= 1) {
          dot[h] = __fadd_rn(dot[h], __shfl_xor_sync(kAllLanes, dot[h], offset));
        }
        scores[h][u] = inside ? __fmul_rn(dot[h], scale) : -INFINITY;
      }
    }

    // Scores become weights.
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float best = most[h];
#pragma unroll
      for (int u = 0; u < kUnit; ++u) best = fmaxf(best, scores[h][u]);
      const float factor = exp2_approx(__fsub_rn(most[h], best));
      most[h] = best;
      total[h] = __fmul_rn(total[h], factor);
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
#pragma unroll
        for (int e = 0; e < kWide; ++e) sums[h][p][e] = __fmul_rn(sums[h][p][e], factor);
      }
    }
#pragma unroll
    for (int u = 0; u < kUnit; ++u) {
      if (base + u < begin || base + u >= end) continue;
      float times[kHeads];
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        const float weight = exp2_approx(__fsub_rn(scores[h][u], most[h]));
        total[h] = __fadd_rn(total[h], weight);
        times[h] = __fmul_rn(weight, k_scale[u]);
      }
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        float x[kWide];
        k[u][p].widen(x);
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
#pragma unroll
          for (int e = 0; e < kWide; ++e) {
            sums[h][p][e] = __fmaf_rn(times[h], x[e], sums[h][p][e]);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void add_all() {
    const int from = begin / kUnit;
#pragma unroll 1
    for (int unit = from + ((warp - from) & (kWarps - 1)); unit * kUnit < end; unit += kWarps) {
      add_unit(unit * kUnit);
    }
  }

  // The warps in order.
  __device__ __forceinline__ void finish() {
    const int dim = args.cache.value_dim;
    if (lane == 0) {
#pragma unroll
      for (int h = 0; h < kHeads; ++h) shared.score[warp][h] = make_float2(most[h], total[h]);
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (h > 0) __syncthreads();  // the sums of the head before are read
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        const float(&sum)[kWide] = sums[h][p];
        auto* to = reinterpret_cast<float4*>(shared.sums[warp] + at(p));
        to[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
        to[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
      }
      __syncthreads();
      float best = kNoScore;
      for (int w = 0; w < kWarps; ++w) best = fmaxf(best, shared.score[w][h].x);
      float factors[kWarps];
      float weights = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float2 score = shared.score[w][h];
        factors[w] = exp2_approx(__fsub_rn(score.x, best));
        weights = __fmaf_rn(score.y, factors[w], weights);
      }
      const float divisor = with_sink(args.sinks, first + h, best, weights);
      float* out = args.out + (static_cast<std::size_t>(token) * args.heads + first + h) * dim;
      for (int d = static_cast<int>(threadIdx.x); d < dim; d += kThreads) {
        float value = 0;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) value = __fmaf_rn(shared.sums[w][d], factors[w], value);
        out[d] = __fdiv_rn(value, divisor);
      }
    }
  }

  __device__ __forceinline__ void clear() {
    const int count = kHeads * args.cache.value_dim;
    float* out =
        args.out + (static_cast<std::size_t>(token) * args.heads + first) * args.cache.value_dim;
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) out[i] = 0;
  }
};

template <typename T, int kPieces, int kHeads>
__global__ void __launch_bounds__(kThreads)
    attend_latent_kernel(const __grid_constant__ AttentionArgs args) {
  using Item = LatentItem<T, kPieces, kHeads>;
  __shared__ typename Item::Shared shared;
  allow_next();
  wait_for_previous();
  Item item(args, shared);
  if (item.token >= min(args.tokens, __ldcg(&args.state.counts->tokens))) return;
  item.find_positions();
  if (item.end == 0) return item.clear();
  item.load_queries();
  item.add_all();
  item.finish();
}

using LatentKernel = void (*)(AttentionArgs);

template <typename T>
LatentKernel kernel_for(int dim, bool two) {
  if (dim <= kPieceStep) {
    return two ? attend_latent_kernel<T, 1, 2> : attend_latent_kernel<T, 1, 1>;
  }
  return two ? attend_latent_kernel<T, 3, 2> : attend_latent_kernel<T, 3, 1>;
}
static_assert(kMaxLatentKeyDim == 3 * kPieceStep);

LatentKernel kernel_for(DType dtype, int dim, bool two) {
  switch (dtype) {
    case DType::kF32:
      return kernel_for<float>(dim, two);
    case DType::kF16:
      return kernel_for<__half>(dim, two);
    case DType::kI8:
      return kernel_for<std::int8_t>(dim, two);
    case DType::kF8E4M3:
      return kernel_for<Fp8>(dim, two);
    default:
      return kernel_for<__nv_bfloat16>(dim, two);
  }
}

}  // namespace

void attend_latent(const AttentionArgs& args, const Launch& launch) {
  require(args.cache.latent && args.cache.kv_heads == 1 &&
              latent_supported(args.cache.key_dim, args.cache.value_dim),
          "attend_latent: a cache without a kernel");
  const bool two = args.tokens > kDecodeTokens && args.heads % 2 == 0;
  launch_kernel(
      launch, "attend_latent", kernel_for(args.cache.dtype, args.cache.key_dim, two),
      dim3(static_cast<unsigned>(args.tokens), static_cast<unsigned>(args.heads / (two ? 2 : 1))),
      dim3(kThreads), 0, args);
}

}  // namespace pianola::cuda
