// Launches of the kernel of experts_kernel.cuh; experts_*.cu instantiate it, one form of weights
// each.
#pragma once

#include "backends/cuda/kernels/experts_kernel.cuh"

namespace pianola::cuda::products {

template <Codes codes, Scales scales, ExpertProduct product, int kGroups, bool kDirect>
void launch_experts_as(ExpertParams p, const Launch& launch) {
  using T = ExpertTiling<codes, scales, product, kGroups>;
  const auto ceil_div = [](int a, int b) { return (a + b - 1) / b; };
  constexpr bool kSums = product == ExpertProduct::kSum;
  p.steps = ceil_div(p.cols, Step<codes>::kCols);
  p.slices = slices_of(p.steps);
  p.segment_units = ceil_div(p.rows, T::kUnitRows);
  std::size_t bytes = T::kRingBytes + 2 * T::kPartial * sizeof(float) *
                                          static_cast<std::size_t>(kSums ? p.top_k : 1);
  if (kDirect) {
    bytes += static_cast<std::size_t>(p.cols) * sizeof(float) *
             static_cast<std::size_t>(kSums ? p.top_k : 1);
  }
  auto* kernel = experts_kernel<codes, scales, product, kGroups, kDirect>;
  const int blocks_per_sm = !kDirect && kGroups == 1 ? 2 : 1;
  launch_kernel(launch, "experts", kernel, dim3(static_cast<unsigned>(launch.sms * blocks_per_sm)),
                dim3(kThreads), bytes, p);
}

template <Codes codes, Scales scales>
void launch_experts(const ExpertParams& p, const ExpertLaunch& kind, const Launch& launch) {
  using enum ExpertProduct;
  if (kind.direct) {
    if (kind.product == kSum) return launch_experts_as<codes, scales, kSum, 1, true>(p, launch);
    return launch_experts_as<codes, scales, kGated, 1, true>(p, launch);
  }
  if (kind.product == kGated) {
    if (kind.groups == 1) return launch_experts_as<codes, scales, kGated, 1, false>(p, launch);
    return launch_experts_as<codes, scales, kGated, 4, false>(p, launch);
  }
  if (kind.groups == 1) return launch_experts_as<codes, scales, kPart, 1, false>(p, launch);
  return launch_experts_as<codes, scales, kPart, 4, false>(p, launch);
}

}  // namespace pianola::cuda::products
