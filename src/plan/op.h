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
};

enum class RopeStyle : std::uint8_t {
  kHalf,         // pairs (i, i + dim/2), as Hugging Face and most GGUF files
  kInterleaved,  // pairs (2i, 2i + 1), as GGUF files of the llama family
};

struct Rope {
  WeightId inverse_frequencies;  // [n / 2] constant: the first n ≤ dim elements of a head turn
  RopeStyle style = RopeStyle::kHalf;
  float attention_factor = 1;  // cos and sin are multiplied by it (YaRN)
};

enum class Activation : std::uint8_t {
  kSilu,      // x / (1 + e^-x)
  kGeluTanh,  // 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x³)))
};

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
// cache of the token's row at position[t].
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

// out[t, h] = softmax(scale * q[t, h] · K) V over positions 0..position[t] of the token's row, or
// the last `window` of them when the cache has one; kv head of head h is h / (heads / kv_heads).
// 0 for a masked token.
struct AttentionOp {
  BufferId q;  // [T, heads * key_dim]
  CacheId cache;
  std::int32_t heads = 0;
  float scale = 0;
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
// folded into one after the other. With q and k of head h / (heads / key_heads), each divided by
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

// With n = norm(in[t]): out[t] = Wdown (act(Wgate n) * Wup n) + residual[t]. `out` may be
// `residual`.
struct GatedMlpOp {
  BufferId in;  // [T, width]
  RmsNorm norm;
  WeightId gate, up;                       // [ff, width]
  WeightId down;                           // [width, ff]
  WeightId gate_bias, up_bias, down_bias;  // optional
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
    std::variant<EmbedOp, NormOp, LinearOp, QkvOp, AttentionOp, ShortConvOp, DeltaRuleOp, SsmOp,
                 GateOp, GatedNormOp, GatedMlpOp, LmHeadOp, ScoreOp, SampleOp, AdvanceOp>;

// "embed", "qkv", ...
const char* op_name(const Op& op);

}  // namespace pianola
