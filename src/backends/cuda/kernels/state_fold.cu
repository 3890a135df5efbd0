// Folding the tokens of a step into the states of a layer.
//
// A thread block has 32 columns of the state of one head of one lane's row, each of its warps 8 of
// them with all keys, in registers from the first token to the last. Nothing it decides by is
// written by another block: columns are its own, and what all blocks of a head read, the newest
// length and the keys of earlier steps, is written by a kernel behind them (keep_steps).
#include "backends/cuda/kernels/device.cuh"
#include "backends/cuda/kernels/state.h"
#include "backends/cuda/kernels/state_places.cuh"
#include "backends/cuda/kernels/state_step.cuh"

namespace pianola::cuda {
namespace {

using namespace folding;

// A lane's part of the state: keys share * kRows + r, four columns from `column` on.
template <int kRows>
struct StatePart {
  float x[kRows][4];

  // `from` null: a zero state.
  __device__ __forceinline__ void load(const StateSpec& spec, const float* from, int key,
                                       int column) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < 4; ++c) x[r][c] = 0;
    }
    if (!from) return;
    from += static_cast<std::size_t>(key) * spec.value_dim + column;
    if (spec.value_dim % 4 == 0) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (key + r >= spec.key_dim || column >= spec.value_dim) continue;
        const float4 v = load_activation4(from + r * spec.value_dim);
        x[r][0] = v.x, x[r][1] = v.y, x[r][2] = v.z, x[r][3] = v.w;
      }
      return;
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (key + r < spec.key_dim && column + c < spec.value_dim) {
          x[r][c] = load_activation(from + r * spec.value_dim + c);
        }
      }
    }
  }

  __device__ __forceinline__ void store(const StateSpec& spec, float* to, int key,
                                        int column) const {
    to += static_cast<std::size_t>(key) * spec.value_dim + column;
    if (spec.value_dim % 4 == 0) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (key + r >= spec.key_dim || column >= spec.value_dim) continue;
        *reinterpret_cast<float4*>(to + r * spec.value_dim) =
            make_float4(x[r][0], x[r][1], x[r][2], x[r][3]);
      }
      return;
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (key + r < spec.key_dim && column + c < spec.value_dim) {
          to[r * spec.value_dim + c] = x[r][c];
        }
      }
    }
  }
};

// Sums over the shares of the keys, which lie in bits 1 to 4 of the lane; afterwards a lane has one
// of the two kinds of sum of one of its four columns: b with bit 4, column (lane / 4) % 4.
__device__ __forceinline__ float spread_sums(const float (&a)[4], const float (&b)[4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool second = (lane & 16) != 0;
  const bool high = (lane & 8) != 0;
  const bool odd = (lane & 4) != 0;
  float x[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    x[c] = (second ? b[c] : a[c]) + __shfl_xor_sync(kAllLanes, second ? a[c] : b[c], 16);
  }
  float y[2];
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    y[c] = (high ? x[2 + c] : x[c]) + __shfl_xor_sync(kAllLanes, high ? x[c] : x[2 + c], 8);
  }
  float z = (odd ? y[1] : y[0]) + __shfl_xor_sync(kAllLanes, odd ? y[0] : y[1], 4);
  z += __shfl_xor_sync(kAllLanes, z, 2);
  return z;
}

// Folds a step in: S <- decay S + k u', with u strength times the value, or what it is beyond the
// decayed S' k. Returns S' q of the new state, which is decay times that of the old one and u times
// k . q, so that both sums are made at once. It is of column (lane / 4) % 4, in lanes with bit 4.
template <StateRule kRule, int kRows>
__device__ __forceinline__ float fold(StatePart<kRows>& s, const PreparedStep<kRows>& step,
                                      int share, int value_at) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float key[kRows];
  float known[4] = {};
  float answer[4] = {};
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    key[r] = step.key[share * kRows + r];
    const float query = step.query[share * kRows + r];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if constexpr (kRule == StateRule::kDelta) known[c] = fmaf(key[r], s.x[r][c], known[c]);
      answer[c] = fmaf(query, s.x[r][c], answer[c]);
    }
  }
  const float sum = spread_sums(known, answer);
  const float decay = step.decay;
  float u = step.value[value_at + (lane & 1) * 4 + (lane >> 2) % 4];
  if constexpr (kRule == StateRule::kDelta) u = fmaf(-decay, sum, u);
  u *= step.strength;
  // From the lanes that have the first kind of sum.
  u = __shfl_sync(kAllLanes, u, lane & 15);
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const float of_column = __shfl_sync(kAllLanes, u, (lane & 1) | (c << 2));
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      s.x[r][c] = fmaf(key[r], of_column, __fmul_rn(decay, s.x[r][c]));
    }
  }
  return fmaf(step.product, u, __fmul_rn(decay, sum));
}

