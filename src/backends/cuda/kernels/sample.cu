// Choosing tokens, and log-probabilities of given ones. How a row chooses is in sample_row.cuh.
#include <algorithm>
#include <string>

#include "backends/cuda/kernels/sample_row.cuh"
#include "backends/cuda/kernels/token.h"
#include "pianola/error.h"

namespace pianola::cuda {
namespace {

using namespace sampling;

__device__ __forceinline__ Choice load_choice(const RowState* row, int vocab) {
  static_assert(sizeof(SamplingState) == 48 && offsetof(RowState, sampling) % 8 == 0 &&
                offsetof(RowState, bias) % 8 == 0 && sizeof(RowState) % 8 == 0);
  Choice c;
  unsigned long long words[6];
#pragma unroll
  for (int i = 0; i < 6; ++i) {
    words[i] = __ldcg(reinterpret_cast<const unsigned long long*>(&row->sampling) + i);
  }
  memcpy(&c.p, words, sizeof(words));
  c.history_length = __ldcg(&row->history_length);
  c.bias_count = __ldcg(&row->bias_count);
  c.penalizes =
      (c.p.repeat_penalty != 1 || c.p.presence_penalty != 0 || c.p.frequency_penalty != 0) &&
      c.p.penalty_window != 0;
  c.cuts_k = c.p.top_k > 0 && c.p.top_k < vocab;
  c.cuts_p = c.p.top_p < 1;
  return c;
}

// Clusters of kCluster CTAs, one a logit row. Dynamic shared memory: logits [width], then the area.
template <int kWide>
__global__ void __launch_bounds__(kThreads, 2) sample_kernel(SampleArgs args, int width) {
  __shared__ Shared shared;
  const cg::cluster_group cluster = cg::this_cluster();
  allow_next();
  if (threadIdx.x == 0) shared.candidates = 0;
  cluster.barrier_arrive();  // that all have started, before anything is written to them
  const StepState& s = args.state;
  const int r = static_cast<int>(blockIdx.x) / kCluster;
  Slice slice(shared, args.vocab, width);
  const float* raw = args.logits + static_cast<std::size_t>(r) * args.vocab;
  wait_for_previous();
  const std::int32_t logit_rows = __ldcg(&s.counts->logit_rows);
  const std::int32_t t = __ldcg(s.logit_token + r);
  if (r >= logit_rows) {
    cluster.barrier_wait();
    return;
  }
  // The logits are on their way while the row's parameters are looked up.
  float held[kHeldPieces * kWide];
  slice.issue<kWide>(raw, held);
  const std::int32_t position = __ldcg(s.position + t);
  const std::int32_t row_index = __ldcg(s.row_of + __ldcg(s.lane_of + t));
  const RowState* row = s.row + row_index;
  const bool sums = __ldcg(&row->sampling.want_logprob) != 0;
  if (threadIdx.x == 0) shared.choice() = load_choice(row, args.vocab);
  cluster.barrier_wait();
  if (position < 0) return;

  PartBest part = slice.keep<kWide>(raw, held, sums);
  const Choice& c = shared.choice();  // a barrier later
  if (c.bias_count > 0) slice.apply_bias(row, c.bias_count);
  if (c.penalizes) {
    slice.apply_penalties(c.p, s.history + static_cast<std::int64_t>(row_index) * s.history_stride,
                          c.history_length);
  }
  if (c.bias_count > 0 || c.penalizes) part.best = slice.best();
  bool bad;
  const Ranked best = slice.tell(part, bad);

  int token = id_of(best);
  const float most = logit_of(best);
  if (bad || !(most > -INFINITY) || isinf(most)) {
    token = -1;
  } else if (c.p.temperature > 0) {
    const float max = __fdiv_rn(most, c.p.temperature);
    const int drawn = isinf(max) ? -1 : slice.draw(max);
    if (drawn >= 0) token = drawn;
  }
  if (slice.rank() != 0 || threadIdx.x >= 32) return;
  float logprob = 0;
  if (c.p.want_logprob && token >= 0) {
    float max;
    const double sum = slice.log_sum(max);
    logprob = static_cast<float>(static_cast<double>(load_activation(raw + token)) - max - sum);
  }
  if (threadIdx.x == 0) {
    s.sampled[r] = token;
    s.logprob[r] = logprob;
  }
}

int slice_width(int vocab) { return (vocab + 4 * kCluster - 1) / (4 * kCluster) * 4; }

// Counts of penalties, or two histograms and the candidates, or a list of biases.
std::size_t area_bytes(int width) {
  const std::size_t lists = 2 * kBins * sizeof(std::uint32_t) + kCandidates * sizeof(Ranked);
  static_assert(kMaxLogitBias * sizeof(LogitBias) <= kCandidates * sizeof(Ranked));
  return std::max(lists, static_cast<std::size_t>(width) * sizeof(std::uint32_t));
}

void launch_sample(const Launch& launch, void (*kernel)(SampleArgs, int), const SampleArgs& args,
                   int width, std::size_t shared_bytes) {
  launch_grid(launch, "sample", kernel,
              Grid{.blocks = dim3(static_cast<unsigned>(args.logit_rows * kCluster)),
                   .threads = dim3(kThreads),
                   .shared_bytes = shared_bytes,
                   .cluster = kCluster},
              args, width);
}

constexpr int kTargetThreads = 1024;

// exp sums relative to the greatest logit seen, of a thread and of what it is merged with.
struct Softmax {
  float max = -INFINITY;
  double sum = 0;

