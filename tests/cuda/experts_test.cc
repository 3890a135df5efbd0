// Routing and experts on a GPU against the reference backend, for every form of weights; and the
// promise that a token's result does not depend on what else is in the step.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "ops/experts_fixture.h"

namespace pianola {
namespace {

constexpr DType kForms[] = {DType::kF32,  DType::kF16,  DType::kBF16, DType::kQ4_0,
                            DType::kQ4_1, DType::kQ5_0, DType::kQ5_1, DType::kQ8_0,
                            DType::kQ4_K, DType::kQ5_K, DType::kQ6_K};

// On both sides of what a segment holds, and a chunk.
constexpr int kCounts[] = {1, 2, 3, 8, 9, 33, 64, 200};

bool in_super_blocks(DType dtype) { return dtype_info(dtype).elements == 256; }

std::span<const float> row_of(const std::vector<float>& all, int t, int width) {
  return std::span(all).subspan(static_cast<std::size_t>(t) * static_cast<std::size_t>(width),
                                static_cast<std::size_t>(width));
}

float largest_of(std::span<const float> values) {
  float largest = 0;
  for (const float v : values) largest = std::max(largest, std::fabs(v));
  return largest;
}

// The values in which a router's choice may be compared: ids exactly, weights nearly.
void expect_routes(const std::vector<float>& got, const std::vector<float>& want, int top_k) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    const bool is_id = i % static_cast<std::size_t>(2 * top_k) < static_cast<std::size_t>(top_k);
    if (std::isnan(want[i])) {
      ASSERT_TRUE(std::isnan(got[i])) << i;
    } else if (is_id) {
      ASSERT_EQ(got[i], want[i]) << i;
    } else {
      ASSERT_NEAR(got[i], want[i], 1e-5) << i;
    }
  }
}

// Activations have 16 bits of mantissa, twice; sums are f32.
void expect_near(const std::vector<float>& got, const std::vector<float>& want, int tokens) {
  const int width = static_cast<int>(want.size()) / tokens;
  for (int t = 0; t < tokens; ++t) {
    const auto expected = row_of(want, t, width);
    const auto value = row_of(got, t, width);
    const float tolerance = 1e-4F * (1 + largest_of(expected));
    for (std::size_t i = 0; i < expected.size(); ++i) {
      ASSERT_NEAR(value[i], expected[i], tolerance) << "token " << t << ", element " << i;
    }
  }
}

void compare(const Layer& layer, std::initializer_list<int> counts,
             const BackendOptions& options = {}) {
  Machine reference("reference", {}, layer.weights);
  Machine machine("cuda", options, layer.weights);
  for (const int count : counts) {
    SCOPED_TRACE(std::to_string(count) + " tokens");
    Tokens tokens = layer.tokens(count, static_cast<unsigned>(count));
    if (count > 2) {
      tokens.masked.assign(static_cast<std::size_t>(count), false);
      tokens.masked[1] = true;
    }
    expect_routes(machine.run(tokens, layer.routes()), reference.run(tokens, layer.routes()),
                  layer.shape.top_k);
    expect_near(machine.run(tokens, layer.all()), reference.run(tokens, layer.all()), count);
  }
}

// Each token in company and alone, bit for bit; what a bucket holds besides is not written.
void expect_same_alone(const Layer& layer, std::initializer_list<int> counts) {
  Machine machine("cuda", {.batch_invariant = true}, layer.weights);
  const int width = layer.shape.width;
  for (const int count : counts) {
    const Tokens tokens = layer.tokens(count, static_cast<unsigned>(count));
    const std::vector<float> together = machine.run(tokens, layer.all());
    const std::vector<float> roomy = machine.run(tokens, layer.all(), count + 5);
    ASSERT_TRUE(same_bits(together.data(), roomy.data(), together.size())) << count;
    for (std::size_t i = together.size(); i < roomy.size(); ++i) {
      ASSERT_TRUE(std::isnan(roomy[i])) << "padding was written";
    }
    for (int t = 0; t < count; t += count > 20 ? 7 : 1) {
      const std::vector<float> alone = machine.run(one_token(tokens, t), layer.all());
      ASSERT_TRUE(same_bits(alone.data(), row_of(together, t, width).data(), alone.size()))
          << dtype_name(layer.shape.dtype) << ", token " << t << " of " << count;
    }
  }
}

// For the sanitizers: kernel by kernel, nothing captured.
const BackendOptions kEager{.eager = true};

