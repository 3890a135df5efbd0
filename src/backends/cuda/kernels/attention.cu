// Attention of the decode class: finish_heads() and attend().
//
// attend_tensor() serves 16-bit caches with heads of at most 128: keys and values go from memory
// to registers in the order in which the tensor cores want them (the order of a sum's terms is
// free, so a lane takes 16 bytes of a key as the terms of four products), and q and the weights are
// split into two 16-bit parts. attend_general() serves everything else with plain f32 arithmetic.
#include "backends/cuda/kernels/attention.h"

#include <algorithm>
#include <string>

#include "backends/cuda/kernels/attention_common.cuh"
#include "backends/cuda/kernels/attention_items.cuh"
#include "pianola/error.h"

namespace pianola::cuda {
namespace {

constexpr int kFinishWarps = 8;

// One warp a head of q, k or v of a token; pairs a lane N: key_dim <= 64 N.
template <typename T, int N>
__global__ void __launch_bounds__(kFinishWarps * 32)
    finish_heads_kernel(const __grid_constant__ HeadsArgs args) {
  allow_next();
  wait_for_previous();
  const LayerCacheView& cache = args.cache;
  const int all = args.heads + 2 * cache.kv_heads;
  const int index =
      static_cast<int>(blockIdx.x) * kFinishWarps + static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int token = index / all;
  int head = index - token * all;
  if (token >= min(args.tokens, __ldcg(&args.state.counts->tokens))) return;
  const int position = __ldcg(args.state.position + token);
  const int key_dim = cache.key_dim;
  if (head < args.heads) {
    const std::size_t offset = (static_cast<std::size_t>(token) * args.heads + head) * key_dim;
    float* q = args.q_out + offset;
    if (position < 0) {
      for (int i = lane; i < key_dim; i += 32) q[i] = 0;
      return;
    }
    const HeadPairs<N> x = load_head<N>(args.q + offset, key_dim, args.style);
    finish_head<N>(x, key_dim, position, args, args.q_norm, args.q_norm_eps,
                   [&](int i, float value) { q[i] = value; });
    return;
  }
  if (position < 0) return;
  head -= args.heads;
  const int row = __ldcg(args.state.row_of + __ldcg(args.state.lane_of + token));
  if (head < cache.kv_heads) {
    const std::size_t raw = (static_cast<std::size_t>(token) * cache.kv_heads + head) * key_dim;
    T* k = key_slot<T>(cache, row) + cache_offset(position, head, cache.kv_heads, key_dim);
    const HeadPairs<N> x = load_head<N>(args.k + raw, key_dim, args.style);
    finish_head<N>(x, key_dim, position, args, args.k_norm, args.k_norm_eps,
                   [&](int i, float value) { k[i] = to_cache<T>(value); });
    return;
  }
  head -= cache.kv_heads;
  const float* raw =
      args.v + (static_cast<std::size_t>(token) * cache.kv_heads + head) * cache.value_dim;
  T* v = value_slot<T>(cache, row) + cache_offset(position, head, cache.kv_heads, cache.value_dim);
  for (int i = lane; i < cache.value_dim; i += 32) v[i] = to_cache<T>(load_activation(raw + i));
}

// Transposes an 8 x 8 matrix of 16-bit elements, two neighbours of row lane / 4 a lane.
__device__ __forceinline__ std::uint32_t transpose(std::uint32_t v) {
  std::uint32_t t;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(t) : "r"(v));
  return t;
}

__device__ __forceinline__ std::uint32_t word(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// An item on tensor cores. A warp takes tiles of 16 positions, kTiles at a time. With lane =
// 4 r + j, scores^T [16 positions, 8 heads] = K q^T: the lane holds dims 32 s + 8 j + 0..7 of keys
// r and r + 8, which are terms 2j, 2j+1, 2j+8, 2j+9 of products 2s and 2s + 1. sums^T [dims, 8
// heads] += V^T weights^T: the lane holds dims 64 s + 8 r + 0..7 of values 2j, 2j+1, 2j+8, 2j+9;
// dims 8 r + 2i and 8 r + 2i + 1 are rows r and r + 8 of product i.
template <typename T, int kKeySteps, int kValueSteps, bool kExact, int kTiles>
struct TensorItem {
  const DecodeParams& p;
  const Item& item;
  const Fresh& fresh;
  const ItemMemory<T>& memory;
  const T* keys;    // of the kv head
  const T* values;  // of the kv head
  int key_dim;
  int value_dim;
  int r;
  int j;

  __device__ __forceinline__ TensorItem(const DecodeParams& params, const Item& of,
                                        const Fresh& with, const ItemMemory<T>& in)
      : p(params), item(of), fresh(with), memory(in) {
    const LayerCacheView& cache = p.attention.cache;
    key_dim = kExact ? 32 * kKeySteps : cache.key_dim;
    value_dim = kExact ? 64 * kValueSteps : cache.value_dim;
    keys = key_slot<T>(cache, item.row);
    values = value_slot<T>(cache, item.row);
    r = (static_cast<int>(threadIdx.x) & 31) >> 2;
    j = static_cast<int>(threadIdx.x) & 3;
  }

  __device__ __forceinline__ int tile_base(int round, int u) const {
    return item.begin +
           ((round * kTiles + u) * kItemWarps + static_cast<int>(threadIdx.x) / 32) * 16;
  }
  __device__ __forceinline__ bool key_inside(int s) const {
    return kExact || 32 * s + 8 * j < key_dim;
  }
  __device__ __forceinline__ bool value_inside(int s) const {
    return kExact || 64 * s + 8 * r < value_dim;
  }
  static __device__ __forceinline__ int value_row(int j, int i) {
    return 2 * j + (i & 1) + 4 * (i & 2);
  }

  __device__ __forceinline__ void load_keys(uint4 (&k)[kKeySteps][2], int base) const {
    const T* tile = keys + cache_offset(base, item.kv_head, p.attention.cache.kv_heads, key_dim);
    const int limit = min(item.end, fresh.low);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = r + 8 * half;
#pragma unroll
      for (int s = 0; s < kKeySteps; ++s) {
        k[s][half] = load_cache_if(tile + row * key_dim + 32 * s + 8 * j,
                                   base + row < limit && key_inside(s));
      }
    }
  }
  __device__ __forceinline__ void load_values(uint4 (&v)[kValueSteps][4], int base) const {
    const T* tile =
        values + cache_offset(base, item.kv_head, p.attention.cache.kv_heads, value_dim);
    const int limit = min(item.end, fresh.low);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = value_row(j, i);
#pragma unroll
      for (int s = 0; s < kValueSteps; ++s) {
        v[s][i] = load_cache_if(tile + row * value_dim + 64 * s + 8 * r,
                                base + row < limit && value_inside(s));
      }
    }
  }
  // What load_keys() left out: positions from fresh.low on.
  __device__ __forceinline__ void add_fresh_keys(uint4 (&k)[kKeySteps][2], int base) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int position = base + r + 8 * half;
      if (position < fresh.low || position >= item.end) continue;
      const int place = fresh_place(memory, fresh, position);
#pragma unroll
      for (int s = 0; s < kKeySteps; ++s) {
        if (!key_inside(s)) continue;
        const int d = 32 * s + 8 * j;
        if (place >= 0) {
          k[s][half] = *reinterpret_cast<const uint4*>(memory.k + place * key_dim + d);
        } else {
          const T* row =
              keys + cache_offset(position, item.kv_head, p.attention.cache.kv_heads, key_dim);
          k[s][half] = load_cache_if(row + d, true);
        }
      }
    }
  }
  __device__ __forceinline__ void add_fresh_values(uint4 (&v)[kValueSteps][4], int base) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int position = base + value_row(j, i);
      if (position < fresh.low || position >= item.end) continue;
      const int place = fresh_place(memory, fresh, position);
