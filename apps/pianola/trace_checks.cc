#include "trace_checks.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>

namespace pianola::cli {
namespace {

using Result = ModelCheck::Result;

bool same_bits(float a, float b) {
  return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
}

// "" when they are equal; else the first difference.
std::string first_difference(const Trace& got, const Trace& want) {
  for (std::size_t i = 0; i < std::min(got.tokens.size(), want.tokens.size()); ++i) {
    if (got.tokens[i] != want.tokens[i]) {
      return fmt::format("token {} is {}, not {}", i, got.tokens[i], want.tokens[i]);
    }
    if (!same_bits(got.logprobs[i], want.logprobs[i])) {
      return fmt::format("log-probability {} is {:.9g}, not {:.9g}", i, got.logprobs[i],
                         want.logprobs[i]);
    }
  }
  if (got.tokens.size() == want.tokens.size()) return "";
  return fmt::format("{} tokens, not {}", got.tokens.size(), want.tokens.size());
}

}  // namespace

ModelCheck compare_bits(std::string name, std::span<const Trace> got, std::span<const Trace> want) {
  std::size_t tokens = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const std::string difference = first_difference(got[i], want[i]);
    if (!difference.empty()) {
      return {std::move(name), Result::kFailed, fmt::format("row {}: {}", i, difference), {}, {}};
    }
    tokens += got[i].tokens.size();
  }
  return {std::move(name),
          Result::kPassed,
          fmt::format("{} tokens and their log-probabilities, bit for bit", tokens),
          {},
          {}};
}

ModelCheck compare_within(std::string name, std::span<const float> got, std::span<const float> want,
                          double bar) {
  double largest = 0;
  double squares = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double difference = std::abs(static_cast<double>(got[i]) - want[i]);
    if (!(difference <= largest)) largest = difference;  // NaN stays
    squares += difference * difference;
  }
  const double rms = std::sqrt(squares / static_cast<double>(std::max(got.size(), std::size_t{1})));
  const bool good = got.size() == want.size() && largest <= bar;
  return {std::move(name), good ? Result::kPassed : Result::kFailed,
          fmt::format("{} log-probabilities, root mean square {:.3g}", got.size(), rms), largest,
          bar};
}

double bar_of(std::string_view backend, const std::string& weight_types) {
  if (backend == "reference") return 0.002;
  const bool floats = weight_types == "f32" || weight_types == "f16";
  if (backend == "cuda" || floats) return 0.01;
  return weight_types == "bf16" ? 0.25 : 0.5;
}

double chunk_bar(std::string_view backend) { return backend == "cuda" ? 0.25 : 0.01; }

}  // namespace pianola::cli
