// config.json: what is read, what is refused and by which name.
#include "models/model_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/json_reader.h"
#include "pianola/error.h"

namespace pianola {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr std::string_view kLlama = R"({
  "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96,
  "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
  "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "hidden_act": "silu",
  "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": true})";

// kLlama with the fields of `changes` (an object's text) put over it; "erase" lists names to drop.
boost::json::value edited(std::string_view changes) {
  boost::json::value root = parse_json(kLlama, "config.json");
  const boost::json::value edit = parse_json(changes, "changes");
  for (const auto& [key, value] : edit.as_object()) {
    if (key != "erase") {
      root.as_object()[key] = value;
      continue;
    }
    for (const boost::json::value& name : value.as_array())
      root.as_object().erase(name.as_string());
  }
  return root;
}

ModelConfig parse(std::string_view changes = "{}") { return parse_hf_config(edited(changes)); }

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
void expect_invalid(std::string_view changes, const std::string& words) {
  expect_refused(changes, ErrorCode::kInvalidModel, words);
}
void expect_unsupported(std::string_view changes, const std::string& words) {
  expect_refused(changes, ErrorCode::kUnsupported, words);
}

TEST(HfConfigTest, ReadsLlama) {
  const ModelConfig config = parse();
  EXPECT_EQ(config.model_type, "llama");
  EXPECT_EQ(config.vocab_size, 256);
  EXPECT_EQ(config.hidden_size, 64);
  EXPECT_EQ(config.intermediate_size, 96);
  EXPECT_EQ(config.num_hidden_layers, 2);
  EXPECT_EQ(config.num_attention_heads, 4);
  EXPECT_EQ(config.num_key_value_heads, 2);
  EXPECT_EQ(config.head_dim, 16);
  EXPECT_EQ(config.max_position_embeddings, 128);
  EXPECT_DOUBLE_EQ(config.rms_norm_eps, 1e-5);
  EXPECT_TRUE(config.tie_word_embeddings);
  EXPECT_FALSE(config.qkv_bias || config.output_bias || config.mlp_bias || config.qk_norm);
  EXPECT_EQ(config.rope, RopeConfig{});
  EXPECT_EQ(config.rope_style, RopeStyle::kHalf);
  EXPECT_FALSE(config.tensors_decide);
  EXPECT_EQ(config.bos_token_id, 1);
  EXPECT_THAT(config.eos_token_ids, ElementsAre(2));
  EXPECT_EQ(config.pad_token_id, std::nullopt);
}

TEST(HfConfigTest, DefaultsAreThoseOfTransformers) {
  const ModelConfig config = parse(
      R"({"erase": ["num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "hidden_act",
                    "tie_word_embeddings", "bos_token_id", "eos_token_id"]})");
  EXPECT_EQ(config.num_key_value_heads, 4);
  EXPECT_EQ(config.max_position_embeddings, 2048);
  EXPECT_DOUBLE_EQ(config.rms_norm_eps, 1e-6);
  EXPECT_FALSE(config.tie_word_embeddings);
  EXPECT_EQ(config.bos_token_id, std::nullopt);
  EXPECT_TRUE(config.eos_token_ids.empty());
}

TEST(HfConfigTest, FamiliesSetTheirFlags) {
  const ModelConfig llama = parse(R"({"attention_bias": true, "mlp_bias": true, "head_dim": 32})");
  EXPECT_TRUE(llama.qkv_bias && llama.output_bias && llama.mlp_bias);
  EXPECT_EQ(llama.head_dim, 32);

  const ModelConfig mistral = parse(R"({"model_type": "mistral", "sliding_window": null})");
  EXPECT_FALSE(mistral.qkv_bias || mistral.qk_norm);

  const ModelConfig qwen2 = parse(R"({"model_type": "qwen2"})");
  EXPECT_TRUE(qwen2.qkv_bias);
  EXPECT_FALSE(qwen2.output_bias || qwen2.qk_norm);
  EXPECT_EQ(qwen2.head_dim, 16);

  const ModelConfig qwen3 = parse(R"({"model_type": "qwen3"})");
  EXPECT_TRUE(qwen3.qk_norm);
  EXPECT_FALSE(qwen3.qkv_bias || qwen3.output_bias);
  EXPECT_EQ(qwen3.head_dim, 128);
  EXPECT_TRUE(parse(R"({"model_type": "qwen3", "attention_bias": true})").output_bias);
}