#pragma unroll
      for (int s = 0; s < kValueSteps; ++s) {
        if (!value_inside(s)) continue;
        const int d = 64 * s + 8 * r;
        if (place >= 0) {
          v[s][i] = *reinterpret_cast<const uint4*>(memory.v + place * value_dim + d);
        } else {
          const T* row =
              values + cache_offset(position, item.kv_head, p.attention.cache.kv_heads, value_dim);
          v[s][i] = load_cache_if(row + d, true);
        }
      }
    }
  }

  __device__ __forceinline__ void load_q(std::uint32_t (&high)[kKeySteps][4],
                                         std::uint32_t (&low)[kKeySteps][4]) const {
    const float* q = memory.q + r * (key_dim + kMergePad);
#pragma unroll
    for (int s = 0; s < kKeySteps; ++s) {
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        float4 v = {};
        if (r < item.heads && key_inside(s)) {
          v = *reinterpret_cast<const float4*>(q + 32 * s + 8 * j + 2 * i);
        }
        const SplitPair a = split<T>(v.x, v.y);
        const SplitPair b = split<T>(v.z, v.w);
        high[s][i] = a.high;
        low[s][i] = a.low;
        high[s][i + 1] = b.high;
        low[s][i + 1] = b.low;
      }
    }
  }

  // Two sums, so that products of the high and low parts of q do not wait for each other.
  static __device__ __forceinline__ void multiply_keys(float (&scores)[4],
                                                       const uint4 (&k)[kKeySteps][2],
                                                       const std::uint32_t (&high)[kKeySteps][4],
                                                       const std::uint32_t (&low)[kKeySteps][4]) {
    float rest[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[i] = 0;
#pragma unroll
    for (int s = 0; s < kKeySteps; ++s) {
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const std::uint32_t a[4] = {word(k[s][0], i), word(k[s][1], i), word(k[s][0], i + 1),
                                    word(k[s][1], i + 1)};
        mma<T>(scores, a, high[s][i], high[s][i + 1]);
        mma<T>(rest, a, low[s][i], low[s][i + 1]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[i] += rest[i];
  }
  static __device__ __forceinline__ void add_values(float (&sums)[kValueSteps][4][4],
                                                    const uint4 (&v)[kValueSteps][4],
                                                    const SplitPair& w0, const SplitPair& w1) {
#pragma unroll
    for (int s = 0; s < kValueSteps; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const std::uint32_t a[4] = {__byte_perm(word(v[s][0], i), word(v[s][1], i), 0x5410),
                                    __byte_perm(word(v[s][0], i), word(v[s][1], i), 0x7632),
                                    __byte_perm(word(v[s][2], i), word(v[s][3], i), 0x5410),
                                    __byte_perm(word(v[s][2], i), word(v[s][3], i), 0x7632)};
        mma<T>(sums[s][i], a, w0.high, w1.high);
        mma<T>(sums[s][i], a, w0.low, w1.low);
      }
    }
  }

  __device__ __forceinline__ void run() const {
    uint4 k[kTiles][kKeySteps][2];
    uint4 v[kTiles][kValueSteps][4];
#pragma unroll
    for (int u = 0; u < kTiles; ++u) load_keys(k[u], tile_base(0, u));
#pragma unroll
    for (int u = 0; u < kTiles; ++u) load_values(v[u], tile_base(0, u));
    prepare_item<T, (kKeySteps > 2 || kValueSteps > 1) ? 2 : 1>(p, item, fresh, memory);
    std::uint32_t q_high[kKeySteps][4];
    std::uint32_t q_low[kKeySteps][4];
    load_q(q_high, q_low);

    const float scale = p.attention.scale * kLog2e;
    float sums[kValueSteps][4][4] = {};
    float most[2] = {-INFINITY, -INFINITY};  // of heads 2j and 2j + 1
    float total[2] = {0, 0};                 // of this lane's positions
#pragma unroll 1
    for (int round = 0; tile_base(round, 0) < item.end; ++round) {
      float scores[kTiles][4];  // (position r, heads 2j and 2j + 1), then position r + 8
      float best[2] = {most[0], most[1]};
#pragma unroll
      for (int u = 0; u < kTiles; ++u) {
        const int base = tile_base(round, u);
        if (base + 15 >= fresh.low) add_fresh_keys(k[u], base);
        multiply_keys(scores[u], k[u], q_high, q_low);
        load_keys(k[u], tile_base(round + 1, u));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const bool inside = base + r + 4 * (i & 2) < item.end;
          scores[u][i] = inside ? scores[u][i] * scale : -INFINITY;
          best[i & 1] = fmaxf(best[i & 1], scores[u][i]);
        }
      }
      float factor[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int offset = 4; offset < 32; offset <<= 1) {
          best[i] = fmaxf(best[i], __shfl_xor_sync(kAllLanes, best[i], offset));
        }
        factor[i] = exp2_approx(most[i] - best[i]);
        most[i] = best[i];
        total[i] *= factor[i];
      }
#pragma unroll
      for (int s = 0; s < kValueSteps; ++s) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int c = 0; c < 4; ++c) sums[s][i][c] *= factor[c & 1];
        }
      }
