#include "pianola/sampling.h"

#include <cmath>

#include "base/check.h"
#include "plan/step_state.h"

namespace pianola {

void validate(const SamplingParams& p) {
  const auto check = [](bool ok, const char* field, auto found, const char* range) {
    if (!ok) {
      fail(ErrorCode::kInvalidArgument, "sampling: {} is {}, expected {}", field, found, range);
    }
  };
  check(p.temperature >= 0 && p.temperature <= 100, "temperature", p.temperature, "0 to 100");
  check(p.top_k >= 0, "top_k", p.top_k, "0 (off) or more");
  check(p.top_p > 0 && p.top_p <= 1, "top_p", p.top_p, "more than 0 and at most 1");
  check(p.min_p >= 0 && p.min_p <= 1, "min_p", p.min_p, "0 to 1");
  check(p.repeat_penalty > 0 && p.repeat_penalty <= 100, "repeat_penalty", p.repeat_penalty,
        "more than 0 and at most 100");
  check(std::abs(p.presence_penalty) <= 2, "presence_penalty", p.presence_penalty, "-2 to 2");
  check(std::abs(p.frequency_penalty) <= 2, "frequency_penalty", p.frequency_penalty, "-2 to 2");
  check(p.penalty_window >= -1, "penalty_window", p.penalty_window, "-1 (all), 0 (none) or more");
  check(p.logit_bias.size() <= kMaxLogitBias, "logit_bias", p.logit_bias.size(),
        "at most 1024 entries");
  for (const TokenBias& bias : p.logit_bias) {
    check(!std::isnan(bias.bias) && bias.bias < INFINITY, "logit_bias", bias.bias,
          "a finite value or -inf");
  }
}

}  // namespace pianola