constexpr std::string_view kQwen3Moe =
    R"("model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
       "moe_intermediate_size": 32)";
constexpr std::string_view kGptOss =
    R"("model_type": "gpt_oss", "num_local_experts": 8, "num_experts_per_tok": 2)";

// An object of `base`'s fields with those of `more` put over them.
std::string with(std::string_view base, const std::string& more = "") {
  boost::json::value fields = parse_json("{" + std::string(base) + "}", "base");
  const boost::json::value edit = parse_json("{" + more + "}", "more");
  for (const auto& [key, value] : edit.as_object()) fields.as_object()[key] = value;
  return boost::json::serialize(fields);
}

TEST(HfConfigTest, Qwen3Moe) {
  const ModelConfig config = parse(with(kQwen3Moe));
  EXPECT_EQ(config.experts.num_experts, 8);
  EXPECT_EQ(config.experts.num_experts_per_tok, 2);
  EXPECT_EQ(config.experts.moe_intermediate_size, 32);
  EXPECT_EQ(config.experts.score, RouteScore::kSoftmax);  // transformers' default
  EXPECT_EQ(config.experts.tensors, ExpertTensors::kApart);
  EXPECT_FALSE(config.experts.bias || config.attention_sinks);
  EXPECT_TRUE(config.qk_norm);
  EXPECT_EQ(config.head_dim, 16);  // unlike Qwen3's
  EXPECT_EQ(parse(with(kQwen3Moe, R"("norm_topk_prob": true)")).experts.score,
            RouteScore::kSoftmaxOfChosen);
  EXPECT_EQ(parse(R"({"model_type": "qwen3_moe", "num_local_experts": 4, "num_experts_per_tok": 4,
                      "moe_intermediate_size": 8})")
                .experts.num_experts,
            4);

  const ExpertsConfig some =
      parse(with(kQwen3Moe, R"("num_hidden_layers": 6, "decoder_sparse_step": 2,
                               "mlp_only_layers": [3])"))
          .experts;
  for (int layer = 0; layer < 6; ++layer) EXPECT_EQ(some.in_layer(layer), layer % 4 == 1) << layer;
  EXPECT_FALSE(parse(with(kQwen3Moe, R"("num_experts": 0)")).experts.in_layer(0));
  EXPECT_THAT(
      parse(with(kQwen3Moe, R"("use_sliding_window": true, "sliding_window": 9)")).layer_windows,
      ElementsAre(9, 9));
}

TEST(HfConfigTest, Qwen2MoeHasASharedExpert) {
  const std::string base = R"("model_type": "qwen2_moe", "num_experts": 4,
      "num_experts_per_tok": 2, "moe_intermediate_size": 8)";
  const ModelConfig config = parse(with(base, R"("shared_expert_intermediate_size": 24)"));
  EXPECT_EQ(config.experts.shared_expert_intermediate_size, 24);
  EXPECT_TRUE(config.qkv_bias);
  expect_invalid(with(base), "shared_expert_intermediate_size");
  expect_invalid(with(base, R"("shared_expert_intermediate_size": -1)"),
                 "shared_expert_intermediate_size");
}

TEST(HfConfigTest, GptOss) {
  const ModelConfig config = parse(with(kGptOss, R"("num_hidden_layers": 3)"));
  EXPECT_EQ(config.experts.num_experts, 8);
  EXPECT_EQ(config.experts.moe_intermediate_size, 96);  // intermediate_size is that of an expert
  EXPECT_EQ(config.experts.score, RouteScore::kSoftmaxOfChosen);
  EXPECT_EQ(config.experts.tensors, ExpertTensors::kFused);
  EXPECT_TRUE(config.experts.bias && config.attention_sinks);
  EXPECT_TRUE(config.qkv_bias && config.output_bias);
  EXPECT_EQ(config.hidden_act, Activation::kClampedSwish);
  EXPECT_EQ(config.head_dim, 64);
  EXPECT_THAT(config.layer_windows, ElementsAre(128, 0, 128));
  EXPECT_EQ(config.rope.kind, RopeKind::kYarn);
  EXPECT_EQ(config.rope.theta, 150000.0);
  EXPECT_EQ(config.rope.factor, 32.0);
  EXPECT_FALSE(config.rope.truncate);

  const ModelConfig published = parse(with(
      kGptOss, R"("head_dim": 32, "sliding_window": 8, "rope_theta": 1000.0, "swiglu_limit": 7.0,
                  "layer_types": ["full_attention", "sliding_attention"],
                  "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": false,
                                   "original_max_position_embeddings": 32})"));
  EXPECT_THAT(published.layer_windows, ElementsAre(0, 8));
  EXPECT_EQ(published.rope.theta, 1000.0);
  EXPECT_EQ(published.rope.factor, 4.0);
  EXPECT_EQ(published.rope.original_max_position_embeddings, 32);
}

