// Ops of layers that fold tokens into a state, each with what it computes by the published formula:
// over a whole sequence at once, in double precision, without a cache.
//
//   const Layer layer = delta_layer({.heads = 6, .key_heads = 2});
//   layer.expected(layer.inputs({7, 8, 9}));    // [tokens, out_width]
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cache/layer_cache.h"
#include "plan/recorder.h"

namespace pianola {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr int kMasked = -1;  // in place of a token

inline std::size_t size_of(std::int64_t n) { return static_cast<std::size_t>(n); }

inline std::vector<float> random_floats(std::size_t n, unsigned seed, float scale = 1.0F) {
  std::minstd_rand engine(seed * 2654435761U + 1U);  // quick to seed, for every token anew
  std::normal_distribution<float> normal(0.0F, scale);
  std::vector<float> v(n);
  for (float& x : v) x = normal(engine);
  return v;
}

struct Weights {
  std::vector<std::vector<float>> values;

  WeightId add(std::vector<float> vector) {
    values.push_back(std::move(vector));
    return {static_cast<std::int32_t>(values.size()) - 1};
  }
};

// What each token of a sequence brings along, by input.
struct Inputs {
  std::vector<std::vector<float>> values;  // of each input: [tokens, width]
  int tokens = 0;
};

// Ops with one state cache, and what they compute.
struct Layer {
  StateSpec spec;           // no cache when it has no heads and no convolution
  std::vector<int> widths;  // of the inputs
  int out_width = 0;
  Weights weights;
  std::function<BufferId(Recorder&, const std::vector<BufferId>&)> record;
  std::function<std::vector<double>(const Inputs&)> expected;  // [tokens, out_width]

  // A token always brings the same.
  Inputs inputs(const std::vector<int>& tokens) const {
    Inputs in{std::vector<std::vector<float>>(widths.size()), static_cast<int>(tokens.size())};
    for (const int token : tokens) {
      for (std::size_t i = 0; i < widths.size(); ++i) {
        std::vector<float> row(size_of(widths[i]), NAN);
        if (token != kMasked) {
          row = random_floats(row.size(),
                              static_cast<unsigned>(token) * 7U + static_cast<unsigned>(i));
        }
        in.values[i].insert(in.values[i].end(), row.begin(), row.end());
      }
    }
    return in;
  }
};

// --- The formulas -------------------------------------------------------------------------------

inline double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }
inline double silu(double x) { return x * sigmoid(x); }
inline double softplus(double x) { return std::log(1.0 + std::exp(x)); }

// A causal convolution of each channel with its own kernel, as torch.nn.Conv1d pads it.
inline std::vector<double> convolve(const std::vector<float>& x, int tokens,
                                    const std::vector<float>& kernel,
                                    const std::vector<float>& bias, int width, int taps, bool act) {
  std::vector<double> out(size_of(tokens * std::int64_t{width}));
  for (int t = 0; t < tokens; ++t) {
    for (int c = 0; c < width; ++c) {
      double sum = bias.empty() ? 0.0 : bias[size_of(c)];
      for (int tap = 0; tap < taps; ++tap) {
        const int from = t + tap - (taps - 1);
        if (from < 0) continue;
        sum += static_cast<double>(kernel[size_of(tap * width + c)]) * x[size_of(from * width + c)];
      }
      out[size_of(t * width + c)] = act ? silu(sum) : sum;
    }
  }
  return out;
}

struct DeltaShape {
  int heads = 4;
  int key_heads = 2;
  int key_dim = 16;
  int value_dim = 24;
  int group = 0;  // neighbours that share a key head; 0: all that do
  int neighbours() const { return group > 0 ? group : heads / key_heads; }
  int qkv() const { return 2 * key_heads * key_dim + heads * value_dim; }
};

