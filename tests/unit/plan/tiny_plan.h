// The tables of one small decoder layer, with every kind of weight, for tests of the recorder and
// of what reads Plans. Widths are all different, so that no check passes by accident.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "plan/recorder.h"

namespace pianola::test {

inline constexpr std::int64_t kWidth = 24;
inline constexpr std::int64_t kFf = 40;
inline constexpr std::int64_t kVocab = 50;
inline constexpr std::int64_t kExperts = 5;
inline constexpr std::int64_t kExpertFf = 9;
inline constexpr int kTopK = 2;
inline constexpr int kHeads = 4;
inline constexpr int kKvHeads = 2;
inline constexpr int kDim = 8;
inline constexpr std::int64_t kQWidth = std::int64_t{kHeads} * kDim;
inline constexpr std::int64_t kKvWidth = std::int64_t{kKvHeads} * kDim;

struct TinyTables {
  std::vector<WeightDecl> weights;
  std::array<AttentionSpec, 1> caches{AttentionSpec{kKvHeads, kDim, kDim}};

  WeightId table = matrix("table", kVocab, kWidth, WeightRole::kEmbedding);
  WeightId head = matrix("head", kVocab, kWidth);
  WeightId norm = vector("norm", kWidth);
  WeightId q = matrix("q", kQWidth, kWidth);
  WeightId k = matrix("k", kKvWidth, kWidth);
  WeightId v = matrix("v", kKvWidth, kWidth);
  WeightId o = matrix("o", kWidth, kQWidth);
  WeightId q_bias = vector("q_bias", kQWidth);
  WeightId kv_bias = vector("kv_bias", kKvWidth);
  WeightId head_norm = vector("head_norm", kDim);
  WeightId frequencies = vector("frequencies", kDim / 2);
  WeightId gate = matrix("gate", kFf, kWidth);
  WeightId up = matrix("up", kFf, kWidth);
  WeightId down = matrix("down", kWidth, kFf);
  WeightId ff_bias = vector("ff_bias", kFf);
  WeightId width_bias = vector("width_bias", kWidth);

  WeightId sinks = vector("sinks", kHeads);
  WeightId router = matrix("router", kExperts, kWidth, WeightRole::kRouter);
  WeightId router_bias = vector("router_bias", kExperts);
  WeightId experts_gate = stack("experts_gate", kExpertFf, kWidth);
  WeightId experts_up = stack("experts_up", kExpertFf, kWidth);
  WeightId experts_down = stack("experts_down", kWidth, kExpertFf);
  WeightId experts_ff_bias = vector("experts_ff_bias", kExperts* kExpertFf);
  WeightId experts_width_bias = vector("experts_width_bias", kExperts* kWidth);

  WeightId stack(std::string name, std::int64_t rows, std::int64_t cols) {
    const WeightId id = matrix(std::move(name), rows, cols);
    weights.back().experts = kExperts;
    return id;
  }
  WeightId matrix(std::string name, std::int64_t rows, std::int64_t cols,
                  WeightRole role = WeightRole::kLinear) {
    WeightDecl decl{.name = std::move(name), .role = role};
    decl.rows = rows;
    decl.cols = cols;
    weights.push_back(std::move(decl));
    return {static_cast<std::int32_t>(weights.size()) - 1};
  }
  WeightId vector(std::string name, std::int64_t size) {
    return matrix(std::move(name), 1, size, WeightRole::kVector);
  }
};

// The ops of a mixture of experts, on a recorder of their own.
struct TinyMixture {
  RouteOp route() const {
    return {.in = x,
            .norm = RmsNorm{tables.norm, 1e-5F},
            .weight = tables.router,
            .bias = tables.router_bias,
            .top_k = kTopK,
            .score = RouteScore::kSoftmax,
            .out = routing};
  }
  ExpertsOp experts() const {
    return {.in = x,
            .norm = {tables.norm, 1e-5F},
            .routing = routing,
            .gate = tables.experts_gate,
            .up = tables.experts_up,
            .down = tables.experts_down,
            .gate_bias = tables.experts_ff_bias,
            .up_bias = tables.experts_ff_bias,
            .down_bias = tables.experts_width_bias,
            .activation = Activation::kClampedSwish,
            .residual = x,
            .out = x};
  }

  TinyTables tables;
  Recorder recorder{tables.weights, tables.caches, {.tokens = 8, .lanes = 2, .logit_rows = 2}};
  BufferId x = recorder.buffer("x", Extent::kTokens, kWidth);
  BufferId routing = recorder.buffer("routing", Extent::kTokens, std::int64_t{2} * kTopK);
  BufferId other = recorder.buffer("other", Extent::kTokens, std::int64_t{2} * kTopK);
  BufferId odd = recorder.buffer("odd", Extent::kTokens, std::int64_t{2} * kTopK + 1);
};

// The ops of multi-head latent attention, on a recorder of their own: two heads of 6 + 4 whose keys
// come from a latent of 8.
struct TinyLatent {
  static constexpr std::int64_t kHeadCount = 2;
  static constexpr int kRank = 8;
  static constexpr int kPlain = 6;
  static constexpr int kTurned = 4;

