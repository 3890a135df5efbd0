// The end of a user's round: one thread, because the words are few and each depends on the others.
#include "backends/cuda/kernels/round.h"

namespace pianola::cuda {
namespace {

template <bool kLoop>
__global__ void end_round_kernel(LoopWords* words, RoundReport* report,
                                 cudaGraphConditionalHandle handle) {
  // Kernels before this one may have written the words, and the host writes `yield` while the loop
  // runs: they are read past the first-level cache.
  const std::int32_t again = __ldcg(&words->again);
  const std::int32_t rounds = __ldcg(&words->rounds) + 1;
  words->again = 0;
  words->rounds = rounds;
  report->again = again;
  report->rounds = rounds;
  if constexpr (kLoop) {
    const bool another =
        again != 0 && rounds < __ldcg(&words->max_rounds) && __ldcg(&words->yield) == 0;
    cudaGraphSetConditional(handle, another ? 1U : 0U);
  }
}

// A bijection of 64 bits, so that one changed word always changes the sum.
__device__ __forceinline__ std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

// The sum of integers does not depend on the order in which threads add to it.
__global__ void fingerprint_kernel(const std::uint32_t* words, std::size_t count,
                                   unsigned long long* sum) {
  unsigned long long mine = 0;
  const std::size_t stride = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += stride) {
    mine += mix((static_cast<std::uint64_t>(i) << 32) + words[i] + 1);
  }
  if (mine != 0) atomicAdd(sum, mine);
}

}  // namespace

void end_round(LoopWords* words, RoundReport* report, const cudaGraphConditionalHandle* handle,
               const Launch& launch) {
  launch_kernel(launch, "end of a round", handle ? end_round_kernel<true> : end_round_kernel<false>,
                dim3(1), dim3(1), 0, words, report, handle ? *handle : 0);
}

void add_fingerprint(const void* words, std::size_t bytes, std::uint64_t* sum,
                     const Launch& launch) {
  constexpr unsigned kThreads = 256;
  launch_kernel(launch, "fingerprint", fingerprint_kernel,
                dim3(static_cast<unsigned>(launch.sms) * 8), dim3(kThreads), 0,
                static_cast<const std::uint32_t*>(words), bytes / sizeof(std::uint32_t),
                reinterpret_cast<unsigned long long*>(sum));
}

}  // namespace pianola::cuda