#pragma unroll
      for (int u = 0; u < kTiles; ++u) {
        const int base = tile_base(round, u);
        float w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          w[i] = exp2_approx(scores[u][i] - most[i & 1]);
          total[i & 1] += w[i];
        }
        SplitPair w0 = split<T>(w[0], w[1]);
        SplitPair w1 = split<T>(w[2], w[3]);
        w0 = {transpose(w0.high), transpose(w0.low)};
        w1 = {transpose(w1.high), transpose(w1.low)};
        if (base + 15 >= fresh.low) add_fresh_values(v[u], base);
        add_values(sums, v[u], w0, w1);
        load_values(v[u], tile_base(round + 1, u));
      }
    }
    store(sums, most, total);
  }

  __device__ __forceinline__ void store(const float (&sums)[kValueSteps][4][4],
                                        const float (&most)[2], float (&total)[2]) const {
    const int warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int offset = 4; offset < 32; offset <<= 1) {
        total[i] += __shfl_xor_sync(kAllLanes, total[i], offset);
      }
      const int place = warp * kItemHeads + 2 * j + i;
      if (r == 0) memory.score[place] = make_float2(most[i], total[i]);
      float* row = memory.merge + place * (value_dim + kMergePad);
#pragma unroll
      for (int s = 0; s < kValueSteps; ++s) {
        if (!value_inside(s)) continue;
        auto* to = reinterpret_cast<float4*>(row + 64 * s + 8 * r);
        to[0] = make_float4(sums[s][0][i], sums[s][0][i + 2], sums[s][1][i], sums[s][1][i + 2]);
        to[1] = make_float4(sums[s][2][i], sums[s][2][i + 2], sums[s][3][i], sums[s][3][i + 2]);
      }
    }
  }
};

