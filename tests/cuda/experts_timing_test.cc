// How long a mixture of experts takes in a step: graphs of layers that each choose other experts,
// so that no weight is in a cache; and, at these sizes, the bits of a token alone and in company.
#include <algorithm>
#include <functional>
#include <random>
#include <set>

#include "backends/cuda/kernels/experts.h"
#include "backends/cuda/kernels/route.h"
#include "cuda/graph_timing.h"
#include "cuda/state_fixture.h"

namespace pianola::cuda {
namespace {

constexpr int kLayers = 8;

struct Shape {
  const char* name;
  int experts;
  int top_k;
  int width;
  int ff;
  Activation activation = Activation::kSilu;
};

std::vector<float> random_floats(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& v : values) v = normal(random);
  return values;
}

class Mixture {
 public:
  explicit Mixture(const Shape& s)
      : shape_(s),
        matrix_(static_cast<std::size_t>(s.width) * static_cast<std::size_t>(s.ff)),
        weights_(matrix_ * 3 * static_cast<std::size_t>(s.experts)),
        x_(random_floats(static_cast<std::size_t>(64 * s.width), 1)),
        norm_(random_floats(static_cast<std::size_t>(s.width), 2)),
        out_(static_cast<std::size_t>(64 * s.width)),
        scratch_(experts_scratch_bytes({.tokens = 64,
                                        .experts = s.experts,
                                        .top_k = s.top_k,
                                        .width = s.width,
                                        .ff = s.ff,
                                        .out_width = s.width})) {
    // One random matrix of small values, at another place in every one of the stacks.
    std::mt19937 random(3);
    std::vector<std::uint16_t> bits(matrix_);
    for (std::uint16_t& b : bits) {
      b = static_cast<std::uint16_t>((random() & 0x80ffU) | 0x3c00U);  // 2^-7 to 2^-5
    }
    const std::size_t all = weights_.size();
    for (std::size_t at = 0, i = 0; at < all; ++i) {
      const std::size_t skip = i * 977 % matrix_;
      const std::size_t n = std::min(matrix_ - skip, all - at);
      check(cudaMemcpy(weights_.data() + at, bits.data() + skip, n * 2, cudaMemcpyHostToDevice),
            "weights");
      at += n;
    }
  }

  // Experts of `tokens` tokens in each layer: another share of all of them for a single token.
  std::vector<float> choices(int tokens, int layer) const {
    std::vector<float> routing;
    std::mt19937 random(static_cast<unsigned>(100 * tokens + layer));
    for (int t = 0; t < tokens; ++t) {
      std::vector<int> ids(static_cast<std::size_t>(shape_.experts));
      for (int e = 0; e < shape_.experts; ++e) {
        ids[static_cast<std::size_t>(e)] = (e + layer * shape_.top_k) % shape_.experts;
      }
      if (tokens > 1) std::shuffle(ids.begin(), ids.end(), random);
      for (int r = 0; r < shape_.top_k; ++r) {
        routing.push_back(static_cast<float>(ids[static_cast<std::size_t>(r)]));
      }
      for (int r = 0; r < shape_.top_k; ++r) {
        routing.push_back(1.0F / static_cast<float>(1 + r));
      }
    }
    return routing;
  }

  double bytes(const std::vector<float>& routing, int tokens) const {
    std::set<float> used;
    for (int t = 0; t < tokens; ++t) {
      const auto* ids = routing.data() + static_cast<std::ptrdiff_t>(t) * 2 * shape_.top_k;
      used.insert(ids, ids + shape_.top_k);
    }
    return static_cast<double>(used.size()) * 3 * static_cast<double>(matrix_) * 2;
  }

  ExpertsArgs args(const DeviceArray<float>& routing, const DeviceArray<std::int32_t>& count,
                   int tokens, int first) const {
    const auto stack = [&](int index, int rows, int cols) {
      const std::size_t at =
          static_cast<std::size_t>(index) * static_cast<std::size_t>(shape_.experts) * matrix_;
      return ExpertStack{{Codes::kBF16, Scales::kNone, rows, cols,
                          reinterpret_cast<const std::byte*>(weights_.data() + at)},
                         static_cast<std::int64_t>(matrix_ * 2)};
    };
    ExpertsArgs a;
    a.gate = stack(0, shape_.ff, shape_.width);
    a.up = stack(1, shape_.ff, shape_.width);
    a.down = stack(2, shape_.width, shape_.ff);
    a.activation = shape_.activation;
    a.experts = shape_.experts;
    a.top_k = shape_.top_k;
    a.in = x_.data() + static_cast<std::ptrdiff_t>(first) * shape_.width;
    a.norm = norm_.data();
    a.eps = 1e-5F;
    a.routing = routing.data() + static_cast<std::ptrdiff_t>(first) * 2 * shape_.top_k;
    a.out = out_.data();
    a.count = count.data();
    a.scratch = scratch_.data();
    a.tokens = tokens;
    return a;
  }