TEST(HfConfigTest, ExpertsAreChecked) {
  expect_invalid(with(kQwen3Moe, R"("num_experts": -1)"), "config.json: num_experts");
  expect_invalid(with(kQwen3Moe, R"("num_experts": 100000)"), "num_experts");
  expect_invalid(with(kQwen3Moe, R"("num_experts_per_tok": 0)"), "num_experts_per_tok");
  expect_invalid(with(kQwen3Moe, R"("num_experts_per_tok": 9)"), "num_experts_per_tok");
  expect_invalid(with(kQwen3Moe, R"("moe_intermediate_size": 0)"), "moe_intermediate_size");
  expect_invalid(with(kQwen3Moe, R"("decoder_sparse_step": 0)"), "decoder_sparse_step");
  expect_invalid(with(kQwen3Moe, R"("mlp_only_layers": [2])"), "mlp_only_layers");
  expect_invalid(with(kQwen3Moe, R"("mlp_only_layers": [-1])"), "mlp_only_layers");
  expect_invalid(R"({"model_type": "qwen3_moe", "num_experts": 8})", "num_experts_per_tok");
  expect_invalid(with(kGptOss, R"("num_local_experts": 5000)"), "config.json: num_local_experts");
  expect_invalid(with(kGptOss, R"("num_experts_per_tok": 9)"), "num_experts_per_tok");
  expect_invalid(R"({"model_type": "gpt_oss"})", "num_local_experts");
  expect_unsupported(with(kGptOss, R"("swiglu_limit": 6.0)"), "swiglu_limit");
  expect_unsupported(with(kGptOss, R"("quantization_config": {"quant_method": "mxfp4"})"), "MXFP4");
}

TEST(HfConfigTest, TokenIds) {
  EXPECT_THAT(parse(R"({"eos_token_id": [2, 5, 7]})").eos_token_ids, ElementsAre(2, 5, 7));
  EXPECT_EQ(parse(R"({"pad_token_id": -1})").pad_token_id, std::nullopt);
  expect_invalid(R"({"eos_token_id": 256})", "eos_token_id");
  expect_invalid(R"({"eos_token_id": [2, 256]})", "eos_token_id");
  expect_invalid(R"({"eos_token_id": [2, "3"]})", "eos_token_id");
  expect_invalid(R"({"bos_token_id": 300})", "bos_token_id");
  expect_invalid(R"({"bos_token_id": -2})", "bos_token_id");
  expect_invalid(R"({"pad_token_id": 256})", "pad_token_id");
  expect_invalid(R"({"vocab_size": 2, "eos_token_id": 2})", "eos_token_id");
}

TEST(HfConfigTest, GenerationConfigReplacesIds) {
  ModelConfig config = parse();
  apply_generation_config(parse_json(R"({"eos_token_id": [3, 4], "pad_token_id": 0})", "g"),
                          config);
  EXPECT_THAT(config.eos_token_ids, ElementsAre(3, 4));
  EXPECT_EQ(config.pad_token_id, 0);
  EXPECT_EQ(config.bos_token_id, 1);
  const ModelConfig before = config;
  EXPECT_THROW(apply_generation_config(parse_json(R"({"eos_token_id": 999})", "g"), config), Error);
  EXPECT_EQ(config, before);
}

