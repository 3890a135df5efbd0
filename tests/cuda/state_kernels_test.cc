// State layers in the shapes of real models: against the reference backend, and against themselves
// bit for bit. tests/ops/state_test.cc, which runs on a GPU as cuda_state_test, has the formulas
// and what happens when tokens are taken back.
#include "backends/cuda/kernels/state.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>

#include "cuda/graph_timing.h"
#include "cuda/state_fixture.h"
#include "expect_error.h"
#include "ops/state_machine.h"

namespace pianola {
namespace {

std::vector<int> sequence(int length, int seed) {
  std::vector<int> tokens(size_of(length));
  for (int i = 0; i < length; ++i) tokens[size_of(i)] = 1000 * seed + i;
  return tokens;
}

std::vector<std::pair<std::string, Layer>> real_layers() {
  std::vector<std::pair<std::string, Layer>> layers;
  layers.emplace_back(
      "qwen3-next",
      delta_layer({.heads = 32, .key_heads = 16, .key_dim = 128, .value_dim = 128}, 4));
  layers.emplace_back(
      "qwen3.5, GGUF",
      delta_layer({.heads = 32, .key_heads = 16, .key_dim = 128, .value_dim = 128, .group = 1}, 4));
  layers.emplace_back("bamba",
                      ssm_layer({.heads = 128, .groups = 1, .key_dim = 128, .value_dim = 64}, 4));
  layers.emplace_back("wide keys",
                      delta_layer({.heads = 2, .key_heads = 1, .key_dim = 256, .value_dim = 96}));
  return layers;
}

CacheOptions compact(int depth) {
  return {.max_seq_len = 1 << 16,
          .slots = Machine::kLanes,
          .rollback_depth = depth,
          .chunk = Machine::kTokens};
}

// Steps of 1, 3, 8 and 64 tokens, and a chunk.
std::vector<float> run_steps(Machine& machine, int slot, const std::vector<int>& row) {
  std::vector<float> out;
  int at = 0;
  for (const int count : {1, 3, 8, 64, 96, 28}) {
    const auto begin = row.begin() + at;
    const std::vector<float> piece = machine.run({{slot, at, {begin, begin + count}}});
    out.insert(out.end(), piece.begin(), piece.end());
    at += count;
  }
  return out;
}

TEST(StateKernels, RealShapesMatchTheReference) {
  for (const auto& [name, layer] : real_layers()) {
    SCOPED_TRACE(name);
    const std::vector<int> row = sequence(200, 1);
    Machine machine("cuda", {}, layer);
    Machine reference("reference", {}, layer);
    const std::vector<float> got = run_steps(machine, 1, row);
    const std::vector<float> want = reference.run_whole(0, row);
    ASSERT_EQ(got.size(), want.size());
    float largest = 1;
    for (const float x : want) largest = std::max(largest, std::abs(x));
    // As in state_test.cc; the convolution before it rounds as well.
    for (std::size_t i = 0; i < got.size(); ++i) {
      ASSERT_NEAR(got[i], want[i], 96 * 0x1p-24F * largest) << "element " << i;
    }
  }
}

// Alone in large steps; beside others in steps of any size; with drafts that are taken back.
TEST(StateKernels, RealShapesHaveTheSameBitsInAnySteps) {
  for (const auto& [name, layer] : real_layers()) {
    SCOPED_TRACE(name);
    const std::size_t width = size_of(layer.out_width);
    const std::vector<int> row = sequence(140, 2);
    Machine alone("cuda", {}, layer);
    const std::vector<float> want = alone.run_whole(0, row);
    for (const int depth : {0, 5}) {
      SCOPED_TRACE("depth " + std::to_string(depth));
      Machine machine("cuda", {}, layer, compact(depth));
      std::mt19937 random(3);
      std::array<int, 3> known = {0, 0, 0};
      int draft = 500000;
      while (known[1] < static_cast<int>(row.size())) {
        std::vector<Lane> lanes;
        for (const int slot : {2, 1, 0}) {
          const int most = slot == 1 ? 9 : 30;
          const int count = std::min(1 + static_cast<int>(random() % size_of(most)),
                                     static_cast<int>(row.size()) - known[size_of(slot)]);
          if (count == 0) continue;
          const auto begin = row.begin() + known[size_of(slot)];
          lanes.push_back({slot, known[size_of(slot)], {begin, begin + count}});
        }
        // Tokens that are not accepted, behind those of slot 1.
        for (int n = depth > 0 ? static_cast<int>(random() % size_of(depth + 1)) : 0; n > 0; --n) {
          for (Lane& lane : lanes) {
            if (lane.slot == 1) lane.tokens.push_back(draft++);
          }
        }
        const std::vector<float> got = machine.run(lanes);
        const float* out = got.data();
        for (const Lane& lane : lanes) {
          const int from = known[size_of(lane.slot)];
          const int count =
              std::min(static_cast<int>(lane.tokens.size()), static_cast<int>(row.size()) - from);
          int kept = 0;
          while (kept < count && lane.tokens[size_of(kept)] == row[size_of(from + kept)]) ++kept;
          ASSERT_EQ(
              std::memcmp(out, want.data() + size_of(from) * width, size_of(kept) * width * 4), 0)
              << "slot " << lane.slot << " from " << from;
          out += lane.tokens.size() * width;
          known[size_of(lane.slot)] += kept;
        }
      }
    }
  }
}

TEST(StateKernels, LongKeysAreRefused) {
  const Layer layer = delta_layer(
      {.heads = 1, .key_heads = 1, .key_dim = cuda::kMaxStateKeyDim + 1, .value_dim = 8});
  expect_error(ErrorCode::kUnsupported, "delta_rule of state 0: keys of 257 elements",
               [&] { Machine("cuda", {}, layer); });
}

// Every kernel once, for the sanitizers: masked tokens, unequal lanes, steps folded in once more.
TEST(StateKernels, SmallLayersGoBackAndForth) {
  std::vector<std::pair<std::string, Layer>> layers;
  layers.emplace_back("delta",
                      delta_layer({.heads = 2, .key_heads = 1, .key_dim = 5, .value_dim = 36}, 4));
  layers.emplace_back("ssm",
                      ssm_layer({.heads = 2, .groups = 2, .key_dim = 20, .value_dim = 7}, 3));
  layers.emplace_back("gated norm", gated_norm_layer({.gate_first = true}));
  layers.emplace_back("wide gated norm", gated_norm_layer({.groups = 2, .group = 1100}));
  for (const auto& [name, layer] : layers) {
    SCOPED_TRACE(name);
    const std::size_t width = size_of(layer.out_width);
    const std::vector<int> row = sequence(17, 1);
    Machine machine("cuda", {.eager = true, .batch_invariant = true}, layer, compact(4));
    Machine reference("reference", {}, layer);
    const std::vector<float> want = reference.run_whole(0, row);
    const auto compare = [&](const std::vector<float>& got, std::size_t begin, int first,
                             int count) {
      for (std::size_t i = 0; i < size_of(count) * width; ++i) {
        ASSERT_NEAR(got[begin * width + i], want[size_of(first) * width + i], 2e-5)
            << "from " << first << " element " << i;
      }
    };
    const std::vector<int> start(row.begin(), row.begin() + 6);
    compare(machine.run({{2, 0, {9}}, {0, 0, start}}), 1, 0, 6);
    machine.run({{0, 6, {7001, kMasked, 7002, 7003}}, {3, 0, {kMasked}}});  // taken back
    std::vector<int> rest(row.begin() + 6, row.end());
    rest.insert(rest.begin(), kMasked);
    compare(machine.run({{0, 6, rest}}), 1, 6, 11);
  }
}

}  // namespace

namespace cuda {
namespace {

// --- Times, printed. ----------------------------------------------------------------------------

// The state layers of Qwen3-Next-80B-A3B, each with caches of its own so that the second-level
// cache does not hold all.
class Qwen3Next {
 public:
  static constexpr int kLayers = 36;
  static constexpr int kHeads = 32;
  static constexpr int kKeyHeads = 16;
  static constexpr int kDim = 128;
  static constexpr int kKeys = kKeyHeads * kDim;
  static constexpr int kValues = kHeads * kDim;
  static constexpr int kWidth = 2 * kKeys + kValues;

