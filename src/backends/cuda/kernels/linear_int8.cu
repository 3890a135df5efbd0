#include "backends/cuda/kernels/linear_forms.h"
#include "backends/cuda/kernels/linear_kernel.cuh"

namespace pianola::cuda::products {

void linear_int8(const LinearArgs& args, const Launch& launch) {
  Params p = make_params(args);
  const Scales scales = args.part[0].weight.scales;
  if (scales == Scales::kHalfPair) {
    launch_form<Codes::kInt8, Scales::kHalfPair>(p, launch);
  } else if (scales == Scales::kFloatPair) {
    launch_form<Codes::kInt8, Scales::kFloatPair>(p, launch);
  } else {
    launch_form<Codes::kInt8, Scales::kFloat16>(p, launch);
  }
}

}  // namespace pianola::cuda::products
