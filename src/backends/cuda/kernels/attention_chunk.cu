// Attention of the chunk class: attend_chunk(), after FlashAttention-2 (Dao, 2023).
//
// A block of four warps computes a tile of one head's queries of one lane, over blocks of 64
// positions that arrive in shared memory while the block before is multiplied. Tiles are handed out
// by a counter, the longest of a lane first. Caches of f32 and of 8 bits take attend()'s kernel
// instead, 64 tokens at a time: exact, and slow.
#include <algorithm>
#include <climits>

#include "backends/cuda/kernels/attention.h"
#include "backends/cuda/kernels/attention_common.cuh"

namespace pianola::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;

// Consecutive tokens of one lane.
struct Tile {
  int lane = -1;  // -1: there is no such tile
  int first = 0;
  int count = 0;
};

// Heads of up to kDim elements; a warp has kRowTiles times 16 queries.
template <typename T, int kDim, int kRowTiles>
struct ChunkMemory {
  static constexpr int kRows = 16 * kRowTiles * kWarps;
  T q[kRows * kDim];           // [queries, dim]
  T k[2][kCacheBlock * kDim];  // [positions, dim], two blocks
  T v[2][kCacheBlock * kDim];  // [positions, dim]
  const T* keys;               // of the tile's kv head
  const T* values;             // of the tile's kv head
  int position[kRows];         // -1: masked or no token
  Tile tile;                   // kept here, as registers are short in the loop
  int head;
  int begin;  // first position that a query of the tile attends to
  int next;
};

// Element of 16 bytes `chunk` of a row: chunks of eight rows lie in different banks.
template <int kDim>
__device__ __forceinline__ int swizzled(int row, int chunk) {
  return row * kDim + ((chunk ^ (row & 7)) << 3);
}

// Copies 16 bytes, or clears them without reading.
__device__ __forceinline__ void copy_async(void* to, const void* from, bool wanted) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(wanted ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}
__device__ __forceinline__ void load_matrices(std::uint32_t (&m)[4], std::uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row)
               : "memory");
}
__device__ __forceinline__ void load_transposed(std::uint32_t (&m)[4], std::uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row)
               : "memory");
}

// Tile `index`, in order of lanes and from the last tokens of each to the first: later tokens have
// more to read.
__device__ __forceinline__ Tile find_tile(const StepState& s, int index, int rows) {
  const int thread = static_cast<int>(threadIdx.x) & 31;
  const int lanes = __ldcg(&s.counts->lanes);
  const int tokens = __ldcg(&s.counts->tokens);
  Tile tile;
  for (int base = 0; base < lanes; base += 32) {
    const int lane = base + thread;
    const int first = lane < lanes ? __ldcg(s.first_token + lane) : 0;
    const int end = lane < lanes ? min(__ldcg(s.first_token + lane + 1), tokens) : 0;
    const int tiles = (max(end - first, 0) + rows - 1) / rows;
    int sum = tiles;
#pragma unroll
    for (int offset = 1; offset < 32; offset <<= 1) {
      const int below = __shfl_up_sync(kAllLanes, sum, offset);
      if (thread >= offset) sum += below;
    }
    const int owner = __popc(__ballot_sync(kAllLanes, sum <= index));
    if (owner < 32) {
      const int from_last = index - __shfl_sync(kAllLanes, sum - tiles, owner);
      const int rank = __shfl_sync(kAllLanes, tiles, owner) - 1 - from_last;
      tile.lane = base + owner;
      tile.first = __shfl_sync(kAllLanes, first, owner) + rank * rows;
      tile.count = min(rows, __shfl_sync(kAllLanes, end, owner) - tile.first);
      return tile;
    }
    index -= __shfl_sync(kAllLanes, sum, 31);
  }
  return tile;
}