// Gated DeltaNet (Yang et al., 2025, eq. 10): S <- S (alpha (I - beta k k')) + beta v k', o = S q,
// with S [value_dim, key_dim].
inline std::vector<double> delta_rule(const DeltaShape& s, const std::vector<double>& qkv,
                                      const std::vector<float>& decay,
                                      const std::vector<float>& beta, int tokens,
                                      const std::vector<float>& a_log,
                                      const std::vector<float>& dt_bias, double eps) {
  const int keys = s.key_heads * s.key_dim;
  std::vector<double> out(size_of(tokens * std::int64_t{s.heads} * s.value_dim));
  for (int h = 0; h < s.heads; ++h) {
    std::vector<double> state(size_of(s.value_dim * s.key_dim));
    for (int t = 0; t < tokens; ++t) {
      const double* row = qkv.data() + t * s.qkv();
      const auto direction = [&](const double* x) {
        std::vector<double> unit(x, x + s.key_dim);
        double squares = eps;
        for (const double e : unit) squares += e * e;
        for (double& e : unit) e /= std::sqrt(squares);
        return unit;
      };
      const int shared = h / s.neighbours() % s.key_heads * s.key_dim;
      const std::vector<double> q = direction(row + shared);
      const std::vector<double> k = direction(row + keys + shared);
      const double* v = row + 2 * keys + h * s.value_dim;
      const std::size_t at = size_of(t * s.heads + h);
      const double alpha = std::exp(-std::exp(static_cast<double>(a_log[size_of(h)])) *
                                    softplus(static_cast<double>(decay[at]) + dt_bias[size_of(h)]));
      const double strength = sigmoid(beta[at]);
      for (int j = 0; j < s.value_dim; ++j) {
        double* line = state.data() + j * s.key_dim;
        std::vector<double> next(size_of(s.key_dim));
        for (int i = 0; i < s.key_dim; ++i) {
          double sum = 0;
          for (int m = 0; m < s.key_dim; ++m) {
            const double identity = m == i ? 1.0 : 0.0;
            sum += line[m] * alpha * (identity - strength * k[size_of(m)] * k[size_of(i)]);
          }
          next[size_of(i)] = sum + strength * v[j] * k[size_of(i)];
        }
        double result = 0;
        for (int i = 0; i < s.key_dim; ++i) {
          line[i] = next[size_of(i)];
          result += line[i] * q[size_of(i)] / std::sqrt(static_cast<double>(s.key_dim));
        }
        out[size_of((t * s.heads + h) * s.value_dim + j)] = result;
      }
    }
  }
  return out;
}

struct SsmShape {
  int heads = 4;
  int groups = 2;
  int key_dim = 16;
  int value_dim = 24;
  float dt_min = 0;
  float dt_max = kInfinity;
  int xbc() const { return heads * value_dim + 2 * groups * key_dim; }
};

// Mamba-2 (Dao and Gu, 2024) in its dual form, without a state: y_t = sum over s <= t of
// (C_t . B_s) exp(A (dt_s+1 + ... + dt_t)) dt_s x_s, plus D x_t.
inline std::vector<double> ssm(const SsmShape& s, const std::vector<double>& xbc,
                               const std::vector<float>& dt, int tokens,
                               const std::vector<float>& a_log, const std::vector<float>& dt_bias,
                               const std::vector<float>& skip) {
  const int values = s.heads * s.value_dim;
  std::vector<double> out(size_of(tokens * std::int64_t{values}));
  for (int h = 0; h < s.heads; ++h) {
    const double a = -std::exp(static_cast<double>(a_log[size_of(h)]));
    const int group = h / (s.heads / s.groups);
    std::vector<double> step(size_of(tokens));
    for (int t = 0; t < tokens; ++t) {
      const double d =
          softplus(static_cast<double>(dt[size_of(t * s.heads + h)]) + dt_bias[size_of(h)]);
      step[size_of(t)] =
          std::min(std::max(d, static_cast<double>(s.dt_min)), static_cast<double>(s.dt_max));
    }
    for (int t = 0; t < tokens; ++t) {
      const double* c = xbc.data() + t * s.xbc() + values + (s.groups + group) * s.key_dim;
      double* y = out.data() + t * values + h * s.value_dim;
      double elapsed = 0;
      for (int from = t; from >= 0; --from) {
        const double* b = xbc.data() + from * s.xbc() + values + group * s.key_dim;
        const double* x = xbc.data() + from * s.xbc() + h * s.value_dim;
        double weight = 0;
        for (int i = 0; i < s.key_dim; ++i) weight += c[i] * b[i];
        weight *= std::exp(a * elapsed) * step[size_of(from)];
        for (int j = 0; j < s.value_dim; ++j) y[j] += weight * x[j];
        elapsed += step[size_of(from)];
      }
      const double* x = xbc.data() + t * s.xbc() + h * s.value_dim;
      for (int j = 0; j < s.value_dim; ++j) y[j] += skip[size_of(h)] * x[j];
    }
  }
  return out;
}

