// The work of attend() and what happens before a team reads its keys and values; what happens after
// is in attention_merge.cuh.
//
// Teams of four warps serve one (token, part of a kv head's group of heads): an item. The positions
// that the token attends to are blocks of 64; block b of them belongs to rank b % ranks, and a rank
// to the team rank % number of teams. Each rank's part of the result goes to the shared memory of
// the teams that add the parts, in an order fixed by the token's position and the window alone: how
// many teams there are changes no bit. A team is a thread block, and its peers are a cluster.
//
// kPlain is true where the layer has neither a window nor sinks: then nothing here knows of them.
//
// Everything that a step's earlier kernels do not write is read before wait_for_previous(): the
// step's tables, constants, and keys and values of positions before the step.
#pragma once

#include <algorithm>
#include <climits>

#include "backends/cuda/kernels/attention_common.cuh"
#include "backends/cuda/kernels/attention_params.cuh"
#include "backends/cuda/kernels/barriers.cuh"

namespace pianola::cuda {

// Of a team, which is a thread block.
__device__ __forceinline__ int thread_index() { return static_cast<int>(threadIdx.x); }

// From which position on a token attends, and where blocks lie: a layer with a window is a ring of
// at least window positions, so the blocks of a span lie on one turn of it or on two.
template <bool kPlain>
struct Span {
  const LayerCacheView& cache;
  int begin;
  int turns;  // blocks before the turn of the first one

  __device__ __forceinline__ Span(const LayerCacheView& of, int end) : cache(of) {
    begin = cache.window > 0 ? max(end - cache.window, 0) : 0;
    turns = first() / ring() * ring();
  }
  // Blocks: computed, as registers are short.
  __device__ __forceinline__ int first() const { return begin / kCacheBlock; }
  __device__ __forceinline__ int ring() const { return cache.capacity / kCacheBlock; }
  __device__ __forceinline__ int place(int block) const {
    block -= turns;
    return block < ring() ? block : block - ring();
  }
  __device__ __forceinline__ int place_of(int position) const {
    position -= turns * kCacheBlock;
    return position < ring() * kCacheBlock ? position : position - ring() * kCacheBlock;
  }
};
template <>
struct Span<true> {
  static constexpr int begin = 0;

  __device__ __forceinline__ Span(const LayerCacheView& /*cache*/, int /*end*/) {}
  static constexpr __device__ int first() { return 0; }
  static __device__ __forceinline__ int place(int block) { return block; }
  static __device__ __forceinline__ int place_of(int position) { return position; }
};

// What the step's tables say of tokens lane and lane + 32 of the launch.
struct Tables {
  int position[2];  // -1: masked or padding
  int lane[2];
};

struct Item {
  int token;     // of the launch
  int position;  // -1: masked, -2: there is no such token
  int lane;
  int row;
  int kv_head;
  int head;     // first head
  int heads;    // 1..kItemHeads
  bool stores;  // the first part of a group stores the token's key and value
  int end;      // positions
  int blocks;   // of 64 positions, from position 0 on
  int ranks;
  int teams;      // teams
  int team;       // this one of them
  int active;     // teams with a rank
  int log_slice;  // columns of the result that a team adds up
  int targets;    // teams that do
};

// What the position of an item's token decides. `value_dim` is that of the cache.
template <bool kPlain>
__device__ __forceinline__ void set_extent(const DecodeParams& p, int value_dim, Item& item) {
  item.end = max(item.position, 0) + 1;
  item.blocks = (item.end + kCacheBlock - 1) / kCacheBlock;
  item.ranks = min(kMostRanks, item.blocks - Span<kPlain>(p.attention.cache, item.end).first());
  item.active = min(item.teams, item.ranks);
  const int columns = item.heads * (value_dim / 4);
  item.log_slice = log_slice(columns, item.active);
  item.targets = (columns + (1 << item.log_slice) - 1) >> item.log_slice;
}

// Row tables are padded to 128 bytes, so the row of any of 32 lanes is read before it is known
// which one is needed.
template <bool kPlain>
__device__ __forceinline__ Item find_item(const DecodeParams& p, Tables& tables, int index,
                                          int team) {
  const DecodeParams::StepTables& s = p.attention.state;
  const int lane = thread_index() & 31;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = lane + 32 * i;
    tables.position[i] = token < p.tokens ? __ldcg(s.position + p.first + token) : -1;
    tables.lane[i] = token < p.tokens ? __ldcg(s.lane_of + p.first + token) : -1;
  }
  const int row = __ldcg(s.row_of + lane);
  const int live = min(__ldcg(&s.counts->tokens) - p.first, p.tokens);

