// The op set: what a model records and what every backend executes.
//
// An op says what must be true after it; a backend chooses one kernel or three. Ops hold ids and
// shapes, never positions, lengths or seeds: those are in StepState. Tokens are flat: a buffer of
// extent kTokens is [T, width], whatever rows the T tokens belong to, and the tables of the step
// say which token is whose. A token whose position is -1 is masked: it stores nothing and reads
// nothing.
//
// Notation below: T tokens, R logit rows, x[t] one row of a buffer, W a weight [rows, cols] with
// y = W x, norm(x) = x / sqrt(mean(x²) + eps) * weight.
#pragma once

#include <cstdint>
#include <optional>
#include <variant>

namespace pianola {

template <typename Tag>
struct Id {
  std::int32_t index = -1;
  bool valid() const { return index >= 0; }
  bool operator==(const Id&) const = default;
};
using WeightId = Id<struct WeightTag>;  // into the model's weight table
using BufferId = Id<struct BufferTag>;  // into the Plan's workspace buffers
using CacheId = Id<struct CacheTag>;    // attention layer cache
using StateId = Id<struct StateTag>;    // state layer cache

struct RmsNorm {
  WeightId weight;  // [width]
  float eps = 0;
  bool operator==(const RmsNorm&) const = default;
};

enum class RopeStyle : std::uint8_t {
  kHalf,         // pairs (i, i + dim/2), as Hugging Face and most GGUF files
  kInterleaved,  // pairs (2i, 2i + 1), as GGUF files of the llama family
  kNone,         // nothing turns
};

struct Rope {
  WeightId inverse_frequencies;  // [n / 2] constant: the first n ≤ dim elements of a head turn
  RopeStyle style = RopeStyle::kHalf;
  float attention_factor = 1;  // cos and sin are multiplied by it (YaRN)

