// The recorder refuses ops of state layers that do not fit their state, and names them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "pianola/error.h"
#include "plan/plan_text.h"
#include "plan/recorder.h"

namespace pianola {
namespace {

using ::testing::HasSubstr;

// Widths are all different, so that no check passes by accident.
constexpr int kHeads = 6;
constexpr int kKeyHeads = 3;
constexpr int kKeyDim = 5;
constexpr int kValueDim = 7;
constexpr int kTaps = 4;
constexpr std::int64_t kValues = std::int64_t{kHeads} * kValueDim;
constexpr std::int64_t kConv = 2 * std::int64_t{kKeyHeads} * kKeyDim + kValues;

struct Tables {
  std::vector<WeightDecl> weights;
  std::vector<StateSpec> states = {{.heads = kHeads,
                                    .key_dim = kKeyDim,
                                    .value_dim = kValueDim,
                                    .conv_width = kConv,
                                    .conv_taps = kTaps},
                                   {.conv_width = kConv, .conv_taps = kTaps}};

  WeightId conv = vector("conv", kConv* kTaps);
  WeightId conv_bias = vector("conv_bias", kConv);
  WeightId heads = vector("heads", kHeads);
  WeightId group_norm = vector("group_norm", kValueDim);
  WeightId value_norm = vector("value_norm", kValues);

  WeightId vector(const char* name, std::int64_t size) {
    WeightDecl decl{.name = name, .role = WeightRole::kVector};
    decl.cols = size;
    weights.push_back(std::move(decl));
    return {static_cast<std::int32_t>(weights.size()) - 1};
  }
};

struct Ops {
  Tables tables;
  Recorder recorder{tables.weights, {{}, tables.states}, {.tokens = 4}};
  BufferId projected = recorder.buffer("projected", Extent::kTokens, kConv);
  BufferId convolved = recorder.buffer("convolved", Extent::kTokens, kConv);
  BufferId decay = recorder.buffer("decay", Extent::kTokens, kHeads);
  BufferId beta = recorder.buffer("beta", Extent::kTokens, kHeads);
  BufferId mixed = recorder.buffer("mixed", Extent::kTokens, kValues);
  BufferId gate = recorder.buffer("gate", Extent::kTokens, kValues);