  Item item;
  item.teams = 1 << p.log_cluster;
  item.team = team;
  const int units = p.attention.cache.kv_heads * p.parts;
  item.token = index / units;
  const int unit = index - item.token * units;
  item.kv_head = unit / p.parts;
  const int part = unit - item.kv_head * p.parts;
  item.head = item.kv_head * p.group + part * kItemHeads;
  item.heads = min(kItemHeads, p.group - part * kItemHeads);
  item.stores = part == 0;

#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (lane + 32 * i >= live) tables.position[i] = -1;
  }
  const int half = item.token >> 5;
  item.position =
      __shfl_sync(kAllLanes, half ? tables.position[1] : tables.position[0], item.token & 31);
  item.lane = __shfl_sync(kAllLanes, half ? tables.lane[1] : tables.lane[0], item.token & 31);
  item.row = __shfl_sync(kAllLanes, row, item.lane & 31);
  if (item.token >= live) item.position = -2;
  if (item.lane >= 32 && item.position >= 0) item.row = __ldcg(s.row_of + item.lane);

  set_extent<kPlain>(p, p.attention.cache.value_dim, item);
  return item;
}

// Tokens of this very step whose keys and values this team needs: the cache may not hold
// them yet. The live tokens of a lane lie within kDecodeTokens consecutive positions.
struct Fresh {
  int low = INT_MAX;  // positions below come from the cache
  int count = 0;
  unsigned member[2] = {0, 0};  // tokens, in the order of their places in shared memory
};

// Whether this team reads the block of a position of the span: there are kMostRanks ranks, or fewer
// and one block each.
template <bool kPlain>
__device__ __forceinline__ bool owns(const Item& item, const Span<kPlain>& span, int position) {
  const int rank = (position / kCacheBlock - span.first()) & (kMostRanks - 1);
  return (rank & (item.teams - 1)) == item.team;
}

template <bool kPlain>
__device__ __forceinline__ Fresh find_fresh(const Tables& tables, const Item& item,
                                            const Span<kPlain>& span) {
  Fresh fresh;
  int low = INT_MAX;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int position = tables.position[i];
    const bool mine = tables.lane[i] == item.lane && position >= span.begin &&
                      position < item.end && owns(item, span, position);
    fresh.member[i] = __ballot_sync(kAllLanes, mine);
    if (mine) low = min(low, position);
  }
  fresh.low = __reduce_min_sync(kAllLanes, low);
  fresh.count = __popc(fresh.member[0]) + __popc(fresh.member[1]);
  return fresh;
}

// Token of place `place`; the same in all lanes.
__device__ __forceinline__ int fresh_token(const Fresh& fresh, int place) {
  const unsigned below = (1U << (thread_index() & 31)) - 1;
  const int before = __popc(fresh.member[0]);
  const bool half = place >= before;
  const unsigned members = half ? fresh.member[1] : fresh.member[0];
  const int rank = place - (half ? before : 0);
  const bool here =
      ((members >> (thread_index() & 31)) & 1) != 0 && __popc(members & below) == rank;
  return __ffs(static_cast<int>(__ballot_sync(kAllLanes, here))) - 1 + (half ? 32 : 0);
}

// --- Parts of a result travel between the thread blocks of a cluster. ---

// What the warps of a team have summed of a rank, in shared memory.
struct WarpSums {
  float* merge;   // [kItemWarps, heads, value_dim + kMergePad]
  float2* score;  // [kItemWarps, kItemHeads] largest score (base 2) and sum of the weights

  static __host__ __device__ __forceinline__ int floats(int heads, int value_dim) {
    return kItemWarps * (heads * (value_dim + kMergePad) + 2 * kItemHeads);
  }
  __device__ __forceinline__ WarpSums(float* at, int heads, int value_dim)
      : merge(at),
        score(reinterpret_cast<float2*>(at + kItemWarps * heads * (value_dim + kMergePad))) {}
};