// Slices of columns on x, heads on y, lanes on z.
template <StateRule kRule, int kRows>
__global__ void __launch_bounds__(kThreads, kRows <= 8 ? 4 : 2)
    fold_kernel(const __grid_constant__ FoldArgs p) {
  __shared__ PreparedStep<kRows> prepared[2][kTile];
  allow_next();
  const StateView& view = p.view;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const LaneTokens tokens = lane_tokens(p.state, static_cast<int>(blockIdx.z));
  // No kernel of the step writes tables or, before this one, states: both are read before the wait.
  Head h{};
  h.head = static_cast<int>(blockIdx.y);
  h.slot = tokens.row;
  h.column = static_cast<int>(blockIdx.x) * kBlockColumns;
  h.a = expf(__ldg(p.a_log + h.head));
  h.dt_bias = __ldg(p.dt_bias + h.head);
  const int share = lane >> 1;
  const int key = share * kRows;
  const int column = h.column + warp * kWarpColumns + (lane & 1) * 4;
  const Positions at = find_positions(p.state, tokens);
  StatePart<kRows> s;
  int again = at.first;  // the first step that is folded in once more
  if (at.first >= 0) {
    again = at.first / view.interval * view.interval;
    const float* from = nullptr;
    if (view.interval > 1 && at.first > 0 &&
        __ldcg(newest_length_place(view, h.slot, h.head)) == at.first) {
      again = at.first;
      from = newest_place(view, h.slot, h.head);
    } else if (again > 0) {
      from = anchor_place(view, h.slot, h.head, again);
    }
    s.load(view.spec, from, key, column);
  }

  StepWalk walk{p.state, tokens, at, again};
  int steps = walk.take(kTile);  // lane i has the i-th

  wait_for_previous();
  const int out_width = view.spec.heads * view.spec.value_dim;
  float* out = p.out + static_cast<std::size_t>(h.head) * view.spec.value_dim + h.column;
  const int live = at.first < 0 ? 0 : at.last - at.first + 1;
  const int masked_from = live < tokens.end - tokens.begin ? tokens.begin + 32 * warp : tokens.end;
  for (int t = masked_from; t < tokens.end; t += kThreads) {
    unsigned masked = ~live_tokens(p.state, t, tokens.end);
    if (tokens.end - t < 32) masked &= (1U << (tokens.end - t)) - 1;
    for (; masked; masked &= masked - 1) {
      if (h.column + lane < view.spec.value_dim) {
        out[static_cast<std::size_t>(t + __ffs(static_cast<int>(masked)) - 1) * out_width + lane] =
            0;
      }
    }
  }
  if (at.first < 0) return;

  // The anchors that are still there after the step.
  const int length = at.last + 1;
  int next_anchor = max(at.first, length - view.anchors * view.interval);
  next_anchor = (next_anchor / view.interval + 1) * view.interval;
  const float skip = kRule == StateRule::kSsm ? __ldg(p.skip + h.head) : 0.0F;

  int folded = again;
#pragma unroll
  for (int m = 0; m < kMine; ++m) {
    const int step = __shfl_sync(kAllLanes, steps, m * kWarps + warp);
    if (step == kNoStep) continue;
    RawStep<kRows> raw;
    load_raw(p, h, step, raw);
    prepare<kRule>(p, h, step, raw, prepared[0][m * kWarps + warp]);
  }
  __syncthreads();
  for (int half = 0;; half ^= 1) {
    const int count = __popc(__ballot_sync(kAllLanes, lane < kTile && steps != kNoStep));
    const int next = count == kTile ? walk.take(kTile) : kNoStep;
    RawStep<kRows> raw[kMine];
#pragma unroll
    for (int m = 0; m < kMine; ++m) {
      const int step = __shfl_sync(kAllLanes, next, m * kWarps + warp);
      if (step != kNoStep) load_raw(p, h, step, raw[m]);
    }
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const PreparedStep<kRows>& step = prepared[half][i];
      float answer = fold<kRule>(s, step, share, warp * kWarpColumns);
      const int token = __shfl_sync(kAllLanes, steps, i);
      ++folded;
      if (token < 0) continue;
      const int mine = warp * kWarpColumns + (lane & 1) * 4 + (lane >> 2) % 4;
      if (kRule == StateRule::kSsm) answer = fmaf(skip, step.value[mine], answer);
      if ((lane & 18) == 16 && h.column + mine < view.spec.value_dim) {
        out[static_cast<std::size_t>(token) * out_width + mine] = answer;
      }
      if (folded == next_anchor) {
        s.store(view.spec, anchor_place(view, h.slot, h.head, folded), key, column);
        next_anchor += view.interval;
      }
    }
    if (count < kTile) break;
#pragma unroll
    for (int m = 0; m < kMine; ++m) {
      const int step = __shfl_sync(kAllLanes, next, m * kWarps + warp);
      if (step != kNoStep) {
        prepare<kRule>(p, h, step, raw[m], prepared[half ^ 1][m * kWarps + warp]);
      }
    }
    __syncthreads();
    steps = next;
  }
  if (view.interval > 1) s.store(view.spec, newest_place(view, h.slot, h.head), key, column);
}