  // `tokens` of each of `rows`, from `position` on.
  Qwen3Next(int rows, int tokens, int rollback_depth, int position)
      : state_({.rows = rows, .max_seq_len = 2048, .tokens = rows * tokens, .lanes = rows}) {
    const StepState& s = state_.host;
    *s.counts = {.tokens = rows * tokens, .lanes = rows};
    for (int t = 0; t < rows * tokens; ++t) {
      s.position[t] = position + t % tokens;
      s.lane_of[t] = t / tokens;
    }
    for (int r = 0; r <= rows; ++r) s.first_token[r] = r * tokens;
    for (int r = 0; r < rows; ++r) s.row_of[r] = r;
    state_.upload();
    const std::vector<StateSpec> specs(kLayers, StateSpec{.heads = kHeads,
                                                          .key_dim = kDim,
                                                          .value_dim = kDim,
                                                          .conv_width = kWidth,
                                                          .conv_taps = 4});
    const CacheLayout layout(
        {{}, specs},
        {.max_seq_len = 2048, .slots = rows, .rollback_depth = rollback_depth, .chunk = tokens});
    cache_ = std::make_unique<StaticCache>(layout, arena_);
    memory_ = DeviceArray<std::byte>(arena_.size());
    memory_.zero();
    arena_.seal(memory_.data());
    const auto floats = [&](int width) {
      DeviceArray<float> array(size_of(std::int64_t{rows} * tokens * width));
      array.zero();
      return array;
    };
    in_ = floats(kWidth);
    convolved_ = floats(kWidth);
    rates_ = floats(4 * kHeads);
    small_ = floats(kHeads);
    gate_ = floats(kValues);
    out_ = floats(kValues);
    weight_ = DeviceArray<float>(std::size_t{4} * kWidth);
    weight_.zero();
    conv_ = {.in = in_.data(),
             .weight = weight_.data(),
             .silu = true,
             .out = convolved_.data(),
             .state = state_.device,
             .lanes = rows,
             .tokens = rows * tokens};
    fold_ = {.rule = StateRule::kDelta,
             .in = convolved_.data(),
             .in_width = kWidth,
             .key_at = kKeys,
             .query_at = 0,
             .value_at = 2 * kKeys,
             .key_heads = kKeyHeads,
             .group = kHeads / kKeyHeads,
             .rate = small_.data(),
             .beta = small_.data(),
             .a_log = weight_.data(),
             .dt_bias = weight_.data(),
             .eps = 1e-6F,
             .out = out_.data(),
             .rates = reinterpret_cast<StepRates*>(rates_.data()),
             .state = state_.device,
             .lanes = rows};
    norm_ = {.in = out_.data(),
             .gate = gate_.data(),
             .weight = weight_.data(),
             .out = out_.data(),
             .eps = 1e-6F,
             .width = kValues,
             .group = kDim,
             .count = &state_.device.counts->tokens,
             .tokens = rows * tokens};
  }

