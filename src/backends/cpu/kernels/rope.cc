#include "backends/cpu/kernels/rope.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace pianola::cpu {

void rope_table(const std::int32_t* positions, int tokens, const float* inverse_frequencies,
                int half, float factor, float* table) {
  for (int t = 0; t < tokens; ++t) {
    float* cosines = table + static_cast<std::ptrdiff_t>(t) * 2 * half;
    float* sines = cosines + half;
    if (positions[t] < 0) {
      std::fill_n(cosines, 2 * half, 0.0F);
      continue;
    }
    const auto position = static_cast<float>(positions[t]);
    for (int i = 0; i < half; ++i) {
      // The angle is rounded to single precision first: for far positions that is the larger error,
      // and models were trained with it.
      const float angle = position * inverse_frequencies[i];
      cosines[i] = std::cos(angle) * factor;
      sines[i] = std::sin(angle) * factor;
    }
  }
}

}  // namespace pianola::cpu
