#include "backends/cuda/kernels/activation.cuh"
#include "backends/cuda/kernels/device.cuh"
#include "backends/cuda/kernels/gate.h"

namespace pianola::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    gate_f32_kernel(const float4* gate, const float4* up, float4* out, Activation act,
                    std::int64_t count) {
  allow_next();
  wait_for_previous();
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  const float4 g = __ldcg(gate + i);
  const float4 u = up ? __ldcg(up + i) : make_float4(1, 1, 1, 1);
  out[i] = make_float4(activate_any(act, g.x, u.x), activate_any(act, g.y, u.y),
                       activate_any(act, g.z, u.z), activate_any(act, g.w, u.w));
}

__global__ void __launch_bounds__(kThreads)
    gate_bf16_kernel(const uint4* gate, const uint4* up, const float* gate_bias,
                     const float* up_bias, uint4* out, Activation act, int width,
                     std::int64_t count) {
  allow_next();
  wait_for_previous();
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  const uint4 g4 = __ldcg(gate + i);
  constexpr std::uint32_t kOnes = 0x3f803f80U;
  const uint4 u4 = up ? __ldcg(up + i) : make_uint4(kOnes, kOnes, kOnes, kOnes);
  const std::uint32_t g[4] = {g4.x, g4.y, g4.z, g4.w};
  const std::uint32_t u[4] = {u4.x, u4.y, u4.z, u4.w};
  std::uint32_t o[4];
  const int column = static_cast<int>(i * 8 % width);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    float g0 = bf16_low(g[k]);
    float g1 = bf16_high(g[k]);
    float u0 = bf16_low(u[k]);
    float u1 = bf16_high(u[k]);
    if (gate_bias)
      g0 += __ldg(gate_bias + column + 2 * k), g1 += __ldg(gate_bias + column + 2 * k + 1);
    if (up_bias) u0 += __ldg(up_bias + column + 2 * k), u1 += __ldg(up_bias + column + 2 * k + 1);
    o[k] = pack_bf16(activate_any(act, g0, u0), activate_any(act, g1, u1));
  }
  out[i] = make_uint4(o[0], o[1], o[2], o[3]);
}

}  // namespace

void gate_f32(const GateArgs& args, const Launch& launch) {
  const std::int64_t count = static_cast<std::int64_t>(args.tokens) * args.width / 4;
  launch_kernel(launch, "gate_f32", gate_f32_kernel,
                dim3(static_cast<unsigned>((count + kThreads - 1) / kThreads)), dim3(kThreads), 0,
                static_cast<const float4*>(args.gate), static_cast<const float4*>(args.up),
                static_cast<float4*>(args.out), args.activation, count);
}

void gate_bf16(const GateArgs& args, const Launch& launch) {
  const std::int64_t count = static_cast<std::int64_t>(args.tokens) * args.width / 8;
  launch_kernel(launch, "gate_bf16", gate_bf16_kernel,
                dim3(static_cast<unsigned>((count + kThreads - 1) / kThreads)), dim3(kThreads), 0,
                static_cast<const uint4*>(args.gate), static_cast<const uint4*>(args.up),
                args.gate_bias, args.up_bias, static_cast<uint4*>(args.out), args.activation,
                args.width, count);
}

}  // namespace pianola::cuda
