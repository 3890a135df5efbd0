#include "backends/cpu/kernels/attention.h"

#include <algorithm>
#include <limits>

#include "backends/cpu/kernels/attention_kernels.h"
#include "cache/cache_type.h"
#include "cache/layer_cache.h"
#include "tensor/fp8.h"

namespace pianola::cpu {
namespace {

// Positions whose partial results are joined before the next ones start. Short enough that two
// workers share a context of a few hundred tokens, long enough that joining costs little.
constexpr int kSplitPositions = 256;
// Rows (query heads of one kv head, of consecutive tokens of one slot) that share a pass over the
// cache: enough that converting and transposing a block is a small part of the work.
constexpr int kTileRows = 96;
// Steps of up to this many tokens may spread one token's positions over workers. It bounds the
// memory for partial results; larger steps have work for everyone.
constexpr int kMaxSplitTokens = 16;

constexpr float kLog2E = 1.44269504F;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

const AttentionKernels& kernels(Isa isa, const KvCache& cache) {
#if defined(__x86_64__)
  const int lanes = attention_kernels_avx512().lanes;
  if (isa >= Isa::kAvx512 && cache.head_dim % lanes == 0 && cache.value_dim() % lanes == 0) {
    return attention_kernels_avx512();
  }
  if (isa >= Isa::kAvx2) return attention_kernels_avx2();
#endif
  return attention_kernels_portable();
}

int split_count(int length) { return (length + kSplitPositions - 1) / kSplitPositions; }

// The positions begin..end - 1 that a token attends to.
int begin_of(const AttentionArgs& args, int token) {
  return window_begin(args.positions[token], args.cache.window);
}
int end_of(const AttentionArgs& args, int token) {
  return args.ends ? args.ends[token] : args.positions[token] + 1;
}
bool is_padding(const AttentionArgs& args, int token) { return end_of(args, token) <= 0; }
int first_split(const AttentionArgs& args, int token) {
  return begin_of(args, token) / kSplitPositions;
}

// Splits that one token's positions can touch.
int most_splits(const KvCache& cache) {
  return split_count(cache.capacity) + (cache.window > 0 ? 1 : 0);
}

// Consecutive tokens of one slot that are computed together.
struct Tile {
  int first = 0;
  int tokens = 0;
  int begin = 0;  // of the positions that any of them attends to
  int end = 0;

  int first_split() const { return begin / kSplitPositions; }
};

// The tile that starts at or after token `from`, past any padding; tokens == 0: there is none.
Tile next_tile(const AttentionArgs& args, int from) {
  const int most = std::max(1, kTileRows / (args.heads / args.cache.kv_heads));
  Tile tile{.first = from};
  while (tile.first < args.tokens && is_padding(args, tile.first)) ++tile.first;
  int t = tile.first;
  if (t < args.tokens) tile.begin = begin_of(args, t);
  for (; t < args.tokens && t - tile.first < most; ++t) {
    if (is_padding(args, t) || args.slots[t] != args.slots[tile.first]) break;
    tile.begin = std::min(tile.begin, begin_of(args, t));
    tile.end = std::max(tile.end, end_of(args, t));
  }
  tile.tokens = t - tile.first;
  return tile;
}

// Whether one token's splits go to different workers, to be joined by combine().
bool splits_positions(const AttentionArgs& args, int workers) {
  if (workers == 1 || args.tokens > kMaxSplitTokens) return false;
  int tiles = 0;
  int longest = 0;
  for (Tile tile = next_tile(args, 0); tile.tokens > 0;
       tile = next_tile(args, tile.first + tile.tokens)) {
    ++tiles;
    longest = std::max(longest, tile.end - tile.begin);
  }
  return longest > kSplitPositions && tiles * args.cache.kv_heads < 4 * workers;
}

// A piece of work: one kv head of one tile, over all splits or over one.
struct Item {
  Tile tile;
  int kv_head = 0;
  int split = 0;
  int splits = 0;