inline std::vector<double> widened(const std::vector<float>& x) { return {x.begin(), x.end()}; }

// --- Layers of these ----------------------------------------------------------------------------

struct ConvShape {
  int width = 8;
  int taps = 4;
  bool bias = true;
  bool act = true;
};

struct ConvWeights {
  std::vector<float> kernel, bias;
  ConvWeights(const ConvShape& s, unsigned seed)
      : kernel(random_floats(size_of(s.taps * std::int64_t{s.width}), seed, 0.5F)) {
    if (s.bias) bias = random_floats(size_of(s.width), seed + 1);
  }
};

inline ShortConvOp conv_op(Weights& weights, const ConvWeights& w, bool act) {
  ShortConvOp op{.weight = weights.add(w.kernel), .state = {0}};
  if (!w.bias.empty()) op.bias = weights.add(w.bias);
  if (act) op.activation = Activation::kSilu;
  return op;
}

inline Layer conv_layer(const ConvShape& s) {
  const ConvWeights w(s, 11);
  Layer layer;
  layer.spec = {.conv_width = s.width, .conv_taps = s.taps};
  layer.widths = {s.width};
  layer.out_width = s.width;
  ShortConvOp op = conv_op(layer.weights, w, s.act);
  layer.record = [op, s](Recorder& r, const std::vector<BufferId>& in) mutable {
    op.in = in[0];
    op.out = r.buffer("out", Extent::kTokens, s.width);
    r.record(op);
    return op.out;
  };
  layer.expected = [w, s](const Inputs& in) {
    return convolve(in.values[0], in.tokens, w.kernel, w.bias, s.width, s.taps, s.act);
  };
  return layer;
}

inline std::vector<float> gated(std::vector<float> x, const std::vector<float>& gate) {
  for (std::size_t i = 0; i < x.size(); ++i) x[i] *= static_cast<float>(sigmoid(gate[i]));
  return x;
}

// The rule alone, or behind a short convolution; then its decay is gated as well, before and, of
// the other rule, after the convolution, so that all inputs have places of their own from the first
// op on.
inline Layer delta_layer(const DeltaShape& s, int taps = 0) {
  constexpr float kEps = 1e-6F;
  const std::vector<float> a_log = random_floats(size_of(s.heads), 21, 0.5F);
  const std::vector<float> dt_bias = random_floats(size_of(s.heads), 22, 0.5F);
  const ConvWeights conv({s.qkv(), taps}, 23);
  Layer layer;
  layer.spec = {.heads = s.heads, .key_dim = s.key_dim, .value_dim = s.value_dim};
  if (taps > 0) layer.spec.conv_width = s.qkv();
  layer.spec.conv_taps = taps;
  layer.widths = {s.qkv(), s.heads, s.heads};
  layer.out_width = s.heads * s.value_dim;
  DeltaRuleOp op{.a_log = layer.weights.add(a_log),
                 .dt_bias = layer.weights.add(dt_bias),
                 .key_heads = s.key_heads,
                 .group = s.neighbours(),
                 .eps = kEps,
                 .state = {0}};
  ShortConvOp before;
  if (taps > 0) before = conv_op(layer.weights, conv, true);
  layer.record = [op, before, s, taps](Recorder& r, const std::vector<BufferId>& in) mutable {
    op.qkv = before.in = in[0];
    if (taps > 0) {
      r.record(GateOp{.in = in[1], .gate = in[2], .out = in[1]});
      op.qkv = before.out = r.buffer("convolved", Extent::kTokens, s.qkv());
      r.record(before);
    }
    op.decay = in[1];
    op.beta = in[2];
    op.out = r.buffer("out", Extent::kTokens, s.heads * s.value_dim);
    r.record(op);
    return op.out;
  };
  layer.expected = [=](const Inputs& in) {
    const std::vector<double> qkv =
        taps > 0 ? convolve(in.values[0], in.tokens, conv.kernel, conv.bias, s.qkv(), taps, true)
                 : widened(in.values[0]);
    const std::vector<float> decay = taps > 0 ? gated(in.values[1], in.values[2]) : in.values[1];
    return delta_rule(s, qkv, decay, in.values[2], in.tokens, a_log, dt_bias, kEps);
  };
  return layer;
}

