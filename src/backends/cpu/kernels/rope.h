// Cosines and sines of rotary positions, computed once a step and shared by all its layers.
//
//   rope_table(positions, tokens, inverse_frequencies, half, factor, table);   // once
//   const float* cosines = table + t * 2 * half;                               // for token t
//   f.rope_halves(cosines, cosines + half, half, heads, head_dim, q);          // each layer
#pragma once

#include <cstdint>

namespace pianola::cpu {

// table [tokens, 2, half]: cosines, then sines, of float(position) * inverse_frequencies[i], each
// times `factor`; everything in single precision, as the reference implementations compute it. A
// masked token (position < 0) gets zeros.
void rope_table(const std::int32_t* positions, int tokens, const float* inverse_frequencies,
                int half, float factor, float* table);

}  // namespace pianola::cpu
