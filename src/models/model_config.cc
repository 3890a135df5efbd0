#include "models/model_config.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/check.h"
#include "base/json_reader.h"
#include "models/family.h"
#include "models/model_config_check.h"

namespace pianola {
namespace {

namespace json = boost::json;

std::optional<std::int64_t> read_token_id(const JsonObject& root, std::string_view key) {
  const std::optional<std::int64_t> id = root.find_int(key);
  return id == -1 ? std::nullopt : id;  // early Llama files write -1 for "none"
}

// One id or a list of them.
std::vector<std::int64_t> read_token_ids(const JsonObject& root, std::string_view key) {
  const json::value* value = root.find(key);
  if (!value) return {};
  if (!value->is_array()) {
    const std::optional<std::int64_t> id = read_token_id(root, key);
    return id ? std::vector<std::int64_t>{*id} : std::vector<std::int64_t>{};
  }
  if (value->get_array().size() > 64) {
    fail(ErrorCode::kInvalidModel, "{}: expected at most 64 ids, found {}", root.field_path(key),
         value->get_array().size());
  }
  std::vector<std::int64_t> ids;
  for (const json::value& element : value->get_array()) {
    const std::int64_t* id = element.if_int64();
    if (!id) {
      fail(ErrorCode::kInvalidModel, "{}: expected integers in the list", root.field_path(key));
    }
    ids.push_back(*id);
  }
  return ids;
}

RopeKind parse_rope_kind(const JsonObject& rope) {
  // Early files write "type". Both may stand there; transformers reads "rope_type" first.
  const char* key = rope.find("rope_type") ? "rope_type" : "type";
  const std::string name = rope.find_string(key).value_or("default");
  for (const RopeKind kind : {RopeKind::kDefault, RopeKind::kLinear, RopeKind::kDynamic,
                              RopeKind::kYarn, RopeKind::kLlama3}) {
    if (name == rope_kind_name(kind)) return kind;
  }
  fail_unsupported(rope, key, "rope type '{}'; known are default, linear, dynamic, yarn and llama3",
                   name);
}

// 1 is how a config without the field reads; another value needs a family that has such heads.
void read_partial_rotary(const JsonObject& object, RopeConfig& rope) {
  const auto factor = object.find_float("partial_rotary_factor");
  if (!factor) return;
  if (rope.partial_rotary_factor == 1 && *factor != 1) {
    fail_unsupported(object, "partial_rotary_factor", "only 1 (all of a head turns), found {}",
                     *factor);
  }
  if (!(*factor > 0 && *factor <= 1)) {
    fail(ErrorCode::kInvalidModel, "{}: expected a number above 0 and at most 1, found {}",
         object.field_path("partial_rotary_factor"), *factor);
  }
  rope.partial_rotary_factor = *factor;
}

}  // namespace

void parse_rope_parameters(const JsonObject& root, const JsonObject& rope,
                           const ModelConfig& config, RopeConfig& out) {
  out.kind = parse_rope_kind(rope);
  if (const auto theta = rope.find_float("rope_theta")) out.theta = *theta;
  read_partial_rotary(rope, out);
  if (out.kind == RopeKind::kDefault) return;
  out.factor = rope.get_float("factor");
  if (out.kind == RopeKind::kLinear) return;
  // transformers' order: the dynamic kind always starts from max_position_embeddings; for the
  // others a field at the top of config.json wins over the one beside the factor.
  out.original_max_position_embeddings = config.max_position_embeddings;
  if (out.kind == RopeKind::kDynamic) return;
  if (const auto length = root.find_int("original_max_position_embeddings")) {
    out.original_max_position_embeddings = *length;
  } else if (const auto inner = rope.find_int("original_max_position_embeddings")) {
    out.original_max_position_embeddings = *inner;
  }
  if (out.kind == RopeKind::kLlama3) {
    out.low_freq_factor = rope.get_float("low_freq_factor");
    out.high_freq_factor = rope.get_float("high_freq_factor");
    return;
  }
  out.beta_fast = rope.find_float("beta_fast").value_or(32.0);
  out.beta_slow = rope.find_float("beta_slow").value_or(1.0);
  out.truncate = rope.find_bool("truncate").value_or(true);
  out.mscale = rope.find_float("mscale");
  out.mscale_all_dim = rope.find_float("mscale_all_dim");
  out.attention_factor = rope.find_float("attention_factor");
}

namespace {

// transformers 5 writes rope_parameters with the base inside; before, rope_theta stood at the top
// and rope_scaling beside it, null when there was none.
void parse_rope(const JsonObject& root, ModelConfig& config) {
  read_partial_rotary(root, config.rope);
  if (root.find_bool("rope_interleaved").value_or(false)) {
    fail_unsupported(root, "rope_interleaved", "only false: q and k in the halves order");
  }
  config.rope.theta = root.find_float("rope_theta").value_or(10000.0);
  // Both are set only in files edited by hand; transformers then takes rope_scaling.
  const char* key = root.find("rope_scaling") ? "rope_scaling" : "rope_parameters";
  if (const auto rope = root.find_object(key)) {
    parse_rope_parameters(root, *rope, config, config.rope);
  }
}

void refuse_unsupported_fields(const JsonObject& root, const Family& family) {
  if (const auto quantization = root.find_object("quantization_config")) {
    const std::string method = quantization->find_string("quant_method").value_or("");
    if (method == "mxfp4") {
      fail_unsupported(root, "quantization_config",
                       "MXFP4 weights have no kernel here; save the model dequantised (BF16)");
    }
    fail_unsupported(root, "quantization_config",
                     "quantised checkpoints are read from GGUF files only");
  }
  if (const auto tp = root.find_int("pretraining_tp"); tp.value_or(1) > 1) {
    fail_unsupported(root, "pretraining_tp", "only 1 (projections in one piece), found {}", *tp);
  }
  const std::string act = root.find_string("hidden_act").value_or("silu");
  if (act != "silu" && act != "swish") {
    fail_unsupported(root, "hidden_act", "only silu, found '{}'", act);
  }
  if (const json::array* types = root.find_array("layer_types")) {
    for (const json::value& type : *types) {
      if (!type.is_string()) {
        fail(ErrorCode::kInvalidModel, "{}: expected strings", root.field_path("layer_types"));
      }
      const std::string_view name = type.get_string();
      if (name != "full_attention" && name != "sliding_attention" &&
          (name.empty() || name != family.state_layer_type)) {
        fail_unsupported(root, "layer_types",
                         "'{}'; a {} model has full_attention, sliding_attention{}{}",
                         name.substr(0, 80), family.model_type,
                         family.state_layer_type.empty() ? "" : " and ", family.state_layer_type);
      }
    }
  }
}

const Family& find_family(const JsonObject& root) {
  const std::string type = root.get_string("model_type");
  if (const Family* family = find_family_by_model_type(type)) return *family;
  fail_unsupported(root, "model_type", "'{}'; known are {}", type.substr(0, 80),
                   known_families(&Family::model_type));
}

}  // namespace

bool is_absent(const JsonObject& object, std::string_view key) {
  return object.object().if_contains({key.data(), key.size()}) == nullptr;
}

void set_sliding_window(const JsonObject& root, std::optional<std::int64_t> window,
                        std::int64_t first_layer, ModelConfig& config) {
  if (!window || first_layer >= config.num_hidden_layers) return;
  if (*window < 1 || *window > kMaxPositions) {
    fail(ErrorCode::kInvalidModel, "{}: expected 1 to {}, found {}",
         root.field_path("sliding_window"), kMaxPositions, *window);
  }
  if (config.num_hidden_layers > kMaxLayers) return;  // refused by check_model_config
  config.layer_windows.assign(static_cast<std::size_t>(config.num_hidden_layers), *window);
  std::fill_n(config.layer_windows.begin(), std::max<std::int64_t>(first_layer, 0), 0);
}

void open_layers(ModelConfig& config, std::int64_t pattern) {
  for (std::size_t i = 0; i < config.layer_windows.size(); ++i) {
    if ((static_cast<std::int64_t>(i) + 1) % pattern == 0) config.layer_windows[i] = 0;
  }
}

void parse_expert_counts(const JsonObject& root, ModelConfig& config) {
  const char* key = is_absent(root, "num_experts") ? "num_local_experts" : "num_experts";
  config.experts.num_experts = root.get_int(key);
  config.experts.num_experts_per_tok = root.get_int("num_experts_per_tok");
}

// transformers 5 lists the kind of every layer, and the list wins over the rule that made it.
void apply_layer_types(const JsonObject& root, ModelConfig& config) {
  const json::array* types = root.find_array("layer_types");
  if (!types) return;
  if (types->size() != static_cast<std::size_t>(config.num_hidden_layers)) {
    fail(ErrorCode::kInvalidModel, "{}: {} layers, expected num_hidden_layers ({})",
         root.field_path("layer_types"), types->size(), config.num_hidden_layers);
  }
  const auto slides = [](const json::value& type) {
    return type.get_string() == "sliding_attention";
  };
  if (std::none_of(types->begin(), types->end(), slides)) {
    config.layer_windows.clear();
    return;
  }
  const std::optional<std::int64_t> window = root.find_int("sliding_window");
  if (!window) {
    fail(ErrorCode::kInvalidModel, "{} is missing: layer_types has sliding_attention",
         root.field_path("sliding_window"));
  }
  set_sliding_window(root, window, 0, config);
  for (std::size_t i = 0; i < types->size(); ++i) {
    if (!slides((*types)[i])) config.layer_windows[i] = 0;
  }
}

std::optional<std::int64_t> ModelConfig::smallest_window() const {
  std::optional<std::int64_t> smallest;
  for (const std::int64_t window : layer_windows) {
    if (window > 0) smallest = std::min(smallest.value_or(window), window);
  }
  return smallest;
}

std::int64_t ModelConfig::cache_layer(std::int64_t layer) const {
  if (num_kv_shared_layers == 0) return layer;  // of an encoder too, which may have more layers
  const std::int64_t own = num_hidden_layers - num_kv_shared_layers;
  if (layer < own) return layer;
  const auto window = [this](std::int64_t l) {
    return layer_windows.empty() ? 0 : layer_windows[static_cast<std::size_t>(l)];
  };
  std::int64_t source = own - 1;
  while (source >= 0 && window(source) != window(layer)) --source;
  return source;
}

const char* rope_kind_name(RopeKind kind) {
  static constexpr std::array kNames = {"default", "linear", "dynamic", "yarn", "llama3"};
  return kNames[static_cast<std::size_t>(kind)];
}

ModelConfig parse_hf_config(const json::value& value, const std::string& where) {
  const JsonObject root(value, where);
  const Family& family = find_family(root);
  const auto own = [&family](std::string_view field) {
    for (const FieldAlias& alias : family.aliases) {
      if (alias.field == field) return alias.own;
    }
    return field;
  };
  const FieldName name = [&](std::string_view field) {
    // transformers writes any of these names.
    if (field == "num_experts" && is_absent(root, field)) {
      return root.field_path(is_absent(root, "n_routed_experts") ? "num_local_experts"
                                                                 : "n_routed_experts");
    }
    return root.field_path(own(field));
  };
  refuse_unsupported_fields(root, family);

  ModelConfig config;
  config.model_type = family.model_type;
  config.vocab_size = root.get_int("vocab_size");
  config.hidden_size = root.get_int(own("hidden_size"));
  config.intermediate_size = root.get_int(own("intermediate_size"));
  config.num_hidden_layers = root.get_int(own("num_hidden_layers"));
  config.num_attention_heads = root.get_int(own("num_attention_heads"));
  const std::string_view kv_heads = own("num_key_value_heads");
  if (is_absent(root, kv_heads) && config.model_type != "llama") {
    // transformers' defaults (8, 32) belong to one size of model: a guess here.
    fail(ErrorCode::kInvalidModel, "{} is missing", root.field_path("num_key_value_heads"));
  }
  config.num_key_value_heads = root.find_int(kv_heads).value_or(config.num_attention_heads);
  config.head_dim = root.find_int(own("head_dim")).value_or(0);
  config.max_position_embeddings = root.find_int(own("max_position_embeddings"))
                                       .value_or(family.default_max_position_embeddings);
  config.rms_norm_eps = root.find_float(own("rms_norm_eps")).value_or(1e-6);
  config.tie_word_embeddings = root.find_bool("tie_word_embeddings").value_or(false);
  config.bos_token_id = read_token_id(root, "bos_token_id");
  config.eos_token_ids = read_token_ids(root, "eos_token_id");
  config.pad_token_id = read_token_id(root, "pad_token_id");
  if (family.partial_rotary_factor > 0) {
    config.rope.partial_rotary_factor = family.partial_rotary_factor;
  }
  config.num_kv_shared_layers = root.find_int("num_kv_shared_layers").value_or(0);
  parse_rope(root, config);
  family.parse_hf(root, config);
  apply_layer_types(root, config);
  if (config.head_dim == 0 && !root.find("head_dim")) {
    config.head_dim = derived_head_dim(config.hidden_size, config.num_attention_heads, name);
  }
  check_model_config(config, name);
  return config;
}

void apply_generation_config(const json::value& generation, ModelConfig& config,
                             const std::string& where) {
  const JsonObject root(generation, where);
  ModelConfig changed = config;
  if (const auto id = read_token_id(root, "bos_token_id")) changed.bos_token_id = id;
  if (auto ids = read_token_ids(root, "eos_token_id"); !ids.empty()) {
    changed.eos_token_ids = std::move(ids);
  }
  if (const auto id = read_token_id(root, "pad_token_id")) changed.pad_token_id = id;
  if (const auto id = read_token_id(root, "decoder_start_token_id")) {
    changed.encoder.decoder_start_token_id = *id;
  }
  check_model_config(changed, [&root](std::string_view field) { return root.field_path(field); });
  config = std::move(changed);
}

}  // namespace pianola
