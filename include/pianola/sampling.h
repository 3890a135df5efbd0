// How the next token is chosen from the model's distribution.
//
// Order, as transformers: logit bias, repetition, presence and frequency penalties over the last
// `penalty_window` tokens, temperature, top-k, top-p, min-p; then one draw. Random numbers come
// from a counter keyed by (seed, choice, position), so a sequence draws the same numbers alone or
// in a batch, and after a rollback.
#pragma once

#include <cstdint>
#include <vector>

namespace pianola {

struct TokenBias {
  std::int32_t token = 0;
  float bias = 0;  // added to the logit; -infinity forbids the token
};

struct SamplingParams {
  float temperature = 0;        // 0: greedy; at most 100
  int top_k = 0;                // keep the k most likely; 0: off
  float top_p = 1;              // keep the fewest most likely whose probabilities sum to p; 1: off
  float min_p = 0;              // keep tokens at least this likely relative to the best; 0: off
  float repeat_penalty = 1;     // divides positive logits and multiplies negative ones; 1: off
  float presence_penalty = 0;   // subtracted once from a token that occurred; -2 to 2
  float frequency_penalty = 0;  // subtracted for each occurrence; -2 to 2
  int penalty_window = 64;      // last tokens that count; -1: all, 0: none
  std::uint64_t seed = 0;
  std::uint32_t choice = 0;           // tells several answers to one prompt apart
  bool logprobs = false;              // report the log-probability of each chosen token
  std::vector<TokenBias> logit_bias;  // at most 1,024

  bool operator==(const SamplingParams&) const = default;
};
inline bool operator==(const TokenBias& a, const TokenBias& b) {
  return a.token == b.token && a.bias == b.bias;
}

// Throws InvalidArgument naming the field that is out of range. Token ids are checked by the
// engine.
void validate(const SamplingParams& params);

}  // namespace pianola