// kPlain: the layer has neither a window nor sinks.
template <typename T, int kDim, int kRowTiles, bool kExact, bool kPlain>
struct ChunkTile {
  using Memory = ChunkMemory<T, kDim, kRowTiles>;
  static constexpr int kChunks = kDim / 8;
  static constexpr int kStride = 2 * kDim;  // bytes of a row in shared memory
  // Positions between two rescalings: fewer where sums of wide heads leave few registers.
  static constexpr int kStep = kDim >= 128 ? 32 : kCacheBlock;
  static constexpr int kKeyTiles = kStep / 8;  // of eight positions

  const AttentionArgs& args;
  Memory& memory;
  int key_dim;
  int value_dim;
  int tid;
  int lane;
  int warp;

  __device__ __forceinline__ ChunkTile(const AttentionArgs& a, Memory& m) : args(a), memory(m) {
    key_dim = kExact ? kDim : args.cache.key_dim;
    value_dim = kExact ? kDim : args.cache.value_dim;
    tid = static_cast<int>(threadIdx.x);
    lane = tid & 31;
    warp = tid / 32;
  }

  // First position that a token attends to.
  __device__ __forceinline__ int begin_of(int position) const {
    const int window = kPlain ? 0 : args.cache.window;
    return window > 0 ? max(position - window + 1, 0) : 0;
  }

  // One block of a head's keys or values: [64, dim] contiguous, of which rows [least, rows) exist.
  __device__ __forceinline__ void copy_block(T* to, const T* from, int dim, int least,
                                             int rows) const {
#pragma unroll
    for (int i = 0; i < kCacheBlock * kChunks / kThreads; ++i) {
      const int index = tid + i * kThreads;
      const int row = index / kChunks;
      const int chunk = index % kChunks;
      const bool wanted = row < rows && (kPlain || row >= least) && (kExact || chunk * 8 < dim);
      copy_async(to + swizzled<kDim>(row, chunk), from + row * dim + chunk * 8, wanted);
    }
  }
  __device__ __forceinline__ void copy_blocks(int block, int last) const {
    const int rows = last + 1 - block * kCacheBlock;
    const int least = kPlain ? 0 : memory.begin - block * kCacheBlock;
    const int place = kPlain ? block : block % (args.cache.capacity / kCacheBlock);
    const auto stride = static_cast<std::size_t>(place) * (args.cache.kv_heads * kCacheBlock);
    copy_block(memory.k[block & 1], memory.keys + stride * key_dim, key_dim, least, rows);
    copy_block(memory.v[block & 1], memory.values + stride * value_dim, value_dim, least, rows);
  }

  __device__ __forceinline__ void load_queries(const Tile& tile, int head) const {
    for (int index = tid; index < Memory::kRows * kChunks; index += kThreads) {
      const int row = index / kChunks;
      const int chunk = index % kChunks;
      uint4 packed = {};
      if (memory.position[row] >= 0 && (kExact || chunk * 8 < key_dim)) {
        const std::size_t token = static_cast<std::size_t>(tile.first + row);
        const float* q = args.q + (token * args.heads + head) * key_dim + chunk * 8;
        const float4 a = load_activation4(q);
        const float4 b = load_activation4(q + 4);
        packed =
            make_uint4(pack<T>(a.x, a.y), pack<T>(a.z, a.w), pack<T>(b.x, b.y), pack<T>(b.z, b.w));
      }
      *reinterpret_cast<uint4*>(memory.q + swizzled<kDim>(row, chunk)) = packed;
    }
  }

  // scores[query, position] = q k
  __device__ __forceinline__ void multiply_keys(float (&scores)[kRowTiles][kKeyTiles][4],
                                                std::uint32_t k) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[m][n][i] = 0;
      }
    }
    // Chunk 2 step + c of a row lies at (2 step) ^ (c ^ row % 8): here in bytes.
    const std::uint32_t q =
        shared_address(memory.q) + (warp * kRowTiles * 16 + (lane & 15)) * kStride;
    const int q_chunk = ((lane >> 4) ^ (lane & 7)) << 4;
    k += ((lane & 7) + ((lane >> 4) << 3)) * kStride;
    const int k_chunk = (((lane >> 3) & 1) ^ (lane & 7)) << 4;
