// Choosing tokens: what backends/reference/sample.cc does with one row of logits at a time, by one
// cluster of 16 CTAs a row. This file is the work of one CTA on its slice; sample.cu launches it.
// Each CTA keeps its slice of the row in shared memory; the CTAs tell
// each other partial results through distributed shared memory, so that after an exchange all of
// them know the same and go the same way.
//
//   greedy           one pass and one exchange
//   top-k, top-p     a histogram of distances to the best logit gives a bound that few candidates
//                    pass; CTA 0 sorts those and finishes alone
//   many candidates  bisection for the logit of the worst candidate, and a draw by the cluster
//
// Sums of probabilities are in double and in an order that depends on the vocabulary alone.
#pragma once

#include <cooperative_groups.h>

#include <climits>
#include <cstdint>

#include "backends/cuda/kernels/device.cuh"
#include "backends/cuda/kernels/sample_math.cuh"
#include "plan/step_state.h"

namespace pianola::cuda::sampling {

namespace cg = cooperative_groups;

inline constexpr int kCluster = 16;
inline constexpr int kSegments = kCluster * kWarps;  // pieces of a row, each walked by one warp
inline constexpr int kHeldPieces = 4;                // of kWide logits, that a thread loads at once
inline constexpr int kBins = 1024;  // of the histogram; the last one takes all the rest
inline constexpr float kBinsPerUnit = 32;
inline constexpr double kBinSlack =
    1e-5;                                 // more than rounding can move a logit across a bin's edge
inline constexpr int kCandidates = 2048;  // that CTA 0 can finish alone
inline constexpr int kBinsPerCta = kBins / kCluster;
inline constexpr int kThreadsPerBin = kThreads / kBinsPerCta;
static_assert(kBins == 2 * kThreads && kSegments <= kThreads && kThreadsPerBin <= 32 &&
              kCluster % kThreadsPerBin == 0 && kWarps <= 32 && kCluster <= 32);

// What a CTA tells the others about its slice.
struct PartBest {
  Ranked best;       // after bias and penalties
  double sum;        // of exp(raw logit - max), when the row wants it
  float max;         // of the raw logits
  std::int32_t bad;  // a raw logit is NaN or +inf
};

// How one row chooses.
struct Choice {
  SamplingState p;
  std::int32_t history_length = 0;
  std::int32_t bias_count = 0;
  bool penalizes = false;
  bool cuts_k = false;
  bool cuts_p = false;
};

struct Shared {
  // Written by other CTAs.
  PartBest part[kCluster];
  double exchange[2][kCluster];  // used in turns: an exchange later, the last but one was read
  double segment[kSegments];
  int walked;      // id that a walk found
  int candidates;  // in CTA 0
  // This CTA's own.
  alignas(8) unsigned char choice_bytes[sizeof(Choice)];  // a Choice, without its constructor
  double prefix[kSegments];
  double warp_sum[kWarps];
  Ranked warp_best[kWarps];
  int found;
  int last;
  int low_bin;
  int high_bin;

  __device__ Choice& choice() { return *reinterpret_cast<Choice*>(choice_bytes); }
};

// A logit row as one CTA of its cluster sees it.
class Slice {
 public:
  __device__ Slice(Shared& shared, int vocab, int width)
      : s_(shared),
        rank_(static_cast<int>(cg::this_cluster().block_rank())),
        width_(width),
        base_(rank_ * width),
        count_(max(0, min(width, vocab - base_))) {}

  __device__ int rank() const { return rank_; }

  template <int kWide>
  __device__ void issue(const float* row, float (&held)[kHeldPieces * kWide]) const;
  template <int kWide>
  __device__ PartBest keep(const float* row, const float (&held)[kHeldPieces * kWide],
                           bool sums) const;
  __device__ void apply_bias(const RowState* row, int bias_count) const;
  __device__ void apply_penalties(const SamplingState& p, const TokenId* history, int length) const;
  __device__ Ranked best() const;
  __device__ Ranked tell(const PartBest& part, bool& bad) const;
  __device__ double log_sum(float& max) const;
  __device__ int draw(float max);

