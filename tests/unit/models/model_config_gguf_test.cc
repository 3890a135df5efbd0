// GGUF metadata: what is read, what is refused and by which key.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "expect_error.h"
#include "models/model_config.h"
#include "models/rope.h"
#include "pianola/error.h"

namespace pianola {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using Entry = std::pair<std::string, MetadataValue>;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// A small model of `arch`, with `changes` put over it; keys begin below "<arch>." unless they
// begin with "general." or "tokenizer.". An empty [string] erases a key.
Metadata metadata(const std::string& arch, const std::vector<Entry>& changes = {}) {
  std::map<std::string, MetadataValue> all = {
      {"general.architecture", arch},
      {arch + ".vocab_size", std::int64_t{256}},
      {arch + ".context_length", std::int64_t{128}},
      {arch + ".embedding_length", std::int64_t{64}},
      {arch + ".block_count", std::int64_t{2}},
      {arch + ".feed_forward_length", std::int64_t{96}},
      {arch + ".attention.head_count", std::int64_t{4}},
      {arch + ".attention.head_count_kv", std::int64_t{2}},
      {arch + ".attention.layer_norm_rms_epsilon", 1e-5},
      {arch + ".rope.freq_base", 10000.0},
  };
  for (const auto& [key, value] : changes) {
    const bool full = key.starts_with("general.") || key.starts_with("tokenizer.");
    const std::string name = full ? key : arch + "." + key;
    const auto* erased = std::get_if<std::vector<std::string>>(&value);
    if (erased && erased->empty()) {
      all.erase(name);
    } else {
      all.insert_or_assign(name, value);
    }
  }
  Metadata result;
  for (auto& [key, value] : all) result.insert(key, value);
  return result;
}

const MetadataValue kErase = std::vector<std::string>{};
MetadataValue number(std::int64_t value) { return value; }

void expect_refused(const std::vector<Entry>& changes, ErrorCode code, const std::string& words) {
  SCOPED_TRACE(words);
  try {
    parse_gguf_config(metadata("llama", changes));
    ADD_FAILURE() << "accepted";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), code) << e.what();
    EXPECT_THAT(e.what(), HasSubstr(words));
  }
}
void expect_invalid(const std::string& key, MetadataValue value) {
  expect_refused({{key, std::move(value)}}, ErrorCode::kInvalidModel, key);
}
void expect_unsupported(const std::string& key, MetadataValue value) {
  expect_refused({{key, std::move(value)}}, ErrorCode::kUnsupported, key);
}

TEST(GgufConfigTest, ReadsLlama) {
  const ModelConfig config =
      parse_gguf_config(metadata("llama", {{"tokenizer.ggml.bos_token_id", number(1)},
                                           {"tokenizer.ggml.eos_token_id", number(2)},
                                           {"tokenizer.ggml.eot_token_id", number(7)},
                                           {"tokenizer.ggml.padding_token_id", number(2)}}));
  EXPECT_EQ(config.model_type, "llama");
  EXPECT_EQ(config.vocab_size, 256);
  EXPECT_EQ(config.hidden_size, 64);
  EXPECT_EQ(config.intermediate_size, 96);
  EXPECT_EQ(config.num_hidden_layers, 2);
  EXPECT_EQ(config.num_attention_heads, 4);
  EXPECT_EQ(config.num_key_value_heads, 2);
  EXPECT_EQ(config.head_dim, 16);
  EXPECT_EQ(config.max_position_embeddings, 128);
  EXPECT_EQ(config.rope, RopeConfig{});
  EXPECT_EQ(config.rope_style, RopeStyle::kInterleaved);
  EXPECT_TRUE(config.tensors_decide);
  EXPECT_EQ(config.bos_token_id, 1);
  EXPECT_THAT(config.eos_token_ids, ElementsAre(2, 7));
  EXPECT_EQ(config.pad_token_id, 2);
}

TEST(GgufConfigTest, QwenHasHalvesBiasesAndNorms) {
  const ModelConfig qwen2 = parse_gguf_config(metadata("qwen2"));
  EXPECT_EQ(qwen2.rope_style, RopeStyle::kHalf);
  EXPECT_TRUE(qwen2.qkv_bias);
  EXPECT_FALSE(qwen2.qk_norm);
  const ModelConfig qwen3 = parse_gguf_config(metadata(
      "qwen3", {{"attention.key_length", number(32)}, {"attention.value_length", number(32)}}));
  EXPECT_EQ(qwen3.head_dim, 32);
  EXPECT_TRUE(qwen3.qk_norm);
  EXPECT_FALSE(qwen3.qkv_bias);
}

