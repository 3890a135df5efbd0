// The work items of attend() and what happens before and after a block reads its keys and values.
//
// An item is (token, part of a kv head's group of heads, split of the token's positions). Items are
// numbered from the step's tables on the device, so a launch knows nothing of lengths.
#pragma once

#include <climits>

#include "backends/cuda/kernels/attention_common.cuh"
#include "backends/cuda/kernels/linear.h"

namespace pianola::cuda {

inline constexpr int kItemThreads = 128;
inline constexpr int kItemWarps = kItemThreads / 32;
inline constexpr int kItemHeads = 8;  // of one group that an item serves
inline constexpr int kMergePad = 4;   // floats after a row of shared memory, against bank conflicts
inline constexpr int kMostSplits = 64;

struct DecodeParams {
  AttentionArgs attention;
  HeadsArgs heads;
  bool fused = false;    // heads are to be finished here
  bool early = false;    // the kernel before may still run: fetch keys and values meanwhile
  int first = 0;         // first token of the launch
  int tokens = 1;        // of the launch, <= kDecodeTokens
  int group = 1;         // heads of a kv head
  int parts = 1;         // of a group, kItemHeads heads each
  int log_splits = 5;    // at most 1 << log_splits splits of a token
  int split_stride = 1;  // splits that scratch holds for a head
};

__host__ __device__ inline int log_most_splits(int units) { return units >= 8 ? 5 : 6; }
// 64 positions, doubled until the token's positions fit in 1 << log_splits splits: a function of
// the position alone.
__device__ __forceinline__ int log_split_size(int position, int log_splits) {
  return 6 + (32 - __clz(position >> (6 + log_splits)));
}

// Partial results of a head, by token and head: [split_stride, value_dim] sums relative to the
// split's largest score, then [split_stride] pairs of that score (base 2) and the weights' sum.
__device__ __forceinline__ float* partial_sums(const DecodeParams& p, int token, int head) {
  float* base = reinterpret_cast<float*>(p.attention.scratch + kCounterBytes);
  const std::size_t index = static_cast<std::size_t>(token) * p.attention.heads + head;
  return base + index * p.split_stride * p.attention.cache.value_dim;
}
__device__ __forceinline__ float2* partial_scores(const DecodeParams& p, int token, int head) {
  float* base = reinterpret_cast<float*>(p.attention.scratch + kCounterBytes);
  const std::size_t heads = static_cast<std::size_t>(p.tokens) * p.attention.heads;
  base += heads * p.split_stride * p.attention.cache.value_dim;
  const std::size_t index = static_cast<std::size_t>(token) * p.attention.heads + head;
  return reinterpret_cast<float2*>(base) + index * p.split_stride;
}

// What the step's tables say of one token of the launch. Every warp keeps its own list of them in
// shared memory: registers are needed elsewhere, and warps need not wait for each other.
struct TokenWork {
  int position;  // -1: masked or padding
  int lane;
  int items;
  int end;  // items of all tokens up to this one
};

// Fills tokens[kDecodeTokens] of this warp; the number of items of the launch.
__device__ __forceinline__ int load_tables(const DecodeParams& p, int4* tokens) {
  const StepState& s = p.attention.state;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  TokenWork work[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = lane + 32 * i;
    work[i].position = token < p.tokens ? __ldcg(s.position + p.first + token) : -1;
    work[i].lane = token < p.tokens ? __ldcg(s.lane_of + p.first + token) : -1;
  }
  const int live = min(__ldcg(&s.counts->tokens) - p.first, p.tokens);
  const int units = p.attention.cache.kv_heads * p.parts;
  int total = 0;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool real = lane + 32 * i < live;
    if (!real) work[i].position = -1;
    const int last = max(work[i].position, 0);
    const int splits = (last >> log_split_size(last, p.log_splits)) + 1;
    work[i].items = real ? splits * units : 0;
    int sum = work[i].items;
#pragma unroll
    for (int offset = 1; offset < 32; offset <<= 1) {
      const int below = __shfl_up_sync(kAllLanes, sum, offset);
      if (lane >= offset) sum += below;
    }
    work[i].end = total + sum;
    total = __shfl_sync(kAllLanes, work[i].end, 31);
    tokens[lane + 32 * i] = make_int4(work[i].position, work[i].lane, work[i].items, work[i].end);
  }
  __syncwarp();
  return total;
}
__device__ __forceinline__ TokenWork token_work(const int4* tokens, int token) {
  const int4 v = tokens[token];
  return {v.x, v.y, v.z, v.w};
}