// Shared memory of a team.
inline constexpr std::size_t kItemBytes = 16 + (sizeof(Item) + 15) / 16 * 16;
template <typename T>
struct ItemMemory {
  std::uint64_t* barrier;  // [1] all parts have arrived
  Item* item;              // [1] for the end of the work: registers are short in the loop
  float4* part;            // [columns of this team, ranks] from all teams
  float2* part_score;      // [kItemHeads, kMostRanks] as WarpSums::score
  float* q;                // [heads, key_dim + kMergePad]
  WarpSums sums;
  int* place;  // [kDecodeTokens] of position low + i among the fresh, or -1
  T* k;        // [fresh, key_dim]
  T* v;        // [fresh, value_dim]
  int heads;   // that there is room for

  __device__ __forceinline__ ItemMemory(const DecodeParams& p, unsigned char* memory)
      : barrier(reinterpret_cast<std::uint64_t*>(memory)),
        item(reinterpret_cast<Item*>(memory + 16)),
        part(reinterpret_cast<float4*>(memory + kItemBytes)),
        part_score(reinterpret_cast<float2*>(memory + kItemBytes + p.part_floats * sizeof(float))),
        q(reinterpret_cast<float*>(part_score + kItemHeads * kMostRanks)),
        sums(q + group_heads(p) * (p.attention.cache.key_dim + kMergePad), group_heads(p),
             p.attention.cache.value_dim),
        place(reinterpret_cast<int*>(sums.score + kItemWarps * kItemHeads)),
        k(reinterpret_cast<T*>(place + kDecodeTokens)),
        v(k + static_cast<std::size_t>(p.tokens) * p.attention.cache.key_dim),
        heads(group_heads(p)) {}

  // Where another team of the item has what lies at `offset` here, and its barrier, for send().
  __device__ __forceinline__ std::uint32_t peer(std::uint32_t offset, int team) const {
    return peer_address(offset, team);
  }
  __device__ __forceinline__ std::uint32_t peer_barrier(int team) const {
    return peer_address(shared_address(barrier), team);
  }
};
// Without the fresh keys and values.
inline std::size_t item_memory_bytes(const DecodeParams& p) {
  const LayerCacheView& cache = p.attention.cache;
  const int heads = group_heads(p);
  const int floats = p.part_floats + 2 * kItemHeads * kMostRanks +
                     heads * (cache.key_dim + kMergePad) +
                     WarpSums::floats(heads, cache.value_dim) + kDecodeTokens;
  return kItemBytes + static_cast<std::size_t>(floats) * sizeof(float);
}
inline std::size_t fresh_bytes(const DecodeParams& p) {
  const LayerCacheView& cache = p.attention.cache;
  const int elements = p.fused ? p.tokens * (cache.key_dim + cache.value_dim) : 0;
  return row_bytes(cache.dtype, static_cast<std::size_t>(elements));
}

// Before anything else; all teams of a cluster, whether they have work or not. A team that is the
// only one has no cluster: its parts are stores of its own.
template <typename T>
__device__ __forceinline__ void start_cluster(const DecodeParams& p, const ItemMemory<T>& memory) {
  if (p.log_cluster == 0) return;
  if (thread_index() == 0) {
    init_barrier(shared_address(memory.barrier), 1);
    fence_barriers();
  }
  __syncwarp();
  cluster_arrive_relaxed();  // what it tells of is behind the fence
}
// Once the item is known: how many bytes this team will receive.
template <typename T>
__device__ __forceinline__ void expect_parts(const DecodeParams& p, const Item& item,
                                             const ItemMemory<T>& memory) {
  if (item.teams == 1 || item.ranks == 1) return;
  if (thread_index() != 0 || item.team >= item.targets) return;
  const int columns = item.heads * (p.attention.cache.value_dim / 4);
  const int mine = min(1 << item.log_slice, columns - (item.team << item.log_slice));
  const int bytes = item.ranks * (mine * 16 + item.heads * 8);
  expect_bytes(shared_address(memory.barrier), bytes);
}
// Until all teams have started: parts may be given to them.
__device__ __forceinline__ void wait_for_teams(const Item& item) {
  if (item.teams > 1 && item.ranks > 1) cluster_wait();
}
// To what lies at `to` here, of a team.
template <typename T, typename Part>
__device__ __forceinline__ void give_part(const Item& item, const ItemMemory<T>& memory, Part* to,
                                          Part part, int team) {
  if (item.teams == 1) {
    *to = part;
  } else {
    send(memory.peer(shared_address(to), team), part, memory.peer_barrier(team));
  }
}
template <typename T>
__device__ __forceinline__ void wait_for_parts(const Item& item, const ItemMemory<T>& memory) {
  if (item.teams == 1) {
    __syncthreads();
  } else {
    wait_barrier(shared_address(memory.barrier), 0, "parts of rank", 0);
  }
}

