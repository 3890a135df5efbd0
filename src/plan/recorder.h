// Records ops into a Plan and checks shapes as they come. Recording is pure: nothing is allocated
// on a device, launched or read from a tensor.
//
//   Recorder r(weights, caches, shape);
//   BufferId x = r.buffer("x", Extent::kTokens, 576);
//   r.record(EmbedOp{.table = table, .out = x});
//   Plan plan = r.finish();
#pragma once

#include <span>
#include <string>

#include "cache/layer_cache.h"
#include "plan/plan.h"

namespace pianola {

class Recorder {
 public:
  // `weights` and `caches` are the tables that ids point into; they outlive the recorder.
  Recorder(std::span<const WeightDecl> weights, const CacheSpecs& caches, const StepShape& shape);

  BufferId buffer(std::string name, Extent extent, std::int64_t width);

  // Throws Internal naming the op when a shape does not fit: a mistake in a model's record().
  void record(const Op& op);

  // The last op must be AdvanceOp, but of an encoder's step. The recorder is empty afterwards.
  Plan finish();

  const StepShape& shape() const { return plan_.shape; }

 private:
  void check(const RollbackOp& op) const;
  void check(const EmbedOp& op) const;
  void check(const NormOp& op) const;
  void check(const LinearOp& op) const;
  void check(const QkvOp& op) const;
  void check(const QueryOp& op) const;
  void check(const LatentQkvOp& op) const;
  void check(const HeadLinearOp& op) const;
  void check(const AttentionOp& op) const;
  void check(const ShortConvOp& op) const;
  void check(const DeltaRuleOp& op) const;
  void check(const SsmOp& op) const;
  void check(const GateOp& op) const;
  void check(const GatedNormOp& op) const;
  void check(const GatedMlpOp& op) const;
  void check(const RouteOp& op) const;
  void check(const ExpertsOp& op) const;
  void check(const LmHeadOp& op) const;
  void check(const ScoreOp& op) const;
  void check(const SampleOp& op) const;
  void check(const AdvanceOp& op) const;

  const WeightDecl& weight(WeightId id) const;
  const AttentionSpec& cache(CacheId id) const;
  const StateSpec& state(StateId id) const;
  std::int64_t width(BufferId id, Extent extent) const;
  void expect(bool condition, const char* rule) const;
  void expect_matrix(WeightId id, std::int64_t rows, std::int64_t cols) const;
  void expect_stack(WeightId id, std::int64_t experts, std::int64_t rows, std::int64_t cols) const;
  void expect_vector(WeightId id, std::int64_t size) const;
  void expect_optional_vector(WeightId id, std::int64_t size) const;
  void expect_norm(const RmsNorm& norm, std::int64_t size) const;
  void expect_rope(const Rope& rope, std::int64_t head_dim) const;

  std::span<const WeightDecl> weights_;
  CacheSpecs caches_;
  Plan plan_;
  const char* current_ = "";
};

}  // namespace pianola
