// Products of 5 to 64 tokens by plain weights of regular shapes: what a batch decodes with.
#pragma once

#include "backends/cuda/kernels/linear_one.cuh"
#include "backends/cuda/kernels/linear_rows_math.cuh"

namespace pianola::cuda::products {

// The thread blocks of a cluster share the columns: each has one of the eight slices of a row, and
// of the activations no more than that. (With all columns in every block, 32 tokens of 8,192
// columns are a megabyte for each multiprocessor, more than its weights.) A warp has tiles of its
// own, whose weights come as in one_kernel. What it sums up over its slice goes to the block whose
// rank is the warp's number, which adds the slices, in the order of every route, and stores.
inline constexpr int kRowsCluster = 8;

// Shared memory: [warp][stage][tile][box] of weights, activations of a piece, squares
// [slice][token], sums [slice][tile of a warp] (of two turns: what one has summed up is added while
// the next one computes), barriers.
template <typename Math>
std::size_t rows_shared_bytes(const Params& p) {
  const int ring = p.stages * kWarps * kRowsStageBytes;
  const int sums = (p.turns > 1 ? 2 : 1) * p.warp_tiles * Math::kTileFloats;
  const int floats = kRowsCluster * (Math::kTokens + sums);
  const int barriers = p.stages * kWarps + 2;
  return static_cast<std::size_t>(kBoxAlign + ring + Math::staged_bytes(p.piece_steps)) +
         static_cast<std::size_t>(floats) * sizeof(float) +
         static_cast<std::size_t>(barriers) * sizeof(std::uint64_t);
}

template <typename Math>
__global__ void __launch_bounds__(kThreads, 1)
    rows_kernel(const __grid_constant__ OneParams params) {
  using S = Step<Math::kCodes>;
  constexpr int kGroups = Math::kTokens / 8;
  // A warp converts tokens warp, warp + 8...: so many of them, and so many quads of each, at once.
  constexpr int kTokensAtOnce = kGroups < 4 ? kGroups : 4;
  constexpr int kQuadsAtOnce = Math::kQuads / kTokensAtOnce;
  constexpr int kNorms = kQuadsAtOnce < kHeld ? kQuadsAtOnce : kHeld;
  // A thread stores one row of a unit, of one token or of every 32nd.
  constexpr int kUnitsAtOnce = kGroups < 4 ? 4 / kGroups : 1;
  constexpr int kRepeats = kGroups < 4 ? 1 : kGroups / 4;
  const Params& p = params.p;
  extern __shared__ __align__(16) unsigned char unaligned[];
  unsigned char* memory =
      unaligned + (kBoxAlign - shared_address(unaligned) % kBoxAlign) % kBoxAlign;
  // The same in all lanes, as the compiler must know where warps multiply together.
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = threadIdx.x % 32;
  const int slice_floats = p.warp_tiles * Math::kTileFloats;
  unsigned char* ring = memory + warp * p.stages * kRowsStageBytes;
  unsigned char* staged = memory + kWarps * p.stages * kRowsStageBytes;
  float* squares = reinterpret_cast<float*>(staged + Math::staged_bytes(p.piece_steps));
  float* partials = squares + kRowsCluster * Math::kTokens;
  const std::uint32_t arrived =  // [2] barriers of partial results
      shared_address(partials + (p.turns > 1 ? 2 : 1) * kRowsCluster * slice_floats);
  const std::uint32_t full = arrived + 8 * (2 + warp * p.stages);

  allow_next();
  const int rank = static_cast<int>(blockIdx.x) % kRowsCluster;  // its slice
  const int cluster = static_cast<int>(blockIdx.x) / kRowsCluster;
  const int unit_begin = cluster * p.share + min(cluster, p.extra);
  const int unit_end = unit_begin + p.share + (cluster < p.extra ? 1 : 0);
  // Units of a turn, and of a warp in it, evenly: the same warps of the cluster have the same ones.
  // Their tiles are computed some at a time.
  const int unit_tiles = p.gated ? 2 : 1;
  const auto first_unit = [&](int turn, int of) {
    const int begin = unit_begin + turn * p.turn_units;
    const int units = max(0, min(p.turn_units, unit_end - begin));
    return begin + units * of / kWarps;
  };
  const auto last_unit = [&](int turn, int of) { return first_unit(turn, of + 1); };
  const auto tiles_of = [&](int turn, int of) {
    return (last_unit(turn, of) - first_unit(turn, of)) * unit_tiles;
  };
  const int pieces = p.slice_steps / p.piece_steps;
  // Warps that multiply together, or that wait for activations, take the same passes.
  const auto passes_of = [&](int turn) {
    if (pieces > 1) return ceil_div(p.warp_tiles, kRowsTiles);
    int most = tiles_of(turn, warp);
#pragma unroll
    for (int i = 1; i < Math::kTogether; ++i) most = max(most, tiles_of(turn, warp ^ i));
    return ceil_div(most, kRowsTiles);
  };
  if (lane == 0) {
#pragma unroll 1
    for (int i = 0; i < p.stages; ++i) init_barrier(full + 8 * i, 1);
    if (warp == 0) {
      init_barrier(arrived, 1);
      init_barrier(arrived + 8, 1);
    }
    fence_barriers();
  }
  __syncwarp();
  cluster_arrive_relaxed();  // what it tells of is behind the fence

  // Loading runs ahead of computing, by the stages of the ring, over passes and turns. A lane a
  // tile.
  const int stages_of_pass = p.slice_steps / kRowsStageSteps;
  const CUtensorMap* map = nullptr;  // of this lane's tile, or null
  int box_x = 0;
  int box_y = 0;
  int load_turn = 0;
  int load_pass = 0;
  int stages_to_load = stages_of_pass;
  int stage_bytes = 0;
  const auto set_box = [&] {
    while (load_turn < p.turns && load_pass == passes_of(load_turn)) {
      load_pass = 0;
      ++load_turn;
    }
    if (load_turn == p.turns) return;
    const int first = load_pass * kRowsTiles;
    stage_bytes =
        max(0, min(kRowsTiles, tiles_of(load_turn, warp) - first)) * kRowsBoxes * kRowsTileBytes;
    map = nullptr;
    if (lane >= kRowsTiles) return;
    const Tile tile =
        tile_of(p, first_unit(load_turn, warp), last_unit(load_turn, warp), first + lane);
    if (tile.part < 0) return;
    map = params.map + tile.part;
    box_x = rank * p.slice_steps * 64 / kBoxBytes;
    box_y = tile.row;
  };
  const std::uint32_t tile_at = shared_address(ring) + lane * (kRowsBoxes * kRowsTileBytes);
  const auto load_stage = [&](int stage) {
    if (load_turn == p.turns) return;
    const std::uint32_t barrier = full + 8 * stage;
    if (lane == 0) expect_bytes(barrier, stage_bytes);
    if (map) {
      copy_boxes(tile_at + stage * kRowsStageBytes, map, box_x, box_y, barrier);
      box_x += kRowsBoxes;
    }
    if (--stages_to_load > 0) return;
    stages_to_load = stages_of_pass;
    ++load_pass;
    set_box();
  };
  set_box();
#pragma unroll 1
  for (int i = 0; i < p.stages; ++i) load_stage(i);

  // Bytes that this block will receive for a turn: sums of the tiles of its rank from all slices.
  const auto sum_bytes = [&](int turn) {
    int floats = tiles_of(turn, rank) * kTileRows * p.tokens;
    if (turn == 0 && p.norm) floats += p.tokens;
    return floats * kRowsCluster * static_cast<int>(sizeof(float));
  };
  // A phase of no bytes would end at once, while others wait for the one before it.
  const auto expect_sums = [&](int turn) {
    if (threadIdx.x != 0 || turn >= p.turns) return;
    const int bytes = sum_bytes(turn);
    if (bytes > 0) expect_bytes(arrived + 8 * (turn & 1), bytes);
  };
  expect_sums(0);
  expect_sums(1);

  const int row = threadIdx.x % kTileRows;
  const int token = threadIdx.x / kTileRows % Math::kTokens;
  const auto result = [&](int turn, int n, int token_of) {
    const int unit = first_unit(turn, rank) + n;
    Output at = find_output(p, tile_of(p, unit, last_unit(turn, rank), 0), row, token_of);
    at.sum = n * unit_tiles * Math::kTileFloats + Math::sum_place(row, token_of);
    return at;
  };
  const int first_result = threadIdx.x / (kTileRows * Math::kTokens);
  Output mine = result(0, first_result, token);

  // A lane's quads lie 128 columns apart: the same place in steps 128 / kCols apart.
  const int first_column = rank * p.slice_steps * S::kCols + 4 * lane;
  const Place place = place_of<Math::kCodes>(4 * lane % S::kCols);
  const int lane_product = 4 * lane / S::kCols * S::kProducts + place.product;
  const int quads = p.piece_steps * S::kCols / 128;
  float4 norm[kNorms];
#pragma unroll
  for (int i = 0; i < kNorms; ++i) {
    norm[i] = p.norm && i < quads ? load_activation4(p.norm + first_column + 128 * i)
                                  : make_float4(1, 1, 1, 1);
  }
  keep_addresses(p, mine, first_column);

  wait_for_previous();
  const int live = live_tokens(p);
  float held_residual = load_residual(mine);

  float square[kGroups] = {};
  const auto convert_piece = [&](int piece, bool again) {
    const int first = first_column + piece * p.piece_steps * S::kCols;
#pragma unroll
    for (int m = 0; m < kGroups; m += kTokensAtOnce) {
      const float* x_row[kTokensAtOnce];
#pragma unroll
      for (int i = 0; i < kTokensAtOnce; ++i) {
        const int of = min(8 * (m + i) + warp, p.tokens - 1);
        const int from = p.gather ? min(max(__ldcg(p.gather + of), 0), p.in_rows - 1) : of;
        x_row[i] = p.in + static_cast<std::int64_t>(from) * p.in_ld + first;
      }
#pragma unroll 1
      for (int base = 0; base < quads; base += kQuadsAtOnce) {
        float4 x[kTokensAtOnce][kQuadsAtOnce];
#pragma unroll
        for (int i = 0; i < kTokensAtOnce; ++i) {
#pragma unroll
          for (int q = 0; q < kQuadsAtOnce; ++q) {
            if (8 * (m + i) + warp < p.tokens && base + q < quads) {
              x[i][q] = load_activation4(x_row[i] + 128 * (base + q));
            }
          }
        }
#pragma unroll
        for (int q = 0; q < kQuadsAtOnce; ++q) {
          if (base + q >= quads) break;
          float4 weight = q < kNorms ? norm[q % kNorms] : make_float4(1, 1, 1, 1);
          if (p.norm && (piece > 0 || base > 0 || q >= kNorms)) {
            weight = load_activation4(p.norm + first + 128 * (base + q));
          }
          const int product = lane_product + (base + q) * (128 / S::kCols * S::kProducts);
#pragma unroll
          for (int i = 0; i < kTokensAtOnce; ++i) {
            if (8 * (m + i) + warp >= p.tokens) continue;
            if (!again) square[m + i] += square_sum(x[i][q]);
            Math::stage(staged, product, place.t, 8 * (m + i) + warp,
                        activation_words(x[i][q], weight));
          }
        }
      }
    }
    Math::end_staging();
  };

  float scale[kRepeats];
  const auto find_scales = [&] {
#pragma unroll
    for (int i = 0; i < kRepeats; ++i) {
      scale[i] = 1;
      if (!p.norm || token + 32 * i >= live) continue;
      const float sum = add_slices(
          kRowsCluster, [&](int s) { return squares[s * Math::kTokens + token + 32 * i]; });
      scale[i] = rsqrtf(sum / static_cast<float>(p.cols) + p.eps);
    }
  };
  const auto store_turn = [&](int turn) {
    if (sum_bytes(turn) == 0) return;
    wait_barrier(arrived + 8 * (turn & 1), turn >> 1 & 1, "slices of turn", turn);
    if (turn == 0) find_scales();
    const float* const sums = partials + (turn & 1) * kRowsCluster * slice_floats;
#pragma unroll 1
    for (int n = first_result; n < p.warp_units; n += kUnitsAtOnce) {
#pragma unroll
      for (int i = 0; i < kRepeats; ++i) {
        const bool held = n == first_result && i == 0;
        const Output at = held ? mine : result(turn, n, token + 32 * i);
        if (!at.out || at.token >= live) continue;
        store_output(p, at, sums, kRowsCluster, slice_floats, Math::kTileFloats, scale[i],
                     held ? held_residual : load_residual(at));
      }
    }
    if (turn + 1 < p.turns) {
      mine = result(turn + 1, first_result, token);
      held_residual = load_residual(mine);
    }
  };

  int stage = 0;
  unsigned parity = 0;
  const auto next_stage = [&] {
    load_stage(stage);  // where these weights were read
    if (++stage == p.stages) {
      stage = 0;
      parity ^= 1;
    }
  };
#pragma unroll 1
  for (int turn = 0; turn < p.turns; ++turn) {
    const std::uint32_t signal = arrived + 8 * (turn & 1);
    const int passes = passes_of(turn);
    bool may_send = turn == 1;
    // Until the barriers of all blocks are there, or what lay where this turn's sums go has been
    // stored.
    const auto wait_to_send = [&] {
      if (may_send) return;
      __syncwarp();  // a warp arrives and waits as one
      cluster_wait();
      may_send = true;
    };
    if (turn == 0 && pieces == 1) {
      convert_piece(0, false);
      __syncthreads();
    }
#pragma unroll 1
    for (int pass = 0; pass < passes; ++pass) {
      Math math;
#pragma unroll 1
      for (int piece = 0; piece < pieces; ++piece) {
        if (pieces > 1) {
          if (turn + pass + piece > 0) __syncthreads();  // nobody reads the piece before
          convert_piece(piece, turn + pass > 0);
          __syncthreads();
        }
        math.multiply(
            staged, p.piece_steps, p.tokens,
            [&] {
              wait_copied(full + 8 * stage, parity);
              return ring + stage * kRowsStageBytes;
            },
            next_stage);
      }
      wait_to_send();
      const float* const to = partials + ((turn & 1) * kRowsCluster + rank) * slice_floats +
                              pass * kRowsTiles * Math::kTileFloats;
      math.send_sums(peer_address(shared_address(to), warp), peer_address(signal, warp),
                     tiles_of(turn, warp) - pass * kRowsTiles, p.tokens);
    }
    wait_to_send();
    if (turn == 0 && p.norm) {
#pragma unroll
      for (int m = 0; m < kGroups; ++m) {
        const int of = 8 * m + warp;
        if (of >= p.tokens) break;
        const float sum = warp_sum(square[m]);
        if (lane < kRowsCluster) {
          const float* const to = squares + rank * Math::kTokens + of;
          send(peer_address(shared_address(to), lane), sum, peer_address(signal, lane));
        }
      }
    }
    if (turn == 0) continue;
    store_turn(turn - 1);
    expect_sums(turn + 1);
    __syncwarp();
    if (turn + 1 < p.turns) cluster_arrive();
  }
  store_turn(p.turns - 1);
}

}  // namespace pianola::cuda::products
