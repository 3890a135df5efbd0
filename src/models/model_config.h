// What a checkpoint says about its model, under Hugging Face's names, whatever file it came from.
//
// Values are checked here, before anything is allocated: a value that no model can have is
// InvalidModel and names its field; a value that would change results and that pianola does not
// compute is Unsupported and names it too. What the parsers return can be recorded as it is.
//
//   ModelConfig config = parse_hf_config(parse_json(text, "config.json"));
//   ModelConfig config = parse_gguf_config(gguf.metadata());
//   config.head_dim * config.num_attention_heads;   // width of the queries
#pragma once

#include <boost/json/fwd.hpp>

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "base/metadata.h"
#include "cache/layer_cache.h"
#include "plan/op.h"

namespace pianola {

// Limits that a config may not pass; generous for real models, small enough for every product of
// two of them to fit 64 bits.
inline constexpr std::int64_t kMaxLayers = 1024;
inline constexpr std::int64_t kMaxHeads = 4096;
inline constexpr std::int64_t kMaxHeadDim = 8192;
inline constexpr std::int64_t kMaxExperts = 4096;
inline constexpr std::int64_t kMaxWidth = std::int64_t{1} << 20;  // hidden, intermediate
inline constexpr std::int64_t kMaxVocab = std::int64_t{1} << 22;
inline constexpr std::int64_t kMaxPositions = std::int64_t{1} << 28;
inline constexpr std::int64_t kMaxBuckets = 4096;
inline constexpr std::int64_t kMaxBiasDistance = std::int64_t{1} << 16;

enum class RopeKind : std::uint8_t { kDefault, kLinear, kDynamic, kYarn, kLlama3 };
// "default", "linear", ...: as config.json writes them.
const char* rope_kind_name(RopeKind kind);

// Rotary embedding. Fields that a kind does not use keep their defaults. rope.h turns this into
// inverse frequencies and the scale of cos and sin.
struct RopeConfig {
  RopeKind kind = RopeKind::kDefault;
  double theta = 10000.0;
  double factor = 1.0;  // linear, dynamic, yarn, llama3
  // Length the model was first trained for (dynamic, yarn, llama3).
  std::int64_t original_max_position_embeddings = 0;
  double low_freq_factor = 1.0;                 // llama3
  double high_freq_factor = 4.0;                // llama3
  double beta_fast = 32.0;                      // yarn
  double beta_slow = 1.0;                       // yarn
  bool truncate = true;                         // yarn: whole dimensions as bounds of the ramp
  std::optional<double> mscale = std::nullopt;  // yarn
  std::optional<double> mscale_all_dim = std::nullopt;    // yarn
  std::optional<double> attention_factor = std::nullopt;  // yarn: given outright
  double partial_rotary_factor = 1;                       // of a head's elements, the first turn

  bool operator==(const RopeConfig&) const = default;
};

// How a checkpoint keeps the experts of a layer.
enum class ExpertTensors : std::uint8_t {
  kStacked,  // a tensor [experts, rows, cols] each for gate, up and down (GGUF)
  kApart,    // a tensor for each expert (Hugging Face)
  kFused,    // transposed; gate and up take turns in the columns of one tensor (gpt-oss)
};

// A mixture of experts in place of the MLP.
struct ExpertsConfig {
  std::int64_t num_experts = 0;  // 0: there is none
  std::int64_t num_experts_per_tok = 0;
  std::int64_t moe_intermediate_size = 0;            // of each expert
  std::int64_t shared_expert_intermediate_size = 0;  // of one that all tokens get; 0: none
  RouteScore score = RouteScore::kSoftmaxOfChosen;   // norm_topk_prob: kSoftmaxOfChosen
  bool bias = false;                                 // of the router and of every expert
  ExpertTensors tensors = ExpertTensors::kStacked;
  std::vector<bool> dense_layers;  // which have a plain MLP all the same; empty: none
  bool shared_gate = true;         // the shared expert has a weight of its own; else 1
  bool choice_bias = false;        // a bias of each expert that chooses, and weighs nothing
  RouteGroups groups;              // experts come from the best of these
  double route_scale = 1;          // of all weights

