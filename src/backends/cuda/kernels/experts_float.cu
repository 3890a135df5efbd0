#include "backends/cuda/kernels/experts_launch.cuh"

namespace pianola::cuda::products {

void experts_float(const PackedWeight& form, const ExpertParams& p, const ExpertLaunch& kind,
                   const Launch& launch) {
  if (form.codes == Codes::kF32) {
    launch_experts<Codes::kF32, Scales::kNone>(p, kind, launch);
  } else {
    launch_experts<Codes::kF16, Scales::kNone>(p, kind, launch);
  }
}

}  // namespace pianola::cuda::products
