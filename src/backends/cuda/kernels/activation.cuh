// What joins a gate and an up value, by the formulas of op.h. Every operation that a compiler could
// fuse with another is spelled out: the bits do not depend on the kernel.
#pragma once

#include "plan/op.h"

namespace pianola::cuda {

__device__ __forceinline__ float silu(float x) { return x / (1.0F + __expf(-x)); }

// gelu by tanh is x / (1 + e^-2u) with u = sqrt(2 / pi) (x + 0.044715 x³).
__device__ __forceinline__ float gelu_tanh(float x) {
  constexpr float kLinear = -1.5957691F;  // -2 sqrt(2 / pi)
  constexpr float kCubic = -0.071354814F;
  const float exponent = __fmul_rn(x, __fmaf_rn(__fmul_rn(x, x), kCubic, kLinear));
  return x / (1.0F + __expf(exponent));
}

__device__ __forceinline__ float clamped_swish(float gate, float up) {
  // Comparisons that let a NaN through.
  constexpr float kLimit = 7.0F;
  const float g = gate > kLimit ? kLimit : gate;
  const float u = up > kLimit ? kLimit : up < -kLimit ? -kLimit : up;
  const float swish = g / (1.0F + __expf(__fmul_rn(g, -1.702F)));
  return __fmul_rn(swish, __fadd_rn(u, 1.0F));
}

// act(gate) * up; with kClampedSwish u' + 1 takes the place of up. Not of kRelu.
__device__ __forceinline__ float activate(Activation activation, float gate, float up) {
  if (activation == Activation::kGeluTanh) return __fmul_rn(gelu_tanh(gate), up);
  if (activation == Activation::kClampedSwish) return clamped_swish(gate, up);
  return __fmul_rn(silu(gate), up);
}

// The same of every activation, for the kernel that does nothing else.
__device__ __forceinline__ float activate_any(Activation activation, float gate, float up) {
  if (activation == Activation::kRelu) return __fmul_rn(gate < 0 ? 0.0F : gate, up);  // NaN passes
  return activate(activation, gate, up);
}

}  // namespace pianola::cuda
