// An encoder, and what it gives a decoder: keys and values of its output for every layer's cross
// attention. Its step reads a whole input at once and stores these; no later step computes it
// again.
#pragma once

#include "models/decoder_blocks.h"
#include "models/model.h"

namespace pianola {

// The table of a stack's relative bias, which its first layer keeps for all.
RelativeBias declare_relative_bias(TableBuilder& table, const ModelConfig& config,
                                   bool both_directions);

// Of one layer of the decoder.
void declare_cross_attention(TableBuilder& table, const ModelConfig& config, LayerWeights& w);

// The encoder's weights, its caches, and those of the decoder's cross attention.
void declare_encoder(const Checkpoint& checkpoint, const ModelConfig& config, ModelTables& tables);

// x += cross attention of norm(x).
void record_cross_attention(Recorder& r, const ModelConfig& config, const LayerWeights& w,
                            CacheId cache, const AttentionBuffers& buffers, BufferId x);

// Records the step over an input of up to shape.tokens tokens. Pure: reads no tensor.
Plan record_encoder(const ModelConfig& config, const ModelTables& tables, const StepShape& shape);

}  // namespace pianola
