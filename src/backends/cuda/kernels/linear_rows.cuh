// Products of 5 to 64 tokens by plain weights of regular shapes: what a batch decodes with.
#pragma once

#include "backends/cuda/kernels/linear_one.cuh"
#include "backends/cuda/kernels/linear_rows_add.cuh"
#include "backends/cuda/kernels/linear_rows_math.cuh"

namespace pianola::cuda::products {

// The thread blocks of a cluster share the columns: each has one of the eight slices of a row, and
// of the activations no more than that. (With all columns in every block, 32 tokens of 8,192
// columns are a megabyte for each multiprocessor, more than its weights.) A warp has tiles of its
// own, whose weights come as in one_kernel. What it sums up over its slice goes to the block whose
// rank is the warp's number, where four more warps add the slices, in the order of every route, and
// store, while the next sums are computed.
inline constexpr int kRowsThreads = kThreads + kAdders;
// Registers of a thread, of those that multiply and of those that add.
inline constexpr int kRowsMultiplierRegisters = 208;
inline constexpr int kRowsAdderRegisters = 88;

// Computes the slice of the block's rank of one warp's tiles.
template <typename Math>
class RowsMultiplier {
 public:
  __device__ __forceinline__ RowsMultiplier(const OneParams& params, const RowsWork<Math>& work,
                                            int warp)
      : params_(params),
        p_(params.p),
        work_(work),
        warp_(warp),
        lane_(static_cast<int>(threadIdx.x) % 32),
        ring_(work.ring + warp * params.p.stages * kRowsStageBytes),
        full_(work.full + 8 * warp * params.p.stages) {}

  __device__ __forceinline__ void start_ring() {
    set_box();
#pragma unroll 1
    for (int i = 0; i < p_.stages; ++i) load_stage(i);
  }

  __device__ __forceinline__ void run() {
    load_norm();
    prefetch(p_.in + min(first_column(), p_.cols - 1));
    prefetch(p_.count);
    wait_for_previous();
#pragma unroll 1
    for (int turn = 0; turn < p_.turns; ++turn) {
      const std::uint32_t signal = work_.arrived + 8 * (turn & 1);
      bool may_send = turn == 1;
      // Until the barriers of all blocks are there, or what lay where this turn's sums go has been
      // added.
      const auto wait_to_send = [&] {
        if (may_send) return;
        if (turn == 0) {
          __syncwarp();  // a warp waits as one
          cluster_wait();
        } else {
          wait_barrier(work_.freed + 8 * (turn & 1), (turn >> 1) + 1 & 1, "room for turn", turn);
        }
        may_send = true;
      };
      if (turn == 0 && work_.pieces == 1) {
        convert_piece(0, false);
        meet();
      }
      const int passes = work_.passes_of(turn, warp_);
#pragma unroll 1
      for (int pass = 0; pass < passes; ++pass) {
        Math math;
#pragma unroll 1
        for (int piece = 0; piece < work_.pieces; ++piece) {
          if (work_.pieces > 1) {
            if (turn + pass + piece > 0) meet();  // nobody reads the piece before
            convert_piece(piece, turn + pass > 0);
            meet();
          }
          math.multiply(
              work_.staged, p_.piece_steps,
              [&] {
                wait_copied(full_ + 8 * stage_, parity_);
                return ring_ + stage_ * kRowsStageBytes;
              },
              [&] { next_stage(); });
        }
        wait_to_send();
        const float* const to = work_.sums(turn) + work_.rank * work_.slice_floats +
                                pass * kRowsTiles * Math::kTileFloats;
        math.send_sums(peer_address(shared_address(to), warp_), peer_address(signal, warp_),
                       work_.tiles_of(turn, warp_) - pass * kRowsTiles, p_.tokens);
      }
      wait_to_send();
      if (turn == 0 && p_.norm) send_squares(signal);
    }
  }

 private:
  using S = Step<Math::kCodes>;
  static constexpr int kGroups = Math::kTokens / 8;
  // A warp converts tokens warp, warp + 8...: so many of them, and so many quads of each, at once.
  static constexpr int kTokensAtOnce = kGroups < 4 ? kGroups : 4;
  static constexpr int kQuadsAtOnce = Math::kQuads / kTokensAtOnce;
  static constexpr int kNorms = kQuadsAtOnce < kHeld ? kQuadsAtOnce : kHeld;

  static __device__ __forceinline__ void meet() {
    asm volatile("barrier.cta.sync 1, %0;" ::"n"(kThreads) : "memory");
  }

  // Loading runs ahead of computing, by the stages of the ring, over passes and turns. A lane a
  // tile.
  __device__ __forceinline__ void set_box() {
    while (load_turn_ < p_.turns && load_pass_ == work_.passes_of(load_turn_, warp_)) {
      load_pass_ = 0;
      ++load_turn_;
    }
    if (load_turn_ == p_.turns) return;
    stages_to_load_ = p_.slice_steps / kRowsStageSteps;
    const int first = load_pass_ * kRowsTiles;
    const int tiles = max(0, min(kRowsTiles, work_.tiles_of(load_turn_, warp_) - first));
    stage_bytes_ = tiles * kRowsBoxes * kRowsTileBytes;
    map_ = nullptr;
    if (lane_ >= kRowsTiles) return;
    const Tile tile = tile_of(p_, work_.first_unit(load_turn_, warp_),
                              work_.first_unit(load_turn_, warp_ + 1), first + lane_);
    if (tile.part < 0) return;
    map_ = params_.map + tile.part;
    box_x_ = work_.rank * p_.slice_steps * 64 / kBoxBytes;
    box_y_ = tile.row;
  }
  __device__ __forceinline__ void load_stage(int stage) {
    if (load_turn_ == p_.turns) return;
    const std::uint32_t barrier = full_ + 8 * stage;
    if (lane_ == 0) expect_bytes(barrier, stage_bytes_);
    if (map_) {
      const unsigned char* const to =
          ring_ + stage * kRowsStageBytes + lane_ * (kRowsBoxes * kRowsTileBytes);
      copy_boxes(shared_address(to), map_, box_x_, box_y_, barrier);
      box_x_ += kRowsBoxes;
    }
    if (--stages_to_load_ > 0) return;
    ++load_pass_;
    set_box();
  }
  __device__ __forceinline__ void next_stage() {
    load_stage(stage_);  // where these weights were read
    if (++stage_ == p_.stages) {
      stage_ = 0;
      parity_ ^= 1;
    }
  }