// The keys of Qwen3-Next, as its 80B model has them but for their size, with `changes` over them.
Metadata linear_attention(const std::string& arch, const std::vector<Entry>& changes = {}) {
  std::vector<Entry> keys = {{"attention.key_length", number(32)},
                             {"attention.value_length", number(32)},
                             {"rope.dimension_count", number(8)},
                             {"ssm.conv_kernel", number(4)},
                             {"ssm.state_size", number(16)},
                             {"ssm.group_count", number(2)},
                             {"ssm.time_step_rank", number(6)},
                             {"ssm.inner_size", number(96)},
                             {"expert_count", number(8)},
                             {"expert_used_count", number(2)},
                             {"expert_feed_forward_length", number(32)},
                             {"expert_shared_feed_forward_length", number(48)},
                             {"block_count", number(5)},
                             {"full_attention_interval", number(2)}};
  if (arch == "qwen35") {
    std::erase_if(keys, [](const Entry& entry) { return entry.first.starts_with("expert"); });
  }
  keys.insert(keys.end(), changes.begin(), changes.end());
  return metadata(arch, keys);
}

TEST(GgufConfigTest, LinearAttention) {
  const ModelConfig next = parse_gguf_config(linear_attention("qwen3next"));
  EXPECT_TRUE(next.qk_norm && next.attention_gate && next.state.grouped_heads);
  EXPECT_EQ(next.norm_offset, 0);
  EXPECT_EQ(next.rope.partial_rotary_factor, 0.25);
  const StateLayerConfig& s = next.state;
  EXPECT_THAT(s.mixers, ElementsAre(Mixer::kDeltaRule, Mixer::kAttention, Mixer::kDeltaRule,
                                    Mixer::kAttention, Mixer::kDeltaRule));
  EXPECT_EQ(s.heads, 6);
  EXPECT_EQ(s.key_heads, 2);
  EXPECT_EQ(s.key_dim, 16);
  EXPECT_EQ(s.value_dim, 16);
  EXPECT_EQ(s.conv_taps, 4);
  EXPECT_EQ(next.experts.num_experts, 8);
  EXPECT_EQ(next.experts.shared_expert_intermediate_size, 48);
  EXPECT_EQ(next.experts.score, RouteScore::kSoftmaxOfChosen);
  const ModelConfig qwen35 = parse_gguf_config(linear_attention("qwen35"));
  EXPECT_FALSE(qwen35.state.grouped_heads);
  EXPECT_EQ(qwen35.experts.num_experts, 0);
  EXPECT_EQ(qwen35.state.mixers, s.mixers);
}

TEST(GgufConfigTest, LayersOfLinearAttentionAndOfADraft) {
  const std::vector<bool> folds = {false, true, true, false};
  const ModelConfig config =
      parse_gguf_config(linear_attention("qwen35", {{"block_count", number(4)},
                                                    {"nextn_predict_layers", number(1)},
                                                    {"attention.recurrent_layers", folds}}));
  EXPECT_EQ(config.num_hidden_layers, 3);
  EXPECT_EQ(config.num_nextn_predict_layers, 1);
  EXPECT_THAT(config.state.mixers,
              ElementsAre(Mixer::kAttention, Mixer::kDeltaRule, Mixer::kDeltaRule));
}

