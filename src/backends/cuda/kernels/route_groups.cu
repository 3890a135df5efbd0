// A choice of experts that is not by scores alone: with a bias, among the best groups, or with
// weights that are scaled. One warp a token.
#include "backends/cuda/kernels/route.h"
#include "backends/cuda/kernels/route_rank.cuh"

namespace pianola::cuda {
namespace {

// Rounded once, as the reference has it: a choice hangs on it.
__device__ __forceinline__ float sigmoid(float s) {
  return static_cast<float>(1.0 / (1.0 + exp(-static_cast<double>(s))));
}

// The sum of the `best` largest keys of a group.
__device__ __forceinline__ double sum_of_best(const float* keys, int size, int best) {
  double sum = 0;
  int last = 0;
  for (int rank = 0; rank < best; ++rank) {
    int found = size;
    for (int i = 0; i < size; ++i) {
      const bool behind = rank == 0 || before(keys[last], last, keys[i], i);
      if (behind && (found == size || keys[i] > keys[found])) found = i;
    }
    last = found;
    sum += keys[found];
  }
  return sum;
}

__global__ void __launch_bounds__(32)
    choose_among_groups_kernel(const __grid_constant__ RouteArgs args, RouteChoice choice) {
  extern __shared__ float keys[];  // [experts]
  __shared__ double group_sum[kMaxRouteGroups];
  allow_next();
  const int t = static_cast<int>(blockIdx.x);
  const int lane = static_cast<int>(threadIdx.x);
  wait_for_previous();
  if (t >= min(args.tokens, __ldcg(&args.state.counts->tokens))) return;
  float* ids = args.out + static_cast<std::int64_t>(t) * 2 * args.top_k;
  float* weights = ids + args.top_k;
  if (__ldcg(args.state.position + t) < 0) {
    for (int r = lane; r < args.top_k; r += 32) {
      ids[r] = -1;
      weights[r] = 0;
    }
    return;
  }
  const float* scores = args.scores + static_cast<std::int64_t>(t) * args.experts;
  for (int e = lane; e < args.experts; e += 32) {
    const float score = load_activation(scores + e);
    keys[e] = rank_key(choice.bias ? __fadd_rn(sigmoid(score), __ldg(choice.bias + e)) : score);
  }
  __syncwarp();

  // The best groups, ties to the lower number; each lane finds the same ones.
  const RouteGroups groups = choice.groups;
  const int group_size = args.experts / groups.count;
  std::uint64_t allowed = ~std::uint64_t{0};
  if (groups.count > 1) {
    for (int g = lane; g < groups.count; g += 32) {
      group_sum[g] = sum_of_best(keys + g * group_size, group_size, groups.best);
    }
    __syncwarp();
    allowed = 0;
    for (int rank = 0; rank < groups.chosen; ++rank) {
      int best = groups.count;
      for (int g = 0; g < groups.count; ++g) {
        const bool taken = (allowed >> g & 1) != 0;
        if (!taken && (best == groups.count || group_sum[g] > group_sum[best])) best = g;
      }
      allowed |= std::uint64_t{1} << best;
    }
  }

  float last_key = 0;
  int last = -1;
  for (int rank = 0; rank < args.top_k; ++rank) {
    // The best of those behind the last one, of this lane and then of all.
    float best_key = 0;
    int best = args.experts;
    for (int e = lane; e < args.experts; e += 32) {
      if ((allowed >> (e / group_size) & 1) == 0) continue;
      const float key = keys[e];
      const bool behind = rank == 0 || before(last_key, last, key, e);
      if (behind && (best == args.experts || before(key, e, best_key, best))) {
        best_key = key;
        best = e;
      }
    }
#pragma unroll
    for (int offset = 16; offset; offset >>= 1) {
      const float key = __shfl_xor_sync(kAllLanes, best_key, offset);
      const int e = __shfl_xor_sync(kAllLanes, best, offset);
      if (e < args.experts && (best == args.experts || before(key, e, best_key, best))) {
        best_key = key;
        best = e;
      }
    }
    last_key = best_key;
    last = best;
    if (lane == 0) {
      ids[rank] = static_cast<float>(best);
      weights[rank] = load_activation(scores + best);  // becomes a weight below, by the same lane
    }
  }

  const bool sigmoids =
      args.score == RouteScore::kSigmoid || args.score == RouteScore::kSigmoidOfChosen;
  float largest = -INFINITY;  // of the scores that are summed
  float all = 0;
  if (args.score == RouteScore::kSoftmax) {
    for (int e = lane; e < args.experts; e += 32) {
      largest = fmaxf(largest, load_activation(scores + e));
    }
    largest = warp_max(largest);
    for (int e = lane; e < args.experts; e += 32) {
      all += expf(load_activation(scores + e) - largest);
    }
    all = warp_sum(all);
  }
  if (lane != 0) return;
  if (args.score == RouteScore::kSoftmaxOfChosen) {
    for (int r = 0; r < args.top_k; ++r) largest = fmaxf(largest, weights[r]);
  }
  double total = args.score == RouteScore::kSigmoidOfChosen ? 1e-20 : 0;
  for (int r = 0; r < args.top_k; ++r) {
    weights[r] = sigmoids ? sigmoid(weights[r]) : expf(weights[r] - largest);
    total += weights[r];
  }
  if (args.score == RouteScore::kSigmoid) total = 1;
  if (args.score == RouteScore::kSoftmax) total = all;
  for (int r = 0; r < args.top_k; ++r) {
    weights[r] = static_cast<float>(weights[r] / total * choice.scale);
  }
}

}  // namespace

void choose_among_groups(const RouteArgs& args, const RouteChoice& choice, const Launch& launch) {
  require(choice.groups.count >= 1 && choice.groups.count <= kMaxRouteGroups &&
              args.experts % choice.groups.count == 0,
          "route: groups without a kernel");
  launch_kernel(launch, "route groups", choose_among_groups_kernel,
                dim3(static_cast<unsigned>(args.tokens)), dim3(32),
                static_cast<std::size_t>(args.experts) * sizeof(float), args, choice);
}

}  // namespace pianola::cuda
