// Qwen3. Reference: Qwen3ForCausalLM of transformers.
//
// An RMS norm on each head of q and k before rope; head_dim is 128 unless said otherwise, whatever
// the width; biases only where the configuration has them.
#include "models/family.h"

namespace pianola {
namespace {

void parse_qwen3(const JsonObject& root, ModelConfig& config) {
  const bool bias = root.find_bool("attention_bias").value_or(false);
  config.qkv_bias = bias;
  config.output_bias = bias;
  config.qk_norm = true;
  if (is_absent(root, "head_dim")) config.head_dim = 128;
  parse_qwen_window(root, config);
}

}  // namespace

const Family kQwen3 = {.model_type = "qwen3",
                       .architecture = "qwen3",
                       .default_max_position_embeddings = 32768,
                       .parse_hf = parse_qwen3,
                       .gguf_qk_norm = true};

}  // namespace pianola
