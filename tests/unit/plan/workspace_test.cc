// Where buffers lie: those alive together apart, those that are not in the same bytes.
#include "plan/workspace.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

#include "tensor/arena.h"
#include "tiny_plan.h"

namespace pianola {
namespace {

struct Life {
  std::size_t first = SIZE_MAX;
  std::size_t last = 0;
  bool used() const { return first != SIZE_MAX; }
};

// Written for this test and only for ops with `in` and `out`: from the first op to the last.
std::vector<Life> lives(const Plan& plan) {
  std::vector<Life> result(plan.buffers.size());
  const auto touch = [&](BufferId id, std::size_t at) {
    if (!id.valid()) return;
    Life& life = result[static_cast<std::size_t>(id.index)];
    life.first = std::min(life.first, at);
    life.last = std::max(life.last, at);
  };
  for (std::size_t i = 0; i < plan.ops.size(); ++i) {
    if (const auto* op = std::get_if<NormOp>(&plan.ops[i])) {
      touch(op->in, i);
      touch(op->out, i);
    } else if (const auto* linear = std::get_if<LinearOp>(&plan.ops[i])) {
      touch(linear->in, i);
      touch(linear->residual, i);
      touch(linear->out, i);
    } else if (const auto* head = std::get_if<LmHeadOp>(&plan.ops[i])) {
      touch(head->in, i);
      touch(head->logits, i);
      // The host reads logits after the step.
      result[static_cast<std::size_t>(head->logits.index)].last = plan.ops.size();
    }
  }
  return result;
}

void expect_sound(const Plan& plan, const WorkspacePlan& workspace) {
  const std::vector<Life> all = lives(plan);
  ASSERT_EQ(workspace.offsets.size(), plan.buffers.size());
  const auto end = [&](std::size_t b) {
    return workspace.offsets[b] + plan.bytes({static_cast<std::int32_t>(b)});
  };
  for (std::size_t a = 0; a < all.size(); ++a) {
    if (!all[a].used()) continue;
    EXPECT_EQ(workspace.offsets[a] % Arena::kAlignment, 0U);
    EXPECT_LE(end(a), workspace.bytes);
    for (std::size_t b = 0; b < a; ++b) {
      if (!all[b].used()) continue;
      const bool together = all[a].first <= all[b].last && all[b].first <= all[a].last;
      const bool apart = end(a) <= workspace.offsets[b] || end(b) <= workspace.offsets[a];
      EXPECT_TRUE(!together || apart)
          << plan.buffers[a].name << " and " << plan.buffers[b].name << " share bytes";
    }
  }
}

// A Plan as plain data: only ids and widths matter here.
Plan random_plan(std::mt19937& random) {
  const auto below = [&](int n) {
    return static_cast<int>(random() % static_cast<std::uint32_t>(n));
  };
  Plan plan;
  plan.shape = {1 + below(40), 1, 1, StepVariant::kLogits};
  plan.shape.logit_rows = 1 + below(plan.shape.tokens);
  const int buffers = 1 + below(12);
  for (int b = 0; b < buffers; ++b) {
    plan.buffers.push_back({"b" + std::to_string(b),
                            below(5) == 0 ? Extent::kLogitRows : Extent::kTokens, 1 + below(300)});
  }
  const auto any = [&] { return BufferId{below(buffers)}; };
  for (int ops = below(25); ops >= 0; --ops) {
    switch (below(3)) {
      case 0:
        plan.ops.emplace_back(NormOp{.in = any(), .out = any()});
        break;
      case 1:
        plan.ops.emplace_back(
            LinearOp{.in = any(), .residual = below(2) ? any() : BufferId{}, .out = any()});
        break;
      default: {
        // Logits live on only when their extent says so; take one that does, or a norm.
        const BufferId logits = any();
        if (plan.buffer(logits).extent == Extent::kLogitRows) {
          plan.ops.emplace_back(LmHeadOp{.in = any(), .logits = logits});
        }
      }
    }
  }
  plan.ops.emplace_back(AdvanceOp{});
  return plan;
}

TEST(Workspace, RandomPlansNeverOverlap) {
  for (std::uint32_t seed = 0; seed < 1500; ++seed) {
    std::mt19937 random(seed);
    const Plan plan = random_plan(random);
    const WorkspacePlan workspace = plan_workspace(plan);
    SCOPED_TRACE("seed " + std::to_string(seed));
    expect_sound(plan, workspace);
    const WorkspacePlan again = plan_workspace(plan);
    EXPECT_EQ(again.offsets, workspace.offsets);
    EXPECT_EQ(again.bytes, workspace.bytes);
    if (testing::Test::HasFailure()) return;
  }
}

// A chain a -> b -> c -> ...: at most two are alive, so two places do.
TEST(Workspace, DeadBuffersShare) {
  Plan plan;
  plan.shape = {.tokens = 4};
  for (int b = 0; b < 10; ++b) plan.buffers.push_back({"b", Extent::kTokens, 32});
  for (int b = 0; b + 1 < 10; ++b) {
    plan.ops.emplace_back(NormOp{.in = {b}, .out = {b + 1}});
  }
  plan.ops.emplace_back(AdvanceOp{});
  const WorkspacePlan workspace = plan_workspace(plan);
  expect_sound(plan, workspace);
  EXPECT_EQ(workspace.bytes, 2 * 4 * 32 * sizeof(float));
  EXPECT_EQ(std::set<std::size_t>(workspace.offsets.begin(), workspace.offsets.end()).size(), 2U);
}

TEST(Workspace, SizesAreOfTheExtent) {
  Plan plan;
  plan.shape = {.tokens = 64, .lanes = 2, .logit_rows = 2};
  plan.buffers = {{"x", Extent::kTokens, 32}, {"logits", Extent::kLogitRows, 256}};
  plan.ops = {LmHeadOp{.in = {0}, .logits = {1}}, AdvanceOp{}};
  EXPECT_EQ(plan_workspace(plan).bytes, (64 * 32 + 2 * 256) * sizeof(float));
}

// Buffers that came into use after the logits must not lie where the host will read.
TEST(Workspace, LogitsLiveToTheEnd) {
  Plan plan;
  plan.shape = {.tokens = 2, .lanes = 1, .logit_rows = 1};
  plan.buffers = {{"x", Extent::kTokens, 32},
                  {"logits", Extent::kLogitRows, 64},
                  {"late", Extent::kTokens, 32}};
  plan.ops = {LmHeadOp{.in = {0}, .logits = {1}}, NormOp{.in = {2}, .out = {2}}, AdvanceOp{}};
  const WorkspacePlan workspace = plan_workspace(plan);
  expect_sound(plan, workspace);
  EXPECT_EQ(workspace.bytes, 512U) << "late and x share, logits are alone";
}

TEST(Workspace, UnusedBuffersTakeNothing) {
  Plan plan;
  plan.shape = {.tokens = 2};
  plan.buffers = {{"unused", Extent::kTokens, 1 << 20}, {"x", Extent::kTokens, 32}};
  plan.ops = {NormOp{.in = {1}, .out = {1}}, AdvanceOp{}};
  EXPECT_EQ(plan_workspace(plan).bytes, 2 * 32 * sizeof(float));
  EXPECT_EQ(plan_workspace(Plan{}).bytes, 0U);
}

TEST(Workspace, OfAWholeStep) {
  test::TinyRecorder t;
  const Plan plan = t.whole_step();
  const WorkspacePlan workspace = plan_workspace(plan);
  const auto offset = [&](BufferId id) {
    return workspace.offsets[static_cast<std::size_t>(id.index)];
  };
  const auto end = [&](BufferId id) { return offset(id) + plan.bytes(id); };
  // x lives through all of it; q and attended touch in one op.
  for (const BufferId other : {t.q, t.attended, t.logits, t.y}) {
    EXPECT_TRUE(end(other) <= offset(t.x) || end(t.x) <= offset(other));
  }
  EXPECT_TRUE(end(t.q) <= offset(t.attended) || end(t.attended) <= offset(t.q));
  std::size_t sum = 0;
  for (const BufferId id : {t.x, t.q, t.attended, t.logits, t.y}) sum += plan.bytes(id);
  EXPECT_LT(workspace.bytes, sum) << "nothing shares";
}

}  // namespace
}  // namespace pianola
