// attend_encoder(): plain f32 arithmetic, one kernel for every cache.
//
// A block of eight warps serves one head of one token, or of a few neighbours in large steps, which
// then share what is read of the cache. A group of lanes holds a head, eight elements each; groups
// take positions in turn, warps units of some positions, by their numbers. What groups and warps
// have summed is added in order. Every operation is spelled out, so that the kernels for one token
// and for a few give the same bits.
#include "backends/cuda/kernels/attention_encoder.h"

#include <algorithm>
#include <climits>

#include "backends/cuda/kernels/attention_common.cuh"
#include "backends/cuda/kernels/cache_piece.cuh"
#include "backends/cuda/kernels/linear.h"

namespace pianola::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kInFlight = 4;  // positions that a group of lanes has on their way
constexpr int kNeighbours = 4;

// What a token attends to: positions [begin, end) of a slot.
struct Query {
  int slot;
  int position;  // -1: masked
  int begin;
  int end;  // 0: nothing, -1: there is no such token
};

template <int kLanes, int kTokens>
struct Shared {
  float bias[2][BiasSteps::kMostDistance + 1];  // by distance, before the token and after; base 2
  Query query[kTokens];
  float2 score[kWarps][kTokens];  // largest (base 2), and the sum of the weights
  alignas(16) float sums[kWarps][kTokens][kLanes * kWide];
};

__device__ __forceinline__ Query find_query(const AttentionArgs& a, int token) {
  const StepState& s = a.state;
  Query query = {.slot = 0, .position = -1, .begin = 0, .end = -1};
  if (token >= min(a.tokens, __ldcg(&s.counts->tokens))) return query;
  query.position = __ldcg(s.position + token);
  query.end = 0;
  if (query.position < 0) return query;
  query.slot = cache_slot(s, a.cache.holds, token);
  if (a.cache.holds == CacheHolds::kTokens) {
    query.end = query.position + 1;
    query.begin = a.cache.window > 0 ? max(query.end - a.cache.window, 0) : 0;
  } else {
    query.end = __ldcg(&s.row[__ldcg(s.row_of + __ldcg(s.lane_of + token))].input_length);
  }
  return query;
}

// The bias of one head by distance, by all threads.
__device__ __forceinline__ void spread_bias(const BiasSteps& bias, int head, int heads,
                                            float (&by_distance)[2][BiasSteps::kMostDistance + 1]) {
  if (!bias.table) return;
  for (int distance = static_cast<int>(threadIdx.x); distance <= bias.reach; distance += kThreads) {
    int bucket = min(distance, bias.near);
    for (int i = 0; i < bias.steps; ++i) bucket += distance >= bias.from[i] ? 1 : 0;
    for (int after = 0; after <= bias.both_directions; ++after) {
      const float value = __ldg(bias.table + (after * bias.one_way + bucket) * heads + head);
      by_distance[after][distance] = __fmul_rn(value, kLog2e);
    }
  }
}

// kLanes lanes hold a head of up to kLanes * kWide elements.
template <typename T, int kLanes, int kTokens>
struct EncoderItem {
  static constexpr int kGroups = 32 / kLanes;
  static constexpr int kUnit = kGroups * kInFlight;  // positions; units divide blocks of the cache
  static_assert(kCacheBlock % kUnit == 0);

  const EncoderAttentionArgs& args;
  Shared<kLanes, kTokens>& shared;
  int first;  // token
  int head;
  int kv_head;
  int lane;
  int warp;
  int group;
  int at;  // first element of this lane
  float q[kTokens][kWide];
  float sums[kTokens][kWide];
  float most[kTokens];
  float total[kTokens];

  __device__ __forceinline__ EncoderItem(const EncoderAttentionArgs& of,
                                         Shared<kLanes, kTokens>& memory)
      : args(of), shared(memory) {
    first = static_cast<int>(blockIdx.x) * kTokens;
    head = static_cast<int>(blockIdx.y);
    kv_head = head / (args.attention.heads / args.attention.cache.kv_heads);
    lane = static_cast<int>(threadIdx.x) & 31;
    warp = static_cast<int>(threadIdx.x) / 32;
    group = lane / kLanes;
    at = lane % kLanes * kWide;
  }

