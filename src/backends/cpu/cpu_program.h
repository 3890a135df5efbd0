// A Plan on the CPU: a flat program that every worker walks from the first op to the last, meeting
// the others at a barrier where one op's output is another worker's input.
#pragma once

#include <map>
#include <vector>

#include "backends/backend.h"
#include "backends/cpu/cpu_scratch.h"
#include "backends/cpu/expert_groups.h"
#include "backends/cpu/isa.h"
#include "backends/cpu/kernels/attention.h"
#include "backends/cpu/kernels/elementwise.h"
#include "backends/cpu/kernels/linear.h"
#include "backends/cpu/kernels/state.h"
#include "backends/reference/ops.h"
#include "base/thread_pool.h"

namespace pianola::cpu {

class CpuProgram final : public Program {
 public:
  CpuProgram(const Plan& plan, const Binding& binding, Isa isa, ThreadPool& pool);

  void replay() override { replay_ops(0, bound_.plan().ops.size()); }
  void replay_ops(std::size_t first, std::size_t last) override;
  void begin(int max_rounds) override { rounds_.begin(bound_.state(), max_rounds); }
  std::optional<RunResult> wait() override { return rounds_.next(*this, bound_.state()); }
  void stop() override { *bound_.state().yield = 1; }
  std::uint64_t address_certificate() const override { return bound_.address_certificate(); }

 private:
  // One worker's place in the pool.
  struct Worker {
    int index = 0;
    int count = 1;
  };
  struct Range {
    int begin = 0;
    int end = 0;
  };
  // Prepared activations by ActivationKind; null for a kind that nobody asked for.
  struct Prepared {
    std::array<const void*, 3> of_kind = {};
    int tokens = 0;
  };

  using Gate = void (*)(const float* gate, const float* up, int n, float* y);

  void begin_step(Worker w);
  void execute(const RollbackOp&, Worker) {}  // replay() has done it
  void execute(const EmbedOp& op, Worker w);
  void execute(const NormOp& op, Worker w);
  void execute(const LinearOp& op, Worker w);
  void execute(const QkvOp& op, Worker w);
  void execute(const QueryOp& op, Worker w);
  void execute(const LatentQkvOp& op, Worker w);
  void execute(const HeadLinearOp& op, Worker w);
  void execute(const AttentionOp& op, Worker w);
  void execute(const ShortConvOp& op, Worker w);
  void execute(const DeltaRuleOp& op, Worker w);
  void execute(const SsmOp& op, Worker w);
  void execute(const GateOp& op, Worker w);
  void execute(const GatedNormOp& op, Worker w);
  void execute(const GatedMlpOp& op, Worker w);
  void execute(const RouteOp& op, Worker w);
  void execute(const ExpertsOp& op, Worker w);
  void execute(const LmHeadOp& op, Worker w);
  void execute(const ScoreOp& op, Worker w);
  void execute(const SampleOp& op, Worker w);
  void execute(const AdvanceOp& op, Worker w);

  // Normalises (when `norm` is not null) and prepares `tokens` rows of `cols` floats, row(i) each,
  // for every matrix of `readers`. Small steps are prepared by each worker for itself; larger ones
  // are shared, and end with a barrier.
  template <typename Row>
  Prepared prepare(Worker w, int tokens, int cols, Row row, const RmsNorm* norm,
                   std::initializer_list<WeightId> readers);
  // Rows [range) of y = W x for all prepared tokens.
  void multiply(Worker w, WeightId weight, const Prepared& x, Range rows, float* y,
                std::int64_t ldy, LinearWrite write = LinearWrite::kStore);
  // This worker's rows of out = W x + bias + residual.
  void project(Worker w, WeightId weight, WeightId bias, const Prepared& x, const float* residual,
               float* out);
  // Every head of every lane of a state layer, shared out: prepare(t, head, step) as in
  // walk_states(), and finish(t, head, out) behind the output of a token's head.
  template <typename Prepare, typename Finish>
  void fold_heads(StateId id, BufferId out, bool delta, Worker w, Prepare prepare, Finish finish);

  // The parts of ExpertsOp (cpu_experts.cc). Hidden values and outputs are [routes, ...], each
  // group of routes together; prepared activations lie by slot.
  void prepare_expert_inputs(const ExpertsOp& op, const ExpertGroups& groups, Worker w);
  void gate_experts(const ExpertsOp& op, const ExpertGroups& groups, Worker w);
  void prepare_expert_hidden(const ExpertsOp& op, const ExpertGroups& groups, Worker w);
  void add_experts(const ExpertsOp& op, const ExpertGroups& groups, Worker w);
  std::byte* expert_activations(WeightId reader, const ExpertGroup& group) const;
  // Rows of y = W[expert] x + bias for the routes of a group.
  void multiply_group(Worker w, WeightId stack, WeightId bias, const ExpertGroup& group, Range rows,
                      float* y);
  // Heads of `dim` side by side, [T, width], that have been multiplied.
  struct Heads {
    float* x = nullptr;
    int width = 0;
    WeightId bias;
    std::optional<RmsNorm> norm;
    bool rotate = false;
  };
  // Heads of all tokens: token t's head h begins at data + t * token_stride + h * head_stride.
  struct HeadRows {
    float* data = nullptr;
    std::int64_t token_stride = 0;
    std::int64_t head_stride = 0;
  };
  // This worker's rows of out[t, h] = W[h] in[t, h].
  void multiply_heads(Worker w, WeightId stack, const HeadRows& in, const HeadRows& out);
  // Bias, norm and rope of the heads of the tokens in `range`.
  void finish_heads(std::span<const Heads> parts, const Rope& rope, int dim, Range range);

  // The place of a rope among ropes_, or behind them; and its table, [T, 2, half].
  int rope_index(const Rope& rope) const;
  float* rope_rows(const Rope& rope) const;
  PackedWeight packed(WeightId id, int expert = 0) const;
  Gate gate_of(Activation activation) const;
  KvCache kv_cache(CacheId id) const;
  // [T] the slot of each token in a cache.
  const std::int32_t* slots_of(CacheId id) const;
  AttentionArgs attention_args(const AttentionOp& op) const;
  int tokens() const { return bound_.state().counts->tokens; }
  template <typename T>
  T* scratch(std::size_t offset) const {
    return reinterpret_cast<T*>(bound_.scratch() + offset);
  }
  static Range share(int n, Worker w);

  BoundPlan bound_;
  reference::HostRounds rounds_;
  Isa isa_;
  const Elementwise& f_;
  const StateKernels& states_;
  ThreadPool& pool_;
  CpuScratch layout_;
  int widest_ = 0;                  // floats of one row of `normed`
  std::vector<const Rope*> ropes_;  // of different frequencies: a table each
  bool has_inputs_ = false;         // some cache is not of the rows' own tokens
  // By op of the Plan that has a relative bias: the bucket of each offset.
  std::map<const AttentionOp*, std::vector<std::int32_t>> buckets_;
};

}  // namespace pianola::cpu
