// Attention of models with an encoder against the reference backend on fresh random inputs: scores
// with a bias by distance, inputs that rows share, the step at hand, and what finish_heads() stores
// for them. What no token has written holds NaN, as do outputs before a launch.
#include "backends/cuda/kernels/attention_encoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <string>

#include "backends/cache_reach.h"
#include "backends/reference/ops.h"
#include "cuda/cuda_fixture.h"
#include "cuda/lane_fixture.h"
#include "plan/relative_bias.h"

namespace pianola::cuda {
namespace {

constexpr int kRows = 40;
constexpr int kTokens = 400;
constexpr DType kCacheTypes[] = {DType::kF32, DType::kF16, DType::kBF16, DType::kI8,
                                 DType::kF8E4M3};

std::size_t size_of(int n) { return static_cast<std::size_t>(n); }

struct Layer {
  DType dtype = DType::kF32;
  CacheHolds holds = CacheHolds::kTokens;
  int heads = 4;
  int kv_heads = 4;
  int key_dim = 64;
  int value_dim = 64;
  int capacity = 192;
  int window = 0;
  bool sinks = false;
  std::optional<RelativeBias> bias;

  std::string name() const {
    std::string text = std::string(dtype_name(dtype)) + ", " + std::to_string(heads) + "/" +
                       std::to_string(kv_heads) + " heads of " + std::to_string(key_dim) + " and " +
                       std::to_string(value_dim);
    if (holds == CacheHolds::kInput) text += ", inputs";
    if (holds == CacheHolds::kStep) text += ", the step";
    if (window > 0) text += ", window " + std::to_string(window);
    if (sinks) text += ", sinks";
    if (bias) {
      text += ", " + std::to_string(bias->buckets) + " buckets up to " +
              std::to_string(bias->max_distance) + (bias->both_directions ? " both ways" : "");
    }
    return text;
  }
};

RelativeBias bias_of(int buckets, int max_distance, bool both_directions) {
  return {.table = {},
          .buckets = buckets,
          .max_distance = max_distance,
          .both_directions = both_directions};
}

// Rows' inputs: slots that some rows share, and lengths by slot.
int input_slot(int row) { return (row * 7 + 3) % kRows / 2; }
int input_length(int row) {
  constexpr int kLengths[] = {0, 1, 63, 64, 65, 128, 150, 7, 16, 17, 192, 100};
  return kLengths[input_slot(row) % 12];
}

LaneTables tables_of(const std::vector<Lane>& lanes) {
  return {lanes, kRows, kTokens, [](RowState& state, int row) {
            state.input_slot = input_slot(row);
            state.input_length = input_length(row);
          }};
}

std::vector<float> random_floats(std::size_t count, std::mt19937& random, float size) {
  std::normal_distribution<float> normal(0, size);
  std::vector<float> values(count);
  for (float& v : values) v = normal(random);
  return values;
}

// A cache on the host and on the device.
class Caches {
 public:
  Caches(const Layer& layer, int slots) : layer_(layer) {
    view_.dtype = layer.dtype;
    view_.kv_heads = layer.kv_heads;
    view_.key_dim = layer.key_dim;
    view_.value_dim = layer.value_dim;
    view_.capacity = layer.capacity;
    view_.window = layer.window;
    view_.holds = layer.holds;
    view_.key_slot_bytes =
        cache_slot_bytes(layer.dtype, layer.capacity, layer.kv_heads, layer.key_dim);
    view_.value_slot_bytes =
        cache_slot_bytes(layer.dtype, layer.capacity, layer.kv_heads, layer.value_dim);
    keys.assign(size_of(slots) * view_.key_slot_bytes, std::byte{0xff});
    values.assign(size_of(slots) * view_.value_slot_bytes, std::byte{0xff});
  }