// --- q, and keys and values of this step's tokens, come into shared memory. ---

// What is known before the kernels before have ended.
template <int N>
struct HeadConstants {
  float frequencies[N];
  HeadPairs<N> q_norm;
  HeadPairs<N> k_norm;
  Turns<N> turns;  // of the item's token

  __device__ __forceinline__ void load(const DecodeParams& p) {
    const int key_dim = p.attention.cache.key_dim;
    load_frequencies<N>(frequencies, p.heads.inverse_frequencies, p.heads.turned);
    q_norm = load_norm<N>(p.heads.q_norm, key_dim, p.heads.style, p.heads.turned / 2);
    k_norm = load_norm<N>(p.heads.k_norm, key_dim, p.heads.style, p.heads.turned / 2);
  }
};

// What one warp does of it: a head of q, or the key and value of a fresh token. Loads come first so
// that several tasks are in flight.
template <typename T, int N>
struct HeadTask {
  HeadPairs<N> x;
  float4 v[(N + 1) / 2];
  int position;

  __device__ __forceinline__ void load(const DecodeParams& p, const Item& item,
                                       const Tables& tables, const Fresh& fresh, int task) {
    const int key_dim = p.attention.cache.key_dim;
    const int value_dim = p.attention.cache.value_dim;
    const std::size_t kv_heads = static_cast<std::size_t>(p.attention.cache.kv_heads);
    if (task < item.heads) {
      const std::size_t row = static_cast<std::size_t>(p.first + item.token) * p.attention.heads;
      position = item.position;
      x = load_head<N>(p.heads.q + (row + item.head + task) * key_dim, key_dim, p.heads.style,
                       p.heads.turned / 2);
    } else if (task < item.heads + fresh.count) {
      const int token = fresh_token(fresh, task - item.heads);
      position =
          __shfl_sync(kAllLanes, token < 32 ? tables.position[0] : tables.position[1], token & 31);
      const std::size_t row = (p.first + token) * kv_heads + item.kv_head;
      x = load_head<N>(p.heads.k + row * key_dim, key_dim, p.heads.style, p.heads.turned / 2);
#pragma unroll
      for (int i = 0; i < (N + 1) / 2; ++i) {
        const int d = 4 * ((thread_index() & 31) + 32 * i);
        if (d < value_dim) v[i] = load_activation4(p.heads.v + row * value_dim + d);
      }
    }
  }

