// The layout of the state, and the random numbers that every backend draws.
#include "plan/step_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <vector>

namespace pianola {
namespace {

using ::testing::ElementsAre;

struct Region {
  const char* name;
  const std::byte* begin;
  std::size_t bytes;
};

template <typename T>
Region region(const char* name, T* begin, std::size_t count) {
  return {name, reinterpret_cast<const std::byte*>(begin), count * sizeof(T)};
}

std::vector<Region> regions(const StepState& s, const StepLimits& limits) {
  const auto n = [](int count) { return static_cast<std::size_t>(count); };
  return {region("row", s.row, n(limits.rows)),
          region("history", s.history, n(limits.rows) * n(s.history_stride)),
          region("rollback", s.rollback, n(limits.rows)),
          region("went_back", s.went_back, n(limits.rows)),
          region("counts", s.counts, 1),
          region("token", s.token, n(limits.tokens)),
          region("position", s.position, n(limits.tokens)),
          region("lane_of", s.lane_of, n(limits.tokens)),
          region("first_token", s.first_token, n(limits.lanes) + 1),
          region("row_of", s.row_of, n(limits.lanes)),
          region("logit_token", s.logit_token, n(limits.logit_rows)),
          region("target", s.target, n(limits.logit_rows)),
          region("sampled", s.sampled, n(limits.logit_rows)),
          region("logprob", s.logprob, n(limits.logit_rows)),
          region("yield", s.yield, 1),
          region("control", s.control, 1)};
}

std::vector<Region> shared_regions(const StepState& s) {
  const auto n = [](int count) { return static_cast<std::size_t>(count); };
  return {region("ring_head", s.ring_head, 1), region("ring_tail", s.ring_tail, 1),
          region("ring", s.ring, n(s.ring_capacity))};
}

// The layout only computes addresses, so a base that holds nothing will do.
std::byte* made_up(int bit) {
  return reinterpret_cast<std::byte*>(  // NOLINT(performance-no-int-to-ptr)
      std::uintptr_t{1} << bit);
}

void expect_apart(std::vector<Region> all, const std::byte* base, std::size_t bytes) {
  std::sort(all.begin(), all.end(),
            [](const Region& a, const Region& b) { return a.begin < b.begin; });
  const std::byte* free = base;
  for (const Region& r : all) {
    EXPECT_GE(r.begin, free) << r.name << " overlaps what lies before it";
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(r.begin) % 128, 0U) << r.name;
    free = r.begin + r.bytes;
  }
  EXPECT_LE(free, base + bytes);
  EXPECT_LT(bytes - static_cast<std::size_t>(free - base), 128U);
}

TEST(StepStateLayout, TablesAreApartAlignedAndInside) {
  for (const StepLimits& limits :
       {StepLimits{}, StepLimits{1, 1, 1, 1, 1}, StepLimits{3, 777, 65, 3, 7},
        StepLimits{64, 8192, 512, 64, 64}, StepLimits{1024, 33, 8192, 1024, 8192}}) {
    const StepStateLayout layout(limits);
    std::byte* base = made_up(40);
    std::byte* shared = made_up(41);
    const StepState state = layout.bind(base, shared);
    EXPECT_EQ(state.rows, limits.rows);
    EXPECT_GE(state.history_stride, limits.max_seq_len + 1) << "room for the last sampled token";
    EXPECT_GE(state.ring_capacity, 2 * limits.lanes) << "a round must fit behind another";
    expect_apart(regions(state, limits), base, layout.bytes());
    expect_apart(shared_regions(state), shared, layout.shared_bytes());
  }
}

TEST(StepStateLayout, BindIsAPureFunctionOfItsBases) {
  const StepStateLayout layout({2, 100, 32, 2, 2});
  std::byte* base = made_up(40);
  std::byte* shared = made_up(41);
  const StepState a = layout.bind(base, shared);
  const StepState b = layout.bind(base, shared);
  const StepState moved = layout.bind(base + 4096, shared + 8192);
  EXPECT_EQ(a.ring, b.ring);
  EXPECT_EQ(a.token, b.token);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(moved.token),
            reinterpret_cast<std::uintptr_t>(a.token) + 4096);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(moved.ring),
            reinterpret_cast<std::uintptr_t>(a.ring) + 8192);
}

// The known answers that the authors of Random123 publish with it (kat_vectors, philox4x32 10).
TEST(Philox, KnownAnswers) {
  EXPECT_THAT(philox4x32({0, 0, 0, 0}, 0),
              ElementsAre(0x6627e8d5U, 0xe169c58dU, 0xbc57ac4cU, 0x9b00dbd8U));
  EXPECT_THAT(philox4x32({~0U, ~0U, ~0U, ~0U}, ~std::uint64_t{0}),
              ElementsAre(0x408f276dU, 0x41c83b0eU, 0xa20bc7c6U, 0x6d5451fdU));
  EXPECT_THAT(philox4x32({0x243f6a88U, 0x85a308d3U, 0x13198a2eU, 0x03707344U},
                         (std::uint64_t{0x299f31d0U} << 32) | 0xa4093822U),
              ElementsAre(0xd16cfe09U, 0x94fdccebU, 0x5001e420U, 0x24126ea1U));
}