  void time_experts(int tokens) const {
    const DeviceArray<std::int32_t> count(std::vector<std::int32_t>{tokens});
    std::vector<DeviceArray<float>> routing;
    double read = 0;
    for (int layer = 0; layer < kLayers; ++layer) {
      const std::vector<float> chosen = choices(tokens, layer);
      read += bytes(chosen, tokens) / kLayers;
      routing.emplace_back(chosen);
    }
    const double us = microseconds(kLayers, [&](const Launch& launch, int layer) {
      run_experts(args(routing[static_cast<std::size_t>(layer)], count, tokens, 0), launch);
    });
    std::printf("%s, %2d tokens: %7.2f us, %6.0f MB of weights, %5.0f GB/s\n", shape_.name, tokens,
                us, read * 1e-6, read / us * 1e-3);
  }

  void time_route(int tokens) const {
    const std::vector<float> router =
        random_floats(static_cast<std::size_t>(shape_.experts * shape_.width), 5);
    const DeviceArray<float> weight(router);
    const DeviceArray<float> scores(static_cast<std::size_t>(64 * shape_.experts));
    const DeviceArray<float> chosen(static_cast<std::size_t>(64 * 2 * shape_.top_k));
    MirroredState state({.tokens = tokens});
    *state.host.counts = {.tokens = tokens, .lanes = 1, .logit_rows = 1};
    state.upload();
    RouteArgs a;
    a.in = x_.data();
    a.norm = norm_.data();
    a.router = weight.data();
    a.eps = 1e-5F;
    a.width = shape_.width;
    a.experts = shape_.experts;
    a.top_k = shape_.top_k;
    a.out = chosen.data();
    a.scores = scores.data();
    a.state = state.device;
    a.tokens = tokens;
    std::printf("%s, %2d tokens: route %5.2f us\n", shape_.name, tokens,
                microseconds(kLayers, [&](const Launch& launch, int) { route(a, launch); }));
  }

  std::vector<float> run(const DeviceArray<float>& routing, int first, int live, int bucket) {
    const DeviceArray<std::int32_t> count(std::vector<std::int32_t>{live});
    out_.poison();
    run_experts(args(routing, count, bucket, first), test_launch());
    std::vector<float> all = out_.read();
    all.resize(static_cast<std::size_t>(live * shape_.width));
    return all;
  }

  void expect_same_bits() {
    const DeviceArray<float> routing(choices(64, 1));
    const std::vector<float> together = run(routing, 0, 64, 64);
    const auto width = static_cast<std::size_t>(shape_.width);
    for (const float v : together) ASSERT_TRUE(std::isfinite(v));
    for (const int t : {0, 1, 31, 63}) {
      const auto at = static_cast<std::size_t>(t) * width;
      for (const int bucket : {1, 2, 8, 16, 64}) {
        const std::vector<float> alone = run(routing, t, 1, t == 0 ? bucket : 1);
        ASSERT_EQ(std::memcmp(alone.data(), together.data() + at, width * sizeof(float)), 0)
            << shape_.name << ", token " << t << ", bucket " << bucket;
      }
    }
    for (const int count : {2, 7, 8, 9, 33}) {
      const std::vector<float> some = run(routing, 0, count, count);
      ASSERT_EQ(std::memcmp(some.data(), together.data(), some.size() * sizeof(float)), 0) << count;
    }
  }

 private:
  Shape shape_;
  std::size_t matrix_;
  DeviceArray<std::uint16_t> weights_;
  DeviceArray<float> x_, norm_, out_;
  DeviceArray<std::byte> scratch_;
};

void time_and_compare(const Shape& shape) {
  Mixture mixture(shape);
  mixture.expect_same_bits();
  for (const int tokens : {1, 4, 8, 64}) {
    mixture.time_route(tokens);
    mixture.time_experts(tokens);
  }
}

TEST(ExpertsTiming, Qwen3Moe30B) {
  time_and_compare({"128 experts, 8 of 2048 x 768", 128, 8, 2048, 768});
}
TEST(ExpertsTiming, GptOss20B) {
  time_and_compare({"32 experts, 4 of 2880 x 2880", 32, 4, 2880, 2880, Activation::kClampedSwish});
}

}  // namespace
}  // namespace pianola::cuda
