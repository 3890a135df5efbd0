// The recorder refuses every op that does not fit, and names it; what it accepts is the Plan.
#include "plan/recorder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "pianola/error.h"
#include "tiny_plan.h"

namespace pianola {
namespace {

using test::TinyRecorder;
using ::testing::HasSubstr;

// Runs `action`; it must throw Internal with all of `words` in the message.
void expect_refused(const std::function<void()>& action, const std::vector<std::string>& words) {
  try {
    action();
    ADD_FAILURE() << "not refused, expected: " << testing::PrintToString(words);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInternal) << error.what();
    for (const std::string& word : words) EXPECT_THAT(error.what(), HasSubstr(word));
  }
}

// Records a good op with one mistake made by `spoil`.
template <typename Op>
void refuse(Op (TinyRecorder::*make)() const, const std::string& name,
            const std::function<void(Op&, const TinyRecorder&)>& spoil) {
  TinyRecorder t;
  Op op = (t.*make)();
  spoil(op, t);
  expect_refused([&] { t.recorder.record(op); }, {"recording op 0", "(" + name + ")", "expected"});
  // The mistake has left no trace: the good op is recorded as the first.
  t.recorder.record((t.*make)());
  t.recorder.record(AdvanceOp{});
  EXPECT_EQ(t.recorder.finish().ops.size(), 2U);
}

TEST(Recorder, AcceptsAWholeStep) {
  TinyRecorder t;
  const Plan plan = t.whole_step();
  EXPECT_EQ(plan.ops.size(), 9U);
  EXPECT_EQ(plan.buffers.size(), 5U);
  EXPECT_EQ(plan.shape.tokens, 8);
  EXPECT_EQ(plan.bytes(t.x), 8 * test::kWidth * sizeof(float));
  EXPECT_EQ(plan.bytes(t.logits), 2 * test::kVocab * sizeof(float));
  EXPECT_STREQ(op_name(plan.ops[2]), "qkv");
  EXPECT_STREQ(op_name(plan.ops[8]), "advance");
}

TEST(Recorder, IsEmptyAfterFinish) {
  TinyRecorder t;
  t.whole_step();
  expect_refused([&] { t.recorder.finish(); }, {"a Plan ends with advance"});
}

TEST(Recorder, OptionalPartsMayBeAbsent) {
  TinyRecorder t;
  QkvOp qkv = t.qkv();
  qkv.q_bias = qkv.k_bias = qkv.v_bias = {};
  qkv.q_norm = qkv.k_norm = std::nullopt;
  GatedMlpOp mlp = t.mlp();
  mlp.gate_bias = mlp.up_bias = mlp.down_bias = {};
  LinearOp linear = t.linear();
  linear.bias = {};
  linear.residual = {};
  for (const Op& op : {Op(qkv), Op(mlp), Op(linear), Op(t.score())}) t.recorder.record(op);
  t.recorder.record(AdvanceOp{});
  EXPECT_EQ(t.recorder.finish().ops.size(), 5U);
}

TEST(Recorder, FinishWantsAdvance) {
  {
    TinyRecorder t;
    expect_refused([&] { t.recorder.finish(); }, {"a Plan ends with advance"});
  }
  TinyRecorder t;
  t.recorder.record(t.embed());
  expect_refused([&] { t.recorder.finish(); }, {"a Plan ends with advance"});
}

TEST(Recorder, NothingAfterAdvance) {
  TinyRecorder t;
  t.recorder.record(AdvanceOp{});
  expect_refused([&] { t.recorder.record(t.embed()); }, {"op 1", "(embed)", "after advance"});
}

TEST(Recorder, RefusesImpossibleShapes) {
  for (const StepShape& shape : {StepShape{0, 1, 1}, StepShape{1, 0, 1}, StepShape{1, 1, 0},
                                 StepShape{4, 5, 1}, StepShape{4, 1, 5}, StepShape{-1, -1, -1}}) {
    expect_refused([&] { TinyRecorder t(shape); }, {"impossible step shape", to_string(shape)});
  }
}

TEST(Recorder, RefusesBuffersWithoutWidth) {
  TinyRecorder t;
  expect_refused([&] { t.recorder.buffer("empty", Extent::kTokens, 0); }, {"empty", "width 0"});
  expect_refused([&] { t.recorder.buffer("less", Extent::kTokens, -3); }, {"less", "width -3"});
}

TEST(Recorder, RollbackIsFirst) {
  TinyRecorder t;
  t.recorder.record(RollbackOp{});
  t.recorder.record(t.embed());
  expect_refused([&] { t.recorder.record(RollbackOp{}); }, {"rollback", "nothing before"});
}

TEST(Recorder, Embed) {
  const auto no = [](auto spoil) { refuse<EmbedOp>(&TinyRecorder::embed, "embed", spoil); };
  no([](EmbedOp& op, auto&) { op.table = {}; });
  no([](EmbedOp& op, auto&) { op.table = {99}; });
  no([](EmbedOp& op, auto& t) { op.table = t.tables.head; });  // the role is not embedding
  no([](EmbedOp& op, auto&) { op.out = {}; });
  no([](EmbedOp& op, auto&) { op.out = {99}; });
  no([](EmbedOp& op, auto& t) { op.out = t.q; });       // another width
  no([](EmbedOp& op, auto& t) { op.out = t.logits; });  // another extent
}

TEST(Recorder, Norm) {
  const auto no = [](auto spoil) { refuse<NormOp>(&TinyRecorder::norm_op, "norm", spoil); };
  no([](NormOp& op, auto&) { op.in = {}; });
  no([](NormOp& op, auto&) { op.out = {}; });
  no([](NormOp& op, auto& t) { op.in = t.logits; });
  no([](NormOp& op, auto& t) { op.out = t.q; });
  no([](NormOp& op, auto&) { op.norm.weight = {}; });
  no([](NormOp& op, auto& t) { op.norm.weight = t.tables.head_norm; });
  no([](NormOp& op, auto& t) { op.norm.weight = t.tables.q; });
  no([](NormOp& op, auto&) { op.norm.eps = 0; });
  no([](NormOp& op, auto&) { op.norm.eps = -1; });
  no([](NormOp& op, auto& t) { op.residual = t.q; });
  no([](NormOp& op, auto& t) { op.residual = t.logits; });
  no([](NormOp& op, auto&) { op.residual = op.in; });
}

TEST(Recorder, Linear) {
  const auto no = [](auto spoil) { refuse<LinearOp>(&TinyRecorder::linear, "linear", spoil); };
  no([](LinearOp& op, auto&) { op.in = {}; });
  no([](LinearOp& op, auto& t) { op.in = t.x; });
  no([](LinearOp& op, auto& t) { op.in = t.logits; });
  no([](LinearOp& op, auto&) { op.weight = {}; });
  no([](LinearOp& op, auto&) { op.weight = {1000}; });
  no([](LinearOp& op, auto& t) { op.weight = t.tables.q; });  // transposed
  no([](LinearOp& op, auto& t) { op.weight = t.tables.width_bias; });
  no([](LinearOp& op, auto& t) { op.bias = t.tables.ff_bias; });
  no([](LinearOp& op, auto& t) { op.bias = t.tables.o; });
  no([](LinearOp& op, auto& t) { op.residual = t.q; });
  no([](LinearOp& op, auto&) { op.residual = {99}; });
  no([](LinearOp& op, auto&) { op.out = {}; });
  no([](LinearOp& op, auto& t) { op.out = t.q; });
}

// A table is stored for looking up rows; a backend may have packed what it multiplies by.
TEST(Recorder, LinearRefusesAnEmbeddingTable) {
  TinyRecorder t;
  LmHeadOp head = t.head();
  head.weight = t.tables.table;
  expect_refused([&] { t.recorder.record(head); }, {"(lm_head)", "not a vector or a table"});
  ScoreOp score = t.score();
  score.weight = t.tables.table;
  expect_refused([&] { t.recorder.record(score); }, {"(score)", "not a vector or a table"});
}

TEST(Recorder, LinearMayNotWorkInPlace) {
  TinyRecorder t;
  const WeightId square = t.tables.matrix("square", test::kWidth, test::kWidth);
  // The table has grown, so a recorder that has seen its end is needed.
  Recorder r(t.tables.weights, t.tables.caches, {.tokens = 4});
  const BufferId x = r.buffer("x", Extent::kTokens, test::kWidth);
  expect_refused([&] { r.record(LinearOp{.in = x, .weight = square, .out = x}); },
                 {"(linear)", "apart"});
}

TEST(Recorder, Qkv) {
  const auto no = [](auto spoil) { refuse<QkvOp>(&TinyRecorder::qkv, "qkv", spoil); };
  no([](QkvOp& op, auto&) { op.in = {}; });
  no([](QkvOp& op, auto& t) { op.in = t.q; });
  no([](QkvOp& op, auto&) { op.norm.weight = {}; });
  no([](QkvOp& op, auto&) { op.norm.eps = 0; });
  no([](QkvOp& op, auto&) { op.q = {}; });
  no([](QkvOp& op, auto&) { op.k = {}; });
  no([](QkvOp& op, auto&) { op.v = {}; });
  no([](QkvOp& op, auto& t) { op.q = t.tables.k; });
  no([](QkvOp& op, auto& t) { op.k = t.tables.q; });
  no([](QkvOp& op, auto& t) { op.v = t.tables.q; });
  no([](QkvOp& op, auto& t) { op.q_bias = t.tables.kv_bias; });
  no([](QkvOp& op, auto& t) { op.k_bias = t.tables.q_bias; });
  no([](QkvOp& op, auto& t) { op.v_bias = t.tables.q_bias; });
  no([](QkvOp& op, auto& t) { op.q_norm->weight = t.tables.norm; });
  no([](QkvOp& op, auto& t) { op.k_norm->weight = t.tables.norm; });
  no([](QkvOp& op, auto&) { op.q_norm->weight = {}; });
  no([](QkvOp& op, auto&) { op.k_norm->eps = 0; });
  no([](QkvOp& op, auto&) { op.rope.inverse_frequencies = {}; });
  no([](QkvOp& op, auto& t) { op.rope.inverse_frequencies = t.tables.head_norm; });
  no([](QkvOp& op, auto&) { op.cache = {}; });
  no([](QkvOp& op, auto&) { op.cache = {1}; });
  no([](QkvOp& op, auto&) { op.q_out = {}; });
  no([](QkvOp& op, auto& t) { op.q_out = t.x; });
  no([](QkvOp& op, auto& t) { op.q_out = t.logits; });
}

TEST(Recorder, Query) {
  const auto no = [](auto spoil) { refuse<QueryOp>(&TinyRecorder::query, "query", spoil); };
  no([](QueryOp& op, auto&) { op.in = {}; });
  no([](QueryOp& op, auto& t) { op.in = t.q; });
  no([](QueryOp& op, auto&) { op.norm.weight = {}; });
  no([](QueryOp& op, auto&) { op.q = {}; });
  no([](QueryOp& op, auto& t) { op.q = t.tables.k; });
  no([](QueryOp& op, auto& t) { op.q_bias = t.tables.kv_bias; });
  no([](QueryOp& op, auto& t) { op.q_norm->weight = t.tables.norm; });
  no([](QueryOp& op, auto&) { op.rope.inverse_frequencies = {}; });
  no([](QueryOp& op, auto& t) { op.rope.inverse_frequencies = t.tables.head_norm; });
  no([](QueryOp& op, auto&) { op.head_dim = 0; });
  no([](QueryOp& op, auto&) { op.head_dim = 3; });
  no([](QueryOp& op, auto&) { op.q_out = {}; });
  no([](QueryOp& op, auto& t) { op.q_out = t.x; });
}

TEST(Recorder, Attention) {
  const auto no = [](auto spoil) {
    refuse<AttentionOp>(&TinyRecorder::attention, "attention", spoil);
  };
  no([](AttentionOp& op, auto&) { op.q = {}; });
  no([](AttentionOp& op, auto& t) { op.q = t.x; });
  no([](AttentionOp& op, auto&) { op.cache = {}; });
  no([](AttentionOp& op, auto&) { op.cache = {1}; });
  no([](AttentionOp& op, auto&) { op.heads = 0; });
  no([](AttentionOp& op, auto&) { op.heads = 3; });
  no([](AttentionOp& op, auto&) { op.heads = 2; });
  no([](AttentionOp& op, auto&) { op.heads = -4; });
  no([](AttentionOp& op, auto&) { op.scale = 0; });
  no([](AttentionOp& op, auto&) { op.out = {}; });
  no([](AttentionOp& op, auto& t) { op.out = t.x; });
  no([](AttentionOp& op, auto& t) { op.out = t.q; });  // in place
  no([](AttentionOp& op, auto& t) { op.sinks = t.tables.head_norm; });
  no([](AttentionOp& op, auto& t) { op.sinks = t.tables.q; });
}

// An encoder's step: a cache of the step at hand, and keys and values alone for one of inputs.
struct TinyEncoder {
  static constexpr int kBuckets = 8;
  test::TinyTables tables;
  WeightId bias_table = tables.vector("bias", std::int64_t{kBuckets} * test::kHeads);
  std::vector<AttentionSpec> caches = {
      {test::kKvHeads, test::kDim, test::kDim},
      {test::kKvHeads, test::kDim, test::kDim, 0, CacheHolds::kInput},
      {test::kKvHeads, test::kDim, test::kDim, 0, CacheHolds::kStep}};
  Recorder recorder{tables.weights, caches, {.tokens = 8, .variant = StepVariant::kEncode}};
  BufferId x = recorder.buffer("x", Extent::kTokens, test::kWidth);
  BufferId q = recorder.buffer("q", Extent::kTokens, test::kQWidth);
  BufferId out = recorder.buffer("out", Extent::kTokens, test::kQWidth);