TEST(UniformRandom, IsTheFirst53BitsOfTheCounter) {
  EXPECT_EQ(
      uniform_random(0, 0, 0, RandomPurpose::kSample),
      static_cast<double>((std::uint64_t{0x6627e8d5U} << 21) | (0xe169c58dU >> 11)) * 0x1.0p-53);
  const auto words = philox4x32({7, 3, 2, 0}, 0x123456789abcdefULL);
  const double want = words[0] * 0x1.0p-32 + (words[1] >> 11) * 0x1.0p-53;
  EXPECT_EQ(uniform_random(0x123456789abcdefULL, 3, 7, RandomPurpose::kAccept), want);
}

// Chi-square over 100 cells of 100,000 draws: for 99 degrees of freedom the value exceeds 149.4
// once in a thousand; the numbers are fixed, so this either holds for ever or not at all.
void expect_uniform(const std::vector<double>& draws) {
  std::vector<int> cells(100);
  for (const double u : draws) {
    ASSERT_GE(u, 0.0);
    ASSERT_LT(u, 1.0);
    ++cells[static_cast<std::size_t>(u * 100)];
  }
  const double expected = static_cast<double>(draws.size()) / 100;
  double chi = 0;
  for (const int n : cells) chi += (n - expected) * (n - expected) / expected;
  EXPECT_LT(chi, 149.4);
  EXPECT_GT(chi, 59.0);  // and not suspiciously even
}

TEST(UniformRandom, IsUniformAlongEachArgument) {
  constexpr std::uint32_t kDraws = 100000;
  std::vector<double> draws(kDraws);
  for (std::uint32_t i = 0; i < kDraws; ++i) {
    draws[i] = uniform_random(42, 0, i, RandomPurpose::kSample);
  }
  expect_uniform(draws);
  for (std::uint32_t i = 0; i < kDraws; ++i) {
    draws[i] = uniform_random(42, i, 5, RandomPurpose::kSample);
  }
  expect_uniform(draws);
  for (std::uint32_t i = 0; i < kDraws; ++i) {
    draws[i] = uniform_random(i, 0, 5, RandomPurpose::kDraft);
  }
  expect_uniform(draws);
  for (std::uint32_t i = 0; i < kDraws; ++i) {
    draws[i] = uniform_random(std::uint64_t{i} << 32, 0, 5, RandomPurpose::kAccept);
  }
  expect_uniform(draws);
}

// The correlation of draws that differ in one argument: for n independent pairs it has a standard
// deviation of 1 / sqrt(n); five of them are allowed.
TEST(UniformRandom, ArgumentsAreIndependent) {
  constexpr int kPairs = 20000;
  const auto correlation = [](auto&& first, auto&& second) {
    double sum = 0;
    for (int i = 0; i < kPairs; ++i) {
      const auto p = static_cast<std::uint32_t>(i);
      sum += (first(p) - 0.5) * (second(p) - 0.5);
    }
    return 12 * sum / kPairs;
  };
  const auto base = [](std::uint32_t p) { return uniform_random(9, 1, p, RandomPurpose::kSample); };
  const double bar = 5 / std::sqrt(double{kPairs});
  EXPECT_NEAR(correlation(base, base), 1, 0.05);  // the measure itself
  EXPECT_LT(
      std::abs(correlation(
          base, [](std::uint32_t p) { return uniform_random(10, 1, p, RandomPurpose::kSample); })),
      bar);
  EXPECT_LT(std::abs(correlation(base,
                                 [](std::uint32_t p) {
                                   return uniform_random(9 | std::uint64_t{1} << 63, 1, p,
                                                         RandomPurpose::kSample);
                                 })),
            bar);
  EXPECT_LT(
      std::abs(correlation(
          base, [](std::uint32_t p) { return uniform_random(9, 2, p, RandomPurpose::kSample); })),
      bar);
  EXPECT_LT(std::abs(correlation(base,
                                 [](std::uint32_t p) {
                                   return uniform_random(9, 1, p + 1, RandomPurpose::kSample);
                                 })),
            bar);
  EXPECT_LT(
      std::abs(correlation(
          base, [](std::uint32_t p) { return uniform_random(9, 1, p, RandomPurpose::kDraft); })),
      bar);
  EXPECT_LT(
      std::abs(correlation(
          base, [](std::uint32_t p) { return uniform_random(9, 1, p, RandomPurpose::kAccept); })),
      bar);
}

// Swapped arguments are other draws: no two of these are equal.
TEST(UniformRandom, EveryArgumentCounts) {
  std::set<double> seen;
  int draws = 0;
  for (std::uint32_t a = 0; a < 12; ++a) {
    for (std::uint32_t b = 0; b < 12; ++b) {
      for (std::uint32_t c = 0; c < 12; ++c) {
        for (const auto purpose :
             {RandomPurpose::kSample, RandomPurpose::kDraft, RandomPurpose::kAccept}) {
          seen.insert(uniform_random(a, b, c, purpose));
          ++draws;
        }
      }
    }
  }
  EXPECT_EQ(seen.size(), static_cast<std::size_t>(draws));
}

}  // namespace
}  // namespace pianola