template <typename T, int kKeySteps, int kValueSteps, bool kExact, int kTiles>
__global__ void __launch_bounds__(kItemThreads, 2)
    attend_tensor(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(16) unsigned char shared[];
  allow_next();
  const ItemMemory<T> memory(p, shared);
  if (p.early) prefetch_first_item<T>(p, memory.tokens);
  wait_for_previous();
  const int items = load_tables(p, memory.tokens);
  for (int i = static_cast<int>(blockIdx.x); i < items; i += static_cast<int>(gridDim.x)) {
    const Item item = find_item(p, memory.tokens, i);
    if (item.position < 0) {
      clear_item(p, item);
      continue;
    }
    const Fresh fresh = p.fused ? find_fresh(memory.tokens, item) : Fresh();
    TensorItem<T, kKeySteps, kValueSteps, kExact, kTiles>(p, item, fresh, memory).run();
    end_item(p, item, memory);
    __syncthreads();
  }
}

// Two neighbours of a cached row, `offset` elements from `row`, from shared or device memory.
template <typename T>
__device__ __forceinline__ typename PairOf<T>::Type load_pair(const T* row, int offset,
                                                              bool shared) {
  const auto* pair = reinterpret_cast<const typename PairOf<T>::Type*>(row + offset);
  return shared ? *pair : __ldcg(pair);
}

