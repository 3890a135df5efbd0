// The checks every ModelConfig passes, whatever file it came from: ranges, and fields that must fit
// each other. Messages name a field as its file does, through `name`, which maps the Hugging Face
// name ("num_attention_heads") to a place in the file ("config.json: num_attention_heads").
//
//   check_model_config(config, [&](std::string_view field) { return root.field_path(field); });
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "models/model_config.h"

namespace pianola {

using FieldName = std::function<std::string(std::string_view)>;

// Throws InvalidModel for the first rule that is broken.
void check_model_config(const ModelConfig& config, const FieldName& name);

// hidden_size / num_attention_heads, for a file that gives no head_dim. Throws InvalidModel when
// the division is not exact or impossible.
std::int64_t derived_head_dim(std::int64_t hidden_size, std::int64_t num_attention_heads,
                              const FieldName& name);

}  // namespace pianola