struct Item {
  int token;     // of the launch
  int position;  // -1: masked
  int lane;
  int row;
  int kv_head;
  int head;   // first head
  int heads;  // 1..kItemHeads
  int unit;   // kv head and part
  int split;
  int splits;
  int begin;  // positions of the split
  int end;
};

__device__ __forceinline__ Item find_item(const DecodeParams& p, const int4* tokens, int index) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  Item item;
  item.token = __popc(__ballot_sync(kAllLanes, token_work(tokens, lane).end <= index)) +
               __popc(__ballot_sync(kAllLanes, token_work(tokens, lane + 32).end <= index));
  const TokenWork work = token_work(tokens, item.token);
  const int local = index - (work.end - work.items);
  item.position = work.position;
  item.lane = work.lane;
  item.row = item.position >= 0 ? __ldcg(p.attention.state.row_of + item.lane) : 0;
  const int units = p.attention.cache.kv_heads * p.parts;
  item.split = local / units;
  item.unit = local - item.split * units;
  item.kv_head = item.unit / p.parts;
  const int part = item.unit - item.kv_head * p.parts;
  item.head = item.kv_head * p.group + part * kItemHeads;
  item.heads = min(kItemHeads, p.group - part * kItemHeads);
  const int last = max(item.position, 0);
  const int log_size = log_split_size(last, p.log_splits);
  item.splits = (last >> log_size) + 1;
  item.begin = item.split << log_size;
  item.end = min(item.begin + (1 << log_size), last + 1);
  return item;
}

// Before the tables are certain: what they say of the last round is nearly what this round reads.
// Fetching into the second-level cache changes no value.
template <typename T>
__device__ __forceinline__ void prefetch_first_item(const DecodeParams& p, int4* tokens) {
  const int index = static_cast<int>(blockIdx.x);
  if (index >= load_tables(p, tokens)) return;
  const Item item = find_item(p, tokens, index);
  const LayerCacheView& cache = p.attention.cache;
  if (item.position < 0 || item.position >= cache.capacity || item.row < 0 ||
      item.row >= p.attention.state.rows) {
    return;
  }
  for (int base = item.begin; base < item.end; base += kCacheBlock) {
    const int rows = min(kCacheBlock, item.end - base);
    const auto* k = reinterpret_cast<const char*>(
        key_slot<T>(cache, item.row) +
        cache_offset(base, item.kv_head, cache.kv_heads, cache.key_dim));
    const auto* v = reinterpret_cast<const char*>(
        value_slot<T>(cache, item.row) +
        cache_offset(base, item.kv_head, cache.kv_heads, cache.value_dim));
    const int line = static_cast<int>(threadIdx.x) * 128;
    const int width = static_cast<int>(sizeof(T));
    for (int i = line; i < rows * cache.key_dim * width; i += 128 * kItemThreads) {
      prefetch(k + i);
    }
    for (int i = line; i < rows * cache.value_dim * width; i += 128 * kItemThreads) {
      prefetch(v + i);
    }
  }
}

// Tokens of this very step whose keys and values the item needs: the cache may not hold them yet.
// The live tokens of a lane lie within kDecodeTokens consecutive positions.
struct Fresh {
  int low = INT_MAX;  // positions below come from the cache
  int count = 0;
  unsigned member[2] = {0, 0};  // tokens, in the order of their places in shared memory
};

