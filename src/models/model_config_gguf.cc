// ModelConfig from GGUF metadata. What the keys mean is what llama.cpp does with them.
#include <algorithm>
#include <array>
#include <cmath>

#include "base/check.h"
#include "models/family.h"
#include "models/model_config.h"
#include "models/model_config_check.h"
#include "models/rope.h"

namespace pianola {
namespace {

// The key, below "<arch>.", that carries a field.
struct GgufField {
  std::string_view field;
  std::string_view key;
};
constexpr std::array kFields = {
    GgufField{"vocab_size", "vocab_size"},
    GgufField{"hidden_size", "embedding_length"},
    GgufField{"intermediate_size", "feed_forward_length"},
    GgufField{"num_hidden_layers", "block_count"},
    GgufField{"num_nextn_predict_layers", "nextn_predict_layers"},
    GgufField{"num_attention_heads", "attention.head_count"},
    GgufField{"num_key_value_heads", "attention.head_count_kv"},
    GgufField{"head_dim", "attention.key_length"},
    GgufField{"max_position_embeddings", "context_length"},
    GgufField{"rms_norm_eps", "attention.layer_norm_rms_epsilon"},
    GgufField{"num_experts", "expert_count"},
    GgufField{"num_experts_per_tok", "expert_used_count"},
    GgufField{"moe_intermediate_size", "expert_feed_forward_length"},
    GgufField{"shared_expert_intermediate_size", "expert_shared_feed_forward_length"},
    GgufField{"num_encoder_layers", "block_count"},
    GgufField{"decoder_start_token_id", "decoder_start_token_id"},
    GgufField{"relative_attention_num_buckets", "attention.relative_buckets_count"},
    GgufField{"relative_attention_max_distance", "attention.relative_buckets_count"},
    GgufField{"n_group", "expert_group_count"},
    GgufField{"topk_group", "expert_group_used_count"},
    GgufField{"routed_scaling_factor", "expert_weights_scale"},
    GgufField{"kv_lora_rank", "attention.kv_lora_rank"},
    GgufField{"q_lora_rank", "attention.q_lora_rank"},
    GgufField{"qk_rope_head_dim", "rope.dimension_count"},
    GgufField{"qk_nope_head_dim", "attention.key_length_mla"},
    GgufField{"v_head_dim", "attention.value_length_mla"},
    GgufField{"linear_num_value_heads", "ssm.time_step_rank"},
    GgufField{"linear_num_key_heads", "ssm.group_count"},
    GgufField{"linear_key_head_dim", "ssm.state_size"},
    GgufField{"linear_conv_kernel_dim", "ssm.conv_kernel"},
    GgufField{"partial_rotary_factor", "rope.dimension_count"},
    GgufField{"rope_theta", "rope.freq_base"},
    GgufField{"rope_scaling.factor", "rope.scaling.factor"},
    GgufField{"rope_scaling.original_max_position_embeddings",
              "rope.scaling.original_context_length"},
    GgufField{"rope_scaling.beta_fast", "rope.scaling.yarn_beta_fast"},
    GgufField{"rope_scaling.beta_slow", "rope.scaling.yarn_beta_slow"},
    GgufField{"rope_scaling.attention_factor", "rope.scaling.attn_factor"},
};

// Typed access to the keys below "<arch>.".
class ArchKeys {
 public:
  ArchKeys(const Metadata& metadata, std::string architecture)
      : metadata_(metadata), prefix_(std::move(architecture) + ".") {}

  std::string key(std::string_view suffix) const { return prefix_ + std::string(suffix); }
  bool contains(std::string_view suffix) const { return metadata_.contains(key(suffix)); }
  std::optional<std::int64_t> find_int(std::string_view suffix) const {
    return metadata_.find_int(key(suffix));
  }
  std::optional<double> find_float(std::string_view suffix) const {
    return metadata_.find_float(key(suffix));
  }
  std::optional<bool> find_bool(std::string_view suffix) const {
    return metadata_.find_bool(key(suffix));
  }
  std::int64_t get_int(std::string_view suffix) const { return metadata_.get_int(key(suffix)); }

  // A key that may be an array with one value a layer: only equal values make one number.
  std::optional<std::int64_t> find_per_layer(std::string_view suffix) const {
    const MetadataValue* value = metadata_.find(key(suffix));
    const auto* list = value ? std::get_if<std::vector<std::int64_t>>(value) : nullptr;
    if (!list || list->empty()) return find_int(suffix);
    for (const std::int64_t element : *list) {
      if (element != list->front()) {
        refuse(suffix, "layers that differ ({} and {})", list->front(), element);
      }
    }
    return list->front();
  }