TEST(HfConfigTest, SizesAreChecked) {
  expect_invalid(R"({"num_hidden_layers": 1000000000})", "config.json: num_hidden_layers");
  expect_invalid(R"({"num_hidden_layers": 0})", "num_hidden_layers");
  expect_invalid(R"({"num_hidden_layers": -1})", "num_hidden_layers");
  expect_invalid(R"({"hidden_size": 2147483648})", "hidden_size");
  expect_invalid(R"({"hidden_size": 0})", "hidden_size");
  expect_invalid(R"({"hidden_size": 18446744073709551615})", "hidden_size");
  expect_invalid(R"({"intermediate_size": 9223372036854775807})", "intermediate_size");
  expect_invalid(R"({"vocab_size": 0, "erase": ["bos_token_id", "eos_token_id"]})", "vocab_size");
  expect_invalid(R"({"vocab_size": 100000000})", "vocab_size");
  expect_invalid(R"({"max_position_embeddings": 1000000000000})", "max_position_embeddings");
  expect_invalid(R"({"max_position_embeddings": 0})", "max_position_embeddings");
  EXPECT_EQ(parse(R"({"num_hidden_layers": 1024})").num_hidden_layers, kMaxLayers);
  expect_invalid(R"({"num_hidden_layers": 1025})", "num_hidden_layers");
}

TEST(HfConfigTest, HeadsMustFit) {
  expect_invalid(R"({"num_attention_heads": 0})", "num_attention_heads");
  expect_invalid(R"({"num_attention_heads": 5})", "num_attention_heads");
  expect_invalid(R"({"num_attention_heads": -4})", "num_attention_heads");
  expect_invalid(R"({"num_attention_heads": 100000, "head_dim": 16})", "num_attention_heads");
  expect_invalid(R"({"num_key_value_heads": 0})", "num_key_value_heads");
  expect_invalid(R"({"num_key_value_heads": 3})", "num_key_value_heads");
  expect_invalid(R"({"num_key_value_heads": 8})", "num_key_value_heads");
  expect_invalid(R"({"head_dim": 0})", "head_dim");
  expect_invalid(R"({"head_dim": 15})", "head_dim");
  expect_invalid(R"({"head_dim": -16})", "head_dim");
  expect_invalid(R"({"head_dim": 100000})", "head_dim");
  expect_invalid(R"({"head_dim": 8192, "num_attention_heads": 4096})", "num_attention_heads");
  // Only the derived width needs the division.
  EXPECT_EQ(parse(R"({"num_attention_heads": 6, "head_dim": 16})").num_attention_heads, 6);
}

TEST(HfConfigTest, NumbersAreChecked) {
  expect_invalid(R"({"rms_norm_eps": 0})", "rms_norm_eps");
  expect_invalid(R"({"rms_norm_eps": -1e-5})", "rms_norm_eps");
  expect_invalid(R"({"rms_norm_eps": 1e-60})", "rms_norm_eps");  // 0 in float32
  expect_invalid(R"({"rms_norm_eps": 2})", "rms_norm_eps");
  expect_invalid(R"({"rope_theta": 0})", "rope_theta");
  expect_invalid(R"({"rope_theta": -10000})", "rope_theta");
  expect_invalid(R"({"rope_theta": 1})", "rope_theta");
  expect_invalid(R"({"rope_theta": 1e300})", "rope_theta");
}

TEST(HfConfigTest, NumbersThatAreNotFiniteNeverParse) {
  for (const char* text : {R"({"rope_theta": 1e400})", R"({"rope_theta": NaN})",
                           R"({"rope_theta": Infinity})", R"({"rope_theta": -1e400})"}) {
    EXPECT_THROW(parse_json(text, "config.json"), Error) << text;
  }
}

TEST(HfConfigTest, DeepNestingIsRefused) {
  std::string text = "{\"model_type\": \"llama\", \"x\": ";
  for (int i = 0; i < 100000; ++i) text += '[';
  EXPECT_THROW(parse_json(text, "config.json"), Error);
}