__device__ __forceinline__ Fresh find_fresh(const int4* tokens, const Item& item) {
  Fresh fresh;
  int low = INT_MAX;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const TokenWork work = token_work(tokens, (static_cast<int>(threadIdx.x) & 31) + 32 * i);
    const bool mine =
        work.lane == item.lane && work.position >= item.begin && work.position < item.end;
    fresh.member[i] = __ballot_sync(kAllLanes, mine);
    if (mine) low = min(low, work.position);
  }
  fresh.low = __reduce_min_sync(kAllLanes, low);
  fresh.count = __popc(fresh.member[0]) + __popc(fresh.member[1]);
  return fresh;
}

// Token of place `place`; the same in all lanes.
__device__ __forceinline__ int fresh_token(const Fresh& fresh, int place) {
  const unsigned below = (1U << (threadIdx.x & 31)) - 1;
  const int before = __popc(fresh.member[0]);
  const bool half = place >= before;
  const unsigned members = half ? fresh.member[1] : fresh.member[0];
  const int rank = place - (half ? before : 0);
  const bool here = ((members >> (threadIdx.x & 31)) & 1) != 0 && __popc(members & below) == rank;
  return __ffs(static_cast<int>(__ballot_sync(kAllLanes, here))) - 1 + (half ? 32 : 0);
}

// Shared memory of a block.
template <typename T>
struct ItemMemory {
  int4* tokens;   // [kDecodeTokens] TokenWork of this warp
  float* q;       // [kItemHeads, key_dim + kMergePad]
  float* merge;   // [kItemWarps, kItemHeads, value_dim + kMergePad]
  float2* score;  // [kItemWarps, kItemHeads] largest score (base 2) and sum of the weights
  float* weight;  // [kItemHeads, kMostSplits]
  int* place;     // [kDecodeTokens] of position low + i among the fresh, or -1
  int* last;      // [1] this block combines
  T* k;           // [fresh, key_dim]
  T* v;           // [fresh, value_dim]

  __device__ __forceinline__ ItemMemory(const DecodeParams& p, unsigned char* memory) {
    const int key_dim = p.attention.cache.key_dim;
    const int value_dim = p.attention.cache.value_dim;
    tokens = reinterpret_cast<int4*>(memory) + threadIdx.x / 32 * kDecodeTokens;
    q = reinterpret_cast<float*>(memory + kItemWarps * kDecodeTokens * sizeof(int4));
    merge = q + kItemHeads * (key_dim + kMergePad);
    score = reinterpret_cast<float2*>(merge + kItemWarps * kItemHeads * (value_dim + kMergePad));
    weight = reinterpret_cast<float*>(score + kItemWarps * kItemHeads);
    place = reinterpret_cast<int*>(weight + kItemHeads * kMostSplits);
    last = place + kDecodeTokens;
    k = reinterpret_cast<T*>(last + 4);
    v = k + static_cast<std::size_t>(p.tokens) * key_dim;
  }
};
inline std::size_t item_memory_bytes(const DecodeParams& p, std::size_t element) {
  const auto key_dim = static_cast<std::size_t>(p.attention.cache.key_dim);
  const auto value_dim = static_cast<std::size_t>(p.attention.cache.value_dim);
  const std::size_t floats = kItemWarps * kDecodeTokens * 4 + kItemHeads * (key_dim + kMergePad) +
                             kItemWarps * kItemHeads * (value_dim + kMergePad + 2) +
                             kItemHeads * kMostSplits + kDecodeTokens + 4;
  const std::size_t fresh = p.fused ? static_cast<std::size_t>(p.tokens) : 0;
  return floats * 4 + fresh * (key_dim + value_dim) * element;
}

// What one warp does of the prologue: a head of q, or the key and value of a fresh token. Loads
// come first so that two tasks are in flight.
template <typename T, int N>
struct HeadTask {
  HeadPairs<N> x;
  float4 v[(N + 1) / 2];
  int position;

