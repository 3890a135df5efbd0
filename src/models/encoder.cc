#include "models/encoder.h"

namespace pianola {

RelativeBias declare_relative_bias(TableBuilder& table, const ModelConfig& config,
                                   bool both_directions) {
  const RelativeBiasConfig& bias = config.relative_bias;
  table.set_layer(0);
  return {.table = table.flat(Part::kRelativeBias, bias.num_buckets, config.num_attention_heads),
          .buckets = static_cast<std::int32_t>(bias.num_buckets),
          .max_distance = static_cast<std::int32_t>(bias.max_distance),
          .both_directions = both_directions};
}

void declare_cross_attention(TableBuilder& table, const ModelConfig& config, LayerWeights& w) {
  const std::int64_t width = config.hidden_size;
  const std::int64_t q_width = config.num_attention_heads * config.head_dim;
  const std::int64_t kv_width = config.num_key_value_heads * config.head_dim;
  w.cross_norm = table.norm(Part::kCrossNorm, width, config.norm_offset);
  w.cross_q = table.matrix(Part::kCrossQ, q_width, width);
  w.cross_k = table.matrix(Part::kCrossK, kv_width, width);
  w.cross_v = table.matrix(Part::kCrossV, kv_width, width);
  w.cross_o = table.matrix(Part::kCrossO, width, q_width);
}

void declare_encoder(const Checkpoint& checkpoint, const ModelConfig& config, ModelTables& tables) {
  TableBuilder table(checkpoint, TensorNaming::kT5Encoder, tables);
  EncoderTables& encoder = tables.encoder;
  encoder.first_weight = WeightId{static_cast<std::int32_t>(tables.weights.size())};
  encoder.embedding = table.has(Part::kEmbedding)
                          ? table.matrix(Part::kEmbedding, config.vocab_size, config.hidden_size,
                                         WeightRole::kEmbedding)
                          : tables.embedding;
  encoder.bias = declare_relative_bias(table, config, true);
  for (std::int64_t layer = 0; layer < config.encoder.num_layers; ++layer) {
    table.set_layer(layer);
    encoder.layers.push_back(declare_layer(table, config, layer));
  }
  encoder.final_norm = table.norm(Part::kFinalNorm, config.hidden_size, config.norm_offset);

  AttentionSpec cache{.kv_heads = static_cast<int>(config.num_key_value_heads),
                      .key_dim = static_cast<int>(config.head_dim),
                      .value_dim = static_cast<int>(config.head_dim),
                      .holds = CacheHolds::kInput};
  encoder.first_cross = CacheId{static_cast<std::int32_t>(tables.caches.size())};
  tables.caches.insert(tables.caches.end(), tables.layers.size(), cache);
  cache.holds = CacheHolds::kStep;
  encoder.step = CacheId{static_cast<std::int32_t>(tables.caches.size())};
  tables.caches.push_back(cache);
}

void record_cross_attention(Recorder& r, const ModelConfig& config, const LayerWeights& w,
                            CacheId cache, const AttentionBuffers& buffers, BufferId x) {
  r.record(LinearOp{.in = x,
                    .norm = RmsNorm{w.cross_norm, static_cast<float>(config.rms_norm_eps)},
                    .weight = w.cross_q,
                    .out = buffers.q});
  r.record(AttentionOp{.q = buffers.q,
                       .cache = cache,
                       .heads = static_cast<std::int32_t>(config.num_attention_heads),
                       .scale = attention_scale(config),
                       .out = buffers.attended});
  r.record(LinearOp{.in = buffers.attended, .weight = w.cross_o, .residual = x, .out = x});
}

Plan record_encoder(const ModelConfig& config, const ModelTables& tables, const StepShape& shape) {
  Recorder r(tables.weights, tables.cache_specs(), shape);
  const EncoderTables& encoder = tables.encoder;
  const BufferId x = r.buffer("x", Extent::kTokens, config.hidden_size);
  const AttentionBuffers attention = attention_buffers(r, config);
  r.record(EmbedOp{
      .table = encoder.embedding, .scale = static_cast<float>(config.embedding_scale), .out = x});
  for (const LayerWeights& w : encoder.layers) {
    record_attention(r, config, w, {kNoRope, encoder.bias}, encoder.step, attention, x, x, x);
    record_mlp(r, config, w, x, x, x);
  }
  const RmsNorm final_norm{encoder.final_norm, static_cast<float>(config.rms_norm_eps)};
  for (std::int32_t layer = 0; layer < static_cast<std::int32_t>(tables.layers.size()); ++layer) {
    const LayerWeights& w = tables.layers[static_cast<std::size_t>(layer)];
    r.record(QkvOp{.in = x,
                   .norm = final_norm,
                   .k = w.cross_k,
                   .v = w.cross_v,
                   .rope = kNoRope,
                   .cache = CacheId{encoder.first_cross.index + layer}});
  }
  return r.finish();
}

}  // namespace pianola
