// A router is small and its choice must not depend on rounding: f32 throughout, no tensor cores.
// One kernel computes the scores, a few experts a block; another chooses, one warp a token.
#include "backends/cuda/kernels/route.h"

#include <algorithm>

#include "backends/cuda/kernels/device.cuh"
#include "backends/cuda/kernels/route_rank.cuh"

namespace pianola::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kRows = 4;   // experts of one block
constexpr int kQuads = 4;  // of a router's row that a thread holds: rows of up to 4096 columns
constexpr int kStride = kThreads * 4;

__device__ __forceinline__ float4 load_constant(const float* p) {
  return __ldg(reinterpret_cast<const float4*>(p));
}

// Experts on x; tokens on y, each block every gridDim.y-th one.
__global__ void __launch_bounds__(kThreads) score_kernel(RouteArgs args) {
  __shared__ float partial[2][kRows + 1][kWarps];  // of even and odd tokens
  allow_next();
  const int tid = static_cast<int>(threadIdx.x);
  const int warp = tid / 32;
  const int lane = tid % 32;
  const int first = static_cast<int>(blockIdx.x) * kRows;
  float4 held[kRows][kQuads];
  float4 norm[kQuads];
  const auto load_router = [&](int base) {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const int c = base + 4 * tid + q * kStride;
      const bool inside = c < args.width;
      norm[q] = inside && args.norm ? load_constant(args.norm + c) : make_float4(1, 1, 1, 1);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        held[i][q] =
            inside && first + i < args.experts
                ? load_constant(args.router + static_cast<std::int64_t>(first + i) * args.width + c)
                : make_float4(0, 0, 0, 0);
      }
    }
  };
  load_router(0);  // constant: on its way while the kernel before ends
  const bool whole = args.width <= kQuads * kStride;
  wait_for_previous();
  const int live = min(__ldcg(&args.state.counts->tokens), args.tokens);
  int turn = 0;
  for (int t = static_cast<int>(blockIdx.y); t < live; t += static_cast<int>(gridDim.y), ++turn) {
    const float* x_row = args.in + static_cast<std::int64_t>(t) * args.width;
    float sum[kRows] = {};
    float squares = 0;
    for (int base = 0; base < args.width; base += kQuads * kStride) {
      if (!whole) load_router(base);
      float4 x[kQuads];
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        const int c = base + 4 * tid + q * kStride;
        x[q] = c < args.width ? load_activation4(x_row + c) : make_float4(0, 0, 0, 0);
      }
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        const float values[4] = {x[q].x, x[q].y, x[q].z, x[q].w};
        const float norms[4] = {norm[q].x, norm[q].y, norm[q].z, norm[q].w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          squares = __fmaf_rn(values[k], values[k], squares);
          const float v = __fmul_rn(values[k], norms[k]);
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            const float w[4] = {held[i][q].x, held[i][q].y, held[i][q].z, held[i][q].w};
            sum[i] = __fmaf_rn(v, w[k], sum[i]);
          }
        }
      }
    }
    float(&mine)[kRows + 1][kWarps] = partial[turn & 1];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      sum[i] = warp_sum(sum[i]);
      if (lane == 0) mine[i][warp] = sum[i];
    }
    squares = warp_sum(squares);
    if (lane == 0) mine[kRows][warp] = squares;
    __syncthreads();
    if (tid < kRows && first + tid < args.experts) {
      float score = 0;
      float total = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        score += mine[tid][w];
        total += mine[kRows][w];
      }
      if (args.norm) {
        score = __fmul_rn(score, 1.0F / sqrtf(total / static_cast<float>(args.width) + args.eps));
      }
      if (args.bias) score += __ldg(args.bias + first + tid);
      args.scores[static_cast<std::int64_t>(t) * args.experts + first + tid] = score;
    }
  }
}

// One warp a token.
__global__ void __launch_bounds__(32) choose_kernel(RouteArgs args) {
  extern __shared__ float scores[];  // [experts]
  allow_next();
  const int t = static_cast<int>(blockIdx.x);
  const int lane = static_cast<int>(threadIdx.x);
  wait_for_previous();
  if (t >= __ldcg(&args.state.counts->tokens)) return;
  float* ids = args.out + static_cast<std::int64_t>(t) * 2 * args.top_k;
  float* weights = ids + args.top_k;
  if (__ldcg(args.state.position + t) < 0) {
    for (int r = lane; r < args.top_k; r += 32) {
      ids[r] = -1;
      weights[r] = 0;
    }
    return;
  }
  const float* from = args.scores + static_cast<std::int64_t>(t) * args.experts;
  for (int e = lane; e < args.experts; e += 32) scores[e] = load_activation(from + e);
  __syncwarp();

  float largest = 0;  // the first choice's score
  float chosen_total = 0;
  float last_key = 0;
  int last = -1;
  for (int rank = 0; rank < args.top_k; ++rank) {
    // The best of those behind the last one, of this lane and then of all.
    float best_key = 0;
    int best = args.experts;
    for (int e = lane; e < args.experts; e += 32) {
      const float key = rank_key(scores[e]);
      const bool behind = rank == 0 || before(last_key, last, key, e);
      if (behind && (best == args.experts || before(key, e, best_key, best))) {
        best_key = key;
        best = e;
      }
    }
#pragma unroll
    for (int offset = 16; offset; offset >>= 1) {
      const float key = __shfl_xor_sync(kAllLanes, best_key, offset);
      const int e = __shfl_xor_sync(kAllLanes, best, offset);
      if (e < args.experts && (best == args.experts || before(key, e, best_key, best))) {
        best_key = key;
        best = e;
      }
    }
    last_key = best_key;
    last = best;
    const float score = scores[best];
    if (rank == 0) largest = score;
    if (lane == 0) ids[rank] = static_cast<float>(best);
    if (args.score == RouteScore::kSigmoid) {
      if (lane == 0) weights[rank] = 1.0F / (1.0F + expf(-score));
    } else {
      const float power = expf(score - largest);
      chosen_total += power;
      // Divided below, by the same lane.
      if (lane == 0) weights[rank] = power;
    }
  }
  if (args.score == RouteScore::kSigmoid) return;
  float total = chosen_total;
  if (args.score == RouteScore::kSoftmax) {
    total = 0;
    for (int e = lane; e < args.experts; e += 32) total += expf(scores[e] - largest);
    total = warp_sum(total);
  }
  if (lane == 0) {
    for (int r = 0; r < args.top_k; ++r) weights[r] = weights[r] / total;
  }
}

}  // namespace

void route(const RouteArgs& args, const Launch& launch, const RouteChoice& choice) {
  require(args.width % 4 == 0 && args.experts <= kMostExperts, "route: a router without a kernel");
  const int blocks = (args.experts + kRows - 1) / kRows;
  const int rows = std::clamp(2 * launch.sms / blocks, 1, args.tokens);
  launch_kernel(launch, "route scores", score_kernel,
                dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(rows)), dim3(kThreads), 0,
                args);
  Launch next = launch;
  next.dependent = launch.dependent_inside;
  if (!choice.plain(args.score)) return choose_among_groups(args, choice, next);
  launch_kernel(next, "route", choose_kernel, dim3(static_cast<unsigned>(args.tokens)), dim3(32),
                static_cast<std::size_t>(args.experts) * sizeof(float), args);
}

}  // namespace pianola::cuda
