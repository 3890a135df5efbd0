#include <algorithm>
#include <cmath>
#include <limits>

#include "backends/reference/ops.h"

namespace pianola::reference {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// The working memory of one draw, carved from the scratch.
struct Candidates {
  std::span<float> logit;         // [vocab] adjusted
  std::span<std::int32_t> count;  // [vocab] occurrences in the penalty window
  std::span<TokenId> order;       // [vocab] ids, the best first as far as they were sorted
};

Candidates carve(std::byte* scratch, std::size_t vocab) {
  auto* logit = reinterpret_cast<float*>(scratch);
  auto* count = reinterpret_cast<std::int32_t*>(logit + vocab);
  auto* order = reinterpret_cast<TokenId*>(count + vocab);
  return {{logit, vocab}, {count, vocab}, {order, vocab}};
}

void apply_penalties(const SamplingState& p, std::span<const TokenId> history, Candidates& c) {
  const bool active = p.repeat_penalty != 1 || p.presence_penalty != 0 || p.frequency_penalty != 0;
  if (!active || p.penalty_window == 0) return;
  if (p.penalty_window > 0) {
    history = history.last(std::min(history.size(), static_cast<std::size_t>(p.penalty_window)));
  }
  for (const TokenId id : history) c.count[static_cast<std::size_t>(id)] = 0;
  for (const TokenId id : history) ++c.count[static_cast<std::size_t>(id)];
  for (const TokenId id : history) {
    std::int32_t& count = c.count[static_cast<std::size_t>(id)];
    if (count == 0) continue;  // adjusted already
    float& logit = c.logit[static_cast<std::size_t>(id)];
    logit = logit > 0 ? logit / p.repeat_penalty : logit * p.repeat_penalty;
    logit -= p.presence_penalty + p.frequency_penalty * static_cast<float>(count);
    count = 0;
  }
}

// Sorts the best candidates to the front of c.order, more at a time, until `enough` of the front
// says so or all are sorted. Returns how many are sorted.
template <typename Enough>
std::size_t sort_until(Candidates& c, Enough&& enough) {
  const std::size_t vocab = c.order.size();
  for (std::size_t i = 0; i < vocab; ++i) c.order[i] = static_cast<TokenId>(i);
  const auto better = [&c](TokenId a, TokenId b) {
    const float la = c.logit[static_cast<std::size_t>(a)];
    const float lb = c.logit[static_cast<std::size_t>(b)];
    return la != lb ? la > lb : a < b;
  };
  std::size_t sorted = 0;
  std::size_t step = 64;
  while (sorted < vocab) {
    const std::size_t next = std::min(vocab, sorted + step);
    const auto begin = c.order.begin();
    if (next < vocab) {
      std::nth_element(begin + static_cast<std::ptrdiff_t>(sorted),
                       begin + static_cast<std::ptrdiff_t>(next), c.order.end(), better);
    }
    std::sort(begin + static_cast<std::ptrdiff_t>(sorted),
              begin + static_cast<std::ptrdiff_t>(next), better);
    sorted = next;
    step *= 8;
    if (enough(c.order.first(sorted))) break;
  }
  return sorted;
}

// How many of the best candidates top-k and top-p keep; vocab when neither cuts.
std::size_t count_kept(const SamplingState& p, float max, Candidates& c) {
  const std::size_t vocab = c.logit.size();
  const bool use_k = p.top_k > 0 && static_cast<std::size_t>(p.top_k) < vocab;
  const bool use_p = p.top_p < 1;
  if (!use_k && !use_p) return vocab;
  const std::size_t k = use_k ? static_cast<std::size_t>(p.top_k) : vocab;

  const auto mass = [&](TokenId id) {
    return std::exp(static_cast<double>(c.logit[static_cast<std::size_t>(id)]) - max);
  };
  if (!use_p) {
    sort_until(c, [k](std::span<TokenId> front) { return front.size() >= k; });
    return k;
  }
  double total = 0;
  if (use_k) {
    sort_until(c, [k](std::span<TokenId> front) { return front.size() >= k; });
    for (const TokenId id : c.order.first(k)) total += mass(id);
  } else {
    for (std::size_t i = 0; i < vocab; ++i) total += mass(static_cast<TokenId>(i));
  }
  // The fewest of the best whose mass reaches top_p; at least one.
  std::size_t kept = 0;
  const auto enough = [&](std::span<TokenId> front) {
    double sum = 0;
    for (std::size_t i = 0; i < std::min(front.size(), k); ++i) {
      sum += mass(front[i]);
      if (sum >= p.top_p * total) {
        kept = i + 1;
        return true;
      }
    }
    kept = std::min(front.size(), k);
    return front.size() >= k;
  };
  if (use_k) {
    enough(c.order.first(k));
  } else {
    sort_until(c, enough);
  }
  return kept;
}

}  // namespace

