// The small operations of the CPU backend, vectorised: RMS norm, rope, silu gates, softmax sums,
// argmax, additions and conversions. Each works on rows it is given, so that callers choose how
// rows are spread over workers.
//
//   const Elementwise& f = elementwise(detect_isa());
//   f.rms_norm(x, weight, 1e-5F, 576, y);                  // y may be x
//   f.gate(gate, up, 1536, gate);                          // silu(gate) * up
//
// A result depends on the row it is computed from and on the Isa, bit for bit, and on nothing else.
// NaN in a row makes what depends on it NaN. Any length from 1 on is taken; pointers need no
// alignment.
#pragma once

#include <cstdint>

#include "backends/cpu/isa.h"
#include "tensor/dtype.h"

namespace pianola::cpu {

struct MaxElement {
  int index = 0;  // the lowest one of the largest elements
  float value = 0;
};

struct Elementwise {
  // y = x / sqrt(mean(x²) + eps) * weight
  void (*rms_norm)(const float* x, const float* weight, float eps, int n, float* y) = nullptr;
  // y += x
  void (*add)(const float* x, int n, float* y) = nullptr;
  // y += x * factor
  void (*add_scaled)(const float* x, float factor, int n, float* y) = nullptr;
  // y = act(gate) * up: silu, gelu by tanh, and the clamped swish of op.h
  void (*gate)(const float* gate, const float* up, int n, float* y) = nullptr;
  void (*gate_gelu)(const float* gate, const float* up, int n, float* y) = nullptr;
  // y = x * sigmoid(gate)
  void (*gate_sigmoid)(const float* gate, const float* x, int n, float* y) = nullptr;
  void (*gate_clamped)(const float* gate, const float* up, int n, float* y) = nullptr;
  // y = max(gate, 0) * up
  void (*gate_relu)(const float* gate, const float* up, int n, float* y) = nullptr;
  // y = x * factor
  void (*scale)(const float* x, float factor, int n, float* y) = nullptr;

  // Rotates the first 2 * half elements of each of `heads` heads, head_dim apart: pairs
  // (i, i + half), or (2i, 2i + 1). cosines and sines [half] are of one token (rope.h).
  void (*rope_halves)(const float* cosines, const float* sines, int half, int heads, int head_dim,
                      float* x) = nullptr;
  void (*rope_pairs)(const float* cosines, const float* sines, int half, int heads, int head_dim,
                     float* x) = nullptr;

  // The sum of e^(x - offset), in blocks that are joined in double precision.
  double (*sum_exp)(const float* x, float offset, int n) = nullptr;
  // y = e^(x - offset) * factor
  void (*exp)(const float* x, float offset, float factor, int n, float* y) = nullptr;
  // The first NaN, if there is one; otherwise the first of the largest.
  MaxElement (*max_element)(const float* x, int n) = nullptr;

  // To and from F32, F16 (rounded to even, as the hardware does) and BF16 (the same; NaN stays
  // NaN).
  void (*to_f32)(DType from, const void* x, int n, float* y) = nullptr;
  void (*from_f32)(DType to, const float* x, int n, void* y) = nullptr;
};

const Elementwise& elementwise(Isa isa);

// log(softmax(x))[index], and softmax(x) to y, which may be x. NaN or +inf in x gives NaN.
double log_softmax_at(const Elementwise& f, const float* x, int n, int index);
void softmax(const Elementwise& f, const float* x, int n, float* y);

}  // namespace pianola::cpu