  __device__ __forceinline__ void load(const DecodeParams& p, const Item& item, const Fresh& fresh,
                                       const ItemMemory<T>& memory, int task) {
    const int key_dim = p.attention.cache.key_dim;
    const int value_dim = p.attention.cache.value_dim;
    const std::size_t kv_heads = static_cast<std::size_t>(p.attention.cache.kv_heads);
    if (task < item.heads) {
      const std::size_t row = static_cast<std::size_t>(p.first + item.token) * p.attention.heads;
      position = item.position;
      x = load_head<N>(p.heads.q + (row + item.head + task) * key_dim, key_dim, p.heads.style);
    } else if (task < item.heads + fresh.count) {
      const int token = fresh_token(fresh, task - item.heads);
      position = token_work(memory.tokens, token).position;
      const std::size_t row = (p.first + token) * kv_heads + item.kv_head;
      x = load_head<N>(p.heads.k + row * key_dim, key_dim, p.heads.style);
#pragma unroll
      for (int i = 0; i < (N + 1) / 2; ++i) {
        const int d = 4 * ((static_cast<int>(threadIdx.x) & 31) + 32 * i);
        if (d < value_dim) v[i] = load_activation4(p.heads.v + row * value_dim + d);
      }
    }
  }

  __device__ __forceinline__ void finish(const DecodeParams& p, const Item& item,
                                         const Fresh& fresh, const ItemMemory<T>& memory,
                                         int task) {
    const int key_dim = p.attention.cache.key_dim;
    const int value_dim = p.attention.cache.value_dim;
    if (task < item.heads) {
      float* q = memory.q + task * (key_dim + kMergePad);
      finish_head<N>(x, key_dim, position, p.heads, p.heads.q_norm, p.heads.q_norm_eps,
                     [&](int i, float value) { q[i] = value; });
    } else if (task < item.heads + fresh.count) {
      T* k = memory.k + (task - item.heads) * key_dim;
      finish_head<N>(x, key_dim, position, p.heads, p.heads.k_norm, p.heads.k_norm_eps,
                     [&](int i, float value) { k[i] = to_cache<T>(value); });
#pragma unroll
      for (int i = 0; i < (N + 1) / 2; ++i) {
        const int d = 4 * ((static_cast<int>(threadIdx.x) & 31) + 32 * i);
        if (d >= value_dim) continue;
        T* out = memory.v + (task - item.heads) * value_dim + d;
        out[0] = to_cache<T>(v[i].x);
        out[1] = to_cache<T>(v[i].y);
        out[2] = to_cache<T>(v[i].z);
        out[3] = to_cache<T>(v[i].w);
      }
    }
  }
};

