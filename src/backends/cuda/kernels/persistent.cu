// The tables that the kernel of persistent.h walks over, and its launch.
#include "backends/cuda/kernels/persistent.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "backends/cuda/kernels/persistent_kernel.cuh"
#include "backends/cuda/kernels/persistent_kernels.h"
#include "pianola/error.h"

namespace pianola::cuda {
namespace persistent {
namespace {

int ceil_div(int a, int b) { return (a + b - 1) / b; }

int columns_of_step(Codes codes) {
  return codes == Codes::kInt8 ? 64 : codes == Codes::kInt4 ? 128 : 32;
}

bool quantised(const PersistentOp& op) {
  return !op.attends && op.linear.part[0].weight.scales != Scales::kNone;
}

// Bytes of the partial sums of one turn.
int partial_bytes(int tokens) { return tokens <= 8 ? 8 * 1024 : 16 * 1024; }

Shape make_shape(const LinearArgs& args) {
  Shape s;
  const PackedWeight& first = args.part[0].weight;
  s.in = args.in;
  s.residual = args.residual;
  s.count = args.count;
  s.gather = args.gather;
  s.eps = args.norm ? args.eps : 0;
  s.codes = first.codes;
  s.scales = first.scales;
  s.normed = args.norm != nullptr;
  s.gated = args.end == LinearEnd::kGated ? 1 : 0;
  s.parts = args.parts;
  s.in_ld = args.in_ld;
  s.in_rows = args.in_rows;
  s.cols = first.cols;
  s.step_cols = columns_of_step(first.codes);
  s.steps = ceil_div(s.cols, s.step_cols);
  s.tokens = args.tokens;
  s.slices = products::slices_of(s.steps);
  s.code_row = static_cast<int>(code_row_bytes(first.codes, first.cols));
  s.scale_row = static_cast<int>(scale_row_bytes(first.scales, first.codes, first.cols));
  if (first.scales != Scales::kNone) {
    s.scale_step = first.codes == Codes::kInt4 && first.scales == Scales::kFloatPair  ? 32
                   : first.codes == Codes::kInt8 && first.scales == Scales::kHalfPair ? 8
                                                                                      : 16;
  }
  int tiles = 0;
  for (int i = 0; i < args.parts; ++i) {
    const LinearPart& part = args.part[i];
    s.part[i] = {part.out, part.weight.rows, part.ld, tiles};
    tiles += ceil_div(part.weight.rows, products::kTileRows);
  }
  s.units = s.gated ? ceil_div(first.rows, products::kTileRows) : tiles;
  return s;
}

// How a warp's share of the units is grouped, on this many clusters.
void group_tiles(Shape& s, int clusters) {
  const int most = ceil_div(s.units, clusters * (kBlocks / s.slices));  // units of a block
  const int pairs = ceil_div(ceil_div(most, 2), kWarps);
  // Two tiles at a time, unless a warp then has more to do than with one.
  s.tiles = s.gated || 2 * pairs <= ceil_div(most, kWarps) ? 2 : 1;
  const int floats = s.tiles * products::kTileRows * s.tokens;
  const int fit = partial_bytes(s.tokens) / 4 / floats / kWarps * kWarps;
  s.turn_groups = std::max(kWarps, fit);
  const int groups = s.gated ? most : ceil_div(most, s.tiles);
  s.turns = std::max(1, ceil_div(groups, s.turn_groups));
}

Kernel kernel_for(bool quantised, DType cache, int dim, int groups, int depth) {
  if (cache == DType::kF16) {
    return quantised ? quantised_f16(dim, groups, depth) : plain_f16(dim, groups, depth);
  }
  if (cache == DType::kBF16) {
    return quantised ? quantised_bf16(dim, groups, depth) : plain_bf16(dim, groups, depth);
  }
  return nullptr;
}

// Largest ring first.
constexpr int kDepths[] = {10, 6, 3};

[[noreturn]] void refuse(const std::string& why) {
  throw Error(ErrorCode::kUnsupported, "a persistent step: " + why);
}

void check_attention(const PersistentOp& op, const PersistentOp& first) {
  const LayerCacheView& a = op.attention.cache;
  const LayerCacheView& b = first.attention.cache;
  if (a.dtype == DType::kF32) refuse("an f32 cache");
  if (a.dtype != DType::kF16 && a.dtype != DType::kBF16) refuse("an 8-bit cache");
  if (a.window > 0) refuse("a sliding window");
  if (op.attention.sinks) refuse("attention sinks");
  if (a.key_dim != a.value_dim || (a.key_dim != 64 && a.key_dim != 128)) {
    refuse("heads of " + std::to_string(a.key_dim) + " and " + std::to_string(a.value_dim));
  }
  if (a.dtype != b.dtype || a.key_dim != b.key_dim || a.kv_heads != b.kv_heads ||
      op.attention.heads != first.attention.heads) {
    refuse("layers of different heads");
  }
}

void check_product(const LinearArgs& args, int tokens) {
  const PackedWeight& weight = args.part[0].weight;
  require(args.tokens >= 1 && args.tokens <= tokens, "persistent step: tokens of a product");
  if (weight.codes == Codes::kF32) refuse("f32 weights");
  if (args.end == LinearEnd::kGated && args.activation != Activation::kSilu) {
    refuse("an activation other than silu");
  }
  if (weight.scales == Scales::kNone && weight.cols % columns_of_step(weight.codes) != 0) {
    refuse("rows of " + std::to_string(weight.cols) + " columns");
  }
}

// Hands out aligned places in shared memory.
struct Places {
  int bytes = 0;
  int take(int size) {
    const int at = bytes;
    bytes += ceil_div(size, 16) * 16;
    return at;
  }
};

}  // namespace
}  // namespace persistent

using persistent::Entry;
using persistent::Shape;

struct PersistentStep::Layout {
  persistent::Program program;
  persistent::Kernel kernel = nullptr;
  int shared_bytes = 0;
};

PersistentStep::PersistentStep(const std::vector<PersistentOp>& ops, int tokens) {
  using namespace persistent;
  if (tokens > kPersistentTokens) {
    refuse("more than " + std::to_string(kPersistentTokens) + " tokens");
  }
  if (ops.size() < 6) refuse("less than one layer");
  auto layout = std::make_unique<Layout>();
  const bool with_scales = std::any_of(ops.begin(), ops.end(), quantised);
  const auto attention =
      std::find_if(ops.begin(), ops.end(), [](const PersistentOp& op) { return op.attends; });
  require(attention != ops.end(), "persistent step: no attention");
  for (const PersistentOp& op : ops) {
    if (op.attends) {
      check_attention(op, *attention);
    } else {
      check_product(op.linear, tokens);
    }
  }
  const LayerCacheView& cache = attention->attention.cache;

  // Shapes and entries.
  std::vector<Shape> shapes;
  std::vector<Entry> entries;
  std::vector<const PersistentOp*> attends;
  for (const PersistentOp& op : ops) {
    Entry& entry = entries.emplace_back();
    if (op.attends) {
      entry.shape = -1 - static_cast<int>(attends.size());
      attends.push_back(&op);
      continue;
    }
    const Shape shape = make_shape(op.linear);
    const auto found = std::find(shapes.begin(), shapes.end(), shape);
    entry.shape = static_cast<int>(found - shapes.begin());
    if (found == shapes.end()) shapes.push_back(shape);
    for (int i = 0; i < op.linear.parts; ++i) {
      entry.codes[i] = op.linear.part[i].weight.data;
      entry.scales[i] = op.linear.part[i].weight.scale_data;
      entry.bias[i] = op.linear.part[i].bias;
    }
    entry.norm = op.linear.norm;
  }
  require(shapes.size() <= kThreads, "persistent step: too many shapes");

  // Shared memory behind the ring.
  const auto fit = [&](int log_teams) {
    Program& p = layout->program;
    p.ops = static_cast<int>(ops.size());
    p.shape_count = static_cast<int>(shapes.size());
    p.tokens = tokens;
    Places places;
    p.entries_at = places.take(static_cast<int>(entries.size() * sizeof(Entry)));
    p.shapes_at = places.take(static_cast<int>(shapes.size() * sizeof(Shape)));
    p.ranges_at = places.take(static_cast<int>(shapes.size() * sizeof(Range)));
    p.squares_at = places.take(2 * kBlocks * tokens * 4);
    p.layer_at = places.take(sizeof(DecodeParams));
    p.barriers_at = places.take(64);
    const DecodeParams d =
        decode_params(attention->attention, &attention->heads, 0, tokens, log_teams);
    p.team_bytes = ceil_div(static_cast<int>(item_memory_bytes(d, 2)), 128) * 128;
    p.partial_floats = partial_bytes(tokens) / 4;
    int staged = 0;
    for (const Shape& s : shapes) {
      staged = std::max(staged, ceil_div(s.steps, s.slices) * s.step_cols * s.tokens * 4);
    }
    p.staged_at = places.take(0);
    p.teams_at = p.staged_at;
    p.partials_at = p.staged_at + staged;
    places.take(std::max(staged + 2 * partial_bytes(tokens), 2 * p.team_bytes));
    return places.bytes;
  };

  int device = 0;
  int most_shared = 0;
  check(cudaGetDevice(&device), "persistent step");
  check(cudaDeviceGetAttribute(&most_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
        "persistent step");
  const int groups = tokens <= 8 ? 1 : 4;
  int log_teams = 4;
  for (int attempt = 0; attempt < 2; ++attempt) {
    const int behind = fit(log_teams);
    layout->kernel = nullptr;
    for (const int depth : kDepths) {
      const int ring = kWarps * depth * kChunk * 32 * (with_scales ? 24 : 16);
      if (ring + behind > most_shared) continue;
      layout->kernel = kernel_for(with_scales, cache.dtype, cache.key_dim, groups, depth);
      if (!layout->kernel) continue;
      layout->shared_bytes = ring + behind;
      Program& p = layout->program;
      for (int* at : {&p.entries_at, &p.shapes_at, &p.ranges_at, &p.squares_at, &p.layer_at,
                      &p.barriers_at, &p.staged_at, &p.partials_at, &p.teams_at}) {
        *at += ring;
      }
      break;
    }
    if (!layout->kernel) {
      refuse("more shared memory than there is");
    }
    check(cudaFuncSetAttribute(layout->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               most_shared),
          "persistent step: shared memory");
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(kBlocks);
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = static_cast<std::size_t>(layout->shared_bytes);
    cudaLaunchAttribute size = {};
    size.id = cudaLaunchAttributeClusterDimension;
    size.val.clusterDim = {kBlocks, 1, 1};
    config.attrs = &size;
    config.numAttrs = 1;
    check(cudaOccupancyMaxActiveClusters(&clusters_, layout->kernel, &config),
          "persistent step: clusters");
    if (clusters_ == 0) {
      refuse("no cluster of eight blocks fits this device");
    }
    // Both teams of every block serve an item when there are few items.
    const int items =
        tokens * cache.kv_heads * parts_of(attention->attention.heads, cache.kv_heads);
    const int wanted = items <= clusters_ ? 4 : 3;
    if (wanted == log_teams) break;
    log_teams = wanted;
  }

  for (Shape& s : shapes) group_tiles(s, clusters_);
  unsigned turns = 0;
  unsigned drained = 0;
  for (Entry& entry : entries) {
    if (entry.shape < 0) continue;
    entry.first_turn = turns;
    entry.drained = drained;
    const int count = shapes[static_cast<std::size_t>(entry.shape)].turns;
    for (int turn = 2; turn < count; ++turn) {
      drained ^= 1U << ((turns + static_cast<unsigned>(turn)) & 1);
    }
    turns += static_cast<unsigned>(count);
  }
  std::vector<DecodeParams> layers;
  layers.reserve(attends.size());
  for (const PersistentOp* op : attends) {
    layers.push_back(decode_params(op->attention, &op->heads, 0, tokens, log_teams));
  }

  // One allocation: entries, shapes, layers, counters.
  const auto align = [](std::size_t n) { return (n + 255) / 256 * 256; };
  const std::size_t entry_bytes = align(entries.size() * sizeof(Entry));
  const std::size_t shape_bytes = align(shapes.size() * sizeof(Shape));
  const std::size_t layer_bytes = align(layers.size() * sizeof(DecodeParams));
  const std::size_t counter_bytes = align(ops.size() * sizeof(std::uint32_t));
  std::vector<std::byte> tables(entry_bytes + shape_bytes + layer_bytes + counter_bytes);
  std::memcpy(tables.data(), entries.data(), entries.size() * sizeof(Entry));
  std::memcpy(tables.data() + entry_bytes, shapes.data(), shapes.size() * sizeof(Shape));
  std::memcpy(tables.data() + entry_bytes + shape_bytes, layers.data(),
              layers.size() * sizeof(DecodeParams));
  void* memory = nullptr;
  check(cudaMalloc(&memory, tables.size()), "persistent step: tables");
  tables_.reset(static_cast<std::byte*>(memory));
  std::byte* base = tables_.get();
  layout->program.entries = reinterpret_cast<const Entry*>(base);
  layout->program.shapes = reinterpret_cast<const Shape*>(base + entry_bytes);
  layout->program.layers = reinterpret_cast<const DecodeParams*>(base + entry_bytes + shape_bytes);
  layout->program.arrived =
      reinterpret_cast<std::uint32_t*>(base + entry_bytes + shape_bytes + layer_bytes);
  layout_ = std::move(layout);
  check(cudaMemcpy(tables_.get(), tables.data(), tables.size(), cudaMemcpyHostToDevice),
        "persistent step: tables");
}

PersistentStep::~PersistentStep() = default;

void PersistentStep::Free::operator()(std::byte* memory) const { cudaFree(memory); }

void PersistentStep::launch(const Launch& launch) const {
  // All thread blocks at once or none: they wait for each other.
  launch_grid(launch, "persistent step", layout_->kernel,
              Grid{.blocks = dim3(static_cast<unsigned>(clusters_ * persistent::kBlocks)),
                   .threads = dim3(persistent::kThreads),
                   .shared_bytes = static_cast<std::size_t>(layout_->shared_bytes),
                   .cooperative = true},
              layout_->program);
}

}  // namespace pianola::cuda