#pragma unroll(kDim <= 128 ? kDim / 16 : 4)
    for (int step = 0; step < kDim / 16; ++step) {
      std::uint32_t a[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        load_matrices(a[m], q + 16 * m * kStride + (q_chunk ^ (32 * step)));
      }
#pragma unroll
      for (int n = 0; n < kKeyTiles; n += 2) {
        std::uint32_t b[4];
        load_matrices(b, k + 8 * n * kStride + (k_chunk ^ (32 * step)));
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          mma<T>(scores[m][n], a[m], b[0], b[1]);
          mma<T>(scores[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  // sums[query, dim] += weights v
  __device__ __forceinline__ void add_values(
      float (&sums)[kRowTiles][kDim / 8][4],
      const std::uint32_t (&weights)[kRowTiles][kKeyTiles][2], std::uint32_t v) const {
    v += (lane & 15) * kStride;
    const int v_chunk = ((lane >> 4) ^ (lane & 7)) << 4;
#pragma unroll
    for (int step = 0; step < kStep / 16; ++step) {
#pragma unroll
      for (int n = 0; n < kDim / 8; n += 2) {
        std::uint32_t b[4];
        load_transposed(b, v + 16 * step * kStride + (v_chunk ^ (16 * n)));
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          const std::uint32_t a[4] = {weights[m][2 * step][0], weights[m][2 * step][1],
                                      weights[m][2 * step + 1][0], weights[m][2 * step + 1][1]};
          mma<T>(sums[m][n], a, b[0], b[1]);
          mma<T>(sums[m][n + 1], a, b[2], b[3]);
        }
      }
    }
  }

  // Positions after a query's own, or before its window. A row without a token sees everything: its
  // sums are finite and not stored.
  __device__ __forceinline__ void mask(float (&scores)[kRowTiles][kKeyTiles][4], int base) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = memory.position[(warp * kRowTiles + m) * 16 + (lane >> 2) + 8 * half];
        const int most = at < 0 ? INT_MAX : at - base - 2 * (lane & 3);
        const int least = at < 0 ? INT_MIN : begin_of(at) - base - 2 * (lane & 3);
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
          if (8 * n > most || (!kPlain && 8 * n < least)) scores[m][n][2 * half] = -INFINITY;
          if (8 * n + 1 > most || (!kPlain && 8 * n + 1 < least)) {
            scores[m][n][2 * half + 1] = -INFINITY;
          }
        }
      }
    }
  }

  // Scores become weights; rows lane / 4 and lane / 4 + 8 of each tile of queries.
  __device__ __forceinline__ void softmax(const float (&scores)[kRowTiles][kKeyTiles][4],
                                          std::uint32_t (&weights)[kRowTiles][kKeyTiles][2],
                                          float (&sums)[kRowTiles][kDim / 8][4],
                                          float (&most)[kRowTiles][2], float (&total)[kRowTiles][2],
                                          float scale) const {
    float factor[kRowTiles][2];
    bool moved = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float best = most[m][half];
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
          best = fmaxf(best, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
        }
        best = fmaxf(best, __shfl_xor_sync(kAllLanes, best, 1));
        best = fmaxf(best, __shfl_xor_sync(kAllLanes, best, 2));
        factor[m][half] = exp2_approx((most[m][half] - best) * scale);
        moved = moved || best != most[m][half];
        most[m][half] = best;
        const float shift = best * scale;
        float sum = 0;
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
          const float a = exp2_approx(fmaf(scores[m][n][2 * half], scale, -shift));
          const float b = exp2_approx(fmaf(scores[m][n][2 * half + 1], scale, -shift));
          sum += a + b;
          weights[m][n][half] = pack<T>(a, b);
        }
        total[m][half] = total[m][half] * factor[m][half] + sum;
      }
    }
    if (!__any_sync(kAllLanes, moved)) return;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[m][n][i] *= factor[m][i >> 1];
      }
    }
  }

  __device__ __forceinline__ void store(const float (&sums)[kRowTiles][kDim / 8][4],
                                        const float (&most)[kRowTiles][2],
                                        const float (&total)[kRowTiles][2], float scale) const {
    const Tile tile = memory.tile;
    const int head = memory.head;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float sum = total[m][half];
        sum += __shfl_xor_sync(kAllLanes, sum, 1);
        sum += __shfl_xor_sync(kAllLanes, sum, 2);
        if constexpr (!kPlain) sum = with_sink(args.sinks, head, most[m][half] * scale, sum);
        const int row = (warp * kRowTiles + m) * 16 + (lane >> 2) + 8 * half;
        if (row >= tile.count) continue;
        const bool live = memory.position[row] >= 0;
        const float inverse = 1.0F / sum;
        const std::size_t token = static_cast<std::size_t>(tile.first + row);
        float* out = args.out + (token * args.heads + head) * value_dim + 2 * (lane & 3);
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
          if (!kExact && 8 * n >= value_dim) continue;
          *reinterpret_cast<float2*>(out + 8 * n) =
              live ? make_float2(sums[m][n][2 * half] * inverse, sums[m][n][2 * half + 1] * inverse)
                   : make_float2(0, 0);
        }
      }
    }
  }

  // Starts and ends with all threads done with shared memory, but for memory.next.
  __device__ __forceinline__ void run(const Tile& tile, int head) const {
    const StepState& s = args.state;
    if (tid == 0) {
      memory.tile = tile;
      memory.head = head;
      const int row = __ldcg(s.row_of + tile.lane);
      const int kv_head = head / (args.heads / args.cache.kv_heads);
      memory.keys =
          key_slot<T>(args.cache, row) + cache_offset(0, kv_head, args.cache.kv_heads, key_dim);
      memory.values =
          value_slot<T>(args.cache, row) + cache_offset(0, kv_head, args.cache.kv_heads, value_dim);
    }
    for (int i = tid; i < Memory::kRows; i += kThreads) {
      memory.position[i] = i < tile.count ? __ldcg(s.position + tile.first + i) : -1;
    }
    __syncthreads();
    int last = -1;  // position of the tile
    int first = INT_MAX;
#pragma unroll
    for (int i = 0; i < Memory::kRows / 32; ++i) {
      const int position = memory.position[lane + 32 * i];
      last = max(last, position);
      if (position >= 0) first = min(first, position);
    }
    last = __reduce_max_sync(kAllLanes, last);
    int block = 0;
    if constexpr (!kPlain) {
      const int begin = begin_of(__reduce_min_sync(kAllLanes, first));
      block = begin / kCacheBlock;
      if (tid == 0) memory.begin = begin;
      __syncthreads();
    }
    if (last >= 0) copy_blocks(block, last);
    load_queries(tile, head);

    int warp_first = INT_MAX;
    int warp_last = -1;
    if (lane < 16 * kRowTiles) {
      warp_last = memory.position[warp * 16 * kRowTiles + lane];
      if (warp_last >= 0) warp_first = warp_last;
    }
    warp_first = __reduce_min_sync(kAllLanes, warp_first);
    warp_last = __reduce_max_sync(kAllLanes, warp_last);

    const float scale = args.scale * kLog2e;
    float sums[kRowTiles][kDim / 8][4] = {};
    float most[kRowTiles][2];
    float total[kRowTiles][2] = {};
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) most[m][0] = most[m][1] = kNoScore;
#pragma unroll 1
    for (; block * kCacheBlock <= last; ++block) {
      wait_for_copies();
      __syncthreads();
      if ((block + 1) * kCacheBlock <= last) copy_blocks(block + 1, last);
#pragma unroll 1
      for (int part = 0; part < kCacheBlock / kStep; ++part) {
        const int base = block * kCacheBlock + part * kStep;
        if (base > warp_last) break;
        if (!kPlain && base + kStep <= begin_of(warp_first)) continue;
        const int offset = part * kStep * kStride;
        float scores[kRowTiles][kKeyTiles][4];
        multiply_keys(scores, shared_address(memory.k[block & 1]) + offset);
        if (base + kStep - 1 > warp_first || (!kPlain && base < begin_of(warp_last))) {
          mask(scores, base);
        }
        std::uint32_t weights[kRowTiles][kKeyTiles][2];  // of the query, then of the one 8 below
        softmax(scores, weights, sums, most, total, scale);
        add_values(sums, weights, shared_address(memory.v[block & 1]) + offset);
      }
    }
    store(sums, most, total, scale);
  }
};

