// Qwen1.5-MoE and Qwen2-MoE. Reference: Qwen2MoeForCausalLM of transformers.
//
// A Qwen2 with a mixture of experts in place of the MLP, and beside it a shared expert that every
// token gets, weighed by the sigmoid of a score of its own.
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
                          .architecture = "",
                          .default_max_position_embeddings = 32768,
                          .parse_hf = parse_qwen2_moe};

}  // namespace pianola