  __device__ void raise(float to) {
    if (to > max) {
      if (sum > 0) sum *= exp(static_cast<double>(max) - to);
      max = to;
    }
  }
  __device__ void merge(float other_max, double other_sum) {
    raise(other_max);
    if (other_max < max) {
      if (other_sum > 0) other_sum *= exp(static_cast<double>(other_max) - max);
    }
    sum += other_sum;
  }
};

// One CTA a row.
template <int kWide>
__global__ void __launch_bounds__(kTargetThreads) target_kernel(TargetArgs args) {
  __shared__ float warp_max_of[kTargetThreads / 32];
  __shared__ double warp_sum_of[kTargetThreads / 32];
  allow_next();
  const StepState& s = args.state;
  const int r = args.first + static_cast<int>(blockIdx.x);
  const float* raw = args.logits + static_cast<std::size_t>(blockIdx.x) * args.vocab;
  wait_for_previous();
  const std::int32_t logit_rows = __ldcg(&s.counts->logit_rows);
  if (r >= logit_rows) return;
  const TokenId target = __ldcg(s.target + r);
  Softmax own;
#pragma unroll
  for (int at = static_cast<int>(threadIdx.x) * kWide; at < args.vocab;
       at += kTargetThreads * kWide) {
    float v[kWide];
    if constexpr (kWide == 4) {
      const float4 four = load_activation4(raw + at);
      v[0] = four.x;
      v[1] = four.y;
      v[2] = four.z;
      v[3] = four.w;
    } else {
      v[0] = load_activation(raw + at);
    }
    float most = v[0];
#pragma unroll
    for (int e = 1; e < kWide; ++e) most = fmaxf(most, v[e]);
    own.raise(most);
    float sum = 0;  // a NaN stays one
#pragma unroll
    for (int e = 0; e < kWide; ++e) sum += v[e] == -INFINITY ? 0.0F : expf(v[e] - own.max);
    own.sum += sum;
  }
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) {
    const float max = __shfl_xor_sync(kAllLanes, own.max, offset);
    const double sum = __shfl_xor_sync(kAllLanes, own.sum, offset);
    own.merge(max, sum);
  }
  if (threadIdx.x % 32 == 0) {
    warp_max_of[threadIdx.x / 32] = own.max;
    warp_sum_of[threadIdx.x / 32] = own.sum;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  Softmax all;
  for (int w = 0; w < kTargetThreads / 32; ++w) all.merge(warp_max_of[w], warp_sum_of[w]);
  s.logprob[r] = static_cast<float>(static_cast<double>(load_activation(raw + target)) -
                                    static_cast<double>(all.max) - log(all.sum));
}

}  // namespace

void sample(const SampleArgs& args, const Launch& launch) {
  const int width = slice_width(args.vocab);
  const std::size_t bytes = static_cast<std::size_t>(width) * sizeof(float) + area_bytes(width);
  constexpr std::size_t kMostBytes = 220 * 1024;  // of 227 that a CTA may have, less Shared
  if (bytes > kMostBytes) {
    throw Error(ErrorCode::kUnsupported,
                "sample: a vocabulary of " + std::to_string(args.vocab) +
                    " entries, more than the shared memory of a cluster holds");
  }
  launch_sample(launch, args.vocab % 4 == 0 ? sample_kernel<4> : sample_kernel<1>, args, width,
                bytes);
}

void target_logprob(const TargetArgs& args, const Launch& launch) {
  launch_kernel(launch, "target_logprob", args.vocab % 4 == 0 ? target_kernel<4> : target_kernel<1>,
                dim3(static_cast<unsigned>(args.rows)), dim3(kTargetThreads), 0, args);
}

}  // namespace pianola::cuda