  // [width] of this CTA
  __device__ float* logits() const {
    extern __shared__ __align__(16) unsigned char dynamic[];
    return reinterpret_cast<float*>(dynamic);
  }

 private:
  // The least key that min-p keeps, and never that of -inf.
  __device__ std::uint32_t floor_key() const {
    const float min_p = s_.choice().p.min_p;
    const double floor = static_cast<double>(max_) + log(static_cast<double>(min_p));
    const std::uint32_t lowest = key_of(-INFINITY) + 1;
    return min_p > 0 ? max(lowest, key_of(__double2float_ru(floor))) : lowest;
  }
  // Counts of the penalties, then histograms and candidates.
  __device__ unsigned char* area() const {
    return reinterpret_cast<unsigned char*>(logits() + width_);
  }
  template <typename T>
  __device__ T* peer(T* p, int rank) const {
    return cg::this_cluster().map_shared_rank(p, rank);
  }
  template <typename F>
  __device__ void each(F&& f) const {
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < count_; i += kThreads) f(i);
  }
  __device__ std::uint32_t* histogram() const { return reinterpret_cast<std::uint32_t*>(area()); }
  __device__ std::uint32_t* row_histogram() const { return histogram() + kBins; }
  __device__ Ranked* candidates() const {
    return reinterpret_cast<Ranked*>(area() + 2 * kBins * sizeof(std::uint32_t));
  }
  __device__ double mass(float logit) const {
    return exp_of(static_cast<double>(logit) - static_cast<double>(max_));
  }
  __device__ int bin(float logit) const {
    return min(kBins - 1, __float2int_rz(__fmul_rn(__fsub_rn(max_, logit), kBinsPerUnit)));
  }

  __device__ double row_sum(double v);
  __device__ double count_bins();
  __device__ int find_bins(double total);
  __device__ std::uint32_t bin_edge(int b) const;
  __device__ void gather(int high_bin) const;
  __device__ int finish(double total, int count);
  template <bool kMass>
  __device__ double weigh(std::uint32_t low, std::uint32_t high, const Cut& within);
  template <bool kMass>
  __device__ Cut cut_at(double target, std::uint32_t low, std::uint32_t high, const Cut& within);
  template <typename Weight, typename Threshold>
  __device__ int walk(Weight&& weight, Threshold&& threshold);

  Shared& s_;
  int rank_;
  int width_;
  int base_;  // id of logit[0]
  int count_;
  int turn_ = 0;
  float max_ = 0;  // best logit after temperature
};

// --- from the logits to the best one ---

template <int kWide>
__device__ __forceinline__ void Slice::issue(const float* row,
                                             float (&held)[kHeldPieces * kWide]) const {
#pragma unroll
  for (int j = 0; j < kHeldPieces * kWide; j += kWide) {
    const int at = j * kThreads + static_cast<int>(threadIdx.x) * kWide;
    if (at >= count_) continue;
    if constexpr (kWide == 4) {
      const float4 v = load_activation4(row + base_ + at);
      held[j] = v.x;
      held[j + 1] = v.y;
      held[j + 2] = v.z;
      held[j + 3] = v.w;
    } else {
      held[j] = load_activation(row + base_ + at);
    }
  }
}