  // A position of a slot, as the reference stores it; `heads` are [kv_heads, dim].
  void put(bool is_key, int slot, int position, const float* heads) {
    const int dim = is_key ? layer_.key_dim : layer_.value_dim;
    std::byte* base = is_key ? keys.data() + size_of(slot) * view_.key_slot_bytes
                             : values.data() + size_of(slot) * view_.value_slot_bytes;
    for (int h = 0; h < layer_.kv_heads; ++h) {
      const std::size_t index = cache_index(position % layer_.capacity, h, layer_.kv_heads, 1);
      float scale = 0;
      reference::store_head(layer_.dtype, heads + h * dim, dim,
                            base + index * row_bytes(layer_.dtype, size_of(dim)), &scale);
      if (!has_scales(layer_.dtype)) continue;
      std::memcpy(base + cache_element_bytes(layer_.dtype, layer_.capacity, layer_.kv_heads, dim) +
                      index * sizeof(float),
                  &scale, sizeof(scale));
    }
  }
  void upload() {
    device_keys_ = DeviceArray<std::byte>(keys);
    device_values_ = DeviceArray<std::byte>(values);
  }
  LayerCacheView host() {
    LayerCacheView v = view_;
    v.keys = keys.data();
    v.values = values.data();
    return v;
  }
  LayerCacheView device() const {
    LayerCacheView v = view_;
    v.keys = device_keys_.data();
    v.values = device_values_.data();
    return v;
  }
  std::vector<std::byte> device_keys() const { return device_keys_.read(); }
  std::vector<std::byte> device_values() const { return device_values_.read(); }

  std::vector<std::byte> keys, values;