  // The first block that is read.
  int first_block() const {
    return std::max(split * kSplitPositions, tile.begin) / kBlockPositions;
  }
};

// Calls visit(item, cost) for every item of the step, in an order in which neighbours read
// neighbouring memory.
template <typename Visit>
void for_each_item(const AttentionArgs& args, bool split, Visit visit) {
  for (Tile tile = next_tile(args, 0); tile.tokens > 0;
       tile = next_tile(args, tile.first + tile.tokens)) {
    const int first = tile.first_split();
    const int splits = split_count(tile.end) - first;
    for (int piece = 0; piece < (split ? splits : 1); ++piece) {
      const int begin = std::max(tile.begin, (first + piece) * kSplitPositions);
      const int end = split ? std::min(tile.end, (first + piece + 1) * kSplitPositions) : tile.end;
      for (int head = 0; head < args.cache.kv_heads; ++head) {
        visit(Item{tile, head, first + piece, split ? 1 : splits},
              static_cast<std::int64_t>(end - begin) * (tile.tokens + 1));
      }
    }
  }
}

constexpr std::size_t align(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

// One worker's work space.
struct Workspace {
  float* queries = nullptr;    // [kTileRows, head_dim], scaled
  float* acc = nullptr;        // [kTileRows, value_dim + kSumLanes] of the current split
  float* total_acc = nullptr;  // the same of the splits before it
  float* m = nullptr;          // [kTileRows]
  float* total_m = nullptr;
  float* scores = nullptr;  // [kTileRows, 64]
  float* biases = nullptr;  // [kTileRows, 64]
  float* tile = nullptr;    // [head_dim, 64]
  float* sink = nullptr;    // [value_dim + kSumLanes]
  int* counts = nullptr;    // [kTileRows]
  int* skips = nullptr;     // [kTileRows]

  // Lays the parts out from `base` on and returns their size; with nullptr it only measures.
  std::size_t assign(std::byte* base, int rows, const KvCache& cache) {
    const int head_dim = cache.head_dim;
    const int value_dim = cache.value_dim();
    std::size_t size = 0;
    const auto take = [&](auto*& part, int elements) {
      using Element = std::remove_reference_t<decltype(*part)>;
      if (base != nullptr) part = reinterpret_cast<Element*>(base + size);
      size += align(static_cast<std::size_t>(elements) * sizeof(Element));
    };
    take(queries, rows * head_dim);
    for (float** part : {&acc, &total_acc}) take(*part, rows * (value_dim + kSumLanes));
    for (float** part : {&m, &total_m}) take(*part, rows);
    take(scores, rows * kBlockPositions);
    take(biases, rows * kBlockPositions);
    take(tile, head_dim * kBlockPositions);
    take(sink, value_dim + kSumLanes);
    take(counts, rows);
    take(skips, rows);
    return size;
  }
};

// Rows of the largest tile of a step: many query heads may share one kv head.
int tile_rows(int heads, int kv_heads) { return std::max(kTileRows, heads / kv_heads); }

std::size_t workspace_bytes(int heads, const KvCache& cache) {
  return Workspace{}.assign(nullptr, tile_rows(heads, cache.kv_heads), cache);
}

Workspace workspace_of(const AttentionArgs& args, void* scratch, int worker) {
  Workspace space;
  space.assign(static_cast<std::byte*>(scratch) +
                   workspace_bytes(args.heads, args.cache) * static_cast<std::size_t>(worker),
               tile_rows(args.heads, args.cache.kv_heads), args.cache);
  return space;
}

// Partial results: for each (token, head, split) m and, 16 floats on, acc. A token's splits count
// from its first.
constexpr int kPartialHeader = 16;

struct Partials {
  float* base = nullptr;
  int heads = 0;
  int splits = 0;  // the most of a token
  int value_dim = 0;

  float* at(int token, int head, int split) const {
    const auto index = (static_cast<std::size_t>(token) * static_cast<std::size_t>(heads) +
                        static_cast<std::size_t>(head)) *
                           static_cast<std::size_t>(splits) +
                       static_cast<std::size_t>(split);
    return base + index * static_cast<std::size_t>(kPartialHeader + value_dim + kSumLanes);
  }
};

Partials partials_of(const AttentionArgs& args, void* scratch, int workers) {
  auto* bytes = static_cast<std::byte*>(scratch);
  const std::size_t used =
      workspace_bytes(args.heads, args.cache) * static_cast<std::size_t>(workers);
  return {reinterpret_cast<float*>(bytes + used), args.heads, most_splits(args.cache),
          args.cache.value_dim()};
}

std::ptrdiff_t slot_offset(const KvCache& cache, int slot) {
  return slot * static_cast<std::ptrdiff_t>(
                    cache_slot_bytes(cache.dtype, cache.capacity, cache.kv_heads, cache.head_dim));
}

// Where a block of a kv head starts, in positions of one head from the start of its slot.
std::ptrdiff_t block_index(const KvCache& cache, int block, int kv_head) {
  const int blocks = cache.capacity / kBlockPositions;
  return (std::ptrdiff_t{block % blocks} * cache.kv_heads + kv_head) * kBlockPositions;
}

// Where a block of a kv head starts.
std::ptrdiff_t block_offset(const KvCache& cache, int slot, int block, int kv_head) {
  return slot_offset(cache, slot) + block_index(cache, block, kv_head) * cache.head_dim *
                                        static_cast<std::ptrdiff_t>(dtype_info(cache.dtype).bytes);
}

// Where the scales of a block of a kv head start, in bytes.
std::ptrdiff_t scales_offset(const KvCache& cache, int slot, int block, int kv_head) {
  return slot_offset(cache, slot) +
         static_cast<std::ptrdiff_t>(
             cache_element_bytes(cache.dtype, cache.capacity, cache.kv_heads, cache.head_dim)) +
         block_index(cache, block, kv_head) * static_cast<std::ptrdiff_t>(sizeof(float));
}

float* scales_at(void* base, std::ptrdiff_t offset) {
  return reinterpret_cast<float*>(static_cast<std::byte*>(base) + offset);
}

// A sink is a split of one position whose value is zero; it is joined behind all others. `work`
// [value_dim + kSumLanes] is any work space.
void join_sink(const AttentionArgs& args, int head, float* work, float* total_m, float* total_acc) {
  if (args.sinks == nullptr) return;
  const int dim = args.cache.value_dim();
  std::fill_n(work, dim + kSumLanes, 0.0F);
  work[dim] = 1.0F;
  kernels(args.isa, args.cache).merge(dim, args.sinks[head] * kLog2E, work, total_m, total_acc);
}

// Computes one item: the state of one tile and kv head while it walks over the cache.
class Walk {
 public:
  // `next` is the item that this worker computes afterwards, or nullptr.
  Walk(const AttentionArgs& args, const Item& item, const Item* next, const Workspace& space)
      : args_(args),
        item_(item),
        space_(space),
        next_(next == nullptr ? -1 : block_of(*next, next->first_block())),
        kernels_(kernels(args.isa, args.cache)),
        group_(args.heads / args.cache.kv_heads),
        rows_(item.tile.tokens * group_),
        dim_(args.cache.head_dim),
        value_dim_(args.cache.value_dim()),
        acc_size_(args.cache.value_dim() + kSumLanes) {
    for (int row = 0; row < rows_; ++row) {
      kernels_.scale(dim_, args_.queries + token(row) * args_.query_stride + head(row) * dim_,
                     args_.scale * kLog2E, space_.queries + row * dim_);
    }
  }

  // All splits, joined as they come, to the output.
  void run() {
    for (int split = item_.split; split < item_.split + item_.splits; ++split) {
      attend(split);
      for (int row = 0; row < rows_; ++row) {
        if (!has(row, split)) continue;
        const float* acc = space_.acc + row * acc_size_;
        float* total = space_.total_acc + row * acc_size_;
        if (split == first_split(args_, token(row))) {
          space_.total_m[row] = space_.m[row];
          std::copy_n(acc, acc_size_, total);
        } else {
          kernels_.merge(value_dim_, space_.m[row], acc, &space_.total_m[row], total);
        }
      }
    }
    for (int row = 0; row < rows_; ++row) {
      join_sink(args_, head(row), space_.sink, &space_.total_m[row],
                space_.total_acc + row * acc_size_);
      kernels_.finish(value_dim_, space_.total_acc + row * acc_size_,
                      args_.output + token(row) * args_.output_stride + head(row) * value_dim_);
    }
  }

  // The item's one split, to the partial results.
  void run_partial(const Partials& partials) {
    attend(item_.split);
    for (int row = 0; row < rows_; ++row) {
      if (!has(row, item_.split)) continue;
      float* partial =
          partials.at(token(row), head(row), item_.split - first_split(args_, token(row)));
      partial[0] = space_.m[row];
      std::copy_n(space_.acc + row * acc_size_, acc_size_, partial + kPartialHeader);
    }
  }

 private:
  int token(int row) const { return item_.tile.first + row / group_; }
  int head(int row) const { return item_.kv_head * group_ + row % group_; }
  // Whether the row attends to a position of the split.
  bool has(int row, int split) const {
    return split >= first_split(args_, token(row)) &&
           end_of(args_, token(row)) > split * kSplitPositions;
  }

  void attend(int split) {
    std::fill_n(space_.m, rows_, -kInfinity);
    std::fill_n(space_.acc, rows_ * acc_size_, 0.0F);
    const int first =
        std::max(split * kSplitPositions, item_.tile.begin / kBlockPositions * kBlockPositions);
    const int end = std::min((split + 1) * kSplitPositions, item_.tile.end);
    for (int position = first; position < end; position += kBlockPositions) attend_block(position);
  }

  std::ptrdiff_t block_of(const Item& item, int block) const {
    return block_offset(args_.cache, args_.slots[item.tile.first], block, item.kv_head);
  }

  // Where the block that is read after the one at `position` starts; -1: there is none.
  std::ptrdiff_t following(int position) const {
    const int end = std::min((item_.split + item_.splits) * kSplitPositions, item_.tile.end);
    return position + kBlockPositions < end ? block_of(item_, position / kBlockPositions + 1)
                                            : next_;
  }

  void attend_block(int position) {
    AttentionBlock block;
    block.dtype = args_.cache.dtype;
    const std::ptrdiff_t offset = block_of(item_, position / kBlockPositions);
    const std::ptrdiff_t next = following(position);
    block.ahead = next < 0 ? 0 : next - offset;
    block.keys = static_cast<const std::byte*>(args_.cache.keys) + offset;
    void* values = args_.cache.latent_dim > 0 ? args_.cache.keys : args_.cache.values;
    block.values = static_cast<const std::byte*>(values) + offset;
    if (has_scales(args_.cache.dtype)) {
      const std::ptrdiff_t scales = scales_offset(args_.cache, args_.slots[item_.tile.first],
                                                  position / kBlockPositions, item_.kv_head);
      block.key_scales = scales_at(args_.cache.keys, scales);
      block.value_scales = scales_at(values, scales);
    }
    block.head_dim = dim_;
    block.value_dim = value_dim_;
    block.rows = rows_;
    for (int row = 0; row < rows_; ++row) {
      const int skip = std::max(begin_of(args_, token(row)) - position, 0);
      const int count = std::clamp(end_of(args_, token(row)) - position, 0, kBlockPositions);
      space_.skips[row] = skip < count ? skip : 0;
      space_.counts[row] = skip < count ? count : 0;
    }
    block.max_count = std::min(item_.tile.end - position, kBlockPositions);
    block.counts = space_.counts;
    block.skips = args_.cache.window > 0 ? space_.skips : nullptr;
    if (args_.bias.table) {
      for (int row = 0; row < rows_; ++row) fill_biases(row, position);
      block.biases = space_.biases;
    }
    block.queries = space_.queries;
    block.m = space_.m;
    block.acc = space_.acc;
    block.scores = space_.scores;
    block.tile = space_.tile;
    kernels_.block(block);
  }

  // Of the 64 positions from `position` on; where none may be read they are of no importance.
  void fill_biases(int row, int position) const {
    const AttentionBias& bias = args_.bias;
    const int offset = position - args_.positions[token(row)];
    for (int i = 0; i < kBlockPositions; ++i) {
      const int bucket = bias.buckets[std::clamp(offset + i, -bias.reach, bias.reach) + bias.reach];
      space_.biases[row * kBlockPositions + i] =
          bias.table[bucket * args_.heads + head(row)] * kLog2E;
    }
  }

  const AttentionArgs& args_;
  const Item& item_;
  const Workspace& space_;
  std::ptrdiff_t next_;
  const AttentionKernels& kernels_;
  int group_;
  int rows_;
  int dim_;
  int value_dim_;
  int acc_size_;
};

void clear_padding(const AttentionArgs& args, int worker, int workers) {
  for (int t = worker; t < args.tokens; t += workers) {
    if (!is_padding(args, t)) continue;
    std::fill_n(args.output + t * args.output_stride, args.heads * args.cache.value_dim(), 0.0F);
  }
}

// One head of one position to where its elements, and of int8 its scale, lie.
void store_head(const KvCache& cache, const AttentionKernels& kernel, const float* head, void* base,
                std::ptrdiff_t elements, std::ptrdiff_t scale) {
  std::byte* to = static_cast<std::byte*>(base) + elements;
  if (cache.dtype == DType::kI8) {
    kernel.store_int8(cache.head_dim, head, reinterpret_cast<std::int8_t*>(to),
                      scales_at(base, scale));
  } else if (cache.dtype == DType::kF8E4M3) {
    auto* bytes = reinterpret_cast<std::uint8_t*>(to);
    for (int i = 0; i < cache.head_dim; ++i) bytes[i] = f32_to_e4m3(head[i]);
  } else {
    kernel.store(cache.dtype, cache.head_dim, head, to);
  }
}

}  // namespace

bool attention_supported(DType cache_dtype, int heads, int kv_heads, int head_dim, int latent_dim) {
  const int most = latent_dim > 0 ? 1024 : 512;
  return is_cache_type(cache_dtype) && kv_heads > 0 && heads > 0 && heads % kv_heads == 0 &&
         head_dim > 0 && head_dim <= most && head_dim % 8 == 0 && latent_dim >= 0 &&
         latent_dim <= head_dim && latent_dim % 8 == 0;
}

std::size_t attention_scratch_bytes(const KvCache& cache, int heads, int tokens, int workers) {
  std::size_t bytes = workspace_bytes(heads, cache) * static_cast<std::size_t>(workers);
  if (workers > 1) {
    bytes += static_cast<std::size_t>(std::min(tokens, kMaxSplitTokens)) *
             static_cast<std::size_t>(heads) * static_cast<std::size_t>(most_splits(cache)) *
             static_cast<std::size_t>(kPartialHeader + cache.value_dim() + kSumLanes) *
             sizeof(float);
  }
  return align(bytes);
}

void append(const AppendArgs& args, int worker, int workers) {
  const KvCache& cache = args.cache;
  const AttentionKernels& kernel = kernels(args.isa, cache);
  const auto row_size = static_cast<std::ptrdiff_t>(cache.head_dim) *
                        static_cast<std::ptrdiff_t>(dtype_info(cache.dtype).bytes);
  const std::int64_t rows = static_cast<std::int64_t>(args.tokens) * cache.kv_heads;
  const std::int64_t end = rows * (worker + 1) / workers;
  for (std::int64_t row = rows * worker / workers; row < end; ++row) {
    const std::int64_t t = row / cache.kv_heads;
    const int head = static_cast<int>(row % cache.kv_heads);
    const int position = args.positions[t];
    if (position < 0) continue;
    const std::ptrdiff_t offset =
        block_offset(cache, args.slots[t], position / kBlockPositions, head) +
        position % kBlockPositions * row_size;
    const std::ptrdiff_t scale =
        scales_offset(cache, args.slots[t], position / kBlockPositions, head) +
        position % kBlockPositions * static_cast<std::ptrdiff_t>(sizeof(float));
    const std::ptrdiff_t from = t * args.stride + head * cache.head_dim;
    store_head(cache, kernel, args.keys + from, cache.keys, offset, scale);
    if (cache.latent_dim > 0) continue;
    store_head(cache, kernel, args.values + from, cache.values, offset, scale);
  }
}

void attend(const AttentionArgs& args, void* scratch, int worker, int workers) {
  clear_padding(args, worker, workers);
  const Workspace space = workspace_of(args, scratch, worker);
  const bool split = splits_positions(args, workers);
  const Partials partials = partials_of(args, scratch, workers);

  std::int64_t total = 0;
  for_each_item(args, split, [&](const Item&, std::int64_t cost) { total += cost; });
  // Contiguous shares of about equal cost: an item belongs to the worker in whose share its middle
  // lies.
  std::int64_t before = 0;
  Item waiting;  // so that each item knows the one after it
  const auto run = [&](const Item* next) {
    if (waiting.splits == 0) return;
    Walk walk(args, waiting, next, space);
    if (split) {
      walk.run_partial(partials);
    } else {
      walk.run();
    }
  };
  for_each_item(args, split, [&](const Item& item, std::int64_t cost) {
    const std::int64_t middle = before + cost / 2;
    before += cost;
    if (middle * workers / total != worker) return;
    run(&item);
    waiting = item;
  });
  run(nullptr);
}

bool attention_needs_combine(const AttentionArgs& args, int workers) {
  return splits_positions(args, workers);
}

void combine(const AttentionArgs& args, void* scratch, int worker, int workers) {
  if (!splits_positions(args, workers)) return;
  const AttentionKernels& kernel = kernels(args.isa, args.cache);
  const Partials partials = partials_of(args, scratch, workers);
  const Workspace space = workspace_of(args, scratch, worker);
  const int dim = args.cache.value_dim();
  const int rows = args.tokens * args.heads;
  const int end = static_cast<int>(static_cast<std::int64_t>(rows) * (worker + 1) / workers);
  for (int row = static_cast<int>(static_cast<std::int64_t>(rows) * worker / workers); row < end;
       ++row) {
    const int token = row / args.heads;
    const int head = row % args.heads;
    if (is_padding(args, token)) continue;
    // The first split's partial result becomes the total, in place.
    float* total = partials.at(token, head, 0);
    const int splits = split_count(end_of(args, token)) - first_split(args, token);
    for (int split = 1; split < splits; ++split) {
      const float* partial = partials.at(token, head, split);
      kernel.merge(dim, partial[0], partial + kPartialHeader, total, total + kPartialHeader);
    }
    join_sink(args, head, space.sink, total, total + kPartialHeader);
    kernel.finish(dim, total + kPartialHeader,
                  args.output + token * args.output_stride + head * dim);
  }
}

}  // namespace pianola::cpu