inline Layer ssm_layer(const SsmShape& s, int taps = 0) {
  const std::vector<float> a_log = random_floats(size_of(s.heads), 31, 0.5F);
  const std::vector<float> dt_bias = random_floats(size_of(s.heads), 32, 0.5F);
  const std::vector<float> skip = random_floats(size_of(s.heads), 33);
  const ConvWeights conv({s.xbc(), taps}, 34);
  Layer layer;
  layer.spec = {.heads = s.heads, .key_dim = s.key_dim, .value_dim = s.value_dim};
  if (taps > 0) layer.spec.conv_width = s.xbc();
  layer.spec.conv_taps = taps;
  layer.widths = {s.xbc(), s.heads};
  if (taps > 0) layer.widths.push_back(s.heads);
  layer.out_width = s.heads * s.value_dim;
  SsmOp op{.a_log = layer.weights.add(a_log),
           .dt_bias = layer.weights.add(dt_bias),
           .skip = layer.weights.add(skip),
           .groups = s.groups,
           .dt_min = s.dt_min,
           .dt_max = s.dt_max,
           .state = {0}};
  ShortConvOp before;
  if (taps > 0) before = conv_op(layer.weights, conv, true);
  layer.record = [op, before, s, taps](Recorder& r, const std::vector<BufferId>& in) mutable {
    op.xbc = before.in = in[0];
    if (taps > 0) {
      r.record(GateOp{.in = in[1], .gate = in[2], .out = in[1]});
      op.xbc = before.out = r.buffer("convolved", Extent::kTokens, s.xbc());
      r.record(before);
      r.record(GateOp{.in = in[1], .gate = in[2], .out = in[1]});
    }
    op.dt = in[1];
    op.out = r.buffer("out", Extent::kTokens, s.heads * s.value_dim);
    r.record(op);
    return op.out;
  };
  layer.expected = [=](const Inputs& in) {
    const std::vector<double> xbc =
        taps > 0 ? convolve(in.values[0], in.tokens, conv.kernel, conv.bias, s.xbc(), taps, true)
                 : widened(in.values[0]);
    std::vector<float> dt = in.values[1];
    if (taps > 0) dt = gated(gated(dt, in.values[2]), in.values[2]);
    return ssm(s, xbc, dt, in.tokens, a_log, dt_bias, skip);
  };
  return layer;
}

inline Layer gate_layer(int width, bool in_place) {
  Layer layer;
  layer.widths = {width, width};
  layer.out_width = width;
  layer.record = [=](Recorder& r, const std::vector<BufferId>& in) {
    const BufferId out = in_place ? in[0] : r.buffer("out", Extent::kTokens, width);
    r.record(GateOp{.in = in[0], .gate = in[1], .out = out});
    return out;
  };
  layer.expected = [](const Inputs& in) {
    std::vector<double> out = widened(in.values[0]);
    for (std::size_t i = 0; i < out.size(); ++i) out[i] *= sigmoid(in.values[1][i]);
    return out;
  };
  return layer;
}

struct GatedNormShape {
  int groups = 3;
  int group = 24;
  bool own_weights = false;  // of each group
  bool gate_first = false;
  bool in_place = true;
};

