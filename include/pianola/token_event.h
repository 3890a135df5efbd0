// What a step reports: the tokens it produced and how their rows go on.
#pragma once

#include <cstdint>

namespace pianola {

enum class RowStatus : std::int32_t {
  kIdle = 0,       // no sequence, or nothing to compute
  kRunning = 1,    // has tokens to compute
  kStopToken = 2,  // the last token of the history is one of the row's stop tokens
  kLength = 3,     // the history has reached the row's limit
  kFailed = 4,     // NaN or +inf from the model, or no candidate left: no token was written
  kRefused = 5,    // a kernel asked to take back more than the row can: nothing was, nor computed
};

// One token that a step produced, or the failure of a row.
struct TokenEvent {
  std::int32_t row = 0;
  std::int32_t token = -1;  // -1 when status is kFailed
  float logprob = 0;        // of the model's own distribution, when SamplingParams::logprobs is set
  RowStatus status = RowStatus::kRunning;
};

}  // namespace pianola