// Puts q, and fresh keys and values, into shared memory; ends with the whole block in step. The
// item of a token's last split stores the token's own key and value, and no other item reads them
// from the cache in this launch. N pairs a lane: key_dim and value_dim <= 64 N.
template <typename T, int N>
__device__ __forceinline__ void prepare_item(const DecodeParams& p, const Item& item,
                                             const Fresh& fresh, const ItemMemory<T>& memory) {
  const LayerCacheView& cache = p.attention.cache;
  const int tid = static_cast<int>(threadIdx.x);
  const int warp = tid / 32;
  const int key_dim = cache.key_dim;
  if (!p.fused) {
    const std::size_t row = static_cast<std::size_t>(p.first + item.token) * p.attention.heads;
    const float* q = p.attention.q + (row + item.head) * key_dim;
#pragma unroll 1
    for (int i = tid; i < item.heads * key_dim / 4; i += kItemThreads) {
      const int head = i / (key_dim / 4);
      const int d = 4 * (i - head * (key_dim / 4));
      *reinterpret_cast<float4*>(memory.q + head * (key_dim + kMergePad) + d) =
          load_activation4(q + 4 * i);
    }
    __syncthreads();
    return;
  }
  constexpr int kInFlight = N == 1 ? 2 : 1;  // as registers allow
  const int tasks = item.heads + fresh.count;
#pragma unroll 1
  for (int task = warp; task < tasks; task += kInFlight * kItemWarps) {
    HeadTask<T, N> head[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) head[i].load(p, item, fresh, memory, task + i * kItemWarps);
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      head[i].finish(p, item, fresh, memory, task + i * kItemWarps);
    }
  }
  if (warp == kItemWarps - 1 && fresh.count) {
    const int lane = tid & 31;
    memory.place[lane] = -1;
    memory.place[lane + 32] = -1;
    __syncwarp();
    const unsigned below = (1U << lane) - 1;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (((fresh.member[i] >> lane) & 1) == 0) continue;
      const int offset = token_work(memory.tokens, lane + 32 * i).position - fresh.low;
      if (offset < kDecodeTokens) {
        memory.place[offset] =
            __popc(fresh.member[i] & below) + (i == 1 ? __popc(fresh.member[0]) : 0);
      }
    }
  }
  __syncthreads();
  if (item.split == item.splits - 1 && item.head == item.kv_head * p.group) {
    const int place = memory.place[item.position - fresh.low];
    constexpr int kElements = 16 / static_cast<int>(sizeof(T));
    if (tid < kItemThreads / 2) {
      T* to = key_slot<T>(cache, item.row) +
              cache_offset(item.position, item.kv_head, cache.kv_heads, key_dim);
      const int d = tid * kElements;
      if (d < key_dim) {
        *reinterpret_cast<uint4*>(to + d) =
            *reinterpret_cast<const uint4*>(memory.k + place * key_dim + d);
      }
    } else {
      T* to = value_slot<T>(cache, item.row) +
              cache_offset(item.position, item.kv_head, cache.kv_heads, cache.value_dim);
      const int d = (tid - kItemThreads / 2) * kElements;
      if (d < cache.value_dim) {
        *reinterpret_cast<uint4*>(to + d) =
            *reinterpret_cast<const uint4*>(memory.v + place * cache.value_dim + d);
      }
    }
  }
}

// Place among the fresh of a position >= low, or -1: the cache holds it.
template <typename T>
__device__ __forceinline__ int fresh_place(const ItemMemory<T>& memory, const Fresh& fresh,
                                           int position) {
  const int offset = position - fresh.low;
  return offset < kDecodeTokens ? memory.place[offset] : -1;
}

// Output of a head of the item's token.
__device__ __forceinline__ float* head_out(const DecodeParams& p, const Item& item, int head) {
  const std::size_t row = static_cast<std::size_t>(p.first + item.token) * p.attention.heads;
  return p.attention.out + (row + item.head + head) * p.attention.cache.value_dim;
}

__device__ __forceinline__ void clear_item(const DecodeParams& p, const Item& item) {
  float* out = head_out(p, item, 0);
  for (int i = static_cast<int>(threadIdx.x); i < item.heads * p.attention.cache.value_dim;
       i += kItemThreads) {
    out[i] = 0;
  }
}

__device__ __forceinline__ void add_scaled(float4& sum, float4 v, float scale) {
  sum.x += v.x * scale;
  sum.y += v.y * scale;
  sum.z += v.z * scale;
  sum.w += v.w * scale;
}