TEST(HfConfigTest, WrongTypesAreNamed) {
  EXPECT_THROW(parse_hf_config(parse_json("[]", "config.json")), Error);
  EXPECT_THROW(parse_hf_config(parse_json("3", "config.json")), Error);
  expect_invalid(R"({"hidden_size": "64"})", "hidden_size");
  expect_invalid(R"({"hidden_size": 64.5})", "hidden_size");
  expect_invalid(R"({"hidden_size": null})", "hidden_size");
  expect_invalid(R"({"hidden_size": [64]})", "hidden_size");
  expect_invalid(R"({"model_type": 3})", "model_type");
  expect_invalid(R"({"erase": ["model_type"]})", "model_type");
  expect_invalid(R"({"erase": ["vocab_size"]})", "vocab_size");
  expect_invalid(R"({"tie_word_embeddings": 1})", "tie_word_embeddings");
  expect_invalid(R"({"hidden_act": 1})", "hidden_act");
  expect_invalid(R"({"rope_scaling": 4})", "rope_scaling");
  expect_invalid(R"({"rope_parameters": []})", "rope_parameters");
  expect_invalid(R"({"rope_theta": "10000"})", "rope_theta");
  expect_invalid(R"({"layer_types": [1]})", "layer_types");
  expect_invalid(R"({"attention_bias": "yes"})", "attention_bias");
  expect_invalid(R"({"model_type": "qwen2", "erase": ["num_key_value_heads"]})",
                 "num_key_value_heads");
}

TEST(HfConfigTest, ReadsBothFormsOfRope) {
  const ModelConfig before = parse(
      R"({"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0,
          "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}})");
  const ModelConfig now = parse(
      R"({"rope_parameters": {"rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0,
          "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}})");
  EXPECT_EQ(before, now);
  EXPECT_EQ(now.rope.kind, RopeKind::kLlama3);
  EXPECT_DOUBLE_EQ(now.rope.theta, 500000.0);
  EXPECT_DOUBLE_EQ(now.rope.factor, 8.0);
  EXPECT_EQ(now.rope.original_max_position_embeddings, 64);

  const ModelConfig linear = parse(R"({"rope_scaling": {"type": "linear", "factor": 4}})");
  EXPECT_EQ(linear.rope.kind, RopeKind::kLinear);
  EXPECT_DOUBLE_EQ(linear.rope.factor, 4.0);
  EXPECT_EQ(parse(R"({"rope_scaling": null, "rope_theta": 20000})").rope.theta, 20000.0);
}

TEST(HfConfigTest, ReadsDynamicAndYarn) {
  const RopeConfig dynamic = parse(R"({"rope_scaling": {"type": "dynamic", "factor": 2.0}})").rope;
  EXPECT_EQ(dynamic.kind, RopeKind::kDynamic);
  EXPECT_EQ(dynamic.original_max_position_embeddings, 128);

  const RopeConfig yarn = parse(R"({"rope_scaling": {"type": "yarn", "factor": 4.0}})").rope;
  EXPECT_EQ(yarn.original_max_position_embeddings, 128);
  EXPECT_DOUBLE_EQ(yarn.beta_fast, 32.0);
  EXPECT_DOUBLE_EQ(yarn.beta_slow, 1.0);
  EXPECT_TRUE(yarn.truncate);

  const RopeConfig full =
      parse(
          R"({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0,
          "original_max_position_embeddings": 32, "beta_fast": 16, "beta_slow": 2,
          "truncate": false, "mscale": 0.7, "mscale_all_dim": 0.8, "attention_factor": 1.1}})")
          .rope;
  const RopeConfig want{.kind = RopeKind::kYarn,
                        .theta = 1e6,
                        .factor = 4.0,
                        .original_max_position_embeddings = 32,
                        .beta_fast = 16.0,
                        .beta_slow = 2.0,
                        .truncate = false,
                        .mscale = 0.7,
                        .mscale_all_dim = 0.8,
                        .attention_factor = 1.1};
  EXPECT_EQ(full, want);
}

TEST(HfConfigTest, RopeFieldsAreChecked) {
  expect_invalid(R"({"rope_scaling": {"type": "linear"}})", "rope_scaling.factor is missing");
  expect_invalid(R"({"rope_scaling": {"type": "linear", "factor": 0}})", "rope_scaling.factor");
  expect_invalid(R"({"rope_scaling": {"type": "linear", "factor": "4"}})", "rope_scaling.factor");
  expect_invalid(R"({"rope_scaling": {"type": "dynamic", "factor": -2}})", "rope_scaling.factor");
  expect_invalid(R"({"rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": 0}})", "beta_fast");
  expect_invalid(R"({"rope_scaling": {"type": "yarn", "factor": 2, "beta_slow": 64}})",
                 "beta_fast");
  expect_invalid(
      R"({"rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": 0}})",
      "original_max_position_embeddings");
  expect_invalid(R"({"rope_scaling": {"type": "yarn", "factor": 2, "attention_factor": 0}})",
                 "attention_factor");
  expect_invalid(
      R"({"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4,
          "high_freq_factor": 4}})",
      "high_freq_factor");
  expect_invalid(R"({"rope_scaling": {"type": "llama3", "factor": 8, "high_freq_factor": 4}})",
                 "low_freq_factor is missing");
}

