// Where a state layer keeps things (StateView's places, on the device), and which tokens of a step
// are a lane's. What is read here no kernel of a step writes but the layer's own last ones.
#pragma once

#include <climits>

#include "backends/cuda/kernels/device.cuh"
#include "cache/layer_cache.h"
#include "plan/step_state.h"

namespace pianola::cuda {

__device__ __forceinline__ std::size_t state_floats(const StateSpec& spec) {
  return static_cast<std::size_t>(spec.key_dim) * spec.value_dim;
}
__device__ __forceinline__ std::size_t head_index(const StateView& view, int slot, int head) {
  return static_cast<std::size_t>(slot) * view.spec.heads + head;
}
__device__ __forceinline__ float* anchor_place(const StateView& view, int slot, int head,
                                               int length) {
  const std::size_t states =
      static_cast<std::size_t>(slot) * view.anchors + length / view.interval % view.anchors;
  return view.anchor + (states * view.spec.heads + head) * state_floats(view.spec);
}
__device__ __forceinline__ float* newest_place(const StateView& view, int slot, int head) {
  return view.newest + head_index(view, slot, head) * state_floats(view.spec);
}
__device__ __forceinline__ std::int32_t* newest_length_place(const StateView& view, int slot,
                                                             int head) {
  return view.newest_length + head_index(view, slot, head);
}
__device__ __forceinline__ float* step_place(const StateView& view, int slot, int head,
                                             int position) {
  const auto size = static_cast<std::size_t>(view.spec.key_dim + view.spec.value_dim + 2);
  return view.steps +
         (head_index(view, slot, head) * view.step_capacity + position % view.step_capacity) * size;
}
__device__ __forceinline__ float* conv_place(const StateView& view, int slot, int position) {
  return view.conv +
         (static_cast<std::size_t>(slot) * view.conv_capacity + position % view.conv_capacity) *
             view.spec.conv_width;
}

// A lane's tokens; none when the step has no such lane.
struct LaneTokens {
  int begin = 0;
  int end = 0;
  int row = 0;
};
__device__ __forceinline__ LaneTokens lane_tokens(const StepState& s, int lane) {
  // All at once: what lies beyond the step's lanes is there as well.
  const int lanes = __ldcg(&s.counts->lanes);
  const int begin = __ldcg(s.first_token + lane);
  const int end = __ldcg(s.first_token + lane + 1);
  const int row = __ldcg(s.row_of + lane);
  if (lane >= lanes) return {};
  return {begin, end, row};
}

// Which of the up to 32 tokens from `begin` on are not masked. A whole warp.
__device__ __forceinline__ unsigned live_tokens(const StepState& s, int begin, int end) {
  const int t = begin + static_cast<int>(threadIdx.x) % 32;
  return __ballot_sync(kAllLanes, t < end && __ldcg(s.position + t) >= 0);
}

// Positions of a lane's first and last token that are not masked, -1 when all are. They follow each
// other.
struct Positions {
  int first = -1;
  int last = -1;
  int window = 0;     // of 32 tokens, the first that has such a token
  unsigned live = 0;  // which of them
};
// A whole warp.
__device__ __forceinline__ Positions find_positions(const StepState& s, const LaneTokens& tokens) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  Positions found;
  found.window = tokens.end;
  for (int t = tokens.begin; t < tokens.end && found.first < 0; t += 32) {
    const int position = t + lane < tokens.end ? __ldcg(s.position + t + lane) : -1;
    const unsigned live = __ballot_sync(kAllLanes, position >= 0);
    if (!live) continue;
    found.window = t;
    found.live = live;
    found.first = __shfl_sync(kAllLanes, position, __ffs(static_cast<int>(live)) - 1);
    if (t + 32 >= tokens.end) found.last = found.first + __popc(live) - 1;
  }
  if (found.first < 0) return found;
  for (int t = tokens.end - 1; t >= tokens.begin && found.last < 0; t -= 32) {
    const int position = t - lane >= tokens.begin ? __ldcg(s.position + t - lane) : -1;
    const unsigned live = __ballot_sync(kAllLanes, position >= 0);
    if (live) found.last = __shfl_sync(kAllLanes, position, __ffs(static_cast<int>(live)) - 1);
  }
  return found;
}

// In place of a step: there are no more.
inline constexpr int kNoStep = INT_MIN;

// What is folded into a row's state, in order: ~p for the step of position p that is folded in once
// more, then the lane's tokens that are not masked.
class StepWalk {
 public:
  __device__ __forceinline__ StepWalk(const StepState& state, const LaneTokens& tokens,
                                      const Positions& at, int again)
      : state_(state),
        again_(again),
        again_end_(at.first),
        window_(at.window),
        end_(tokens.end),
        live_(at.live) {}

  // The next ones, the i-th in lane i. A whole warp.
  __device__ __forceinline__ int take(int count) {
    int mine = kNoStep;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const int step = next();
      if (static_cast<int>(threadIdx.x) % 32 == i) mine = step;
    }
    return mine;
  }

 private:
  __device__ __forceinline__ int next() {
    if (again_ < again_end_) return ~again_++;
    while (!live_) {
      if (window_ + 32 >= end_) return kNoStep;
      window_ += 32;
      live_ = live_tokens(state_, window_, end_);
    }
    const int token = window_ + __ffs(static_cast<int>(live_)) - 1;
    live_ &= live_ - 1;
    return token;
  }

  const StepState& state_;
  int again_;
  int again_end_;
  int window_;  // of 32 tokens
  int end_;
  unsigned live_;  // those of the window that are still to come
};

}  // namespace pianola::cuda
