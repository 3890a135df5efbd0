#include "backends/cuda/kernels/linear_forms.h"
#include "backends/cuda/kernels/linear_kernel.cuh"

namespace pianola::cuda::products {

void linear_float(const LinearArgs& args, const Launch& launch) {
  Params p = make_params(args);
  if (args.part[0].weight.codes == Codes::kF32) {
    launch_form<Codes::kF32, Scales::kNone>(p, launch);
  } else {
    launch_form<Codes::kF16, Scales::kNone>(p, launch);
  }
}

}  // namespace pianola::cuda::products
