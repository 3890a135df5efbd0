// Products of one token by a matrix so small that the thread blocks together hold it whole: what a
// single row decodes with, but for the widest layers and the head.
#pragma once

#include "backends/cuda/kernels/linear_one.cuh"

namespace pianola::cuda::products {

// The bits of one_kernel, with a straight line from the end of the kernel before to the result. All
// weights of a thread block are on their way from the start, so there are neither turns nor a ring,
// and the shape is known to the compiler: kQuads, of four activations each, that a lane converts
// (1,024 columns of a row), and the most tiles of a block. The weights that are multiplied first
// lie in registers before the wait, as all warps read shared memory at once behind it.
template <Codes codes, int kQuads, int kTiles>
struct Resident {
  static_assert(Step<codes>::kCols == 32 && Step<codes>::kProducts == 2);  // 16-bit weights
  static constexpr int kSteps = 4 * kQuads;  // of 32 columns, of a slice
  static constexpr int kBoxes = 2 * kQuads;  // of a tile of a slice
  static constexpr int kBoxSize = kTileRows * kBoxBytes;
  static constexpr int kTileBytes = kBoxes * kBoxSize;
  static constexpr int kPartial = kWarps * kTiles * kTileRows;
  static constexpr int kStagedWords = kSteps * 2 * 4;  // of a warp, 16 bytes each
  static constexpr std::size_t kBytes =
      kBoxAlign + std::size_t{kWarps} * (kTiles * kTileBytes + kStagedWords * sizeof(uint4)) +
      (kPartial + kWarps) * sizeof(float) + kWarps * sizeof(std::uint64_t);
  // Steps whose weights a lane holds ahead of the products, as registers allow.
  static constexpr int kLoads = 14;
  static constexpr int kAhead = std::max(1, std::min(kSteps, kLoads / kTiles));
};

// The same number, which is certainly known from here on.
__device__ __forceinline__ std::uint32_t keep(std::uint32_t v) {
  return __shfl_sync(kAllLanes, v, static_cast<int>(threadIdx.x) & 31);
}

// The residual of a result, or 0, without a branch: behind one, the load would be put off.
__device__ __forceinline__ float load_joining(const float* residual) {
  float v;
  asm volatile(
      "{\n .reg .pred there;\n setp.ne.u64 there, %1, 0;\n mov.f32 %0, 0f00000000;\n"
      " @there ld.global.cg.f32 %0, [%1];\n}"
      : "=&f"(v)
      : "l"(residual)
      : "memory");
  return v;
}

template <Codes codes, int kQuads, int kTiles>
__global__ void __launch_bounds__(kThreads, 2)
    resident_kernel(const __grid_constant__ OneParams params) {
  using R = Resident<codes, kQuads, kTiles>;
  using S = Step<codes>;
  const Params& p = params.p;
  extern __shared__ __align__(16) unsigned char unaligned[];
  unsigned char* memory = unaligned + bytes_to_boxes(unaligned);
  const int warp = static_cast<int>(threadIdx.x) / 32;  // its slice
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4;
  const int t = lane % 4;
  float* partial = reinterpret_cast<float*>(memory + kWarps * kTiles * R::kTileBytes);
  float* squares = partial + R::kPartial;
  const std::uint32_t staged = shared_address(squares + kWarps) + warp * (R::kStagedWords * 16);
  const std::uint32_t full =
      shared_address(squares + kWarps) + kWarps * (R::kStagedWords * 16) + warp * 8;
  const std::uint32_t weights = shared_address(memory) + warp * (kTiles * R::kTileBytes);

  allow_next();
  if (lane == 0) {
    init_barrier(full, 1);
    fence_barriers();
  }
  const UnitRange units = units_of(p, static_cast<int>(blockIdx.x));
  const Tile tile = lane < kTiles ? tile_of(p, units.begin, units.end, lane) : Tile{};
  const int tiles = __popc(__ballot_sync(kAllLanes, tile.part >= 0));
  if (lane == 0) expect_bytes(full, tiles * R::kTileBytes);
  __syncwarp();
  if (tile.part >= 0) {
    copy_boxes(weights + lane * R::kTileBytes, params.map + tile.part, warp * R::kBoxes, tile.row,
               full);
  }

  // The results of the block: rows of its units, in order.
  Output mine;
  const bool has_result =
      static_cast<int>(threadIdx.x) < (p.gated ? kTiles / 2 : kTiles) * kTileRows;
  if (has_result) {
    const int n = static_cast<int>(threadIdx.x) / kTileRows * (p.gated ? 2 : 1);
    const int row = static_cast<int>(threadIdx.x) % kTileRows;
    mine = find_output(p, tile_of(p, units.begin, units.end, n), row, 0);
    mine.sum = n * kTileRows + row;
  }
  const int first = warp * (128 * kQuads) + 4 * lane;
  float4 norm[kQuads];
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    norm[q] = p.norm ? load_activation4(p.norm + first + 128 * q) : make_float4(1, 1, 1, 1);
  }
  const Place place = place_of<codes>(4 * lane % S::kCols);
  const std::uint32_t store_at =
      keep(staged + ((lane / 8 * S::kProducts + place.product) * 4 + place.t) * 16);
  const std::uint32_t load_at = keep(staged + t * 16 + g % 2 * 8);
  const int row = box_row(g);
  const std::uint32_t weight_at[2] = {keep(weights + row * kBoxBytes + (t ^ row) * 16),
                                      keep(weights + row * kBoxBytes + ((t + 4) ^ row) * 16)};
  const std::uint32_t partial_at = keep(shared_address(partial + warp * kTiles * kTileRows + row));
  const std::uint32_t square_at = keep(shared_address(squares + warp));
  const float* x_at = p.in + first;
  const std::int32_t* count = p.count;

