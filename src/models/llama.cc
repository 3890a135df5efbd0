// Llama 2 and 3, and SmolLM2. Reference: LlamaForCausalLM of transformers.
//
// The plain decoder: biases only where the configuration has them, every rope kind, a head of its
// own or the embedding's. GGUF files hold the rows of q and k permuted for interleaved rope.
#include "models/family.h"

namespace pianola {
namespace {

void parse_llama(const JsonObject& root, ModelConfig& config) {
  const bool bias = root.find_bool("attention_bias").value_or(false);
  config.qkv_bias = bias;
  config.output_bias = bias;
  config.mlp_bias = root.find_bool("mlp_bias").value_or(false);
}

}  // namespace

const Family kLlama = {.model_type = "llama",
                       .architecture = "llama",
                       .default_max_position_embeddings = 2048,
                       .parse_hf = parse_llama,
                       .gguf_rope_style = RopeStyle::kInterleaved};

}  // namespace pianola