void compare_routes(const LayerShape& shape, std::initializer_list<int> counts,
                    const BackendOptions& options = {}) {
  const Layer layer(shape);
  Machine reference("reference", {}, layer.weights);
  Machine machine("cuda", options, layer.weights);
  for (const int count : counts) {
    SCOPED_TRACE(std::to_string(count) + " tokens, " + std::to_string(shape.experts) + " experts");
    Tokens tokens = layer.tokens(count, 7);
    tokens.masked.assign(static_cast<std::size_t>(count), false);
    tokens.masked.back() = count > 1;
    expect_routes(machine.run(tokens, layer.routes()), reference.run(tokens, layer.routes()),
                  shape.top_k);
  }
}

TEST(CudaRoute, SmallStepsChooseWhatTheReferenceChooses) {
  compare_routes({.experts = 7, .top_k = 3, .width = 40, .score = RouteScore::kSoftmax}, {1, 5},
                 kEager);
  compare_routes({.experts = 33, .top_k = 4, .width = 64, .norm_route = false}, {3}, kEager);
}

TEST(CudaRoute, EveryScoreIsThatOfTheReference) {
  for (const auto score :
       {RouteScore::kSoftmax, RouteScore::kSoftmaxOfChosen, RouteScore::kSigmoid}) {
    for (const bool norm : {true, false}) {
      for (const LayerShape& sizes : {LayerShape{.experts = 1, .top_k = 1, .width = 8},
                                      LayerShape{.experts = 7, .top_k = 3, .width = 40},
                                      LayerShape{.experts = 33, .top_k = 33, .width = 64}}) {
        LayerShape shape = sizes;
        shape.score = score;
        shape.norm_route = norm;
        compare_routes(shape, {1, 3, 70});
      }
    }
  }
}

// With a bias that chooses, among the best groups, and with scaled weights: each by itself and all.
std::vector<LayerShape> choices(int experts, int top_k, int width) {
  std::vector<LayerShape> all;
  for (const auto score : {RouteScore::kSoftmax, RouteScore::kSoftmaxOfChosen, RouteScore::kSigmoid,
                           RouteScore::kSigmoidOfChosen}) {
    const bool sigmoids = score == RouteScore::kSigmoid || score == RouteScore::kSigmoidOfChosen;
    for (const RouteGroups groups :
         {RouteGroups{}, RouteGroups{4, 2, 1}, RouteGroups{4, 3, 2}, RouteGroups{2, 1, 1}}) {
      for (const bool biased : {false, true}) {
        if (biased && !sigmoids) continue;
        all.push_back({.experts = experts,
                       .top_k = top_k,
                       .width = width,
                       .score = score,
                       .choice_bias = biased,
                       .groups = groups,
                       .scale = groups.best == 2 ? 1.0F : 2.5F});
      }
    }
  }
  return all;
}

TEST(CudaRoute, SmallChoicesAmongGroupsAreThoseOfTheReference) {
  for (const LayerShape& shape : choices(12, 3, 40)) {
    SCOPED_TRACE(route_score_name(shape.score));
    compare_routes(shape, {1, 5}, kEager);
    if (testing::Test::HasFatalFailure()) return;
  }
}

TEST(CudaRoute, ChoicesAmongGroupsAreThoseOfTheReference) {
  for (LayerShape shape : choices(160, 6, 512)) {
    SCOPED_TRACE(route_score_name(shape.score));
    compare_routes(shape, {3, 70});
    shape.experts = 40;
    compare_routes(shape, {24});  // more would hold scores that are nearer than f32 sums tell
    if (testing::Test::HasFatalFailure()) return;
  }
  compare_routes({.experts = 256,
                  .top_k = 8,
                  .width = 7168,
                  .score = RouteScore::kSigmoidOfChosen,
                  .choice_bias = true,
                  .groups = {8, 4, 2},
                  .scale = 2.5F},
                 {1, 3});
  compare_routes({.experts = 128, .top_k = 4, .width = 64, .groups = {64, 5, 2}}, {9});
}