  __device__ __forceinline__ void finish(const DecodeParams& p, const Item& item,
                                         const Fresh& fresh, const ItemMemory<T>& memory,
                                         const HeadConstants<N>& constants, int task) {
    const int key_dim = p.attention.cache.key_dim;
    const int value_dim = p.attention.cache.value_dim;
    if (task < item.heads) {
      float* q = memory.q + task * (key_dim + kMergePad);
      finish_head<N>(x, key_dim, p.heads.style, p.heads.turned / 2, p.heads.q_norm,
                     constants.q_norm, p.heads.q_norm_eps, constants.turns,
                     [&](int i, float value) { q[i] = value; });
    } else if (task < item.heads + fresh.count) {
      T* k = memory.k + (task - item.heads) * key_dim;
      Turns<N> turns = constants.turns;
      if (position != item.position) {
        turns = make_turns<N>(constants.frequencies, position, p.heads.attention_factor);
      }
      finish_head<N>(x, key_dim, p.heads.style, p.heads.turned / 2, p.heads.k_norm,
                     constants.k_norm, p.heads.k_norm_eps, turns,
                     [&](int i, float value) { k[i] = to_cache<T>(value); });
#pragma unroll
      for (int i = 0; i < (N + 1) / 2; ++i) {
        const int d = 4 * ((thread_index() & 31) + 32 * i);
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

// Where each fresh position lies; before prepare_item(), which brings the team in step.
template <typename T>
__device__ __forceinline__ void place_fresh(const Tables& tables, const Fresh& fresh,
                                            const ItemMemory<T>& memory) {
  const int lane = thread_index() & 31;
  if (thread_index() / 32 != kItemWarps - 1 || fresh.count == 0) return;
  memory.place[lane] = -1;
  memory.place[lane + 32] = -1;
  __syncwarp();
  const unsigned below = (1U << lane) - 1;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (((fresh.member[i] >> lane) & 1) == 0) continue;
    const int offset = tables.position[i] - fresh.low;
    if (offset < kDecodeTokens) {
      memory.place[offset] =
          __popc(fresh.member[i] & below) + (i == 1 ? __popc(fresh.member[0]) : 0);
    }
  }
}

// Whether attend() may finish heads: not those of 8-bit caches.
template <typename T>
inline constexpr bool kFuses = sizeof(T) > 1;

// Ends with the whole team in step. N pairs a lane: key_dim and value_dim <= 64 N.
template <typename T, int N>
__device__ __forceinline__ void prepare_item(const DecodeParams& p, const Item& item,
                                             const Tables& tables, const Fresh& fresh,
                                             const ItemMemory<T>& memory,
                                             const HeadConstants<N>& constants) {
  const int tid = thread_index();
  if (kFuses<T> && p.fused) {
    if constexpr (kFuses<T>) {
      constexpr int kInFlight = N == 2 ? 3 : 2;  // as registers allow
      const int tasks = item.heads + fresh.count;
#pragma unroll 1
      for (int task = tid / 32; task < tasks; task += kInFlight * kItemWarps) {
        HeadTask<T, N> head[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
          head[i].load(p, item, tables, fresh, task + i * kItemWarps);
        }
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
          head[i].finish(p, item, fresh, memory, constants, task + i * kItemWarps);
        }
      }
    }
  } else {
    const int key_dim = p.attention.cache.key_dim;
    const std::size_t row = static_cast<std::size_t>(p.first + item.token) * p.attention.heads;
    const float* q = p.attention.q + (row + item.head) * key_dim;
#pragma unroll 2
    for (int i = tid; i < item.heads * key_dim / 4; i += kItemThreads) {
      const int head = i / (key_dim / 4);
      const int d = 4 * (i - head * (key_dim / 4));
      *reinterpret_cast<float4*>(memory.q + head * (key_dim + kMergePad) + d) =
          load_activation4(q + 4 * i);
    }
  }
  __syncthreads();
}

// Place among the fresh of a position >= low, or -1: the cache holds it.
template <typename T>
__device__ __forceinline__ int fresh_place(const ItemMemory<T>& memory, const Fresh& fresh,
                                           int position) {
  const int offset = position - fresh.low;
  return offset < kDecodeTokens ? memory.place[offset] : -1;
}

// The team that reads the token's own position stores its key and value, and no other item
// reads them from the cache in this launch.
template <bool kPlain, typename T>
__device__ __forceinline__ void store_fresh(const DecodeParams& p, const Fresh& fresh,
                                            const ItemMemory<T>& memory) {
  const Item& item = *memory.item;
  const LayerCacheView& cache = p.attention.cache;
  if (!kFuses<T> || !p.fused || !item.stores) return;
  const Span<kPlain> span(cache, item.end);
  if (!owns(item, span, item.position)) return;
  const int at = span.place_of(item.position);
  const int tid = thread_index();
  const int place = memory.place[item.position - fresh.low];
  constexpr int kElements = 16 / static_cast<int>(sizeof(T));
  if (tid < kItemThreads / 2) {
    T* to = key_slot<T>(cache, item.row) +
            cache_offset(at, item.kv_head, cache.kv_heads, cache.key_dim);
    const int d = tid * kElements;
    if (d < cache.key_dim) {
      *reinterpret_cast<uint4*>(to + d) =
          *reinterpret_cast<const uint4*>(memory.k + place * cache.key_dim + d);
    }
  } else {
    T* to = value_slot<T>(cache, item.row) +
            cache_offset(at, item.kv_head, cache.kv_heads, cache.value_dim);
    const int d = (tid - kItemThreads / 2) * kElements;
    if (d < cache.value_dim) {
      *reinterpret_cast<uint4*>(to + d) =
          *reinterpret_cast<const uint4*>(memory.v + place * cache.value_dim + d);
    }
  }
}

}  // namespace pianola::cuda
