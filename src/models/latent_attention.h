// Multi-head latent attention: what its layers want loaded, and the ops that they are. Attention
// runs in the space of the latent, so that only the latent is cached: the matrix that would make
// keys of it goes to the queries, and the one that would make values of it to the outputs.
#pragma once

#include "cache/layer_cache.h"
#include "models/model.h"
#include "models/table_builder.h"
#include "plan/recorder.h"

namespace pianola {

AttentionSpec latent_spec(const ModelConfig& config);

LatentLayerWeights declare_latent_attention(TableBuilder& table, const ModelConfig& config);

// Invalid where the model has no such layers.
struct LatentBuffers {
  BufferId q_a;       // [T, q_lora_rank], where there is one
  BufferId q;         // [T, heads * (nope + rope)]
  BufferId kv;        // [T, kv_lora_rank + rope]
  BufferId absorbed;  // [T, heads * (kv_lora_rank + rope)]
  BufferId latent;    // [T, heads * kv_lora_rank]
  BufferId attended;  // [T, heads * v_head_dim]
};

LatentBuffers latent_buffers(Recorder& r, const ModelConfig& config);

// Everything up to buffers.attended, of norm(x).
void record_latent_attention(Recorder& r, const ModelConfig& config, const ModelTables& tables,
                             const LayerWeights& w, const LatentBuffers& buffers, BufferId x);

}  // namespace pianola
