// Qwen3-MoE. Reference: Qwen3MoeForCausalLM of transformers; for GGUF files llama.cpp.
//
// A Qwen3 with a mixture of experts in place of the MLP, in the layers that the configuration says.
// GGUF files do not say whether the weights of the chosen experts are divided by their sum;
// llama.cpp does it, as the published models do.
#include "models/family.h"

namespace pianola {
namespace {

void parse_qwen3_moe(const JsonObject& root, ModelConfig& config) {
  const bool bias = root.find_bool("attention_bias").value_or(false);
  config.qkv_bias = bias;
  config.output_bias = bias;
  config.qk_norm = true;
  // Unlike Qwen3's, this window is that of all layers.
  if (root.find_bool("use_sliding_window").value_or(false)) {
    set_sliding_window(root,
                       is_absent(root, "sliding_window") ? 4096 : root.find_int("sliding_window"),
                       0, config);
  }
  parse_qwen_experts(root, config);
}

}  // namespace

void parse_qwen_experts(const JsonObject& root, ModelConfig& config) {
  parse_expert_counts(root, config);
  ExpertsConfig& experts = config.experts;
  experts.tensors = ExpertTensors::kApart;
  experts.moe_intermediate_size = root.get_int("moe_intermediate_size");
  experts.score = root.find_bool("norm_topk_prob").value_or(false) ? RouteScore::kSoftmaxOfChosen
                                                                   : RouteScore::kSoftmax;
  const std::int64_t layers = config.num_hidden_layers;
  if (layers < 1 || layers > kMaxLayers) return;  // refused by check_model_config
  experts.dense_layers.assign(static_cast<std::size_t>(layers), false);
  const std::int64_t step = root.find_int("decoder_sparse_step").value_or(1);
  if (step < 1) {
    fail(ErrorCode::kInvalidModel, "{}: expected a positive number, found {}",
         root.field_path("decoder_sparse_step"), step);
  }
  for (std::int64_t layer = 0; layer < layers; ++layer) {
    experts.dense_layers[static_cast<std::size_t>(layer)] = (layer + 1) % step != 0;
  }
  const boost::json::array* plain = root.find_array("mlp_only_layers");
  if (!plain) return;
  for (const boost::json::value& value : *plain) {
    const std::int64_t* layer = value.if_int64();
    if (!layer || *layer < 0 || *layer >= layers) {
      fail(ErrorCode::kInvalidModel, "{}: expected layers from 0 to {}",
           root.field_path("mlp_only_layers"), layers - 1);
    }
    experts.dense_layers[static_cast<std::size_t>(*layer)] = true;
  }
}

const Family kQwen3Moe = {.model_type = "qwen3_moe",
                          .architecture = "qwen3moe",
                          .default_max_position_embeddings = 32768,
                          .parse_hf = parse_qwen3_moe,
                          .gguf_qk_norm = true,
                          .gguf_experts = true};

}  // namespace pianola
