// The end of a round: lengths, histories, events, and whether another round follows. One small CTA:
// its cost is the chain of dependent reads, counts -> logit_token -> lane_of -> row_of -> row.
#include <algorithm>

#include "backends/cuda/kernels/device.cuh"
#include "backends/cuda/kernels/token.h"

namespace pianola::cuda {
namespace {

constexpr int kMaxThreads = 512;
constexpr int kEagerStops = 4;  // stop tokens that are read before their number is known

// One logit row: the token it gave and where it goes. `row` is -1 when there is nothing to do.
struct Drawn {
  std::int32_t t = -1;
  std::int32_t row = -1;
  TokenId token = -1;
  float logprob = 0;
};

__device__ __forceinline__ void grow_length(const StepState& s, int lane) {
  const std::int32_t first = __ldcg(s.first_token + lane);
  const std::int32_t end = __ldcg(s.first_token + lane + 1);
  RowState& row = s.row[__ldcg(s.row_of + lane)];
  const std::int32_t length = __ldcg(&row.length);
  if (__ldcg(s.position + first) >= 0) row.length = length + end - first;
}

__device__ __forceinline__ Drawn look_up(const StepState& s, int r) {
  Drawn d;
  d.t = __ldcg(s.logit_token + r);
  d.token = __ldcg(s.sampled + r);
  d.logprob = __ldcg(s.logprob + r);
  const std::int32_t lane = __ldcg(s.lane_of + d.t);
  const std::int32_t position = __ldcg(s.position + d.t);
  const std::int32_t row = __ldcg(s.row_of + lane);
  if (position >= 0) d.row = row;
  return d;
}

// Adds the token to its row, tells the next round, and says how the row goes on.
__device__ __forceinline__ RowStatus append_token(const StepState& s, const Drawn& d, bool feed) {
  RowState& row = s.row[d.row];
  const std::int32_t length = __ldcg(&row.length);
  const std::int32_t history_length = __ldcg(&row.history_length);
  const std::int32_t max_length = __ldcg(&row.max_length);
  const std::int32_t stop_count = __ldcg(&row.stop_count);
  bool stops = false;
#pragma unroll
  for (int i = 0; i < kEagerStops; ++i) {
    const TokenId stop = __ldcg(row.stop_tokens + i);
    stops |= i < stop_count && stop == d.token;
  }
  for (int i = kEagerStops; i < stop_count; ++i) stops |= __ldcg(row.stop_tokens + i) == d.token;

  RowStatus status = RowStatus::kFailed;
  if (d.token >= 0) {
    s.history[static_cast<std::int64_t>(d.row) * s.history_stride + history_length] = d.token;
    row.history_length = history_length + 1;
    status = stops                              ? RowStatus::kStopToken
             : history_length + 1 >= max_length ? RowStatus::kLength
                                                : RowStatus::kRunning;
  }
  row.status = status;
  if (feed) {
    s.token[d.t] = d.token;
    s.position[d.t] = status == RowStatus::kRunning ? length : -1;
  }
  return status;
}

__device__ __forceinline__ std::uint32_t ring_slot(std::uint64_t head, std::int32_t capacity) {
  const auto size = static_cast<std::uint32_t>(capacity);
  // A division of 64 bits only when it has to be.
  return head >> 32 ? static_cast<std::uint32_t>(head % size)
                    : static_cast<std::uint32_t>(head) % size;
}

// The lower half of the threads look up what was sampled while the upper half grow the lengths.
// More logit rows than threads in a half go in turns.
template <bool kLoop>
__global__ void __launch_bounds__(kMaxThreads) advance_kernel(AdvanceArgs args) {
  __shared__ int warp_events[kMaxThreads / 64];
  __shared__ std::uint32_t first_slot;
  allow_next();
  wait_for_previous();
  const StepState& s = args.state;
  const int4 counts = __ldcg(reinterpret_cast<const int4*>(s.counts));  // as StepCounts
  const int lanes = counts.y;
  const int logit_rows = args.samples ? counts.z : 0;
  const bool feed = counts.w != 0;
  const int half = static_cast<int>(blockDim.x / 2);
  const int tid = static_cast<int>(threadIdx.x);
  const bool draws = tid < half;
  const unsigned warp = threadIdx.x / 32;
  std::uint64_t published = 0;
  int rounds = 0;
  int max_rounds = 0;
  int yield = 0;
  if (tid == 0 || tid == half) published = __ldcg(&s.control->published);
  if (tid == 0) {
    rounds = __ldcg(&s.control->rounds);
    max_rounds = __ldcg(&s.control->max_rounds);
    yield = *static_cast<volatile const std::int32_t*>(s.yield);
  }
  if (!draws) {
    for (int lane = tid - half; lane < lanes; lane += half) grow_length(s, lane);
    if (tid == half) first_slot = ring_slot(published, s.ring_capacity);
  }

  bool running = false;
  int before = 0;  // events of earlier turns
  int base = 0;
  do {
    Drawn d;
    if (draws && base + tid < logit_rows) d = look_up(s, base + tid);
    const unsigned live = __ballot_sync(kAllLanes, d.row >= 0);
    if (draws && tid % 32 == 0) warp_events[warp] = __popc(live);
    __syncthreads();  // lengths have grown, too
    int place = before;
    for (int w = 0; w < half / 32; ++w) {
      const int events = warp_events[w];
      place += w < static_cast<int>(warp) ? events : 0;
      before += events;
    }
    bool goes_on = false;
    if (d.row >= 0) {
      const RowStatus status = append_token(s, d, feed);
      place += __popc(live & ((1U << tid % 32) - 1));
      auto slot = first_slot + static_cast<std::uint32_t>(place);
      if (slot >= static_cast<std::uint32_t>(s.ring_capacity)) {
        slot %= static_cast<std::uint32_t>(s.ring_capacity);
      }
      reinterpret_cast<int4*>(s.ring)[slot] =  // as TokenEvent
          make_int4(d.row, d.token, __float_as_int(d.logprob), static_cast<int>(status));
      goes_on = status == RowStatus::kRunning;
    }
    running |= __syncthreads_or(goes_on) != 0;
    base += half;
  } while (base < logit_rows);

  if (tid != 0) return;
  if (before > 0) {
    published += static_cast<std::uint64_t>(before);
    s.control->published = published;
    __threadfence_system();  // the events of all threads, after the barrier above
    *static_cast<volatile std::uint64_t*>(s.ring_head) = published;
  }
  if (kLoop || feed) s.control->rounds = rounds + 1;
  if constexpr (kLoop) {
    const bool another = running && rounds + 1 < max_rounds && yield == 0;
    cudaGraphSetConditional(args.handle, another ? 1U : 0U);
  }
}

}  // namespace

void advance(const AdvanceArgs& args, const Launch& launch) {
  static_assert(sizeof(StepCounts) == 16 && offsetof(StepCounts, lanes) == 4 &&
                offsetof(StepCounts, logit_rows) == 8 && offsetof(StepCounts, feed) == 12);
  static_assert(sizeof(TokenEvent) == 16 && offsetof(TokenEvent, token) == 4 &&
                offsetof(TokenEvent, logprob) == 8 && offsetof(TokenEvent, status) == 12);
  // No step has more lanes than there are rows.
  const int half = std::clamp((args.state.rows + 31) / 32 * 32, 32, kMaxThreads / 2);
  launch_kernel(launch, "advance", args.loop ? advance_kernel<true> : advance_kernel<false>,
                dim3(1), dim3(static_cast<unsigned>(2 * half)), 0, args);
}

}  // namespace pianola::cuda