  bool in_layer(std::int64_t layer) const {
    return num_experts > 0 &&
           (dense_layers.empty() || !dense_layers[static_cast<std::size_t>(layer)]);
  }
  bool operator==(const ExpertsConfig&) const = default;
};

// What mixes the tokens of a layer.
enum class Mixer : std::uint8_t { kAttention, kDeltaRule, kSsm };

// The layers that fold tokens into a state: gated delta rule (Qwen3-Next, Qwen3.5), or Mamba-2.
struct StateLayerConfig {
  std::vector<Mixer> mixers;  // of each layer; empty: attention in all
  std::int64_t heads = 0;
  std::int64_t key_heads = 0;  // that share their keys and queries: B and C of Mamba-2's groups
  std::int64_t key_dim = 0;
  std::int64_t value_dim = 0;
  std::int64_t conv_taps = 0;
  bool conv_bias = false;
  // The heads of a key head, heads / key_heads of them, are neighbours; else they are every
  // key_heads-th, as GGUF files of Qwen3.5 have them.
  bool grouped_heads = true;
  double dt_min = 0;  // limits of Mamba-2's step size
  double dt_max = std::numeric_limits<double>::infinity();

  // What the state layers of a model are; kAttention when it has none.
  Mixer kind() const {
    for (const Mixer mixer : mixers) {
      if (mixer != Mixer::kAttention) return mixer;
    }
    return Mixer::kAttention;
  }
  Mixer of_layer(std::int64_t layer) const {
    return mixers.empty() ? Mixer::kAttention : mixers[static_cast<std::size_t>(layer)];
  }
  std::int64_t value_width() const { return heads * value_dim; }
  std::int64_t conv_width() const { return 2 * key_heads * key_dim + value_width(); }
  bool operator==(const StateLayerConfig&) const = default;
};

// Multi-head latent attention: keys and values of all heads come from one latent a token, which is
// all that is cached, with one part that turns for all heads.
struct LatentConfig {
  std::int64_t kv_lora_rank = 0;  // of the latent; 0: there is none
  std::int64_t q_lora_rank = 0;   // 0: queries are one product
  std::int64_t qk_nope_head_dim = 0;
  std::int64_t qk_rope_head_dim = 0;  // head_dim as well: what rope turns
  std::int64_t v_head_dim = 0;
  double norm_eps = 1e-6;  // of both ranks

  bool present() const { return kv_lora_rank > 0; }
  bool operator==(const LatentConfig&) const = default;
};

// What files of Hugging Face call the tensors of a layer.
enum class TensorNaming : std::uint8_t { kCommon, kBamba, kDeepseek, kT5, kT5Encoder };

// An encoder in front of the decoder (T5): it reads all of an input at once, and every layer of the
// decoder attends to what it has made of it. Its layers are as wide as the decoder's.
struct EncoderConfig {
  std::int64_t num_layers = 0;  // 0: there is none
  std::int64_t decoder_start_token_id = 0;

  bool operator==(const EncoderConfig&) const = default;
};

// Positions by a number added to scores, in place of rope: see RelativeBias in op.h.
struct RelativeBiasConfig {
  std::int64_t num_buckets = 0;  // 0: rope
  std::int64_t max_distance = 0;

  bool operator==(const RelativeBiasConfig&) const = default;
};

struct ModelConfig {
  // Family: "llama" (Llama 2 and 3, SmolLM2), "mistral", "qwen2", "qwen3", "gemma3_text",
  // "gpt_oss", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_text", "bamba", "deepseek_v2",
  // "deepseek_v3", "t5".
  std::string model_type;
  TensorNaming tensor_naming = TensorNaming::kCommon;

