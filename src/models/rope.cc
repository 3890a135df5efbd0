#include "models/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/check.h"

namespace pianola {
namespace {

// base ^ (2 i / head_dim), rounded where transformers rounds: base and exponent are float32, and so
// is the power. At position 8,000 one unit in the last place of a frequency is a phase of 5e-4, so
// a table in double would not be nearer to what the model was trained with, only different.
float wavelength_power(double base, std::int64_t i, std::int64_t head_dim) {
  const float exponent = static_cast<float>(2 * i) / static_cast<float>(head_dim);
  return static_cast<float>(
      std::pow(static_cast<double>(static_cast<float>(base)), static_cast<double>(exponent)));
}

std::vector<float> default_frequencies(double base, std::int64_t head_dim) {
  std::vector<float> inv_freq(static_cast<std::size_t>(head_dim / 2));
  for (std::int64_t i = 0; i < head_dim / 2; ++i) {
    inv_freq[static_cast<std::size_t>(i)] = 1.0F / wavelength_power(base, i, head_dim);
  }
  return inv_freq;
}

// NTK: the base grows so that the longest wavelength covers `length` tokens as it covered the
// original length. Up to that length nothing changes.
double dynamic_base(const RopeConfig& rope, std::int64_t head_dim, std::int64_t max_seq_len) {
  if (head_dim <= 2) return rope.theta;  // one pair, of exponent 0: the base has no effect
  const auto original = static_cast<double>(rope.original_max_position_embeddings);
  const double length = std::max(static_cast<double>(max_seq_len), original);
  const double stretch = rope.factor * length / original - (rope.factor - 1.0);
  const auto dim = static_cast<double>(head_dim);
  return rope.theta * std::pow(stretch, dim / (dim - 2.0));
}

// Pairs below `low` turn often enough within the original length to be left alone, those above
// `high` are interpolated, a ramp lies between.
std::vector<float> yarn_frequencies(const RopeConfig& rope, std::int64_t head_dim) {
  const auto dim = static_cast<double>(head_dim);
  const auto original = static_cast<double>(rope.original_max_position_embeddings);
  const auto pair_of_rotations = [&](double rotations) {
    return dim * std::log(original / (rotations * 2.0 * std::numbers::pi)) /
           (2.0 * std::log(rope.theta));
  };
  double low = pair_of_rotations(rope.beta_fast);
  double high = pair_of_rotations(rope.beta_slow);
  if (rope.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, dim - 1.0);
  if (low == high) high += 0.001;

  std::vector<float> inv_freq(static_cast<std::size_t>(head_dim / 2));
  for (std::int64_t i = 0; i < head_dim / 2; ++i) {
    const float power = wavelength_power(rope.theta, i, head_dim);
    const float ramp = std::clamp(
        (static_cast<float>(i) - static_cast<float>(low)) / static_cast<float>(high - low), 0.0F,
        1.0F);
    const float interpolated = 1.0F / (static_cast<float>(rope.factor) * power);
    inv_freq[static_cast<std::size_t>(i)] = interpolated * ramp + (1.0F - ramp) / power;
  }
  return inv_freq;
}

// Long wavelengths are stretched by the factor, short ones kept, those between blended.
void stretch_llama3(const RopeConfig& rope, std::vector<float>& inv_freq) {
  const auto original = static_cast<double>(rope.original_max_position_embeddings);
  const double low_freq_wavelength = original / rope.low_freq_factor;
  const double high_freq_wavelength = original / rope.high_freq_factor;
  for (float& freq : inv_freq) {
    const double wavelength = 2.0 * std::numbers::pi / static_cast<double>(freq);
    if (wavelength < high_freq_wavelength) continue;
    if (wavelength > low_freq_wavelength) {
      freq /= static_cast<float>(rope.factor);
      continue;
    }
    const double keep = (original / wavelength - rope.low_freq_factor) /
                        (rope.high_freq_factor - rope.low_freq_factor);
    freq = static_cast<float>((1.0 - keep) * static_cast<double>(freq) / rope.factor +
                              keep * static_cast<double>(freq));
  }
}

}  // namespace

std::vector<float> rope_inverse_frequencies(const RopeConfig& rope, std::int64_t head_dim,
                                            std::int64_t max_seq_len) {
  head_dim = static_cast<std::int64_t>(static_cast<double>(head_dim) * rope.partial_rotary_factor);
  PIANOLA_CHECK(head_dim >= 2 && head_dim % 2 == 0, "rope of a head of {}", head_dim);
  std::vector<float> inv_freq;
  switch (rope.kind) {
    case RopeKind::kDefault:
      return default_frequencies(rope.theta, head_dim);
    case RopeKind::kLinear:
      inv_freq = default_frequencies(rope.theta, head_dim);
      for (float& freq : inv_freq) freq /= static_cast<float>(rope.factor);
      return inv_freq;
    case RopeKind::kDynamic:
      return default_frequencies(dynamic_base(rope, head_dim, max_seq_len), head_dim);
    case RopeKind::kYarn:
      return yarn_frequencies(rope, head_dim);
    case RopeKind::kLlama3:
      inv_freq = default_frequencies(rope.theta, head_dim);
      stretch_llama3(rope, inv_freq);
      return inv_freq;
  }
  PIANOLA_CHECK(false, "rope kind {}", static_cast<int>(rope.kind));
}

float rope_attention_scale(const RopeConfig& rope) {
  if (rope.kind != RopeKind::kYarn) return 1.0F;
  if (rope.attention_factor) return static_cast<float>(*rope.attention_factor);
  const auto scale = [&](double mscale) {
    return rope.factor <= 1.0 ? 1.0 : 0.1 * mscale * std::log(rope.factor) + 1.0;
  };
  if (rope.mscale && rope.mscale_all_dim) {
    return static_cast<float>(scale(*rope.mscale) / scale(*rope.mscale_all_dim));
  }
  return static_cast<float>(scale(1.0));
}

void apply_rope_factors(std::span<float> inv_freq, std::span<const float> factors) {
  if (inv_freq.size() != factors.size()) {
    fail(ErrorCode::kInvalidModel, "rope factors: expected {} of them, one a pair, found {}",
         inv_freq.size(), factors.size());
  }
  for (std::size_t i = 0; i < factors.size(); ++i) {
    if (!(std::isfinite(factors[i]) && factors[i] > 0.0F)) {
      fail(ErrorCode::kInvalidModel, "rope factors: factor {} is {}, expected a positive number", i,
           factors[i]);
    }
    inv_freq[i] /= factors[i];
  }
}

}  // namespace pianola
