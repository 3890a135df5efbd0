// config.json of DeepSeek-V2 and V3: what is read, what is refused and by which name.
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

// The published V2-Lite, but for its sizes of vocabulary.
constexpr std::string_view kV2Lite = R"({
  "model_type": "deepseek_v2", "vocab_size": 256, "hidden_size": 2048, "intermediate_size": 10944,
  "num_hidden_layers": 3, "num_attention_heads": 16, "num_key_value_heads": 16,
  "kv_lora_rank": 512, "q_lora_rank": null, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
  "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
  "moe_intermediate_size": 1408, "moe_layer_freq": 1, "first_k_dense_replace": 1, "n_group": 1,
  "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": false,
  "routed_scaling_factor": 1.0, "max_position_embeddings": 163840, "rope_theta": 10000,
  "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707,
                   "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096}})";

// The same with the fields of `changes` put over it.
ModelConfig parse(std::string_view changes = "{}") {
  boost::json::value root = parse_json(kV2Lite, "config.json");
  const boost::json::value edit = parse_json(changes, "changes");
  for (const auto& [key, value] : edit.as_object()) root.as_object()[key] = value;
  return parse_hf_config(root);
}

// V2-Lite's sizes with V3's routing.
constexpr std::string_view kV3 =
    R"({"model_type": "deepseek_v3", "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "n_group": 8, "topk_group": 4, "norm_topk_prob": true, "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 1})";

void expect_refused(std::string_view changes, ErrorCode code, const std::string& words) {
  SCOPED_TRACE(changes);
  try {
    parse(changes);
    ADD_FAILURE() << "accepted";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), code) << e.what();
    EXPECT_THAT(e.what(), HasSubstr(words));
  }
}

TEST(LatentConfig, ReadsV2Lite) {
  const ModelConfig c = parse();
  EXPECT_EQ(c.latent.kv_lora_rank, 512);
  EXPECT_EQ(c.latent.q_lora_rank, 0);
  EXPECT_EQ(c.latent.qk_nope_head_dim, 128);
  EXPECT_EQ(c.latent.v_head_dim, 128);
  EXPECT_EQ(c.head_dim, 64);  // what rope turns
  EXPECT_EQ(c.rope_style, RopeStyle::kInterleaved);
  const double mscale = 0.1 * 0.707 * std::log(40.0) + 1.0;
  EXPECT_DOUBLE_EQ(c.attention_scale, mscale * mscale / std::sqrt(192.0));
  EXPECT_EQ(c.experts.num_experts, 64);
  EXPECT_EQ(c.experts.num_experts_per_tok, 6);
  EXPECT_EQ(c.experts.shared_expert_intermediate_size, 2 * 1408);
  EXPECT_FALSE(c.experts.shared_gate || c.experts.choice_bias);
  EXPECT_EQ(c.experts.score, RouteScore::kSoftmax);
  EXPECT_EQ(c.experts.groups, RouteGroups{});
  EXPECT_THAT(c.experts.dense_layers, ElementsAre(true, false, false));
}

TEST(LatentConfig, ReadsV2AndV3) {
  const ModelConfig v2 =
      parse(R"({"q_lora_rank": 1536, "topk_method": "group_limited_greedy", "n_group": 8,
                "topk_group": 3, "routed_scaling_factor": 16.0})");
  EXPECT_EQ(v2.latent.q_lora_rank, 1536);
  EXPECT_EQ(v2.experts.groups, (RouteGroups{8, 3, 1}));
  EXPECT_EQ(v2.experts.route_scale, 16.0);
  const ModelConfig v3 = parse(kV3);
  EXPECT_EQ(v3.experts.groups, (RouteGroups{8, 4, 2}));
  EXPECT_EQ(v3.experts.score, RouteScore::kSigmoidOfChosen);
  EXPECT_TRUE(v3.experts.choice_bias);
  EXPECT_EQ(v3.num_nextn_predict_layers, 1);
  // Greedy choice does not look at groups.
  EXPECT_EQ(parse(R"({"n_group": 8, "topk_group": 3})").experts.groups, RouteGroups{});
}

TEST(LatentConfig, WhatIsNotComputedIsRefusedByName) {
  constexpr ErrorCode kUnsupported = ErrorCode::kUnsupported;
  expect_refused(R"({"attention_bias": true})", kUnsupported, "attention_bias");
  expect_refused(R"({"mlp_bias": true})", kUnsupported, "mlp_bias");
  expect_refused(R"({"norm_topk_prob": true})", kUnsupported, "norm_topk_prob");
  expect_refused(R"({"scoring_func": "sigmoid"})", kUnsupported, "scoring_func");
  expect_refused(R"({"topk_method": "noaux_tc"})", kUnsupported, "topk_method");
  expect_refused(R"({"moe_layer_freq": 2})", kUnsupported, "moe_layer_freq");
  expect_refused(R"({"num_kv_shared_layers": 1})", kUnsupported, "num_kv_shared_layers");
  expect_refused(R"({"rope_scaling": {"type": "linear", "factor": 2}})", kUnsupported, "only yarn");
}

TEST(LatentConfig, SizesAreChecked) {
  constexpr ErrorCode kInvalid = ErrorCode::kInvalidModel;
  expect_refused(R"({"kv_lora_rank": 0})", kInvalid, "kv_lora_rank");
  expect_refused(R"({"qk_nope_head_dim": 0})", kInvalid, "qk_nope_head_dim");
  expect_refused(R"({"qk_rope_head_dim": 63})", kInvalid, "head_dim");
  expect_refused(R"({"v_head_dim": 100000})", kInvalid, "v_head_dim");
  expect_refused(R"({"q_lora_rank": -1})", kInvalid, "q_lora_rank");
  expect_refused(R"({"n_shared_experts": 0})", kInvalid, "n_shared_experts");
  expect_refused(R"({"n_routed_experts": 0})", kInvalid, "n_routed_experts");
  expect_refused(R"({"routed_scaling_factor": 0})", kInvalid, "routed_scaling_factor");
  const std::string grouped = R"("topk_method": "group_limited_greedy")";
  expect_refused("{" + grouped + R"(, "n_group": 7, "topk_group": 3})", kInvalid, "n_group");
  expect_refused("{" + grouped + R"(, "n_group": 8, "topk_group": 9})", kInvalid, "topk_group");
  expect_refused("{" + grouped + R"(, "n_group": 32, "topk_group": 2})", kInvalid, "topk_group");
}

}  // namespace
}  // namespace pianola
