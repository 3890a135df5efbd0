// config.json of families with state layers: defaults, what is checked, what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "base/json_reader.h"
#include "models/model_config.h"
#include "pianola/error.h"

namespace pianola {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// What all of them share.
constexpr std::string_view kSizes = R"({
  "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
  "num_attention_heads": 4, "num_key_value_heads": 2})";
constexpr std::string_view kQwen35 = R"({"model_type": "qwen3_5_text"})";
constexpr std::string_view kQwen3Next =
    R"({"model_type": "qwen3_next", "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 24})";
constexpr std::string_view kBamba =
    R"({"model_type": "bamba", "mamba_n_heads": 8, "attn_layer_indices": [2]})";

ModelConfig parse(std::string_view family, std::string_view changes = "{}") {
  boost::json::value root = parse_json(kSizes, "config.json");
  for (const std::string_view text : {family, changes}) {
    const boost::json::value edit = parse_json(text, "changes");
    for (const auto& [key, value] : edit.as_object()) root.as_object()[key] = value;
  }
  return parse_hf_config(root);
}

void expect_refused(std::string_view family, std::string_view changes, ErrorCode code,
                    const std::string& words) {
  SCOPED_TRACE(std::string(family) + " with " + std::string(changes));
  try {
    parse(family, changes);
    ADD_FAILURE() << "accepted";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), code) << e.what();
    EXPECT_THAT(e.what(), HasSubstr(words));
  }
}
void expect_invalid(std::string_view family, std::string_view changes, const std::string& words) {
  expect_refused(family, changes, ErrorCode::kInvalidModel, words);
}
void expect_unsupported(std::string_view family, std::string_view changes,
                        const std::string& words) {
  expect_refused(family, changes, ErrorCode::kUnsupported, words);
}

TEST(StateConfigTest, Qwen35) {
  const ModelConfig config = parse(kQwen35);
  EXPECT_EQ(config.head_dim, 256);
  EXPECT_EQ(config.max_position_embeddings, 32768);
  EXPECT_EQ(config.norm_offset, 1);
  EXPECT_TRUE(config.qk_norm && config.attention_gate);
  EXPECT_FALSE(config.qkv_bias || config.output_bias || config.mlp_bias);
  EXPECT_EQ(config.rope.partial_rotary_factor, 0.25);
  EXPECT_EQ(config.experts.num_experts, 0);
  EXPECT_EQ(config.tensor_naming, TensorNaming::kCommon);
  const StateLayerConfig& s = config.state;
  EXPECT_THAT(s.mixers, ElementsAre(Mixer::kDeltaRule, Mixer::kDeltaRule, Mixer::kDeltaRule,
                                    Mixer::kAttention));
  EXPECT_EQ(s.kind(), Mixer::kDeltaRule);
  EXPECT_EQ(s.heads, 32);
  EXPECT_EQ(s.key_heads, 16);
  EXPECT_EQ(s.key_dim, 128);
  EXPECT_EQ(s.value_dim, 128);
  EXPECT_EQ(s.conv_taps, 4);
  EXPECT_TRUE(s.grouped_heads);
  EXPECT_FALSE(s.conv_bias);

  const ModelConfig other =
      parse(kQwen35, R"({"linear_num_value_heads": 6, "linear_num_key_heads": 3, "head_dim": 32,
                   "linear_key_head_dim": 8, "linear_value_head_dim": 20,
                   "linear_conv_kernel_dim": 3, "full_attention_interval": 2,
                   "rope_parameters": {"rope_type": "default", "rope_theta": 1e5,
                                       "partial_rotary_factor": 0.5}})");
  EXPECT_THAT(other.state.mixers, ElementsAre(Mixer::kDeltaRule, Mixer::kAttention,
                                              Mixer::kDeltaRule, Mixer::kAttention));
  EXPECT_EQ(other.state.value_width(), 120);
  EXPECT_EQ(other.state.conv_width(), 168);
  EXPECT_EQ(other.rope.partial_rotary_factor, 0.5);
  EXPECT_EQ(other.rope.theta, 1e5);
}

TEST(StateConfigTest, Qwen3Next) {
  const ModelConfig config = parse(kQwen3Next);
  EXPECT_EQ(config.state.mixers, parse(kQwen35).state.mixers);
  EXPECT_EQ(config.experts.num_experts, 8);
  EXPECT_EQ(config.experts.shared_expert_intermediate_size, 24);
  EXPECT_EQ(config.experts.score, RouteScore::kSoftmaxOfChosen);
  EXPECT_EQ(parse(kQwen3Next, R"({"norm_topk_prob": false})").experts.score, RouteScore::kSoftmax);
  EXPECT_EQ(parse(kQwen3Next, R"({"num_experts": 0})").experts.num_experts, 0);
  expect_invalid(R"({"model_type": "qwen3_next", "num_experts": 8, "num_experts_per_tok": 2,
                     "moe_intermediate_size": 32})",
                 "{}", "shared_expert_intermediate_size");
}

