// The tables that the kernel of persistent.h walks over.
#pragma once

#include "backends/cuda/kernels/attention_items.cuh"
#include "backends/cuda/kernels/linear_operand.cuh"
#include "backends/cuda/kernels/persistent.h"

namespace pianola::cuda::persistent {

using products::kHeld;
using products::kTileRows;
using products::ScaleWords;
using products::Step;
using products::Tile;

inline constexpr int kBlocks = 8;  // of a cluster
inline constexpr int kWarps = 8;
inline constexpr int kThreads = kWarps * 32;

struct ShapePart {
  float* out = nullptr;
  int rows = 0;
  int ld = 0;
  int first_tile = 0;
  bool operator==(const ShapePart&) const = default;
};

// What the products of one kind have in common, in all layers.
struct alignas(16) Shape {
  ShapePart part[3];
  const float* in = nullptr;
  const float* residual = nullptr;
  const std::int32_t* count = nullptr;
  const std::int32_t* gather = nullptr;
  float eps = 0;
  Codes codes = Codes::kBF16;
  Scales scales = Scales::kNone;
  bool normed = false;
  int gated = 0;
  int parts = 1;
  int in_ld = 0;
  int in_rows = 0;
  int cols = 0;
  int step_cols = 0;    // columns of one load of a row
  int units = 0;        // tiles, or pairs of a gate and an up tile
  int slices = 1;       // 1, 2, 4 or 8 blocks share the columns
  int steps = 0;        // loads along a row
  int tokens = 1;       // of the op's bucket
  int code_row = 0;     // bytes
  int scale_row = 0;    // bytes
  int scale_step = 0;   // bytes of a row's scales for one step
  int tiles = 1;        // that a warp computes at a time: a group
  int turn_groups = 8;  // groups whose sums fit the buffer at a time, a multiple of 8
  int turns = 1;        // that the block with the most groups makes
  bool operator==(const Shape&) const = default;
};

struct alignas(16) Entry {
  int shape = 0;  // or -1 - layer: attention
  const std::byte* codes[3] = {};
  const std::byte* scales[3] = {};
  const float* bias[3] = {};
  const float* norm = nullptr;
  unsigned first_turn = 0;  // turns of the products before it
  unsigned drained = 0;     // parity of their waits for each buffer of partial sums, a bit each
};

// A block's share of the products of one shape.
struct Range {
  int unit_begin;
  int unit_end;
  int groups;
  int step_begin;
  int steps;
};

struct Program {
  const Entry* entries = nullptr;
  const Shape* shapes = nullptr;
  const DecodeParams* layers = nullptr;
  std::uint32_t* arrived = nullptr;  // [ops] thread blocks that have finished an op
  int ops = 0;
  int shape_count = 0;
  int tokens = 1;
  // Shared memory, in bytes from its start; the ring comes first.
  int entries_at = 0;
  int shapes_at = 0;
  int ranges_at = 0;
  int squares_at = 0;  // [2][slice][token]
  int layer_at = 0;
  int barriers_at = 0;
  int staged_at = 0;
  int partials_at = 0;     // [2][partial_floats]
  int partial_floats = 0;  // of one buffer
  int teams_at = 0;        // attention, in the place of staged and partials
  int team_bytes = 0;
};

}  // namespace pianola::cuda::persistent
