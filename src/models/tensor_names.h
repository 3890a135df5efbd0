// Names of a decoder's tensors in checkpoints: the only place that knows them.
//
//   tensor_name(Checkpoint::Format::kGguf, Part::kQ, 3);            // "blk.3.attn_q.weight"
#pragma once

#include <cstdint>
#include <string>

#include "models/model_config.h"
#include "weights/checkpoint.h"

namespace pianola {

enum class Part : std::uint8_t {
  kEmbedding,
  kFinalNorm,
  kHead,
  kRopeFactors,
  kAttentionNorm,
  kQ,
  kK,
  kV,
  kO,
  kQBias,
  kKBias,
  kVBias,
  kOBias,
  kQNorm,
  kKNorm,
  kMlpNorm,
  kPostAttentionNorm,  // of what attention adds to the residual
  kPreMlpNorm,         // kMlpNorm where there is a kPostAttentionNorm
  kPostMlpNorm,
  kGate,
  kUp,
  kDown,
  kGateBias,
  kUpBias,
  kDownBias,
  kSinks,
  kRouter,
  kRouterBias,
  kExpertsGate,  // of the experts: one tensor, or one for each
  kExpertsUp,
  kExpertsDown,
  kExpertsGateBias,
  kExpertsUpBias,
  kExpertsDownBias,
  kSharedRouter,  // of the expert that every token gets
  kSharedGate,
  kSharedUp,
  kSharedDown,
  kFusedRouter,  // as gpt-oss names them, whose gate and up are one tensor
  kFusedGateUp,
  kFusedDown,
  kFusedGateUpBias,
  kFusedDownBias,
  // Layers of linear attention.
  kAttentionGate,  // no tensor of its own: rows of kQ
  kLinearQkv,
  kLinearZ,
  kLinearBeta,
  kLinearDecay,
  kLinearQkvz,       // kLinearQkv and kLinearZ in one
  kLinearBetaDecay,  // kLinearBeta and kLinearDecay in one
  kLinearConv,
  kLinearALog,
  kLinearDtBias,
  kLinearNorm,
  kLinearOut,
  // State-space layers.
  kSsmXbc,  // no tensors of their own: rows of kSsmIn
  kSsmZ,
  kSsmDt,
  kSsmIn,
  kSsmConv,
  kSsmConvBias,
  kSsmALog,
  kSsmDtBias,
  kSsmSkip,
  kSsmNorm,
  kSsmOut,
  // An encoder, and the layers of a decoder behind one.
  kSharedEmbedding,  // of both, where kEmbedding has no tensor
  kRelativeBias,
  kPlainUp,  // kUp where there is no gate
  kCrossNorm,
  kCrossQ,
  kCrossK,
  kCrossV,
  kCrossO,
  // Multi-head latent attention.
  kLatentQA,  // to the rank of the queries
  kLatentQANorm,
  kLatentQB,
  kLatentKvA,  // to the latent and the part that turns
  kLatentKvANorm,
  kLatentKvB,   // from the latent to keys and values of each head
  kLatentKB,    // of it the keys, transposed
  kLatentVB,    // of it the values
  kChoiceBias,  // of a router
};

// The name in a checkpoint; `layer` is not used by parts outside the layers.
std::string tensor_name(Checkpoint::Format format, Part part, std::int64_t layer = 0,
                        TensorNaming naming = TensorNaming::kCommon);
// Of a part that checkpoints keep in one tensor for each expert.
std::string expert_tensor_name(Checkpoint::Format format, Part part, std::int64_t layer,
                               std::int64_t expert);
// pianola's own name: "embed_tokens", "layers.3.q_proj", "encoder.layers.3.q_proj".
std::string weight_name(Part part, std::int64_t layer = 0,
                        TensorNaming naming = TensorNaming::kCommon);

// Whether a tensor, named as most families name them, belongs to that layer.
bool is_of_layer(Checkpoint::Format format, std::string_view name, std::int64_t layer);

// Tensors that some files carry and no decoder here needs: derived buffers.
bool is_ignored_tensor(std::string_view name);

}  // namespace pianola