 private:
  Layer layer_;
  LayerCacheView view_;
  DeviceArray<std::byte> device_keys_, device_values_;
};

// Slots that a step may touch.
int slots_of(const Layer& layer, const std::vector<Lane>& lanes) {
  if (layer.holds == CacheHolds::kStep) return static_cast<int>(lanes.size());
  int most = 0;
  for (const Lane& lane : lanes) {
    most = std::max(most, layer.holds == CacheHolds::kInput ? input_slot(lane.row) : lane.row);
  }
  return most + 1;
}

// What lies in the caches is random, but the same number for the same layer, slot and position.
void fill(const Layer& layer, const std::vector<Lane>& lanes, Caches& caches) {
  const auto put = [&](int slot, int begin, int end) {
    for (int p = begin; p < end; ++p) {
      std::mt19937 random(static_cast<unsigned>(slot * 4096 + p));
      caches.put(true, slot, p,
                 random_floats(size_of(layer.kv_heads * layer.key_dim), random, 1).data());
      caches.put(false, slot, p,
                 random_floats(size_of(layer.kv_heads * layer.value_dim), random, 1).data());
    }
  };
  for (std::size_t i = 0; i < lanes.size(); ++i) {
    const Lane& lane = lanes[i];
    if (layer.holds == CacheHolds::kInput) put(input_slot(lane.row), 0, input_length(lane.row));
    if (layer.holds == CacheHolds::kStep) put(static_cast<int>(i), 0, input_length(lane.row));
    if (layer.holds != CacheHolds::kTokens) continue;
    // Of a ring what the row's earliest token of the step sees lies there, too.
    const int last = *std::max_element(lane.positions.begin(), lane.positions.end());
    int first = last;
    for (const int p : lane.positions) first = p < 0 ? first : std::min(first, p);
    put(lane.row, window_begin(first, layer.window), last + 1);
  }
}

struct Result {
  std::vector<float> out;   // [tokens, heads * value_dim]
  std::vector<float> want;  // the same, of the reference
};

// Attention over a step of `bucket` tokens.
Result attend_both(const Layer& layer, const std::vector<Lane>& lanes, int bucket, unsigned seed,
                   bool dependent = false) {
  const LaneTables tables = tables_of(lanes);
  Caches caches(layer, slots_of(layer, lanes));
  fill(layer, lanes, caches);
  caches.upload();
  const std::size_t live = size_of(tables.tokens());
  const std::size_t q_width = size_of(layer.heads * layer.key_dim);
  const std::size_t out_width = size_of(layer.heads * layer.value_dim);
  // A row's token has the same q in every step.
  std::vector<float> q;
  for (const Lane& lane : lanes) {
    for (const int position : lane.positions) {
      std::mt19937 random(seed + static_cast<unsigned>(lane.row * 8192 + position + 1));
      const std::vector<float> one = random_floats(q_width, random, 1.5F);
      q.insert(q.end(), one.begin(), one.end());
    }
  }
  std::mt19937 random(seed);
  const std::size_t numbers = size_of(layer.bias ? layer.bias->buckets * layer.heads : layer.heads);
  const std::vector<float> table = random_floats(numbers, random, 4);
  const std::vector<float> sinks = random_floats(size_of(layer.heads), random, 4);
  const float scale = 1.0F / std::sqrt(static_cast<float>(layer.key_dim));

  // The reference.
  Plan plan;
  plan.shape.tokens = bucket;
  plan.buffers = {{"q", Extent::kTokens, static_cast<std::int64_t>(q_width)},
                  {"out", Extent::kTokens, static_cast<std::int64_t>(out_width)}};
  AttentionOp op{.q = BufferId{0},
                 .cache = CacheId{0},
                 .heads = layer.heads,
                 .scale = scale,
                 .sinks = layer.sinks ? WeightId{1} : WeightId{},
                 .bias = layer.bias,
                 .out = BufferId{1}};
  if (op.bias) op.bias->table = WeightId{0};
  plan.ops = {op};
  const std::vector<WeightDecl> decls(2);
  const std::vector<BoundWeight> weights = {
      {&decls[0], {}, reinterpret_cast<const std::byte*>(table.data())},
      {&decls[1], {}, reinterpret_cast<const std::byte*>(sinks.data())}};
  const std::vector<LayerCacheView> views = {caches.host()};
  std::vector<std::byte> workspace(plan_workspace(plan).bytes);
  std::vector<double> scratch(size_of(layer.capacity + 2 * layer.key_dim + 2 * layer.value_dim));
  const BoundPlan bound(plan, {.weights = weights,
                               .caches = views,
                               .state = tables.host(),
                               .workspace = workspace.data(),
                               .scratch = reinterpret_cast<std::byte*>(scratch.data())});
  std::copy(q.begin(), q.end(), bound.buffer(BufferId{0}));
  reference::run(op, bound);
  Result result;
  result.want.assign(bound.buffer(BufferId{1}), bound.buffer(BufferId{1}) + live * out_width);

  // The kernel.
  q.resize(size_of(bucket) * q_width, NAN);
  const DeviceArray<float> device_q(q);
  const DeviceArray<float> device_table(table);
  const DeviceArray<float> device_sinks(sinks);
  const DeviceArray<float> out(size_of(bucket) * out_width);
  EncoderAttentionArgs args;
  args.attention.q = device_q.data();
  args.attention.out = out.data();
  args.attention.heads = layer.heads;
  args.attention.scale = scale;
  args.attention.sinks = layer.sinks ? device_sinks.data() : nullptr;
  args.attention.cache = caches.device();
  args.attention.state = tables.device();
  args.attention.tokens = bucket;
  if (layer.bias) args.bias = bias_steps(*layer.bias, device_table.data());
  attend_encoder(args, test_launch(dependent));
  result.out = out.read();
  EXPECT_TRUE(out.intact());
  for (std::size_t i = live * out_width; i < result.out.size(); ++i) {
    EXPECT_TRUE(std::isnan(result.out[i])) << layer.name() << ": padding was written";
    if (testing::Test::HasFailure()) break;
  }
  result.out.resize(live * out_width);
  EXPECT_EQ(caches.device_keys(), caches.keys) << layer.name();
  EXPECT_EQ(caches.device_values(), caches.values) << layer.name();
  return result;
}

// Values are of size 1, so this is also a relative tolerance; scores of some ten are rounded to f32
// here, and weights follow them.
constexpr double kTolerance = 2e-5;

void compare(const Layer& layer, const std::vector<Lane>& lanes, int bucket, unsigned seed = 1) {
  SCOPED_TRACE(layer.name() + ", " + std::to_string(bucket) + " tokens");
  const Result result = attend_both(layer, lanes, bucket, seed);
  ASSERT_EQ(result.out.size(), result.want.size());
  double worst = 0;
  for (std::size_t i = 0; i < result.out.size(); ++i) {
    const double error = std::abs(static_cast<double>(result.out[i]) - result.want[i]);
    ASSERT_LE(error, kTolerance) << "element " << i << ": " << result.out[i] << " and "
                                 << result.want[i];
    worst = std::max(worst, error);
  }
  testing::Test::RecordProperty("worst", std::to_string(worst));
}

// Every width of a lane's share, equal and unequal heads.
std::vector<Layer> widths(DType dtype, CacheHolds holds) {
  std::vector<Layer> layers;
  for (const auto& [key, value] :
       {std::pair{64, 64}, {24, 24}, {8, 8}, {128, 128}, {96, 64}, {256, 256}, {192, 200}}) {
    Layer layer{.dtype = dtype, .holds = holds, .key_dim = key, .value_dim = value};
    layer.kv_heads = key == 128 ? 2 : 4;
    layers.push_back(layer);
  }
  return layers;
}

std::vector<Lane> small_lanes() {
  return {run_of(2, 62, 4), {1, {-1, 0}}, {5, {-1}}, {0, {127}}, {7, {64, -1}}, {9, {15}}};
}

TEST(AttendEncoder, SmallStepsOfTokensMatchTheReference) {
  for (const DType dtype : kCacheTypes) {
    for (Layer layer : widths(dtype, CacheHolds::kTokens)) {
      layer.bias = bias_of(32, 128, false);
      compare(layer, small_lanes(), 16);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST(AttendEncoder, SmallInputsMatchTheReference) {
  for (const DType dtype : kCacheTypes) {
    for (const Layer& layer : widths(dtype, CacheHolds::kInput)) {
      compare(layer, small_lanes(), 16);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST(AttendEncoder, SmallStepsAtHandMatchTheReference) {
  for (Layer layer : widths(DType::kF32, CacheHolds::kStep)) {
    for (const bool biased : {false, true}) {
      if (biased) layer.bias = bias_of(32, 128, true);
      compare(layer, {run_of(1, 0, input_length(1)), run_of(2, 0, 5)}, 160);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

// Lanes at every edge of units, blocks and rounds of warps; beyond the farthest bucket, too.
TEST(AttendEncoder, LengthsMatchTheReference) {
  constexpr int kPositions[] = {0,   1,   3,   4,   7,   8,   15,   16,   17,   31,  32,
                                62,  63,  64,  65,  126, 127, 128,  129,  191,  192, 255,
                                256, 257, 511, 512, 513, 900, 1023, 1024, 1025, 1087};
  std::vector<Lane> lanes;
  for (const int position : kPositions) {
    lanes.push_back({static_cast<int>(lanes.size()), {position}});
  }
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kI8}) {
    for (const auto& [key, value] : {std::pair{64, 64}, {128, 128}, {256, 256}}) {
      Layer layer{.dtype = dtype, .key_dim = key, .value_dim = value, .capacity = 1088};
      layer.heads = layer.kv_heads = 2;
      layer.bias = bias_of(32, 128, false);
      compare(layer, lanes, 32);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

// Large steps, where neighbours share what they read: lanes that end within four tokens, that share
// an input, and masked tokens among them.
TEST(AttendEncoder, LargeStepsMatchTheReference) {
  std::vector<Lane> lanes = {run_of(5, 0, 129), {2, {-1, -1}}, {1, {100}}, run_of(0, 63, 101)};
  lanes.back().positions.push_back(-1);
  for (int row = 6; row < 30; ++row) lanes.push_back({row, {row}});
  for (const DType dtype : kCacheTypes) {
    for (const CacheHolds holds : {CacheHolds::kTokens, CacheHolds::kInput}) {
      for (Layer layer : widths(dtype, holds)) {
        if (holds == CacheHolds::kTokens) layer.bias = bias_of(32, 128, false);
        compare(layer, lanes, 263);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

TEST(AttendEncoder, SmallOddBiasesMatchTheReference) {
  for (const auto& [buckets, distance] : {std::pair{4, 3},
                                          {4, 130},
                                          {8, 20},
                                          {16, 64},
                                          {16, 1024},
                                          {32, 100},
                                          {64, 200},
                                          {128, 1024},
                                          {32, 17}}) {
    Layer layer{.heads = 3, .kv_heads = 3, .key_dim = 16, .value_dim = 16, .capacity = 1088};
    layer.bias = bias_of(buckets, distance, false);
    ASSERT_TRUE(bias_supported(*layer.bias));
    compare(layer, {{0, {1000}}, {1, {130}}, {2, {17}}}, 4);
    layer.holds = CacheHolds::kStep;
    layer.bias->both_directions = true;
    layer.capacity = 192;
    if (buckets == 32 && distance == 17) layer.bias->max_distance = 9;
    compare(layer, {run_of(6, 0, std::max(1, input_length(6)))}, 192);
    if (testing::Test::HasFatalFailure()) return;
  }
}

// Each distance has the bucket that relative_bucket() gives it: one position with a large bias
// decides what is attended to.
TEST(AttendEncoder, SmallBucketsAreThoseOfTheHost) {
  for (const auto& [buckets, distance] : {std::pair{32, 128}, {8, 20}, {16, 64}, {32, 100}}) {
    for (const bool both : {false, true}) {
      const RelativeBias bias = bias_of(buckets, distance, both);
      const BiasSteps steps = bias_steps(bias, nullptr);
      for (int d = 0; d <= 2 * distance; ++d) {
        int bucket = std::min(d, steps.near);
        for (int i = 0; i < steps.steps; ++i) bucket += d >= steps.from[i];
        EXPECT_EQ(bucket, relative_bucket(bias, -d)) << d;
        if (both && d > 0) {
          EXPECT_EQ(steps.one_way + bucket, relative_bucket(bias, d)) << d;
        }
        if (d >= steps.reach) {
          EXPECT_EQ(bucket, steps.one_way - 1) << d;
        }
      }
    }
  }
}

TEST(AttendEncoder, SmallWindowsAndSinksMatchTheReference) {
  for (const DType dtype : kCacheTypes) {
    for (const int window : {0, 1, 20, 70}) {
      Layer layer{.dtype = dtype, .window = window, .sinks = true};
      layer.capacity = window > 0 ? 128 : 256;
      layer.bias = bias_of(32, 128, false);
      compare(layer, {run_of(2, 130, 9), {1, {-1}}, run_of(0, 0, 3), {3, {200}}}, 16);
      compare(layer, {run_of(2, 130, 30), {1, {-1}}, run_of(0, 0, 30), {3, {200}}}, 80);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST(AttendEncoder, SmallRowsWithoutAnInputReadNothing) {
  int row = 0;
  while (input_length(row) != 0) ++row;
  Layer layer{.dtype = DType::kF16, .holds = CacheHolds::kInput};
  for (const int bucket : {2, 70}) {
    const Result result = attend_both(layer, {{row, {5}}, {row, {-1}}}, bucket, 1);
    EXPECT_TRUE(std::ranges::all_of(result.out, [](float x) { return x == 0; }));
  }
}

// A token alone, among others, behind masked ones, and in a step so large that neighbours share
// what they read.
TEST(AttendEncoder, StepsOfAnySizeGiveTheSameBits) {
  for (const DType dtype : kCacheTypes) {
    for (const CacheHolds holds : {CacheHolds::kTokens, CacheHolds::kInput}) {
      for (Layer layer : widths(dtype, holds)) {
        SCOPED_TRACE(layer.name());
        if (holds == CacheHolds::kTokens) layer.bias = bias_of(32, 128, false);
        const std::size_t width = size_of(layer.heads * layer.value_dim);
        std::vector<Lane> lanes = {run_of(3, 0, 3), {1, {-1}}, run_of(2, 60, 75), {0, {9}}};
        const std::vector<float> whole = attend_both(layer, lanes, 90, 1, true).out;
        for (const int position : {60, 61, 63, 64, 100, 134}) {
          const std::size_t at = size_of(4 + position - 60) * width;
          const auto same = [&](const std::vector<float>& out, std::size_t from) {
            return std::equal(out.begin() + static_cast<std::ptrdiff_t>(from),
                              out.begin() + static_cast<std::ptrdiff_t>(from + width),
                              whole.begin() + static_cast<std::ptrdiff_t>(at));
          };
          EXPECT_TRUE(same(attend_both(layer, {{2, {position}}}, 1, 1).out, 0)) << position;
          EXPECT_TRUE(same(attend_both(layer, {{5, {4}}, {4, {-1}}, {2, {position}}}, 64, 1).out,
                           2 * width))
              << position;
        }
      }
    }
  }
}

TEST(BiasSupport, IsStated) {
  EXPECT_TRUE(bias_supported(bias_of(32, 128, true)));
  EXPECT_TRUE(bias_supported(bias_of(128, 1024, false)));
  EXPECT_TRUE(bias_supported(bias_of(256, 1024, true)));
  EXPECT_FALSE(bias_supported(bias_of(32, 1025, false)));
  EXPECT_FALSE(bias_supported(bias_of(256, 1024, false)));
}

// --- What is stored ------------------------------------------------------------------------------

// Keys and values alone, into the slots of inputs, and with q, into the step at hand; no rope.
TEST(FinishHeads, SmallStoresOfInputsAndOfTheStep) {
  for (const DType dtype : kCacheTypes) {
    for (const CacheHolds holds : {CacheHolds::kInput, CacheHolds::kStep, CacheHolds::kTokens}) {
      if (holds == CacheHolds::kStep && dtype != DType::kF32) continue;
      for (const Layer& layer : widths(dtype, holds)) {
        SCOPED_TRACE(layer.name());
        const std::vector<Lane> lanes = {run_of(4, 0, 9), {1, {-1, 2}}, run_of(6, 60, 7)};
        const LaneTables tables = tables_of(lanes);
        const int bucket = tables.tokens() + 3;
        std::mt19937 random(3);
        const auto floats = [&](int width) {
          std::vector<float> values = random_floats(size_of(tables.tokens() * width), random, 1.5F);
          values.resize(size_of(bucket * width), NAN);
          return values;
        };
        const int k_width = layer.kv_heads * layer.key_dim;
        const int v_width = layer.kv_heads * layer.value_dim;
        const std::vector<float> k = floats(k_width);
        const std::vector<float> v = floats(v_width);
        const std::vector<float> q = floats(layer.heads * layer.key_dim);
        Caches caches(layer, slots_of(layer, lanes));
        caches.upload();
        const DeviceArray<float> device_k(k);
        const DeviceArray<float> device_v(v);
        const DeviceArray<float> device_q(q);
        HeadsArgs args;
        args.k = device_k.data();
        args.v = device_v.data();
        if (holds != CacheHolds::kInput) {
          args.q = args.q_out = device_q.data();
          args.heads = layer.heads;
        }
        args.style = RopeStyle::kNone;
        args.cache = caches.device();
        args.state = tables.device();
        args.tokens = bucket;
        finish_heads(args, test_launch());
        for (int t = 0; t < tables.tokens(); ++t) {
          const int position = tables.host().position[t];
          if (position < 0) continue;
          const int slot = slot_of(tables.host(), holds, t);
          caches.put(true, slot, position, k.data() + t * k_width);
          caches.put(false, slot, position, v.data() + t * v_width);
        }
        EXPECT_EQ(caches.device_keys(), caches.keys);
        EXPECT_EQ(caches.device_values(), caches.values);
        const std::vector<float> got = device_q.read();
        for (std::size_t i = 0; i < got.size(); ++i) {
          const std::size_t t = i / size_of(layer.heads * layer.key_dim);
          const bool live = t < size_of(tables.tokens());
          const bool cleared = live && holds != CacheHolds::kInput && tables.host().position[t] < 0;
          if (!live) {
            ASSERT_TRUE(std::isnan(got[i])) << i;
          } else {
            ASSERT_EQ(got[i], cleared ? 0.0F : q[i]) << i;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace pianola::cuda
