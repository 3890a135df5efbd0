#include "backends/cpu/kernels/elementwise.h"

#include <cmath>

#include "backends/cpu/kernels/elementwise_kernels.h"

namespace pianola::cpu {

const Elementwise& elementwise(Isa isa) {
#if defined(__x86_64__)
  if (isa >= Isa::kAvx512) return elementwise_avx512();
  if (isa >= Isa::kAvx2) return elementwise_avx2();
#endif
  return elementwise_portable();
}

double log_softmax_at(const Elementwise& f, const float* x, int n, int index) {
  const float top = f.max_element(x, n).value;
  const double sum = f.sum_exp(x, top, n);
  return static_cast<double>(x[index]) - static_cast<double>(top) - std::log(sum);
}

void softmax(const Elementwise& f, const float* x, int n, float* y) {
  const float top = f.max_element(x, n).value;
  const double sum = f.sum_exp(x, top, n);
  f.exp(x, top, static_cast<float>(1.0 / sum), n, y);
}

}  // namespace pianola::cpu