  __device__ __forceinline__ void load_queries() {
    const AttentionArgs& a = args.attention;
    const int dim = a.cache.key_dim;
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      float4 low = make_float4(0, 0, 0, 0);
      float4 high = low;
      if (shared.query[i].end > 0 && at < dim) {
        const std::size_t row = static_cast<std::size_t>(first + i) * a.heads + head;
        low = load_activation4(a.q + row * dim + at);
        high = load_activation4(a.q + row * dim + at + 4);
      }
      const float x[kWide] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int e = 0; e < kWide; ++e) {
        q[i][e] = x[e];
        sums[i][e] = 0;
      }
      most[i] = kNoScore;
      total[i] = 0;
    }
  }

  __device__ __forceinline__ float bias_of(const Query& query, int position) const {
    const BiasSteps& bias = args.bias;
    if (!bias.table) return 0;
    const int offset = position - query.position;
    const bool after = bias.both_directions != 0 && offset > 0;
    return shared.bias[after ? 1 : 0][min(abs(offset), bias.reach)];
  }

  // Positions from `base` on, those in [begin, end), for the tokens whose bits are set. Each token
  // takes those of them that it attends to, and nothing shows of the others.
  __device__ __forceinline__ void add_unit(int slot, unsigned members, int base, int begin,
                                           int end) {
    const LayerCacheView& cache = args.attention.cache;
    const int place = cache.window > 0 ? base % cache.capacity : base;
    const T* keys =
        key_slot<T>(cache, slot) + cache_offset(place, kv_head, cache.kv_heads, cache.key_dim) + at;
    const T* values = value_slot<T>(cache, slot) +
                      cache_offset(place, kv_head, cache.kv_heads, cache.value_dim) + at;
    Piece<T> k[kInFlight] = {};
    Piece<T> v[kInFlight] = {};
    float k_scale[kInFlight];
    float v_scale[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const int row = u * kGroups + group;
      const bool inside = base + row >= begin && base + row < end;
      if (inside && at < cache.key_dim) k[u].load(keys + row * cache.key_dim);
      if (inside && at < cache.value_dim) v[u].load(values + row * cache.value_dim);
      k_scale[u] = v_scale[u] = 1;
      if constexpr (kScaled<T>) {
        const std::size_t scale_at = cache_offset(place, kv_head, cache.kv_heads, 1) + row;
        k_scale[u] = inside ? __ldcg(key_scales(cache, slot) + scale_at) : 0.0F;
        v_scale[u] = inside ? __ldcg(value_scales(cache, slot) + scale_at) : 0.0F;
      }
    }

    float scores[kTokens][kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      float x[kWide];
      k[u].widen(x);
      const float scale = __fmul_rn(__fmul_rn(args.attention.scale, kLog2e), k_scale[u]);
#pragma unroll
      for (int i = 0; i < kTokens; ++i) {
        if (((members >> i) & 1) == 0) continue;
        float dot = 0;
#pragma unroll
        for (int e = 0; e < kWide; ++e) dot = __fmaf_rn(q[i][e], x[e], dot);
#pragma unroll
        for (int offset = kLanes / 2; offset; offset >>= 1) {
          dot = __fadd_rn(dot, __shfl_xor_sync(kAllLanes, dot, offset));
        }
        const Query& query = shared.query[i];
        const int position = base + u * kGroups + group;
        const bool inside = position >= query.begin && position < query.end;
        scores[i][u] = inside ? __fmaf_rn(dot, scale, bias_of(query, position)) : -INFINITY;
      }
    }

    // Scores become weights.
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      if (((members >> i) & 1) == 0) continue;
      const Query& query = shared.query[i];
      if (base + kUnit <= query.begin || base >= query.end) continue;
      float best = most[i];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) best = fmaxf(best, scores[i][u]);
      const float factor = exp2_approx(__fsub_rn(most[i], best));
      most[i] = best;
      total[i] = __fmul_rn(total[i], factor);
#pragma unroll
      for (int e = 0; e < kWide; ++e) sums[i][e] = __fmul_rn(sums[i][e], factor);
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        const int position = base + u * kGroups + group;
        if (position < query.begin || position >= query.end) continue;
        const float weight = exp2_approx(__fsub_rn(scores[i][u], best));
        total[i] = __fadd_rn(total[i], weight);
        const float times = __fmul_rn(weight, v_scale[u]);
        float x[kWide];
        v[u].widen(x);
