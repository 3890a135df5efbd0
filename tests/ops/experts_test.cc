// Routing and experts: the reference against formulas in double precision, the CPU against the
// reference and, bit for bit, against its own gated MLP of each expert alone. Every instruction set
// this machine has.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "backends/cpu/kernels/elementwise.h"
#include "ops/experts_fixture.h"
#include "pianola/error.h"

namespace pianola {
namespace {

// --- The specification ------------------------------------------------------------------------

TEST(ReferenceRoute, ChoosesTheLargestAndWeighsThem) {
  for (const auto score :
       {RouteScore::kSoftmax, RouteScore::kSoftmaxOfChosen, RouteScore::kSigmoid}) {
    Layer layer({.experts = 7, .top_k = 3, .width = 33, .score = score});
    Machine machine("reference", {}, layer.weights);
    const Tokens tokens = layer.tokens(20, 9);
    const std::vector<float> got = machine.run(tokens, layer.routes());
    const auto values = [&](WeightId id) {
      return reinterpret_cast<const float*>(
          layer.weights.bytes[static_cast<std::size_t>(id.index)].data());
    };
    for (int t = 0; t < 20; ++t) {
      const float* x = tokens.x.data() + t * 33;
      double squares = 0;
      for (int i = 0; i < 33; ++i) squares += static_cast<double>(x[i]) * x[i];
      const double scale = 1.0 / std::sqrt(squares / 33 + 1e-5);
      std::vector<std::pair<double, int>> scores;  // negative, so that the largest come first
      double total = 0;
      for (int e = 0; e < 7; ++e) {
        double s = values(layer.router_bias)[e];
        for (int i = 0; i < 33; ++i) {
          s += values(layer.router)[e * 33 + i] * (x[i] * scale * values(layer.norm)[i]);
        }
        scores.emplace_back(-s, e);
        total += std::exp(s);
      }
      std::sort(scores.begin(), scores.end());
      if (score == RouteScore::kSoftmaxOfChosen) {
        total = 0;
        for (int rank = 0; rank < 3; ++rank) {
          total += std::exp(-scores[static_cast<std::size_t>(rank)].first);
        }
      }
      for (int rank = 0; rank < 3; ++rank) {
        const auto& [negative, expert] = scores[static_cast<std::size_t>(rank)];
        const double want = score == RouteScore::kSigmoid ? 1.0 / (1.0 + std::exp(negative))
                                                          : std::exp(-negative) / total;
        const float* route = got.data() + t * 6;
        EXPECT_EQ(route[rank], static_cast<float>(expert)) << t << ' ' << rank;
        EXPECT_NEAR(route[3 + rank], want, 2e-6) << t << ' ' << rank;
      }
    }
  }
}

TEST(ReferenceRoute, TiesGoToTheLowerId) {
  Layer layer({.experts = 5, .top_k = 4, .width = 32, .biases = false});
  std::vector<std::byte>& router =
      layer.weights.bytes[static_cast<std::size_t>(layer.router.index)];
  // Experts 1, 2 and 4 are one.
  for (const std::size_t e : {2U, 4U}) {
    std::memcpy(router.data() + e * 32 * 4, router.data() + std::size_t{32} * 4, 32 * 4);
  }
  const Tokens tokens = layer.tokens(30, 11);
  std::vector<float> want;
  for (const char* backend : {"reference", "cpu"}) {
    Machine machine(backend, {}, layer.weights);
    const std::vector<float> got = machine.run(tokens, layer.routes());
    for (int t = 0; t < 30; ++t) {
      std::vector<float> alike;
      for (int rank = 0; rank < 4; ++rank) {
        const float e = got.data()[t * 8 + rank];
        if (e == 1 || e == 2 || e == 4) alike.push_back(e);
      }
      EXPECT_TRUE(std::is_sorted(alike.begin(), alike.end()));
      ASSERT_GE(alike.size(), 2U);
      EXPECT_EQ(alike[0], 1);
      EXPECT_EQ(alike[1], 2);
    }
  }
}

// --- The CPU against it -----------------------------------------------------------------------

class Experts : public testing::TestWithParam<cpu::Isa> {
 protected:
  static BackendOptions options(int threads) {
    return {.threads = threads, .isa = cpu::isa_name(GetParam())};
  }
};
INSTANTIATE_TEST_SUITE_P(Isas, Experts, testing::ValuesIn(cpu::supported_isas()),
                         [](const auto& isa) { return std::string(cpu::isa_name(isa.param)); });

TEST_P(Experts, EqualTheReference) {
  const std::vector<LayerShape> shapes = {
      {.experts = 1, .top_k = 1, .width = 8, .ff = 1},
      {.experts = 5, .top_k = 5, .width = 17, .ff = 23, .biases = false},
      {.experts = 8, .top_k = 2, .width = 96, .ff = 33, .dtype = DType::kF16},
      {.experts = 33, .top_k = 4, .width = 65, .ff = 80, .activation = Activation::kClampedSwish},
      {.experts = 6,
       .top_k = 3,
       .activation = Activation::kGeluTanh,
       .score = RouteScore::kSoftmax,
       .norm_route = false}};
  for (const LayerShape& shape : shapes) {
    const Layer layer(shape);
    Machine reference("reference", {}, layer.weights);
    for (const int threads : {1, 3}) {
      Machine machine("cpu", options(threads), layer.weights);
      for (const int count : {1, 2, 3, 16, 17, 75}) {
        Tokens tokens = layer.tokens(count, static_cast<unsigned>(count));
        const std::vector<float> routes = machine.run(tokens, layer.routes());
        const std::vector<float> want_routes = reference.run(tokens, layer.routes());
        for (std::size_t i = 0; i < routes.size(); ++i) {
          ASSERT_NEAR(routes[i], want_routes[i], 1e-6) << i;
        }
        const std::vector<float> got = machine.run(tokens, layer.all());
        const std::vector<float> want = reference.run(tokens, layer.all());
        for (std::size_t i = 0; i < got.size(); ++i) {
          // Values are of size 1; measured errors are below 2e-6.
          ASSERT_NEAR(got[i], want[i], 1e-5) << count << " tokens, element " << i;
        }
      }
    }
  }
}

// Bit for bit what the gated MLP of each chosen expert gives, weighed and added up by rank.
TEST_P(Experts, EqualTheMlpOfEachExpert) {
  const cpu::Elementwise& f = cpu::elementwise(GetParam());
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16, DType::kQ4_0, DType::kQ8_0,
                            DType::kQ4_K, DType::kQ6_K}) {
    const int size = dtype_info(dtype).elements == 256 ? 256 : 64;
    Layer layer(
        {.experts = 5, .top_k = 2, .width = size, .ff = size == 256 ? 256 : 96, .dtype = dtype});
    std::vector<GatedMlpOp> mlps;
    for (int e = 0; e < 5; ++e) mlps.push_back(layer.add_expert(e));
    Machine machine("cpu", options(2), layer.weights);
    for (const int count : {1, 2, 5, 40, 90}) {
      const Tokens tokens = layer.tokens(count, static_cast<unsigned>(count));
      const std::vector<float> routes = machine.run(tokens, layer.routes());
      std::vector<std::vector<float>> outputs;
      for (GatedMlpOp mlp : mlps) {
        outputs.push_back(machine.run(tokens, [&](Recorder& r, BufferId x, BufferId) {
          mlp.in = x;
          mlp.out = r.buffer("out", Extent::kTokens, size);
          r.record(mlp);
          return mlp.out;
        }));
      }
      const std::vector<float> got = machine.run(tokens, layer.all());
      for (int t = 0; t < count; ++t) {
        const float* route = routes.data() + t * 4;
        const auto output = [&](int rank) {
          return outputs[static_cast<std::size_t>(route[rank])].data() + t * size;
        };
        std::vector<float> sum(static_cast<std::size_t>(size));
        f.scale(output(0), route[2], size, sum.data());
        f.add_scaled(output(1), route[3], size, sum.data());
        std::vector<float> want(tokens.residual.begin() + t * size,
                                tokens.residual.begin() + (t + 1) * size);
        f.add(sum.data(), size, want.data());
        ASSERT_TRUE(same_bits(got.data() + t * size, want.data(), want.size()))
            << dtype_name(dtype) << ' ' << count << " tokens, token " << t;
      }
    }
  }
}

