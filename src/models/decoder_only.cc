#include "models/decoder_only.h"

#include <cmath>
#include <cstring>

#include "base/check.h"
#include "models/decoder_blocks.h"
#include "models/encoder.h"
#include "models/latent_attention.h"
#include "models/rope.h"
#include "models/state_layers.h"
#include "models/table_builder.h"
#include "plan/recorder.h"

namespace pianola {
namespace {

void declare_mlp(TableBuilder& table, const ModelConfig& c, LayerWeights& w) {
  const std::int64_t width = c.hidden_size;
  if (c.gated_mlp) w.gate = table.matrix(Part::kGate, c.intermediate_size, width);
  w.up = table.matrix(c.gated_mlp ? Part::kUp : Part::kPlainUp, c.intermediate_size, width);
  w.down = table.matrix(Part::kDown, width, c.intermediate_size);
  w.gate_bias = table.vector_if(c.mlp_bias, Part::kGateBias, c.intermediate_size);
  w.up_bias = table.vector_if(c.mlp_bias, Part::kUpBias, c.intermediate_size);
  w.down_bias = table.vector_if(c.mlp_bias, Part::kDownBias, width);
}

void declare_fused_experts(TableBuilder& table, const ModelConfig& c, LayerWeights& w) {
  const std::int64_t experts = c.experts.num_experts;
  const std::int64_t width = c.hidden_size;
  const std::int64_t ff = c.experts.moe_intermediate_size;
  w.router = table.matrix(Part::kFusedRouter, experts, width, WeightRole::kRouter);
  w.experts_gate =
      table.transposed_stack(Part::kExpertsGate, Part::kFusedGateUp, experts, ff, width, 2, 0);
  w.experts_up =
      table.transposed_stack(Part::kExpertsUp, Part::kFusedGateUp, experts, ff, width, 2, 1);
  w.experts_down =
      table.transposed_stack(Part::kExpertsDown, Part::kFusedDown, experts, width, ff, 1, 0);
  if (!c.experts.bias) return;
  w.router_bias = table.vector(Part::kRouterBias, experts);
  w.experts_gate_bias =
      table.expert_vector(Part::kExpertsGateBias, Part::kFusedGateUpBias, experts, ff, 2, 0);
  w.experts_up_bias =
      table.expert_vector(Part::kExpertsUpBias, Part::kFusedGateUpBias, experts, ff, 2, 1);
  w.experts_down_bias =
      table.expert_vector(Part::kExpertsDownBias, Part::kFusedDownBias, experts, width);
}

void declare_experts(TableBuilder& table, const ModelConfig& c, LayerWeights& w) {
  const ExpertsConfig& e = c.experts;
  if (e.tensors == ExpertTensors::kFused) return declare_fused_experts(table, c, w);
  const std::int64_t experts = e.num_experts;
  const std::int64_t width = c.hidden_size;
  const std::int64_t ff = e.moe_intermediate_size;
  w.router = table.matrix(Part::kRouter, experts, width, WeightRole::kRouter);
  w.experts_gate = table.stack(e.tensors, Part::kExpertsGate, experts, ff, width);
  w.experts_up = table.stack(e.tensors, Part::kExpertsUp, experts, ff, width);
  w.experts_down = table.stack(e.tensors, Part::kExpertsDown, experts, width, ff);
  w.choice_bias = table.vector_if(e.choice_bias, Part::kChoiceBias, experts);
  if (e.bias) {
    const auto bias = [&](Part part, std::int64_t size) {
      return table.expert_vector(part, part, experts, size);
    };
    w.router_bias = table.vector(Part::kRouterBias, experts);
    w.experts_gate_bias = bias(Part::kExpertsGateBias, ff);
    w.experts_up_bias = bias(Part::kExpertsUpBias, ff);
    w.experts_down_bias = bias(Part::kExpertsDownBias, width);
  }
  if (const std::int64_t shared = e.shared_expert_intermediate_size) {
    if (e.shared_gate) w.shared_router = table.row(Part::kSharedRouter, width, WeightRole::kRouter);
    w.shared_gate = table.matrix(Part::kSharedGate, shared, width);
    w.shared_up = table.matrix(Part::kSharedUp, shared, width);
    w.shared_down = table.matrix(Part::kSharedDown, width, shared);
  }
}

void declare_attention(TableBuilder& table, const ModelConfig& c, bool own_cache, LayerWeights& w) {
  const std::int64_t width = c.hidden_size;
  const std::int64_t q_width = c.num_attention_heads * c.head_dim;
  const std::int64_t kv_width = c.num_key_value_heads * c.head_dim;
  if (c.attention_gate) {  // of each head: its query, then its gate
    const auto rows = [&](std::int64_t begin) {
      return std::vector<RowSlice>{{begin, c.head_dim, 2 * c.head_dim, q_width}};
    };
    const Shape both{2 * q_width, width};
    w.q = table.sliced_matrix(Part::kQ, Part::kQ, both, rows(0));
    w.attention_gate = table.sliced_matrix(Part::kAttentionGate, Part::kQ, both, rows(c.head_dim));
  } else {
    w.q = table.matrix(Part::kQ, q_width, width);
  }
  w.q_bias = table.vector_if(c.qkv_bias, Part::kQBias, q_width);
  if (c.qk_norm) w.q_norm = table.norm(Part::kQNorm, c.head_dim, c.norm_offset);
  if (own_cache) {
    w.k = table.matrix(Part::kK, kv_width, width);
    w.v = table.matrix(Part::kV, kv_width, width);
    w.k_bias = table.vector_if(c.qkv_bias, Part::kKBias, kv_width);
    w.v_bias = table.vector_if(c.qkv_bias, Part::kVBias, kv_width);
    if (c.qk_norm) w.k_norm = table.norm(Part::kKNorm, c.head_dim, c.norm_offset);
  }
  w.o = table.matrix(Part::kO, width, q_width);
  w.o_bias = table.vector_if(c.output_bias, Part::kOBias, width);
  w.sinks = table.vector_if(c.attention_sinks, Part::kSinks, c.num_attention_heads);
}

}  // namespace

LayerWeights declare_layer(TableBuilder& table, const ModelConfig& c, std::int64_t layer) {
  const std::int64_t width = c.hidden_size;
  LayerWeights w;
  const auto norm = [&](Part part, std::int64_t size) {
    return table.norm(part, size, c.norm_offset);
  };
  w.attention_norm = norm(Part::kAttentionNorm, width);
  if (c.latent.present()) {
    w.latent = declare_latent_attention(table, c);
    w.o = table.matrix(Part::kO, width, c.num_attention_heads * c.latent.v_head_dim);
  } else if (c.state.of_layer(layer) == Mixer::kAttention) {
    declare_attention(table, c, c.cache_layer(layer) == layer, w);
  } else {
    w.state = declare_state_layer(table, c);
  }
  if (c.post_norms) {
    w.post_attention_norm = norm(Part::kPostAttentionNorm, width);
    w.mlp_norm = norm(Part::kPreMlpNorm, width);
    w.post_mlp_norm = norm(Part::kPostMlpNorm, width);
  } else {
    // GGUF files of gpt-oss name it by its place.
    const bool by_place = !table.has(Part::kMlpNorm) && table.has(Part::kPostAttentionNorm);
    w.mlp_norm = norm(by_place ? Part::kPostAttentionNorm : Part::kMlpNorm, width);
  }
  if (c.experts.in_layer(layer)) {
    declare_experts(table, c, w);
  } else {
    declare_mlp(table, c, w);
  }
  return w;
}

namespace {

std::vector<float> inverse_frequencies(const Checkpoint& checkpoint, const ModelConfig& config,
                                       const RopeConfig& rope, int max_seq_len) {
  std::vector<float> frequencies = rope_inverse_frequencies(rope, config.head_dim, max_seq_len);
  if (config.has_rope_factors_tensor) {
    const TensorInfo& tensor = checkpoint.get(tensor_name(checkpoint.format(), Part::kRopeFactors));
    if (tensor.dtype != DType::kF32) {
      fail(ErrorCode::kInvalidModel, "tensor '{}': expected f32, found {}", tensor.name,
           dtype_name(tensor.dtype));
    }
    std::vector<float> factors(static_cast<std::size_t>(tensor.shape.elements()));
    std::memcpy(factors.data(), checkpoint.view(tensor).data, factors.size() * sizeof(float));
    apply_rope_factors(frequencies, factors);
  }
  return frequencies;
}

}  // namespace

AttentionBuffers attention_buffers(Recorder& r, const ModelConfig& config) {
  const std::int64_t width = config.num_attention_heads * config.head_dim;
  AttentionBuffers buffers;
  if (config.latent.present()) return buffers;
  buffers.q = r.buffer("q", Extent::kTokens, width);
  buffers.attended = r.buffer("attended", Extent::kTokens, width);
  if (config.attention_gate) buffers.gate = r.buffer("gate", Extent::kTokens, width);
  return buffers;
}

float attention_scale(const ModelConfig& config) {
  const double scale = config.attention_scale > 0
                           ? config.attention_scale
                           : 1.0 / std::sqrt(static_cast<double>(config.head_dim));
  return static_cast<float>(scale);
}

void record_attention(Recorder& r, const ModelConfig& config, const LayerWeights& w,
                      const TokenPlaces& places, CacheId cache, const AttentionBuffers& buffers,
                      BufferId x, BufferId residual, BufferId out) {
  const auto eps = static_cast<float>(config.rms_norm_eps);
  const auto head_norm = [eps](WeightId weight) {
    return weight.valid() ? std::optional<RmsNorm>({weight, eps}) : std::nullopt;
  };
  if (w.k.valid()) {
    r.record(QkvOp{.in = x,
                   .norm = {w.attention_norm, eps},
                   .q = w.q,
                   .k = w.k,
                   .v = w.v,
                   .q_bias = w.q_bias,
                   .k_bias = w.k_bias,
                   .v_bias = w.v_bias,
                   .q_norm = head_norm(w.q_norm),
                   .k_norm = head_norm(w.k_norm),
                   .rope = places.rope,
                   .cache = cache,
                   .q_out = buffers.q});
  } else {
    r.record(QueryOp{.in = x,
                     .norm = {w.attention_norm, eps},
                     .q = w.q,
                     .q_bias = w.q_bias,
                     .q_norm = head_norm(w.q_norm),
                     .rope = places.rope,
                     .head_dim = static_cast<std::int32_t>(config.head_dim),
                     .q_out = buffers.q});
  }
  r.record(AttentionOp{.q = buffers.q,
                       .cache = cache,
                       .heads = static_cast<std::int32_t>(config.num_attention_heads),
                       .scale = attention_scale(config),
                       .sinks = w.sinks,
                       .bias = places.bias,
                       .out = buffers.attended});
  if (w.attention_gate.valid()) {
    r.record(LinearOp{.in = x,
                      .norm = RmsNorm{w.attention_norm, eps},
                      .weight = w.attention_gate,
                      .out = buffers.gate});
    r.record(GateOp{.in = buffers.attended, .gate = buffers.gate, .out = buffers.attended});
  }
  r.record(LinearOp{
      .in = buffers.attended, .weight = w.o, .bias = w.o_bias, .residual = residual, .out = out});
}

namespace {

// The buffers of a mixture of experts, where the model has one.
struct ExpertBuffers {
  BufferId routing;  // [T, 2 * top_k]
  BufferId shared;   // [T, 2] of the shared expert
  BufferId mixed;    // [T, width] what the shared expert is added to, while it still reads x
};

ExpertBuffers expert_buffers(Recorder& r, const ModelConfig& config) {
  const ExpertsConfig& e = config.experts;
  ExpertBuffers buffers;
  if (e.num_experts == 0) return buffers;
  buffers.routing = r.buffer("routing", Extent::kTokens, 2 * e.num_experts_per_tok);
  if (e.shared_expert_intermediate_size == 0) return buffers;
  if (e.shared_gate) buffers.shared = r.buffer("shared", Extent::kTokens, 2);
  buffers.mixed = r.buffer("mixed", Extent::kTokens, config.hidden_size);
  return buffers;
}

}  // namespace

void record_mlp(Recorder& r, const ModelConfig& config, const LayerWeights& w, BufferId x,
                BufferId residual, BufferId out) {
  r.record(GatedMlpOp{.in = x,
                      .norm = {w.mlp_norm, static_cast<float>(config.rms_norm_eps)},
                      .gate = w.gate,
                      .up = w.up,
                      .down = w.down,
                      .gate_bias = w.gate_bias,
                      .up_bias = w.up_bias,
                      .down_bias = w.down_bias,
                      .activation = config.hidden_act,
                      .residual = residual,
                      .out = out});
}

namespace {

void record_experts(Recorder& r, const ModelConfig& config, const LayerWeights& w,
                    const ExpertBuffers& buffers, BufferId x, BufferId residual, BufferId out) {
  const RmsNorm norm{w.mlp_norm, static_cast<float>(config.rms_norm_eps)};
  r.record(RouteOp{.in = x,
                   .norm = norm,
                   .weight = w.router,
                   .bias = w.router_bias,
                   .top_k = static_cast<std::int32_t>(config.experts.num_experts_per_tok),
                   .score = config.experts.score,
                   .choice_bias = w.choice_bias,
                   .groups = config.experts.groups,
                   .scale = static_cast<float>(config.experts.route_scale),
                   .out = buffers.routing});
  const bool shared = w.shared_gate.valid();
  r.record(ExpertsOp{.in = x,
                     .norm = norm,
                     .routing = buffers.routing,
                     .gate = w.experts_gate,
                     .up = w.experts_up,
                     .down = w.experts_down,
                     .gate_bias = w.experts_gate_bias,
                     .up_bias = w.experts_up_bias,
                     .down_bias = w.experts_down_bias,
                     .activation = config.hidden_act,
                     .residual = residual,
                     .out = shared ? buffers.mixed : out});
  if (!shared) return;
  if (!w.shared_router.valid()) {  // with a weight of 1 it is a plain MLP
    r.record(GatedMlpOp{.in = x,
                        .norm = norm,
                        .gate = w.shared_gate,
                        .up = w.shared_up,
                        .down = w.shared_down,
                        .activation = config.hidden_act,
                        .residual = buffers.mixed,
                        .out = out});
    return;
  }
  r.record(RouteOp{.in = x,
                   .norm = norm,
                   .weight = w.shared_router,
                   .top_k = 1,
                   .score = RouteScore::kSigmoid,
                   .out = buffers.shared});
  r.record(ExpertsOp{.in = x,
                     .norm = norm,
                     .routing = buffers.shared,
                     .gate = w.shared_gate,
                     .up = w.shared_up,
                     .down = w.shared_down,
                     .activation = config.hidden_act,
                     .residual = buffers.mixed,
                     .out = out});
}

}  // namespace

ModelTables decoder_tables(const Checkpoint& checkpoint, const ModelConfig& config,
                           int max_seq_len) {
  ModelTables tables;
  TableBuilder table(checkpoint, config.tensor_naming, tables);
  const bool shared = table.has(Part::kSharedEmbedding);
  tables.embedding = table.matrix(
      shared && !table.has(Part::kEmbedding) ? Part::kSharedEmbedding : Part::kEmbedding,
      config.vocab_size, config.hidden_size, WeightRole::kEmbedding);
  const auto rope = [&](const char* name, const RopeConfig& r) {
    return Rope{table.constant(name, inverse_frequencies(checkpoint, config, r, max_seq_len)),
                config.rope_style, rope_attention_scale(r)};
  };
  if (config.relative_bias.num_buckets == 0) {
    tables.rope = rope("rope.inverse_frequencies", config.rope);
  } else {
    tables.rope = kNoRope;
    tables.bias = declare_relative_bias(table, config, false);
  }
  tables.window_rope = config.window_rope
                           ? rope("rope.window_inverse_frequencies", *config.window_rope)
                           : tables.rope;
  AttentionSpec cache{.kv_heads = static_cast<int>(config.num_key_value_heads),
                      .key_dim = static_cast<int>(config.head_dim),
                      .value_dim = static_cast<int>(config.head_dim)};
  for (std::int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    table.set_layer(layer);
    LayerWeights& w = tables.layers.emplace_back(declare_layer(table, config, layer));
    if (config.encoder.num_layers > 0) declare_cross_attention(table, config, w);
    const std::int64_t window =
        config.layer_windows.empty() ? 0 : config.layer_windows[static_cast<std::size_t>(layer)];
    // One that no row outgrows is full attention.
    cache.window = window < max_seq_len ? static_cast<int>(window) : 0;
    if (config.state.of_layer(layer) != Mixer::kAttention) {
      tables.states.push_back(state_spec(config));
    } else if (const std::int64_t source = config.cache_layer(layer); source != layer) {
      w.cache = tables.layers[static_cast<std::size_t>(source)].cache;
    } else {
      w.cache = {static_cast<std::int32_t>(tables.caches.size())};
      tables.caches.push_back(config.latent.present() ? latent_spec(config) : cache);
    }
  }
  tables.final_norm = table.scaled_norm(Part::kFinalNorm, config.hidden_size, config.norm_offset,
                                        config.head_scale);
  tables.head = config.tie_word_embeddings
                    ? table.tied_head(shared ? Part::kSharedEmbedding : Part::kEmbedding,
                                      config.vocab_size, config.hidden_size)
                    : table.matrix(Part::kHead, config.vocab_size, config.hidden_size);
  if (config.encoder.num_layers > 0) declare_encoder(checkpoint, config, tables);
  return tables;
}

Plan record_decoder(const ModelConfig& config, const ModelTables& tables, const StepShape& shape) {
  Recorder r(tables.weights, tables.cache_specs(), shape);
  const auto eps = static_cast<float>(config.rms_norm_eps);
  const BufferId x = r.buffer("x", Extent::kTokens, config.hidden_size);
  const AttentionBuffers attention = attention_buffers(r, config);
  const StateBuffers states = state_buffers(r, config);
  const LatentBuffers latents = latent_buffers(r, config);
  std::int32_t next_state = 0;

  // What a block adds, where it is normed first.
  const BufferId added =
      config.post_norms ? r.buffer("added", Extent::kTokens, config.hidden_size) : BufferId{};
  const BufferId target = config.post_norms ? added : x;
  const BufferId residual = config.post_norms ? BufferId{} : x;
  const ExpertBuffers routing = expert_buffers(r, config);

  r.record(RollbackOp{});
  r.record(EmbedOp{
      .table = tables.embedding, .scale = static_cast<float>(config.embedding_scale), .out = x});
  for (std::int32_t layer = 0; layer < static_cast<std::int32_t>(tables.layers.size()); ++layer) {
    const LayerWeights& w = tables.layers[static_cast<std::size_t>(layer)];
    const bool windowed =
        !config.layer_windows.empty() && config.layer_windows[static_cast<std::size_t>(layer)] > 0;
    if (w.state.out.valid()) {
      record_state_layer(r, config, w, states, StateId{next_state++}, x, residual, target);
    } else if (w.latent.kv.valid()) {
      record_latent_attention(r, config, tables, w, latents, x);
      r.record(
          LinearOp{.in = latents.attended, .weight = w.o, .residual = residual, .out = target});
    } else {
      const TokenPlaces places{windowed ? tables.window_rope : tables.rope, tables.bias};
      record_attention(r, config, w, places, w.cache, attention, x, residual, target);
    }
    if (w.cross_q.valid()) {
      record_cross_attention(r, config, w, CacheId{tables.encoder.first_cross.index + layer},
                             attention, x);
    }
    if (config.post_norms) {
      r.record(NormOp{.in = added, .norm = {w.post_attention_norm, eps}, .residual = x, .out = x});
    }
    if (w.router.valid()) {
      record_experts(r, config, w, routing, x, residual, target);
    } else {
      record_mlp(r, config, w, x, residual, target);
    }
    if (config.post_norms) {
      r.record(NormOp{.in = added, .norm = {w.post_mlp_norm, eps}, .residual = x, .out = x});
    }
  }

  const RmsNorm final_norm{tables.final_norm, eps};
  if (shape.variant == StepVariant::kScore) {
    r.record(ScoreOp{.in = x, .norm = final_norm, .weight = tables.head});
  } else {
    const BufferId logits = r.buffer("logits", Extent::kLogitRows, config.vocab_size);
    r.record(LmHeadOp{.in = x, .norm = final_norm, .weight = tables.head, .logits = logits});
    if (shape.variant == StepVariant::kSample) r.record(SampleOp{.logits = logits});
  }
  r.record(AdvanceOp{});
  return r.finish();
}

}  // namespace pianola
