// Bamba. Reference: BambaForCausalLM of transformers.
//
// Layers of Mamba-2 (a short convolution, the state-space rule, a norm of all heads together behind
// their gate), and attention where attn_layer_indices says so, in whose heads half of the elements
// turn; a plain MLP in every layer.
#include <limits>

#include "models/family.h"

namespace pianola {
namespace {

constexpr double kPartialRotaryFactor = 0.5;

std::vector<Mixer> read_mixers(const JsonObject& root, std::int64_t layers) {
  if (layers < 1 || layers > kMaxLayers) return {};  // refused by check_model_config
  for (const char* key : {"layer_types", "layers_block_type"}) {
    if (root.find(key)) fail_unsupported(root, key, "only attn_layer_indices, as in transformers");
  }
  std::vector<Mixer> mixers(static_cast<std::size_t>(layers), Mixer::kSsm);
  const boost::json::array* indices = root.find_array("attn_layer_indices");
  if (!indices || indices->empty()) {
    fail_unsupported(root, "attn_layer_indices",
                     "no layer has attention; transformers cannot run such a model either");
  }
  for (const boost::json::value& index : *indices) {
    const std::int64_t* layer = index.if_int64();
    if (!layer || *layer < 0 || *layer >= layers) {
      fail(ErrorCode::kInvalidModel, "{}: expected layers in [0, {}]",
           root.field_path("attn_layer_indices"), layers - 1);
    }
    mixers[static_cast<std::size_t>(*layer)] = Mixer::kAttention;
  }
  return mixers;
}

// "auto" or a number. The heads are as wide together as mamba_expand says.
std::int64_t read_head_dim(const JsonObject& root, std::int64_t heads, std::int64_t width) {
  const boost::json::value* field = root.find("mamba_d_head");
  const bool given = field && !(field->is_string() && field->get_string() == "auto");
  const std::int64_t head_dim =
      given ? root.get_int("mamba_d_head", 1, kMaxHeadDim) : width / heads;
  if (heads * head_dim != width) {
    fail(ErrorCode::kInvalidModel,
         "{}: {} heads of {} ({}), expected mamba_expand times hidden_size ({})",
         root.field_path("mamba_n_heads"), heads, head_dim, root.field_path("mamba_d_head"), width);
  }
  return head_dim;
}

// A number, or infinity as transformers writes it: {"__float__": "Infinity"}.
double read_time_step(const JsonObject& root, const boost::json::value& value) {
  const std::string path = root.field_path("time_step_limit");
  if (value.is_object() && JsonObject(value, path).find_string("__float__") == "Infinity") {
    return std::numeric_limits<double>::infinity();
  }
  if (!value.is_number()) fail(ErrorCode::kInvalidModel, "{}: expected two numbers", path);
  return value.to_number<double>();
}

void read_time_step_limit(const JsonObject& root, StateLayerConfig& s) {
  if (is_absent(root, "time_step_limit")) return;
  const boost::json::array* limits = root.find_array("time_step_limit");
  if (!limits || limits->size() != 2) {
    fail(ErrorCode::kInvalidModel, "{}: expected two numbers", root.field_path("time_step_limit"));
  }
  s.dt_min = read_time_step(root, (*limits)[0]);
  s.dt_max = read_time_step(root, (*limits)[1]);
  if (!(s.dt_min >= 0 && s.dt_min <= s.dt_max)) {
    fail(ErrorCode::kInvalidModel, "{}: expected a range above 0, found {} to {}",
         root.field_path("time_step_limit"), s.dt_min, s.dt_max);
  }
}

void parse_bamba(const JsonObject& root, ModelConfig& config) {
  if (root.find_float("partial_rotary_factor").value_or(kPartialRotaryFactor) !=
      kPartialRotaryFactor) {
    fail_unsupported(root, "partial_rotary_factor", "only {}, which transformers takes in any case",
                     kPartialRotaryFactor);
  }
  if (root.find_bool("mamba_proj_bias").value_or(false)) {
    fail_unsupported(root, "mamba_proj_bias", "only false");
  }
  if (is_absent(root, "rms_norm_eps")) config.rms_norm_eps = 1e-5;
  config.tensor_naming = TensorNaming::kBamba;
  config.qkv_bias = root.find_bool("attention_bias").value_or(false);
  config.output_bias = config.qkv_bias;
  config.mlp_bias = root.find_bool("mlp_bias").value_or(false);
  StateLayerConfig& s = config.state;
  s.mixers = read_mixers(root, config.num_hidden_layers);
  s.heads = root.find_int("mamba_n_heads", 1, kMaxHeads).value_or(128);
  s.key_heads = root.find_int("mamba_n_groups").value_or(1);
  s.key_dim = root.find_int("mamba_d_state").value_or(256);
  s.conv_taps = root.find_int("mamba_d_conv").value_or(4);
  s.conv_bias = root.find_bool("mamba_conv_bias").value_or(true);
  const std::int64_t expand = root.find_int("mamba_expand", 1, kMaxWidth).value_or(2);
  const std::int64_t hidden_size = root.get_int("hidden_size", 1, kMaxWidth);
  s.value_dim = read_head_dim(root, s.heads, expand * hidden_size);
  read_time_step_limit(root, s);
}

}  // namespace

const Family kBamba = {.model_type = "bamba",
                       .architecture = "",
                       .default_max_position_embeddings = 262144,
                       .partial_rotary_factor = kPartialRotaryFactor,
                       .parse_hf = parse_bamba};

}  // namespace pianola