TEST_P(Experts, ATokenAloneIsTheTokenInCompany) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kQ8_0}) {
    const Layer layer({.experts = 9,
                       .top_k = 4,
                       .ff = 96,
                       .dtype = dtype,
                       .activation = Activation::kClampedSwish});
    Machine one("cpu", options(1), layer.weights);
    Machine three("cpu", options(3), layer.weights);
    const auto width = static_cast<std::size_t>(layer.shape.width);
    for (const int count : {2, 19, 70}) {
      const Tokens tokens = layer.tokens(count, static_cast<unsigned>(count));
      const std::vector<float> together = three.run(tokens, layer.all());
      const std::vector<float> again = one.run(tokens, layer.all());
      ASSERT_TRUE(same_bits(together.data(), again.data(), again.size()));
      for (int t = 0; t < count; ++t) {
        const std::vector<float> alone =
            (t % 2 ? one : three).run(one_token(tokens, t), layer.all());
        ASSERT_TRUE(
            same_bits(alone.data(), together.data() + static_cast<std::size_t>(t) * width, width))
            << t;
      }
    }
  }
}

TEST_P(Experts, MaskedTokensAndNanStayWhereTheyAre) {
  const Layer layer({.experts = 5, .top_k = 2});
  Machine machine("cpu", options(2), layer.weights);
  Machine reference("reference", {}, layer.weights);
  constexpr int kCount = 24;
  const auto width = static_cast<std::size_t>(layer.shape.width);
  const Tokens clean = layer.tokens(kCount, 5);
  const std::vector<float> want = machine.run(clean, layer.all());
  Tokens spoiled = clean;
  spoiled.masked.assign(kCount, false);
  for (std::size_t t = 0; t < kCount; ++t) {
    if (t % 3 == 1) spoiled.masked[t] = true;
    if (t % 3 != 0)
      std::fill_n(spoiled.x.begin() + static_cast<std::ptrdiff_t>(t * width), width, kNan);
  }
  for (Machine* m : {&machine, &reference}) {
    const std::vector<float> got = m->run(spoiled, layer.all());
    const std::vector<float> routes = m->run(spoiled, layer.routes());
    for (std::size_t t = 0; t < kCount; ++t) {
      for (std::size_t i = t * width; i < (t + 1) * width; ++i) {
        if (t % 3 == 1) {
          ASSERT_EQ(got[i], spoiled.residual[i]) << t;  // nothing was added
        } else if (t % 3 == 2) {
          ASSERT_TRUE(std::isnan(got[i])) << t;
        } else if (m == &machine) {
          ASSERT_EQ(got[i], want[i]) << t;
        }
      }
      if (t % 3 == 1) {
        EXPECT_EQ(std::vector<float>(routes.begin() + static_cast<std::ptrdiff_t>(t) * 4,
                                     routes.begin() + static_cast<std::ptrdiff_t>(t + 1) * 4),
                  (std::vector<float>{-1, -1, 0, 0}));
      }
    }
  }
}