TEST(GgufConfigTest, RefusesOtherLinearAttention) {
  const auto refused = [](const std::string& key, MetadataValue value, const std::string& words,
                          ErrorCode code = ErrorCode::kInvalidModel) {
    SCOPED_TRACE(key);
    expect_error(code, words,
                 [&] { parse_gguf_config(linear_attention("qwen35", {{key, std::move(value)}})); });
  };
  for (const char* key : {"ssm.conv_kernel", "ssm.state_size", "ssm.group_count",
                          "ssm.time_step_rank", "ssm.inner_size"}) {
    refused(key, kErase, key);
    refused(key, number(0), key);
    refused(key, number(-4), key);
    refused(key, number(std::int64_t{1} << 40), key);
  }
  refused("ssm.group_count", number(4), "ssm.group_count");  // six heads
  refused("ssm.inner_size", number(144), "ssm.inner_size");  // values wider than keys
  refused("full_attention_interval", number(0), "full_attention_interval");
  refused("attention.recurrent_layers", std::vector<bool>{true}, "recurrent_layers");
  refused("attention.recurrent_layers", number(1), "recurrent_layers");
  refused("nextn_predict_layers", number(5), "block_count");
  refused("nextn_predict_layers", number(-1), "nextn_predict_layers");
  refused("rope.dimension_count", number(7), "rope.dimension_count");
  refused("rope.dimension_count", number(64), "rope.dimension_count", ErrorCode::kUnsupported);
  refused("attention.sliding_window", number(64), "sliding_window", ErrorCode::kUnsupported);
}

TEST(GgufConfigTest, TheTokensGiveTheVocabulary) {
  const std::vector<std::string> tokens(300, "x");
  EXPECT_EQ(parse_gguf_config(metadata("llama", {{"tokenizer.ggml.tokens", tokens}})).vocab_size,
            300);
  expect_refused({{"vocab_size", kErase}}, ErrorCode::kInvalidModel, "vocab_size");
  expect_refused({{"tokenizer.ggml.tokens", tokens}, {"tokenizer.ggml.eos_token_id", number(300)}},
                 ErrorCode::kInvalidModel, "tokenizer.ggml.eos_token_id");
}

TEST(GgufConfigTest, KeysAreChecked) {
  expect_invalid("block_count", number(1000000000));
  expect_invalid("block_count", number(0));
  expect_invalid("block_count", number(-1));
  expect_invalid("block_count", std::string("2"));
  expect_invalid("embedding_length", number(std::int64_t{1} << 31));
  expect_invalid("feed_forward_length", number(0));
  expect_invalid("attention.head_count", number(0));
  expect_invalid("attention.head_count", number(5));
  expect_invalid("attention.head_count_kv", number(3));
  expect_invalid("attention.head_count_kv", number(0));
  expect_invalid("attention.key_length", number(15));
  expect_invalid("attention.key_length", number(0));
  expect_invalid("context_length", number(0));
  expect_invalid("context_length", number(std::int64_t{1} << 40));
  expect_invalid("attention.layer_norm_rms_epsilon", 0.0);
  expect_invalid("attention.layer_norm_rms_epsilon", kNan);
  expect_invalid("rope.freq_base", 0.0);
  expect_invalid("rope.freq_base", kNan);
  expect_invalid("rope.freq_base", std::numeric_limits<double>::infinity());
  expect_invalid("rope.scaling.factor", kNan);
  expect_invalid("rope.scaling.factor", -2.0);
  for (const char* key :
       {"block_count", "embedding_length", "feed_forward_length", "attention.head_count",
        "attention.layer_norm_rms_epsilon", "context_length"}) {
    expect_invalid(key, kErase);
  }
  expect_refused({{"general.architecture", kErase}}, ErrorCode::kInvalidModel,
                 "general.architecture");
}

TEST(GgufConfigTest, PerLayerArraysMustAgree) {
  const auto list = [](std::int64_t a, std::int64_t b) { return std::vector<std::int64_t>{a, b}; };
  const ModelConfig config =
      parse_gguf_config(metadata("llama", {{"feed_forward_length", list(96, 96)}}));
  EXPECT_EQ(config.intermediate_size, 96);
  expect_unsupported("feed_forward_length", list(96, 64));
  expect_unsupported("attention.head_count_kv", list(2, 1));
  expect_invalid("attention.head_count", std::vector<std::int64_t>{});
}

