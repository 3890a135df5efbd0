// gpt-oss. Reference: GptOssForCausalLM of transformers.
//
// A mixture of experts with biases and a clamped swish gate; attention with biases and a learned
// sink for each head; every second layer, from the first on, has a sliding window; rope stretched
// by YaRN whose ramp is not cut to whole dimensions (GGUF files do not say so, and llama.cpp cuts
// it all the same). The published weights are MXFP4, which is refused: BF16 copies run.
#include "models/family.h"

namespace pianola {
namespace {

constexpr double kTheta = 150000.0;
constexpr std::int64_t kPattern = 2;  // every second layer attends to everything

void common(ModelConfig& config) {
  config.hidden_act = Activation::kClampedSwish;
  config.attention_sinks = true;
  config.experts.bias = true;
  config.experts.score = RouteScore::kSoftmaxOfChosen;
}

// What the configuration of transformers has when a file says nothing.
void default_rope(const JsonObject& root, ModelConfig& config) {
  const auto scaling = root.find_object("rope_scaling");
  const auto rope = scaling ? scaling : root.find_object("rope_parameters");
  if (is_absent(root, "rope_theta") && !(rope && rope->find_float("rope_theta"))) {
    config.rope.theta = kTheta;
  }
  if (rope) return;
  config.rope.kind = RopeKind::kYarn;
  config.rope.factor = 32.0;
  config.rope.original_max_position_embeddings = 4096;
  config.rope.truncate = false;
}

void parse_gpt_oss(const JsonObject& root, ModelConfig& config) {
  common(config);
  if (is_absent(root, "head_dim")) config.head_dim = 64;
  const bool bias = root.find_bool("attention_bias").value_or(true);
  config.qkv_bias = bias;
  config.output_bias = bias;
  const double limit = root.find_float("swiglu_limit").value_or(7.0);
  if (limit != 7.0) fail_unsupported(root, "swiglu_limit", "only 7, found {}", limit);
  parse_expert_counts(root, config);
  config.experts.moe_intermediate_size = config.intermediate_size;
  config.experts.tensors = ExpertTensors::kFused;
  default_rope(root, config);
  set_sliding_window(
      root, is_absent(root, "sliding_window") ? 128 : root.find_int("sliding_window"), 0, config);
  open_layers(config, kPattern);
}

void finish_gpt_oss_gguf(const Metadata& metadata, ModelConfig& config) {
  common(config);
  config.rope.truncate = false;
  set_gguf_window(metadata, "gpt-oss.attention.sliding_window", config);
  open_layers(config, kPattern);
}

}  // namespace

const Family kGptOss = {.model_type = "gpt_oss",
                        .architecture = "gpt-oss",
                        .default_max_position_embeddings = 131072,
                        .parse_hf = parse_gpt_oss,
                        .gguf_qkv_bias = true,
                        .gguf_experts = true,
                        .finish_gguf = finish_gpt_oss_gguf};

}  // namespace pianola