// An item in f32. A warp takes kPositions positions at a time; a lane holds dims 2 lane + 64 i and
// the next.
template <typename T, int N>
__global__ void __launch_bounds__(kItemThreads, 2)
    attend_general(const __grid_constant__ DecodeParams p) {
  using Pair = typename PairOf<T>::Type;
  constexpr int kPositions = 8 / N;
  extern __shared__ __align__(16) unsigned char shared[];
  allow_next();
  const ItemMemory<T> memory(p, shared);
  if (p.early) prefetch_first_item<T>(p, memory.tokens);
  wait_for_previous();
  const LayerCacheView& cache = p.attention.cache;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const float scale = p.attention.scale * kLog2e;
  const int items = load_tables(p, memory.tokens);
  for (int index = static_cast<int>(blockIdx.x); index < items;
       index += static_cast<int>(gridDim.x)) {
    const Item item = find_item(p, memory.tokens, index);
    if (item.position < 0) {
      clear_item(p, item);
      continue;
    }
    const Fresh fresh = p.fused ? find_fresh(memory.tokens, item) : Fresh();
    prepare_item<T, N>(p, item, fresh, memory);
    float2 q[kItemHeads][N];
    float2 sums[kItemHeads][N];
    float most[kItemHeads];
    float total[kItemHeads];
#pragma unroll
    for (int h = 0; h < kItemHeads; ++h) {
      most[h] = -INFINITY;
      total[h] = 0;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const int d = 2 * lane + 64 * i;
        sums[h][i] = make_float2(0, 0);
        q[h][i] = make_float2(0, 0);
        if (h < item.heads && d < cache.key_dim) {
          q[h][i] =
              *reinterpret_cast<const float2*>(memory.q + h * (cache.key_dim + kMergePad) + d);
        }
      }
    }
    for (int base = item.begin + warp * kPositions; base < item.end;
         base += kItemWarps * kPositions) {
      Pair k[kPositions][N];
      Pair v[kPositions][N];
#pragma unroll
      for (int u = 0; u < kPositions; ++u) {
        const int position = base + u;
        const int place = position >= fresh.low ? fresh_place(memory, fresh, position) : -1;
        const T* key =
            place >= 0 ? memory.k + place * cache.key_dim
                       : key_slot<T>(cache, item.row) +
                             cache_offset(position, item.kv_head, cache.kv_heads, cache.key_dim);
        const T* value =
            place >= 0 ? memory.v + place * cache.value_dim
                       : value_slot<T>(cache, item.row) +
                             cache_offset(position, item.kv_head, cache.kv_heads, cache.value_dim);
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const int d = 2 * lane + 64 * i;
          k[u][i] = Pair();
          v[u][i] = Pair();
          if (position < item.end && d < cache.key_dim) k[u][i] = load_pair(key, d, place >= 0);
          if (position < item.end && d < cache.value_dim) {
            v[u][i] = load_pair(value, d, place >= 0);
          }
        }
      }
#pragma unroll
      for (int h = 0; h < kItemHeads; ++h) {
        if (h >= item.heads) break;
        float scores[kPositions];
        float best = most[h];
#pragma unroll
        for (int u = 0; u < kPositions; ++u) {
          float sum = 0;
#pragma unroll
          for (int i = 0; i < N; ++i) {
            const float2 pair = unpack<T>(k[u][i]);
            sum = fmaf(q[h][i].x, pair.x, sum);
            sum = fmaf(q[h][i].y, pair.y, sum);
          }
          scores[u] = base + u < item.end ? warp_sum(sum) * scale : -INFINITY;
          best = fmaxf(best, scores[u]);
        }
        const float factor = exp2_approx(most[h] - best);
        most[h] = best;
        total[h] *= factor;
#pragma unroll
        for (int i = 0; i < N; ++i) {
          sums[h][i].x *= factor;
          sums[h][i].y *= factor;
        }
#pragma unroll
        for (int u = 0; u < kPositions; ++u) {
          const float weight = exp2_approx(scores[u] - best);
          total[h] += weight;
#pragma unroll
          for (int i = 0; i < N; ++i) {
            const float2 pair = unpack<T>(v[u][i]);
            sums[h][i].x = fmaf(weight, pair.x, sums[h][i].x);
            sums[h][i].y = fmaf(weight, pair.y, sums[h][i].y);
          }
        }
      }
    }
#pragma unroll
    for (int h = 0; h < kItemHeads; ++h) {
      if (h >= item.heads) break;
      const int place = warp * kItemHeads + h;
      if (lane == 0) memory.score[place] = make_float2(most[h], total[h]);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const int d = 2 * lane + 64 * i;
        if (d >= cache.value_dim) continue;
        *reinterpret_cast<float2*>(memory.merge + place * (cache.value_dim + kMergePad) + d) =
            sums[h][i];
      }
    }
    end_item(p, item, memory);
    __syncthreads();
  }
}

using DecodeKernel = void (*)(DecodeParams);

template <typename T>
DecodeKernel general_kernel(int dim) {
  if (dim <= 64) return attend_general<T, 1>;
  if (dim <= 128) return attend_general<T, 2>;
  return attend_general<T, 4>;
}

template <typename T>
DecodeKernel decode_kernel(int key_dim, int value_dim) {
  const int most = std::max(key_dim, value_dim);
  if (most > 128) return general_kernel<T>(most);
  if (key_dim == 64 && value_dim == 64) return attend_tensor<T, 2, 1, true, 2>;
  if (key_dim == 128 && value_dim == 128) return attend_tensor<T, 4, 2, true, 1>;
  if (most <= 64) return attend_tensor<T, 2, 1, false, 2>;
  return attend_tensor<T, 4, 2, false, 1>;
}

using FinishKernel = void (*)(HeadsArgs);

template <typename T>
FinishKernel finish_kernel(int key_dim) {
  if (key_dim <= 64) return finish_heads_kernel<T, 1>;
  if (key_dim <= 128) return finish_heads_kernel<T, 2>;
  return finish_heads_kernel<T, 4>;
}