  void conv(const Launch& on, int layer) {
    conv_.view = cache_->state(layer % kLayers);
    short_conv(conv_, on);
  }
  void fold(const Launch& on, int layer) {
    fold_.view = cache_->state(layer % kLayers);
    fold_states(fold_, on);
  }
  void norm(const Launch& on) { gated_norm(norm_, on); }

 private:
  MirroredState state_;
  Arena arena_;
  std::unique_ptr<StaticCache> cache_;
  DeviceArray<std::byte> memory_;
  DeviceArray<float> in_, convolved_, rates_, small_, gate_, out_, weight_;
  ShortConvArgs conv_;
  FoldArgs fold_;
  GatedNormArgs norm_;
};

void print_times(int rows, int tokens, int depth = 0, int again = 0) {
  constexpr int kAnchor = 960;  // of every depth below
  Qwen3Next layers(rows, tokens, depth, kAnchor + again);
  constexpr int kCount = Qwen3Next::kLayers;
  const double fold = microseconds(kCount, [&](const Launch& on, int i) { layers.fold(on, i); });
  const double conv = microseconds(kCount, [&](const Launch& on, int i) { layers.conv(on, i); });
  const double norm = microseconds(kCount, [&](const Launch& on, int) { layers.norm(on); });
  const double all = microseconds(kCount, [&](const Launch& on, int i) {
    layers.conv(on, i);
    layers.fold(on, i);
    layers.norm(on);
  });
  const double bytes = 2.0 * rows * Qwen3Next::kValues * Qwen3Next::kDim * sizeof(float);
  std::printf(
      "[ TIME     ] %2d rows of %3d tokens, depth %d, %d steps once more: fold %.2f us (%.0f GB/s "
      "of states), short convolution %.2f us, gated norm %.2f us, all three %.2f us\n",
      rows, tokens, depth, again, fold, bytes / fold / 1e3, conv, norm, all);
}

TEST(StateTiming, DecodeStepsOfQwen3Next) {
  for (const int rows : {1, 4, 16, 64}) print_times(rows, 1);
  print_times(1, 1, 8);
  print_times(1, 5, 8);
  print_times(1, 5, 8, 7);
}

TEST(StateTiming, ChunksOfQwen3Next) {
  print_times(1, 64);
  print_times(1, 512);
  print_times(4, 512);
}

}  // namespace
}  // namespace cuda
}  // namespace pianola
