// How long the products of one decode step take when nothing else is between them: graphs of the
// layers of Llama-3.2-1B with random weights, every layer its own, so that nothing is in a cache.
#include <algorithm>
#include <functional>

#include "backends/cuda/kernels/linear.h"
#include "cuda/graph_timing.h"

namespace pianola::cuda {
namespace {

constexpr int kLayers = 16;
constexpr int kWidth = 2048;
constexpr int kFf = 8192;
constexpr int kVocab = 128256;

class Chain : public ::testing::Test {
 protected:
  struct Layer {
    PackedWeight q, k, v, o, gate, up, down;
  };

  void SetUp() override {
    const std::size_t per_layer =
        static_cast<std::size_t>(kWidth) * (kWidth + 512 + 512 + kWidth + 3 * kFf);
    weights_ =
        DeviceArray<std::uint16_t>(per_layer * kLayers + static_cast<std::size_t>(kVocab) * kWidth);
    check(cudaMemset(weights_.data(), 0x3c, weights_.bytes()), "weights");  // 0.0115 each
    std::uint16_t* at = weights_.data();
    const auto take = [&](int rows, int cols) {
      PackedWeight w{Codes::kBF16, Scales::kNone, rows, cols, reinterpret_cast<std::byte*>(at)};
      at += static_cast<std::size_t>(rows) * static_cast<std::size_t>(cols);
      return w;
    };
    for (Layer& l : layers_) {
      l = {take(kWidth, kWidth), take(512, kWidth), take(512, kWidth), take(kWidth, kWidth),
           take(kFf, kWidth),    take(kFf, kWidth), take(kWidth, kFf)};
    }
    head_ = take(kVocab, kWidth);
    logits_ = DeviceArray<float>(static_cast<std::size_t>(64) * kVocab);
    const std::vector<float> ones(64 * kFf, 1e-3F);
    x_ = DeviceArray<float>(ones);
    y_ = DeviceArray<float>(ones);
    h_ = DeviceArray<float>(ones);
    norm_ = DeviceArray<float>(ones);
    scratch_ = DeviceArray<std::byte>(linear_scratch_bytes(64, kFf));
  }

  LinearArgs args(int tokens, const DeviceArray<std::int32_t>& count, const float* in, int cols,
                  bool norm) const {
    LinearArgs a;
    a.in = in;
    a.in_ld = cols;
    a.norm = norm ? norm_.data() : nullptr;
    a.eps = 1e-5F;
    a.count = count.data();
    a.tokens = tokens;
    a.scratch = scratch_.data();
    return a;
  }

  void qkv(const Layer& l, int tokens, const DeviceArray<std::int32_t>& count, const Launch& to) {
    LinearArgs a = args(tokens, count, x_.data(), kWidth, true);
    a.parts = 3;
    a.part[0] = {l.q, nullptr, y_.data(), kWidth};
    a.part[1] = {l.k, nullptr, h_.data(), 512};
    a.part[2] = {l.v, nullptr, h_.data() + 64 * 512, 512};
    linear(a, to);
  }
  void o(const Layer& l, int tokens, const DeviceArray<std::int32_t>& count, const Launch& to) {
    LinearArgs a = args(tokens, count, y_.data(), kWidth, false);
    a.part[0] = {l.o, nullptr, x_.data(), kWidth};
    a.residual = x_.data();
    linear(a, to);
  }
  void gate_up(const Layer& l, int tokens, const DeviceArray<std::int32_t>& count,
               const Launch& to) {
    LinearArgs a = args(tokens, count, x_.data(), kWidth, true);
    a.parts = 2;
    a.end = LinearEnd::kGated;
    a.part[0] = {l.gate, nullptr, h_.data(), kFf};
    a.part[1] = {l.up, nullptr, nullptr, kFf};
    linear(a, to);
  }
  void down(const Layer& l, int tokens, const DeviceArray<std::int32_t>& count, const Launch& to) {
    LinearArgs a = args(tokens, count, h_.data(), kFf, false);
    a.part[0] = {l.down, nullptr, x_.data(), kWidth};
    a.residual = x_.data();
    linear(a, to);
  }

  void head(int tokens, const DeviceArray<std::int32_t>& count, const Launch& to) {
    LinearArgs a = args(tokens, count, x_.data(), kWidth, true);
    a.part[0] = {head_, nullptr, logits_.data(), kVocab};
    linear(a, to);
  }

  double time(int tokens, const std::function<void(const Layer&, const DeviceArray<std::int32_t>&,
                                                   const Launch&)>& layer) {
    const DeviceArray<std::int32_t> count(std::vector<std::int32_t>{tokens});
    return microseconds(kLayers, [&](const Launch& to, int i) { layer(layers_[i], count, to); });
  }

  DeviceArray<std::uint16_t> weights_;
  Layer layers_[kLayers];
  PackedWeight head_;
  DeviceArray<float> logits_;
  DeviceArray<float> x_, y_, h_, norm_;
  DeviceArray<std::byte> scratch_;
};

TEST_F(Chain, Timing) {
  for (const int tokens : {1, 8, 32, 64}) {
    using Count = DeviceArray<std::int32_t>;
    const double a = time(
        tokens, [&](const Layer& l, const Count& c, const Launch& to) { qkv(l, tokens, c, to); });
    const double b = time(
        tokens, [&](const Layer& l, const Count& c, const Launch& to) { o(l, tokens, c, to); });
    const double d = time(tokens, [&](const Layer& l, const Count& c, const Launch& to) {
      gate_up(l, tokens, c, to);
    });
    const double e = time(
        tokens, [&](const Layer& l, const Count& c, const Launch& to) { down(l, tokens, c, to); });
    const double all = time(tokens, [&](const Layer& l, const Count& c, const Launch& to) {
      qkv(l, tokens, c, to);
      o(l, tokens, c, to);
      gate_up(l, tokens, c, to);
      down(l, tokens, c, to);
    });
    const double h =
        time(tokens, [&](const Layer&, const Count& c, const Launch& to) { head(tokens, c, to); });
    // Bytes at 4,600 GB/s: 2.7, 1.8, 14.6, 7.3 us; the head 114.2.
    std::printf(
        "tokens %2d: qkv %5.2f us, o %5.2f us, gate and up %5.2f us, down %5.2f us; a layer %5.2f "
        "us; the head %6.2f us\n",
        tokens, a, b, d, e, all, h);
  }
}

}  // namespace
}  // namespace pianola::cuda