  ShortConvOp conv() const {
    return {.in = projected,
            .weight = tables.conv,
            .bias = tables.conv_bias,
            .activation = Activation::kSilu,
            .state = {0},
            .out = convolved};
  }
  DeltaRuleOp delta() const {
    return {.qkv = convolved,
            .decay = decay,
            .beta = beta,
            .a_log = tables.heads,
            .dt_bias = tables.heads,
            .key_heads = kKeyHeads,
            .group = kHeads / kKeyHeads,
            .eps = 1e-6F,
            .state = {0},
            .out = mixed};
  }
  SsmOp ssm() const {
    return {.xbc = convolved,
            .dt = decay,
            .a_log = tables.heads,
            .dt_bias = tables.heads,
            .skip = tables.heads,
            .groups = kKeyHeads,
            .dt_min = 0,
            .dt_max = 100,
            .state = {0},
            .out = mixed};
  }
  GateOp gate_op() const { return {.in = mixed, .gate = gate, .out = mixed}; }
  GatedNormOp norm() const {
    return {.in = mixed,
            .gate = gate,
            .norm = {tables.group_norm, 1e-6F},
            .group = kValueDim,
            .out = mixed};
  }
};

template <typename Op>
void refuse(Op (Ops::*make)() const, const char* name,
            const std::function<void(Op&, const Ops&)>& spoil) {
  Ops ops;
  Op op = (ops.*make)();
  spoil(op, ops);
  try {
    ops.recorder.record(op);
    ADD_FAILURE() << name << " was not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInternal);
    EXPECT_THAT(error.what(), HasSubstr(std::string("recording op 0 (") + name + ")"));
  }
  ops.recorder.record((ops.*make)());  // the mistake has left no trace
}

TEST(StateRecorder, ShortConv) {
  const auto no = [](auto spoil) { refuse<ShortConvOp>(&Ops::conv, "short_conv", spoil); };
  no([](ShortConvOp& op, auto&) { op.state = {}; });
  no([](ShortConvOp& op, auto&) { op.state = {2}; });
  no([](ShortConvOp& op, auto& o) { op.in = o.mixed; });
  no([](ShortConvOp& op, auto& o) { op.out = o.mixed; });
  no([](ShortConvOp& op, auto&) { op.out = op.in; });
  no([](ShortConvOp& op, auto& o) { op.weight = o.tables.conv_bias; });
  no([](ShortConvOp& op, auto& o) { op.bias = o.tables.heads; });
  Ops alone;  // a layer of nothing but a convolution
  ShortConvOp op = alone.conv();
  op.state = {1};
  op.bias = {};
  op.activation = std::nullopt;
  alone.recorder.record(op);
}

TEST(StateRecorder, DeltaRule) {
  const auto no = [](auto spoil) { refuse<DeltaRuleOp>(&Ops::delta, "delta_rule", spoil); };
  no([](DeltaRuleOp& op, auto&) { op.state = {-1}; });
  no([](DeltaRuleOp& op, auto&) { op.state = {1}; });  // it has no heads
  no([](DeltaRuleOp& op, auto& o) { op.qkv = o.mixed; });
  no([](DeltaRuleOp& op, auto& o) { op.decay = o.gate; });
  no([](DeltaRuleOp& op, auto& o) { op.beta = o.gate; });
  no([](DeltaRuleOp& op, auto& o) { op.out = o.convolved; });
  no([](DeltaRuleOp& op, auto& o) { op.a_log = o.tables.conv_bias; });
  no([](DeltaRuleOp& op, auto& o) { op.dt_bias = o.tables.group_norm; });
  no([](DeltaRuleOp& op, auto&) { op.key_heads = 0; });
  no([](DeltaRuleOp& op, auto&) { op.key_heads = 4; });
  no([](DeltaRuleOp& op, auto&) { op.key_heads = 2; });  // divides, but the widths say three
  no([](DeltaRuleOp& op, auto&) { op.group = 0; });
  no([](DeltaRuleOp& op, auto&) { op.group = kHeads; });  // one group is none for two of the keys
  no([](DeltaRuleOp& op, auto&) { op.eps = 0; });
}

TEST(StateRecorder, Ssm) {
  const auto no = [](auto spoil) { refuse<SsmOp>(&Ops::ssm, "ssm", spoil); };
  no([](SsmOp& op, auto&) { op.state = {7}; });
  no([](SsmOp& op, auto& o) { op.xbc = o.gate; });
  no([](SsmOp& op, auto& o) { op.dt = o.mixed; });
  no([](SsmOp& op, auto& o) { op.skip = o.tables.value_norm; });
  no([](SsmOp& op, auto&) { op.groups = 0; });
  no([](SsmOp& op, auto&) { op.groups = 5; });
  no([](SsmOp& op, auto&) { op.dt_min = 200; });
  no([](SsmOp& op, auto&) { op.dt_min = -1; });
  no([](SsmOp& op, auto& o) { op.out = o.decay; });
}

TEST(StateRecorder, Gates) {
  const auto no = [](auto spoil) { refuse<GateOp>(&Ops::gate_op, "gate", spoil); };
  no([](GateOp& op, auto& o) { op.in = o.convolved; });
  no([](GateOp& op, auto& o) { op.gate = o.beta; });
  no([](GateOp& op, auto&) { op.out = op.gate; });
  const auto not_normed = [](auto spoil) { refuse<GatedNormOp>(&Ops::norm, "gated_norm", spoil); };
  not_normed([](GatedNormOp& op, auto&) { op.group = 0; });
  not_normed([](GatedNormOp& op, auto&) { op.group = 4; });
  not_normed([](GatedNormOp& op, auto& o) { op.norm.weight = o.tables.heads; });
  not_normed([](GatedNormOp& op, auto&) { op.norm.eps = 0; });
  not_normed([](GatedNormOp& op, auto& o) { op.gate = o.convolved; });
  not_normed([](GatedNormOp& op, auto&) { op.out = op.gate; });
  Ops own;  // a weight for every element
  GatedNormOp op = own.norm();
  op.norm.weight = own.tables.value_norm;
  op.gate_first = true;
  own.recorder.record(op);
}

TEST(StateRecorder, ThePlanNamesTheState) {
  Ops ops;
  ops.recorder.record(ops.conv());
  ops.recorder.record(ops.delta());
  ops.recorder.record(ops.norm());
  ops.recorder.record(AdvanceOp{});
  const std::string text =
      plan_text(ops.recorder.finish(), ops.tables.weights, {{}, ops.tables.states});
  EXPECT_THAT(text, HasSubstr("short_conv %convolved, state.0 <- %projected  weight=conv taps=4 "
                              "bias=conv_bias act=silu"));
  EXPECT_THAT(
      text, HasSubstr("delta_rule %mixed, state.0 <- %convolved, %decay, %beta  heads=6/3 group=2 "
                      "dim=5x7"));
  EXPECT_THAT(text, HasSubstr("gated_norm %mixed <- %mixed, %gate  norm=group_norm"));
}

}  // namespace
}  // namespace pianola
