// Around the products of experts: routes sorted by expert, activations prepared, results added up.
#include <algorithm>

#include "backends/cuda/kernels/activation.cuh"
#include "backends/cuda/kernels/experts_forms.h"
#include "backends/cuda/kernels/experts_math.cuh"
#include "backends/cuda/kernels/linear_operand.cuh"

namespace pianola::cuda {
namespace products {
namespace {

constexpr int kOrderThreads = 512;
constexpr int kNoExpert = 0xffff;

struct OrderParams {
  ExpertOrder o;
  int steps = 0;
  int slices = 1;
  int step_cols = 0;
};

__device__ __forceinline__ int live_of(const std::int32_t* count, int first, int tokens) {
  return max(0, min(__ldcg(count) - first, tokens));
}

// One token, by as many warps as there are slices, in the order that every route shares.
__device__ __forceinline__ void prepare_token(const OrderParams& p, int token, float* squares) {
  const ExpertOrder& o = p.o;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int slice = min(warp, p.slices - 1);
  const int begin = slice_begin(p.steps, p.slices, slice) * p.step_cols;
  const int end = slice_begin(p.steps, p.slices, slice + 1) * p.step_cols;
  float4 norm[kHeld];
  load_norm(o.norm, o.cols, begin, end, lane, norm);
  wait_for_previous();
  if (token >= live_of(o.count, o.first, o.tokens)) return;
  if (warp < p.slices) {
    // The form of the weights does not change how a slice is converted.
    const float square = convert_slice<Codes::kBF16>(
        o.norm, o.cols, o.in + static_cast<std::int64_t>(token) * o.cols, begin, end, norm, lane,
        [&](int c, const uint4& words) {
          if (c < o.cols) o.words[static_cast<std::int64_t>(token) * (o.cols / 4) + c / 4] = words;
        });
    if (lane == 0) squares[warp] = square;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    const float sum = add_slices(p.slices, [&](int s) { return squares[s]; });
    o.inverse_rms[token] = rsqrtf(sum / static_cast<float>(o.cols) + o.eps);
  }
}

__device__ __forceinline__ int scan_lanes(int v, int lane) {
#pragma unroll
  for (int offset = 1; offset < 32; offset <<= 1) {
    const int other = __shfl_up_sync(kAllLanes, v, offset);
    if (lane >= offset) v += other;
  }
  return v;
}

// A counting sort that keeps routes of one expert in the order of their tokens.
__device__ __forceinline__ void sort_routes(const ExpertOrder& o, int* places,
                                            std::uint16_t* expert_of) {
  const int tid = static_cast<int>(threadIdx.x);
  for (int e = tid; e < o.experts; e += kOrderThreads) places[e] = 0;
  wait_for_previous();
  const int routes = live_of(o.count, o.first, o.tokens) * o.top_k;
  __syncthreads();
  for (int i = tid; i < routes; i += kOrderThreads) {
    const int token = i / o.top_k;
    const int e = static_cast<int>(
        load_activation(o.routing + static_cast<std::int64_t>(token) * o.top_k + i));
    const bool is = e >= 0 && e < o.experts;
    expert_of[i] = static_cast<std::uint16_t>(is ? e : kNoExpert);
    if (is) atomicAdd(places + e, 1);
  }
  __syncthreads();
  if (tid >= 32) return;

  const int lane = tid;
  int first = 0;
  int segments = 0;
  for (int base = 0; base < o.experts; base += 32) {
    const int e = base + lane;
    const int count = e < o.experts ? places[e] : 0;
    const int pieces = (count + o.segment_routes - 1) / o.segment_routes;
    const int count_end = scan_lanes(count, lane);
    const int piece_end = scan_lanes(pieces, lane);
    const int begin = first + count_end - count;
    for (int k = 0; k < pieces; ++k) {
      const int skip = k * o.segment_routes;
      reinterpret_cast<int4*>(o.segments)[segments + piece_end - pieces + k] =
          make_int4(e, begin + skip, min(o.segment_routes, count - skip), 0);
    }
    if (e < o.experts) places[e] = begin;
    first += __shfl_sync(kAllLanes, count_end, 31);
    segments += __shfl_sync(kAllLanes, piece_end, 31);
  }
  if (lane == 0) *o.segment_count = segments;
  __syncwarp();
  for (int base = 0; base < routes; base += 32) {
    const int i = base + lane;
    const int e = i < routes ? expert_of[i] : kNoExpert;
    const unsigned alike = __match_any_sync(kAllLanes, e);
    const int before = __popc(alike & ((1U << lane) - 1));
    const int place = e == kNoExpert ? 0 : places[e];
    __syncwarp();
    if (e != kNoExpert) {
      o.routes[place + before] = i;
      if (before == 0) places[e] = place + __popc(alike);
    }
    __syncwarp();
  }
}

// A block a token, and one that sorts.
__global__ void __launch_bounds__(kOrderThreads) order_kernel(const OrderParams p) {
  extern __shared__ int places[];  // [experts], then the expert of each route
  __shared__ float squares[kWarps];
  allow_next();
  const int block = static_cast<int>(blockIdx.x);
  if (block == 0) {
    sort_routes(p.o, places, reinterpret_cast<std::uint16_t*>(places + p.o.experts));
  } else {
    prepare_token(p, block - 1, squares);
  }
}

constexpr int kThreadsEach = 256;

// Columns on x, routes on y.
__global__ void __launch_bounds__(kThreadsEach) activate_kernel(const ActivateArgs a) {
  allow_next();
  wait_for_previous();
  const int route = static_cast<int>(blockIdx.y);
  const int c = static_cast<int>(blockIdx.x * kThreadsEach + threadIdx.x);
  const int token = route / a.top_k;
  if (token >= live_of(a.count, a.first, a.tokens) || c >= a.width) return;
  if (load_activation(a.routing + static_cast<std::int64_t>(token) * a.top_k + route) < 0) return;
  const std::int64_t at = static_cast<std::int64_t>(route) * a.width + c;
  store_hidden(a.hidden, route, a.width, c,
               activate(a.activation, load_activation(a.gate + at), load_activation(a.up + at)));
}

// Columns on x, tokens on y.
__global__ void __launch_bounds__(kThreadsEach) sum_kernel(const SumArgs a) {
  allow_next();
  wait_for_previous();
  const int t = static_cast<int>(blockIdx.y);
  const int c = static_cast<int>(blockIdx.x * kThreadsEach + threadIdx.x) * 4;
  if (t >= live_of(a.count, a.first, a.tokens) || c >= a.width) return;
  const float* experts = a.routing + static_cast<std::int64_t>(t) * 2 * a.top_k;
  const std::int64_t at = static_cast<std::int64_t>(t) * a.width + c;
  const float4 residual = a.residual ? load_activation4(a.residual + at) : make_float4(0, 0, 0, 0);
  ExpertSum sum[4];
  for (int r = 0; r < a.top_k; ++r) {
    if (load_activation(experts + r) < 0) continue;
    const float weight = load_activation(experts + a.top_k + r);
    const float4 y =
        load_activation4(a.parts + (static_cast<std::int64_t>(t) * a.top_k + r) * a.width + c);
    sum[0].add(weight, y.x);
    sum[1].add(weight, y.y);
    sum[2].add(weight, y.z);
    sum[3].add(weight, y.w);
  }
  *reinterpret_cast<float4*>(a.out + at) =
      make_float4(sum[0].plus(residual.x), sum[1].plus(residual.y), sum[2].plus(residual.z),
                  sum[3].plus(residual.w));
}

unsigned blocks_of(int n, int each) { return static_cast<unsigned>((n + each - 1) / each); }

int step_cols_of(Codes codes) {
  switch (codes) {
    case Codes::kF32:
      return Step<Codes::kF32>::kCols;
    case Codes::kF16:
    case Codes::kBF16:
      return Step<Codes::kBF16>::kCols;
    case Codes::kInt4:
      return Step<Codes::kInt4>::kCols;
    case Codes::kInt8:
      return Step<Codes::kInt8>::kCols;
  }
  return 1;
}

}  // namespace

void order_experts(const ExpertOrder& order, Codes codes, const Launch& launch) {
  OrderParams p{.o = order, .step_cols = step_cols_of(codes)};
  p.steps = (order.cols + p.step_cols - 1) / p.step_cols;
  p.slices = slices_of(p.steps);
  require(order.experts < kNoExpert, "experts: more of them than can be sorted");
  const std::size_t bytes =
      static_cast<std::size_t>(order.experts) * sizeof(int) +
      static_cast<std::size_t>(order.tokens) * static_cast<std::size_t>(order.top_k) * 2;
  launch_kernel(launch, "order of experts", order_kernel,
                dim3(static_cast<unsigned>(order.tokens) + 1), dim3(kOrderThreads), bytes, p);
}

void activate_experts(const ActivateArgs& args, const Launch& launch) {
  const dim3 grid(blocks_of(args.width, kThreadsEach),
                  static_cast<unsigned>(args.tokens * args.top_k));
  launch_kernel(launch, "activate experts", activate_kernel, grid, dim3(kThreadsEach), 0, args);
}

}  // namespace products

void sum_experts(const SumArgs& args, const Launch& launch) {
  const dim3 grid(products::blocks_of(args.width / 4, products::kThreadsEach),
                  static_cast<unsigned>(args.tokens));
  launch_kernel(launch, "sum of experts", products::sum_kernel, grid, dim3(products::kThreadsEach),
                0, args);
}

}  // namespace pianola::cuda
