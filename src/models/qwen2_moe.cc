// Qwen1.5-MoE and Qwen2-MoE. Reference: Qwen2MoeForCausalLM of transformers; for GGUF files
// llama.cpp.
//
// A Qwen2 with a mixture of experts in place of the MLP, and beside it a shared expert that every
// token gets, weighed by the sigmoid of a score of its own. GGUF files do not say whether the
// weights of the chosen experts are divided by their sum; llama.cpp does not, as the published
// models do not.
#include "models/family.h"

namespace pianola {
namespace {

void parse_qwen2_moe(const JsonObject& root, ModelConfig& config) {
  config.qkv_bias = root.find_bool("qkv_bias").value_or(true);
  parse_qwen_window(root, config);
  parse_qwen_experts(root, config);
  config.experts.shared_expert_intermediate_size = root.get_int("shared_expert_intermediate_size");
}

}  // namespace

const Family kQwen2Moe = {.model_type = "qwen2_moe",
                          .architecture = "qwen2moe",
                          .default_max_position_embeddings = 32768,
                          .parse_hf = parse_qwen2_moe,
                          .gguf_qkv_bias = true,
                          .gguf_experts = true,
                          .gguf_shared_expert = true,
                          .gguf_route_score = RouteScore::kSoftmax};

}  // namespace pianola