// Puts the slice into shared memory. `held` is what issue() loaded; the rest is loaded here.
template <int kWide>
__device__ __forceinline__ PartBest Slice::keep(const float* row,
                                                const float (&held)[kHeldPieces * kWide],
                                                bool sums) const {
  float most = -INFINITY;
  int id = INT_MAX;
  int bad = 0;
  const auto take = [&](int at, const float* v) {
#pragma unroll
    for (int e = 0; e < kWide; ++e) {
      bad |= !(v[e] < INFINITY);
      if (v[e] > most) {  // ids ascend
        most = v[e];
        id = base_ + at + e;
      }
    }
    if constexpr (kWide == 4) {
      *reinterpret_cast<float4*>(logits() + at) = make_float4(v[0], v[1], v[2], v[3]);
    } else {
      logits()[at] = v[0];
    }
  };
  const int first = static_cast<int>(threadIdx.x) * kWide;
#pragma unroll
  for (int j = 0; j < kHeldPieces * kWide; j += kWide) {
    if (j * kThreads + first < count_) take(j * kThreads + first, held + j);
  }
  for (int at = kHeldPieces * kWide * kThreads + first; at < count_; at += kThreads * kWide) {
    float v[kWide];
#pragma unroll
    for (int e = 0; e < kWide; ++e) v[e] = load_activation(row + base_ + at + e);
    take(at, v);
  }
  PartBest part;
  part.best = block_best(ranked(most, id), s_.warp_best, bad);
  part.bad = bad;
  part.max = logit_of(part.best);
  if (sums) {
    double sum = 0;
    if (part.max > -INFINITY) each([&](int i) { sum += expf(logits()[i] - part.max); });
    block_scan(sum, s_.warp_sum, part.sum);
  }
  return part;
}

// Entries of one token are added in their order, by the thread of the first of them.
__device__ void Slice::apply_bias(const RowState* row, int bias_count) const {
  auto* list = reinterpret_cast<int2*>(area());  // as LogitBias
  const int tid = static_cast<int>(threadIdx.x);
  for (int i = tid; i < bias_count; i += kThreads) {
    list[i] = __ldcg(reinterpret_cast<const int2*>(row->bias + i));
  }
  __syncthreads();
  for (int i = tid; i < bias_count; i += kThreads) {
    const int token = list[i].x;
    const int at = token - base_;
    if (at < 0 || at >= count_) continue;
    bool first = true;
    for (int j = 0; j < i; ++j) first &= list[j].x != token;
    if (!first) continue;
    float v = logits()[at];
    for (int j = i; j < bias_count; ++j) {
      if (list[j].x == token) v = __fadd_rn(v, __int_as_float(list[j].y));
    }
    logits()[at] = v;
  }
  __syncthreads();
}

// Each CTA counts the tokens of the window that are in its slice. No product and sum are fused: the
// reference rounds each.
__device__ void Slice::apply_penalties(const SamplingState& p, const TokenId* history,
                                       int length) const {
  auto* seen = reinterpret_cast<std::uint32_t*>(area());  // [count]
  each([&](int i) { seen[i] = 0; });
  __syncthreads();
  const int first = p.penalty_window > 0 ? max(0, length - p.penalty_window) : 0;
  for (int i = first + static_cast<int>(threadIdx.x); i < length; i += kThreads) {
    const int at = __ldcg(history + i) - base_;
    if (at >= 0 && at < count_) atomicAdd(seen + at, 1U);
  }
  __syncthreads();
  each([&](int i) {
    if (seen[i] == 0) return;
    float v = logits()[i];
    v = v > 0 ? __fdiv_rn(v, p.repeat_penalty) : __fmul_rn(v, p.repeat_penalty);
    const float by_count = __fmul_rn(p.frequency_penalty, static_cast<float>(seen[i]));
    logits()[i] = __fsub_rn(v, __fadd_rn(p.presence_penalty, by_count));
  });
  __syncthreads();
}

// Of the adjusted slice.
__device__ Ranked Slice::best() const {
  Ranked most = ranked(-INFINITY, INT_MAX);
  each([&](int i) {
    const Ranked r = ranked(logits()[i], base_ + i);
    most = r > most ? r : most;
  });
  int none = 0;
  return block_best(most, s_.warp_best, none);
}