  bool turns() const { return style != RopeStyle::kNone; }
};
inline constexpr Rope kNoRope = {.inverse_frequencies = {}, .style = RopeStyle::kNone};

enum class Activation : std::uint8_t {
  kSilu,          // act(g) * u with act(x) = x / (1 + e^-x)
  kGeluTanh,      // act(g) * u with act(x) = 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x³)))
  kClampedSwish,  // g' / (1 + e^(-1.702 g')) * (u' + 1) with g' = min(g, 7), u' = u in [-7, 7]
  kRelu,          // act(g) * u with act(x) = max(x, 0)
};
// "silu", "gelu_tanh", "clamped_swish", "relu"
const char* activation_name(Activation activation);

// How the scores of a router become the weights of the experts it has chosen. Softmax over all
// experts whose chosen ones are divided by their sum is kSoftmaxOfChosen: the same number.
enum class RouteScore : std::uint8_t {
  kSoftmax,          // e^s over the sum of all experts' e^s
  kSoftmaxOfChosen,  // e^s over the sum of the chosen experts' e^s
  kSigmoid,          // 1 / (1 + e^-s)
  kSigmoidOfChosen,  // that over the sum of the chosen experts'
};

// Experts are chosen among those of the best groups of neighbours only. A group is as good as the
// sum of its `best` largest keys.
struct RouteGroups {
  std::int32_t count = 1;
  std::int32_t chosen = 1;
  std::int32_t best = 1;
  bool operator==(const RouteGroups&) const = default;
};
inline constexpr int kMaxRouteGroups = 64;
const char* route_score_name(RouteScore score);  // "softmax", ...

// Begins a round, in front of every other op. rollback[row] tokens, when they are not 0, are taken
// back from the row's caches and from its history; what is queued behind them stays queued, and the
// row's tokens of this step get the positions from its new length on. All of the caches follow from
// that length. Refused are more than rollback_depth tokens, or fewer than 0; more than lead back to
// the row's floor; a way back of more than most_ahead from the most that the row has held; and a
// row that has stopped. Then nothing of the row has changed but that it has stopped now, with
// kRefused, and its tokens of this step are masked. Either way rollback[row] is 0 afterwards.
struct RollbackOp {};

// out[t] = table[token[t]] * scale; 0 for a masked token.
struct EmbedOp {
  WeightId table;   // [vocab, width]
  float scale = 1;  // Gemma: the root of the width
  BufferId out;     // [T, width]
};

// out[t] = norm(in[t]) + residual[t]. `out` may be `residual`.
struct NormOp {
  BufferId in;  // [T, width]
  RmsNorm norm;
  BufferId residual;  // [T, width], optional
  BufferId out;       // [T, width]
};

// out[t] = W norm(in[t]) + bias + residual[t]. `out` may be `residual`.
struct LinearOp {
  BufferId in;                  // [T, cols]
  std::optional<RmsNorm> norm;  // without one: W in[t]
  WeightId weight;              // [rows, cols]
  WeightId bias;                // [rows], optional
  BufferId residual;            // [T, rows], optional
  BufferId out;                 // [T, rows]
};

// With n = norm(in[t]): q = Wq n + bq, k = Wk n + bk, v = Wv n + bv; an RMS norm over each head of
// q and k when asked; rope at position[t] on q and k; q_out[t] = q; k and v are stored in the layer
// cache, in the slot of the token (see CacheHolds) at position[t]. Without q and q_out there are
// only k and v: an encoder's output for the cross attention of a decoder's layer.
struct QkvOp {
  BufferId in;  // [T, width]
  RmsNorm norm;
  WeightId q, k, v;                       // [heads * head_dim, width], [kv_heads * head_dim, width]
  WeightId q_bias, k_bias, v_bias;        // optional
  std::optional<RmsNorm> q_norm, k_norm;  // weight [head_dim]
  Rope rope;
  CacheId cache;
  BufferId q_out;  // [T, heads * head_dim]
};

// A learned number for each head and bucket of distances, added to scores (T5): near distances have
// a bucket each, farther ones share them by their logarithm (relative_bias.h).
struct RelativeBias {
  WeightId table;                 // [buckets * heads], all heads of a bucket together
  std::int32_t buckets = 0;       // even, where positions after the token count
  std::int32_t max_distance = 0;  // from here on there is one bucket
  bool both_directions = false;   // half of the buckets are for positions after the token
};

// What QkvOp does for q alone: a layer that attends to the cache of a layer before it, and has no
// keys and values of its own. Stores nothing. q_out[t] = 0 for a masked token.
struct QueryOp {
  BufferId in;  // [T, width]
  RmsNorm norm;
  WeightId q;                     // [heads * head_dim, width]
  WeightId q_bias;                // optional
  std::optional<RmsNorm> q_norm;  // weight [head_dim]
  Rope rope;
  std::int32_t head_dim = 0;
  BufferId q_out;  // [T, heads * head_dim]
};

// What QkvOp is, for multi-head latent attention: keys and values of all heads are one latent a
// position, and keys have besides one part that turns. With kv[t] = [c, r] the cache of the token's
// row gets [norm(c), rope(r)] at position[t]; the values are norm(c). With q[t, h] = [n, p]:
// q_out[t, h] = [Wabsorb[h] n, rope(p)], whose product with a key is that of n with the key of the
// head that Wabsorb[h]' makes of the latent.
struct LatentQkvOp {
  BufferId q;       // [T, heads * (absorb's cols + rope's elements)]
  BufferId kv;      // [T, key_dim]
  RmsNorm kv_norm;  // weight [value_dim]
  WeightId absorb;  // stack [heads][value_dim, cols]
  Rope rope;        // of key_dim - value_dim elements
  CacheId cache;    // latent
  BufferId q_out;   // [T, heads * key_dim]
};

// out[t, h] = W[h] in[t, h]
struct HeadLinearOp {
  BufferId in;      // [T, heads * cols]
  WeightId weight;  // stack [heads][rows, cols]
  BufferId out;     // [T, heads * rows]
};

// out[t, h] = softmax(scale * q[t, h] · K + bias) V over positions 0..position[t] of the token's
// row, or the last `window` of them when the cache has one, or all of the row's input when the
// cache holds inputs or the step at hand; kv head of head h is h / (heads / kv_heads). With sinks,
// e^sinks[h] joins the denominator of the softmax and nothing else. 0 for a masked token, and where
// there is no input.
struct AttentionOp {
  BufferId q;  // [T, heads * key_dim]
  CacheId cache;
  std::int32_t heads = 0;
  float scale = 0;
  WeightId sinks;  // [heads], optional
  std::optional<RelativeBias> bias;
  BufferId out;  // [T, heads * value_dim]
};

// out[t, c] = act(sum over j < taps of weight[taps - 1 - j, c] * x[position[t] - j, c] + bias[c]),
// where x[p] is `in` of the row's token at position p, 0 before its first. The inputs are stored
// in the state cache. 0 for a masked token.
struct ShortConvOp {
  BufferId in;      // [T, conv_width]
  WeightId weight;  // [taps * conv_width]
  WeightId bias;    // [conv_width], optional
  std::optional<Activation> activation;
  StateId state;
  BufferId out;  // [T, conv_width]
};

// Gated delta rule, each head h with a state S [key_dim, value_dim] that its row's tokens are
// folded into one after the other. With q and k of head h / group % key_heads, each divided by
// sqrt(its sum of squares + eps), and q by sqrt(key_dim) besides:
//   S <- e^(-e^a_log[h] softplus(decay[t, h] + dt_bias[h])) S
//   S <- S + k (sigmoid(beta[t, h]) (v - S' k))'
//   out[t, h] = S' q
// 0 for a masked token, which folds nothing.
struct DeltaRuleOp {
  BufferId qkv;             // [T, 2 * key_heads * key_dim + heads * value_dim]: all q, all k, all v
  BufferId decay;           // [T, heads]
  BufferId beta;            // [T, heads]
  WeightId a_log, dt_bias;  // [heads]
  std::int32_t key_heads = 0;
  std::int32_t group = 0;  // neighbouring heads that share q and k
  float eps = 0;
  StateId state;
  BufferId out;  // [T, heads * value_dim]
};

// Mamba-2's state-space rule, each head h with a state S [key_dim, value_dim]. With B and C of
// group h / (heads / groups), and d = clamp(softplus(dt[t, h] + dt_bias[h]), dt_min, dt_max):
//   S <- e^(-e^a_log[h] d) S + B (d x)'
//   out[t, h] = S' C + skip[h] x
// 0 for a masked token, which folds nothing.
struct SsmOp {
  BufferId xbc;                   // [T, heads * value_dim + 2 * groups * key_dim]: all x, B, C
  BufferId dt;                    // [T, heads]
  WeightId a_log, dt_bias, skip;  // [heads]
  std::int32_t groups = 0;
  float dt_min = 0, dt_max = 0;
  StateId state;
  BufferId out;  // [T, heads * value_dim]
};

// out[t] = in[t] * sigmoid(gate[t]). `out` may be `in`.
struct GateOp {
  BufferId in;    // [T, width]
  BufferId gate;  // [T, width]
  BufferId out;   // [T, width]
};

// Each `group` elements of a token are normed by themselves: out = norm(in) * silu(gate), or with
// gate_first norm(in * silu(gate)). `out` may be `in`.
struct GatedNormOp {
  BufferId in;    // [T, width]
  BufferId gate;  // [T, width]
  RmsNorm norm;   // weight [group], the same for each, or [width]
  std::int32_t group = 0;
  bool gate_first = false;
  BufferId out;  // [T, width]
};

// With n = norm(in[t]), g = Wgate n and u = Wup n: out[t] = Wdown (act(g) * u) + residual[t], where
// the activation says what act(g) * u is. Without Wgate: act(u) in its place. `out` may be
// `residual`.
struct GatedMlpOp {
  BufferId in;  // [T, width]
  RmsNorm norm;
  WeightId gate, up;                       // [ff, width]; gate optional
  WeightId down;                           // [width, ff]
  WeightId gate_bias, up_bias, down_bias;  // optional
  Activation activation = Activation::kSilu;
  BufferId residual;  // [T, width], optional
  BufferId out;       // [T, width]
};

// Chooses experts. With s = W norm(in[t]) + bias: out[t] = the top_k experts with the largest keys,
// the largest first, ties to the lower id; then their weights, times `scale`, in the same order.
// The key is s; with a choice_bias, which has no part in the weights, it is 1 / (1 + e^-s) plus
// that. Experts are numbers from 0 in floats; -1 with weight 0 for a masked token. The router
// multiplies in f32 whatever its file holds: a rounding here could choose another expert.
struct RouteOp {
  BufferId in;                  // [T, width]
  std::optional<RmsNorm> norm;  // absent: s = W in[t] + bias
  WeightId weight;              // [experts, width], role kRouter
  WeightId bias;                // [experts], optional
  std::int32_t top_k = 0;
  RouteScore score = RouteScore::kSoftmax;
  WeightId choice_bias;  // [experts], optional; with a sigmoid score
  RouteGroups groups;    // divide the experts; one: all of them
  float scale = 1;
  BufferId out;  // [T, 2 * top_k]
};

// A gated MLP for each expert e, of which a token gets those that routing[t] names. With
// n = norm(in[t]), g = Wgate[e] n + gate_bias[e], u likewise and y[e] = Wdown[e] (act(g) * u) +
// down_bias[e]: out[t] = (weight[0] * y[expert[0]] + weight[1] * y[expert[1]] + ...) + residual[t],
// summed in that order. Where the expert is -1 nothing is added. `out` may be `residual` or `in`.
//
// A shared expert, which every token gets with the weight sigmoid(w · n), is a second pair of these
// ops: a stack of one expert behind a router of one row with kSigmoid.
struct ExpertsOp {
  BufferId in;  // [T, width]
  RmsNorm norm;
  BufferId routing;                        // [T, 2 * top_k], from RouteOp
  WeightId gate, up;                       // stacks [experts][ff, width]
  WeightId down;                           // stack [experts][width, ff]
  WeightId gate_bias, up_bias, down_bias;  // [experts * ff], [experts * width], optional
  Activation activation = Activation::kSilu;
  BufferId residual;  // [T, width], optional
  BufferId out;       // [T, width]
};

// logits[r] = W norm(in[logit_token[r]])
struct LmHeadOp {
  BufferId in;  // [T, width]
  RmsNorm norm;
  WeightId weight;  // [vocab, width]
  BufferId logits;  // [R, vocab]
};

// logprob[r] = log softmax(W norm(in[logit_token[r]]))[target[r]], without storing [R, vocab].
struct ScoreOp {
  BufferId in;  // [T, width]
  RmsNorm norm;
  WeightId weight;  // [vocab, width]
};

// sampled[r] = a token drawn from logits[r] by the sampling state of its row, or -1 when a logit is
// NaN or +inf or no candidate is left; logprob[r] = its log-probability before any adjustment, when
// the row wants it.
struct SampleOp {
  BufferId logits;  // [R, vocab]
};

// Ends a round. The length of every lane's row grows by the lane's tokens. For a lane with a
// sampled token: the token joins the row's history, an event is published, and the row stops at a
// stop token or at its limit; -1 fails the row. With counts->feed, the token and position of the
// lane's next round are written, or position -1 when the row has stopped.
struct AdvanceOp {};

using Op =
    std::variant<RollbackOp, EmbedOp, NormOp, LinearOp, QkvOp, QueryOp, LatentQkvOp, HeadLinearOp,
                 AttentionOp, ShortConvOp, DeltaRuleOp, SsmOp, GateOp, GatedNormOp, GatedMlpOp,
                 RouteOp, ExpertsOp, LmHeadOp, ScoreOp, SampleOp, AdvanceOp>;

// "embed", "qkv", ...
const char* op_name(const Op& op);

}  // namespace pianola