template <typename T, int kDim, int kRowTiles, bool kExact, bool kPlain>
__global__ void __launch_bounds__(kThreads, kDim <= 128 ? 2 : 1)
    attend_chunk_kernel(const __grid_constant__ AttentionArgs args) {
  using Memory = ChunkMemory<T, kDim, kRowTiles>;
  extern __shared__ __align__(128) unsigned char shared[];
  Memory& memory = *reinterpret_cast<Memory*>(shared);
  allow_next();
  wait_for_previous();
  int* counters = reinterpret_cast<int*>(args.scratch);
  for (;;) {
    if (threadIdx.x == 0) memory.next = atomicAdd(counters, 1);
    __syncthreads();
    const int index = memory.next;
    const Tile tile = find_tile(args.state, index / args.heads, Memory::kRows);
    if (tile.lane < 0) break;
    ChunkTile<T, kDim, kRowTiles, kExact, kPlain>(args, memory).run(tile, index % args.heads);
    __syncthreads();
  }
  // Whoever comes last has seen every block take its last tile.
  if (threadIdx.x == 0 && atomicAdd(counters + 1, 1) == static_cast<int>(gridDim.x) - 1) {
    counters[0] = 0;
    counters[1] = 0;
  }
}

template <typename T, int kDim, int kRowTiles, bool kExact>
void launch_chunk(const AttentionArgs& args, const Launch& launch) {
  const bool plain = args.cache.window == 0 && !args.sinks;
  const auto kernel = plain ? attend_chunk_kernel<T, kDim, kRowTiles, kExact, true>
                            : attend_chunk_kernel<T, kDim, kRowTiles, kExact, false>;
  using Memory = ChunkMemory<T, kDim, kRowTiles>;
  const long long tiles = static_cast<long long>(args.tokens) * args.heads;
  const auto blocks = static_cast<unsigned>(
      std::min<long long>(tiles, static_cast<long long>(launch.sms) * (kDim <= 128 ? 2 : 1)));
  launch_kernel(launch, "attend_chunk", kernel, dim3(blocks), dim3(kThreads), sizeof(Memory), args);
}

template <typename T>
void attend_chunk_of(const AttentionArgs& args, const Launch& launch) {
  const LayerCacheView& cache = args.cache;
  const int most = std::max(cache.key_dim, cache.value_dim);
  const bool equal = cache.key_dim == cache.value_dim;
  if (most == 256 && equal) return launch_chunk<T, 256, 1, true>(args, launch);
  if (most > 128) return launch_chunk<T, 256, 1, false>(args, launch);
  if (most == 128 && equal) return launch_chunk<T, 128, 2, true>(args, launch);
  if (most > 64) return launch_chunk<T, 128, 2, false>(args, launch);
  if (most == 64 && equal) return launch_chunk<T, 64, 2, true>(args, launch);
  launch_chunk<T, 64, 2, false>(args, launch);
}

}  // namespace

void attend_chunk(const AttentionArgs& args, const Launch& launch) {
  check_attention_shape(args.cache, args.heads);
  switch (args.cache.dtype) {
    case DType::kBF16:
      return attend_chunk_of<__nv_bfloat16>(args, launch);
    case DType::kF16:
      return attend_chunk_of<__half>(args, launch);
    default:
      return attend(args, nullptr, launch);
  }
}

}  // namespace pianola::cuda
