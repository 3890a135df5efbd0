// The printed form: complete, and the same every time.
#include "plan/plan_text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tiny_plan.h"

namespace pianola {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(PlanText, SaysEverythingOfAStep) {
  test::TinyRecorder t;
  const Plan plan = t.whole_step();
  const std::string text = plan_text(plan, t.tables.weights, t.tables.caches);
  EXPECT_EQ(text,
            R"(plan tokens=8 lanes=2 logit_rows=2 sample
  %x          [tokens, 24] f32 at 2048
  %q          [tokens, 32] f32 at 0
  %attended   [tokens, 32] f32 at 1024
  %logits     [logit_rows, 50] f32 at 0
  %y          [tokens, 24] f32 at 0
   0 embed      %x <- token  table=table
   1 norm       %y <- %x  norm=norm eps=1e-05
   2 qkv        %q, cache.0 <- %x  norm=norm eps=1e-05 q=q k=k v=v q_bias=q_bias k_bias=kv_bias v_bias=kv_bias q_norm=head_norm eps=1e-06 k_norm=head_norm eps=1e-06 rope=half(frequencies)
   3 attention  %attended <- %q, cache.0  heads=4/2 dim=8 scale=0.25
   4 linear     %x <- %attended + %x  weight=o bias=width_bias
   5 gated_mlp  %x <- %x + %x  norm=norm eps=1e-05 gate=gate up=up down=down act=silu gate_bias=ff_bias up_bias=ff_bias down_bias=width_bias
   6 lm_head    %logits <- %x[logit_token]  norm=norm eps=1e-05 weight=head
   7 sample     sampled, logprob <- %logits, rows
   8 advance    rows, ring <- sampled
)");
}

TEST(PlanText, ShowsAMixtureOfExperts) {
  test::TinyMixture t;
  for (const Op& op : {Op(t.route()), Op(t.experts()), Op(AdvanceOp{})}) t.recorder.record(op);
  const std::string text = plan_text(t.recorder.finish(), t.tables.weights, t.tables.caches);
  EXPECT_THAT(text, HasSubstr("   0 route      %routing <- %x  norm=norm eps=1e-05 router=router "
                              "bias=router_bias top=2/5 score=softmax\n"));
  EXPECT_THAT(text,
              HasSubstr("   1 experts    %x <- %x[%routing] + %x  norm=norm eps=1e-05 "
                        "gate=experts_gate up=experts_up down=experts_down of 5 act=clamped_swish "
                        "gate_bias=experts_ff_bias up_bias=experts_ff_bias "
                        "down_bias=experts_width_bias\n"));
}

TEST(PlanText, IsTheSameForEqualPlans) {
  test::TinyRecorder a;
  test::TinyRecorder b;
  EXPECT_EQ(plan_text(a.whole_step(), a.tables.weights, a.tables.caches),
            plan_text(b.whole_step(), b.tables.weights, b.tables.caches));
}

TEST(PlanText, ShowsWhatDiffers) {
  test::TinyRecorder t({.tokens = 3, .lanes = 1, .logit_rows = 3, .variant = StepVariant::kScore});
  QkvOp qkv = t.qkv();
  qkv.q_norm = qkv.k_norm = std::nullopt;
  qkv.q_bias = {};
  qkv.rope.style = RopeStyle::kInterleaved;
  qkv.rope.attention_factor = 1.5F;
  LinearOp linear = t.linear();
  linear.residual = {};
  linear.bias = {};
  for (const Op& op : {Op(qkv), Op(t.query()), Op(linear), Op(t.score()), Op(AdvanceOp{})}) {
    t.recorder.record(op);
  }
  const std::string text = plan_text(t.recorder.finish(), t.tables.weights, t.tables.caches);
  EXPECT_THAT(text, HasSubstr("plan tokens=3 lanes=1 logit_rows=3 score\n"));
  EXPECT_THAT(text, HasSubstr("rope=interleaved(frequencies)*1.5\n"));
  EXPECT_THAT(text, HasSubstr("query      %q <- %x  norm=norm eps=1e-05 q=q q_bias=q_bias "
                              "q_norm=head_norm eps=1e-06 rope=half(frequencies) dim=8\n"));
  EXPECT_THAT(text, HasSubstr("%x <- %attended  weight=o\n"));
  EXPECT_THAT(text, HasSubstr("score      logprob <- %x[logit_token], target"));
  EXPECT_THAT(text, Not(HasSubstr("k_norm")));
  EXPECT_THAT(text, HasSubstr("v=v k_bias=kv_bias v_bias=kv_bias rope"));
}

TEST(PlanText, ShowsLatents) {
  test::TinyLatent t;
  for (const Op& op :
       {Op(t.qkv()),
        Op(AttentionOp{.q = t.absorbed, .cache = {0}, .heads = 2, .scale = 0.25F, .out = t.latent}),
        Op(t.values()), Op(AdvanceOp{})}) {
    t.recorder.record(op);
  }
  const std::string text = plan_text(t.recorder.finish(), t.tables.weights, t.caches);
  EXPECT_THAT(text, HasSubstr("latent_qkv %absorbed, cache.0 <- %q, %kv  kv_norm=kv_norm eps=1e-06 "
                              "absorb=absorb of 2 rope=interleaved(turns)\n"));
  EXPECT_THAT(text, HasSubstr("heads=2/1 dim=12 latent=8 scale=0.25\n"));
  EXPECT_THAT(text, HasSubstr("head_linear %out <- %latent  weight=up of 2\n"));
}

TEST(PlanText, ShowsAnEncodersStep) {
  test::TinyTables tables;
  const WeightId bias = tables.vector("bias", std::int64_t{8} * test::kHeads);
  const std::vector<AttentionSpec> caches = {
      {test::kKvHeads, test::kDim, test::kDim, 0, CacheHolds::kInput}};
  Recorder r(tables.weights, caches, {.tokens = 8, .variant = StepVariant::kEncode});
  const BufferId x = r.buffer("x", Extent::kTokens, test::kWidth);
  const BufferId q = r.buffer("q", Extent::kTokens, test::kQWidth);
  const BufferId out = r.buffer("out", Extent::kTokens, test::kQWidth);
  r.record(QkvOp{.in = x,
                 .norm = {tables.norm, 1e-5F},
                 .k = tables.k,
                 .v = tables.v,
                 .rope = kNoRope,
                 .cache = {0}});
  r.record(AttentionOp{.q = q,
                       .cache = {0},
                       .heads = test::kHeads,
                       .scale = 1,
                       .bias = RelativeBias{bias, 8, 20, true},
                       .out = out});
  r.record(GatedMlpOp{.in = x,
                      .norm = {tables.norm, 1e-5F},
                      .up = tables.up,
                      .down = tables.down,
                      .activation = Activation::kRelu,
                      .out = x});
  const std::string text = plan_text(r.finish(), tables.weights, caches);
  EXPECT_THAT(text, HasSubstr("plan tokens=8 lanes=1 logit_rows=1 encode\n"));
  EXPECT_THAT(text, HasSubstr("   0 qkv        cache.0 <- %x  norm=norm eps=1e-05 k=k v=v\n"));
  EXPECT_THAT(text, HasSubstr("   1 attention  %out <- %q, cache.0  heads=4/2 dim=8 scale=1 over "
                              "the input bias=bias buckets=±8..20\n"));
  EXPECT_THAT(
      text, HasSubstr("   2 gated_mlp  %x <- %x  norm=norm eps=1e-05 up=up down=down act=relu\n"));
}

TEST(PlanText, NamesShapesAndVariants) {
  EXPECT_EQ(to_string(StepShape{}), "tokens=1 lanes=1 logit_rows=1 sample");
  EXPECT_STREQ(step_variant_name(StepVariant::kLogits), "logits");
  EXPECT_STREQ(step_variant_name(StepVariant::kScore), "score");
}

}  // namespace
}  // namespace pianola