inline Layer gated_norm_layer(const GatedNormShape& s) {
  constexpr float kEps = 1e-5F;
  const int width = s.groups * s.group;
  const std::vector<float> weight = random_floats(size_of(s.own_weights ? width : s.group), 41);
  Layer layer;
  layer.widths = {width, width};
  layer.out_width = width;
  const WeightId id = layer.weights.add(weight);
  layer.record = [=](Recorder& r, const std::vector<BufferId>& in) {
    const BufferId out = s.in_place ? in[0] : r.buffer("out", Extent::kTokens, width);
    r.record(GatedNormOp{.in = in[0],
                         .gate = in[1],
                         .norm = {id, kEps},
                         .group = s.group,
                         .gate_first = s.gate_first,
                         .out = out});
    return out;
  };
  layer.expected = [=](const Inputs& in) {
    std::vector<double> out = widened(in.values[0]);
    for (std::size_t begin = 0; begin < out.size(); begin += size_of(s.group)) {
      const auto gate = [&](std::size_t i) { return silu(in.values[1][begin + i]); };
      double squares = 0;
      for (std::size_t i = 0; i < size_of(s.group); ++i) {
        if (s.gate_first) out[begin + i] *= gate(i);
        squares += out[begin + i] * out[begin + i];
      }
      const double scale = 1.0 / std::sqrt(squares / s.group + static_cast<double>(kEps));
      for (std::size_t i = 0; i < size_of(s.group); ++i) {
        out[begin + i] *= scale * weight[(begin + i) % weight.size()];
        if (!s.gate_first) out[begin + i] *= gate(i);
      }
    }
    return out;
  };
  return layer;
}

// Layers whose sizes fit no vector, with heads that share keys and heads that do not.
inline std::vector<std::pair<std::string, Layer>> conforming_layers() {
  std::vector<std::pair<std::string, Layer>> layers;
  for (int taps = 1; taps <= 8; ++taps) {
    const ConvShape s{
        .width = 5 + 13 * taps, .taps = taps, .bias = taps % 2 == 0, .act = taps % 4 < 2};
    layers.emplace_back("conv of " + std::to_string(taps), conv_layer(s));
  }
  layers.emplace_back("conv of one channel", conv_layer({.width = 1, .taps = kMaxConvTaps}));
  layers.emplace_back(
      "delta 6/2, far heads share",
      delta_layer({.heads = 6, .key_heads = 2, .key_dim = 3, .value_dim = 5, .group = 1}));
  struct Dims {
    int heads, key_heads, key_dim, value_dim;
  };
  for (const auto& [heads, key_heads, key_dim, value_dim] :
       {Dims{1, 1, 1, 1}, Dims{4, 2, 3, 5}, Dims{6, 2, 16, 24}, Dims{3, 3, 16, 64},
        Dims{4, 1, 128, 100}, Dims{2, 1, 128, 128}, Dims{5, 5, 1, 5}, Dims{2, 2, 3, 128}}) {
    const std::string dims = " " + std::to_string(heads) + "/" + std::to_string(key_heads) + " " +
                             std::to_string(key_dim) + "x" + std::to_string(value_dim);
    layers.emplace_back("delta" + dims, delta_layer({heads, key_heads, key_dim, value_dim}));
    layers.emplace_back("ssm" + dims, ssm_layer({heads, key_heads, key_dim, value_dim}));
    layers.emplace_back("limited ssm" + dims,
                        ssm_layer({heads, key_heads, key_dim, value_dim, 0.4F, 0.9F}));
  }
  layers.emplace_back("conv and delta", delta_layer({}, 4));
  layers.emplace_back("conv and ssm", ssm_layer({}, 3));
  for (const int width : {1, 7, 64, 131}) {
    layers.emplace_back("gate " + std::to_string(width), gate_layer(width, width % 2 == 0));
  }
  for (const bool first : {false, true}) {
    const std::string name = first ? "norm of the gated " : "gated norm ";
    layers.emplace_back(name + "1",
                        gated_norm_layer({.groups = 4, .group = 1, .gate_first = first}));
    layers.emplace_back(name + "24", gated_norm_layer({.gate_first = first, .in_place = false}));
    layers.emplace_back(name + "33",
                        gated_norm_layer({.group = 33, .own_weights = true, .gate_first = first}));
    layers.emplace_back(name + "of all",
                        gated_norm_layer({.groups = 1, .group = 130, .gate_first = first}));
  }
  return layers;
}

}  // namespace pianola
