#include "models/latent_attention.h"

namespace pianola {

AttentionSpec latent_spec(const ModelConfig& config) {
  const LatentConfig& l = config.latent;
  return {.kv_heads = 1,
          .key_dim = static_cast<int>(l.kv_lora_rank + l.qk_rope_head_dim),
          .value_dim = static_cast<int>(l.kv_lora_rank),
          .latent = true};
}

LatentLayerWeights declare_latent_attention(TableBuilder& table, const ModelConfig& config) {
  const LatentConfig& l = config.latent;
  const std::int64_t width = config.hidden_size;
  const std::int64_t heads = config.num_attention_heads;
  const std::int64_t q_width = heads * (l.qk_nope_head_dim + l.qk_rope_head_dim);
  LatentLayerWeights w;
  if (l.q_lora_rank > 0) {
    w.q_a = table.matrix(Part::kLatentQA, l.q_lora_rank, width);
    w.q_a_norm = table.vector(Part::kLatentQANorm, l.q_lora_rank);
    w.q = table.matrix(Part::kLatentQB, q_width, l.q_lora_rank);
  } else {
    w.q = table.matrix(Part::kQ, q_width, width);
  }
  w.kv = table.matrix(Part::kLatentKvA, l.kv_lora_rank + l.qk_rope_head_dim, width);
  w.kv_norm = table.vector(Part::kLatentKvANorm, l.kv_lora_rank);
  if (table.has(Part::kLatentKB)) {
    constexpr ExpertTensors kStacked = ExpertTensors::kStacked;
    w.absorb = table.stack(kStacked, Part::kLatentKB, heads, l.kv_lora_rank, l.qk_nope_head_dim);
    w.values = table.stack(kStacked, Part::kLatentVB, heads, l.v_head_dim, l.kv_lora_rank);
    return w;
  }
  // Of each head: what makes its keys of the latent, then its values.
  const std::int64_t rows = l.qk_nope_head_dim + l.v_head_dim;
  w.absorb = table.head_stack(Part::kLatentKB, Part::kLatentKvB, heads, l.kv_lora_rank,
                              l.qk_nope_head_dim, {.columns = 1, .source_rows = rows});
  w.values =
      table.head_stack(Part::kLatentVB, Part::kLatentKvB, heads, l.v_head_dim, l.kv_lora_rank,
                       {.source_rows = rows, .first_row = l.qk_nope_head_dim});
  return w;
}

LatentBuffers latent_buffers(Recorder& r, const ModelConfig& config) {
  const LatentConfig& l = config.latent;
  LatentBuffers buffers;
  if (!l.present()) return buffers;
  const std::int64_t heads = config.num_attention_heads;
  const auto buffer = [&r](const char* name, std::int64_t width) {
    return r.buffer(name, Extent::kTokens, width);
  };
  if (l.q_lora_rank > 0) buffers.q_a = buffer("q_a", l.q_lora_rank);
  buffers.q = buffer("q", heads * (l.qk_nope_head_dim + l.qk_rope_head_dim));
  buffers.kv = buffer("kv", l.kv_lora_rank + l.qk_rope_head_dim);
  buffers.absorbed = buffer("absorbed", heads * (l.kv_lora_rank + l.qk_rope_head_dim));
  buffers.latent = buffer("latent", heads * l.kv_lora_rank);
  buffers.attended = buffer("attended", heads * l.v_head_dim);
  return buffers;
}

void record_latent_attention(Recorder& r, const ModelConfig& config, const ModelTables& tables,
                             const LayerWeights& w, const LatentBuffers& buffers, BufferId x) {
  const RmsNorm norm{w.attention_norm, static_cast<float>(config.rms_norm_eps)};
  const auto eps = static_cast<float>(config.latent.norm_eps);
  const LatentLayerWeights& l = w.latent;
  if (l.q_a.valid()) {
    r.record(LinearOp{.in = x, .norm = norm, .weight = l.q_a, .out = buffers.q_a});
    r.record(LinearOp{
        .in = buffers.q_a, .norm = RmsNorm{l.q_a_norm, eps}, .weight = l.q, .out = buffers.q});
  } else {
    r.record(LinearOp{.in = x, .norm = norm, .weight = l.q, .out = buffers.q});
  }
  r.record(LinearOp{.in = x, .norm = norm, .weight = l.kv, .out = buffers.kv});
  r.record(LatentQkvOp{.q = buffers.q,
                       .kv = buffers.kv,
                       .kv_norm = {l.kv_norm, eps},
                       .absorb = l.absorb,
                       .rope = tables.rope,
                       .cache = w.cache,
                       .q_out = buffers.absorbed});
  r.record(AttentionOp{.q = buffers.absorbed,
                       .cache = w.cache,
                       .heads = static_cast<std::int32_t>(config.num_attention_heads),
                       .scale = static_cast<float>(config.attention_scale),
                       .out = buffers.latent});
  r.record(HeadLinearOp{.in = buffers.latent, .weight = l.values, .out = buffers.attended});
}

}  // namespace pianola