int parts_of(int heads, int kv_heads) { return (heads / kv_heads + kItemHeads - 1) / kItemHeads; }
int splits_of(int heads, int kv_heads, int capacity) {
  const int most = 1 << log_most_splits(kv_heads * parts_of(heads, kv_heads));
  return std::min(most, (capacity + kCacheBlock - 1) / kCacheBlock);
}

// The tokens first..first + 63 of the bucket.
void attend_from(const AttentionArgs& args, const HeadsArgs* heads, int first,
                 const Launch& launch) {
  const LayerCacheView& cache = args.cache;
  DecodeParams p;
  p.attention = args;
  if (heads) p.heads = *heads;
  p.fused = heads != nullptr;
  p.early = launch.dependent;
  p.first = first;
  p.tokens = std::min(args.tokens - first, kDecodeTokens);
  p.group = args.heads / cache.kv_heads;
  p.parts = parts_of(args.heads, cache.kv_heads);
  p.log_splits = log_most_splits(cache.kv_heads * p.parts);
  p.split_stride = splits_of(args.heads, cache.kv_heads, cache.capacity);

  const DecodeKernel kernel =
      cache.dtype == DType::kF32   ? general_kernel<float>(std::max(cache.key_dim, cache.value_dim))
      : cache.dtype == DType::kF16 ? decode_kernel<__half>(cache.key_dim, cache.value_dim)
                                   : decode_kernel<__nv_bfloat16>(cache.key_dim, cache.value_dim);
  const std::size_t bytes = item_memory_bytes(p, cache.dtype == DType::kF32 ? 4 : 2);
  if (bytes > 48 * 1024) {
    check(
        cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                             cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
        "attend");
  }
  const int items = p.tokens * cache.kv_heads * p.parts * p.split_stride;
  const auto blocks = static_cast<unsigned>(std::min(items, 2 * launch.sms));
  launch_kernel(launch, "attend", kernel, dim3(blocks), dim3(kItemThreads), bytes, p);
}

}  // namespace

void check_attention_shape(const LayerCacheView& cache, int heads) {
  const auto fits = [](int dim) { return dim > 0 && dim % 8 == 0 && dim <= kMaxHeadDim; };
  if (!fits(cache.key_dim) || !fits(cache.value_dim)) {
    throw Error(ErrorCode::kUnsupported, "attention: heads of " + std::to_string(cache.key_dim) +
                                             " and " + std::to_string(cache.value_dim) +
                                             " (the CUDA kernels take multiples of 8 up to 256)");
  }
  if (cache.kv_heads * parts_of(heads, cache.kv_heads) > kMaxUnits) {
    throw Error(ErrorCode::kUnsupported, "attention: " + std::to_string(cache.kv_heads) +
                                             " kv heads (the CUDA kernels take up to 256)");
  }
}

std::size_t attention_scratch_bytes(int tokens, int heads, int kv_heads, int value_dim,
                                    int capacity) {
  const auto rows = static_cast<std::size_t>(std::min(tokens, kDecodeTokens)) *
                    static_cast<std::size_t>(heads) *
                    static_cast<std::size_t>(splits_of(heads, kv_heads, capacity));
  return kCounterBytes + rows * (static_cast<std::size_t>(value_dim) + 2) * sizeof(float);
}

void finish_heads(const HeadsArgs& args, const Launch& launch) {
  check_attention_shape(args.cache, args.heads);
  const int key_dim = args.cache.key_dim;
  const FinishKernel kernel = args.cache.dtype == DType::kF32 ? finish_kernel<float>(key_dim)
                              : args.cache.dtype == DType::kF16
                                  ? finish_kernel<__half>(key_dim)
                                  : finish_kernel<__nv_bfloat16>(key_dim);
  const int warps = args.tokens * (args.heads + 2 * args.cache.kv_heads);
  const auto blocks = static_cast<unsigned>((warps + kFinishWarps - 1) / kFinishWarps);
  launch_kernel(launch, "finish_heads", kernel, dim3(blocks), dim3(kFinishWarps * 32), 0, args);
}

void attend(const AttentionArgs& args, const HeadsArgs* heads, const Launch& launch) {
  check_attention_shape(args.cache, args.heads);
  if (heads && args.tokens > kDecodeTokens) {
    throw Error(ErrorCode::kUnsupported,
                "attend: heads of " + std::to_string(args.tokens) + " tokens (at most 64 at once)");
  }
  for (int first = 0; first < args.tokens; first += kDecodeTokens) {
    attend_from(args, heads, first, launch);
  }
}

}  // namespace pianola::cuda
