// Qwen3-Next and the text model of Qwen3.5. References: Qwen3NextForCausalLM and
// Qwen3_5ForCausalLM of transformers.
//
// Three layers of linear attention (a short convolution, then the gated delta rule) to one of full
// attention, whose output a gate multiplies; a quarter of each head turns; norms multiply by 1 plus
// their weight, all but the gated one of linear attention. Qwen3-Next has a mixture of experts with
// a shared one, and its linear projections in one tensor a key head; Qwen3.5 has plain MLPs.
#include "models/family.h"

namespace pianola {
namespace {

constexpr std::string_view kLinear = "linear_attention";

void parse_linear_layers(const JsonObject& root, ModelConfig& config) {
  StateLayerConfig& s = config.state;
  s.conv_taps = root.find_int("linear_conv_kernel_dim").value_or(4);
  s.key_dim = root.find_int("linear_key_head_dim").value_or(128);
  s.value_dim = root.find_int("linear_value_head_dim").value_or(128);
  s.key_heads = root.find_int("linear_num_key_heads").value_or(16);
  s.heads = root.find_int("linear_num_value_heads").value_or(32);
  const std::int64_t layers = config.num_hidden_layers;
  if (layers < 1 || layers > kMaxLayers) return;  // refused by check_model_config
  if (const boost::json::array* types = root.find_array("layer_types")) {
    for (const boost::json::value& type : *types) {
      s.mixers.push_back(type.get_string() == kLinear ? Mixer::kDeltaRule : Mixer::kAttention);
    }
    s.mixers.resize(static_cast<std::size_t>(layers));  // another count is refused
    return;
  }
  const std::int64_t interval = root.find_int("full_attention_interval").value_or(4);
  if (interval < 1) {
    fail(ErrorCode::kInvalidModel, "{}: expected a positive number, found {}",
         root.field_path("full_attention_interval"), interval);
  }
  for (std::int64_t layer = 0; layer < layers; ++layer) {
    s.mixers.push_back((layer + 1) % interval == 0 ? Mixer::kAttention : Mixer::kDeltaRule);
  }
}

void parse_qwen3_5(const JsonObject& root, ModelConfig& config) {
  if (is_absent(root, "head_dim")) config.head_dim = 256;
  if (root.find_bool("attention_bias").value_or(false)) {
    fail_unsupported(root, "attention_bias", "only false");
  }
  config.qk_norm = true;
  config.norm_offset = 1;
  config.attention_gate = true;
  parse_linear_layers(root, config);
}

void parse_qwen3_next(const JsonObject& root, ModelConfig& config) {
  parse_qwen3_5(root, config);
  config.state.fused_projections = true;
  if (root.find_int("num_experts") == 0) return;
  parse_qwen_experts(root, config);
  config.experts.score = root.find_bool("norm_topk_prob").value_or(true)
                             ? RouteScore::kSoftmaxOfChosen
                             : RouteScore::kSoftmax;
  config.experts.shared_expert_intermediate_size = root.get_int("shared_expert_intermediate_size");
}

}  // namespace

const Family kQwen3Next = {.model_type = "qwen3_next",
                           .architecture = "",
                           .default_max_position_embeddings = 32768,
                           .state_layer_type = kLinear,
                           .partial_rotary_factor = 0.25,
                           .parse_hf = parse_qwen3_next};

const Family kQwen35 = {.model_type = "qwen3_5_text",
                        .architecture = "",
                        .default_max_position_embeddings = 32768,
                        .state_layer_type = kLinear,
                        .partial_rotary_factor = 0.25,
                        .parse_hf = parse_qwen3_5};

}  // namespace pianola