  LatentQkvOp qkv() const {
    return {.q = q,
            .kv = kv,
            .kv_norm = {kv_norm, 1e-6F},
            .absorb = absorb,
            .rope = {turns, RopeStyle::kInterleaved, 1},
            .cache = {0},
            .q_out = absorbed};
  }
  HeadLinearOp values() const { return {.in = latent, .weight = up, .out = out}; }

  TinyTables tables;
  std::array<AttentionSpec, 2> caches{
      AttentionSpec{.kv_heads = 1, .key_dim = kRank + kTurned, .value_dim = kRank, .latent = true},
      AttentionSpec{.kv_heads = 1, .key_dim = kRank + kTurned, .value_dim = kRank}};
  WeightId kv_norm = tables.vector("kv_norm", kRank);
  WeightId turns = tables.vector("turns", kTurned / 2);
  WeightId absorb = stack("absorb", kRank, kPlain);
  WeightId up = stack("up", 5, kRank);
  Recorder recorder{tables.weights, caches, {.tokens = 8, .lanes = 2, .logit_rows = 2}};
  BufferId q = recorder.buffer("q", Extent::kTokens, kHeadCount*(kPlain + kTurned));
  BufferId kv = recorder.buffer("kv", Extent::kTokens, kRank + kTurned);
  BufferId absorbed = recorder.buffer("absorbed", Extent::kTokens, kHeadCount*(kRank + kTurned));
  BufferId latent = recorder.buffer("latent", Extent::kTokens, kHeadCount* kRank);
  BufferId out = recorder.buffer("out", Extent::kTokens, kHeadCount * 5);

 private:
  WeightId stack(std::string name, std::int64_t rows, std::int64_t cols) {
    const WeightId id = tables.stack(std::move(name), rows, cols);
    tables.weights.back().experts = kHeadCount;
    return id;
  }
};

// A recorder with the buffers of one layer, and the ops that belong on them.
struct TinyRecorder {
  explicit TinyRecorder(const StepShape& shape = {.tokens = 8, .lanes = 2, .logit_rows = 2})
      : recorder(tables.weights, tables.caches, shape),
        x(recorder.buffer("x", Extent::kTokens, kWidth)),
        q(recorder.buffer("q", Extent::kTokens, kQWidth)),
        attended(recorder.buffer("attended", Extent::kTokens, kQWidth)),
        logits(recorder.buffer("logits", Extent::kLogitRows, kVocab)),
        y(recorder.buffer("y", Extent::kTokens, kWidth)) {}

  RmsNorm norm() const { return {tables.norm, 1e-5F}; }
  EmbedOp embed() const { return {.table = tables.table, .out = x}; }
  NormOp norm_op() const { return {.in = x, .norm = norm(), .out = y}; }
  LinearOp linear() const {
    return {.in = attended, .weight = tables.o, .bias = tables.width_bias, .residual = x, .out = x};
  }
  QkvOp qkv() const {
    return {.in = x,
            .norm = norm(),
            .q = tables.q,
            .k = tables.k,
            .v = tables.v,
            .q_bias = tables.q_bias,
            .k_bias = tables.kv_bias,
            .v_bias = tables.kv_bias,
            .q_norm = RmsNorm{tables.head_norm, 1e-6F},
            .k_norm = RmsNorm{tables.head_norm, 1e-6F},
            .rope = {tables.frequencies, RopeStyle::kHalf, 1},
            .cache = {0},
            .q_out = q};
  }
  QueryOp query() const {
    return {.in = x,
            .norm = norm(),
            .q = tables.q,
            .q_bias = tables.q_bias,
            .q_norm = RmsNorm{tables.head_norm, 1e-6F},
            .rope = {tables.frequencies, RopeStyle::kHalf, 1},
            .head_dim = kDim,
            .q_out = q};
  }
  AttentionOp attention() const {
    return {.q = q, .cache = {0}, .heads = kHeads, .scale = 0.25F, .out = attended};
  }
  GatedMlpOp mlp() const {
    return {.in = x,
            .norm = norm(),
            .gate = tables.gate,
            .up = tables.up,
            .down = tables.down,
            .gate_bias = tables.ff_bias,
            .up_bias = tables.ff_bias,
            .down_bias = tables.width_bias,
            .residual = x,
            .out = x};
  }
  LmHeadOp head() const {
    return {.in = x, .norm = norm(), .weight = tables.head, .logits = logits};
  }
  ScoreOp score() const { return {.in = x, .norm = norm(), .weight = tables.head}; }
  SampleOp sample() const { return {.logits = logits}; }

  // A whole step, with every op that ends in a sample.
  Plan whole_step() {
    for (const Op& op : {Op(embed()), Op(norm_op()), Op(qkv()), Op(attention()), Op(linear()),
                         Op(mlp()), Op(head()), Op(sample()), Op(AdvanceOp{})}) {
      recorder.record(op);
    }
    return recorder.finish();
  }

  TinyTables tables;
  Recorder recorder;
  BufferId x, q, attended, logits, y;
};

}  // namespace pianola::test
