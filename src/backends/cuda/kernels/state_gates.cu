// Gates that stand alone, and the norm with a gate behind a state layer.
#include "backends/cuda/kernels/device.cuh"
#include "backends/cuda/kernels/state.h"

namespace pianola::cuda {
namespace {

constexpr int kGateThreads = 256;

__device__ __forceinline__ float silu(float x) { return x / (1.0F + expf(-x)); }

// Four elements a thread, wherever rows end.
__global__ void __launch_bounds__(kGateThreads) sigmoid_gate_kernel(SigmoidGateArgs p) {
  allow_next();
  const std::int64_t count = std::int64_t{__ldcg(p.count)} * p.width;
  wait_for_previous();
  const std::int64_t at = (std::int64_t{blockIdx.x} * kGateThreads + threadIdx.x) * 4;
  if (at >= count) return;
  float x[4] = {};
  float gate[4] = {};
  const bool whole = at + 4 <= count;
  if (whole) {
    const float4 a = load_activation4(p.in + at);
    const float4 b = load_activation4(p.gate + at);
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
    gate[0] = b.x, gate[1] = b.y, gate[2] = b.z, gate[3] = b.w;
  } else {
    for (int i = 0; at + i < count && i < 4; ++i) {
      x[i] = load_activation(p.in + at + i);
      gate[i] = load_activation(p.gate + at + i);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = x[i] / (1.0F + expf(-gate[i]));
  if (whole) {
    *reinterpret_cast<float4*>(p.out + at) = make_float4(x[0], x[1], x[2], x[3]);
  } else {
    for (int i = 0; at + i < count && i < 4; ++i) p.out[at + i] = x[i];
  }
}

constexpr int kNormThreads = 256;
constexpr int kHeld = 4;           // elements that a thread keeps between its two passes
constexpr int kSmallGroup = 1024;  // that one warp norms

// What is normed, and what the result is multiplied by.
struct Gated {
  float x = 0;
  float gate = 1;
};
__device__ __forceinline__ Gated load_gated(const float* in, const float* gate, bool gate_first) {
  const float x = load_activation(in);
  const float g = silu(load_activation(gate));
  if (gate_first) return {__fmul_rn(x, g), 1.0F};
  return {x, g};
}

// kTeam threads a group: a warp, several of which share a thread block, or a whole thread block.
// The order of a sum depends on the size of the group alone.
template <int kTeam>
__global__ void __launch_bounds__(kNormThreads) gated_norm_kernel(GatedNormArgs p) {
  allow_next();
  constexpr int kTeams = kNormThreads / kTeam;
  const int groups = p.width / p.group;
  const std::int64_t item =
      std::int64_t{blockIdx.x} * kTeams + static_cast<int>(threadIdx.x) / kTeam;
  const int rank = static_cast<int>(threadIdx.x) % kTeam;
  const std::int64_t count = std::int64_t{__ldcg(p.count)} * groups;
  wait_for_previous();
  if (item >= count) return;  // a whole team
  const std::int64_t base = item * p.group;
  const float* in = p.in + base;
  const float* gate = p.gate + base;
  const float* weight = p.weight + (p.own_weights ? item % groups * p.group : 0);
  float* out = p.out + base;
  Gated held[kHeld];
  float sum = 0;
#pragma unroll
  for (int n = 0; n < kHeld; ++n) {
    const int i = n * kTeam + rank;
    if (i < p.group) held[n] = load_gated(in + i, gate + i, p.gate_first);
  }
#pragma unroll
  for (int n = 0; n < kHeld; ++n) sum = fmaf(held[n].x, held[n].x, sum);
  for (int i = kHeld * kTeam + rank; i < p.group; i += kTeam) {
    const float x = load_gated(in + i, gate + i, p.gate_first).x;
    sum = fmaf(x, x, sum);
  }
  sum = warp_sum(sum);
  if constexpr (kTeam > 32) {
    __shared__ float partial[kTeam / 32];
    if (rank % 32 == 0) partial[rank / 32] = sum;
    __syncthreads();
    sum = warp_sum(rank % 32 < kTeam / 32 ? partial[rank % 32] : 0.0F);
  }
  const float scale = 1.0F / sqrtf(sum / static_cast<float>(p.group) + p.eps);
  const auto finish = [&](int i, const Gated& v) {
    out[i] = __fmul_rn(v.x * scale * __ldg(weight + i), v.gate);
  };
#pragma unroll
  for (int n = 0; n < kHeld; ++n) {
    const int i = n * kTeam + rank;
    if (i < p.group) finish(i, held[n]);
  }
  for (int i = kHeld * kTeam + rank; i < p.group; i += kTeam) {
    finish(i, load_gated(in + i, gate + i, p.gate_first));
  }
}

unsigned blocks_of(std::int64_t items, int each) {
  return static_cast<unsigned>((items + each - 1) / each);
}

}  // namespace

void sigmoid_gate(const SigmoidGateArgs& args, const Launch& launch) {
  const std::int64_t count = std::int64_t{args.tokens} * args.width;
  launch_kernel(launch, "sigmoid_gate", sigmoid_gate_kernel,
                dim3(blocks_of(count, 4 * kGateThreads)), dim3(kGateThreads), 0, args);
}

void gated_norm(const GatedNormArgs& args, const Launch& launch) {
  const std::int64_t items = std::int64_t{args.tokens} * (args.width / args.group);
  const bool small = args.group <= kSmallGroup;
  launch_kernel(launch, "gated_norm",
                small ? gated_norm_kernel<32> : gated_norm_kernel<kNormThreads>,
                dim3(blocks_of(items, small ? kNormThreads / 32 : 1)), dim3(kNormThreads), 0, args);
}

}  // namespace pianola::cuda
