// A causal language model as pianola runs it: its configuration, what it wants loaded, the caches
// its layers need, and record(), which writes one step into a Plan. Knows no backend and no
// tokenizer.
//
//   auto model = CausalModel::open("model.gguf");
//   const ModelTables tables = model->tables(8192);       // weights and layer caches
//   Plan plan = model->record(tables, {.tokens = 1});
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "cache/layer_cache.h"
#include "models/model_config.h"
#include "plan/plan.h"
#include "weights/checkpoint.h"

namespace pianola {

// Of a layer that folds tokens into a state.
struct StateLayerWeights {
  WeightId in, z;                 // what the convolution reads, and the gate
  WeightId beta, decay;           // one number a head each; of an SSM only dt, in place of decay
  WeightId conv, conv_bias;       // [taps * conv_width], [conv_width]
  WeightId a_log, dt_bias, skip;  // [heads]
  WeightId norm, out;
};

// Of a layer with multi-head latent attention, beside its o.
struct LatentLayerWeights {
  WeightId q_a, q_a_norm;  // where queries have a rank of their own
  WeightId q;              // [heads * (nope + rope), width or rank]
  WeightId kv, kv_norm;    // [kv_lora_rank + rope, width], [kv_lora_rank]
  WeightId absorb;         // stack [heads][kv_lora_rank, nope]
  WeightId values;         // stack [heads][v_head_dim, kv_lora_rank]
};

struct LayerWeights {
  StateLayerWeights state;    // in place of attention
  LatentLayerWeights latent;  // in place of q, k and v
  WeightId attention_gate;
  CacheId cache;  // that it attends to: without k and v of another layer, before it
  WeightId attention_norm, q, k, v, q_bias, k_bias, v_bias, q_norm, k_norm, o, o_bias;
  WeightId mlp_norm, gate, up, down, gate_bias, up_bias, down_bias;
  WeightId post_attention_norm, post_mlp_norm;  // where the model has them
  WeightId sinks;
  // In place of gate, up and down, where the layer has experts.
  WeightId router, router_bias, choice_bias, experts_gate, experts_up, experts_down;
  WeightId experts_gate_bias, experts_up_bias, experts_down_bias;
  WeightId shared_router, shared_gate, shared_up, shared_down;
  // Of a decoder behind an encoder.
  WeightId cross_norm, cross_q, cross_k, cross_v, cross_o;
};

// An encoder, where the model has one.
struct EncoderTables {
  WeightId first_weight;  // of those that only the encoder has: the last of the table
  WeightId embedding, final_norm;
  std::optional<RelativeBias> bias;
  std::vector<LayerWeights> layers;
  CacheId step;         // keys and values of the step at hand
  CacheId first_cross;  // of the decoder's first layer; those of the others follow
};

// The weight table and where in it each part of a decoder lies.
struct ModelTables {
  std::vector<WeightDecl> weights;
  std::vector<AttentionSpec> caches;
  std::vector<StateSpec> states;
  WeightId embedding, final_norm, head;
  Rope rope;         // of layers without a window, or of all
  Rope window_rope;  // of layers with one
  std::optional<RelativeBias> bias;
  std::vector<LayerWeights> layers;
  EncoderTables encoder;

  CacheSpecs cache_specs() const { return {caches, states}; }
};

class CausalModel {
 public:
  // Opens a GGUF file or a Hugging Face folder, checks its configuration and that every tensor the
  // model needs is there with its shape, and none that it would not use. Reads no weights.
  static std::shared_ptr<const CausalModel> open(const std::filesystem::path& path);
  explicit CausalModel(std::unique_ptr<const Checkpoint> checkpoint);

  const ModelConfig& config() const { return config_; }
  const Checkpoint& checkpoint() const { return *checkpoint_; }
  std::int64_t parameter_count() const;
  // "q4_1", or "q4_1 + q8_0": the types of the matrices, most bytes first.
  std::string weight_types() const;

  // Constants such as rope frequencies may depend on `max_seq_len`.
  ModelTables tables(int max_seq_len) const;
  // Of the variant kEncode: the encoder's step over an input.
  Plan record(const ModelTables& tables, const StepShape& shape) const;

 private:
  std::unique_ptr<const Checkpoint> checkpoint_;
  ModelConfig config_;
};

}  // namespace pianola
