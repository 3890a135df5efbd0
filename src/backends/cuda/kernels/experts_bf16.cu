#include "backends/cuda/kernels/experts_launch.cuh"

namespace pianola::cuda::products {

void experts_bf16(const PackedWeight& form, const ExpertParams& p, const ExpertLaunch& kind,
                  const Launch& launch) {
  require(form.codes == Codes::kBF16, "experts: another form of weights");
  launch_experts<Codes::kBF16, Scales::kNone>(p, kind, launch);
}

}  // namespace pianola::cuda::products
