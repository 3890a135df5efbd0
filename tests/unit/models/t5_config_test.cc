// config.json of T5: what the fields of its own names give, defaults, what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "base/json_reader.h"
#include "expect_error.h"
#include "models/model_config.h"

namespace pianola {
namespace {

using testing::ElementsAre;

constexpr std::string_view kT5 = R"({"model_type": "t5", "vocab_size": 128, "d_model": 64,
  "d_kv": 24, "d_ff": 96, "num_layers": 3, "num_heads": 2})";

ModelConfig parse(std::string_view changes = "{}") {
  boost::json::value root = parse_json(kT5, "config.json");
  const boost::json::value edit = parse_json(changes, "changes");
  for (const auto& [key, value] : edit.as_object()) root.as_object()[key] = value;
  return parse_hf_config(root);
}

TEST(T5ConfigTest, Defaults) {
  const ModelConfig config = parse();
  EXPECT_EQ(config.hidden_size, 64);
  EXPECT_EQ(config.intermediate_size, 96);
  EXPECT_EQ(config.num_attention_heads, 2);
  EXPECT_EQ(config.num_key_value_heads, 2);
  EXPECT_EQ(config.head_dim, 24);
  EXPECT_EQ(config.num_hidden_layers, 3);
  EXPECT_EQ(config.encoder.num_layers, 3);
  EXPECT_EQ(config.encoder.decoder_start_token_id, 0);
  EXPECT_EQ(config.max_position_embeddings, 512);
  EXPECT_EQ(config.rms_norm_eps, 1e-6);
  EXPECT_EQ(config.relative_bias.num_buckets, 32);
  EXPECT_EQ(config.relative_bias.max_distance, 128);
  EXPECT_EQ(config.attention_scale, 1);
  EXPECT_EQ(config.hidden_act, Activation::kRelu);
  EXPECT_FALSE(config.gated_mlp);
  EXPECT_EQ(config.head_scale, 0.125);
  EXPECT_THAT(config.eos_token_ids, ElementsAre(1));
}

TEST(T5ConfigTest, FlanT5) {
  const ModelConfig config = parse(R"({"feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": false, "num_decoder_layers": 5, "decoder_start_token_id": 7,
    "n_positions": 300, "layer_norm_epsilon": 1e-5, "eos_token_id": 3, "pad_token_id": 2,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20})");
  EXPECT_EQ(config.num_hidden_layers, 5);
  EXPECT_EQ(config.encoder.num_layers, 3);
  EXPECT_EQ(config.encoder.decoder_start_token_id, 7);
  EXPECT_EQ(config.max_position_embeddings, 300);
  EXPECT_EQ(config.rms_norm_eps, 1e-5);
  EXPECT_EQ(config.hidden_act, Activation::kGeluTanh);
  EXPECT_TRUE(config.gated_mlp);
  EXPECT_EQ(config.head_scale, 1);
  EXPECT_EQ(config.relative_bias.num_buckets, 8);
  EXPECT_EQ(config.relative_bias.max_distance, 20);
  EXPECT_THAT(config.eos_token_ids, ElementsAre(3));
}

// transformers 5 writes true for tie_word_embeddings whatever it was, and says this besides.
TEST(T5ConfigTest, WhatTransformers5Writes) {
  EXPECT_EQ(parse(R"({"tie_word_embeddings": true, "scale_decoder_outputs": false})").head_scale,
            1);
  EXPECT_EQ(parse(R"({"tie_word_embeddings": false, "scale_decoder_outputs": true})").head_scale,
            0.125);
}

TEST(T5ConfigTest, StartsWithThePadToken) {
  EXPECT_EQ(parse(R"({"pad_token_id": 2})").encoder.decoder_start_token_id, 2);
  ModelConfig config = parse();
  apply_generation_config(parse_json(R"({"decoder_start_token_id": 9})", "g"), config);
  EXPECT_EQ(config.encoder.decoder_start_token_id, 9);
}

