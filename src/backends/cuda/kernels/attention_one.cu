// Steps of one token.
#include "backends/cuda/kernels/attention_one.cuh"

#include "backends/cuda/kernels/attention_decode.h"

namespace pianola::cuda {
namespace {

template <typename T, int kDim>
DecodeKernel choose(const DecodeParams& p, bool plain) {
  if (p.heads.style == RopeStyle::kHalf) {
    return plain ? attend_one<T, kDim, RopeStyle::kHalf, true>
                 : attend_one<T, kDim, RopeStyle::kHalf, false>;
  }
  const bool normed = p.heads.q_norm || p.heads.k_norm;
  return plain && !normed ? attend_one<T, kDim, RopeStyle::kInterleaved, true> : nullptr;
}

template <typename T>
DecodeKernel choose(const DecodeParams& p, bool plain) {
  return p.attention.cache.key_dim == 64 ? choose<T, 64>(p, plain) : choose<T, 128>(p, plain);
}

}  // namespace

DecodeKernel one_kernel(const DecodeParams& p) {
  const LayerCacheView& cache = p.attention.cache;
  const bool fits = p.fused && p.tokens == 1 && p.parts == 1 && cache.key_dim == cache.value_dim &&
                    (cache.key_dim == 64 || cache.key_dim == 128) &&
                    p.heads.turned == cache.key_dim;
  if (!fits) return nullptr;
  const bool plain = cache.window == 0 && !p.attention.sinks;
  if (cache.dtype == DType::kF16) return choose<__half>(p, plain);
  if (cache.dtype == DType::kBF16) return choose<__nv_bfloat16>(p, plain);
  return nullptr;
}

}  // namespace pianola::cuda