// out = x + sigmoid(w · norm(x)) * MLP(norm(x)): a stack of one behind a router of one row.
TEST_P(Experts, ASharedExpertIsAStackOfOne) {
  Layer layer({.experts = 1, .top_k = 1, .biases = false, .score = RouteScore::kSigmoid});
  const GatedMlpOp expert = layer.add_expert(0);
  Machine machine("cpu", options(2), layer.weights);
  Machine reference("reference", {}, layer.weights);
  const Tokens tokens = layer.tokens(21, 8);
  const auto mlp = [&](Recorder& r, BufferId x, BufferId) {
    GatedMlpOp op = expert;
    op.in = x;
    op.out = r.buffer("out", Extent::kTokens, 64);
    r.record(op);
    return op.out;
  };
  const std::vector<float> plain = reference.run(tokens, mlp);
  const std::vector<float> routes = reference.run(tokens, layer.routes());
  const std::vector<float> got = machine.run(tokens, layer.all());
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double weight = routes[i / 64 * 2 + 1];
    ASSERT_NEAR(got[i], tokens.residual[i] + weight * plain[i], 1e-5) << i;
  }
}

TEST_P(Experts, AResidualMayBeAbsentOrInPlace) {
  const Layer layer({});
  Machine machine("cpu", options(2), layer.weights);
  Machine reference("reference", {}, layer.weights);
  Tokens tokens = layer.tokens(7, 3);
  const std::vector<float> with = machine.run(tokens, layer.all());
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
  const std::vector<float> alone = machine.run(tokens, without);
  for (std::size_t i = 0; i < with.size(); ++i) {
    ASSERT_EQ(with[i], tokens.residual[i] + alone[i]);
  }
  const std::vector<float> got = machine.run(tokens, in_place);
  const std::vector<float> want = reference.run(tokens, in_place);
  for (std::size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], want[i], 1e-5);
}

TEST(ExpertsSupport, GateAndUpWantOneKindOfActivation) {
  Layer layer({.dtype = DType::kF16});
  layer.up = layer.weights.matrices(DType::kQ8_0, 6, 48, 64, 200);
  Machine machine("cpu", {}, layer.weights);
  try {
    machine.run(layer.tokens(1, 1), layer.all());
    FAIL() << "accepted";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kUnsupported);
    EXPECT_NE(std::string(e.what()).find("experts"), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace pianola