constexpr int kKeepWarps = 8;

// What the blocks of a head have folded in, and how many tokens that makes: when all have read the
// steps and the length of before. Heads on x, lanes on y.
__global__ void __launch_bounds__(kKeepWarps * 32)
    keep_steps_kernel(const __grid_constant__ FoldArgs p) {
  allow_next();
  const StateView& view = p.view;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int head = static_cast<int>(blockIdx.x);
  const LaneTokens tokens = lane_tokens(p.state, static_cast<int>(blockIdx.y));
  const Positions at = find_positions(p.state, tokens);
  const int key_dim = view.spec.key_dim;
  const int value_dim = view.spec.value_dim;
  const int shared = head / p.group % p.key_heads * key_dim;
  wait_for_previous();
  if (at.first < 0) return;
  for (int t = tokens.begin + static_cast<int>(threadIdx.x) / 32 * 32; t < tokens.end;
       t += kKeepWarps * 32) {
    const int position = t + lane < tokens.end ? __ldcg(p.state.position + t + lane) : -1;
    unsigned kept =
        __ballot_sync(kAllLanes, position >= 0 && position > at.last - view.step_capacity);
    for (; kept; kept &= kept - 1) {
      const int bit = __ffs(static_cast<int>(kept)) - 1;
      const auto token = static_cast<std::size_t>(t + bit);
      float* record = step_place(view, tokens.row, head, __shfl_sync(kAllLanes, position, bit));
      const float4 rates =
          __ldcg(reinterpret_cast<const float4*>(p.rates + token * view.spec.heads + head));
      const float* row = p.in + token * p.in_width;
      for (int i = lane; i < key_dim; i += 32) {
        record[i] = __fmul_rn(load_activation(row + p.key_at + shared + i), rates.z);
      }
      const float* value = row + p.value_at + static_cast<std::size_t>(head) * value_dim;
      for (int i = lane; i < value_dim; i += 32) record[key_dim + i] = load_activation(value + i);
      if (lane == 0) record[key_dim + value_dim] = rates.x;
      if (lane == 1) record[key_dim + value_dim + 1] = rates.y;
    }
  }
  if (threadIdx.x == 0) *newest_length_place(view, tokens.row, head) = at.last + 1;
}

using FoldKernel = void (*)(FoldArgs);

template <StateRule kRule>
FoldKernel fold_kernel_for(int key_dim) {
  if (key_dim <= kKeyShares) return fold_kernel<kRule, 1>;
  if (key_dim <= 2 * kKeyShares) return fold_kernel<kRule, 2>;
  if (key_dim <= 4 * kKeyShares) return fold_kernel<kRule, 4>;
  if (key_dim <= 8 * kKeyShares) return fold_kernel<kRule, 8>;
  return fold_kernel<kRule, 16>;
}
static_assert(kMaxStateKeyDim == 16 * kKeyShares);

}  // namespace

void fold_states(const FoldArgs& args, const Launch& launch) {
  const StateSpec& spec = args.view.spec;
  const FoldKernel kernel = args.rule == StateRule::kDelta
                                ? fold_kernel_for<StateRule::kDelta>(spec.key_dim)
                                : fold_kernel_for<StateRule::kSsm>(spec.key_dim);
  FoldArgs p = args;
  if (p.view.interval == 1) p.rates = nullptr;
  const auto heads = static_cast<unsigned>(spec.heads);
  const auto lanes = static_cast<unsigned>(args.lanes);
  const auto slices = static_cast<unsigned>((spec.value_dim + kBlockColumns - 1) / kBlockColumns);
  launch_kernel(launch, "fold", kernel, dim3(slices, heads, lanes), dim3(kThreads), 0, p);
  if (p.view.interval == 1) return;
  Launch next = launch;
  next.dependent = launch.dependent_inside;
  launch_kernel(next, "keep_steps", keep_steps_kernel, dim3(heads, lanes), dim3(kKeepWarps * 32), 0,
                p);
}

}  // namespace pianola::cuda