TEST(StateConfigTest, LinearLayersAreChecked) {
  for (const std::string_view family : {kQwen35, kQwen3Next}) {
    EXPECT_THAT(
        parse(family, R"({"layer_types": ["full_attention", "linear_attention",
                                                  "linear_attention", "full_attention"]})")
            .state.mixers,
        ElementsAre(Mixer::kAttention, Mixer::kDeltaRule, Mixer::kDeltaRule, Mixer::kAttention));
    expect_invalid(family, R"({"layer_types": ["full_attention", "linear_attention"]})",
                   "layer_types: 2 layers");
    expect_invalid(family, R"({"layer_types": []})", "layer_types: 0 layers");
    expect_invalid(family, R"({"layer_types": [1, 2, 3, 4]})", "layer_types");
    expect_unsupported(family, R"({"layer_types": ["full_attention", "mamba", "full_attention",
                                                   "full_attention"]})",
                       "'mamba'");
    expect_unsupported(family, R"({"attention_bias": true})", "attention_bias");
    expect_unsupported(family, R"({"hidden_act": "gelu"})", "hidden_act");
    expect_invalid(family, R"({"full_attention_interval": 0})", "full_attention_interval");
    expect_invalid(family, R"({"linear_num_value_heads": 0})", "linear_num_value_heads");
    expect_invalid(family, R"({"linear_num_value_heads": 5000})", "linear_num_value_heads");
    expect_invalid(family, R"({"linear_num_key_heads": 0})", "linear_num_key_heads");
    expect_invalid(family, R"({"linear_num_key_heads": -2})", "linear_num_key_heads");
    expect_invalid(family, R"({"linear_num_key_heads": 64})", "linear_num_key_heads");
    expect_invalid(family, R"({"linear_num_key_heads": 5})", "5 does not divide");
    expect_invalid(family, R"({"linear_key_head_dim": 0})", "linear_key_head_dim");
    expect_invalid(family, R"({"linear_value_head_dim": 9000})", "linear_value_head_dim");
    expect_invalid(family, R"({"linear_conv_kernel_dim": 0})", "linear_conv_kernel_dim");
    expect_invalid(family, R"({"linear_conv_kernel_dim": 17})", "linear_conv_kernel_dim");
    expect_invalid(family, R"({"linear_num_value_heads": 4096, "linear_value_head_dim": 8192})",
                   "linear_num_value_heads times linear_value_head_dim");
    for (const char* factor : {"0", "-0.5", "1.5"}) {
      const std::string field = std::string(R"("partial_rotary_factor": )") + factor;
      expect_invalid(family, "{" + field + "}", "partial_rotary_factor");
      expect_invalid(family, R"({"rope_parameters": {"rope_theta": 1e4, )" + field + "}}",
                     "rope_parameters.partial_rotary_factor");
    }
    expect_invalid(family, R"({"head_dim": 32, "partial_rotary_factor": 0.1})",
                   "partial_rotary_factor");  // turns 3 of 32
  }
}

TEST(StateConfigTest, Bamba) {
  const ModelConfig config = parse(kBamba);
  EXPECT_EQ(config.head_dim, 16);
  EXPECT_EQ(config.max_position_embeddings, 262144);
  EXPECT_EQ(config.rms_norm_eps, 1e-5);
  EXPECT_EQ(config.norm_offset, 0);
  EXPECT_EQ(config.rope.partial_rotary_factor, 0.5);
  EXPECT_EQ(config.tensor_naming, TensorNaming::kBamba);
  EXPECT_FALSE(config.qkv_bias || config.output_bias || config.mlp_bias || config.qk_norm ||
               config.attention_gate);
  const StateLayerConfig& s = config.state;
  EXPECT_THAT(s.mixers, ElementsAre(Mixer::kSsm, Mixer::kSsm, Mixer::kAttention, Mixer::kSsm));
  EXPECT_EQ(s.kind(), Mixer::kSsm);
  EXPECT_EQ(s.heads, 8);
  EXPECT_EQ(s.key_heads, 1);
  EXPECT_EQ(s.key_dim, 256);
  EXPECT_EQ(s.value_dim, 16);  // twice the width of the model, shared by the heads
  EXPECT_EQ(s.conv_taps, 4);
  EXPECT_TRUE(s.conv_bias);
  EXPECT_EQ(s.dt_min, 0);
  EXPECT_EQ(s.dt_max, INFINITY);

  const ModelConfig other =
      parse(kBamba, R"({"attn_layer_indices": [0, 3], "mamba_n_heads": 4, "mamba_d_head": 48,
                  "mamba_expand": 3, "mamba_n_groups": 2, "mamba_d_state": 24, "mamba_d_conv": 3,
                  "mamba_conv_bias": false, "attention_bias": true, "mlp_bias": true,
                  "time_step_limit": [0.25, 1.5], "rms_norm_eps": 1e-6})");
  EXPECT_THAT(other.state.mixers,
              ElementsAre(Mixer::kAttention, Mixer::kSsm, Mixer::kSsm, Mixer::kAttention));
  EXPECT_EQ(other.state.value_width(), 192);
  EXPECT_EQ(other.state.conv_width(), 288);
  EXPECT_FALSE(other.state.conv_bias);
  EXPECT_TRUE(other.qkv_bias && other.output_bias && other.mlp_bias);
  EXPECT_EQ(other.state.dt_min, 0.25);
  EXPECT_EQ(other.state.dt_max, 1.5);
  EXPECT_EQ(other.rms_norm_eps, 1e-6);

  // As transformers writes them.
  EXPECT_EQ(parse(kBamba, R"({"mamba_d_head": "auto", "partial_rotary_factor": 0.5,
                              "time_step_limit": [0.0, {"__float__": "Infinity"}]})"),
            config);
}

