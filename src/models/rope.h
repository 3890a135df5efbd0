// Rotary embedding tables: inverse frequencies and the scale of cos and sin, by RopeConfig.
//
// Frequencies are fixed when the model is loaded. The dynamic (NTK) kind of Hugging Face lets its
// base follow the length of the text; keys already cached would then disagree with new queries, so
// here the base is that of `max_seq_len` from the first token on.
//
//   std::vector<float> inv_freq = rope_inverse_frequencies(config.rope, config.head_dim, 8192);
//   float scale = rope_attention_scale(config.rope);   // multiplies cos and sin: 1 except for yarn
//   angle = position * inv_freq[i];                    // pair i of a head, 0 <= i < head_dim / 2
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "models/model_config.h"

namespace pianola {

// [n / 2] of the n = head_dim * partial_rotary_factor elements of a head that turn. `max_seq_len`
// is the capacity of the cache; only the dynamic kind reads it.
std::vector<float> rope_inverse_frequencies(const RopeConfig& rope, std::int64_t head_dim,
                                            std::int64_t max_seq_len);

// The factor on cos and sin (so its square is on the scores): yarn's attention factor, else 1.
float rope_attention_scale(const RopeConfig& rope);

// Applies rope_freqs.weight of a GGUF file: inv_freq[i] /= factors[i]. Throws InvalidModel when the
// counts differ or a factor is not positive and finite.
void apply_rope_factors(std::span<float> inv_freq, std::span<const float> factors);

}  // namespace pianola
