// Layers that fold tokens into a state instead of attending to a cache: what they want loaded, and
// the ops that they are.
#pragma once

#include "cache/layer_cache.h"
#include "models/model.h"
#include "models/table_builder.h"
#include "plan/recorder.h"

namespace pianola {

StateSpec state_spec(const ModelConfig& config);

StateLayerWeights declare_state_layer(TableBuilder& table, const ModelConfig& config);

// Invalid where the model has no such layers.
struct StateBuffers {
  BufferId projected;  // [T, conv_width]
  BufferId convolved;  // [T, conv_width]
  BufferId gate;       // [T, value_width]
  BufferId beta;       // [T, heads], of a delta rule
  BufferId decay;      // [T, heads], of an SSM dt
  BufferId mixed;      // [T, value_width]
};

StateBuffers state_buffers(Recorder& r, const ModelConfig& config);

// out = the layer's output of norm(x), plus the residual. `out` may be `residual`.
void record_state_layer(Recorder& r, const ModelConfig& config, const LayerWeights& w,
                        const StateBuffers& buffers, StateId state, BufferId x, BufferId residual,
                        BufferId out);

}  // namespace pianola