// Exchanges what each CTA has found: the best of the row.
__device__ __forceinline__ Ranked Slice::tell(const PartBest& part, bool& bad) const {
  if (threadIdx.x < kCluster) peer(s_.part, static_cast<int>(threadIdx.x))[rank_] = part;
  cg::this_cluster().sync();
  const PartBest& one = s_.part[threadIdx.x % kCluster];
  bad = __any_sync(kAllLanes, one.bad);
  return warp_best(one.best);
}

// log of the sum of exp(raw logit - max) over the row, by one warp.
__device__ double Slice::log_sum(float& max) const {
  const PartBest& one = s_.part[threadIdx.x % kCluster];
  max = warp_max(one.max);
  double sum = 0;
  if (one.sum > 0) sum = one.sum * exp_of(static_cast<double>(one.max) - static_cast<double>(max));
  return log(group_sum<kCluster>(sum));
}

// --- sums and searches over the row ---

// Sum over all threads of the cluster, the same in each.
__device__ double Slice::row_sum(double v) {
  v = group_sum<32>(v);
  if (threadIdx.x % 32 == 0) s_.warp_sum[threadIdx.x / 32] = v;
  __syncthreads();
  double* slots = s_.exchange[turn_];
  const int lane = static_cast<int>(threadIdx.x % 32);
  if (threadIdx.x < 32) {
    const double sum = group_sum<kWarps>(s_.warp_sum[lane % kWarps]);
    if (lane < kCluster) peer(slots, lane)[rank_] = sum;
  }
  cg::this_cluster().sync();
  const double sum = group_sum<kCluster>(slots[lane % kCluster]);
  turn_ ^= 1;
  return sum;
}

// Candidates with keys in [low, high): their number or their probability times the best's.
template <bool kMass>
__device__ double Slice::weigh(std::uint32_t low, std::uint32_t high, const Cut& within) {
  double sum = 0;
  each([&](int i) {
    const std::uint32_t key = key_of(logits()[i]);
    if (key < low || key >= high || !within.keeps(key, base_ + i)) return;
    sum += kMass ? mass(logits()[i]) : 1.0;
  });
  return row_sum(sum);
}

// The fewest of the best candidates within `within` that weigh `target`. The key of the worst of
// them is in [low, high).
template <bool kMass>
__device__ Cut Slice::cut_at(double target, std::uint32_t low, std::uint32_t high,
                             const Cut& within) {
  double above = weigh<kMass>(high, key_of(max_) + 1, within);
  while (high - low > 1) {
    const std::uint32_t middle = low + (high - low) / 2;
    const double weight = above + weigh<kMass>(middle, high, within);
    if (weight >= target) {
      low = middle;
    } else {
      high = middle;
      above = weight;
    }
  }
  // Equals at the border: the lowest ids.
  const double equals = weigh<false>(low, low + 1, within);
  double needed = target - above;
  if constexpr (kMass) {
    const double one = mass(of_key(low));
    needed = one > 0 ? fmax(1.0, ceil(needed / one)) : equals;
    if (needed > 1 && above + (needed - 1) * one >= target) needed -= 1;
    if (above + needed * one < target) needed += 1;
  }
  Cut cut{low, within.key == low ? within.id : INT_MAX};
  if (needed < equals) {
    const auto is_equal = [&](int i) {
      return key_of(logits()[i]) == low && within.keeps(low, base_ + i) ? 1.0 : 0.0;
    };
    cut.id = walk(is_equal, [&](double) { return needed - 0.5; });
  }
  return cut;
}

