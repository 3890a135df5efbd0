// act(gate) * up against the reference backend's, which is in double, in floats and in bfloat16;
// and act(up), where there is no gate.
#include "backends/cuda/kernels/gate.h"

#include <cmath>
#include <random>

#include "backends/reference/ops.h"
#include "cuda/cuda_fixture.h"
#include "tensor/half.h"

namespace pianola::cuda {
namespace {

struct Size {
  int tokens = 1;
  int width = 8;
  std::size_t count() const {
    return static_cast<std::size_t>(tokens) * static_cast<std::size_t>(width);
  }
};

std::vector<float> random_floats(std::size_t count, std::mt19937& random) {
  std::normal_distribution<float> normal(0, 3);
  std::vector<float> values(count);
  for (float& v : values) v = normal(random);
  return values;
}

std::vector<std::uint16_t> to_bf16(const std::vector<float>& values) {
  std::vector<std::uint16_t> bits;
  for (const float v : values) bits.push_back(f32_to_bf16(v));
  return bits;
}

constexpr Activation kActivations[] = {Activation::kSilu, Activation::kGeluTanh,
                                       Activation::kClampedSwish, Activation::kRelu};

// What an activation may be wrong by: the exponential of a large number is as inexact as it is.
double error(double want) { return 1e-5 * (1 + std::fabs(want)); }

void compare_f32(const Size& size, Activation act, bool in_place, bool gated,
                 std::mt19937& random) {
  const std::vector<float> gate = random_floats(size.count(), random);
  const std::vector<float> up =
      gated ? random_floats(size.count(), random) : std::vector<float>(size.count(), 1.0F);
  const DeviceArray<float> gate_device(gate);
  const DeviceArray<float> up_device(up);
  const DeviceArray<float> apart(size.count());
  const DeviceArray<float>& out = in_place ? gate_device : apart;
  gate_f32({.gate = gate_device.data(),
            .up = gated ? up_device.data() : nullptr,
            .out = out.data(),
            .activation = act,
            .width = size.width,
            .tokens = size.tokens},
           test_launch());
  const std::vector<float> got = out.read();
  ASSERT_TRUE(out.intact());
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double want = reference::gated(act, gate[i], up[i]);
    ASSERT_NEAR(got[i], want, error(want)) << gate[i] << " " << up[i];
  }
}

void compare_bf16(const Size& size, Activation act, bool biases, bool gated, std::mt19937& random) {
  const std::vector<std::uint16_t> gate = to_bf16(random_floats(size.count(), random));
  const std::vector<std::uint16_t> up =
      to_bf16(gated ? random_floats(size.count(), random) : std::vector<float>(size.count(), 1.0F));
  const auto width = static_cast<std::size_t>(size.width);
  const std::vector<float> gate_bias = random_floats(width, random);
  const std::vector<float> up_bias = random_floats(width, random);
  const DeviceArray<std::uint16_t> gate_device(gate);
  const DeviceArray<std::uint16_t> up_device(up);
  const DeviceArray<float> gate_bias_device(gate_bias);
  const DeviceArray<float> up_bias_device(up_bias);
  const DeviceArray<std::uint16_t> out(size.count());
  gate_bf16({.gate = gate_device.data(),
             .up = gated ? up_device.data() : nullptr,
             .gate_bias = biases ? gate_bias_device.data() : nullptr,
             .up_bias = biases && gated ? up_bias_device.data() : nullptr,
             .out = out.data(),
             .activation = act,
             .width = size.width,
             .tokens = size.tokens},
            test_launch());
  const std::vector<std::uint16_t> got = out.read();
  ASSERT_TRUE(out.intact());
  for (std::size_t i = 0; i < got.size(); ++i) {
    const float g = bf16_to_f32(gate[i]) + (biases ? gate_bias[i % width] : 0.0F);
    const float u = bf16_to_f32(up[i]) + (biases && gated ? up_bias[i % width] : 0.0F);
    const double want = reference::gated(act, g, u);
    ASSERT_NEAR(bf16_to_f32(got[i]), want, 0.0040 * std::fabs(want) + error(want)) << g << " " << u;
  }
}

void compare(const Size& size) {
  std::mt19937 random(1);
  SCOPED_TRACE("tokens " + std::to_string(size.tokens) + " width " + std::to_string(size.width));
  for (const Activation act : kActivations) {
    SCOPED_TRACE(activation_name(act));
    for (const bool flag : {false, true}) {
      for (const bool gated : {true, false}) {
        compare_f32(size, act, flag, gated, random);
        compare_bf16(size, act, flag, gated, random);
      }
    }
  }
}

// On both sides of a block's worth of elements.
TEST(Gate, SmallSizesMatchTheReference) {
  for (const Size& size : {Size{1, 8}, {3, 8}, {1, 2048}, {5, 1024}, {7, 1032}}) compare(size);
}

TEST(Gate, MatchesTheReference) {
  for (const Size& size : {Size{1, 14336}, {64, 8192}, {513, 1536}}) compare(size);
}

// A gate or an up value that is not a number is not hidden by a limit, and a large one gives what
// the limit of the formula is.
TEST(Gate, SmallEdges) {
  const float inf = INFINITY;
  const std::vector<float> gate = {NAN, 1, NAN, inf, 1e30F, -1e30F, 7.5F, -60, 2, 2};
  const std::vector<float> up = {1, NAN, 0, 1, 1, 1, 2, 3, 1e30F, -1e30F};
  std::vector<float> gates(16);
  std::vector<float> ups(16);
  std::copy(gate.begin(), gate.end(), gates.begin());
  std::copy(up.begin(), up.end(), ups.begin());
  const DeviceArray<float> gate_device(gates);
  const DeviceArray<float> up_device(ups);
  for (const Activation act : kActivations) {
    const DeviceArray<float> out(gates.size());
    gate_f32({.gate = gate_device.data(),
              .up = up_device.data(),
              .out = out.data(),
              .activation = act,
              .width = 16},
             test_launch());
    const std::vector<float> got = out.read();
    for (std::size_t i = 0; i < gate.size(); ++i) {
      const float want = reference::gated(act, gate[i], up[i]);
      SCOPED_TRACE(std::string(activation_name(act)) + " " + std::to_string(i));
      if (std::isnan(want) || std::isinf(want)) {
        EXPECT_EQ(std::isnan(got[i]), std::isnan(want));
        EXPECT_EQ(std::isinf(got[i]), std::isinf(want));
      } else {
        EXPECT_NEAR(got[i], want, 1e-5 * (1 + std::fabs(want)));
      }
    }
  }
}

}  // namespace
}  // namespace pianola::cuda