TEST(StateConfigTest, BambaIsChecked) {
  expect_invalid(kBamba, R"({"attn_layer_indices": [4]})", "attn_layer_indices");
  expect_invalid(kBamba, R"({"attn_layer_indices": [-1]})", "attn_layer_indices");
  expect_invalid(kBamba, R"({"attn_layer_indices": ["2"]})", "attn_layer_indices");
  expect_unsupported(kBamba, R"({"attn_layer_indices": []})", "attn_layer_indices");
  expect_unsupported(kBamba, R"({"attn_layer_indices": null})", "attn_layer_indices");
  expect_unsupported(kBamba, R"({"layers_block_type": ["mamba"]})", "layers_block_type");
  expect_unsupported(kBamba, R"({"layer_types": ["full_attention"]})", "layer_types");
  expect_unsupported(kBamba, R"({"layer_types": ["linear_attention"]})", "'linear_attention'");
  expect_invalid(kBamba, R"({"mamba_n_heads": 0})", "mamba_n_heads");
  expect_invalid(kBamba, R"({"mamba_n_heads": 7})", "mamba_n_heads");
  expect_invalid(kBamba, R"({"mamba_n_heads": 100000})", "mamba_n_heads");
  expect_invalid(kBamba, R"({"mamba_d_head": 17})", "mamba_d_head");
  expect_invalid(kBamba, R"({"mamba_d_head": 0})", "mamba_d_head");
  expect_invalid(kBamba, R"({"mamba_d_head": "wide"})", "mamba_d_head");
  expect_invalid(kBamba, R"({"mamba_expand": 0})", "mamba_expand");
  expect_invalid(kBamba, R"({"mamba_expand": 3, "mamba_d_head": 16})", "mamba_expand");
  expect_invalid(kBamba, R"({"mamba_n_groups": 0})", "mamba_n_groups");
  expect_invalid(kBamba, R"({"mamba_n_groups": 3})", "3 does not divide");
  expect_invalid(kBamba, R"({"mamba_d_state": 0})", "mamba_d_state");
  expect_invalid(kBamba, R"({"mamba_d_conv": 17})", "mamba_d_conv");
  expect_invalid(kBamba, R"({"time_step_limit": null})", "time_step_limit");
  expect_invalid(kBamba, R"({"time_step_limit": [0.1]})", "time_step_limit");
  expect_invalid(kBamba, R"({"time_step_limit": [2.0, 1.0]})", "time_step_limit");
  expect_invalid(kBamba, R"({"time_step_limit": [-1.0, 1.0]})", "time_step_limit");
  expect_invalid(kBamba, R"({"time_step_limit": [0.0, "Infinity"]})", "time_step_limit");
  expect_invalid(kBamba, R"({"time_step_limit": [0.0, {"__float__": "NaN"}]})", "time_step_limit");
  expect_unsupported(kBamba, R"({"mamba_proj_bias": true})", "mamba_proj_bias");
  expect_unsupported(kBamba, R"({"hidden_act": "relu"})", "hidden_act");
  expect_unsupported(kBamba, R"({"partial_rotary_factor": 0.25})", "partial_rotary_factor");
  expect_invalid(kBamba, R"({"hidden_size": 0})", "hidden_size");
  expect_invalid(kBamba, R"({"num_hidden_layers": 0})", "num_hidden_layers");
}

}  // namespace
}  // namespace pianola
