#include "models/model_config_check.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace pianola {
namespace {

void check_int(const FieldName& name, std::string_view field, std::int64_t value, std::int64_t low,
               std::int64_t high) {
  if (value >= low && value <= high) return;
  fail(ErrorCode::kInvalidModel, "{}: expected a value in [{}, {}], found {}", name(field), low,
       high, value);
}

// Positive as float32 too, since that is what kernels compute with, and at most `high`.
void check_positive(const FieldName& name, std::string_view field, double value, double high) {
  if (std::isfinite(value) && value <= high && static_cast<float>(value) > 0.0F) return;
  fail(ErrorCode::kInvalidModel, "{}: expected a number above 0 and at most {}, found {}",
       name(field), high, value);
}

void check_sizes(const ModelConfig& c, const FieldName& name) {
  check_int(name, "vocab_size", c.vocab_size, 1, kMaxVocab);
  check_int(name, "hidden_size", c.hidden_size, 1, kMaxWidth);
  check_int(name, "intermediate_size", c.intermediate_size, 1, kMaxWidth);
  check_int(name, "num_hidden_layers", c.num_hidden_layers, 1, kMaxLayers);
  check_int(name, "num_nextn_predict_layers", c.num_nextn_predict_layers, 0, kMaxLayers);
  check_int(name, "num_attention_heads", c.num_attention_heads, 1, kMaxHeads);
  check_int(name, "num_key_value_heads", c.num_key_value_heads, 1, c.num_attention_heads);
  check_int(name, "head_dim", c.head_dim, 2, kMaxHeadDim);
  check_int(name, "max_position_embeddings", c.max_position_embeddings, 1, kMaxPositions);
  if (c.num_attention_heads % c.num_key_value_heads != 0) {
    fail(ErrorCode::kInvalidModel, "{}: {} does not divide {} ({})", name("num_key_value_heads"),
         c.num_key_value_heads, name("num_attention_heads"), c.num_attention_heads);
  }
  if (c.head_dim % 2 != 0) {
    fail(ErrorCode::kInvalidModel, "{}: expected an even number, since rope turns pairs, found {}",
         name("head_dim"), c.head_dim);
  }
  const double turned = static_cast<double>(c.head_dim) * c.rope.partial_rotary_factor;
  if (turned < 2 || static_cast<std::int64_t>(turned) % 2 != 0) {
    fail(ErrorCode::kInvalidModel, "{}: expected an even number of a head's {} to turn, found {}",
         name("partial_rotary_factor"), c.head_dim, turned);
  }
  if (c.num_attention_heads * c.head_dim > kMaxWidth) {
    fail(ErrorCode::kInvalidModel, "{}: {} heads of {} are wider than {}",
         name("num_attention_heads"), c.num_attention_heads, c.head_dim, kMaxWidth);
  }
}

void check_experts(const ExpertsConfig& e, const FieldName& name) {
  if (e.num_experts == 0) return;
  check_int(name, "num_experts", e.num_experts, 1, kMaxExperts);
  check_int(name, "num_experts_per_tok", e.num_experts_per_tok, 1, e.num_experts);
  check_int(name, "moe_intermediate_size", e.moe_intermediate_size, 1, kMaxWidth);
  check_int(name, "shared_expert_intermediate_size", e.shared_expert_intermediate_size, 0,
            kMaxWidth);
}

void check_routing(const ExpertsConfig& e, const FieldName& name) {
  if (e.num_experts == 0) return;
  check_positive(name, "routed_scaling_factor", e.route_scale, 1e6);
  check_int(name, "n_group", e.groups.count, 1, kMaxRouteGroups);
  if (e.num_experts % e.groups.count != 0) {
    fail(ErrorCode::kInvalidModel, "{}: {} does not divide {} ({})", name("n_group"),
         e.groups.count, name("num_experts"), e.num_experts);
  }
  const std::int64_t group = e.num_experts / e.groups.count;
  check_int(name, "topk_group", e.groups.chosen, 1, e.groups.count);
  if (group < e.groups.best) {
    fail(ErrorCode::kInvalidModel, "{}: groups of {} experts, expected at least {}",
         name("n_group"), group, e.groups.best);
  }
  if (group * e.groups.chosen < e.num_experts_per_tok) {
    fail(ErrorCode::kInvalidModel, "{}: {} groups of {} experts, {} experts are chosen",
         name("topk_group"), e.groups.chosen, group, e.num_experts_per_tok);
  }
}

void check_latent(const ModelConfig& c, const FieldName& name) {
  const LatentConfig& l = c.latent;
  if (!l.present()) return;
  check_int(name, "kv_lora_rank", l.kv_lora_rank, 1, kMaxHeadDim);
  check_int(name, "q_lora_rank", l.q_lora_rank, 0, kMaxWidth);
  check_int(name, "qk_nope_head_dim", l.qk_nope_head_dim, 1, kMaxHeadDim);
  check_int(name, "qk_rope_head_dim", l.qk_rope_head_dim, 2, kMaxHeadDim);
  check_int(name, "v_head_dim", l.v_head_dim, 1, kMaxHeadDim);
  const std::int64_t widest =
      std::max({l.qk_nope_head_dim + l.qk_rope_head_dim, l.qk_nope_head_dim + l.v_head_dim,
                l.kv_lora_rank + l.qk_rope_head_dim});
  check_int(name, "num_attention_heads, times a head's width", c.num_attention_heads * widest, 1,
            kMaxWidth);
}

// What config.json calls the sizes of state layers.
struct StateFields {
  const char* heads;
  const char* key_heads;
  const char* key_dim;
  const char* value_dim;
  const char* conv_taps;
};

constexpr StateFields kDeltaRuleFields = {"linear_num_value_heads", "linear_num_key_heads",
                                          "linear_key_head_dim", "linear_value_head_dim",
                                          "linear_conv_kernel_dim"};
constexpr StateFields kSsmFields = {"mamba_n_heads", "mamba_n_groups", "mamba_d_state",
                                    "mamba_d_head", "mamba_d_conv"};

void check_state_layers(const StateLayerConfig& s, const FieldName& name) {
  if (s.mixers.empty()) return;
  const StateFields& fields = s.kind() == Mixer::kSsm ? kSsmFields : kDeltaRuleFields;
  check_int(name, fields.heads, s.heads, 1, kMaxHeads);
  check_int(name, fields.key_heads, s.key_heads, 1, s.heads);
  check_int(name, fields.key_dim, s.key_dim, 1, kMaxHeadDim);
  check_int(name, fields.value_dim, s.value_dim, 1, kMaxHeadDim);
  check_int(name, fields.conv_taps, s.conv_taps, 1, kMaxConvTaps);
  if (s.heads % s.key_heads != 0) {
    fail(ErrorCode::kInvalidModel, "{}: {} does not divide {} ({})", name(fields.key_heads),
         s.key_heads, name(fields.heads), s.heads);
  }
  check_int(name, std::string(fields.heads) + " times " + fields.value_dim, s.conv_width(), 1,
            kMaxWidth);
}

void check_encoder(const ModelConfig& c, const FieldName& name) {
  if (c.encoder.num_layers == 0) return;
  check_int(name, "num_encoder_layers", c.encoder.num_layers, 1, kMaxLayers);
  check_int(name, "decoder_start_token_id", c.encoder.decoder_start_token_id, 0, c.vocab_size - 1);
}

void check_relative_bias(const RelativeBiasConfig& bias, const FieldName& name) {
  if (bias.num_buckets == 0) return;
  check_int(name, "relative_attention_num_buckets", bias.num_buckets, 4, kMaxBuckets);
  if (bias.num_buckets % 2 != 0) {
    fail(ErrorCode::kInvalidModel, "{}: expected an even number, found {}",
         name("relative_attention_num_buckets"), bias.num_buckets);
  }
  // The first half of the buckets are distances of their own.
  check_int(name, "relative_attention_max_distance", bias.max_distance, bias.num_buckets / 2 + 1,
            kMaxBiasDistance);
}

void check_shared_layers(const ModelConfig& c, const FieldName& name) {
  check_int(name, "num_kv_shared_layers", c.num_kv_shared_layers, 0, c.num_hidden_layers - 1);
  if (c.num_kv_shared_layers == 0) return;
  if (!c.state.mixers.empty() || c.latent.present() || c.encoder.num_layers > 0) {
    fail(ErrorCode::kUnsupported,
         "{}: not together with layers that fold tokens into a state, latent attention, or an "
         "encoder",
         name("num_kv_shared_layers"));
  }
  for (std::int64_t layer = 0; layer < c.num_hidden_layers; ++layer) {
    if (c.cache_layer(layer) >= 0) continue;
    fail(ErrorCode::kInvalidModel,
         "{}: layer {} has no keys and values, and no layer before the last {} is of its kind",
         name("num_kv_shared_layers"), layer, c.num_kv_shared_layers);
  }
}

void check_rope(const RopeConfig& rope, const FieldName& name) {
  // A base of 1 or less gives no longer wavelengths, and yarn divides by its logarithm.
  if (!(std::isfinite(rope.theta) && rope.theta > 1.0 && rope.theta <= 1e30)) {
    fail(ErrorCode::kInvalidModel, "{}: expected a number above 1 and at most 1e30, found {}",
         name("rope_theta"), rope.theta);
  }
  if (rope.kind == RopeKind::kDefault) return;
  check_positive(name, "rope_scaling.factor", rope.factor, 1e6);
  if (rope.kind == RopeKind::kLinear) return;
  check_int(name, "rope_scaling.original_max_position_embeddings",
            rope.original_max_position_embeddings, 1, kMaxPositions);
  if (rope.kind == RopeKind::kLlama3) {
    check_positive(name, "rope_scaling.low_freq_factor", rope.low_freq_factor, 1e6);
    check_positive(name, "rope_scaling.high_freq_factor", rope.high_freq_factor, 1e6);
    if (rope.high_freq_factor <= rope.low_freq_factor) {
      fail(ErrorCode::kInvalidModel, "{}: expected more than low_freq_factor ({}), found {}",
           name("rope_scaling.high_freq_factor"), rope.low_freq_factor, rope.high_freq_factor);
    }
  }
  if (rope.kind == RopeKind::kYarn) {
    check_positive(name, "rope_scaling.beta_fast", rope.beta_fast, 1e6);
    check_positive(name, "rope_scaling.beta_slow", rope.beta_slow, 1e6);
    if (rope.beta_fast < rope.beta_slow) {
      fail(ErrorCode::kInvalidModel, "{}: expected at least beta_slow ({}), found {}",
           name("rope_scaling.beta_fast"), rope.beta_slow, rope.beta_fast);
    }
    if (rope.mscale) check_positive(name, "rope_scaling.mscale", *rope.mscale, 1e6);
    if (rope.mscale_all_dim) {
      check_positive(name, "rope_scaling.mscale_all_dim", *rope.mscale_all_dim, 1e6);
    }
    if (rope.attention_factor) {
      check_positive(name, "rope_scaling.attention_factor", *rope.attention_factor, 1e6);
    }
  }
}

}  // namespace

