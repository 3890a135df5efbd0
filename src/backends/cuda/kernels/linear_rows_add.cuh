// The work of rows_kernel, and its second half: slices are added and stored.
#pragma once

#include "backends/cuda/kernels/linear_rows_math.cuh"

namespace pianola::cuda::products {

inline constexpr int kRowsCluster = 8;
inline constexpr int kAdders = 128;  // threads of a block that add slices

// What a thread block does, and where it has it in shared memory: [warp][stage][tile][box] of
// weights, activations of a piece, squares [slice][token], sums [slice][tile of a warp] (of two
// turns: what one has summed up is added while the next one computes), barriers.
template <typename Math>
struct RowsWork {
  const Params& p;
  int rank;  // in the cluster: the slice that it multiplies, the warp whose sums it adds
  int unit_begin;
  int unit_end;
  int unit_tiles;
  int pieces;
  int slice_floats;
  unsigned char* ring;
  unsigned char* staged;
  float* squares;
  float* partials;
  std::uint32_t arrived;  // [2] barriers of the sums of a turn
  std::uint32_t freed;    // [2] of their being added, in all blocks
  std::uint32_t full;     // [warp][stage]

  __device__ __forceinline__ RowsWork(const Params& params, unsigned char* memory)
      : p(params),
        rank(static_cast<int>(blockIdx.x) % kRowsCluster),
        unit_tiles(p.gated ? 2 : 1),
        pieces(p.slice_steps / p.piece_steps),
        slice_floats(p.warp_tiles * Math::kTileFloats),
        ring(memory) {
    const int cluster = static_cast<int>(blockIdx.x) / kRowsCluster;
    unit_begin = cluster * p.share + min(cluster, p.extra);
    unit_end = unit_begin + p.share + (cluster < p.extra ? 1 : 0);
    staged = memory + kWarps * p.stages * kRowsStageBytes;
    squares = reinterpret_cast<float*>(staged + Math::staged_bytes(p.piece_steps));
    partials = squares + kRowsCluster * Math::kTokens;
    arrived = shared_address(partials + (p.turns > 1 ? 2 : 1) * kRowsCluster * slice_floats);
    freed = arrived + 16;
    full = freed + 16;
  }
  static std::size_t shared_bytes(const Params& p) {
    const int ring = p.stages * kWarps * kRowsStageBytes;
    const int sums = (p.turns > 1 ? 2 : 1) * p.warp_tiles * Math::kTileFloats;
    const int floats = kRowsCluster * (Math::kTokens + sums);
    const int barriers = p.stages * kWarps + 4;
    return static_cast<std::size_t>(kBoxAlign + ring + Math::staged_bytes(p.piece_steps)) +
           static_cast<std::size_t>(floats) * sizeof(float) +
           static_cast<std::size_t>(barriers) * sizeof(std::uint64_t);
  }

  // One lane of every warp.
  __device__ __forceinline__ void init_barriers(int warp) const {
    if (warp < kWarps) {
#pragma unroll 1
      for (int i = 0; i < p.stages; ++i) init_barrier(full + 8 * (warp * p.stages + i), 1);
    } else if (warp == kWarps) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        init_barrier(arrived + 8 * i, 1);
        init_barrier(freed + 8 * i, kRowsCluster);
      }
    }
    fence_barriers();
  }

  __device__ __forceinline__ float* sums(int turn) const {
    return partials + (turn & 1) * kRowsCluster * slice_floats;
  }
  // Units of a turn, and of a warp in it, evenly: the same warps of the cluster have the same ones.
  // Their tiles are computed some at a time.
  __device__ __forceinline__ int first_unit(int turn, int warp) const {
    const int begin = unit_begin + turn * p.turn_units;
    const int units = max(0, min(p.turn_units, unit_end - begin));
    return begin + units * warp / kWarps;
  }
  __device__ __forceinline__ int tiles_of(int turn, int warp) const {
    return (first_unit(turn, warp + 1) - first_unit(turn, warp)) * unit_tiles;
  }
  // Warps that multiply together, or that wait for activations, take the same passes.
  __device__ __forceinline__ int passes_of(int turn, int warp) const {
    if (pieces > 1) return ceil_div(p.warp_tiles, kRowsTiles);
    int most = 0;
#pragma unroll
    for (int i = 0; i < Math::kTogether; ++i) most = max(most, tiles_of(turn, warp ^ i));
    return ceil_div(most, kRowsTiles);
  }
  // Bytes that this block will receive for a turn: sums of the tiles of its rank from all slices.
  __device__ __forceinline__ int sum_bytes(int turn) const {
    int floats = tiles_of(turn, rank) * kTileRows * p.tokens;
    if (turn == 0 && p.norm) floats += p.tokens;
    return floats * kRowsCluster * static_cast<int>(sizeof(float));
  }
};

// One row's results of four tokens, which follow each other in shared memory.
struct FourOutputs {
  Output at;  // of the first
  int ld;
  float residual[4];

