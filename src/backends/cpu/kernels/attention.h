// Attention of the CPU backend over a static cache: a token at position p attends to the positions
// 0..p of its slot, or to the last `window` of them, or to as many as `ends` says. Query heads that
// share a kv head are computed together, so that keys and values are read once for the group.
//
//   append(args, worker, workers);   // new keys and values into the cache
//   pool.barrier();
//   attend(args, scratch, worker, workers);
//   if (attention_needs_combine(args, workers)) {
//     pool.barrier();
//     combine(args, scratch, worker, workers);
//   }
//
// Invariants, all tested:
// - One order: blocks of 64 positions and splits of 256, both counted from position 0. The output
// of a
//   token and head depends on its query, the cache, its position and the Isa, bit for bit: not on
//   the other tokens, the chunking or the number of workers.
// - Nothing beyond a token's position influences it, and nothing beyond the last position of the
// step
//   is loaded, so memory there may hold NaN.
// - Padding (position < 0) stores nothing in the cache, reads nothing, and its output is zero; that
//   of a token whose positions end at 0 is zero too.
// - A NaN in a query makes that token's head NaN and no other. Nothing here allocates.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/cpu/isa.h"
#include "tensor/dtype.h"

namespace pianola::cpu {

// One layer's keys and values: [slots, capacity / 64, kv_heads, 64, head_dim] each, slots of int8
// with their scales as layer_cache.h says. Position p lies where p % capacity does; with a window,
// no step may reach back further than the capacity.
struct KvCache {
  void* keys = nullptr;
  void* values = nullptr;
  DType dtype = DType::kF16;  // any type that a cache has
  int capacity = 0;           // positions of a slot, a multiple of 64
  int kv_heads = 0;
  int head_dim = 0;
  int window = 0;  // 0: none, and positions are below the capacity
  // Not 0: there are no values but the first latent_dim elements of each key, and outputs are as
  // wide.
  int latent_dim = 0;

  int value_dim() const { return latent_dim > 0 ? latent_dim : head_dim; }
};

// What distances add to scores: table[buckets[offset + reach] * heads + head], where the offset is
// that of a position from the token, and beyond the reach what it is there.
struct AttentionBias {
  const float* table = nullptr;           // null: nothing
  const std::int32_t* buckets = nullptr;  // [2 * reach + 1]
  int reach = 0;
};

struct AttentionArgs {
  Isa isa = Isa::kPortable;
  KvCache cache;
  int tokens = 0;
  int heads = 0;                            // a multiple of kv_heads
  float scale = 1.0F;                       // of the scores, usually 1 / sqrt(head_dim)
  const std::int32_t* positions = nullptr;  // [tokens]; < 0: padding
  const std::int32_t* slots = nullptr;      // [tokens]; tokens of one slot stand together
  const float* queries = nullptr;           // [tokens, heads, head_dim], tokens query_stride apart
  std::ptrdiff_t query_stride = 0;
  float* output = nullptr;  // [tokens, heads, value_dim()], tokens output_stride apart
  std::ptrdiff_t output_stride = 0;
  const float* sinks = nullptr;  // [heads] scores that join the softmax's denominator only, or null
  // [tokens] where the positions of each end, without a window; null: behind its own.
  const std::int32_t* ends = nullptr;
  AttentionBias bias;
};

struct AppendArgs {
  Isa isa = Isa::kPortable;
  KvCache cache;
  int tokens = 0;
  const std::int32_t* positions = nullptr;  // [tokens]; < 0: not stored
  const std::int32_t* slots = nullptr;      // [tokens]
  const float* keys = nullptr;              // [tokens, kv_heads, head_dim], tokens `stride` apart
  const float* values = nullptr;            // the same; not looked at with a latent_dim
  std::ptrdiff_t stride = 0;
};

// Whether these kernels take such a cache: head_dim a multiple of 8 up to 512; with a latent_dim
// both are, up to 1024.
bool attention_supported(DType cache_dtype, int heads, int kv_heads, int head_dim,
                         int latent_dim = 0);

// Work space that attend() and combine() need, 64-byte aligned, for steps of up to `tokens` tokens.
std::size_t attention_scratch_bytes(const KvCache& cache, int heads, int tokens, int workers);

// Each worker calls these with its number; all calls of one phase may run at the same time.
void append(const AppendArgs& args, int worker, int workers);
void attend(const AttentionArgs& args, void* scratch, int worker, int workers);
bool attention_needs_combine(const AttentionArgs& args, int workers);
void combine(const AttentionArgs& args, void* scratch, int worker, int workers);

}  // namespace pianola::cpu
