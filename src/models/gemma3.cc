// Gemma 3, text. Reference: Gemma3ForCausalLM of transformers.
//
// Norms multiply by 1 + w (GGUF files hold the sum), and what attention and the MLP add is normed
// first; the embedding is scaled by the root of the width; gelu by tanh; five layers of six have a
// sliding window and a rope of their own.
#include <cmath>

#include "models/family.h"

namespace pianola {
namespace {

constexpr std::int64_t kPattern = 6;  // every sixth layer attends to everything
constexpr double kWindowTheta = 10000.0;

void common(ModelConfig& config) {
  config.qk_norm = true;
  config.post_norms = true;
  config.hidden_act = Activation::kGeluTanh;
  config.embedding_scale = std::sqrt(static_cast<double>(config.hidden_size));
}

void parse_gemma3(const JsonObject& root, ModelConfig& config) {
  common(config);
  config.norm_offset = 1;
  if (is_absent(root, "head_dim")) config.head_dim = 256;
  if (is_absent(root, "tie_word_embeddings")) config.tie_word_embeddings = true;
  const std::string act = root.find_string("hidden_activation").value_or("gelu_pytorch_tanh");
  if (act != "gelu_pytorch_tanh") {
    fail_unsupported(root, "hidden_activation", "only gelu_pytorch_tanh, found '{}'", act);
  }
  for (const char* key : {"final_logit_softcapping", "attn_logit_softcapping"}) {
    if (root.find(key)) fail_unsupported(root, key, "not supported");
  }
  if (root.find_bool("use_bidirectional_attention").value_or(false)) {
    fail_unsupported(root, "use_bidirectional_attention", "only causal attention");
  }
  if (root.find_bool("attention_bias").value_or(false)) {
    config.qkv_bias = true;
    config.output_bias = true;
  }
  const double scalar = root.find_float("query_pre_attn_scalar").value_or(256.0);
  if (!(scalar > 0)) {
    fail(ErrorCode::kInvalidModel, "{}: expected a positive number, found {}",
         root.field_path("query_pre_attn_scalar"), scalar);
  }
  config.attention_scale = 1.0 / std::sqrt(scalar);

  set_sliding_window(root, root.find_int("sliding_window").value_or(4096), 0, config);
  const std::int64_t pattern = root.find_int("sliding_window_pattern").value_or(kPattern);
  if (pattern < 1) {
    fail(ErrorCode::kInvalidModel, "{}: expected a positive number, found {}",
         root.field_path("sliding_window_pattern"), pattern);
  }
  open_layers(config, pattern);

  // transformers 5 writes one object a kind of layer; before, a second base stood at the top.
  RopeConfig window;
  window.theta = root.find_float("rope_local_base_freq").value_or(kWindowTheta);
  if (is_absent(root, "rope_theta")) config.rope.theta = 1000000.0;
  if (const auto both = root.find_object("rope_parameters")) {
    if (const auto full = both->find_object("full_attention")) {
      config.rope = {.theta = 1000000.0};
      parse_rope_parameters(root, *full, config, config.rope);
    }
    if (const auto sliding = both->find_object("sliding_attention")) {
      parse_rope_parameters(root, *sliding, config, window);
    }
  }
  config.window_rope = window;
}

void finish_gemma3_gguf(const Metadata& metadata, ModelConfig& config) {
  common(config);
  set_gguf_window(metadata, "gemma3.attention.sliding_window", config);
  open_layers(config, kPattern);
  config.window_rope =
      RopeConfig{.theta = metadata.find_float("gemma3.rope.freq_base_swa").value_or(kWindowTheta)};
  if (!metadata.contains("gemma3.rope.freq_base")) config.rope.theta = 1000000.0;
  // The 27B model alone scales by the width of a head as if the width were cut into them.
  constexpr std::int64_t kLayers27B = 62;
  if (config.num_hidden_layers == kLayers27B && config.hidden_size > 0) {
    config.attention_scale = std::sqrt(static_cast<double>(config.num_attention_heads) /
                                       static_cast<double>(config.hidden_size));
  }
}

}  // namespace

const Family kGemma3 = {.model_type = "gemma3_text",
                        .architecture = "gemma3",
                        .default_max_position_embeddings = 131072,
                        .parse_hf = parse_gemma3,
                        .finish_gguf = finish_gemma3_gguf};

}  // namespace pianola