TEST(T5ConfigTest, Refuses) {
  const auto invalid = [](const char* changes, const char* part) {
    expect_error(ErrorCode::kInvalidModel, part, [&] { parse(changes); });
  };
  const auto unsupported = [](const char* changes, const char* part) {
    expect_error(ErrorCode::kUnsupported, part, [&] { parse(changes); });
  };
  invalid(R"({"d_model": 0})", "d_model");
  invalid(R"({"num_layers": 0})", "num_layers");
  invalid(R"({"num_layers": 0, "num_decoder_layers": 2})", "num_layers");
  invalid(R"({"num_layers": 2000, "num_decoder_layers": 2})", "num_layers");
  invalid(R"({"num_decoder_layers": 0})", "num_layers");
  invalid(R"({"decoder_start_token_id": 128})", "decoder_start_token_id");
  invalid(R"({"relative_attention_num_buckets": 7})", "relative_attention_num_buckets");
  invalid(R"({"relative_attention_num_buckets": 2})", "relative_attention_num_buckets");
  invalid(R"({"relative_attention_max_distance": 16})", "relative_attention_max_distance");
  unsupported(R"({"relative_attention_num_buckets": 0})", "relative_attention_num_buckets");
  unsupported(R"({"feed_forward_proj": "gated-silu"})", "feed_forward_proj");
  unsupported(R"({"feed_forward_proj": "gelu"})", "feed_forward_proj");
  unsupported(R"({"is_encoder_decoder": false})", "is_encoder_decoder");
  unsupported(R"({"is_decoder": true})", "is_encoder_decoder");
  unsupported(R"({"num_kv_shared_layers": 1})", "num_kv_shared_layers");
}

// As llama.cpp's converter writes it, with one key changed.
ModelConfig parse_gguf(const std::string& key = "", std::int64_t value = 0) {
  std::map<std::string, MetadataValue> all = {{"general.architecture", "t5"},
                                              {"t5.attention.layer_norm_rms_epsilon", 1e-6}};
  for (const auto& [name, number] : std::initializer_list<std::pair<const char*, std::int64_t>>{
           {"t5.vocab_size", 128},
           {"t5.context_length", 300},
           {"t5.embedding_length", 64},
           {"t5.block_count", 3},
           {"t5.decoder_block_count", 5},
           {"t5.feed_forward_length", 96},
           {"t5.attention.head_count", 2},
           {"t5.attention.key_length", 24},
           {"t5.attention.value_length", 24},
           {"t5.attention.relative_buckets_count", 32},
           {"t5.decoder_start_token_id", 7}}) {
    all.insert_or_assign(name, number);
  }
  if (!key.empty()) all.insert_or_assign(key, value);
  Metadata metadata;
  for (auto& [name, v] : all) metadata.insert(name, v);
  return parse_gguf_config(metadata);
}

TEST(T5ConfigTest, Gguf) {
  const ModelConfig config = parse_gguf();
  EXPECT_EQ(config.num_hidden_layers, 5);
  EXPECT_EQ(config.encoder.num_layers, 3);
  EXPECT_EQ(config.encoder.decoder_start_token_id, 7);
  EXPECT_EQ(config.head_dim, 24);
  EXPECT_EQ(config.num_key_value_heads, 2);
  EXPECT_EQ(config.max_position_embeddings, 300);
  EXPECT_EQ(config.relative_bias.num_buckets, 32);
  EXPECT_EQ(config.relative_bias.max_distance, 128);
  EXPECT_EQ(config.attention_scale, 1);
  EXPECT_TRUE(config.tensors_decide);
  const auto invalid = [](const std::string& key, std::int64_t value) {
    expect_error(ErrorCode::kInvalidModel, key, [&] { parse_gguf(key, value); });
  };
  invalid("t5.decoder_start_token_id", 128);
  invalid("t5.attention.relative_buckets_count", 7);
  invalid("t5.attention.relative_buckets_count", 512);  // more than the distances they are for
  invalid("t5.block_count", 0);
  invalid("t5.block_count", 2000);
  expect_error(ErrorCode::kUnsupported, "t5.attention.relative_buckets_count",
               [] { parse_gguf("t5.attention.relative_buckets_count", 0); });
}

}  // namespace
}  // namespace pianola
