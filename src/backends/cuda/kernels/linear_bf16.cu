#include "backends/cuda/kernels/linear_forms.h"
#include "backends/cuda/kernels/linear_kernel.cuh"

namespace pianola::cuda::products {

void linear_bf16(const LinearArgs& args, const Launch& launch) {
  Params p = make_params(args);
  launch_form<Codes::kBF16, Scales::kNone>(p, launch);
}

}  // namespace pianola::cuda::products