// The splits of an item's heads, all stored, become the result.
template <typename T>
__device__ __forceinline__ void combine_splits(const DecodeParams& p, const Item& item,
                                               const ItemMemory<T>& memory) {
  const int tid = static_cast<int>(threadIdx.x);
  const int lane = tid & 31;
  const int value_dim = p.attention.cache.value_dim;
  for (int head = tid / 32; head < item.heads; head += kItemWarps) {
    const float2* scores = partial_scores(p, item.token, item.head + head);
    const float2 none = make_float2(-INFINITY, 0);
    const float2 a = lane < item.splits ? __ldcg(scores + lane) : none;
    const float2 b = lane + 32 < item.splits ? __ldcg(scores + lane + 32) : none;
    const float most = warp_max(fmaxf(a.x, b.x));
    const float wa = exp2_approx(a.x - most);
    const float wb = exp2_approx(b.x - most);
    const float total = warp_sum(wa * a.y + wb * b.y);
    memory.weight[head * kMostSplits + lane] = wa / total;
    memory.weight[head * kMostSplits + lane + 32] = wb / total;
  }
  __syncthreads();
  // Each thread adds every slices-th split of four columns; slices are then added in order.
  const int columns = item.heads * value_dim / 4;
  const int slices = columns > kItemThreads ? 1 : kItemThreads / columns;
  const int slice = slices == 1 ? 0 : tid / columns;
  auto* sums = reinterpret_cast<float4*>(memory.merge);  // [slices, columns]
  if (slice < slices) {
    for (int column = slices == 1 ? tid : tid - slice * columns; column < columns;
         column += slices == 1 ? kItemThreads : columns) {
      const int head = column / (value_dim / 4);
      const auto* from =
          reinterpret_cast<const float4*>(partial_sums(p, item.token, item.head + head)) +
          (column - head * (value_dim / 4));
      const float* weight = memory.weight + head * kMostSplits;
      float4 sum = {};
#pragma unroll 8
      for (int s = slice; s < item.splits; s += slices) {
        add_scaled(sum, __ldcg(from + s * (value_dim / 4)), weight[s]);
      }
      sums[slice * columns + column] = sum;
    }
  }
  __syncthreads();
  for (int column = tid; column < columns; column += kItemThreads) {
    float4 sum = sums[column];
    for (int s = 1; s < slices; ++s) add_scaled(sum, sums[s * columns + column], 1);
    reinterpret_cast<float4*>(head_out(p, item, 0))[column] = sum;
  }
}

// Adds the warps' results, which lie in memory.merge and memory.score, in order; a warp without a
// position has score -inf. Then stores the result, or the split's part of it, and combines the
// splits when this block is the last of them.
template <typename T>
__device__ __forceinline__ void end_item(const DecodeParams& p, const Item& item,
                                         const ItemMemory<T>& memory) {
  const int tid = static_cast<int>(threadIdx.x);
  const int value_dim = p.attention.cache.value_dim;
  const int columns = value_dim / 4;
  __syncthreads();
#pragma unroll 1
  for (int i = tid; i < item.heads * columns; i += kItemThreads) {
    const int head = i / columns;
    const int column = i - head * columns;
    float most = -INFINITY;
#pragma unroll
    for (int w = 0; w < kItemWarps; ++w) {
      most = fmaxf(most, memory.score[w * kItemHeads + head].x);
    }
    float total = 0;
    float4 sum = {};
#pragma unroll
    for (int w = 0; w < kItemWarps; ++w) {
      const float2 score = memory.score[w * kItemHeads + head];
      const float weight = exp2_approx(score.x - most);
      total += score.y * weight;
      const float* row = memory.merge + (w * kItemHeads + head) * (value_dim + kMergePad);
      add_scaled(sum, reinterpret_cast<const float4*>(row)[column], weight);
    }
    if (item.splits == 1) {
      const float inverse = 1.0F / total;
      reinterpret_cast<float4*>(head_out(p, item, head))[column] =
          make_float4(sum.x * inverse, sum.y * inverse, sum.z * inverse, sum.w * inverse);
    } else {
      float* to = partial_sums(p, item.token, item.head + head) +
                  static_cast<std::size_t>(item.split) * value_dim;
      reinterpret_cast<float4*>(to)[column] = sum;
      if (column == 0) {
        partial_scores(p, item.token, item.head + head)[item.split] = make_float2(most, total);
      }
    }
  }
  if (item.splits == 1) return;
  __syncthreads();
  if (tid == 0) {
    int* counter = reinterpret_cast<int*>(p.attention.scratch) + item.token * kMaxUnits + item.unit;
    __threadfence();  // this block's parts before its count
    const bool last = atomicAdd(counter, 1) == item.splits - 1;
    if (last) {
      *counter = 0;
      __threadfence();  // every block's count before its parts are read
    }
    *memory.last = last ? 1 : 0;
  }
  __syncthreads();
  if (*memory.last != 0) combine_splits(p, item, memory);
}

}  // namespace pianola::cuda
