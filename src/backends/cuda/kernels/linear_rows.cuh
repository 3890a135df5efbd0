// Products of 5 to 64 tokens by plain weights of regular shapes: what a batch decodes with.
#pragma once

#include "backends/cuda/kernels/linear_one.cuh"

namespace pianola::cuda::products {

// The thread blocks of a cluster share the columns: each has one of the eight slices of a row, and
// of the activations no more than that. (With all columns in every block, 32 tokens of 8,192
// columns are a megabyte for each multiprocessor, more than its weights.) A warp has tiles of its
// own, whose weights come as in one_kernel. What it sums up over its slice goes to the block whose
// rank is the warp's number, which adds the slices, in the order of every route, and stores.
inline constexpr int kRowsCluster = 8;

// A stage of a warp's ring: boxes of so many tiles, side by side.
template <int kTiles>
struct RowsStage {
  static constexpr int kBoxes = 4 / kTiles;
  static constexpr int kTileBytes = kTileRows * kBoxBytes;
  static constexpr int kBytes = kTiles * kBoxes * kTileBytes;
  static constexpr int kSteps = kBoxes * kBoxBytes / 64;
};

// Shared memory: [warp][stage][box] of weights, activations of a piece, squares [slice][token],
// sums [slice][token][tile of a warp][row] (of two turns: what one has summed up is added while the
// next one computes), barriers.
inline std::size_t rows_shared_bytes(const Params& p, int products_per_step, int stage_bytes) {
  const int tokens = (p.tokens + 7) / 8 * 8;
  const int ring = p.stages * kWarps * stage_bytes;
  const int staged =
      p.piece_steps * products_per_step * tokens * 4 * static_cast<int>(sizeof(uint4));
  const int sums = (p.turns > 1 ? 2 : 1) * p.warp_tiles * kTileRows;
  const int floats = kRowsCluster * tokens * (1 + sums);
  const int barriers = p.stages * kWarps + 2;
  return static_cast<std::size_t>(kBoxAlign + ring + staged) +
         static_cast<std::size_t>(floats) * sizeof(float) +
         static_cast<std::size_t>(barriers) * sizeof(std::uint64_t);
}

// Where the results of a tile's row lie among its eight: a lane's two stand together.
__device__ __forceinline__ constexpr int result_place(int row) { return row % 4 * 2 + row / 4; }

template <Codes codes, int kGroups, int kTiles>
__global__ void __launch_bounds__(kThreads, kGroups* kTiles <= 8 ? 2 : 1)
    rows_kernel(const __grid_constant__ OneParams params) {
  using S = Step<codes>;
  using Stage = RowsStage<kTiles>;
  // A warp converts tokens warp, warp + 8...: so many of them, and so many quads of each, at once.
  constexpr int kTokensAtOnce = kGroups < 4 ? kGroups : 4;
  constexpr int kQuadsAtOnce = 8 / kTokensAtOnce;
  constexpr int kNorms = kQuadsAtOnce < kHeld ? kQuadsAtOnce : kHeld;
  constexpr int kGroupsAtOnce = kGroups < 4 ? kGroups : 4;
  const Params& p = params.p;
  extern __shared__ __align__(16) unsigned char unaligned[];
  unsigned char* memory =
      unaligned + (kBoxAlign - shared_address(unaligned) % kBoxAlign) % kBoxAlign;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int groups = (p.tokens + 7) / 8;
  const int slice_floats = 8 * groups * p.warp_tiles * kTileRows;
  unsigned char* ring = memory + warp * p.stages * Stage::kBytes;
  uint4* staged = reinterpret_cast<uint4*>(memory + kWarps * p.stages * Stage::kBytes);
  float* squares = reinterpret_cast<float*>(staged + p.piece_steps * S::kProducts * groups * 32);
  float* partials = squares + kRowsCluster * 8 * groups;
  const std::uint32_t arrived =  // [2] barriers of partial results
      shared_address(partials + (p.turns > 1 ? 2 : 1) * kRowsCluster * slice_floats);
  const std::uint32_t full = arrived + 8 * (2 + warp * p.stages);

  allow_next();
  const int g = lane / 4;
  const int t = lane % 4;
  const int rank = static_cast<int>(blockIdx.x) % kRowsCluster;  // its slice
  const int cluster = static_cast<int>(blockIdx.x) / kRowsCluster;
  const int unit_begin = cluster * p.share + min(cluster, p.extra);
  const int unit_end = unit_begin + p.share + (cluster < p.extra ? 1 : 0);
  // Units of a warp in a turn: the same warps of the cluster have the same ones. Their tiles are
  // computed some at a time.
  const int unit_tiles = p.gated ? 2 : 1;
  const int passes = (p.warp_tiles + kTiles - 1) / kTiles;
  const auto first_unit = [&](int turn, int of) {
    return unit_begin + (turn * kWarps + of) * p.warp_units;
  };
  const auto last_unit = [&](int turn, int of) {
    return min(first_unit(turn, of) + p.warp_units, unit_end);
  };
  const auto tiles_of = [&](int turn, int of) {
    return max(0, last_unit(turn, of) - first_unit(turn, of)) * unit_tiles;
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
  // box.
  const int stages_of_pass = p.slice_steps / Stage::kSteps;
  const CUtensorMap* map = nullptr;  // of this lane's box, or null
  int box_x = 0;
  int box_y = 0;
  int load_turn = 0;
  int load_pass = 0;
  int stages_to_load = stages_of_pass;
  int stage_bytes = 0;
  const auto set_box = [&] {
    const int first = load_pass * kTiles;
    stage_bytes =
        max(0, min(kTiles, tiles_of(load_turn, warp) - first)) * Stage::kBoxes * Stage::kTileBytes;
    map = nullptr;
    if (lane >= kTiles * Stage::kBoxes) return;
    const Tile tile = tile_of(p, first_unit(load_turn, warp), last_unit(load_turn, warp),
                              first + lane / Stage::kBoxes);
    if (tile.part < 0) return;
    map = params.map + tile.part;
    box_x = rank * p.slice_steps * 64 + lane % Stage::kBoxes * kBoxBytes;
    box_y = tile.row;
  };
  const std::uint32_t box_at = shared_address(ring) + lane * Stage::kTileBytes;
  const auto load_stage = [&](int stage) {
    if (load_turn >= p.turns) return;
    const std::uint32_t barrier = full + 8 * stage;
    if (lane == 0) expect_bytes(barrier, stage_bytes);
    if (map) {
      copy_box(box_at + stage * Stage::kBytes, map, box_x, box_y, barrier);
      box_x += Stage::kBoxes * kBoxBytes;
    }
    if (--stages_to_load > 0) return;
    stages_to_load = stages_of_pass;
    if (++load_pass == passes) {
      load_pass = 0;
      ++load_turn;
    }
    if (load_turn < p.turns) set_box();
  };
  set_box();
#pragma unroll 1
  for (int i = 0; i < p.stages; ++i) load_stage(i);

  // Bytes that this block will receive for a turn: sums of the tiles of its rank from eight slices.
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

  // Results of a turn in the order [token][unit][row].
  const auto result = [&](int turn, int o) {
    const int row = o % kTileRows;
    const unsigned which = static_cast<unsigned>(o / kTileRows);
    const int token = static_cast<int>(which / static_cast<unsigned>(p.warp_units));
    const int n = static_cast<int>(which) - token * p.warp_units;
    const int unit = first_unit(turn, rank) + n;
    Output at = find_output(p, tile_of(p, unit, last_unit(turn, rank), 0), row, token);
    at.sum = (token * p.warp_tiles + n * unit_tiles) * kTileRows + result_place(row);
    return at;
  };
  Output mine = result(0, threadIdx.x);

  // A lane's quads lie 128 columns apart: the same place in steps 128 / kCols apart.
  const int slice_first = rank * p.slice_steps * S::kCols + 4 * lane;
  const Place place = place_of<codes>(4 * lane % S::kCols);
  const int quads = p.piece_steps * S::kCols / 128;
  float4 norm[kNorms];
#pragma unroll
  for (int i = 0; i < kNorms; ++i) {
    norm[i] = p.norm && i < quads ? load_activation4(p.norm + slice_first + 128 * i)
                                  : make_float4(1, 1, 1, 1);
  }
  keep_addresses(p, mine, slice_first);

  wait_for_previous();
  __syncwarp();    // a warp arrives and waits as one
  cluster_wait();  // the barriers of all blocks are there
  const int live = live_tokens(p);
  float held_residual = load_residual(mine);

  float square[kGroups] = {};
  const auto convert_piece = [&](int piece, bool again) {
    const int first = slice_first + piece * p.piece_steps * S::kCols;
    const int product = 4 * lane / S::kCols * S::kProducts + place.product;
    uint4* const to = staged + product * groups * 32 + warp * 4 + place.t;
    const int stride = 128 / S::kCols * S::kProducts * groups * 32;
#pragma unroll
    for (int m = 0; m < kGroups; m += kTokensAtOnce) {
      const float* x_row[kTokensAtOnce];
#pragma unroll
      for (int i = 0; i < kTokensAtOnce; ++i) {
        const int token = min(8 * (m + i) + warp, p.tokens - 1);
        const int row = p.gather ? min(max(__ldcg(p.gather + token), 0), p.in_rows - 1) : token;
        x_row[i] = p.in + static_cast<std::int64_t>(row) * p.in_ld + first;
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
#pragma unroll
          for (int i = 0; i < kTokensAtOnce; ++i) {
            if (8 * (m + i) + warp >= p.tokens) continue;
            if (!again) square[m + i] += square_sum(x[i][q]);
            to[(base + q) * stride + (m + i) * 32] = activation_words(x[i][q], weight);
          }
        }
      }
    }
  };

  const auto store_turn = [&](int turn) {
    if (sum_bytes(turn) == 0) return;
    wait_barrier(arrived + 8 * (turn & 1), turn >> 1 & 1, "slices of turn", turn);
    const float* const sums = partials + (turn & 1) * kRowsCluster * slice_floats;
    const int outputs = p.warp_units * kTileRows * live;
#pragma unroll 1
    for (int o = threadIdx.x; o < outputs; o += kThreads) {
      const bool held = o < kThreads;
      const Output at = held ? mine : result(turn, o);
      if (!at.out) continue;
      float scale = 1;
      if (p.norm) {
        const float sum =
            add_slices(kRowsCluster, [&](int s) { return squares[s * 8 * groups + at.token]; });
        scale = rsqrtf(sum / static_cast<float>(p.cols) + p.eps);
      }
      store_output(p, at, sums, kRowsCluster, slice_floats, scale,
                   held ? held_residual : load_residual(at));
    }
    if (turn + 1 < p.turns) {
      mine = result(turn + 1, threadIdx.x);
      held_residual = load_residual(mine);
    }
  };

  const unsigned char* const weights_at = ring + box_row(g) * kBoxBytes;
  const int chunk[2] = {(t ^ box_row(g)) * 16, ((t + 4) ^ box_row(g)) * 16};
  const int pieces = p.slice_steps / p.piece_steps;
  int stage = 0;
  unsigned parity = 0;
#pragma unroll 1
  for (int turn = 0; turn < p.turns; ++turn) {
    const std::uint32_t signal = arrived + 8 * (turn & 1);
#pragma unroll 1
    for (int pass = 0; pass < passes; ++pass) {
      float acc[kTiles][kGroups][4] = {};
#pragma unroll 1
      for (int piece = 0; piece < pieces; ++piece) {
        if (pieces > 1 || turn + pass == 0) {
          if (turn + pass + piece > 0) __syncthreads();  // nobody reads the piece before
          convert_piece(piece, turn + pass > 0);
          __syncthreads();
        }
        const uint4* at = staged + lane;
#pragma unroll 1
        for (int step = 0; step < p.piece_steps; step += Stage::kSteps) {
          wait_copied(full + 8 * stage, parity);
          const unsigned char* from = weights_at + stage * Stage::kBytes;
#pragma unroll
          for (int i = 0; i < Stage::kSteps; ++i) {
            uint4 weights[kTiles];
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
              weights[n] = *reinterpret_cast<const uint4*>(
                  from + (n * Stage::kBoxes + i / 2) * Stage::kTileBytes + chunk[i % 2]);
            }
#pragma unroll
            for (int j = 0; j < S::kProducts; ++j) {
#pragma unroll
              for (int base = 0; base < kGroups; base += kGroupsAtOnce) {
                uint4 a[kGroupsAtOnce];
#pragma unroll
                for (int m = 0; m < kGroupsAtOnce; ++m) {
                  a[m] = make_uint4(0, 0, 0, 0);
                  if (8 * (base + m) + g < p.tokens) a[m] = at[(base + m) * 32];
                }
#pragma unroll
                for (int m = 0; m < kGroupsAtOnce; ++m) {
                  const std::uint32_t words[4] = {a[m].x, a[m].y, a[m].z, a[m].w};
#pragma unroll
                  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
                    for (int part = 0; part < S::kParts; ++part) {
                      std::uint32_t b0 = 0;
                      std::uint32_t b1 = 0;
                      operand<codes>(weights[n], j, part, b0, b1);
                      mma_bf16(acc[n][base + m], words, b0, b1);
                    }
                  }
                }
              }
              at += groups * 32;
            }
          }
          __syncwarp();
          load_stage(stage);  // where these weights were read
          if (++stage == p.stages) {
            stage = 0;
            parity ^= 1;
          }
        }
      }

      __syncwarp();
      if (pass == 0 && turn >= 2) cluster_wait();  // what lay where these sums go has been stored
      if (turn + pass == 0 && p.norm) {
#pragma unroll
        for (int m = 0; m < kGroups; ++m) {
          const int token = 8 * m + warp;
          if (token >= p.tokens) break;
          const float sum = warp_sum(square[m]);
          if (lane < kRowsCluster) {
            send(peer_address(shared_address(squares + rank * 8 * groups + token), lane), sum,
                 peer_address(signal, lane));
          }
        }
      }
      const int tiles = tiles_of(turn, warp) - pass * kTiles;  // may be none, or more
      const std::uint32_t to =
          peer_address(shared_address(partials + ((turn & 1) * kRowsCluster + rank) * slice_floats +
                                      pass * kTiles * kTileRows + 2 * t),
                       warp);
      const std::uint32_t peer_signal = peer_address(signal, warp);
#pragma unroll
      for (int m = 0; m < kGroups; ++m) {
        if (8 * m + g >= p.tokens) continue;
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          if (n >= tiles) continue;
          send(to + ((8 * m + g) * p.warp_tiles + n) * kTileRows * 4,
               make_float2(acc[n][m][0] + acc[n][m][2], acc[n][m][1] + acc[n][m][3]), peer_signal);
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
