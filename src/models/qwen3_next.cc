// Qwen3-Next and the text model of Qwen3.5. References: Qwen3NextForCausalLM and
// Qwen3_5ForCausalLM of transformers; for GGUF files llama.cpp.
//
// Three layers of linear attention (a short convolution, then the gated delta rule) to one of full
// attention, whose output a gate multiplies; a quarter of each head turns; norms multiply by 1 plus
// their weight, all but the gated one of linear attention. Qwen3-Next has a mixture of experts with
// a shared one, and its linear projections in one tensor a key head; Qwen3.5 has plain MLPs.
//
// GGUF files hold norms as 1 plus their weight, keys and values of linear attention have one width,
// and Qwen3.5's value heads lie in another order.
#include "models/family.h"

namespace pianola {
namespace {

constexpr std::string_view kLinear = "linear_attention";
constexpr std::int64_t kInterval = 4;

std::vector<Mixer> every_so_many_attend(std::int64_t layers, std::int64_t interval) {
  std::vector<Mixer> mixers;
  for (std::int64_t layer = 0; layer < layers; ++layer) {
    mixers.push_back((layer + 1) % interval == 0 ? Mixer::kAttention : Mixer::kDeltaRule);
  }
  return mixers;
}

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
  const std::int64_t interval = root.find_int("full_attention_interval").value_or(kInterval);
  if (interval < 1) {
    fail(ErrorCode::kInvalidModel, "{}: expected a positive number, found {}",
         root.field_path("full_attention_interval"), interval);
  }
  s.mixers = every_so_many_attend(layers, interval);
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
  if (root.find_int("num_experts") == 0) return;
  parse_qwen_experts(root, config);
  config.experts.score = root.find_bool("norm_topk_prob").value_or(true)
                             ? RouteScore::kSoftmaxOfChosen
                             : RouteScore::kSoftmax;
  config.experts.shared_expert_intermediate_size = root.get_int("shared_expert_intermediate_size");
}

// The keys of linear attention, and which layers have it.
void finish_gguf_linear(const Metadata& metadata, const std::string& arch, ModelConfig& config) {
  const auto key = [&arch](const char* suffix) { return arch + "." + suffix; };
  config.attention_gate = true;
  StateLayerConfig& s = config.state;
  s.heads = metadata.get_int(key("ssm.time_step_rank"));
  s.key_heads = metadata.get_int(key("ssm.group_count"));
  s.key_dim = metadata.get_int(key("ssm.state_size"));
  s.value_dim = s.key_dim;
  s.conv_taps = metadata.get_int(key("ssm.conv_kernel"));
  const std::int64_t width = metadata.get_int(key("ssm.inner_size"));
  if (s.heads < 1 || s.heads > kMaxHeads || width % s.heads != 0 || width / s.heads != s.key_dim) {
    fail(ErrorCode::kInvalidModel,
         "metadata key '{}': expected ssm.time_step_rank ({}) heads of ssm.state_size ({}), "
         "found {}",
         key("ssm.inner_size"), s.heads, s.key_dim, width);
  }
  const std::int64_t layers = config.num_hidden_layers;
  if (layers < 1 || layers > kMaxLayers) return;  // refused by check_model_config
  const std::string recurrent = key("attention.recurrent_layers");
  if (const std::vector<bool>* folds = metadata.find_bools(recurrent)) {
    if (static_cast<std::int64_t>(folds->size()) < layers) {
      fail(ErrorCode::kInvalidModel, "metadata key '{}': {} values, expected one for each of {}",
           recurrent, folds->size(), layers);
    }
    for (std::int64_t layer = 0; layer < layers; ++layer) {
      const bool linear = (*folds)[static_cast<std::size_t>(layer)];
      s.mixers.push_back(linear ? Mixer::kDeltaRule : Mixer::kAttention);
    }
    return;
  }
  const std::string interval = key("full_attention_interval");
  const std::int64_t every = metadata.find_int(interval).value_or(kInterval);
  if (every < 1) {
    fail(ErrorCode::kInvalidModel, "metadata key '{}': expected a positive number, found {}",
         interval, every);
  }
  s.mixers = every_so_many_attend(layers, every);
}

void finish_qwen3_next_gguf(const Metadata& metadata, ModelConfig& config) {
  finish_gguf_linear(metadata, "qwen3next", config);
}

void finish_qwen3_5_gguf(const Metadata& metadata, ModelConfig& config) {
  finish_gguf_linear(metadata, "qwen35", config);
  config.state.grouped_heads = false;
}

}  // namespace

const Family kQwen3Next = {.model_type = "qwen3_next",
                           .architecture = "qwen3next",
                           .default_max_position_embeddings = 32768,
                           .state_layer_type = kLinear,
                           .partial_rotary_factor = 0.25,
                           .parse_hf = parse_qwen3_next,
                           .gguf_qk_norm = true,
                           .gguf_experts = true,
                           .gguf_shared_expert = true,
                           .finish_gguf = finish_qwen3_next_gguf};

const Family kQwen35 = {.model_type = "qwen3_5_text",
                        .architecture = "qwen35",
                        .default_max_position_embeddings = 32768,
                        .state_layer_type = kLinear,
                        .partial_rotary_factor = 0.25,
                        .parse_hf = parse_qwen3_5,
                        .gguf_qk_norm = true,
                        .finish_gguf = finish_qwen3_5_gguf};

}  // namespace pianola