#pragma unroll
        for (int e = 0; e < kWide; ++e) sums[i][e] = __fmaf_rn(times, x[e], sums[i][e]);
      }
    }
  }

  // Tokens of one slot share what is read.
  __device__ __forceinline__ void add_all() {
    unsigned left = 0;
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      if (shared.query[i].end > 0) left |= 1U << i;
    }
    while (left != 0) {
      const int slot = shared.query[__ffs(static_cast<int>(left)) - 1].slot;
      unsigned members = 0;
      int begin = INT_MAX;
      int end = 0;
#pragma unroll
      for (int i = 0; i < kTokens; ++i) {
        const Query& query = shared.query[i];
        if (((left >> i) & 1) == 0 || query.slot != slot) continue;
        members |= 1U << i;
        begin = min(begin, query.begin);
        end = max(end, query.end);
      }
      left &= ~members;
      const int from = begin / kUnit;
#pragma unroll 1
      for (int unit = from + ((warp - from) & (kWarps - 1)); unit * kUnit < end; unit += kWarps) {
        add_unit(slot, members, unit * kUnit, begin, end);
      }
    }
  }

  // The groups of a warp, by a tree whose sums are the same in all lanes; then the warps in order.
  __device__ __forceinline__ void finish() {
    const AttentionArgs& a = args.attention;
    const int dim = a.cache.value_dim;
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
#pragma unroll
      for (int offset = kLanes; offset < 32; offset <<= 1) {
        const float best = fmaxf(most[i], __shfl_xor_sync(kAllLanes, most[i], offset));
        const float factor = exp2_approx(__fsub_rn(most[i], best));
        most[i] = best;
        total[i] = __fmul_rn(total[i], factor);
        total[i] = __fadd_rn(total[i], __shfl_xor_sync(kAllLanes, total[i], offset));
#pragma unroll
        for (int e = 0; e < kWide; ++e) {
          const float sum = __fmul_rn(sums[i][e], factor);
          sums[i][e] = __fadd_rn(sum, __shfl_xor_sync(kAllLanes, sum, offset));
        }
      }
      if (lane == 0) shared.score[warp][i] = make_float2(most[i], total[i]);
      if (group == 0) {
        auto* to = reinterpret_cast<float4*>(shared.sums[warp][i] + at);
        to[0] = make_float4(sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
        to[1] = make_float4(sums[i][4], sums[i][5], sums[i][6], sums[i][7]);
      }
    }
    __syncthreads();
    for (int index = static_cast<int>(threadIdx.x); index < kTokens * dim; index += kThreads) {
      const int i = index / dim;
      const int d = index - i * dim;
      const int end = shared.query[i].end;
      if (end < 0) continue;
      float value = 0;
      if (end > 0) {
        float best = kNoScore;
        for (int w = 0; w < kWarps; ++w) best = fmaxf(best, shared.score[w][i].x);
        float weights = 0;
        for (int w = 0; w < kWarps; ++w) {
          const float2 score = shared.score[w][i];
          const float factor = exp2_approx(__fsub_rn(score.x, best));
          weights = __fmaf_rn(score.y, factor, weights);
          value = __fmaf_rn(shared.sums[w][i][d], factor, value);
        }
        value = __fdiv_rn(value, with_sink(a.sinks, head, best, weights));
      }
      const std::size_t row = static_cast<std::size_t>(first + i) * a.heads + head;
      a.out[row * dim + d] = value;
    }
  }
};

template <typename T, int kLanes, int kTokens>
__global__ void __launch_bounds__(kThreads)
    attend_encoder_kernel(const __grid_constant__ EncoderAttentionArgs args) {
  __shared__ Shared<kLanes, kTokens> shared;
  allow_next();
  EncoderItem<T, kLanes, kTokens> item(args, shared);
  spread_bias(args.bias, item.head, args.attention.heads, shared.bias);
  if (threadIdx.x < kTokens) {
    shared.query[threadIdx.x] =
        find_query(args.attention, item.first + static_cast<int>(threadIdx.x));
  }
  __syncthreads();
  wait_for_previous();
  item.load_queries();
  item.add_all();
  item.finish();
}

using EncoderKernel = void (*)(EncoderAttentionArgs);

template <typename T>
EncoderKernel kernel_for(int dim, bool neighbours) {
  if (dim <= 8 * kWide) {
    return neighbours ? attend_encoder_kernel<T, 8, kNeighbours> : attend_encoder_kernel<T, 8, 1>;
  }
  if (dim <= 16 * kWide) {
    return neighbours ? attend_encoder_kernel<T, 16, kNeighbours> : attend_encoder_kernel<T, 16, 1>;
  }
  return neighbours ? attend_encoder_kernel<T, 32, kNeighbours> : attend_encoder_kernel<T, 32, 1>;
}

EncoderKernel kernel_for(DType dtype, int dim, bool neighbours) {
  switch (dtype) {
    case DType::kF32:
      return kernel_for<float>(dim, neighbours);
    case DType::kF16:
      return kernel_for<__half>(dim, neighbours);
    case DType::kI8:
      return kernel_for<std::int8_t>(dim, neighbours);
    case DType::kF8E4M3:
      return kernel_for<Fp8>(dim, neighbours);
    default:
      return kernel_for<__nv_bfloat16>(dim, neighbours);
  }
}

}  // namespace

void attend_encoder(const EncoderAttentionArgs& args, const Launch& launch) {
  const AttentionArgs& a = args.attention;
  check_attention_shape(a.cache, a.heads);
  const bool neighbours = a.tokens > kDecodeTokens;
  const int each = neighbours ? kNeighbours : 1;
  const EncoderKernel kernel =
      kernel_for(a.cache.dtype, std::max(a.cache.key_dim, a.cache.value_dim), neighbours);
  launch_kernel(
      launch, "attend_encoder", kernel,
      dim3(static_cast<unsigned>((a.tokens + each - 1) / each), static_cast<unsigned>(a.heads)),
      dim3(kThreads), 0, args);
}

}  // namespace pianola::cuda