TEST(GgufConfigTest, RopeScaling) {
  const auto rope = [](const std::vector<Entry>& changes) {
    return parse_gguf_config(metadata("llama", changes)).rope;
  };
  const RopeConfig linear{.kind = RopeKind::kLinear, .factor = 4.0};
  EXPECT_EQ(rope({{"rope.scaling.type", std::string("linear")}, {"rope.scaling.factor", 4.0}}),
            linear);
  EXPECT_EQ(rope({{"rope.scaling.factor", 4.0}}), linear);  // linear is the default type
  EXPECT_EQ(rope({{"rope.scale_linear", 4.0}}), linear);    // the key of early files
  EXPECT_EQ(rope({{"rope.scaling.factor", 0.0}}), RopeConfig{});
  EXPECT_EQ(rope({{"rope.scaling.type", std::string("none")}, {"rope.scaling.factor", 4.0}}),
            RopeConfig{});
  EXPECT_EQ(rope({{"rope.freq_base", kErase}}), RopeConfig{});

  const std::vector<Entry> yarn = {{"rope.scaling.type", std::string("yarn")},
                                   {"rope.scaling.factor", 4.0},
                                   {"rope.scaling.original_context_length", number(64)}};
  const RopeConfig plain = rope(yarn);
  EXPECT_EQ(plain.kind, RopeKind::kYarn);
  EXPECT_EQ(plain.original_max_position_embeddings, 64);
  EXPECT_EQ(plain.attention_factor, std::nullopt);

  // attn_factor comes on top of the formula.
  std::vector<Entry> more = yarn;
  more.emplace_back("rope.scaling.attn_factor", 0.5);
  EXPECT_FLOAT_EQ(rope_attention_scale(rope(more)), 0.5F * rope_attention_scale(plain));
}

TEST(GgufConfigTest, ReadsGemma3) {
  const auto gemma = [](std::vector<Entry> changes) {
    changes.emplace_back("attention.sliding_window", number(9));
    changes.emplace_back("attention.key_length", number(32));
    return parse_gguf_config(metadata("gemma3", changes));
  };
  const ModelConfig config = gemma({{"block_count", number(7)}, {"rope.freq_base", 5000.0}});
  EXPECT_EQ(config.hidden_act, Activation::kGeluTanh);
  EXPECT_TRUE(config.post_norms);
  EXPECT_TRUE(config.qk_norm);
  EXPECT_EQ(config.norm_offset, 0);  // the files hold 1 + w
  EXPECT_EQ(config.embedding_scale, 8);
  EXPECT_EQ(config.attention_scale, 0);
  EXPECT_THAT(config.layer_windows, ElementsAre(9, 9, 9, 9, 9, 0, 9));
  EXPECT_EQ(config.rope.theta, 5000);
  EXPECT_EQ(config.window_rope, RopeConfig{.theta = 1e4});
  EXPECT_EQ(gemma({{"rope.freq_base_swa", 70.0}}).window_rope, RopeConfig{.theta = 70});
  EXPECT_EQ(gemma({{"rope.freq_base", kErase}}).rope.theta, 1e6);
  EXPECT_EQ(gemma({{"block_count", number(62)}}).attention_scale, 0.25);  // the 27B model's rule
  expect_refused({{"general.architecture", std::string("gemma3")}}, ErrorCode::kInvalidModel,
                 "gemma3");
}

std::vector<Entry> experts(std::vector<Entry> more = {}) {
  more.insert(more.begin(), {{"expert_count", number(8)},
                             {"expert_used_count", number(2)},
                             {"expert_feed_forward_length", number(32)}});
  return more;
}