TEST(CudaRoute, TiesOfGroupsGoToTheLowerId) {
  Layer layer({.experts = 48,
               .top_k = 12,
               .width = 32,
               .biases = false,
               .score = RouteScore::kSigmoid,
               .groups = {4, 2, 2}});
  std::vector<std::byte>& router =
      layer.weights.bytes[static_cast<std::size_t>(layer.router.index)];
  // Groups 1 and 3 are one, and the experts of group 2 are all the same.
  constexpr std::size_t kRow = 32 * 4;
  std::memcpy(router.data() + 36 * kRow, router.data() + 12 * kRow, 12 * kRow);
  for (std::size_t e = 25; e < 36; ++e) {
    std::memcpy(router.data() + e * kRow, router.data() + 24 * kRow, kRow);
  }
  Machine reference("reference", {}, layer.weights);
  Machine machine("cuda", {}, layer.weights);
  const Tokens tokens = layer.tokens(30, 11);
  expect_routes(machine.run(tokens, layer.routes()), reference.run(tokens, layer.routes()), 12);
}

TEST(CudaRoute, ChoosesWhatTheReferenceChooses) {
  for (const LayerShape& shape :
       {LayerShape{.experts = 128, .top_k = 8, .width = 2048},
        LayerShape{.experts = 300, .top_k = 10, .width = 4096, .score = RouteScore::kSoftmax},
        LayerShape{.experts = 32, .top_k = 4, .width = 2880, .norm_route = false},
        LayerShape{.experts = 5, .top_k = 2, .width = 9000}}) {
    const Layer layer(shape);
    Machine reference("reference", {}, layer.weights);
    Machine machine("cuda", {}, layer.weights);
    for (const int count : {1, 8, 64, 200}) {
      const Tokens tokens = layer.tokens(count, static_cast<unsigned>(count));
      const std::vector<float> got = machine.run(tokens, layer.routes());
      expect_routes(got, reference.run(tokens, layer.routes()), shape.top_k);
      const std::vector<float> alone = machine.run(one_token(tokens, count - 1), layer.routes());
      ASSERT_TRUE(
          same_bits(alone.data(), row_of(got, count - 1, 2 * shape.top_k).data(), alone.size()));
    }
  }
}

TEST(CudaRoute, TiesGoToTheLowerId) {
  Layer layer({.experts = 50, .top_k = 20, .width = 32, .biases = false});
  std::vector<std::byte>& router =
      layer.weights.bytes[static_cast<std::size_t>(layer.router.index)];
  // All odd experts are one; so are 40 and 0.
  const auto copy = [&](std::size_t to, std::size_t from) {
    std::memcpy(router.data() + to * 32 * 4, router.data() + from * 32 * 4, 32 * 4);
  };
  for (std::size_t e = 3; e < 50; e += 2) copy(e, 1);
  copy(40, 0);
  Machine reference("reference", {}, layer.weights);
  Machine machine("cuda", {}, layer.weights);
  const Tokens tokens = layer.tokens(30, 11);
  expect_routes(machine.run(tokens, layer.routes()), reference.run(tokens, layer.routes()), 20);
}

TEST(CudaRoute, NanIsTheSmallestScore) {
  for (const auto score : {RouteScore::kSoftmax, RouteScore::kSoftmaxOfChosen, RouteScore::kSigmoid,
                           RouteScore::kSigmoidOfChosen}) {
    Layer layer({.experts = 6, .top_k = 3, .width = 32, .score = score});
    auto* bias = reinterpret_cast<float*>(
        layer.weights.bytes[static_cast<std::size_t>(layer.router_bias.index)].data());
    bias[2] = kNan;
    Machine reference("reference", {}, layer.weights);
    Machine machine("cuda", {}, layer.weights);
    Tokens tokens = layer.tokens(5, 3);
    std::fill_n(tokens.x.begin() + 32, 32, kNan);
    expect_routes(machine.run(tokens, layer.routes()), reference.run(tokens, layer.routes()), 3);
  }
}

TEST(CudaRoute, RoutersOfAnyFormMultiplyInF32) {
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kQ8_0, DType::kQ6_K}) {
    Layer layer({.experts = 9, .top_k = 4, .width = 256});
    layer.router = layer.weights.matrices(dtype, 1, 9, 256, 71, WeightRole::kRouter);
    Machine reference("reference", {}, layer.weights);
    Machine machine("cuda", {}, layer.weights);
    const Tokens tokens = layer.tokens(6, 3);
    expect_routes(machine.run(tokens, layer.routes()), reference.run(tokens, layer.routes()), 4);
  }
}

class CudaExperts : public testing::TestWithParam<DType> {
 protected:
  LayerShape shape() const {
    return in_super_blocks(GetParam()) ? LayerShape{.width = 256, .ff = 512, .dtype = GetParam()}
                                       : LayerShape{.width = 96, .ff = 160, .dtype = GetParam()};
  }
};
INSTANTIATE_TEST_SUITE_P(Forms, CudaExperts, testing::ValuesIn(kForms),
                         [](const auto& form) { return std::string(dtype_name(form.param)); });