// The first id at which the sum of weights, in order of ids, is more than threshold(total); the
// last with a weight if there is none; -1 when all weights are 0.
template <typename Weight, typename Threshold>
__device__ int Slice::walk(Weight&& weight, Threshold&& threshold) {
  const int tid = static_cast<int>(threadIdx.x);
  const int lane = tid % 32;
  const int warp = tid / 32;
  const int length = (width_ + 32 * kWarps - 1) / (32 * kWarps) * 32;  // of a segment
  const int begin = warp * length;
  const int end = min(count_, begin + length);
  __syncthreads();  // a walk before this one has been read
  if (tid == 0) {
    s_.found = kSegments;
    s_.last = -1;
    s_.walked = -1;
  }
  double sum = 0;
#pragma unroll 1
  for (int i = begin + lane; i < end; i += 32) sum += weight(i);
  sum = group_sum<32>(sum);
  if (lane < kCluster) peer(s_.segment, lane)[rank_ * kWarps + warp] = sum;
  cg::this_cluster().sync();

  const double own = tid < kSegments ? s_.segment[tid] : 0;
  double total;
  const double before = block_scan(own, s_.warp_sum, total);
  const double limit = threshold(total);
  if (own > 0) {
    s_.prefix[tid] = before;
    if (before + own > limit) atomicMin(&s_.found, tid);
    atomicMax(&s_.last, tid);
  }
  __syncthreads();
  const int segment = s_.found < kSegments ? s_.found : s_.last;
  if (segment == rank_ * kWarps + warp) {
    double running = s_.prefix[segment];
    int answer = begin;
    for (int first = begin; first < end; first += 32) {
      const double w = first + lane < end ? weight(first + lane) : 0;
      const double reached = running + warp_scan(w);
      const unsigned passes = __ballot_sync(kAllLanes, w > 0 && reached > limit);
      const unsigned weighs = __ballot_sync(kAllLanes, w > 0);
      if (passes) {
        answer = first + __ffs(static_cast<int>(passes)) - 1;
        break;
      }
      if (weighs) answer = first + 31 - __clz(static_cast<int>(weighs));
      running = __shfl_sync(kAllLanes, reached, 31);
    }
    if (lane < kCluster) *peer(&s_.walked, lane) = base_ + answer;
  }
  cg::this_cluster().sync();
  return s_.walked;
}

// --- top-k and top-p ---

// The histogram of the row in every CTA. Returns the row's probability mass when top-p needs it.
__device__ double Slice::count_bins() {
  const Choice& c = s_.choice();
  const int tid = static_cast<int>(threadIdx.x);
  for (int b = tid; b < kBins; b += kThreads) histogram()[b] = 0;
  if (tid == 0) {
    s_.low_bin = kBins - 1;
    s_.high_bin = kBins - 1;
  }
  __syncthreads();
  double total = 0;
  std::uint32_t rest = 0;  // of the last bin, where most logits may be: one addition a warp
  each([&](int i) {
    const float logit = logits()[i];
    if (!(logit > -INFINITY)) return;  // never kept
    const int b = bin(logit);
    if (b < kBins - 1) {
      atomicAdd(histogram() + b, 1U);
    } else {
      ++rest;
    }
    if (!c.cuts_k) total += mass(logit);
  });
  rest = __reduce_add_sync(kAllLanes, rest);
  if (tid % 32 == 0) atomicAdd(histogram() + kBins - 1, rest);
  if (c.cuts_k) {
    cg::this_cluster().sync();
  } else {
    total = row_sum(total);
  }
  // Each CTA adds up its share of the bins, a few threads a bin, and tells the others.
  constexpr int kPeers = kCluster / kThreadsPerBin;
  const int b = rank_ * kBinsPerCta + tid / kThreadsPerBin;
  const int first = tid % kThreadsPerBin * kPeers;
  std::uint32_t sum = 0;
#pragma unroll
  for (int i = 0; i < kPeers; ++i) sum += peer(histogram(), first + i)[b];
#pragma unroll
  for (int offset = 1; offset < kThreadsPerBin; offset <<= 1) {
    sum += __shfl_xor_sync(kAllLanes, sum, offset);
  }
#pragma unroll
  for (int i = 0; i < kPeers; ++i) peer(row_histogram(), first + i)[b] = sum;
  cg::this_cluster().sync();
  return total;
}