void check_model_config(const ModelConfig& config, const FieldName& name) {
  check_sizes(config, name);
  check_experts(config.experts, name);
  check_routing(config.experts, name);
  check_latent(config, name);
  check_state_layers(config.state, name);
  check_encoder(config, name);
  check_relative_bias(config.relative_bias, name);
  check_positive(name, "head_scale", config.head_scale, 1.0);
  check_shared_layers(config, name);
  check_positive(name, "rms_norm_eps", config.rms_norm_eps, 1.0);
  check_rope(config.rope, name);
  if (config.window_rope) check_rope(*config.window_rope, name);
  const std::int64_t last = config.vocab_size - 1;
  if (config.bos_token_id) check_int(name, "bos_token_id", *config.bos_token_id, 0, last);
  for (const std::int64_t id : config.eos_token_ids) check_int(name, "eos_token_id", id, 0, last);
  if (config.pad_token_id) check_int(name, "pad_token_id", *config.pad_token_id, 0, last);
}

std::int64_t derived_head_dim(std::int64_t hidden_size, std::int64_t num_attention_heads,
                              const FieldName& name) {
  check_int(name, "hidden_size", hidden_size, 1, kMaxWidth);
  check_int(name, "num_attention_heads", num_attention_heads, 1, kMaxHeads);
  if (hidden_size % num_attention_heads != 0) {
    fail(ErrorCode::kInvalidModel, "{}: {} does not divide {} ({}), and there is no head_dim",
         name("num_attention_heads"), num_attention_heads, name("hidden_size"), hidden_size);
  }
  return hidden_size / num_attention_heads;
}

}  // namespace pianola
