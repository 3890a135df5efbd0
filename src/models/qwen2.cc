// Qwen2 and Qwen2.5. Reference: Qwen2ForCausalLM of transformers.
//
// Biases on q, k and v; a sliding window only where a flag switches it on, in the upper layers.
#include "models/family.h"

namespace pianola {
namespace {

void parse_qwen2(const JsonObject& root, ModelConfig& config) {
  config.qkv_bias = true;
  parse_qwen_window(root, config);
}

}  // namespace

void parse_qwen_window(const JsonObject& root, ModelConfig& config) {
  if (!root.find_bool("use_sliding_window").value_or(false)) return;
  set_sliding_window(root,
                     is_absent(root, "sliding_window") ? 4096 : root.find_int("sliding_window"),
                     root.find_int("max_window_layers").value_or(28), config);
}

const Family kQwen2 = {.model_type = "qwen2",
                       .architecture = "qwen2",
                       .default_max_position_embeddings = 32768,
                       .parse_hf = parse_qwen2,
                       .gguf_qkv_bias = true};

}  // namespace pianola
