// T5, 1.0 and 1.1 (Flan-T5). Reference: T5ForConditionalGeneration of transformers.
//
// An encoder, and a decoder whose layers attend to what it made of the input. No rope and no scale
// of the scores: a number by head and distance is added to them, the same in all layers of a stack
// and none in cross attention. The MLP of 1.0 is relu without a gate; that of 1.1 gelu by tanh with
// one. The head is the embedding unless the file has one; 1.0 scales what it reads.
//
// GGUF files say neither version nor largest distance: the MLP is that of the tensors, the distance
// the 128 of every published model, and a head that is the embedding is one of 1.0.
#include <array>
#include <cmath>

#include "models/family.h"

namespace pianola {
namespace {

// The decoder's layers are num_decoder_layers, where that is said.
constexpr std::array<FieldAlias, 9> kAliases = {{{"hidden_size", "d_model"},
                                                 {"intermediate_size", "d_ff"},
                                                 {"num_hidden_layers", "num_layers"},
                                                 {"num_encoder_layers", "num_layers"},
                                                 {"num_attention_heads", "num_heads"},
                                                 {"num_key_value_heads", "num_heads"},
                                                 {"head_dim", "d_kv"},
                                                 {"max_position_embeddings", "n_positions"},
                                                 {"rms_norm_eps", "layer_norm_epsilon"}}};

void common(ModelConfig& config) {
  config.tensor_naming = TensorNaming::kT5;
  config.attention_scale = 1;
  config.head_by_tensor = true;
}

double scale_of_head(const ModelConfig& config) {
  return config.hidden_size > 0 ? 1.0 / std::sqrt(static_cast<double>(config.hidden_size)) : 1;
}

void parse_mlp(const JsonObject& root, ModelConfig& config) {
  const std::string kind = root.find_string("feed_forward_proj").value_or("relu");
  if (kind == "relu") {
    config.hidden_act = Activation::kRelu;
    config.gated_mlp = false;
  } else if (kind == "gated-gelu") {
    config.hidden_act = Activation::kGeluTanh;
  } else {
    fail_unsupported(root, "feed_forward_proj", "only relu and gated-gelu, found '{}'",
                     kind.substr(0, 80));
  }
}

void parse_t5(const JsonObject& root, ModelConfig& config) {
  if (!root.find_bool("is_encoder_decoder").value_or(true) ||
      root.find_bool("is_decoder").value_or(false)) {
    fail_unsupported(root, "is_encoder_decoder", "only a whole model, encoder and decoder");
  }
  common(config);
  parse_mlp(root, config);
  config.encoder.num_layers = root.get_int("num_layers", 1, kMaxLayers);
  config.num_hidden_layers = root.find_int("num_decoder_layers").value_or(config.num_hidden_layers);
  // As its authors start answers, unless the file says otherwise.
  config.encoder.decoder_start_token_id =
      root.find_int("decoder_start_token_id").value_or(config.pad_token_id.value_or(0));
  config.relative_bias.num_buckets = root.find_int("relative_attention_num_buckets").value_or(32);
  config.relative_bias.max_distance =
      root.find_int("relative_attention_max_distance").value_or(128);
  if (config.relative_bias.num_buckets == 0) {
    fail_unsupported(root, "relative_attention_num_buckets", "0: there are no positions");
  }
  if (is_absent(root, "d_kv")) config.head_dim = 64;
  if (is_absent(root, "eos_token_id")) config.eos_token_ids = {1};
  // What the older flag means to transformers is not the sharing, which the tensors decide.
  const bool tied = root.find_bool("tie_word_embeddings").value_or(true);
  const bool scaled = root.find_bool("scale_decoder_outputs").value_or(tied);
  if (scaled) config.head_scale = scale_of_head(config);
}

void finish_t5_gguf(const Metadata& metadata, ModelConfig& config) {
  common(config);
  config.encoder.num_layers = config.num_hidden_layers;
  if (config.encoder.num_layers < 1) {
    fail(ErrorCode::kInvalidModel, "metadata key 't5.block_count': expected 1 or more, found {}",
         config.encoder.num_layers);
  }
  config.num_hidden_layers =
      metadata.find_int("t5.decoder_block_count").value_or(config.num_hidden_layers);
  config.encoder.decoder_start_token_id = metadata.get_int("t5.decoder_start_token_id");
  config.relative_bias = {.num_buckets = metadata.get_int("t5.attention.relative_buckets_count"),
                          .max_distance = 128};
  if (config.relative_bias.num_buckets == 0) {
    fail(ErrorCode::kUnsupported,
         "metadata key 't5.attention.relative_buckets_count': 0: there are no positions");
  }
}

void finish_t5_tensors(bool has_gate, bool has_head, ModelConfig& config) {
  config.gated_mlp = has_gate;
  config.hidden_act = has_gate ? Activation::kGeluTanh : Activation::kRelu;
  config.head_scale = has_head ? 1 : scale_of_head(config);
}

}  // namespace

const Family kT5 = {.model_type = "t5",
                    .architecture = "t5",
                    .default_max_position_embeddings = 512,
                    .aliases = kAliases,
                    .parse_hf = parse_t5,
                    .finish_gguf = finish_t5_gguf,
                    .finish_gguf_tensors = finish_t5_tensors};

}  // namespace pianola
