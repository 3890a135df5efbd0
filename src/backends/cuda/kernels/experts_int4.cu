#include "backends/cuda/kernels/experts_launch.cuh"

namespace pianola::cuda::products {

void experts_int4(const PackedWeight& form, const ExpertParams& p, const ExpertLaunch& kind,
                  const Launch& launch) {
  if (form.scales == Scales::kHalfPair) {
    launch_experts<Codes::kInt4, Scales::kHalfPair>(p, kind, launch);
  } else {
    launch_experts<Codes::kInt4, Scales::kFloatPair>(p, kind, launch);
  }
}

}  // namespace pianola::cuda::products