TEST_P(CudaExperts, SmallStepsEqualTheReference) {
  LayerShape small = shape();
  small.ff = in_super_blocks(GetParam()) ? 256 : 64;
  compare(Layer(small), {1, 3, 9}, kEager);
}

TEST_P(CudaExperts, EqualTheReference) {
  compare(Layer(shape()), {1, 3, 8, 9, 64, 200});
  LayerShape plain = shape();
  plain.biases = false;
  plain.activation = Activation::kClampedSwish;
  compare(Layer(plain), {1, 2, 33});
}

TEST_P(CudaExperts, TokensAloneAreThoseInCompany) {
  expect_same_alone(Layer(shape()), {1, 2, 8, 9, 64, 70});
}

// Slices of several steps, rows that no tile divides, more units than multiprocessors.
TEST_P(CudaExperts, LargeLayersEqualTheReference) {
  const bool super = in_super_blocks(GetParam());
  const Layer layer({.experts = 5,
                     .top_k = 2,
                     .width = super ? 1280 : 1120,
                     .ff = super ? 1536 : 1504,
                     .dtype = GetParam()});
  compare(layer, {1, 12});
  expect_same_alone(layer, {3, 40});
}

TEST(CudaExpertsShapes, AllEqualTheReference) {
  for (const LayerShape& shape :
       {LayerShape{.experts = 2, .top_k = 1, .width = 8, .ff = 8},
        LayerShape{.experts = 5, .top_k = 5, .width = 24, .ff = 40, .biases = false},
        LayerShape{.experts = 40, .top_k = 36, .width = 64, .ff = 32},
        LayerShape{.experts = 33,
                   .top_k = 4,
                   .width = 64,
                   .ff = 80,
                   .dtype = DType::kBF16,
                   .activation = Activation::kGeluTanh},
        LayerShape{.experts = 6,
                   .top_k = 3,
                   .activation = Activation::kGeluTanh,
                   .score = RouteScore::kSoftmax,
                   .norm_route = false}}) {
    const Layer layer(shape);
    compare(layer, {1, 3, 17, 64, 200});
    expect_same_alone(layer, {1, 4, 19});
  }
}

TEST(CudaExpertsShapes, SmallStepsEqualTheReference) {
  const BackendOptions& options = kEager;
  compare(Layer({.experts = 3, .top_k = 1, .width = 8, .ff = 8}), {1, 4}, options);
  compare(Layer({.experts = 1, .top_k = 1, .ff = 32, .score = RouteScore::kSigmoid}), {1, 10},
          options);
  Layer mixed({.experts = 3, .top_k = 2, .ff = 32, .dtype = DType::kF16});
  mixed.up = mixed.weights.matrices(DType::kQ8_0, 3, 32, 64, 200);
  compare(mixed, {1, 3}, options);
  compare(Layer({.experts = 2, .top_k = 1, .width = 32, .ff = 32}), {70}, options);
}

TEST(CudaExpertsShapes, GateAndUpOfDifferentForms) {
  Layer layer({.width = 256, .ff = 256, .dtype = DType::kQ4_K});
  layer.up = layer.weights.matrices(DType::kQ8_0, 6, 256, 256, 200);
  layer.down = layer.weights.matrices(DType::kQ6_K, 6, 256, 256, 300);
  compare(layer, {1, 3, 40, 200});
  expect_same_alone(layer, {1, 5, 40});
}

TEST(CudaExpertsShapes, StepsWithAllTokensOnOneExpert) {
  Layer layer({.experts = 9, .top_k = 1, .dtype = DType::kBF16});
  auto* bias = reinterpret_cast<float*>(
      layer.weights.bytes[static_cast<std::size_t>(layer.router_bias.index)].data());
  bias[5] = 1000;
  compare(layer, {1, 8, 31, 32, 33, 64, 200});
  expect_same_alone(layer, {33, 64});
}

// More tokens than one tile of a chunk.
TEST(CudaExpertsShapes, ALongChunkIsComputedInTiles) {
  const Layer layer({.experts = 4, .top_k = 2, .width = 64, .ff = 64});
  compare(layer, {512, 513, 1100});
  expect_same_alone(layer, {600});
}

