// From the ops of a Plan to launches: which kernels do an op, and what scratch they share. Nothing
// here knows whether the stream is being captured.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "backends/backend.h"
#include "backends/cuda/gemm.h"
#include "backends/cuda/kernels/attention.h"
#include "backends/cuda/kernels/launch.h"
#include "backends/cuda/kernels/linear.h"
#include "backends/cuda/kernels/state.h"
#include "backends/cuda/kernels/token.h"

namespace pianola::cuda {

// How the tokens of a Plan are computed (cache-contract.md, section 6): at most kDecodeTokens in
// one order of summation, or prompt chunks by cuBLASLt.
enum class StepClass { kDecode, kChunk };

struct CudaOptions {
  bool eager = false;            // op by op instead of a graph
  bool check_each = false;       // eager: wait for each op and name the one that failed
  bool dependent_launch = true;  // programmatic dependent launch edges
  bool batch_invariant = false;  // chunks in the order of the decode class
};

// Offsets into the scratch that a Plan's kernels share. That of attention comes first: it begins
// with counters, at the same place in every Plan, that are zero between launches and must stay so.
struct CudaScratch {
  std::size_t attention = 0;
  std::size_t linear = 0;    // of linear()
  std::size_t k = 0;         // [tokens, kv_heads * key_dim] f32
  std::size_t v = 0;         // [tokens, kv_heads * value_dim] f32
  std::size_t gate = 0;      // [tokens, ff] f32, or bf16 in the chunk class
  std::size_t up = 0;        // the same, where gate and up are products of their own
  std::size_t normed = 0;    // [tokens, widest] bf16, only in the chunk class
  std::size_t unpacked = 0;  // the largest block-format matrix in bf16, only in the chunk class
  std::size_t gemm = 0;
  std::size_t logits = 0;   // [kDecodeTokens, vocab] f32, for ScoreOp
  std::size_t rates = 0;    // [tokens, heads] StepRates, for state layers
  std::size_t experts = 0;  // of RouteOp and ExpertsOp
  std::size_t bytes = 0;
};

StepClass step_class(const Plan& plan, const CudaOptions& options);
CudaScratch plan_scratch(const Plan& plan, const PlanTables& tables, const CudaOptions& options);

class StepKernels {
 public:
  // Chooses algorithms. `library` may be null: then chunks run in the order of the decode class.
  StepKernels(const Plan& plan, const Binding& binding, const CudaOptions& options,
              const GemmLibrary* library, int multiprocessors);

  const BoundPlan& bound() const { return bound_; }
  int op_count() const { return static_cast<int>(bound_.plan().ops.size()); }

  // One round on `stream`, or the ops [first, last), each by its own kernels. In a loop, `handle`
  // is the condition of its node. A QkvOp whose AttentionOp lies in the range is finished by the
  // latter's kernel.
  void issue(cudaStream_t stream, const cudaGraphConditionalHandle* handle) const;
  void issue_ops(cudaStream_t stream, int first, int last,
                 const cudaGraphConditionalHandle* handle) const;

 private:
  struct Products {
    std::vector<Gemm> gemm;  // in the order in which the op uses them
  };

  // One matrix of a QkvOp and where its product goes.
  struct Target {
    WeightId weight;
    WeightId bias;
    float* out;
  };
  struct Targets {
    std::array<Target, 3> of;  // q, where there is one, k and v
    std::size_t count = 0;
  };
  // The products of a QkvOp: matrices of one form share one.
  struct QkvProducts {
    std::array<LinearArgs, 3> args;
    std::size_t count = 0;
  };

