// The kernels of state layers: one token folded into one head's state, and one token of a short
// convolution.
//
//   const StateKernels& k = state_kernels(detect_isa());
//   k.fold(from, step, 128, 128, true, to, out);
//
// A result depends on its inputs and on the Isa, bit for bit, and on nothing else.
#pragma once

#include "backends/cpu/isa.h"
#include "backends/state_walk.h"

namespace pianola::cpu {

struct StateKernels {
  // to = decay * from + k u', where u = strength * v, or with `delta` strength * (v - (decay *
  // from)' k); out = to' q when the step has a query. `from` is [key_dim, value_dim], null for
  // zeros, and may be `to`.
  void (*fold)(const float* from, const StateStep& step, int key_dim, int value_dim, bool delta,
               float* to, float* out) = nullptr;
  // out[c] = sum over j < taps of weight[j * stride + c] * x[j][c], plus bias; then silu when
  // asked. A null x[j] counts as zeros, a null bias as well.
  void (*conv)(const float* const* x, const float* weight, std::ptrdiff_t stride, int taps,
               const float* bias, bool silu, int n, float* out) = nullptr;
};

const StateKernels& state_kernels(Isa isa);

const StateKernels& state_portable();
const StateKernels& state_avx2();
const StateKernels& state_avx512();

}  // namespace pianola::cpu