  std::int64_t vocab_size = 0;
  std::int64_t hidden_size = 0;
  std::int64_t intermediate_size = 0;
  std::int64_t num_hidden_layers = 0;
  std::int64_t num_attention_heads = 0;
  std::int64_t num_key_value_heads = 0;  // divides num_attention_heads
  std::int64_t head_dim = 0;             // even; not always hidden_size / num_attention_heads
  std::int64_t max_position_embeddings = 0;
  double rms_norm_eps = 0.0;
  Activation hidden_act = Activation::kSilu;
  ExpertsConfig experts;
  StateLayerConfig state;
  EncoderConfig encoder;
  RelativeBiasConfig relative_bias;
  bool gated_mlp = true;  // else the MLP is down(act(up(x)))
  LatentConfig latent;

  bool qkv_bias = false;             // q_proj, k_proj, v_proj (Qwen2; Llama with attention_bias)
  bool output_bias = false;          // o_proj (Llama with attention_bias)
  bool mlp_bias = false;             // gate_proj, up_proj, down_proj
  bool qk_norm = false;              // an RMS norm of each q and k head before rope (Qwen3)
  bool tie_word_embeddings = false;  // the head reads the embedding
  bool head_by_tensor = false;       // and does so just when the files have no head
  double head_scale = 1;             // what the head reads is multiplied by it

  bool post_norms = false;  // what attention and the MLP add is normed first (Gemma)
  double norm_offset = 0;   // norms multiply by it plus their weight: 1 in Gemma's own files
  double embedding_scale = 1;
  double attention_scale = 0;    // of the scores; 0: 1 / sqrt(head_dim)
  bool attention_gate = false;   // q_proj says besides how much of attention's output passes
  bool attention_sinks = false;  // a learned score of each head in the denominator (gpt-oss)

  RopeConfig rope;
  std::optional<RopeConfig> window_rope;  // of layers with a window, when theirs differs
  // GGUF files of architecture llama hold q and k rows permuted for interleaved pairs; the op knows
  // both styles, so no weight is permuted at load.
  RopeStyle rope_style = RopeStyle::kHalf;
  // rope_freqs.weight [head_dim / 2] (F32) divides the inverse frequencies: how GGUF stores llama3.
  bool has_rope_factors_tensor = false;
  // True from GGUF, where some things show only in which tensors exist: the loader must then set
  // tie_word_embeddings (no output.weight), qkv_bias, output_bias, mlp_bias and
  // has_rope_factors_tensor from the tensor names. Values that the architecture fixes are set here.
  bool tensors_decide = false;
  // Positions that a token of each layer attends to, its own among them; 0: all. Empty when no
  // layer has a window.
  std::vector<std::int64_t> layer_windows;
  std::optional<std::int64_t> smallest_window() const;
  // The last layers that have no keys and values of their own: each attends to those of the last
  // layer before all of them that has a window as it has, or none as it has none.
  std::int64_t num_kv_shared_layers = 0;
  // Layers behind the last one, of a draft that is not run: their tensors are left alone.
  std::int64_t num_nextn_predict_layers = 0;
  // Of such a layer, the one whose cache it attends to; of another, the layer itself; -1: there is
  // none.
  std::int64_t cache_layer(std::int64_t layer) const;

  std::optional<std::int64_t> bos_token_id = std::nullopt;
  std::vector<std::int64_t> eos_token_ids;  // any of them ends an answer
  std::optional<std::int64_t> pad_token_id = std::nullopt;

  bool operator==(const ModelConfig&) const = default;
};

// From config.json. `where` names the document in messages.
ModelConfig parse_hf_config(const boost::json::value& config,
                            const std::string& where = "config.json");

// From generation_config.json: its bos, eos and pad ids replace those of config.json, as
// transformers does it when it generates.
void apply_generation_config(const boost::json::value& generation, ModelConfig& config,
                             const std::string& where = "generation_config.json");

// From GGUF metadata (general.architecture of a family in registry.cc).
ModelConfig parse_gguf_config(const Metadata& metadata);

}  // namespace pianola
