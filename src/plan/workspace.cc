#include "plan/workspace.h"

#include <algorithm>
#include <numeric>

#include "tensor/arena.h"

namespace pianola {
namespace {

struct BuffersOf {
  std::vector<BufferId> operator()(const RollbackOp&) const { return {}; }
  std::vector<BufferId> operator()(const EmbedOp& o) const { return {o.out}; }
  std::vector<BufferId> operator()(const NormOp& o) const { return {o.in, o.out}; }
  std::vector<BufferId> operator()(const LinearOp& o) const { return {o.in, o.residual, o.out}; }
  std::vector<BufferId> operator()(const QkvOp& o) const { return {o.in, o.q_out}; }
  std::vector<BufferId> operator()(const QueryOp& o) const { return {o.in, o.q_out}; }
  std::vector<BufferId> operator()(const LatentQkvOp& o) const { return {o.q, o.kv, o.q_out}; }
  std::vector<BufferId> operator()(const HeadLinearOp& o) const { return {o.in, o.out}; }
  std::vector<BufferId> operator()(const AttentionOp& o) const { return {o.q, o.out}; }
  std::vector<BufferId> operator()(const ShortConvOp& o) const { return {o.in, o.out}; }
  std::vector<BufferId> operator()(const DeltaRuleOp& o) const {
    return {o.qkv, o.decay, o.beta, o.out};
  }
  std::vector<BufferId> operator()(const SsmOp& o) const { return {o.xbc, o.dt, o.out}; }
  std::vector<BufferId> operator()(const GateOp& o) const { return {o.in, o.gate, o.out}; }
  std::vector<BufferId> operator()(const GatedNormOp& o) const { return {o.in, o.gate, o.out}; }
  std::vector<BufferId> operator()(const GatedMlpOp& o) const { return {o.in, o.residual, o.out}; }
  std::vector<BufferId> operator()(const RouteOp& o) const { return {o.in, o.out}; }
  std::vector<BufferId> operator()(const ExpertsOp& o) const {
    return {o.in, o.routing, o.residual, o.out};
  }
  std::vector<BufferId> operator()(const LmHeadOp& o) const { return {o.in, o.logits}; }
  std::vector<BufferId> operator()(const ScoreOp& o) const { return {o.in}; }
  std::vector<BufferId> operator()(const SampleOp& o) const { return {o.logits}; }
  std::vector<BufferId> operator()(const AdvanceOp&) const { return {}; }
};

struct Interval {
  std::size_t first = SIZE_MAX;  // op index
  std::size_t last = 0;
  std::size_t bytes = 0;

  bool overlaps(const Interval& other) const { return first <= other.last && other.first <= last; }
};

}  // namespace

WorkspacePlan plan_workspace(const Plan& plan) {
  std::vector<Interval> intervals(plan.buffers.size());
  for (std::size_t i = 0; i < plan.ops.size(); ++i) {
    for (const BufferId id : std::visit(BuffersOf{}, plan.ops[i])) {
      if (!id.valid()) continue;
      Interval& interval = intervals[static_cast<std::size_t>(id.index)];
      interval.first = std::min(interval.first, i);
      interval.last = std::max(interval.last, i);
      interval.bytes =
          (plan.bytes(id) + Arena::kAlignment - 1) / Arena::kAlignment * Arena::kAlignment;
    }
  }
  // Logits are read by the host after the step, so they live to its end.
  for (std::size_t b = 0; b < intervals.size(); ++b) {
    if (plan.buffers[b].extent == Extent::kLogitRows) intervals[b].last = plan.ops.size();
  }

  std::vector<std::size_t> order(intervals.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return intervals[a].bytes > intervals[b].bytes;
  });

  WorkspacePlan result;
  result.offsets.assign(intervals.size(), 0);
  std::vector<std::size_t> placed;
  for (const std::size_t b : order) {
    // The lowest offset at which no placed buffer that lives at the same time is in the way.
    std::vector<std::size_t> in_the_way;
    for (const std::size_t p : placed) {
      if (intervals[p].overlaps(intervals[b])) in_the_way.push_back(p);
    }
    std::sort(in_the_way.begin(), in_the_way.end(),
              [&](std::size_t l, std::size_t r) { return result.offsets[l] < result.offsets[r]; });
    std::size_t offset = 0;
    for (const std::size_t p : in_the_way) {
      if (offset + intervals[b].bytes <= result.offsets[p]) break;
      offset = std::max(offset, result.offsets[p] + intervals[p].bytes);
    }
    result.offsets[b] = offset;
    result.bytes = std::max(result.bytes, offset + intervals[b].bytes);
    placed.push_back(b);
  }
  return result;
}

}  // namespace pianola