TEST(GgufConfigTest, MixturesOfExperts) {
  const ModelConfig qwen = parse_gguf_config(metadata("qwen3moe", experts()));
  EXPECT_EQ(qwen.experts.num_experts, 8);
  EXPECT_EQ(qwen.experts.num_experts_per_tok, 2);
  EXPECT_EQ(qwen.experts.moe_intermediate_size, 32);
  EXPECT_EQ(qwen.experts.score, RouteScore::kSoftmaxOfChosen);
  EXPECT_EQ(qwen.experts.tensors, ExpertTensors::kStacked);
  EXPECT_FALSE(qwen.experts.bias);
  EXPECT_TRUE(qwen.qk_norm);

  const ModelConfig gpt = parse_gguf_config(
      metadata("gpt-oss", experts({{"attention.sliding_window", number(16)},
                                   {"rope.scaling.type", std::string("yarn")},
                                   {"rope.scaling.factor", 32.0},
                                   {"rope.scaling.original_context_length", number(64)}})));
  EXPECT_TRUE(gpt.experts.bias && gpt.attention_sinks);
  EXPECT_EQ(gpt.hidden_act, Activation::kClampedSwish);
  EXPECT_THAT(gpt.layer_windows, ElementsAre(16, 0));
  EXPECT_FALSE(gpt.rope.truncate);

  const ModelConfig shared = parse_gguf_config(
      metadata("qwen2moe", experts({{"expert_shared_feed_forward_length", number(40)}})));
  EXPECT_EQ(shared.experts.moe_intermediate_size, 32);
  EXPECT_EQ(shared.experts.shared_expert_intermediate_size, 40);
  EXPECT_EQ(shared.experts.score, RouteScore::kSoftmax);
  EXPECT_TRUE(shared.qkv_bias);
  EXPECT_FALSE(shared.qk_norm);
  // Early files: both from the width of an MLP, as llama.cpp has it.
  const ModelConfig early = parse_gguf_config(
      metadata("qwen2moe", {{"expert_count", number(8)}, {"expert_used_count", number(2)}}));
  EXPECT_EQ(early.experts.moe_intermediate_size, early.intermediate_size / 2);
  EXPECT_EQ(early.experts.shared_expert_intermediate_size, early.intermediate_size);

  const auto refused = [](const std::string& arch, const std::vector<Entry>& changes,
                          ErrorCode code, const std::string& words) {
    SCOPED_TRACE(words);
    try {
      parse_gguf_config(metadata(arch, changes));
      ADD_FAILURE() << "accepted";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), code) << e.what();
      EXPECT_THAT(e.what(), HasSubstr(words));
    }
  };
  constexpr auto kInvalid = ErrorCode::kInvalidModel;
  refused("qwen3moe", {}, kInvalid, "qwen3moe.expert_count");
  refused("qwen3moe", experts({{"expert_used_count", number(9)}}), kInvalid,
          "qwen3moe.expert_used_count");
  refused("qwen3moe", experts({{"expert_used_count", number(0)}}), kInvalid, "expert_used_count");
  refused("qwen3moe", experts({{"expert_feed_forward_length", number(0)}}), kInvalid,
          "expert_feed_forward_length");
  refused("qwen3moe", experts({{"expert_weights_scale", 2.5}}), ErrorCode::kUnsupported,
          "expert_weights_scale");
  refused("qwen3moe", experts({{"expert_shared_count", number(1)}}), ErrorCode::kUnsupported,
          "expert_shared_count");
  refused("qwen3moe", experts({{"expert_weights_norm", false}}), ErrorCode::kUnsupported,
          "qwen3moe.expert_weights_norm");
  refused("qwen2moe", experts({{"expert_weights_norm", true}}), ErrorCode::kUnsupported,
          "qwen2moe.expert_weights_norm");
  refused("qwen2moe", experts({{"expert_shared_feed_forward_length", number(-1)}}), kInvalid,
          "qwen2moe.expert_shared_feed_forward_length");
  refused("gpt-oss", experts(), kInvalid, "gpt-oss.attention.sliding_window");
  refused("gpt-oss", experts({{"attention.sliding_window", number(0)}}), kInvalid,
          "gpt-oss.attention.sliding_window");
}