  Launch launch(cudaStream_t stream) const;
  void run(const EmbedOp& op, std::size_t index, const Launch& l) const;
  void run(const NormOp& op, std::size_t index, const Launch& l) const;
  void run(const LinearOp& op, std::size_t index, const Launch& l) const;
  void run(const QueryOp& op, std::size_t index, const Launch& l) const;
  void project_qkv(const QkvOp& op, std::size_t index, const Launch& l) const;
  // The products of an op in the decode class.
  QkvProducts qkv_products(const QkvOp& op) const;
  Targets qkv_targets(const QkvOp& op) const;
  LinearArgs product(const LinearOp& op) const;
  // Projections of one input that follow each other, the op at `index` the first of them: they
  // share a launch.
  std::size_t projections(std::size_t index, std::size_t last) const;
  LinearArgs gated_product(const GatedMlpOp& op) const;  // gate and up are of one form
  LinearArgs down_product(const GatedMlpOp& op) const;
  LinearArgs product(const LmHeadOp& op) const;
  // Attention: step_attention.cc. attends_with() says whether the kernel of the op behind a QkvOp
  // finishes its heads; takes_encoder_kernel() whether it is attend_encoder().
  bool attends_with(const QkvOp& qkv, std::size_t next) const;
  bool takes_encoder_kernel(const AttentionOp& op) const;
  HeadsArgs heads_args(const QkvOp& op) const;
  HeadsArgs heads_args(const QueryOp& op) const;
  // What both have: queries and rope.
  template <typename Op>
  HeadsArgs query_args(const Op& op) const;
  AttentionArgs attention_args(const AttentionOp& op) const;
  void run(const AttentionOp& op, const HeadsArgs* heads, const Launch& l) const;
  // Of latents: step_latent.cc.
  void run(const LatentQkvOp& op, std::size_t index, const Launch& l) const;
  void run(const HeadLinearOp& op, std::size_t index, const Launch& l) const;
  void run(const GatedMlpOp& op, std::size_t index, const Launch& l) const;
  // Of state layers: step_state.cc. fold_args() is what both rules of folding share.
  template <typename Op>
  FoldArgs fold_args(const Op& op, BufferId in, BufferId rate) const;
  void run(const ShortConvOp& op, std::size_t index, const Launch& l) const;
  void run(const DeltaRuleOp& op, std::size_t index, const Launch& l) const;
  void run(const SsmOp& op, std::size_t index, const Launch& l) const;
  void run(const GateOp& op, std::size_t index, const Launch& l) const;
  void run(const GatedNormOp& op, std::size_t index, const Launch& l) const;
  // Of mixtures of experts: step_experts.cc.
  void run(const RouteOp& op, std::size_t index, const Launch& l) const;
  void run(const ExpertsOp& op, std::size_t index, const Launch& l) const;
  void run_shared(const ExpertsOp& op, const Launch& l) const;
  void run(const LmHeadOp& op, std::size_t index, const Launch& l) const;
  void run(const ScoreOp& op, std::size_t index, const Launch& l) const;
  void run(const SampleOp& op, std::size_t index, const Launch& l) const;

  // A norm of all live tokens, or none when its weight is not valid.
  NormArgs norm_args(BufferId in, const RmsNorm& norm) const;
  // A product on all live tokens of `in`, [tokens, width]; its parts are to be filled in.
  LinearArgs product_args(const float* in, std::int64_t width, const RmsNorm& norm) const;
  // The same on the tokens whose logits are wanted.
  LinearArgs head_args(BufferId in, const RmsNorm& norm) const;
  // Products of up to three matrices on one input; every kDecodeTokens tokens a launch.
  void multiply(LinearArgs args, int count, const Launch& l) const;
  // The launch for tokens from `first` on; returns how many they may be.
  int multiply_tile(LinearArgs args, int first, int count, const Launch& l) const;
  // Aligned as cuBLASLt asks, which is more than a scratch is.
  std::byte* gemm_workspace() const;
  // The normed input of a product by cuBLASLt; valid until the next op.
  void* bf16_input(BufferId in, const RmsNorm& norm, const Launch& l) const;
  const void* bf16_weight(WeightId id, const Launch& l) const;
  void choose_products();

  PackedWeight packed(WeightId id) const { return packed_weight(bound_.weight(id)); }
  int tokens() const { return bound_.plan().shape.tokens; }
  int logit_rows() const { return bound_.plan().shape.logit_rows; }
  const std::int32_t* token_count() const { return &bound_.state().counts->tokens; }
  const std::int32_t* logit_count() const { return &bound_.state().counts->logit_rows; }
  template <typename T>
  T* scratch(std::size_t offset) const {
    return reinterpret_cast<T*>(bound_.scratch() + offset);
  }

  BoundPlan bound_;
  CudaOptions options_;
  const GemmLibrary* library_;
  int multiprocessors_;
  CudaScratch layout_;
  StepClass class_;
  std::vector<Products> products_;  // by op; empty in the decode class
};

}  // namespace pianola::cuda