TEST(HfConfigTest, WhatIsNotComputedIsRefusedByName) {
  expect_unsupported(R"({"model_type": "gemma2"})", "gemma2");
  expect_unsupported(R"({"hidden_act": "gelu"})", "hidden_act");
  expect_unsupported(R"({"pretraining_tp": 2})", "pretraining_tp");
  expect_unsupported(R"({"quantization_config": {"quant_method": "gptq"}})", "quantization_config");
  expect_unsupported(R"({"partial_rotary_factor": 0.5})", "partial_rotary_factor");
  expect_unsupported(
      R"({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}})",
      "partial_rotary_factor");
  expect_unsupported(R"({"rope_interleaved": true})", "rope_interleaved");
  expect_unsupported(R"({"rope_scaling": {"type": "longrope", "factor": 4}})", "longrope");
  expect_unsupported(R"({"rope_scaling": {"type": "su", "factor": 4}})", "'su'");
  expect_unsupported(R"({"layer_types": ["full_attention", "linear_attention"]})",
                     "linear_attention");
}

TEST(HfConfigTest, ReadsGemma3) {
  const std::string head = R"({"model_type": "gemma3_text", "erase": ["hidden_act",
      "tie_word_embeddings"], "num_hidden_layers": 7, "head_dim": 32, "sliding_window": 9, )";
  const ModelConfig config = parse(head + R"("rope_theta": 5000.0, "rope_local_base_freq": 100.0,
                      "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                      "query_pre_attn_scalar": 64})");
  EXPECT_EQ(config.hidden_act, Activation::kGeluTanh);
  EXPECT_TRUE(config.tie_word_embeddings);
  EXPECT_TRUE(config.post_norms);
  EXPECT_TRUE(config.qk_norm);
  EXPECT_EQ(config.norm_offset, 1);
  EXPECT_EQ(config.embedding_scale, 8);  // of a width of 64
  EXPECT_EQ(config.attention_scale, 0.125);
  EXPECT_THAT(config.layer_windows, ElementsAre(9, 9, 9, 9, 9, 0, 9));
  EXPECT_EQ(config.rope.kind, RopeKind::kLinear);
  EXPECT_EQ(config.rope.theta, 5000);
  EXPECT_EQ(config.window_rope, RopeConfig{.theta = 100});
  // As transformers 5 writes it.
  const ModelConfig later = parse(head + R"("rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}},
        "query_pre_attn_scalar": 64})");
  EXPECT_EQ(later, config);
  // Defaults of transformers.
  const ModelConfig least =
      parse(R"({"model_type": "gemma3_text", "erase": ["hidden_act"], "head_dim": null})");
  EXPECT_EQ(least.rope, RopeConfig{.theta = 1e6});
  EXPECT_EQ(least.window_rope, RopeConfig{.theta = 1e4});
  EXPECT_EQ(least.attention_scale, 1.0 / 16);
  EXPECT_THAT(parse(head + R"("sliding_window_pattern": 2})").layer_windows,
              ElementsAre(9, 0, 9, 0, 9, 0, 9));
  expect_unsupported(head + R"("hidden_activation": "gelu"})", "hidden_activation");
  expect_unsupported(head + R"("final_logit_softcapping": 30.0})", "final_logit_softcapping");
  expect_unsupported(head + R"("use_bidirectional_attention": true})", "bidirectional");
  expect_invalid(head + R"("query_pre_attn_scalar": 0})", "query_pre_attn_scalar");
  expect_invalid(head + R"("sliding_window_pattern": 0})", "sliding_window_pattern");
  expect_invalid(head + R"("rope_local_base_freq": 0.5})", "rope_theta");
}