TEST(CudaExpertsShapes, SharedExpertsAreAStackOfOne) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kQ8_0}) {
    for (const bool biases : {false, true}) {
      for (const Activation activation : {Activation::kSilu, Activation::kGeluTanh}) {
        const Layer layer({.experts = 1,
                           .top_k = 1,
                           .ff = 96,
                           .dtype = dtype,
                           .biases = biases,
                           .activation = activation,
                           .score = RouteScore::kSigmoid});
        compare(layer, {1, 3, 9, 64, 200});
        expect_same_alone(layer, {1, 5, 64, 70});
      }
    }
  }
}

TEST(CudaExpertsShapes, MaskedTokensAndNanStayWhereTheyAre) {
  for (const LayerShape& shape :
       {LayerShape{.experts = 5, .top_k = 2}, LayerShape{.experts = 1, .top_k = 1}}) {
    const Layer layer(shape);
    Machine machine("cuda", {}, layer.weights);
    const auto width = static_cast<std::size_t>(shape.width);
    for (const int count : {6, 24, 90}) {
      const Tokens clean = layer.tokens(count, 5);
      const std::vector<float> want = machine.run(clean, layer.all());
      Tokens spoiled = clean;
      spoiled.masked.assign(static_cast<std::size_t>(count), false);
      for (std::size_t t = 0; t < spoiled.masked.size(); ++t) {
        if (t % 3 == 1) spoiled.masked[t] = true;
        if (t % 3 != 0) {
          std::fill_n(spoiled.x.begin() + static_cast<std::ptrdiff_t>(t * width), width, kNan);
        }
      }
      const std::vector<float> got = machine.run(spoiled, layer.all());
      for (std::size_t i = 0; i < got.size(); ++i) {
        const std::size_t t = i / width;
        if (t % 3 == 1) {
          ASSERT_EQ(got[i], spoiled.residual[i]) << t;  // nothing was added
        } else if (t % 3 == 2) {
          ASSERT_TRUE(std::isnan(got[i])) << t;
        } else {
          ASSERT_EQ(got[i], want[i]) << t;
        }
      }
    }
    // A row that has stopped, alone in its step.
    Tokens one = layer.tokens(1, 6);
    one.masked = {true};
    const std::vector<float> got = machine.run(one, layer.all());
    ASSERT_TRUE(same_bits(got.data(), one.residual.data(), got.size()));
  }
}

TEST(CudaExpertsShapes, ResidualsMayBeAbsentOrInPlace) {
  const Layer layer({});
  Machine machine("cuda", {}, layer.weights);
  Machine reference("reference", {}, layer.weights);
  const auto without = [&](Recorder& r, BufferId x, BufferId) {
    return layer.record_all(r, x, BufferId{});
  };
  const auto in_place = [&](Recorder& r, BufferId x, BufferId) {
    r.record(ExpertsOp{.in = x,
                       .norm = {layer.norm, 1e-5F},
                       .routing = layer.record_route(r, x),
                       .gate = layer.gate,
                       .up = layer.up,
                       .down = layer.down,
                       .residual = x,
                       .out = x});
    return x;
  };
  for (const int count : {1, 7, 40}) {
    const Tokens tokens = layer.tokens(count, 3);
    const std::vector<float> with = machine.run(tokens, layer.all());
    const std::vector<float> alone = machine.run(tokens, without);
    for (std::size_t i = 0; i < with.size(); ++i) {
      ASSERT_EQ(with[i], tokens.residual[i] + alone[i]);
    }
    expect_near(machine.run(tokens, in_place), reference.run(tokens, in_place), count);
  }
}

TEST(CudaExpertsShapes, StepsAreTheSameHoweverTheyAreLaunched) {
  const Layer layer({.experts = 9, .top_k = 4, .ff = 96, .dtype = DType::kBF16});
  Machine captured("cuda", {}, layer.weights);
  Machine plain_edges("cuda", {.dependent_launch = false}, layer.weights);
  Machine eager("cuda", {.eager = true, .check_each = true}, layer.weights);
  for (const int count : kCounts) {
    const Tokens tokens = layer.tokens(count, static_cast<unsigned>(count));
    const std::vector<float> want = captured.run(tokens, layer.all());
    for (Machine* machine : {&plain_edges, &eager}) {
      const std::vector<float> got = machine->run(tokens, layer.all());
      ASSERT_TRUE(same_bits(got.data(), want.data(), want.size())) << count;
    }
  }
}

}  // namespace
}  // namespace pianola
