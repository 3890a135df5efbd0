// RollbackOp, by one thread block of the first kernel of a step.
#pragma once

#include "backends/cuda/kernels/device.cuh"
#include "plan/step_state.h"

namespace pianola::cuda {

// What one row is asked for, as RollbackOp says.
struct WayBack {
  std::int32_t count = 0;
  std::int32_t length = 0;  // before
  bool has_stopped = false;
  bool can = false;
};

__device__ __forceinline__ WayBack way_back(const StepState& s, int row) {
  WayBack way;
  way.count = __ldcg(s.rollback + row);
  if (way.count == 0) return way;
  const RowState& r = s.row[row];
  way.length = __ldcg(&r.length);
  const auto status = static_cast<RowStatus>(__ldcg(reinterpret_cast<const int*>(&r.status)));
  way.has_stopped = status != RowStatus::kRunning && status != RowStatus::kIdle;
  way.can = !way.has_stopped && way.count > 0 && way.count <= s.rollback_depth &&
            way.count <= way.length - __ldcg(&r.floor) &&
            max(__ldcg(&r.reach), way.length) - (way.length - way.count) <= s.most_ahead;
  return way;
}

// Tokens queued behind those that go move down, a piece at a time: they may overlap. By a warp.
__device__ __forceinline__ void move_queued(TokenId* history, int begin, int end, int count) {
  for (int at = begin; at < end; at += 32) {
    const int from = at + static_cast<int>(threadIdx.x % 32);
    const TokenId token = from < end ? __ldcg(history + from) : 0;
    __syncwarp();
    if (from < end) __stcg(history + from - count, token);
    __syncwarp();
  }
}

// By all kThreads threads of one block. When they may go on, the next kernel may start: what was
// written can be seen by then, although that kernel reads tables before it waits.
template <int kThreads>
__device__ __forceinline__ void take_back(const StepState& s) {
  const int tid = static_cast<int>(threadIdx.x);
  bool any = false;
  for (int row = tid; row < s.rows; row += kThreads) any |= __ldcg(s.rollback + row) != 0;
  if (!__syncthreads_or(any)) return;

  // Positions first, while the rows are as they were.
  const int tokens = __ldcg(&s.counts->tokens);
  for (int t = tid; t < tokens; t += kThreads) {
    const int lane = __ldcg(s.lane_of + t);
    const int position = __ldcg(s.position + t);
    const int first = __ldcg(s.first_token + lane);
    const WayBack way = way_back(s, __ldcg(s.row_of + lane));
    if (way.count == 0 || position < 0) continue;
    __stcg(s.position + t, way.can ? way.length - way.count + t - first : -1);
  }
  __syncthreads();

  for (int base = 0; base < s.rows; base += kThreads) {  // a thread a row
    const int row = base + tid;
    const WayBack way = row < s.rows ? way_back(s, row) : WayBack{};
    RowState& r = s.row[row < s.rows ? row : 0];
    const int known = way.can ? __ldcg(&r.history_length) : 0;
    for (unsigned left = __ballot_sync(kAllLanes, way.can && known > way.length); left != 0;
         left &= left - 1) {
      const int from = __ffs(static_cast<int>(left)) - 1;
      const int its_row = __shfl_sync(kAllLanes, row, from);
      move_queued(s.history + static_cast<std::int64_t>(its_row) * s.history_stride,
                  __shfl_sync(kAllLanes, way.length, from), __shfl_sync(kAllLanes, known, from),
                  __shfl_sync(kAllLanes, way.count, from));
    }
    if (way.count == 0) continue;
    const int length = way.can ? way.length - way.count : way.length;
    const int fewest = __ldcg(s.went_back + row);
    if (way.can) {
      __stcg(&r.reach, max(__ldcg(&r.reach), way.length));
      __stcg(&r.length, length);
      __stcg(&r.history_length, known - way.count);
    } else if (!way.has_stopped) {
      __stcg(reinterpret_cast<int*>(&r.status), static_cast<int>(RowStatus::kRefused));
    }
    __stcg(s.went_back + row, fewest > 0 ? min(fewest, length + 1) : length + 1);
    __stcg(s.rollback + row, 0);
  }
  __threadfence();
  __syncthreads();
}

}  // namespace pianola::cuda