// The last layers attend to the cache of the last layer of their kind that has one.
TEST(HfConfigTest, LayersThatShareCaches) {
  const ModelConfig plain = parse();
  EXPECT_EQ(plain.num_kv_shared_layers, 0);
  EXPECT_EQ(plain.cache_layer(plain.num_hidden_layers), plain.num_hidden_layers);  // an encoder's
  EXPECT_EQ(plain.cache_layer(1), 1);
  const ModelConfig config = parse(R"({"num_hidden_layers": 7, "num_kv_shared_layers": 3})");
  for (const std::int64_t layer : {0, 1, 2, 3}) EXPECT_EQ(config.cache_layer(layer), layer);
  for (const std::int64_t layer : {4, 5, 6}) EXPECT_EQ(config.cache_layer(layer), 3);
  const ModelConfig mixed = parse(
      R"({"model_type": "gemma3_text", "num_hidden_layers": 6, "num_kv_shared_layers": 3,
          "sliding_window": 16, "layer_types": ["full_attention", "sliding_attention",
          "sliding_attention", "full_attention", "sliding_attention", "full_attention"]})");
  EXPECT_EQ(mixed.cache_layer(2), 2);
  EXPECT_EQ(mixed.cache_layer(3), 0);
  EXPECT_EQ(mixed.cache_layer(4), 2);
  EXPECT_EQ(mixed.cache_layer(5), 0);
  expect_invalid(R"({"num_kv_shared_layers": 2})", "num_kv_shared_layers");
  expect_invalid(R"({"num_kv_shared_layers": -1})", "num_kv_shared_layers");
  expect_invalid(R"({"model_type": "gemma3_text", "num_hidden_layers": 3, "sliding_window": 16,
                     "num_kv_shared_layers": 1, "layer_types": ["sliding_attention",
                     "sliding_attention", "full_attention"]})",
                 "layer 2 has no keys and values");
}

TEST(HfConfigTest, WindowsOfLayers) {
  using Windows = std::vector<std::int64_t>;
  const auto windows = [](const std::string& text) { return parse(text).layer_windows; };
  EXPECT_EQ(windows(R"({"model_type": "mistral", "sliding_window": 7})"), (Windows{7, 7}));
  EXPECT_EQ(windows(R"({"model_type": "mistral", "sliding_window": null})"), Windows());
  // Absent means transformers' default of 4,096.
  EXPECT_EQ(windows(R"({"model_type": "mistral"})"), (Windows{4096, 4096}));
  expect_invalid(R"({"model_type": "mistral", "sliding_window": 0})", "sliding_window");
  expect_invalid(R"({"model_type": "mistral", "sliding_window": 1000000000})", "sliding_window");

  for (const char* family : {"qwen2", "qwen3"}) {
    const std::string head = std::string(R"({"model_type": ")") + family + R"(", )";
    EXPECT_EQ(windows(head + R"("use_sliding_window": false, "sliding_window": 8})"), Windows());
    const std::string on = head + R"("use_sliding_window": true, "sliding_window": 8, )";
    EXPECT_EQ(windows(on + R"("max_window_layers": 1})"), (Windows{0, 8}));
    EXPECT_EQ(windows(on + R"("max_window_layers": 0})"), (Windows{8, 8}));
    EXPECT_EQ(windows(on + R"("max_window_layers": 2})"), Windows());  // no layer is that far up
    // A list of the layers' kinds wins.
    EXPECT_EQ(windows(on + R"("max_window_layers": 0,
                             "layer_types": ["sliding_attention", "full_attention"]})"),
              (Windows{8, 0}));
    EXPECT_EQ(windows(on + R"("layer_types": ["full_attention", "full_attention"]})"), Windows());
    expect_invalid(on + R"("layer_types": ["full_attention"]})", "layer_types");
    expect_invalid(head + R"("sliding_window": null,
                             "layer_types": ["sliding_attention", "full_attention"]})",
                   "sliding_window");
  }
  EXPECT_EQ(parse(R"({"model_type": "mistral", "sliding_window": 7})").smallest_window(), 7);
  EXPECT_EQ(parse(R"({"model_type": "mistral", "sliding_window": null})").smallest_window(),
            std::nullopt);
}

}  // namespace
}  // namespace pianola