// Finds the bins in which the worst candidate can be, and returns how many logits are in high_bin
// or better ones. The number of logits in a bin bounds their probability from both sides.
__device__ int Slice::find_bins(double total) {
  const Choice& c = s_.choice();
  const int tid = static_cast<int>(threadIdx.x);
  std::uint32_t number[2];
  double unused;
  double before;
#pragma unroll
  for (int i = 0; i < 2; ++i) number[i] = row_histogram()[2 * tid + i];
  before = block_scan(static_cast<double>(number[0] + number[1]), s_.warp_sum, unused);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (c.cuts_k && before < c.p.top_k && before + number[i] >= c.p.top_k) {
      s_.low_bin = 2 * tid + i;
      s_.high_bin = 2 * tid + i;
    }
    before += number[i];
    histogram()[2 * tid + i] = static_cast<std::uint32_t>(before);
  }
  if (!c.cuts_k) {
    const double target = static_cast<double>(c.p.top_p) * total;
    double least[2];
    double most[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int b = 2 * tid + i;
      least[i] = b == kBins - 1 ? 0
                                : number[i] * exp_of(-(b + 1) / static_cast<double>(kBinsPerUnit)) *
                                      (1 - kBinSlack);
      most[i] = number[i] * exp_of(-b / static_cast<double>(kBinsPerUnit)) * (1 + kBinSlack);
    }
    double low = block_scan(most[0] + most[1], s_.warp_sum, unused);
    double high = block_scan(least[0] + least[1], s_.warp_sum, unused);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      low += most[i];
      high += least[i];
      if (low >= target) atomicMin(&s_.low_bin, 2 * tid + i);
      if (high >= target) atomicMin(&s_.high_bin, 2 * tid + i);
    }
  }
  __syncthreads();
  return static_cast<int>(histogram()[s_.high_bin]);
}

