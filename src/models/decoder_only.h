// The decoder that all families share: attention and a gated MLP, or a mixture of such, a layer,
// each behind an RMS norm and on a residual stream. What differs between them is data in
// ModelConfig.
#pragma once

#include "models/model.h"

namespace pianola {

// Declares every weight with its name and shape in the checkpoint. Throws InvalidModel naming the
// tensor when one is missing or has another shape.
ModelTables decoder_tables(const Checkpoint& checkpoint, const ModelConfig& config,
                           int max_seq_len);

// Records one step of `shape`. Pure: reads no tensor.
Plan record_decoder(const ModelConfig& config, const ModelTables& tables, const StepShape& shape);

}  // namespace pianola