  // A lane's quads lie 128 columns apart: the same place in steps 128 / kCols apart.
  __device__ __forceinline__ int first_column() const {
    return work_.rank * p_.slice_steps * S::kCols + 4 * lane_;
  }
  __device__ __forceinline__ int quads() const { return p_.piece_steps * S::kCols / 128; }
  __device__ __forceinline__ void load_norm() {
#pragma unroll
    for (int i = 0; i < kNorms; ++i) {
      norm_[i] = p_.norm && i < quads() ? load_activation4(p_.norm + first_column() + 128 * i)
                                        : make_float4(1, 1, 1, 1);
    }
  }
  __device__ __forceinline__ void convert_piece(int piece, bool again) {
    const Place place = place_of<Math::kCodes>(4 * lane_ % S::kCols);
    const int lane_product = 4 * lane_ / S::kCols * S::kProducts + place.product;
    const int first = first_column() + piece * p_.piece_steps * S::kCols;
#pragma unroll
    for (int m = 0; m < kGroups; m += kTokensAtOnce) {
      const float* x_row[kTokensAtOnce];
#pragma unroll
      for (int i = 0; i < kTokensAtOnce; ++i) {
        const int of = min(8 * (m + i) + warp_, p_.tokens - 1);
        const int from = p_.gather ? min(max(__ldcg(p_.gather + of), 0), p_.in_rows - 1) : of;
        x_row[i] = p_.in + static_cast<std::int64_t>(from) * p_.in_ld + first;
      }
#pragma unroll 1
      for (int base = 0; base < quads(); base += kQuadsAtOnce) {
        float4 x[kTokensAtOnce][kQuadsAtOnce];
#pragma unroll
        for (int i = 0; i < kTokensAtOnce; ++i) {
#pragma unroll
          for (int q = 0; q < kQuadsAtOnce; ++q) {
            if (8 * (m + i) + warp_ < p_.tokens && base + q < quads()) {
              x[i][q] = load_activation4(x_row[i] + 128 * (base + q));
            }
          }
        }
#pragma unroll
        for (int q = 0; q < kQuadsAtOnce; ++q) {
          if (base + q >= quads()) break;
          float4 weight = q < kNorms ? norm_[q % kNorms] : make_float4(1, 1, 1, 1);
          if (p_.norm && (piece > 0 || base > 0 || q >= kNorms)) {
            weight = load_activation4(p_.norm + first + 128 * (base + q));
          }
          const int product = lane_product + (base + q) * (128 / S::kCols * S::kProducts);
#pragma unroll
          for (int i = 0; i < kTokensAtOnce; ++i) {
            if (8 * (m + i) + warp_ >= p_.tokens) continue;
            if (!again) square_[m + i] += square_sum(x[i][q]);
            Math::stage(work_.staged, product, place.t, 8 * (m + i) + warp_,
                        activation_words(x[i][q], weight));
          }
        }
      }
    }
    Math::end_staging();
  }
  __device__ __forceinline__ void send_squares(std::uint32_t signal) const {
#pragma unroll
    for (int m = 0; m < kGroups; ++m) {
      const int of = 8 * m + warp_;
      if (of >= p_.tokens) break;
      const float sum = warp_sum(square_[m]);
      if (lane_ < kRowsCluster) {
        const float* const to = work_.squares + work_.rank * Math::kTokens + of;
        send(peer_address(shared_address(to), lane_), sum, peer_address(signal, lane_));
      }
    }
  }

  const OneParams& params_;
  const Params& p_;
  const RowsWork<Math>& work_;
  int warp_;
  int lane_;
  const unsigned char* ring_;
  std::uint32_t full_;
  int stage_ = 0;  // to multiply next
  unsigned parity_ = 0;
  const CUtensorMap* map_ = nullptr;  // of this lane's tile to load, or null
  int box_x_ = 0;
  int box_y_ = 0;
  int load_turn_ = 0;
  int load_pass_ = 0;
  int stages_to_load_ = 0;
  int stage_bytes_ = 0;
  float4 norm_[kNorms];
  float square_[kGroups] = {};
};

template <typename Math>
__global__ void __launch_bounds__(kRowsThreads, 1)
    rows_kernel(const __grid_constant__ OneParams params) {
  extern __shared__ __align__(16) unsigned char unaligned[];
  allow_next();
  const RowsWork<Math> work(params.p, unaligned + bytes_to_boxes(unaligned));
  // The same in all lanes, as the compiler must know where warps multiply together.
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 32, 0);
  if (threadIdx.x % 32 == 0) work.init_barriers(warp);
  __syncwarp();
  cluster_arrive_relaxed();  // what it tells of is behind a fence
  if (warp < kWarps) {
    RowsMultiplier<Math> multiplier(params, work, warp);
    multiplier.start_ring();
    take_registers<kRowsMultiplierRegisters>();
    multiplier.run();
  } else {
    give_registers<kRowsAdderRegisters>();
    RowsAdder<Math>(params.p, work).run();
  }
}

}  // namespace pianola::cuda::products