// The least key in bins up to b; the key above the best when b is -1.
__device__ std::uint32_t Slice::bin_edge(int b) const {
  std::uint32_t low = key_of(-INFINITY);
  std::uint32_t high = key_of(max_) + 1;
  while (low < high) {
    const std::uint32_t middle = low + (high - low) / 2;
    if (bin(of_key(middle)) <= b) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// Brings the logits in bins up to high_bin to CTA 0, in any order: they are sorted there.
__device__ void Slice::gather(int high_bin) const {
  int* count = peer(&s_.candidates, 0);
  Ranked* list = peer(candidates(), 0);
  const int lane = static_cast<int>(threadIdx.x % 32);
  for (int first = static_cast<int>(threadIdx.x) - lane; first < count_; first += kThreads) {
    const int i = first + lane;
    const bool takes = i < count_ && logits()[i] > -INFINITY && bin(logits()[i]) <= high_bin;
    const unsigned all = __ballot_sync(kAllLanes, takes);
    if (all == 0) continue;
    int place = 0;
    if (lane == 0) place = atomicAdd(count, __popc(all));
    place = __shfl_sync(kAllLanes, place, 0) + __popc(all & ((1U << lane) - 1));
    if (takes) list[place] = ranked(logits()[i], base_ + i);
  }
}

// CTA 0 alone: `count` candidates hold all that top-k and top-p keep.
__device__ int Slice::finish(double total, int count) {
  const Choice& c = s_.choice();
  const int tid = static_cast<int>(threadIdx.x);
  Ranked* list = candidates();
  const auto pad = [&](int from) {
    int size = 2;
    while (size < from) size *= 2;
    for (int i = from + tid; i < size; i += kThreads) list[i] = 0;
    return size;
  };
  int size = pad(count);
  int kept = c.cuts_k ? min(count, c.p.top_k) : count;
  if (tid == 0) {
    s_.last = kept;
    s_.found = INT_MAX;
  }
  __syncthreads();
  sort_down(list, size);

  // A thread has a few neighbours. What it keeps ends where the first of its conditions does.
  constexpr int kMost = kCandidates / kThreads;
  const int each = (size + kThreads - 1) / kThreads;
  double masses[kMost];
  double sum = 0;
  const auto weigh_own = [&](int shift) {  // which brings a key to the upper half
    sum = 0;
#pragma unroll
    for (int e = 0; e < kMost; ++e) {
      const int i = tid * each + e;
      masses[e] = e < each && i < kept ? mass(logit_of(list[i] << shift)) : 0;
      sum += masses[e];
    }
  };
  weigh_own(0);
  double all;
  double reached = block_scan(sum, s_.warp_sum, all);
  const std::uint32_t floor = floor_key();
  const double target = static_cast<double>(c.p.top_p) * (c.cuts_k ? all : total);
#pragma unroll
  for (int e = 0; e < kMost; ++e) {
    const int i = tid * each + e;
    if (e >= each || i >= kept) break;
    reached += masses[e];
    if (c.cuts_p && reached >= target) atomicMin(&s_.last, i + 1);
    if (static_cast<std::uint32_t>(list[i] >> 32) < floor) atomicMin(&s_.last, i);
  }
  __syncthreads();
  kept = s_.last;
  if (kept == 0) return -1;

  // In order of ids.
  for (int i = tid; i < kept; i += kThreads) list[i] = list[i] << 32 | list[i] >> 32;
  size = pad(kept);
  __syncthreads();
  sort_down(list, size);
  weigh_own(32);
  reached = block_scan(sum, s_.warp_sum, all);
  const double limit =
      __dmul_rn(all, uniform(c.p.seed, c.p.choice, static_cast<std::uint32_t>(c.history_length)));
#pragma unroll
  for (int e = 0; e < kMost; ++e) {
    const int i = tid * each + e;
    if (e >= each || i >= kept) break;
    reached += masses[e];
    if (reached > limit) atomicMin(&s_.found, i);
  }
  __syncthreads();
  return id_of(list[min(s_.found, kept - 1)] >> 32);
}

// A draw among the adjusted logits; `max` is the best after temperature. -1 when nothing is kept.
// Only CTA 0 has to know the answer.
__device__ int Slice::draw(float max) {
  const Choice& c = s_.choice();
  max_ = max;
  each([&](int i) { logits()[i] = __fdiv_rn(logits()[i], c.p.temperature); });
  Cut cut;
  if (c.cuts_k || c.cuts_p) {
    double total = count_bins();
    const int count = find_bins(total);
    const int low_bin = s_.low_bin;
    const int high_bin = s_.high_bin;
    if (count <= kCandidates) {
      gather(high_bin);
      cg::this_cluster().sync();
      return rank_ == 0 ? finish(total, count) : -1;
    }
    std::uint32_t low = bin_edge(high_bin);
    std::uint32_t high = bin_edge(low_bin - 1);
    if (c.cuts_k) {
      cut = cut_at<false>(c.p.top_k, low, high, Cut{});
      low = cut.key;
      high = key_of(max_) + 1;
      if (c.cuts_p) total = weigh<true>(low, high, cut);
    }
    if (c.cuts_p) {
      cut = cut_at<true>(static_cast<double>(c.p.top_p) * total, low, high, cut);
    }
  }
  const std::uint32_t floor = floor_key();
  if (floor > cut.key) cut = {floor, INT_MAX};
  const auto weight = [&](int i) {
    const float logit = logits()[i];
    return cut.keeps(key_of(logit), base_ + i) ? mass(logit) : 0.0;
  };
  return walk(weight, [&](double total) {
    return __dmul_rn(total,
                     uniform(c.p.seed, c.p.choice, static_cast<std::uint32_t>(c.history_length)));
  });
}

}  // namespace pianola::cuda::sampling