  __device__ __forceinline__ bool there(int i, int live) const {
    return at.out && at.token + i < live;
  }
  __device__ __forceinline__ void load_residuals(int live) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      residual[i] = at.residual && there(i, live) ? __ldcg(at.residual + i * ld) : 0.0F;
    }
  }
  // Adds slices, `stride` floats apart, as store_output() does.
  __device__ __forceinline__ void store(const Params& p, const float* sums, int stride,
                                        int tile_floats, const float (&scale)[4], int live) const {
    if (!there(0, live)) return;
    float y[4];
    add(y, sums + at.sum, stride, scale);
    if (at.biased) {
#pragma unroll
      for (int i = 0; i < 4; ++i) y[i] += at.bias;
    }
    if (p.gated) {
      float up[4];
      add(up, sums + at.sum + tile_floats, stride, scale);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (at.up_biased) up[i] += at.up_bias;
        y[i] = activate(p.activation, y[i], up[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (at.residual) y[i] += residual[i];
      if (there(i, live)) at.out[i * ld] = y[i];
    }
  }

 private:
  static __device__ __forceinline__ void add(float (&y)[4], const float* sums, int stride,
                                             const float (&scale)[4]) {
    float4 slice[kRowsCluster];
#pragma unroll
    for (int s = 0; s < kRowsCluster; ++s) {
      slice[s] = *reinterpret_cast<const float4*>(sums + s * stride);
    }
    y[0] = __fmul_rn(scale[0], add_slices(kRowsCluster, [&](int s) { return slice[s].x; }));
    y[1] = __fmul_rn(scale[1], add_slices(kRowsCluster, [&](int s) { return slice[s].y; }));
    y[2] = __fmul_rn(scale[2], add_slices(kRowsCluster, [&](int s) { return slice[s].z; }));
    y[3] = __fmul_rn(scale[3], add_slices(kRowsCluster, [&](int s) { return slice[s].w; }));
  }
};

// Adds what the warps of this block's rank have summed up in the whole cluster.
template <typename Math>
class RowsAdder {
 public:
  __device__ __forceinline__ RowsAdder(const Params& p, const RowsWork<Math>& work)
      : p_(p),
        work_(work),
        thread_(static_cast<int>(threadIdx.x) - kThreads),
        row_(thread_ % kTileRows),
        token_(thread_ / kTileRows % kFours * 4),
        first_(thread_ / (kTileRows * kFours)) {}

  __device__ __forceinline__ void run() {
    expect(0);
    expect(1);
    find(0, first_);
    if (mine_.at.residual) prefetch(mine_.at.residual);
    prefetch(p_.count);
    wait_for_previous();
    live_ = live_tokens(p_);
    mine_.load_residuals(live_);
    __syncwarp();
    cluster_wait();  // the barriers of all blocks are there
#pragma unroll 1
    for (int turn = 0; turn < p_.turns; ++turn) {
      // A phase of no bytes would end at once, while others wait for the one before it.
      if (work_.sum_bytes(turn) > 0) {
        wait_barrier(work_.arrived + 8 * (turn & 1), turn >> 1 & 1, "slices of turn", turn);
        if (turn == 0) find_scales();
        store(turn);
      }
      if (turn + 2 < p_.turns) free(turn);
      if (turn + 1 < p_.turns) {
        find(turn + 1, first_);
        mine_.load_residuals(live_);
      }
    }
  }

 private:
  // A thread stores one row of a unit, of four tokens.
  static constexpr int kFours = Math::kTokens / 4;
  static constexpr int kUnitsAtOnce = kAdders / (kTileRows * kFours);
  static_assert(kUnitsAtOnce > 0);

  __device__ __forceinline__ void expect(int turn) const {
    if (thread_ != 0 || turn >= p_.turns) return;
    const int bytes = work_.sum_bytes(turn);
    if (bytes > 0) expect_bytes(work_.arrived + 8 * (turn & 1), bytes);
  }
  __device__ __forceinline__ void find(int turn, int n) {
    const int unit = work_.first_unit(turn, work_.rank) + n;
    const Tile tile = tile_of(p_, unit, work_.first_unit(turn, work_.rank + 1), 0);
    mine_.at = find_output(p_, tile, row_, token_);
    mine_.ld = p_.part[max(tile.part, 0)].ld;
    mine_.at.sum = n * work_.unit_tiles * Math::kTileFloats + Math::sum_place(row_, token_);
  }
  __device__ __forceinline__ void find_scales() {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scale_[i] = 1;
      if (!p_.norm || token_ + i >= live_) continue;
      const float sum = add_slices(
          kRowsCluster, [&](int s) { return work_.squares[s * Math::kTokens + token_ + i]; });
      scale_[i] = rsqrtf(sum / static_cast<float>(p_.cols) + p_.eps);
    }
  }
  __device__ __forceinline__ void store(int turn) {
#pragma unroll 1
    for (int n = first_; n < p_.warp_units; n += kUnitsAtOnce) {
      if (n != first_) {
        find(turn, n);
        mine_.load_residuals(live_);
      }
      mine_.store(p_, work_.sums(turn), work_.slice_floats, Math::kTileFloats, scale_, live_);
    }
  }
  // Tells the cluster that sums may come where those of this turn were.
  __device__ __forceinline__ void free(int turn) const {
    asm volatile("barrier.cta.sync 2, %0;" ::"n"(kAdders) : "memory");
    expect(turn + 2);
    if (thread_ >= 32) return;
    __syncwarp();
    if (thread_ < kRowsCluster) {
      arrive_at_peer(peer_address(work_.freed + 8 * (turn & 1), thread_), 1);
    }
  }

  const Params& p_;
  const RowsWork<Math>& work_;
  int thread_;
  int row_;
  int token_;
  int first_;  // unit of a turn
  int live_ = 0;
  FourOutputs mine_;  // of the unit to store next
  float scale_[4];
};

}  // namespace pianola::cuda::products
