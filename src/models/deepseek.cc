// DeepSeek-V2 (V2-Lite among them) and DeepSeek-V3. References: DeepseekV2ForCausalLM and
// DeepseekV3ForCausalLM of transformers.
//
// Multi-head latent attention, whose scores are scaled once more where rope is stretched by YaRN;
// the first layers have plain MLPs, the others a mixture of experts with a shared one that every
// token gets. V2 chooses experts by a softmax, V3 by a sigmoid and a bias; both may look only into
// the best groups of experts, which V2 rates by their best expert and V3 by their best two. For
// GGUF files (one architecture) llama.cpp: what they say of groups is V3's, and the norms of the
// ranks have the eps of all others.
#include <cmath>

#include "models/family.h"

namespace pianola {
namespace {

void require_value(const JsonObject& root, std::string_view key, std::string_view wanted) {
  const std::string found = root.find_string(key).value_or(std::string(wanted));
  if (found != wanted) fail_unsupported(root, key, "only {}, found '{}'", wanted, found);
}

double attention_scale(const JsonObject& root, const ModelConfig& config) {
  const LatentConfig& l = config.latent;
  const RopeConfig& rope = config.rope;
  const double scale =
      1.0 / std::sqrt(static_cast<double>(l.qk_nope_head_dim + l.qk_rope_head_dim));
  if (rope.kind == RopeKind::kDefault) return scale;
  if (rope.kind != RopeKind::kYarn) {
    fail_unsupported(root, "rope_scaling", "only yarn, found '{}'", rope_kind_name(rope.kind));
  }
  const double all = rope.mscale_all_dim.value_or(0.0);
  const double stretch =
      all != 0 && rope.factor > 1 ? 0.1 * all * std::log(rope.factor) + 1.0 : 1.0;
  return scale * stretch * stretch;
}

void parse_attention(const JsonObject& root, ModelConfig& config) {
  LatentConfig& l = config.latent;
  l.kv_lora_rank = root.get_int("kv_lora_rank");
  if (l.kv_lora_rank < 1) {
    fail(ErrorCode::kInvalidModel, "{}: expected a positive number, found {}",
         root.field_path("kv_lora_rank"), l.kv_lora_rank);
  }
  constexpr std::int64_t kDefaultQRank = 1536;
  l.q_lora_rank =
      is_absent(root, "q_lora_rank") ? kDefaultQRank : root.find_int("q_lora_rank").value_or(0);
  l.qk_nope_head_dim = root.get_int("qk_nope_head_dim");
  l.qk_rope_head_dim = root.get_int("qk_rope_head_dim");
  l.v_head_dim = root.get_int("v_head_dim");
  config.head_dim = l.qk_rope_head_dim;
  config.rope_style = RopeStyle::kInterleaved;
  for (const char* key : {"attention_bias", "mlp_bias"}) {
    if (root.find_bool(key).value_or(false)) fail_unsupported(root, key, "only false");
  }
  config.attention_scale = attention_scale(root, config);
}

void parse_experts(const JsonObject& root, std::int64_t first_expert_layer, ModelConfig& config) {
  config.tensor_naming = TensorNaming::kDeepseek;
  ExpertsConfig& e = config.experts;
  e.tensors = ExpertTensors::kApart;
  e.num_experts = root.get_int("n_routed_experts");
  if (e.num_experts < 1) {
    fail(ErrorCode::kInvalidModel, "{}: expected a positive number, found {}",
         root.field_path("n_routed_experts"), e.num_experts);
  }
  e.num_experts_per_tok = root.get_int("num_experts_per_tok");
  e.moe_intermediate_size = root.get_int("moe_intermediate_size");
  const std::int64_t shared = root.get_int("n_shared_experts");
  if (shared < 1 || shared > kMaxExperts || e.moe_intermediate_size > kMaxWidth) {
    fail(ErrorCode::kInvalidModel, "{}: {} experts of {}, expected 1 to {}",
         root.field_path("n_shared_experts"), shared, e.moe_intermediate_size, kMaxExperts);
  }
  e.shared_expert_intermediate_size = shared * e.moe_intermediate_size;
  e.shared_gate = false;
  if (const auto step = root.find_int("moe_layer_freq"); step.value_or(1) != 1) {
    fail_unsupported(root, "moe_layer_freq", "only 1, found {}", *step);
  }
  const std::int64_t layers = config.num_hidden_layers;
  if (layers < 1 || layers > kMaxLayers) return;  // refused by check_model_config
  for (std::int64_t layer = 0; layer < layers; ++layer) {
    e.dense_layers.push_back(layer < first_expert_layer);
  }
}

void parse_groups(const JsonObject& root, std::int64_t count, std::int64_t chosen,
                  std::int32_t best, RouteGroups& groups) {
  count = root.find_int("n_group").value_or(count);
  chosen = root.find_int("topk_group").value_or(chosen);
  if (count < 1 || count > kMaxRouteGroups || chosen < 1 || chosen > count) {
    fail(ErrorCode::kInvalidModel, "{}: {} groups, {} of them ({}), expected 1 to {}",
         root.field_path("n_group"), count, chosen, root.field_path("topk_group"), kMaxRouteGroups);
  }
  groups = {static_cast<std::int32_t>(count), static_cast<std::int32_t>(chosen), best};
}

void parse_deepseek_v2(const JsonObject& root, ModelConfig& config) {
  parse_attention(root, config);
  parse_experts(root, root.find_int("first_k_dense_replace").value_or(0), config);
  ExpertsConfig& e = config.experts;
  e.score = RouteScore::kSoftmax;
  e.route_scale = root.find_float("routed_scaling_factor").value_or(1.0);
  require_value(root, "scoring_func", "softmax");
  // transformers never divides by the sum; the published code does, where this is set.
  if (root.find_bool("norm_topk_prob").value_or(false)) {
    fail_unsupported(root, "norm_topk_prob", "only false");
  }
  const std::string method = root.find_string("topk_method").value_or("greedy");
  if (method == "group_limited_greedy") {
    parse_groups(root, 1, 1, 1, e.groups);
  } else if (method != "greedy") {
    fail_unsupported(root, "topk_method", "'{}'; known are greedy and group_limited_greedy",
                     method);
  }
}

void parse_deepseek_v3(const JsonObject& root, ModelConfig& config) {
  parse_attention(root, config);
  if (!root.find_bool("rope_interleave").value_or(true)) config.rope_style = RopeStyle::kHalf;
  parse_experts(root, root.find_int("first_k_dense_replace").value_or(3), config);
  config.num_nextn_predict_layers = root.find_int("num_nextn_predict_layers").value_or(0);
  ExpertsConfig& e = config.experts;
  e.score = root.find_bool("norm_topk_prob").value_or(true) ? RouteScore::kSigmoidOfChosen
                                                            : RouteScore::kSigmoid;
  e.choice_bias = true;
  e.route_scale = root.find_float("routed_scaling_factor").value_or(2.5);
  require_value(root, "scoring_func", "sigmoid");
  require_value(root, "topk_method", "noaux_tc");
  parse_groups(root, 8, 4, 2, e.groups);
}

}  // namespace

const Family kDeepseekV2 = {.model_type = "deepseek_v2",
                            .architecture = "deepseek2",
                            .default_max_position_embeddings = 2048,
                            .parse_hf = parse_deepseek_v2,
                            .gguf_rope_style = RopeStyle::kInterleaved,
                            .gguf_experts = true,
                            .gguf_latent = true};

const Family kDeepseekV3 = {.model_type = "deepseek_v3",
                            .architecture = "",
                            .default_max_position_embeddings = 4096,
                            .parse_hf = parse_deepseek_v3};

}  // namespace pianola
