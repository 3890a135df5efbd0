#include "models/state_layers.h"

namespace pianola {
namespace {

constexpr float kUnitEps = 1e-6F;  // of the keys' and queries' lengths, in every reference

// One tensor with q, k, v and z side by side in the rows of each key head.
void declare_fused_qkvz(TableBuilder& table, const ModelConfig& c, StateLayerWeights& w) {
  const StateLayerConfig& s = c.state;
  const std::int64_t share = s.heads / s.key_heads;  // value heads of a key head
  const std::int64_t values = share * s.value_dim;
  const std::int64_t stride = 2 * s.key_dim + 2 * values;
  const Shape qkvz{s.key_heads * stride, c.hidden_size};
  const auto keys = [&](std::int64_t begin) {
    return RowSlice{begin, s.key_dim, stride, s.key_heads * s.key_dim};
  };
  const auto of_values = [&](std::int64_t begin) {
    return RowSlice{begin, values, stride, s.value_width()};
  };
  w.in = table.sliced_matrix(Part::kLinearQkv, Part::kLinearQkvz, qkvz,
                             {keys(0), keys(s.key_dim), of_values(2 * s.key_dim)});
  w.z = table.sliced_matrix(Part::kLinearZ, Part::kLinearQkvz, qkvz,
                            {of_values(2 * s.key_dim + values)});
}

// One tensor with beta and decay side by side in the rows of each key head.
void declare_fused_rates(TableBuilder& table, const ModelConfig& c, StateLayerWeights& w) {
  const StateLayerConfig& s = c.state;
  const std::int64_t share = s.heads / s.key_heads;
  const Shape ba{2 * s.heads, c.hidden_size};
  w.beta = table.sliced_matrix(Part::kLinearBeta, Part::kLinearBetaDecay, ba,
                               {{0, share, 2 * share, s.heads}});
  w.decay = table.sliced_matrix(Part::kLinearDecay, Part::kLinearBetaDecay, ba,
                                {{share, share, 2 * share, s.heads}});
}

// [conv_width, 1, taps] in the checkpoint, in GGUF a matrix; one tap of all channels after the
// other here.
WeightId declare_conv(TableBuilder& table, Part part, const StateLayerConfig& s) {
  std::vector<RowSlice> taps;
  for (std::int64_t j = 0; j < s.conv_taps; ++j) {
    taps.push_back({j, 1, s.conv_taps, s.conv_width()});
  }
  const Shape shape = table.rank(part) == 2 ? Shape{s.conv_width(), s.conv_taps}
                                            : Shape{s.conv_width(), 1, s.conv_taps};
  return table.sliced_vector(part, shape, std::move(taps));
}

StateLayerWeights declare_delta_rule(TableBuilder& table, const ModelConfig& c) {
  const StateLayerConfig& s = c.state;
  StateLayerWeights w;
  if (table.has(Part::kLinearQkvz)) {
    declare_fused_qkvz(table, c, w);
  } else {
    w.in = table.matrix(Part::kLinearQkv, s.conv_width(), c.hidden_size);
    w.z = table.matrix(Part::kLinearZ, s.value_width(), c.hidden_size);
  }
  if (table.has(Part::kLinearBetaDecay)) {
    declare_fused_rates(table, c, w);
  } else {
    w.beta = table.matrix(Part::kLinearBeta, s.heads, c.hidden_size);
    w.decay = table.matrix(Part::kLinearDecay, s.heads, c.hidden_size);
  }
  w.conv = declare_conv(table, Part::kLinearConv, s);
  w.a_log = table.log_vector(Part::kLinearALog, s.heads);
  w.dt_bias = table.vector(Part::kLinearDtBias, s.heads);
  w.norm = table.vector(Part::kLinearNorm, s.value_dim);
  w.out = table.matrix(Part::kLinearOut, c.hidden_size, s.value_width());
  return w;
}

// The rows of one tensor: z, then x, B and C, then dt.
StateLayerWeights declare_ssm(TableBuilder& table, const ModelConfig& c) {
  const StateLayerConfig& s = c.state;
  const std::int64_t dt_begin = s.value_width() + s.conv_width();
  const Shape in{dt_begin + s.heads, c.hidden_size};
  const auto rows = [&](Part part, std::int64_t begin, std::int64_t count) {
    return table.sliced_matrix(part, Part::kSsmIn, in, {{.begin = begin, .count = count}});
  };
  StateLayerWeights w;
  w.in = rows(Part::kSsmXbc, s.value_width(), s.conv_width());
  w.z = rows(Part::kSsmZ, 0, s.value_width());
  w.decay = rows(Part::kSsmDt, dt_begin, s.heads);
  w.conv = declare_conv(table, Part::kSsmConv, s);
  w.conv_bias = table.vector_if(s.conv_bias, Part::kSsmConvBias, s.conv_width());
  w.a_log = table.vector(Part::kSsmALog, s.heads);
  w.dt_bias = table.vector(Part::kSsmDtBias, s.heads);
  w.skip = table.vector(Part::kSsmSkip, s.heads);
  w.norm = table.vector(Part::kSsmNorm, s.value_width());
  w.out = table.matrix(Part::kSsmOut, c.hidden_size, s.value_width());
  return w;
}

// What becomes of a token, from the output of the convolution to the gated norm, in both kinds.
void record_delta_rule(Recorder& r, const ModelConfig& config, const StateLayerWeights& w,
                       const StateBuffers& buffers, StateId state) {
  const StateLayerConfig& s = config.state;
  r.record(
      DeltaRuleOp{.qkv = buffers.convolved,
                  .decay = buffers.decay,
                  .beta = buffers.beta,
                  .a_log = w.a_log,
                  .dt_bias = w.dt_bias,
                  .key_heads = static_cast<std::int32_t>(s.key_heads),
                  .group = static_cast<std::int32_t>(s.grouped_heads ? s.heads / s.key_heads : 1),
                  .eps = kUnitEps,
                  .state = state,
                  .out = buffers.mixed});
  r.record(GatedNormOp{.in = buffers.mixed,
                       .gate = buffers.gate,
                       .norm = {w.norm, static_cast<float>(config.rms_norm_eps)},
                       .group = static_cast<std::int32_t>(s.value_dim),
                       .out = buffers.mixed});
}

void record_ssm(Recorder& r, const ModelConfig& config, const StateLayerWeights& w,
                const StateBuffers& buffers, StateId state) {
  r.record(SsmOp{.xbc = buffers.convolved,
                 .dt = buffers.decay,
                 .a_log = w.a_log,
                 .dt_bias = w.dt_bias,
                 .skip = w.skip,
                 .groups = static_cast<std::int32_t>(config.state.key_heads),
                 .dt_min = static_cast<float>(config.state.dt_min),
                 .dt_max = static_cast<float>(config.state.dt_max),
                 .state = state,
                 .out = buffers.mixed});
  r.record(GatedNormOp{.in = buffers.mixed,
                       .gate = buffers.gate,
                       .norm = {w.norm, static_cast<float>(config.rms_norm_eps)},
                       .group = static_cast<std::int32_t>(config.state.value_width()),
                       .gate_first = true,
                       .out = buffers.mixed});
}

}  // namespace

StateSpec state_spec(const ModelConfig& config) {
  const StateLayerConfig& s = config.state;
  return {.heads = static_cast<int>(s.heads),
          .key_dim = static_cast<int>(s.key_dim),
          .value_dim = static_cast<int>(s.value_dim),
          .conv_width = static_cast<int>(s.conv_width()),
          .conv_taps = static_cast<int>(s.conv_taps)};
}

StateLayerWeights declare_state_layer(TableBuilder& table, const ModelConfig& config) {
  return config.state.kind() == Mixer::kSsm ? declare_ssm(table, config)
                                            : declare_delta_rule(table, config);
}

StateBuffers state_buffers(Recorder& r, const ModelConfig& config) {
  const StateLayerConfig& s = config.state;
  if (s.kind() == Mixer::kAttention) return {};
  const bool ssm = s.kind() == Mixer::kSsm;
  const auto buffer = [&r](const char* name, std::int64_t width) {
    return r.buffer(name, Extent::kTokens, width);
  };
  return {.projected = buffer(ssm ? "xbc" : "qkv", s.conv_width()),
          .convolved = buffer("convolved", s.conv_width()),
          .gate = buffer("z", s.value_width()),
          .beta = ssm ? BufferId{} : buffer("beta", s.heads),
          .decay = buffer(ssm ? "dt" : "decay", s.heads),
          .mixed = buffer("mixed_values", s.value_width())};
}

void record_state_layer(Recorder& r, const ModelConfig& config, const LayerWeights& w,
                        const StateBuffers& buffers, StateId state, BufferId x, BufferId residual,
                        BufferId out) {
  const StateLayerWeights& s = w.state;
  const auto eps = static_cast<float>(config.rms_norm_eps);
  const auto project = [&](WeightId weight, BufferId to) {
    r.record(
        LinearOp{.in = x, .norm = RmsNorm{w.attention_norm, eps}, .weight = weight, .out = to});
  };
  project(s.in, buffers.projected);
  project(s.z, buffers.gate);
  if (s.beta.valid()) project(s.beta, buffers.beta);
  project(s.decay, buffers.decay);
  r.record(ShortConvOp{.in = buffers.projected,
                       .weight = s.conv,
                       .bias = s.conv_bias,
                       .activation = Activation::kSilu,
                       .state = state,
                       .out = buffers.convolved});
  if (config.state.kind() == Mixer::kSsm) {
    record_ssm(r, config, s, buffers, state);
  } else {
    record_delta_rule(r, config, s, buffers, state);
  }
  r.record(LinearOp{.in = buffers.mixed, .weight = s.out, .residual = residual, .out = out});
}

}  // namespace pianola
