// Which experts are chosen and how they weigh, against sorted lists in double precision.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "backends/reference/ops.h"

namespace pianola::reference {
namespace {

double sigmoid(double s) { return 1.0 / (1.0 + std::exp(-s)); }

struct Choice {
  std::vector<int> experts;
  std::vector<double> weights;
};

// By lists that are sorted as a whole. Groups by their best keys, then the experts of the best
// groups by their keys; equal ones in the order of their numbers.
Choice by_sorting(const RouteOp& op, const std::vector<float>& scores,
                  const std::vector<float>& bias) {
  const int experts = static_cast<int>(scores.size());
  const int size = experts / op.groups.count;
  std::vector<double> keys;
  for (int e = 0; e < experts; ++e) {
    const auto i = static_cast<std::size_t>(e);
    keys.push_back(bias.empty() ? scores[i] : sigmoid(scores[i]) + bias[i]);
  }
  const auto sorted = [](std::vector<int> ids, const std::vector<double>& by) {
    std::stable_sort(ids.begin(), ids.end(), [&by](int a, int b) {
      return by[static_cast<std::size_t>(a)] > by[static_cast<std::size_t>(b)];
    });
    return ids;
  };
  std::vector<double> groups;
  for (int g = 0; g < op.groups.count; ++g) {
    std::vector<double> of(keys.begin() + g * size, keys.begin() + (g + 1) * size);
    std::sort(of.rbegin(), of.rend());
    groups.push_back(std::accumulate(of.begin(), of.begin() + op.groups.best, 0.0));
  }
  std::vector<int> ids(static_cast<std::size_t>(op.groups.count));
  std::iota(ids.begin(), ids.end(), 0);
  ids = sorted(ids, groups);
  ids.resize(static_cast<std::size_t>(op.groups.chosen));
  std::sort(ids.begin(), ids.end());
  std::vector<int> allowed;
  for (const int g : ids) {
    for (int i = 0; i < size; ++i) allowed.push_back(g * size + i);
  }
  Choice choice{sorted(allowed, keys), {}};
  choice.experts.resize(static_cast<std::size_t>(op.top_k));

  const bool is_sigmoid =
      op.score == RouteScore::kSigmoid || op.score == RouteScore::kSigmoidOfChosen;
  const auto weight = [&](float s) {
    return is_sigmoid ? sigmoid(s) : std::exp(static_cast<double>(s));
  };
  double all = 0;
  double chosen = 0;
  for (const float s : scores) all += weight(s);
  for (const int e : choice.experts) chosen += weight(scores[static_cast<std::size_t>(e)]);
  for (const int e : choice.experts) {
    const double divisor = op.score == RouteScore::kSigmoid   ? 1
                           : op.score == RouteScore::kSoftmax ? all
                                                              : chosen;
    choice.weights.push_back(weight(scores[static_cast<std::size_t>(e)]) / divisor * op.scale);
  }
  return choice;
}

std::vector<float> random_floats(int n, std::mt19937& engine) {
  std::normal_distribution<float> normal(0.0F, 1.5F);
  std::vector<float> v(static_cast<std::size_t>(n));
  for (float& x : v) x = normal(engine);
  return v;
}

void expect_sorted_choice(const RouteOp& op, const std::vector<float>& scores,
                          const std::vector<float>& bias) {
  std::vector<float> out(static_cast<std::size_t>(2 * op.top_k));
  choose_experts(op, scores, bias.empty() ? nullptr : bias.data(), out.data());
  const Choice want = by_sorting(op, scores, bias);
  for (std::size_t i = 0; i < want.experts.size(); ++i) {
    EXPECT_EQ(out[i], static_cast<float>(want.experts[i])) << i;
    EXPECT_NEAR(out[want.experts.size() + i], want.weights[i], 1e-6 * op.scale) << i;
  }
}

TEST(Route, IsThatOfSortedLists) {
  std::mt19937 engine(3);
  for (const RouteScore score : {RouteScore::kSoftmax, RouteScore::kSoftmaxOfChosen,
                                 RouteScore::kSigmoid, RouteScore::kSigmoidOfChosen}) {
    const bool may_have_bias =
        score == RouteScore::kSigmoid || score == RouteScore::kSigmoidOfChosen;
    for (const RouteGroups groups :
         {RouteGroups{}, RouteGroups{4, 2, 1}, RouteGroups{4, 1, 2}, RouteGroups{8, 4, 2}}) {
      for (const bool with_bias : {false, true}) {
        if (with_bias && !may_have_bias) continue;
        for (int i = 0; i < 40; ++i) {
          RouteOp op{.top_k = 1 + i % 4, .score = score, .groups = groups, .scale = 2.5F};
          expect_sorted_choice(op, random_floats(16, engine),
                               with_bias ? random_floats(16, engine) : std::vector<float>{});
        }
      }
    }
  }
}

// The bias changes who is chosen; weights are those of the scores alone.
TEST(Route, ABiasChoosesAndWeighsNothing) {
  RouteOp op{.top_k = 1, .score = RouteScore::kSigmoid};
  const std::vector<float> scores = {2, 1, 0};
  const std::vector<float> bias = {0, 0, 0.5F};
  std::vector<float> out(2);
  choose_experts(op, scores, bias.data(), out.data());
  EXPECT_EQ(out[0], 2);
  EXPECT_FLOAT_EQ(out[1], 0.5F);
  choose_experts(op, scores, nullptr, out.data());
  EXPECT_EQ(out[0], 0);
}

// Equal experts and equal groups: the lower numbers.
TEST(Route, TiesGoToTheLowerNumber) {
  RouteOp op{.top_k = 2, .score = RouteScore::kSigmoid, .groups = {3, 2, 2}};
  const std::vector<float> scores(6, 0.25F);
  std::vector<float> out(4);
  choose_experts(op, scores, nullptr, out.data());
  EXPECT_EQ(out[0], 0);
  EXPECT_EQ(out[1], 1);
}

// Who is chosen then does not matter, but they are experts that there are.
TEST(Route, NanStaysWithinItsToken) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const RouteScore score : {RouteScore::kSoftmax, RouteScore::kSigmoidOfChosen}) {
    RouteOp op{.top_k = 3, .score = score, .groups = {2, 1, 2}};
    const std::vector<float> scores(8, nan);
    std::vector<float> out(6);
    choose_experts(op, scores, nullptr, out.data());
    for (int i = 0; i < 3; ++i) {
      EXPECT_GE(out[static_cast<std::size_t>(i)], 0);
      EXPECT_LT(out[static_cast<std::size_t>(i)], 8);
      EXPECT_TRUE(std::isnan(out[static_cast<std::size_t>(3 + i)]));
    }
  }
}

}  // namespace
}  // namespace pianola::reference