  QkvOp qkv() const {
    return {.in = x,
            .norm = {tables.norm, 1e-5F},
            .q = tables.q,
            .k = tables.k,
            .v = tables.v,
            .rope = kNoRope,
            .cache = {2},
            .q_out = q};
  }
  QkvOp kv() const {
    return {.in = x,
            .norm = {tables.norm, 1e-5F},
            .k = tables.k,
            .v = tables.v,
            .rope = kNoRope,
            .cache = {1}};
  }
  AttentionOp attention() const {
    return {.q = q,
            .cache = {2},
            .heads = test::kHeads,
            .scale = 1,
            .bias = RelativeBias{bias_table, kBuckets, 20, true},
            .out = out};
  }
};

TEST(Recorder, AnEncodersStepEndsWithoutAdvance) {
  TinyEncoder t;
  for (const Op& op : {Op(t.qkv()), Op(t.attention()), Op(t.kv())}) t.recorder.record(op);
  EXPECT_EQ(t.recorder.finish().ops.size(), 3U);
  TinyEncoder advanced;
  advanced.recorder.record(advanced.kv());
  advanced.recorder.record(AdvanceOp{});
  expect_refused([&] { advanced.recorder.finish(); }, {"but for an encoder's"});
}

TEST(Recorder, KeysAndValuesAlone) {
  const auto no = [](const std::function<void(QkvOp&, const TinyEncoder&)>& spoil) {
    TinyEncoder t;
    QkvOp op = t.kv();
    spoil(op, t);
    expect_refused([&] { t.recorder.record(op); }, {"(qkv)"});
  };
  no([](QkvOp& op, auto& t) { op.q = t.tables.q; });
  no([](QkvOp& op, auto& t) { op.q_out = t.q; });
  no([](QkvOp& op, auto&) { op.k = {}; });
  no([](QkvOp& op, auto&) { op.rope = {}; });
}

TEST(Recorder, Bias) {
  const auto no = [](const std::function<void(AttentionOp&, const TinyEncoder&)>& spoil) {
    TinyEncoder t;
    AttentionOp op = t.attention();
    spoil(op, t);
    expect_refused([&] { t.recorder.record(op); }, {"(attention)"});
  };
  no([](AttentionOp& op, auto&) { op.bias->table = {}; });
  no([](AttentionOp& op, auto& t) { op.bias->table = t.tables.norm; });
  no([](AttentionOp& op, auto&) { op.bias->buckets = 4; });
  no([](AttentionOp& op, auto&) { op.bias->max_distance = 2; });
  no([](AttentionOp& op, auto&) { op.bias->both_directions = false; });
  no([](AttentionOp& op, auto&) { op.cache = {0}; });  // which has only one direction
}

TEST(Recorder, AnMlpWithoutAGate) {
  const auto plain = [](const TinyRecorder& t) {
    GatedMlpOp op = t.mlp();
    op.gate = op.gate_bias = {};
    op.activation = Activation::kRelu;
    return op;
  };
  TinyRecorder t;
  t.recorder.record(plain(t));
  GatedMlpOp op = plain(t);
  op.activation = Activation::kClampedSwish;
  expect_refused([&] { t.recorder.record(op); }, {"(gated_mlp)", "needs no gate"});
}

TEST(Recorder, LatentQkv) {
  const auto no = [](const std::function<void(LatentQkvOp&, const test::TinyLatent&)>& spoil) {
    test::TinyLatent t;
    LatentQkvOp op = t.qkv();
    spoil(op, t);
    expect_refused([&] { t.recorder.record(op); }, {"recording op 0", "(latent_qkv)", "expected"});
    t.recorder.record(t.qkv());
  };
  no([](LatentQkvOp& op, auto&) { op.q = {}; });
  no([](LatentQkvOp& op, auto& t) { op.q = t.absorbed; });
  no([](LatentQkvOp& op, auto& t) { op.kv = t.latent; });
  no([](LatentQkvOp& op, auto&) { op.kv_norm.eps = 0; });
  no([](LatentQkvOp& op, auto& t) { op.kv_norm.weight = t.turns; });
  no([](LatentQkvOp& op, auto& t) { op.absorb = t.up; });
  no([](LatentQkvOp& op, auto& t) { op.absorb = t.kv_norm; });
  no([](LatentQkvOp& op, auto& t) { op.rope.inverse_frequencies = t.kv_norm; });
  no([](LatentQkvOp& op, auto&) { op.rope.style = RopeStyle::kNone; });
  no([](LatentQkvOp& op, auto&) { op.cache = {1}; });  // no latent one
  no([](LatentQkvOp& op, auto&) { op.cache = {2}; });
  no([](LatentQkvOp& op, auto& t) { op.q_out = t.q; });
}

TEST(Recorder, ALatentCacheHasNoValuesToStore) {
  test::TinyLatent t;
  expect_refused([&] { t.recorder.record(QkvOp{.in = t.kv, .cache = {0}, .q_out = t.q}); },
                 {"(qkv)", "a cache of keys and values"});
}

TEST(Recorder, HeadLinear) {
  const auto no = [](const std::function<void(HeadLinearOp&, const test::TinyLatent&)>& spoil) {
    test::TinyLatent t;
    HeadLinearOp op = t.values();
    spoil(op, t);
    expect_refused([&] { t.recorder.record(op); }, {"recording op 0", "(head_linear)", "expected"});
    t.recorder.record(t.values());
  };
  no([](HeadLinearOp& op, auto& t) { op.in = t.q; });
  no([](HeadLinearOp& op, auto& t) { op.weight = t.absorb; });
  no([](HeadLinearOp& op, auto& t) { op.weight = t.kv_norm; });
  no([](HeadLinearOp& op, auto&) { op.out = {}; });
  no([](HeadLinearOp& op, auto& t) { op.out = t.latent; });
}

TEST(Recorder, Route) {
  const auto no = [](const std::function<void(RouteOp&, const test::TinyMixture&)>& spoil) {
    test::TinyMixture t;
    RouteOp op = t.route();
    spoil(op, t);
    expect_refused([&] { t.recorder.record(op); }, {"recording op 0", "(route)", "expected"});
    t.recorder.record(t.route());
  };
  no([](RouteOp& op, auto&) { op.in = {}; });
  no([](RouteOp& op, auto& t) { op.in = t.odd; });
  no([](RouteOp& op, auto& t) { op.norm->weight = t.tables.head_norm; });
  no([](RouteOp& op, auto&) { op.weight = {}; });
  no([](RouteOp& op, auto& t) { op.weight = t.tables.gate; });  // the role is not router
  no([](RouteOp& op, auto& t) { op.bias = t.tables.ff_bias; });
  no([](RouteOp& op, auto& t) { op.choice_bias = t.tables.router_bias; });  // of a softmax
  no([](RouteOp& op, auto& t) {
    op.score = RouteScore::kSigmoid;
    op.choice_bias = t.tables.ff_bias;
  });
  no([](RouteOp& op, auto&) { op.groups.count = 2; });    // of five experts
  no([](RouteOp& op, auto&) { op.groups = {5, 1, 1}; });  // one expert, of which two are chosen
  no([](RouteOp& op, auto&) { op.groups = {5, 6, 1}; });
  no([](RouteOp& op, auto&) { op.groups = {5, 2, 2}; });
  no([](RouteOp& op, auto&) { op.groups.best = 0; });
  no([](RouteOp& op, auto&) { op.scale = 0; });
  no([](RouteOp& op, auto&) { op.top_k = 0; });
  no([](RouteOp& op, auto&) { op.top_k = -1; });
  no([](RouteOp& op, auto&) { op.top_k = 3; });  // another width than the output's
  no([](RouteOp& op, auto&) { op.top_k = test::kExperts + 1; });
  no([](RouteOp& op, auto&) { op.out = {}; });
  no([](RouteOp& op, auto& t) { op.out = t.odd; });
  no([](RouteOp& op, auto& t) { op.out = t.x; });
  test::TinyMixture t;
  RouteOp plain = t.route();
  plain.norm = std::nullopt;
  plain.bias = {};
  t.recorder.record(plain);
}

TEST(Recorder, Experts) {
  const auto no = [](const std::function<void(ExpertsOp&, const test::TinyMixture&)>& spoil) {
    test::TinyMixture t;
    t.recorder.record(t.route());
    ExpertsOp op = t.experts();
    spoil(op, t);
    expect_refused([&] { t.recorder.record(op); }, {"recording op 1", "(experts)", "expected"});
    t.recorder.record(t.experts());
  };
  no([](ExpertsOp& op, auto&) { op.in = {}; });
  no([](ExpertsOp& op, auto& t) { op.norm.weight = t.tables.head_norm; });
  no([](ExpertsOp& op, auto&) { op.routing = {}; });
  no([](ExpertsOp& op, auto& t) { op.routing = t.other; });  // no route has written it
  no([](ExpertsOp& op, auto& t) { op.routing = t.odd; });
  no([](ExpertsOp& op, auto& t) { op.gate = t.tables.gate; });  // one matrix, not a stack
  no([](ExpertsOp& op, auto& t) { op.up = t.tables.experts_down; });
  no([](ExpertsOp& op, auto& t) { op.down = t.tables.experts_up; });
  no([](ExpertsOp& op, auto& t) { op.gate_bias = t.tables.ff_bias; });
  no([](ExpertsOp& op, auto& t) { op.up_bias = t.tables.experts_width_bias; });
  no([](ExpertsOp& op, auto& t) { op.down_bias = t.tables.experts_ff_bias; });
  no([](ExpertsOp& op, auto& t) { op.residual = t.odd; });
  no([](ExpertsOp& op, auto& t) { op.residual = t.routing; });
  no([](ExpertsOp& op, auto&) { op.out = {}; });
  no([](ExpertsOp& op, auto& t) { op.out = t.routing; });
}

TEST(Recorder, AStackIsNoMatrix) {
  TinyRecorder t;
  LmHeadOp head = t.head();
  head.weight = t.tables.experts_down;
  expect_refused([&] { t.recorder.record(head); }, {"(lm_head)", "not a stack"});
}

TEST(Recorder, GatedMlp) {
  const auto no = [](auto spoil) { refuse<GatedMlpOp>(&TinyRecorder::mlp, "gated_mlp", spoil); };
  no([](GatedMlpOp& op, auto&) { op.in = {}; });
  no([](GatedMlpOp& op, auto& t) { op.in = t.q; });
  no([](GatedMlpOp& op, auto&) { op.norm.weight = {}; });
  no([](GatedMlpOp& op, auto&) { op.gate = {}; });
  no([](GatedMlpOp& op, auto&) { op.up = {}; });
  no([](GatedMlpOp& op, auto&) { op.down = {}; });
  no([](GatedMlpOp& op, auto& t) { op.gate = t.tables.q; });
  no([](GatedMlpOp& op, auto& t) { op.up = t.tables.q; });
  no([](GatedMlpOp& op, auto& t) { op.down = t.tables.up; });
  no([](GatedMlpOp& op, auto& t) { op.gate = t.tables.ff_bias; });
  no([](GatedMlpOp& op, auto& t) { op.gate_bias = t.tables.width_bias; });
  no([](GatedMlpOp& op, auto& t) { op.up_bias = t.tables.width_bias; });
  no([](GatedMlpOp& op, auto& t) { op.down_bias = t.tables.ff_bias; });
  no([](GatedMlpOp& op, auto& t) { op.residual = t.q; });
  no([](GatedMlpOp& op, auto&) { op.out = {}; });
  no([](GatedMlpOp& op, auto& t) { op.out = t.q; });
}

TEST(Recorder, LmHead) {
  const auto no = [](auto spoil) { refuse<LmHeadOp>(&TinyRecorder::head, "lm_head", spoil); };
  no([](LmHeadOp& op, auto&) { op.in = {}; });
  no([](LmHeadOp& op, auto& t) { op.in = t.q; });
  no([](LmHeadOp& op, auto&) { op.norm.weight = {}; });
  no([](LmHeadOp& op, auto&) { op.weight = {}; });
  no([](LmHeadOp& op, auto& t) { op.weight = t.tables.q; });
  no([](LmHeadOp& op, auto&) { op.logits = {}; });
  no([](LmHeadOp& op, auto& t) { op.logits = t.x; });
}

TEST(Recorder, ScoreAndSample) {
  const auto no = [](auto spoil) { refuse<ScoreOp>(&TinyRecorder::score, "score", spoil); };
  no([](ScoreOp& op, auto&) { op.in = {}; });
  no([](ScoreOp& op, auto& t) { op.in = t.logits; });
  no([](ScoreOp& op, auto&) { op.norm.weight = {}; });
  no([](ScoreOp& op, auto&) { op.weight = {}; });
  no([](ScoreOp& op, auto& t) { op.weight = t.tables.o; });
  no([](ScoreOp& op, auto& t) { op.weight = t.tables.norm; });
  const auto no_sample = [](auto spoil) {
    refuse<SampleOp>(&TinyRecorder::sample, "sample", spoil);
  };
  no_sample([](SampleOp& op, auto&) { op.logits = {}; });
  no_sample([](SampleOp& op, auto& t) { op.logits = t.x; });
  no_sample([](SampleOp& op, auto&) { op.logits = {99}; });
}

TEST(Recorder, NamesTheOpByItsPlace) {
  TinyRecorder t;
  t.recorder.record(t.embed());
  t.recorder.record(t.qkv());
  AttentionOp bad = t.attention();
  bad.heads = 3;
  expect_refused([&] { t.recorder.record(bad); }, {"recording op 2 (attention)", "kv_heads"});
}

}  // namespace
}  // namespace pianola