  uint4 held[R::kAhead][kTiles];
  const auto load_weights = [&](int step) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      held[step % R::kAhead][n] =
          load_shared(weight_at[step % 2] + n * R::kTileBytes + step / 2 * R::kBoxSize);
    }
  };
  // What has not arrived yet is left for later: the activations are to be converted in the
  // meantime.
  const bool early = copied(full, 0);
  if (early) {
#pragma unroll
    for (int i = 0; i < R::kAhead; ++i) load_weights(i);
  }
  keep_addresses(p, mine, first);

  wait_for_previous();
  const int live = __ldcg(count);
  const float residual = load_joining(mine.residual);
  float4 x[kQuads];
#pragma unroll
  for (int q = 0; q < kQuads; ++q) x[q] = load_activation4(x_at + 128 * q);
  float square = 0;
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    square += square_sum(x[q]);
    store_shared(store_at + q * (4 * S::kProducts * 4 * 16),
                 high_words_first(activation_words(x[q], norm[q])));
  }
  __syncwarp();
  if (!early) {
    wait_copied(full, 0);
#pragma unroll
    for (int i = 0; i < R::kAhead; ++i) load_weights(i);
  }

  // Two tiles are the 16 rows of a product, and the token's high and low parts are its even and odd
  // columns: half as many products as with weights on the other side, and the same bits.
  constexpr int kProducts = R::kSteps * S::kProducts;
  constexpr int kPairs = (kTiles + 1) / 2;
  constexpr int kWordsAhead = 4;
  uint2 words[kWordsAhead];
#pragma unroll
  for (int i = 0; i < kWordsAhead; ++i) words[i] = load_shared8(load_at + i * 64);
  float acc[kPairs][4] = {};
#pragma unroll
  for (int i = 0; i < kProducts; ++i) {
    const int step = i / S::kProducts;
    const uint2 b = words[i % kWordsAhead];
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
#pragma unroll
      for (int part = 0; part < S::kParts; ++part) {
        std::uint32_t a[4];
        const uint4* tiles_at = held[step % R::kAhead];
        operand<codes>(tiles_at[2 * n], i % S::kProducts, part, a[0], a[2]);
        constexpr int kLast = kTiles - 1;
        operand<codes>(tiles_at[2 * n + 1 < kLast ? 2 * n + 1 : kLast], i % S::kProducts, part,
                       a[1], a[3]);
        mma_bf16(acc[n], a, b.x, b.y);
      }
    }
    if (i + kWordsAhead < kProducts) {
      words[i % kWordsAhead] = load_shared8(load_at + (i + kWordsAhead) * 64);
    }
    if (i % S::kProducts == S::kProducts - 1 && step + R::kAhead < R::kSteps) {
      load_weights(step + R::kAhead);
    }
    // A stage of warp_sum() at a time, while the tensor cores are at work.
    if (i < 5) square += __shfl_xor_sync(kAllLanes, square, 16 >> i);
  }
  if (lane == 0) store_shared(square_at, square);
  if (t == 0) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      store_shared(partial_at + n * (kTileRows * 4),
                   acc[n / 2][n % 2 * 2] + acc[n / 2][n % 2 * 2 + 1]);
    }
  }
  __syncthreads();
  if (!has_result || !mine.out || live <= p.first) return;
  const float sum = add_slices(kWarps, [&](int s) { return squares[s]; });
  const float scale = p.norm ? rsqrtf(sum / static_cast<float>(p.cols) + p.eps) : 1.0F;
  store_output(p, mine, partial, kWarps, kTiles * kTileRows, kTileRows, scale, residual);
}

}  // namespace pianola::cuda::products