// DeepSeek, in both forms of its files.
TEST(GgufConfigTest, LatentAttention) {
  const std::vector<Entry> late = {{"attention.head_count_kv", number(1)},
                                   {"attention.kv_lora_rank", number(32)},
                                   {"attention.key_length", number(48)},
                                   {"attention.value_length", number(32)},
                                   {"attention.key_length_mla", number(40)},
                                   {"attention.value_length_mla", number(20)},
                                   {"rope.dimension_count", number(16)},
                                   {"rope.scaling.type", std::string("yarn")},
                                   {"rope.scaling.factor", 40.0},
                                   {"rope.scaling.original_context_length", number(64)},
                                   {"rope.scaling.yarn_log_multiplier", 0.0707},
                                   {"leading_dense_block_count", number(1)},
                                   {"expert_count", number(8)},
                                   {"expert_used_count", number(2)},
                                   {"expert_shared_count", number(2)},
                                   {"expert_feed_forward_length", number(32)},
                                   {"expert_weights_scale", 16.0}};
  const auto with = [&late](const std::vector<Entry>& changes) {
    std::vector<Entry> all = late;
    all.insert(all.end(), changes.begin(), changes.end());
    return metadata("deepseek2", all);
  };
  const ModelConfig c = parse_gguf_config(with({}));
  EXPECT_EQ(c.latent, (LatentConfig{.kv_lora_rank = 32,
                                    .qk_nope_head_dim = 24,
                                    .qk_rope_head_dim = 16,
                                    .v_head_dim = 20,
                                    .norm_eps = 1e-5}));
  EXPECT_EQ(c.head_dim, 16);
  EXPECT_EQ(c.rope_style, RopeStyle::kInterleaved);
  EXPECT_EQ(c.rope.attention_factor, 1.0);
  const double stretch = 1 + 0.0707 * std::log(40.0);
  EXPECT_DOUBLE_EQ(c.attention_scale, stretch * stretch / std::sqrt(40.0));
  EXPECT_EQ(c.experts.score, RouteScore::kSoftmax);
  EXPECT_EQ(c.experts.shared_expert_intermediate_size, 64);
  EXPECT_EQ(c.experts.route_scale, 16.0);
  EXPECT_THAT(c.experts.dense_layers, ElementsAre(true, false));
  EXPECT_FALSE(c.experts.choice_bias || c.experts.shared_gate);

  const ModelConfig early = parse_gguf_config(with({{"attention.head_count_kv", number(4)},
                                                    {"attention.key_length", number(40)},
                                                    {"attention.value_length", number(20)},
                                                    {"attention.key_length_mla", kErase},
                                                    {"attention.value_length_mla", kErase},
                                                    {"attention.q_lora_rank", number(48)},
                                                    {"expert_gating_func", number(2)},
                                                    {"expert_weights_norm", true},
                                                    {"expert_group_count", number(4)},
                                                    {"expert_group_used_count", number(2)}}));
  EXPECT_EQ(early.latent.qk_nope_head_dim, 24);
  EXPECT_EQ(early.latent.v_head_dim, 20);
  EXPECT_EQ(early.latent.q_lora_rank, 48);
  EXPECT_EQ(early.experts.score, RouteScore::kSigmoidOfChosen);
  EXPECT_TRUE(early.experts.choice_bias);
  EXPECT_EQ(early.experts.groups, (RouteGroups{4, 2, 2}));

  const auto refused = [&with](const Entry& change, ErrorCode code) {
    SCOPED_TRACE(change.first);
    try {
      parse_gguf_config(with({change}));
      ADD_FAILURE() << "accepted";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), code) << e.what();
      EXPECT_THAT(e.what(), HasSubstr(change.first));
    }
  };
  refused({"attention.kv_lora_rank", number(0)}, ErrorCode::kInvalidModel);
  refused({"attention.kv_lora_rank", kErase}, ErrorCode::kInvalidModel);
  refused({"attention.key_length_mla", number(16)}, ErrorCode::kInvalidModel);  // all of it turns
  refused({"expert_shared_count", number(0)}, ErrorCode::kInvalidModel);
  refused({"expert_gating_func", number(3)}, ErrorCode::kUnsupported);
  refused({"rope.scaling.yarn_log_multiplier", 0.0}, ErrorCode::kUnsupported);
  refused({"expert_group_count", number(65)}, ErrorCode::kInvalidModel);
}

TEST(GgufConfigTest, WhatIsNotComputedIsRefusedByKey) {
  expect_refused({{"general.architecture", std::string("gemma2")}}, ErrorCode::kUnsupported,
                 "gemma2");
  expect_unsupported("rope.scaling.type", std::string("longrope"));
  expect_unsupported("rope.scaling.attn_factor", 1.5);
  expect_unsupported("rope.dimension_count", number(8));
  expect_unsupported("attention.value_length", number(8));
  expect_unsupported("attention.sliding_window", number(64));
  expect_unsupported("attention.causal", false);
  expect_unsupported("expert_count", number(8));
  expect_unsupported("attention.clamp_kqv", 8.0);
  expect_unsupported("final_logit_softcapping", 30.0);
  const std::vector<Entry> yarn = {{"rope.scaling.type", std::string("yarn")},
                                   {"rope.scaling.yarn_ext_factor", 0.5}};
  expect_refused(yarn, ErrorCode::kUnsupported, "yarn_ext_factor");
  EXPECT_EQ(parse_gguf_config(metadata("llama", {{"attention.sliding_window", number(128)}}))
                .layer_windows,
            std::vector<std::int64_t>());
}

}  // namespace
}  // namespace pianola
