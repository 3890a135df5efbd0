// act(gate) * up where the products were separate launches, or act(up) where there is no gate.
#pragma once

#include "backends/cuda/kernels/launch.h"
#include "plan/op.h"

namespace pianola::cuda {

struct GateArgs {
  const void* gate = nullptr;        // [tokens, width]
  const void* up = nullptr;          // [tokens, width]; null: 1 in its place
  const float* gate_bias = nullptr;  // [width] or null; only of gate_bf16
  const float* up_bias = nullptr;
  void* out = nullptr;  // [tokens, width]; of gate_f32 it may be gate
  Activation activation = Activation::kSilu;
  int width = 0;  // a multiple of 8
  int tokens = 1;
};
void gate_f32(const GateArgs& args, const Launch& launch);
void gate_bf16(const GateArgs& args, const Launch& launch);  // all bfloat16

}  // namespace pianola::cuda
