// The blocks of a layer that a decoder and an encoder have in common.
#pragma once

#include <optional>

#include "models/model.h"
#include "models/table_builder.h"
#include "plan/recorder.h"

namespace pianola {

// The weights of a layer, but for cross attention.
LayerWeights declare_layer(TableBuilder& table, const ModelConfig& config, std::int64_t layer);

struct AttentionBuffers {
  BufferId q, attended;
  BufferId gate;  // where it has one
};

AttentionBuffers attention_buffers(Recorder& r, const ModelConfig& config);

// What tells attention where tokens are: a rope, or a bias.
struct TokenPlaces {
  Rope rope;
  std::optional<RelativeBias> bias;
};

float attention_scale(const ModelConfig& config);

// out = attention of norm(x), plus the residual. `out` may be `residual`.
void record_attention(Recorder& r, const ModelConfig& config, const LayerWeights& w,
                      const TokenPlaces& places, CacheId cache, const AttentionBuffers& buffers,
                      BufferId x, BufferId residual, BufferId out);

// The same of the MLP.
void record_mlp(Recorder& r, const ModelConfig& config, const LayerWeights& w, BufferId x,
                BufferId residual, BufferId out);

}  // namespace pianola