std::size_t sample_scratch_bytes(std::int64_t vocab) {
  return static_cast<std::size_t>(vocab) * (sizeof(float) + sizeof(std::int32_t) + sizeof(TokenId));
}

TokenId sample_token(std::span<const float> logits, const RowState& row,
                     std::span<const TokenId> history, std::byte* scratch) {
  for (const float logit : logits) {
    if (std::isnan(logit) || logit == std::numeric_limits<float>::infinity()) return -1;
  }
  const SamplingState& p = row.sampling;
  Candidates c = carve(scratch, logits.size());
  std::copy(logits.begin(), logits.end(), c.logit.begin());
  for (std::int32_t i = 0; i < row.bias_count; ++i) {
    c.logit[static_cast<std::size_t>(row.bias[i].token)] += row.bias[i].bias;
  }
  apply_penalties(p, history, c);

  const auto best = std::max_element(c.logit.begin(), c.logit.end());  // the first of equals
  if (!(*best > kMinusInfinity) || std::isinf(*best)) return -1;
  if (!(p.temperature > 0)) return static_cast<TokenId>(best - c.logit.begin());
  for (float& logit : c.logit) logit /= p.temperature;
  const float max = *best;
  if (std::isinf(max)) return static_cast<TokenId>(best - c.logit.begin());

  // The worst candidate that is kept decides for the others, so no set has to be stored.
  const std::size_t kept = count_kept(p, max, c);
  float worst = kMinusInfinity;
  TokenId worst_id = std::numeric_limits<TokenId>::max();
  if (kept < logits.size()) {
    worst_id = c.order[kept - 1];
    worst = c.logit[static_cast<std::size_t>(worst_id)];
  }
  const double floor = p.min_p > 0 ? max + std::log(static_cast<double>(p.min_p))
                                   : -std::numeric_limits<double>::infinity();
  const auto is_kept = [&](std::size_t i) {
    const float logit = c.logit[i];
    return logit > kMinusInfinity && logit >= floor &&
           (logit > worst || (logit == worst && static_cast<TokenId>(i) <= worst_id));
  };
  const auto mass = [&](std::size_t i) { return std::exp(static_cast<double>(c.logit[i]) - max); };
  double total = 0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (is_kept(i)) total += mass(i);
  }
  const double draw =
      total * uniform_random(p.seed, p.choice, static_cast<std::uint32_t>(row.history_length),
                             RandomPurpose::kSample);
  double sum = 0;
  auto last = static_cast<TokenId>(best - c.logit.begin());
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (!is_kept(i)) continue;
    sum += mass(i);
    last = static_cast<TokenId>(i);
    if (sum > draw) break;
  }
  return last;
}

double log_probability(std::span<const float> logits, TokenId token) {
  const float max = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit) - max);
  return static_cast<double>(logits[static_cast<std::size_t>(token)]) - max - std::log(sum);
}

void run(const SampleOp& op, const BoundPlan& bound) {
  const StepState& s = bound.state();
  const auto vocab = static_cast<std::size_t>(bound.width(op.logits));
  for (std::int32_t r = 0; r < s.counts->logit_rows; ++r) {
    const std::int32_t t = s.logit_token[r];
    if (s.position[t] < 0) continue;
    const std::int32_t row_index = s.row_of[s.lane_of[t]];
    const RowState& row = s.row[row_index];
    const std::span<const float> logits(
        bound.buffer(op.logits) + static_cast<std::size_t>(r) * vocab, vocab);
    const std::span<const TokenId> history(
        s.history + static_cast<std::int64_t>(row_index) * s.history_stride,
        static_cast<std::size_t>(row.history_length));
    s.sampled[r] = sample_token(logits, row, history, bound.scratch());
    s.logprob[r] = row.sampling.want_logprob && s.sampled[r] >= 0
                       ? static_cast<float>(log_probability(logits, s.sampled[r]))
                       : 0.0F;
  }
}

}  // namespace pianola::reference