  template <typename... Args>
  [[noreturn]] void refuse(std::string_view suffix, fmt::format_string<Args...> format,
                           Args&&... args) const {
    fail(ErrorCode::kUnsupported, "metadata key '{}': {}", key(suffix),
         fmt::format(format, std::forward<Args>(args)...));
  }

 private:
  const Metadata& metadata_;
  std::string prefix_;
};

std::int64_t require(const ArchKeys& keys, std::string_view suffix,
                     std::optional<std::int64_t> value) {
  if (value) return *value;
  fail(ErrorCode::kInvalidModel, "metadata key '{}' is missing", keys.key(suffix));
}

const Family& find_family(const Metadata& metadata) {
  const std::string& architecture = metadata.get_string("general.architecture");
  if (const Family* family = find_family_by_architecture(architecture)) return *family;
  fail(ErrorCode::kUnsupported, "metadata key 'general.architecture': '{}'; known are {}",
       architecture.substr(0, 80), known_families(&Family::architecture));
}

// The tokens decide when there are any (llama.cpp sizes the embedding by them); a file without a
// vocabulary gives the number.
std::int64_t read_vocab_size(const Metadata& metadata, const ArchKeys& keys) {
  if (const auto* tokens = metadata.find_strings("tokenizer.ggml.tokens")) {
    if (!tokens->empty()) return static_cast<std::int64_t>(tokens->size());
  }
  return keys.get_int("vocab_size");
}

// block_count counts the layers of a draft at the end, which are left alone.
std::int64_t read_layer_count(const ArchKeys& keys, std::int64_t drafts) {
  const std::int64_t blocks = keys.get_int("block_count");
  if (blocks < 0 || drafts < 0 || drafts > kMaxLayers) return blocks;  // refused later
  return blocks - drafts;
}

RopeKind read_rope_kind(const Metadata& metadata, const ArchKeys& keys) {
  const std::string* type = metadata.find_string(keys.key("rope.scaling.type"));
  if (!type || *type == "linear") return RopeKind::kLinear;  // the default of llama.cpp
  if (*type == "none") return RopeKind::kDefault;
  if (*type == "yarn") return RopeKind::kYarn;
  keys.refuse("rope.scaling.type", "'{}'; known are none, linear and yarn", type->substr(0, 80));
}

void read_yarn(const ArchKeys& keys, RopeConfig& rope) {
  const double ext = keys.find_float("rope.scaling.yarn_ext_factor").value_or(1.0);
  if (ext >= 0.0 && ext != 1.0) {  // negative: not set
    keys.refuse("rope.scaling.yarn_ext_factor", "only 1, found {}", ext);
  }
  rope.beta_fast = keys.find_float("rope.scaling.yarn_beta_fast").value_or(32.0);
  rope.beta_slow = keys.find_float("rope.scaling.yarn_beta_slow").value_or(1.0);
  if (rope.beta_fast < 0.0) rope.beta_fast = 32.0;
  if (rope.beta_slow < 0.0) rope.beta_slow = 1.0;
  // yarn_attn_factor carries Hugging Face's attention_factor. 1 is also what writers put there when
  // the model had none, so 1 means: by the formula.
  const double given = keys.find_float("rope.scaling.yarn_attn_factor").value_or(1.0);
  if (given > 0.0 && given != 1.0) rope.attention_factor = given;
  const double extra = keys.find_float("rope.scaling.attn_factor").value_or(1.0);
  if (extra != 1.0) {
    rope.attention_factor = extra * static_cast<double>(rope_attention_scale(rope));
  }
}

RopeConfig read_rope(const Metadata& metadata, const ArchKeys& keys, const ModelConfig& config) {
  RopeConfig rope;
  rope.theta = keys.find_float("rope.freq_base").value_or(10000.0);
  rope.kind = read_rope_kind(metadata, keys);
  if (rope.kind == RopeKind::kDefault) return rope;  // "none": a factor is not looked at
  const std::optional<double> legacy = keys.find_float("rope.scale_linear");
  const double factor = keys.find_float("rope.scaling.factor").value_or(legacy.value_or(1.0));
  rope.factor = factor == 0.0 ? 1.0 : factor;
  rope.original_max_position_embeddings = keys.find_int("rope.scaling.original_context_length")
                                              .value_or(config.max_position_embeddings);
  if (rope.kind == RopeKind::kYarn) {
    read_yarn(keys, rope);
    // Only read_latent() knows what to do with it.
    if (!config.latent.present() &&
        keys.find_float("rope.scaling.yarn_log_multiplier").value_or(0.0) != 0.0) {
      keys.refuse("rope.scaling.yarn_log_multiplier", "not supported");
    }
    return rope;
  }
  if (keys.find_float("rope.scaling.attn_factor").value_or(1.0) != 1.0) {
    keys.refuse("rope.scaling.attn_factor", "only with yarn scaling");
  }
  rope.original_max_position_embeddings = 0;
  if (rope.factor == 1.0) rope.kind = RopeKind::kDefault;
  return rope;
}

// The widths of a family with a shared expert. Early files leave them out: it is as wide as a plain
// MLP would be, and so are the chosen experts together.
void read_shared_expert(const ArchKeys& keys, std::int64_t feed_forward, ExpertsConfig& experts) {
  experts.shared_expert_intermediate_size =
      keys.find_int("expert_shared_feed_forward_length").value_or(feed_forward);
  experts.moe_intermediate_size =
      keys.find_int("expert_feed_forward_length")
          .value_or(feed_forward / std::max<std::int64_t>(experts.num_experts_per_tok, 1));
}

ExpertsConfig read_deepseek_experts(const ArchKeys& keys, std::int64_t layers) {
  ExpertsConfig experts{.num_experts = keys.get_int("expert_count"),
                        .num_experts_per_tok = keys.get_int("expert_used_count"),
                        .moe_intermediate_size = keys.get_int("expert_feed_forward_length")};
  const std::int64_t shared = keys.get_int("expert_shared_count");
  if (experts.num_experts < 1 || shared < 1 || shared > kMaxExperts ||
      experts.moe_intermediate_size > kMaxWidth) {
    fail(ErrorCode::kInvalidModel, "metadata key '{}': {} experts beside {}, expected some of both",
         keys.key("expert_shared_count"), shared, experts.num_experts);
  }
  experts.shared_expert_intermediate_size = shared * experts.moe_intermediate_size;
  experts.shared_gate = false;
  const double scale = keys.find_float("expert_weights_scale").value_or(1.0);
  experts.route_scale = scale == 0.0 ? 1.0 : scale;
  constexpr std::int64_t kSoftmaxGating = 1;
  constexpr std::int64_t kSigmoidGating = 2;
  const std::int64_t gating = keys.find_int("expert_gating_func").value_or(kSoftmaxGating);
  const bool norm = keys.find_bool("expert_weights_norm").value_or(false);
  if (gating == kSoftmaxGating) {
    experts.score = norm ? RouteScore::kSoftmaxOfChosen : RouteScore::kSoftmax;
  } else if (gating == kSigmoidGating) {
    experts.score = norm ? RouteScore::kSigmoidOfChosen : RouteScore::kSigmoid;
    experts.choice_bias = true;
  } else {
    keys.refuse("expert_gating_func", "only 1 (softmax) and 2 (sigmoid), found {}", gating);
  }
  const std::int64_t groups = keys.find_int("expert_group_count").value_or(0);
  if (groups > 1) {
    const std::int64_t used = keys.find_int("expert_group_used_count").value_or(0);
    if (groups > kMaxRouteGroups || used < 1 || used > groups) {
      fail(ErrorCode::kInvalidModel, "metadata key '{}': {} groups, {} of them, expected 1 to {}",
           keys.key("expert_group_count"), groups, used, kMaxRouteGroups);
    }
    experts.groups = {static_cast<std::int32_t>(groups), static_cast<std::int32_t>(used), 2};
  }
  if (layers < 1 || layers > kMaxLayers) return experts;  // refused by check_model_config
  const std::int64_t plain = keys.find_int("leading_dense_block_count").value_or(0);
  for (std::int64_t layer = 0; layer < layers; ++layer) {
    experts.dense_layers.push_back(layer < plain);
  }
  return experts;
}

// What the keys of latent attention say. Early files have keys and values of each head, later ones
// those that attention sees in the space of the latent, and the heads' by names of their own.
LatentConfig read_latent(const ArchKeys& keys) {
  LatentConfig latent{.kv_lora_rank = keys.get_int("attention.kv_lora_rank"),
                      .q_lora_rank = keys.find_int("attention.q_lora_rank").value_or(0),
                      .qk_rope_head_dim = keys.get_int("rope.dimension_count")};
  if (latent.kv_lora_rank < 1) {
    fail(ErrorCode::kInvalidModel, "metadata key '{}': expected a positive number, found {}",
         keys.key("attention.kv_lora_rank"), latent.kv_lora_rank);
  }
  const bool late = keys.contains("attention.key_length_mla");
  latent.qk_nope_head_dim =
      keys.get_int(late ? "attention.key_length_mla" : "attention.key_length") -
      latent.qk_rope_head_dim;
  latent.v_head_dim = keys.get_int(late ? "attention.value_length_mla" : "attention.value_length");
  latent.norm_eps = keys.find_float("attention.layer_norm_rms_epsilon").value_or(0.0);
  return latent;
}

// llama.cpp turns by plain angles and scales the scores by the square of this.
void scale_latent_scores(const ArchKeys& keys, ModelConfig& config) {
  const LatentConfig& l = config.latent;
  double stretch = 1;
  if (config.rope.kind == RopeKind::kYarn) {
    const double log = keys.find_float("rope.scaling.yarn_log_multiplier").value_or(0.0);
    if (!(log > 0)) {
      keys.refuse("rope.scaling.yarn_log_multiplier", "only a positive number, found {}", log);
    }
    if (config.rope.attention_factor) {
      keys.refuse("rope.scaling.attn_factor", "not with latent attention");
    }
    config.rope.attention_factor = 1;
    stretch = 1 + log * std::log(std::max(config.rope.factor, 1.0));
  }
  config.attention_scale =
      stretch * stretch / std::sqrt(static_cast<double>(l.qk_nope_head_dim + l.qk_rope_head_dim));
}

ExpertsConfig read_experts(const ArchKeys& keys, const Family& family, std::int64_t feed_forward,
                           std::int64_t layers) {
  if (!family.gguf_experts) {
    for (const std::string_view key : {"expert_count", "expert_used_count"}) {
      if (keys.find_int(key).value_or(0) != 0) keys.refuse(key, "mixtures of experts");
    }
    return {};
  }
  if (family.gguf_latent) return read_deepseek_experts(keys, layers);
  for (const std::string_view key : {"expert_shared_count", "expert_group_count"}) {
    if (keys.find_int(key).value_or(0) != 0) keys.refuse(key, "not supported");
  }
  const double scale = keys.find_float("expert_weights_scale").value_or(1.0);
  if (scale != 0.0 && scale != 1.0) keys.refuse("expert_weights_scale", "only 1, found {}", scale);
  ExpertsConfig experts{.num_experts = keys.get_int("expert_count"),
                        .num_experts_per_tok = keys.get_int("expert_used_count"),
                        .score = family.gguf_route_score};
  const bool norm = experts.score == RouteScore::kSoftmaxOfChosen;
  if (keys.find_bool("expert_weights_norm").value_or(norm) != norm) {
    keys.refuse("expert_weights_norm", "only {} for this architecture", norm);
  }
  if (family.gguf_shared_expert) {
    read_shared_expert(keys, feed_forward, experts);
  } else {
    experts.moe_intermediate_size = keys.get_int("expert_feed_forward_length");
  }
  return experts;
}

void refuse_unsupported_keys(const Metadata& metadata, const ArchKeys& keys, const Family& family,
                             const ModelConfig& config) {
  if (!metadata.find_bool(keys.key("attention.causal")).value_or(true)) {
    keys.refuse("attention.causal", "only causal attention");
  }
  if (const auto rotary = keys.find_int("rope.dimension_count")) {
    const bool part = family.partial_rotary_factor > 0 && *rotary > 0 && *rotary < config.head_dim;
    if (*rotary != config.head_dim && !part) {
      keys.refuse("rope.dimension_count", "only the head's width ({}), found {}", config.head_dim,
                  *rotary);
    }
  }
  if (const auto width = keys.find_int("attention.value_length")) {
    if (!config.latent.present() && *width != config.head_dim) {
      keys.refuse("attention.value_length", "only the key's width ({}), found {}", config.head_dim,
                  *width);
    }
  }
  for (const std::string_view key :
       {"rope.scaling.alpha", "attention.clamp_kqv", "attn_logit_softcapping",
        "final_logit_softcapping", "logit_scale"}) {
    if (keys.find_float(key).value_or(0.0) != 0.0) keys.refuse(key, "not supported");
  }
}

// Which layers have the window is nowhere in the file, and llama.cpp computes these architectures
// without it: a window that the context reaches cannot be right both ways.
void refuse_window(const ArchKeys& keys, const ModelConfig& config) {
  const std::int64_t window = keys.find_int("attention.sliding_window").value_or(0);
  if (window != 0 && window < config.max_position_embeddings) {
    keys.refuse("attention.sliding_window",
                "a window of {} tokens in a context of {}: in GGUF files only full attention",
                window, config.max_position_embeddings);
  }
}

// The end of a turn ends an answer as well as the end of the text does.
void read_special_tokens(const Metadata& metadata, ModelConfig& config) {
  const auto find_id = [&](const char* key) -> std::optional<std::int64_t> {
    const std::optional<std::int64_t> id = metadata.find_int(key);
    // 2^32 - 1 is llama.cpp's "none".
    return id == -1 || id == 0xFFFFFFFF ? std::nullopt : id;
  };
  config.bos_token_id = find_id("tokenizer.ggml.bos_token_id");
  config.pad_token_id = find_id("tokenizer.ggml.padding_token_id");
  for (const char* key : {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"}) {
    const std::optional<std::int64_t> id = find_id(key);
    if (id && (config.eos_token_ids.empty() || config.eos_token_ids.front() != *id)) {
      config.eos_token_ids.push_back(*id);
    }
  }
}

FieldName gguf_field_name(const Metadata& metadata, const ArchKeys& keys) {
  return [&metadata, &keys](std::string_view field) -> std::string {
    if (field == "vocab_size" && !keys.contains("vocab_size") &&
        metadata.contains("tokenizer.ggml.tokens")) {
      return "metadata key 'tokenizer.ggml.tokens' (its count)";
    }
    for (const GgufField& known : kFields) {
      if (known.field == field) return fmt::format("metadata key '{}'", keys.key(known.key));
    }
    if (field.ends_with("_token_id")) {
      const bool pad = field.starts_with("pad");
      return fmt::format("metadata key 'tokenizer.ggml.{}'", pad ? "padding_token_id" : field);
    }
    return std::string(field);
  };
}

}  // namespace

void set_gguf_window(const Metadata& metadata, const char* key, ModelConfig& config) {
  const std::int64_t window = metadata.get_int(key);
  if (window < 1 || window > kMaxPositions) {
    fail(ErrorCode::kInvalidModel, "metadata key '{}': expected 1 to {}, found {}", key,
         kMaxPositions, window);
  }
  if (config.num_hidden_layers > kMaxLayers) return;  // refused by check_model_config
  config.layer_windows.assign(
      static_cast<std::size_t>(std::max<std::int64_t>(config.num_hidden_layers, 0)), window);
}

ModelConfig parse_gguf_config(const Metadata& metadata) {
  const Family& family = find_family(metadata);
  const ArchKeys keys(metadata, std::string(family.architecture));
  const FieldName name = gguf_field_name(metadata, keys);

  ModelConfig config;
  config.model_type = family.architecture;
  config.rope_style = family.gguf_rope_style;
  config.qkv_bias = family.gguf_qkv_bias;
  config.qk_norm = family.gguf_qk_norm;
  config.tensors_decide = true;

  config.vocab_size = read_vocab_size(metadata, keys);
  config.hidden_size = keys.get_int("embedding_length");
  config.num_nextn_predict_layers = keys.find_int("nextn_predict_layers").value_or(0);
  config.num_hidden_layers = read_layer_count(keys, config.num_nextn_predict_layers);
  config.max_position_embeddings = keys.get_int("context_length");
  const auto per_layer = [&](std::string_view key) { return keys.find_per_layer(key); };
  config.intermediate_size = require(keys, "feed_forward_length", per_layer("feed_forward_length"));
  config.num_attention_heads =
      require(keys, "attention.head_count", per_layer("attention.head_count"));
  config.num_key_value_heads =
      per_layer("attention.head_count_kv").value_or(config.num_attention_heads);
  if (family.gguf_latent) {
    config.latent = read_latent(keys);
    config.head_dim = config.latent.qk_rope_head_dim;
  } else if (const auto width = keys.find_int("attention.key_length")) {
    config.head_dim = *width;
  } else {
    config.head_dim = derived_head_dim(config.hidden_size, config.num_attention_heads, name);
  }
  config.rms_norm_eps = metadata.get_float(keys.key("attention.layer_norm_rms_epsilon"));
  read_special_tokens(metadata, config);
  refuse_unsupported_keys(metadata, keys, family, config);
  config.experts = read_experts(keys, family, config.intermediate_size, config.num_hidden_layers);
  config.rope = read_rope(metadata, keys, config);
  config.rope.partial_rotary_factor =
      static_cast<double>(keys.find_int("rope.dimension_count").value_or(config.head_dim)) /
      static_cast<double>(config.head_dim);
  if (config.latent.present()) scale_latent_scores(keys, config);
  if (family.finish_gguf) family.finish_gguf(metadata, config);
  check_model_config(config, name);
  if (config.layer_windows.empty()) refuse_window(keys, config);
  return config;
}

}  // namespace pianola
