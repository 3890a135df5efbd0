// Layers that fold tokens into a state, and what stands around them: the reference against the
// published formulas, written here over whole sequences in double precision; the CPU against the
// reference with every instruction set this machine has; and the state cache behind both: bit for
// bit the same whatever the chunking, the neighbours, and the tokens that were taken back. Memory
// that must not be read holds NaN.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>

#include "backends/backend.h"
#include "backends/cpu/isa.h"
#include "cache/static_cache.h"
#include "plan/recorder.h"
#include "tensor/arena.h"

namespace pianola {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kMasked = -1;  // in place of a token

std::size_t size_of(std::int64_t n) { return static_cast<std::size_t>(n); }

std::vector<float> random_floats(std::size_t n, unsigned seed, float scale = 1.0F) {
  std::mt19937 engine(seed);
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

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }
double silu(double x) { return x * sigmoid(x); }
double softplus(double x) { return std::log(1.0 + std::exp(x)); }

// A causal convolution of each channel with its own kernel, as torch.nn.Conv1d pads it.
std::vector<double> convolve(const std::vector<float>& x, int tokens,
                             const std::vector<float>& kernel, const std::vector<float>& bias,
                             int width, int taps, bool act) {
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
  int qkv() const { return 2 * key_heads * key_dim + heads * value_dim; }
};

// Gated DeltaNet (Yang et al., 2025, eq. 10): S <- S (alpha (I - beta k k')) + beta v k', o = S q,
// with S [value_dim, key_dim].
std::vector<double> delta_rule(const DeltaShape& s, const std::vector<double>& qkv,
                               const std::vector<float>& decay, const std::vector<float>& beta,
                               int tokens, const std::vector<float>& a_log,
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
      const int shared = h / (s.heads / s.key_heads) * s.key_dim;
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
std::vector<double> ssm(const SsmShape& s, const std::vector<double>& xbc,
                        const std::vector<float>& dt, int tokens, const std::vector<float>& a_log,
                        const std::vector<float>& dt_bias, const std::vector<float>& skip) {
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

std::vector<double> widened(const std::vector<float>& x) { return {x.begin(), x.end()}; }

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

ShortConvOp conv_op(Weights& weights, const ConvWeights& w, bool act) {
  ShortConvOp op{.weight = weights.add(w.kernel), .state = {0}};
  if (!w.bias.empty()) op.bias = weights.add(w.bias);
  if (act) op.activation = Activation::kSilu;
  return op;
}

Layer conv_layer(const ConvShape& s) {
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

std::vector<float> gated(std::vector<float> x, const std::vector<float>& gate) {
  for (std::size_t i = 0; i < x.size(); ++i) x[i] *= static_cast<float>(sigmoid(gate[i]));
  return x;
}

// The rule alone, or behind a short convolution; then its decay is gated as well, before and, of
// the other rule, after the convolution, so that all inputs have places of their own from the first
// op on.
Layer delta_layer(const DeltaShape& s, int taps = 0) {
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

Layer ssm_layer(const SsmShape& s, int taps = 0) {
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

Layer gate_layer(int width, bool in_place) {
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

Layer gated_norm_layer(const GatedNormShape& s) {
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
std::vector<std::pair<std::string, Layer>> conforming_layers() {
  std::vector<std::pair<std::string, Layer>> layers;
  for (int taps = 1; taps <= 8; ++taps) {
    const ConvShape s{
        .width = 5 + 13 * taps, .taps = taps, .bias = taps % 2 == 0, .act = taps % 4 < 2};
    layers.emplace_back("conv of " + std::to_string(taps), conv_layer(s));
  }
  layers.emplace_back("conv of one channel", conv_layer({.width = 1, .taps = kMaxConvTaps}));
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

// --- The machine --------------------------------------------------------------------------------

// Tokens of one row in a step.
struct Lane {
  int slot = 0;
  int position = 0;         // of the first that is not masked
  std::vector<int> tokens;  // or kMasked
};

// A backend with a layer compiled for steps of up to kTokens tokens, and its state cache.
class Machine {
 public:
  static constexpr int kTokens = 96;
  static constexpr int kLanes = 4;

  Machine(std::string_view name, const BackendOptions& options, const Layer& layer,
          const CacheOptions& cache = {.max_seq_len = 256, .slots = kLanes})
      : layer_(layer),
        backend_(make_backend(name, options)),
        specs_(has_cache() ? 1U : 0U, layer.spec),
        cache_layout_(caches(), cache),
        cache_(cache_layout_, cache_arena_) {
    load_weights();
    cache_memory_ = backend_->allocate(cache_arena_.size() + 128, MemoryUse::kDense);
    cache_arena_.seal(cache_memory_->data());
    std::memset(cache_memory_->data(), 0xFF, cache_memory_->size());
    if (has_cache()) views_.push_back(cache_.state(0));
    compile();
  }

  // The outputs of all tokens, [tokens, out_width].
  std::vector<float> run(const std::vector<Lane>& lanes) {
    std::vector<int> tokens;
    *state_.counts = {.lanes = static_cast<std::int32_t>(lanes.size())};
    for (std::size_t lane = 0; lane < lanes.size(); ++lane) {
      state_.first_token[lane] = static_cast<std::int32_t>(tokens.size());
      state_.row_of[lane] = lanes[lane].slot;
      int position = lanes[lane].position;
      for (const int token : lanes[lane].tokens) {
        state_.position[tokens.size()] = token == kMasked ? -1 : position++;
        state_.lane_of[tokens.size()] = static_cast<std::int32_t>(lane);
        tokens.push_back(token);
      }
    }
    state_.first_token[lanes.size()] = static_cast<std::int32_t>(tokens.size());
    state_.counts->tokens = static_cast<std::int32_t>(tokens.size());
    std::memset(work_->data(), 0xFF, work_->size());
    const Inputs in = layer_.inputs(tokens);
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      std::memcpy(buffer(inputs_[i]), in.values[i].data(), in.values[i].size() * sizeof(float));
    }
    program_->replay();
    for (std::size_t i = work_->size() - 128; i < work_->size(); ++i) {
      EXPECT_EQ(work_->data()[i], std::byte{0xFF}) << "scratch overrun";
    }
    const float* out = buffer(out_);
    return {out, out + tokens.size() * size_of(layer_.out_width)};
  }

  // One row from its beginning, in steps of at most `chunk` tokens.
  std::vector<float> run_whole(int slot, const std::vector<int>& tokens, int chunk = kTokens) {
    std::vector<float> out;
    for (std::size_t at = 0; at < tokens.size();) {
      const std::size_t count = std::min(tokens.size() - at, size_of(chunk));
      const auto begin = tokens.begin() + static_cast<std::ptrdiff_t>(at);
      const std::vector<float> piece =
          run({{slot, static_cast<int>(at), {begin, begin + static_cast<std::ptrdiff_t>(count)}}});
      out.insert(out.end(), piece.begin(), piece.end());
      at += count;
    }
    return out;
  }

  // Makes NaN of what a slot's row of `written` tokens holds of those from `length` on.
  void poison(int slot, int written, int length) {
    const StateView& view = views_.at(0);
    const auto fill = [](float* at, std::size_t n) { std::memset(at, 0xFF, n * sizeof(float)); };
    for (int head = 0; head < view.spec.heads; ++head) {
      for (int n = written; n > length; --n) {
        const bool kept = n > written - view.anchors * view.interval;
        if (kept && n % view.interval == 0) {
          fill(view.anchor_at(slot, head, n), view.spec.state_size());
        }
        if (n > written - view.step_capacity) {
          fill(view.step_at(slot, head, n - 1), view.spec.step_size());
        }
      }
      if (view.interval > 1 && length < written) {
        fill(view.newest_at(slot, head), view.spec.state_size());
      }
    }
    for (int n = written; n > std::max(length, written - view.conv_capacity); --n) {
      fill(view.conv_at(slot, n - 1), size_of(view.spec.conv_width));
    }
  }
  // As a slot is that nobody has written.
  void forget(int slot) {
    const StateView& v = views_.at(0);
    const auto fill = [slot](auto* base, std::size_t each) {
      if (each > 0) std::memset(base + size_of(slot) * each, 0xFF, each * sizeof(*base));
    };
    const std::size_t heads = size_of(v.spec.heads);
    fill(v.anchor, size_of(v.anchors) * v.spec.states_size());
    fill(v.steps, heads * size_of(v.step_capacity) * v.spec.step_size());
    fill(v.newest, v.interval > 1 ? v.spec.states_size() : 0);
    fill(v.newest_length, v.interval > 1 ? heads : 0);
    fill(v.conv, size_of(v.conv_capacity) * size_of(v.spec.conv_width));
  }

  std::vector<std::byte> cache_bytes() const {
    return {cache_memory_->data(), cache_memory_->data() + cache_memory_->size()};
  }

 private:
  bool has_cache() const { return layer_.spec.heads > 0 || layer_.spec.conv_width > 0; }
  CacheSpecs caches() const { return {{}, specs_}; }

  void load_weights() {
    for (const std::vector<float>& values : layer_.weights.values) {
      WeightDecl decl{.name = "weight " + std::to_string(decls_.size()),
                      .role = WeightRole::kVector};
      decl.cols = static_cast<std::int64_t>(values.size());
      decls_.push_back(std::move(decl));
    }
    for (std::size_t i = 0; i < decls_.size(); ++i) {
      const WeightLayout layout = backend_->weight_layout(decls_[i]);
      weights_.push_back(
          backend_->allocate(std::max<std::size_t>(layout.bytes, 1), MemoryUse::kDense));
      backend_->repack(decls_[i], layout,
                       reinterpret_cast<const std::byte*>(layer_.weights.values[i].data()),
                       weights_.back()->data());
      bound_.push_back({&decls_[i], layout, weights_.back()->data()});
    }
  }

  void compile() {
    Recorder recorder(decls_, caches(),
                      {.tokens = kTokens, .lanes = kLanes, .variant = StepVariant::kLogits});
    for (const int width : layer_.widths) {
      inputs_.push_back(recorder.buffer("in", Extent::kTokens, width));
    }
    out_ = layer_.record(recorder, inputs_);
    recorder.record(AdvanceOp{});
    plan_ = recorder.finish();
    const PlanTables tables{decls_, caches(), cache_layout_.shape()};
    backend_->check(plan_, tables);
    places_ = plan_workspace(plan_);
    const std::size_t scratch_bytes = backend_->scratch_bytes(plan_, tables);
    work_ = backend_->allocate(places_.bytes + scratch_bytes + 128, MemoryUse::kDense);
    const StepStateLayout layout({.rows = kLanes, .tokens = kTokens, .lanes = kLanes});
    state_memory_ = backend_->allocate(layout.bytes(), MemoryUse::kDense);
    shared_ = backend_->allocate(layout.shared_bytes(), MemoryUse::kShared);
    state_ = layout.bind(state_memory_->data(), shared_->data());
    program_ = backend_->compile(plan_, {.tables = tables,
                                         .weights = bound_,
                                         .caches = {},
                                         .states = views_,
                                         .state = state_,
                                         .workspace = work_->data(),
                                         .scratch = work_->data() + places_.bytes,
                                         .scratch_bytes = scratch_bytes});
  }

  float* buffer(BufferId id) const {
    return reinterpret_cast<float*>(work_->data() +
                                    places_.offsets[static_cast<std::size_t>(id.index)]);
  }

  const Layer& layer_;
  std::unique_ptr<Backend> backend_;
  std::vector<StateSpec> specs_;
  CacheLayout cache_layout_;
  Arena cache_arena_;
  StaticCache cache_;
  std::unique_ptr<DeviceMemory> cache_memory_, work_, state_memory_, shared_;
  std::vector<StateView> views_;
  std::vector<WeightDecl> decls_;
  std::vector<std::unique_ptr<DeviceMemory>> weights_;
  std::vector<BoundWeight> bound_;
  std::vector<BufferId> inputs_;
  BufferId out_;
  Plan plan_;
  WorkspacePlan places_;
  StepState state_;
  std::unique_ptr<Program> program_;
};

struct Executor {
  std::string backend;
  std::string isa;
  BackendOptions options(int threads = 1) const {
    return backend == "cpu" ? BackendOptions{.threads = threads, .isa = isa} : BackendOptions{};
  }
};

void PrintTo(const Executor& e, std::ostream* out) { *out << e.backend << " " << e.isa; }

std::vector<Executor> executors() {
  std::vector<Executor> all = {{"reference", ""}};
  for (const cpu::Isa isa : cpu::supported_isas()) all.push_back({"cpu", cpu::isa_name(isa)});
  return all;
}

class StateOps : public testing::TestWithParam<Executor> {
 protected:
  static Machine make(const Layer& layer, int threads = 1) {
    return Machine(GetParam().backend, GetParam().options(threads), layer);
  }
  static Machine make(const Layer& layer, const CacheOptions& cache) {
    return Machine(GetParam().backend, GetParam().options(), layer, cache);
  }
};
INSTANTIATE_TEST_SUITE_P(Executors, StateOps, testing::ValuesIn(executors()),
                         [](const auto& executor) {
                           return executor.param.backend +
                                  (executor.param.isa.empty() ? "" : "_" + executor.param.isa);
                         });

std::vector<int> sequence(int length, int seed) {
  std::vector<int> tokens(size_of(length));
  for (int i = 0; i < length; ++i) tokens[size_of(i)] = 1000 * seed + i;
  return tokens;
}

bool same_bits(const float* a, const float* b, std::size_t n) {
  return std::memcmp(a, b, n * sizeof(float)) == 0;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && same_bits(a.data(), b.data(), a.size());
}

// --- What the ops compute -----------------------------------------------------------------------

// Rows of unequal lengths in one step, against the formulas over each row as a whole.
TEST_P(StateOps, ComputeTheFormulas) {
  for (const auto& [name, layer] : conforming_layers()) {
    SCOPED_TRACE(name);
    Machine machine = make(layer);
    const std::vector<Lane> lanes = {{2, 0, sequence(17, 1)},
                                     {0, 0, sequence(1, 2)},
                                     {3, 0, sequence(40, 3)},
                                     {1, 0, sequence(5, 4)}};
    const std::vector<float> got = machine.run(lanes);
    std::size_t at = 0;
    for (const Lane& lane : lanes) {
      const std::vector<double> want = layer.expected(layer.inputs(lane.tokens));
      double largest = 1;
      for (const double x : want) largest = std::max(largest, std::abs(x));
      // Of the reference, states rounded to f32 token by token; of the CPU, sums in f32 besides.
      const double tolerance = (GetParam().backend == "reference" ? 1e-6 : 4e-6) * largest;
      for (const double x : want) {
        ASSERT_NEAR(got[at], x, tolerance) << "element " << at;
        ++at;
      }
    }
    EXPECT_EQ(at, got.size());
  }
}

// A row's tokens in any pieces, beside other rows that come and go.
TEST_P(StateOps, ChunkingDoesNotChangeTheBits) {
  std::mt19937 random(5);
  for (const auto& [name, layer] : conforming_layers()) {
    SCOPED_TRACE(name);
    const std::size_t width = size_of(layer.out_width);
    std::vector<std::vector<int>> rows;
    std::vector<std::vector<float>> want;
    for (int r = 0; r < Machine::kLanes; ++r) {
      rows.push_back(sequence(10 + 13 * r, 10 + r));
      Machine whole = make(layer);
      want.push_back(whole.run_whole(r, rows.back()));
    }
    Machine machine = make(layer);
    EXPECT_TRUE(same_bits(machine.run_whole(3, rows[3], 1), want[3]));
    if (layer.spec.heads > 0 || layer.spec.conv_width > 0) machine.forget(3);
    std::vector<std::size_t> known(rows.size());
    while (known != std::vector<std::size_t>{10, 23, 36, 49}) {
      std::vector<Lane> lanes;
      for (std::size_t r = 0; r < rows.size(); ++r) {
        const std::size_t count = std::min<std::size_t>(random() % 9, rows[r].size() - known[r]);
        if (count == 0) continue;
        const auto begin = rows[r].begin() + static_cast<std::ptrdiff_t>(known[r]);
        lanes.push_back({static_cast<int>(r),
                         static_cast<int>(known[r]),
                         {begin, begin + static_cast<std::ptrdiff_t>(count)}});
      }
      if (lanes.empty()) continue;
      std::shuffle(lanes.begin(), lanes.end(), random);
      const std::vector<float> got = machine.run(lanes);
      const float* out = got.data();
      for (const Lane& lane : lanes) {
        const auto r = size_of(lane.slot);
        ASSERT_TRUE(same_bits(out, want[r].data() + known[r] * width, lane.tokens.size() * width))
            << "row " << r << " from " << known[r];
        out += lane.tokens.size() * width;
        known[r] += lane.tokens.size();
      }
    }
  }
}

// Masked tokens in every place of a lane: their outputs are 0, and the others do not notice them.
TEST_P(StateOps, MaskedTokensStoreAndReadNothing) {
  for (const auto& [name, layer] : conforming_layers()) {
    if (layer.spec.heads == 0 && layer.spec.conv_width == 0) continue;
    SCOPED_TRACE(name);
    const std::size_t width = size_of(layer.out_width);
    const std::vector<int> row = sequence(12, 6);
    Machine whole = make(layer);
    const std::vector<float> want = whole.run_whole(0, row);
    Machine machine = make(layer);
    std::vector<float> got;
    int position = 0;
    const auto step = [&](std::vector<int> tokens) {
      const std::vector<std::byte> before = machine.cache_bytes();
      const std::vector<float> out =
          machine.run({{1, 0, {kMasked}}, {0, position, tokens}, {2, 0, {kMasked, kMasked}}});
      tokens.insert(tokens.begin(), kMasked);
      tokens.insert(tokens.end(), 2, kMasked);
      bool stored = false;
      for (std::size_t t = 0; t < tokens.size(); ++t) {
        const auto begin = out.begin() + static_cast<std::ptrdiff_t>(t * width);
        const auto end = begin + static_cast<std::ptrdiff_t>(width);
        if (tokens[t] != kMasked) {
          got.insert(got.end(), begin, end);
          ++position;
          stored = true;
        } else {
          EXPECT_TRUE(std::all_of(begin, end, [](float x) { return x == 0; })) << "token " << t;
        }
      }
      EXPECT_EQ(machine.cache_bytes() != before, stored);
    };
    step({kMasked});
    step({row[0], kMasked, row[1], row[2]});
    step({kMasked, kMasked});
    step({kMasked, row[3], row[4], kMasked, kMasked, row[5]});
    step({row[6]});
    step({kMasked, row[7], kMasked, row[8], row[9], row[10], row[11], kMasked});
    EXPECT_TRUE(same_bits(got, want));
  }
}

TEST_P(StateOps, WorkersDoNotChangeTheBits) {
  if (GetParam().backend != "cpu") GTEST_SKIP() << "only the cpu backend has workers";
  for (const auto& [name, layer] : conforming_layers()) {
    SCOPED_TRACE(name);
    const std::vector<Lane> lanes = {
        {1, 0, sequence(19, 1)}, {3, 0, sequence(2, 2)}, {0, 0, sequence(33, 3)}};
    Machine one = make(layer);
    const std::vector<float> want = one.run(lanes);
    for (const int threads : {2, 3, 5}) {
      Machine machine = make(layer, threads);
      EXPECT_TRUE(same_bits(machine.run(lanes), want)) << threads << " workers";
    }
  }
}

// --- Going back ---------------------------------------------------------------------------------

// Small layers with both ops, whose inputs reach back over several steps.
std::vector<std::pair<std::string, Layer>> rolling_layers() {
  std::vector<std::pair<std::string, Layer>> layers;
  layers.emplace_back("delta",
                      delta_layer({.heads = 2, .key_heads = 1, .key_dim = 3, .value_dim = 5}, 4));
  layers.emplace_back("ssm", ssm_layer({.heads = 2, .groups = 1, .key_dim = 2, .value_dim = 3}, 3));
  layers.emplace_back("conv", conv_layer({.width = 3, .taps = 4}));
  return layers;
}

CacheOptions rolling(int depth, StateRollback rollback) {
  return {.max_seq_len = 1 << 20,
          .slots = Machine::kLanes,
          .rollback_depth = depth,
          .chunk = Machine::kTokens,
          .state_rollback = rollback};
}

struct Rolling {
  int depth;
  StateRollback rollback;
};
constexpr Rolling kRollings[] = {{1, StateRollback::kExact},   {2, StateRollback::kExact},
                                 {5, StateRollback::kExact},   {16, StateRollback::kExact},
                                 {1, StateRollback::kCompact}, {2, StateRollback::kCompact},
                                 {5, StateRollback::kCompact}, {16, StateRollback::kCompact}};

// From every length around the first multiples of the interval, by every count; then other tokens,
// past the next multiples; and back once more.
TEST_P(StateOps, GoingBackLeavesNothingBehind) {
  for (const auto& [name, layer] : rolling_layers()) {
    const std::size_t width = size_of(layer.out_width);
    Machine fresh = make(layer);  // that never goes back
    for (const auto& [depth, rollback] : kRollings) {
      SCOPED_TRACE(name + ", depth " + std::to_string(depth) +
                   (rollback == StateRollback::kExact ? ", exact" : ", compact"));
      Machine machine = make(layer, rolling(depth, rollback));
      const std::vector<int> first = sequence(2 * depth + 3, 1);
      for (int length = 1; length <= static_cast<int>(first.size()); ++length) {
        for (int count = 0; count <= std::min(depth, length); ++count) {
          std::vector<int> row(first.begin(), first.begin() + length);
          machine.forget(0);
          machine.run_whole(0, row, 1 + (length + count) % 4);
          for (const int back : {count, std::min(depth, 1 + count)}) {
            const int kept = static_cast<int>(row.size()) - back;
            machine.poison(0, static_cast<int>(row.size()), kept);
            row.resize(size_of(kept));
            const std::vector<int> more =
                sequence(1 + (count + length) % (depth + 2) + back, 2 + back);
            row.insert(row.end(), more.begin(), more.end());
            const std::vector<float> got = machine.run({{0, kept, more}});
            fresh.forget(0);
            const std::vector<float> want = fresh.run_whole(0, row);
            ASSERT_TRUE(same_bits(got.data(), want.data() + size_of(kept) * width, got.size()))
                << "length " << length << ", back " << back << " to " << kept;
          }
        }
      }
    }
  }
}

// Speculation: rows that accept no token, all, or some of each draft, side by side.
TEST_P(StateOps, AThousandRoundsOfSpeculation) {
  constexpr int kRounds = 1000;
  for (const auto& [name, layer] : rolling_layers()) {
    const std::size_t width = size_of(layer.out_width);
    Machine fresh = make(layer);
    for (const auto& [depth, rollback] : kRollings) {
      SCOPED_TRACE(name + ", depth " + std::to_string(depth) +
                   (rollback == StateRollback::kExact ? ", exact" : ", compact"));
      Machine machine = make(layer, rolling(depth, rollback));
      std::mt19937 random(static_cast<unsigned>(depth));
      struct Row {
        std::vector<int> tokens;
        std::vector<float> out;
      };
      std::array<Row, 3> rows;  // that accept none, all, some
      for (std::size_t r = 0; r < rows.size(); ++r) {
        rows[r].tokens = sequence(7 + 10 * static_cast<int>(r), static_cast<int>(r));
        rows[r].out = machine.run_whole(static_cast<int>(r), rows[r].tokens);
      }
      int next = 10000;
      for (int round = 0; round < kRounds; ++round) {
        std::vector<Lane> lanes;
        for (std::size_t i = 0; i < rows.size(); ++i) {
          const std::size_t r = (i + size_of(round)) % rows.size();
          Lane lane{static_cast<int>(r), static_cast<int>(rows[r].tokens.size()), {}};
          for (int n = static_cast<int>(random() % size_of(depth)); n >= 0; --n) {
            lane.tokens.push_back(next++);
          }
          lanes.push_back(std::move(lane));
        }
        const std::vector<float> got = machine.run(lanes);
        auto out = got.begin();
        for (const Lane& lane : lanes) {
          Row& row = rows[size_of(lane.slot)];
          const std::size_t drafted = lane.tokens.size();
          const std::size_t accepted = lane.slot == 0   ? 0
                                       : lane.slot == 1 ? drafted
                                                        : random() % (drafted + 1);
          row.tokens.insert(row.tokens.end(), lane.tokens.begin(),
                            lane.tokens.begin() + static_cast<std::ptrdiff_t>(accepted));
          row.out.insert(row.out.end(), out, out + static_cast<std::ptrdiff_t>(accepted * width));
          out += static_cast<std::ptrdiff_t>(drafted * width);
          machine.poison(lane.slot, lane.position + static_cast<int>(drafted),
                         static_cast<int>(row.tokens.size()));
        }
      }
      for (std::size_t r = 0; r < rows.size(); ++r) {
        // What is still there after all: one more token.
        rows[r].tokens.push_back(next);
        const int last = static_cast<int>(rows[r].tokens.size()) - 1;
        const std::vector<float> out = machine.run({{static_cast<int>(r), last, {next}}});
        rows[r].out.insert(rows[r].out.end(), out.begin(), out.end());
        fresh.forget(0);
        EXPECT_TRUE(same_bits(rows[r].out, fresh.run_whole(0, rows[r].tokens))) << "row " << r;
      }
    }
  }
}

// Steps of one slot leave every byte of the others' states alone, and NaN in them does not spread.
TEST_P(StateOps, SlotsAreIndependent) {
  for (const auto& [name, layer] : rolling_layers()) {
    for (const auto& [depth, rollback] : kRollings) {
      SCOPED_TRACE(name + ", depth " + std::to_string(depth));
      Machine machine = make(layer, rolling(depth, rollback));
      Machine other = make(layer, rolling(depth, rollback));
      const std::vector<int> row = sequence(41, 3);
      const std::vector<float> want = machine.run_whole(2, row, 7);
      EXPECT_TRUE(same_bits(other.run_whole(0, row, 5), want));
      EXPECT_TRUE(std::ranges::all_of(want, [](float x) { return std::isfinite(x); }));
      machine.forget(2);  // nothing is left but what the row has written
      const std::vector<std::byte> bytes = machine.cache_bytes();
      EXPECT_TRUE(std::ranges::all_of(bytes, [](std::byte b) { return b == std::byte{0xFF}; }));
    }
  }
}

}  // namespace
}  // namespace pianola
