// The kernels behind linear.h and the choice between them. linear_*.cu instantiate them, one form
// of weights each.
#pragma once

#include <algorithm>

#include "backends/cuda/kernels/linear_few.cuh"
#include "backends/cuda/kernels/linear_general.cuh"
#include "backends/cuda/kernels/linear_one.cuh"
#include "backends/cuda/kernels/linear_resident.cuh"
#include "backends/cuda/kernels/linear_rows.cuh"

namespace pianola::cuda::products {

// Staged activations of one block, so that the next kernel's block fits beside it.
inline constexpr int kMostStagedBytes = 80 * 1024;

template <Codes codes, Scales scales, int kGroups, int kTiles, int kDepth, bool kStaged>
void launch_one(Params p, int blocks_per_sm, const Launch& launch) {
  p.slice_steps = ceil_div(ceil_div(p.steps, p.slices), kDepth) * kDepth;
  std::size_t bytes = Shared<kGroups, kTiles>::kFloats * sizeof(float);
  if (kStaged) {
    bytes += static_cast<std::size_t>(p.steps) * Step<codes>::kProducts * 4 *
             static_cast<std::size_t>(p.tokens) * sizeof(uint4);
  }
  auto* kernel = linear_kernel<codes, scales, kGroups, kTiles, kDepth, kStaged>;
  launch_kernel(launch, "linear", kernel, dim3(static_cast<unsigned>(launch.sms * blocks_per_sm)),
                dim3(kThreads), bytes, p);
}

// Stages of a ring: 32 KB each. What is on its way while the chain of kernels waits is what counts,
// and fewer are only better where a multiprocessor would hold no second kernel.
inline constexpr int kMostStages = 5;
inline constexpr std::size_t kMostSharedBytes = 227 * 1024;

// Deals units to blocks or clusters; returns the most that one of them has.
inline int share_units(Params& p, int workers) {
  p.share = p.units / workers;
  p.extra = p.units % workers;
  return ceil_div(p.units, workers);
}
// The parts' codes in boxes of a tile, so many side by side a copy.
inline void set_boxes(OneParams& params, int side_by_side) {
  const Params& p = params.p;
  for (int i = 0; i < p.parts; ++i) {
    params.map[i] =
        boxes_of(p.part[i].codes, p.part[i].rows, p.code_row, kTileRows, kBoxBytes, side_by_side);
  }
}

// Weights of a block that resident_kernel takes, in boxes of a tile and 128 columns.
inline constexpr int kMostResident = 6;
// Shared memory of which a multiprocessor has not twice as much. Every other product of a layer
// asks for that: blocks of one launch then do not share a multiprocessor while others have none,
// for which the whole chain would wait, and the next product's still start beside them.
inline constexpr std::size_t kMoreThanHalf = 114 * 1024;

template <Codes codes, int kQuads, int kTiles>
bool launch_resident(const Params& shape, const Launch& launch) {
  if constexpr (kQuads * kTiles <= kMostResident) {
    using R = Resident<codes, kQuads, kTiles>;
    OneParams params = {.map = {}, .p = shape};
    share_units(params.p, launch.sms);
    set_boxes(params, R::kBoxes);
    const std::size_t bytes = shape.norm ? std::max(R::kBytes, kMoreThanHalf) : R::kBytes;
    launch_kernel(launch, "linear of a token", resident_kernel<codes, kQuads, kTiles>,
                  dim3(static_cast<unsigned>(launch.sms)), dim3(kThreads), bytes, params);
    return true;
  } else {
    return false;
  }
}
// Whether resident_kernel took the launch.
template <Codes codes, int kQuads>
bool launch_resident(const Params& p, const Launch& launch) {
  const int tiles = ceil_div(p.units, launch.sms) * (p.gated ? 2 : 1);
  if (tiles <= 1) return launch_resident<codes, kQuads, 1>(p, launch);
  if (tiles <= 2) return launch_resident<codes, kQuads, 2>(p, launch);
  if (tiles <= 3) return launch_resident<codes, kQuads, 3>(p, launch);
  if (tiles <= 4) return launch_resident<codes, kQuads, 4>(p, launch);
  if (tiles <= 6) return launch_resident<codes, kQuads, 6>(p, launch);
  return false;
}
template <Codes codes>
bool launch_resident(const Params& p, const Launch& launch) {
  if constexpr (Step<codes>::kCols == 32) {
    if (p.tokens != 1 || p.gather) return false;
    switch (p.cols) {
      case 1024:
        return launch_resident<codes, 1>(p, launch);
      case 2048:
        return launch_resident<codes, 2>(p, launch);
      case 3072:
        return launch_resident<codes, 3>(p, launch);
      case 4096:
        return launch_resident<codes, 4>(p, launch);
      default:
        return false;
    }
  }
  return false;
}

// Whether one_kernel took the launch.
template <Codes codes, int kQuads, int kTokens>
bool launch_few_tokens(const Params& shape, const Launch& launch) {
  constexpr int kTiles = 2;
  using M = OneShared<kTiles, kTokens>;
  OneParams params = {.map = {}, .p = shape};
  Params& p = params.p;
  p.slice_steps = p.steps / kWarps;
  p.turns = ceil_div(share_units(p, launch.sms), p.gated ? kTiles / 2 : kTiles);
  const int stages = p.tokens > kFewTokens ? 2 : p.cols > 4096 ? kMostStages - 1 : kMostStages;
  p.stages = std::min(stages, p.turns * p.slice_steps / kStageSteps);
  const int least = std::min(p.stages, p.tokens == 1 ? 1 : 2);
  const auto bytes = [&] { return M::bytes(p.stages, p.cols, p.tokens); };
  while (p.stages >= least && bytes() > kMostSharedBytes) --p.stages;
  if (p.stages < least) return false;  // rows too long
  set_boxes(params, kStageBoxes);
  launch_kernel(launch, "linear of few tokens", one_kernel<codes, kTiles, kQuads, kTokens>,
                dim3(static_cast<unsigned>(launch.sms)), dim3(M::kAllThreads), bytes(), params);
  return true;
}

template <Codes codes>
bool launch_few_tokens(const Params& p, const Launch& launch) {
  const int quads = p.cols / 128 / kWarps;
  if (p.tokens > kFewTokens) {
    return quads <= 2 && launch_few_tokens<codes, 2, kFewTokensOfShortRows>(p, launch);
  }
  if (p.tokens > 1) {
    return quads <= 2 ? launch_few_tokens<codes, 2, kFewTokens>(p, launch)
                      : launch_few_tokens<codes, 4, kFewTokens>(p, launch);
  }
  if (quads <= 2) return launch_few_tokens<codes, 2, 1>(p, launch);
  if (quads <= 4) return launch_few_tokens<codes, 4, 1>(p, launch);
  return launch_few_tokens<codes, 8, 1>(p, launch);
}

// Whether few_kernel took the launch.
template <Codes codes, Scales scales>
bool launch_few(const Params& p, const Launch& launch) {
  const int steps = ceil_div(p.steps, p.slices);
  if (p.tokens != 1 || steps > 4) return false;
  const int units = ceil_div(p.units, launch.sms * (kWarps / p.slices));  // of a team
  const bool two = p.gated || units > 1;
  auto* kernel = steps <= 2
                     ? (two ? few_kernel<codes, scales, 2, 2> : few_kernel<codes, scales, 1, 2>)
                     : (two ? few_kernel<codes, scales, 2, 4> : few_kernel<codes, scales, 1, 4>);
  // Work for many turns: two blocks, so that one loads while the other adds up.
  launch_kernel(launch, "linear of a token", kernel,
                dim3(static_cast<unsigned>(launch.sms * (units > 8 ? 2 : 1))), dim3(kThreads), 0,
                p);
  return true;
}

// Staged activations of rows_kernel: more are converted in pieces, again for each pass.
inline constexpr int kMostRowsBytes = 136 * 1024;

// Whether rows_kernel took the launch.
template <typename Math>
bool launch_rows_of(const Params& shape, const Launch& launch) {
  auto* kernel = rows_kernel<Math>;
  OneParams params = {.map = {}, .p = shape};
  Params& p = params.p;
  Grid grid = {.blocks = dim3(kRowsCluster),
               .threads = dim3(kRowsThreads),
               .shared_bytes = kMostSharedBytes,
               .cluster = kRowsCluster};
  static const int clusters = clusters_at_once("linear of tokens", kernel, grid);
  if (clusters == 0) return false;
  p.slice_steps = p.steps / kRowsCluster;
  const int unit_tiles = p.gated ? 2 : 1;
  const int most = share_units(p, clusters);
  const auto fits = [&](int units) {
    // Whole passes, as a warp without a tile waits for the others.
    const int tiles = ceil_div(ceil_div(units, kWarps) * unit_tiles, kRowsTiles) * kRowsTiles;
    return tiles <= kRowsTiles ||
           kRowsCluster * tiles * Math::kTileFloats * 4 <= Math::kPartialBytes;
  };
  p.turns = 1;
  while (!fits(ceil_div(most, p.turns))) ++p.turns;
  p.turn_units = ceil_div(most, p.turns);
  p.turns = ceil_div(most, p.turn_units);
  p.warp_units = ceil_div(p.turn_units, kWarps);
  p.warp_tiles = p.warp_units * unit_tiles;
  // A piece is whole quads of a warp and whole stages.
  const int least = std::max(128 / Step<Math::kCodes>::kCols, kRowsStageSteps);
  int pieces = 1;
  while (p.slice_steps % pieces != 0 ||
         Math::staged_bytes(p.slice_steps / pieces) > kMostRowsBytes) {
    ++pieces;
  }
  p.piece_steps = p.slice_steps / pieces;
  if (p.piece_steps % least != 0) return false;
  p.stages = Math::kRingBytes / (kWarps * kRowsStageBytes);
  const auto shared = [&] { return RowsWork<Math>::shared_bytes(p); };
  while (p.stages > 0 && shared() > kMostSharedBytes) --p.stages;
  if (p.stages < 1) return false;
  set_boxes(params, kRowsBoxes);
  grid.blocks = dim3(static_cast<unsigned>(clusters * kRowsCluster));
  grid.shared_bytes = shared();
  launch_grid(launch, "linear of tokens", kernel, grid, params);
  return true;
}

template <Codes codes>
bool launch_rows(const Params& p, const Launch& launch) {
  if (p.tokens > 32) return launch_rows_of<RowsMath<codes, 8>>(p, launch);
  if (p.tokens > 16) return launch_rows_of<RowsMath<codes, 4>>(p, launch);
  if (p.tokens > 8) return launch_rows_of<RowsMath<codes, 2>>(p, launch);
  return launch_rows_of<RowsMath<codes, 1>>(p, launch);
}

inline Params make_params(const LinearArgs& args) {
  Params p;
  const PackedWeight& first = args.part[0].weight;
  // Pointers to the first token of this launch; `gather` names input rows itself.
  const std::int64_t first_token = args.first;
  const std::int64_t first_out = args.out_first ? 0 : first_token;
  p.in = args.in + (args.gather ? 0 : first_token * args.in_ld);
  p.norm = args.norm;
  p.residual = args.residual ? args.residual + first_out * args.part[0].ld : nullptr;
  p.count = args.count;
  p.gather = args.gather ? args.gather + first_token : nullptr;
  p.in_rows = args.in_rows;
  p.inverse_rms = reinterpret_cast<float*>(args.scratch);
  p.words = reinterpret_cast<uint4*>(args.scratch + kDecodeTokens * sizeof(float));
  p.first = args.first;
  p.eps = args.eps;
  p.in_ld = args.in_ld;
  p.cols = first.cols;
  p.tokens = args.tokens;
  p.parts = args.parts;
  p.gated = args.end == LinearEnd::kGated ? 1 : 0;
  p.activation = args.activation;
  p.code_row = static_cast<int>(code_row_bytes(first.codes, first.cols));
  p.scale_row = static_cast<int>(scale_row_bytes(first.scales, first.codes, first.cols));
  int tiles = 0;
  for (int i = 0; i < args.parts; ++i) {
    const LinearPart& part = args.part[i];
    p.part[i] = {part.weight.data,
                 part.weight.scale_data,
                 part.bias,
                 part.out ? part.out + first_out * part.ld : nullptr,
                 part.weight.rows,
                 part.ld,
                 tiles};
    tiles += ceil_div(part.weight.rows, kTileRows);
  }
  p.units = p.gated ? ceil_div(first.rows, kTileRows) : tiles;
  return p;
}

// Chooses the kernel for a launch; p is complete but for steps and slices.
template <Codes codes, Scales scales>
void launch_form(Params& p, const Launch& launch) {
  using S = Step<codes>;
  constexpr bool kPlain = scales == Scales::kNone;
  p.steps = ceil_div(p.cols, S::kCols);
  p.slices = slices_of(p.steps);
  // Chunks of four steps at most, whatever the kernel that runs.
  const bool streams = kPlain && p.cols % 1024 == 0 && p.steps % (kWarps * 4) == 0;
  const int staged_bytes = p.steps * S::kCols * static_cast<int>(sizeof(float)) * p.tokens;
  const bool staged = p.tokens <= 8 && staged_bytes <= kMostStagedBytes;
  if constexpr (kPlain) {
    if (streams && launch_resident<codes>(p, launch)) return;
    if (streams && p.tokens <= kFewTokensOfShortRows && launch_few_tokens<codes>(p, launch)) return;
    if (streams && launch_rows<codes>(p, launch)) return;
  } else {
    if (launch_few<codes, scales>(p, launch)) return;
  }
  if (staged) {
    const int workers = launch.sms * (kWarps / p.slices);
    const int tiles = ceil_div(p.units, workers) * (p.gated ? 2 : 1);
    if (tiles <= 2) {
      launch_one<codes, scales, 1, 2, kPlain ? 8 : 4, true>(p, 1, launch);
    } else {
      // Work for several turns: two blocks, so that one loads while the other adds up.
      launch_one<codes, scales, 1, 4, kPlain ? 4 : 2, true>(p, tiles > 8 ? 2 : 1, launch);
    }
    return;
  }
  launch_kernel(launch, "prepare", prepare_kernel<codes>, dim3(static_cast<unsigned>(p.tokens)),
                dim3(kThreads), 0, p);
  Launch next = launch;
  next.dependent = launch.dependent_inside;
  if (p.tokens <= 8) {
    launch_one<codes, scales, 1, 4, kPlain ? 4 : 2, false>(p, 1, next);
  } else if (p.tokens <= 16) {
    launch_one<codes, scales, 2, 4, 2, false>(p, 1, next);
  } else if (p.tokens <= 32) {
    launch_one<codes, scales, 4, kPlain ? 8 : 4, 1, false>(p, 1, next);
  } else {
    launch_one<codes, scales, 8, kPlain ? 4 : 2, 1, false>(p, 1, next);
  }
}

}  // namespace pianola::cuda::products
