// The ends of a step: from token ids to activations, and from logits to tokens.
#pragma once

#include "backends/cuda/kernels/launch.h"
#include "backends/cuda/kernels/packed_weight.h"
#include "plan/step_state.h"

namespace pianola::cuda {

struct EmbedArgs {
  PackedWeight table;  // [vocab, width]
  float scale = 1;
  float* out = nullptr;  // [tokens, width]
  StepState state;
  int tokens = 1;           // of the bucket
  bool rolls_back = false;  // RollbackOp as well, in a thread block of its own
};
// out[t] = table[token[t]] * scale of live tokens; 0 for a masked one (or its embedding, when it is
// this kernel that masks it).
void embed(const EmbedArgs& args, const Launch& launch);

struct NormArgs {
  const float* in = nullptr;  // [tokens, width]
  const float* weight = nullptr;
  float eps = 0;
  const float* residual = nullptr;  // [tokens, width], added behind the norm, or null
  float* out = nullptr;             // [tokens, width]; may be `in` or `residual`
  int width = 0;
  const std::int32_t* count = nullptr;   // [1]
  const std::int32_t* gather = nullptr;  // [count] input row of each token, or null
  int tokens = 1;
};
void rms_norm(const NormArgs& args, const Launch& launch);
// The same to bfloat16 [tokens, width], for cuBLASLt, without a residual; weight null: only
// converts. Rows beyond the live tokens become 0.
void rms_norm_bf16(const NormArgs& args, void* out, const Launch& launch);

struct SampleArgs {
  const float* logits = nullptr;  // [logit_rows, vocab]
  int vocab = 0;
  StepState state;
  int logit_rows = 1;  // of the bucket
};
// sampled[r] and logprob[r], as SampleOp says.
void sample(const SampleArgs& args, const Launch& launch);

// logprob[r] of target[r] from logits of rows [first, first + rows) of the step's logit rows.
struct TargetArgs {
  const float* logits = nullptr;  // [rows, vocab] of this tile
  int vocab = 0;
  StepState state;
  int first = 0;
  int rows = 1;
};
void target_logprob(const TargetArgs& args, const Launch& launch);

// AdvanceOp. In a loop, `handle` is the condition of its WHILE node and `loop` is true: the kernel
// sets it to whether another round follows (state.control).
struct AdvanceArgs {
  StepState state;
  bool samples = true;  // false: a step that only moves lengths
  bool loop = false;
  cudaGraphConditionalHandle handle = 0;
};
void advance(const AdvanceArgs& args, const Launch& launch);

}  // namespace pianola::cuda
