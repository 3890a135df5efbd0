#include "backends/cuda/kernels/linear_forms.h"
#include "backends/cuda/kernels/linear_kernel.cuh"

namespace pianola::cuda::products {

void linear_int4(const LinearArgs& args, const Launch& launch) {
  Params p = make_params(args);
  if (args.part[0].weight.scales == Scales::kHalfPair) {
    launch_form<Codes::kInt4, Scales::kHalfPair>(p, launch);
  } else {
    launch_form<Codes::kInt4, Scales::kFloatPair>(p, launch);
  }
}

}  // namespace pianola::cuda::products
