// Multi-head latent attention on a GPU against the reference backend on fresh random inputs: what
// is stored, what queries become, attention over latents, and products of each head by its own
// matrix. What no token has written holds NaN, as do outputs before a launch.
#include "backends/cuda/kernels/latent.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>

#include "backends/reference/ops.h"
#include "cuda/cuda_fixture.h"
#include "cuda/lane_fixture.h"
#include "expect_error.h"
#include "ops/experts_fixture.h"

namespace pianola::cuda {
namespace {

constexpr int kRows = 12;
constexpr int kTokens = 200;
constexpr int kCapacity = 192;
constexpr DType kCacheTypes[] = {DType::kF32, DType::kF16, DType::kBF16, DType::kI8,
                                 DType::kF8E4M3};

std::size_t size_of(int n) { return static_cast<std::size_t>(n); }

struct Shape {
  DType dtype = DType::kF32;
  int heads = 4;
  int latent = 32;
  int turned = 16;
  int plain = 24;
  RopeStyle style = RopeStyle::kInterleaved;
  bool sinks = false;

  int key_dim() const { return latent + turned; }
  std::string name() const {
    return std::string(dtype_name(dtype)) + ", " + std::to_string(heads) + " heads of " +
           std::to_string(latent) + " and " + std::to_string(turned);
  }
};

// On both sides of what one piece of a lane holds; the widest that there is.
std::vector<Shape> shapes(DType dtype) {
  return {{.dtype = dtype},
          {.dtype = dtype, .heads = 3, .latent = 8, .turned = 8, .plain = 8, .sinks = true},
          {.dtype = dtype, .heads = 2, .latent = 192, .turned = 64, .style = RopeStyle::kHalf},
          {.dtype = dtype, .heads = 2, .latent = 200, .turned = 64, .plain = 40},
          {.dtype = dtype, .heads = 4, .latent = 512, .turned = 64, .plain = 128},
          {.dtype = dtype, .heads = 1, .latent = 640, .turned = 128, .plain = 8}};
}

std::vector<Lane> small_lanes() {
  return {run_of(2, 62, 4), {1, {-1, 0}}, {5, {-1}}, {0, {127}}, {7, {64, -1}}, {9, {15}}};
}

// A row's token has the same numbers in every step.
std::vector<float> numbers_of(const std::vector<Lane>& lanes, int width, unsigned seed) {
  std::vector<float> all;
  for (const Lane& lane : lanes) {
    for (const int position : lane.positions) {
      const auto one = random_floats(
          size_of(width), seed + static_cast<unsigned>(lane.row * 8192 + position + 1), 1.5F);
      all.insert(all.end(), one.begin(), one.end());
    }
  }
  return all;
}

LayerCacheView view_of(const Shape& shape, std::byte* keys) {
  LayerCacheView view;
  view.dtype = shape.dtype;
  view.kv_heads = 1;
  view.key_dim = shape.key_dim();
  view.value_dim = shape.latent;
  view.capacity = kCapacity;
  view.latent = true;
  view.key_slot_bytes = cache_slot_bytes(shape.dtype, kCapacity, 1, shape.key_dim());
  view.keys = keys;
  view.value_slot_bytes = view.key_slot_bytes;
  view.values = keys;
  return view;
}

// The keys of all rows on the host.
class Cache {
 public:
  explicit Cache(const Shape& shape) : shape_(shape) {
    bytes.assign(kRows * view_of(shape, nullptr).key_slot_bytes, std::byte{0xff});
  }
  // As the reference stores it.
  void put(int row, int position, const float* key) {
    const auto dim = size_of(shape_.key_dim());
    std::byte* slot = view().key_slot(row);
    float scale = 0;
    reference::store_head(shape_.dtype, key, shape_.key_dim(),
                          slot + size_of(position) * row_bytes(shape_.dtype, dim), &scale);
    if (!has_scales(shape_.dtype)) return;
    std::memcpy(slot + cache_element_bytes(shape_.dtype, kCapacity, 1, shape_.key_dim()) +
                    size_of(position) * sizeof(float),
                &scale, sizeof(scale));
  }
  // Of an f32 cache.
  const float* key(int row, int position) {
    return reinterpret_cast<const float*>(view().key_slot(row)) + position * shape_.key_dim();
  }
  LayerCacheView view() { return view_of(shape_, bytes.data()); }

  std::vector<std::byte> bytes;

 private:
  Shape shape_;
};

// A Plan of one op, bound to memory of the host.
class Host {
 public:
  Host(Plan plan, const std::vector<std::vector<float>>& weights, std::vector<WeightDecl> decls,
       const LayerCacheView& cache, const StepState& state)
      : plan_(std::move(plan)), decls_(std::move(decls)), views_({cache}) {
    for (std::size_t i = 0; i < decls_.size(); ++i) {
      WeightLayout layout;
      layout.bytes = weights[i].size() * sizeof(float);
      layout.dtype = DType::kF32;
      bound_weights_.push_back(
          {&decls_[i], layout, reinterpret_cast<const std::byte*>(weights[i].data())});
    }
    workspace_.resize(plan_workspace(plan_).bytes);
    scratch_.resize(4096);
    bound_ = std::make_unique<BoundPlan>(
        plan_, Binding{.weights = bound_weights_,
                       .caches = views_,
                       .state = state,
                       .workspace = workspace_.data(),
                       .scratch = reinterpret_cast<std::byte*>(scratch_.data())});
  }
  const BoundPlan& bound() const { return *bound_; }

 private:
  Plan plan_;
  std::vector<WeightDecl> decls_;
  std::vector<LayerCacheView> views_;
  std::vector<BoundWeight> bound_weights_;
  std::vector<std::byte> workspace_;
  std::vector<double> scratch_;
  std::unique_ptr<BoundPlan> bound_;
};

std::vector<float> buffer_of(const BoundPlan& bound, int id, std::size_t count) {
  const float* from = bound.buffer(BufferId{id});
  return {from, from + count};
}

// --- LatentQkvOp. ---

struct Stored {
  std::vector<float> q_out, want_q_out;
  std::vector<std::byte> keys;     // of the device
  std::vector<std::byte> scratch;  // the cache of the reference
};

Stored store_both(const Shape& s, const std::vector<Lane>& lanes, int bucket, unsigned seed) {
  const LaneTables tables(lanes, kRows, kTokens);
  const auto live = size_of(tables.tokens());
  const int q_width = s.heads * (s.plain + s.turned);
  const int out_width = s.heads * s.key_dim();
  std::vector<float> q = numbers_of(lanes, q_width, seed);
  std::vector<float> kv = numbers_of(lanes, s.key_dim(), seed + 17);
  const std::vector<std::vector<float>> weights = {
      random_floats(size_of(s.latent), 3), random_floats(size_of(s.heads * s.latent * s.plain), 4),
      [&] {
        std::vector<float> frequencies;
        for (int i = 0; i < s.turned / 2; ++i) {
          frequencies.push_back(
              std::pow(10000.0F, -2.0F * static_cast<float>(i) / static_cast<float>(s.turned)));
        }
        return frequencies;
      }()};
  std::vector<WeightDecl> decls(3);
  decls[0].cols = s.latent;
  decls[1].rows = s.latent;
  decls[1].cols = s.plain;
  decls[1].experts = s.heads;
  decls[2].cols = s.turned / 2;

  Plan plan;
  plan.shape.tokens = bucket;
  plan.buffers = {{"q", Extent::kTokens, q_width},
                  {"kv", Extent::kTokens, s.key_dim()},
                  {"out", Extent::kTokens, out_width}};
  const LatentQkvOp op{.q = BufferId{0},
                       .kv = BufferId{1},
                       .kv_norm = {WeightId{0}, 1e-6F},
                       .absorb = WeightId{1},
                       .rope = {WeightId{2}, s.style, 1.25F},
                       .cache = CacheId{0},
                       .q_out = BufferId{2}};
  plan.ops = {op};
  Cache cache(s);
  const Host host(plan, weights, decls, cache.view(), tables.host());
  const BoundPlan& bound = host.bound();
  std::copy(q.begin(), q.end(), bound.buffer(op.q));
  std::copy(kv.begin(), kv.end(), bound.buffer(op.kv));
  reference::run(op, bound);
  Stored stored;
  stored.want_q_out = buffer_of(bound, 2, live * size_of(out_width));
  stored.scratch = cache.bytes;

  q.resize(size_of(bucket * q_width), NAN);
  kv.resize(size_of(bucket * s.key_dim()), NAN);
  const DeviceArray<float> device_q(q), device_kv(kv), norm(weights[0]), matrix(weights[1]),
      frequencies(weights[2]), out(size_of(bucket * out_width));
  const DeviceArray<std::byte> keys(cache.bytes.size());
  HeadProductArgs absorb;
  absorb.weight = {.codes = Codes::kF32,
                   .rows = s.latent,
                   .cols = s.plain,
                   .data = reinterpret_cast<const std::byte*>(matrix.data())};
  absorb.stride = std::int64_t{s.latent} * s.plain * 4;
  absorb.heads = s.heads;
  absorb.in = device_q.data();
  absorb.in_token = q_width;
  absorb.in_head = s.plain + s.turned;
  absorb.out = out.data();
  absorb.out_token = out_width;
  absorb.out_head = s.key_dim();
  absorb.count = &tables.device().counts->tokens;
  absorb.tokens = bucket;
  head_products(absorb, test_launch());
  finish_latents({.q = device_q.data(),
                  .kv = device_kv.data(),
                  .kv_norm = norm.data(),
                  .eps = 1e-6F,
                  .inverse_frequencies = frequencies.data(),
                  .style = s.style,
                  .attention_factor = 1.25F,
                  .heads = s.heads,
                  .plain = s.plain,
                  .q_out = out.data(),
                  .cache = view_of(s, keys.data()),
                  .state = tables.device(),
                  .tokens = bucket},
                 test_launch());
  stored.q_out = out.read();
  EXPECT_TRUE(out.intact() && keys.intact());
  for (std::size_t i = stored.want_q_out.size(); i < stored.q_out.size(); ++i) {
    EXPECT_TRUE(std::isnan(stored.q_out[i])) << s.name() << ": padding was written";
    if (testing::Test::HasFailure()) break;
  }
  stored.q_out.resize(stored.want_q_out.size());
  stored.keys = keys.read();
  return stored;
}

// Elements are sums of up to `plain` products of size 1.5, or of size 2.
void expect_near(const float* got, const float* want, std::size_t count, double tolerance) {
  for (std::size_t i = 0; i < count; ++i) {
    if (std::isnan(want[i])) {
      ASSERT_TRUE(std::isnan(got[i])) << "element " << i;
    } else {
      ASSERT_NEAR(got[i], want[i], tolerance) << "element " << i;
    }
  }
}

TEST(FinishLatents, SmallStepsMatchTheReference) {
  for (const Shape& s : shapes(DType::kF32)) {
    SCOPED_TRACE(s.name());
    const Stored stored = store_both(s, small_lanes(), 16, 5);
    expect_near(stored.q_out.data(), stored.want_q_out.data(), stored.q_out.size(), 1e-4);
    expect_near(reinterpret_cast<const float*>(stored.keys.data()),
                reinterpret_cast<const float*>(stored.scratch.data()), stored.keys.size() / 4,
                2e-5);
    if (testing::Test::HasFatalFailure()) return;
  }
}

// The key of a token is the same in any cache, and is rounded as the reference rounds it; nothing
// else of the cache is touched.
TEST(FinishLatents, SmallStepsRoundAsTheReference) {
  for (const DType dtype : kCacheTypes) {
    for (const Shape& s : shapes(dtype)) {
      SCOPED_TRACE(s.name());
      Shape exact = s;
      exact.dtype = DType::kF32;
      Cache plain(exact);
      plain.bytes = store_both(exact, small_lanes(), 16, 5).keys;
      Cache want(s);
      for (const Lane& lane : small_lanes()) {
        for (const int p : lane.positions) {
          if (p >= 0) want.put(lane.row, p, plain.key(lane.row, p));
        }
      }
      ASSERT_EQ(store_both(s, small_lanes(), 16, 5).keys, want.bytes);
    }
  }
}

// --- AttentionOp. ---

struct Result {
  std::vector<float> out;   // [tokens, heads * latent]
  std::vector<float> want;  // the same, of the reference
};

Result attend_both(const Shape& s, const std::vector<Lane>& lanes, int bucket, unsigned seed,
                   bool dependent = false) {
  const LaneTables tables(lanes, kRows, kTokens);
  Cache cache(s);
  for (const Lane& lane : lanes) {
    const int last = *std::max_element(lane.positions.begin(), lane.positions.end());
    for (int p = 0; p <= last; ++p) {
      cache.put(
          lane.row, p,
          random_floats(size_of(s.key_dim()), static_cast<unsigned>(lane.row * 4096 + p)).data());
    }
  }
  const auto live = size_of(tables.tokens());
  const int q_width = s.heads * s.key_dim();
  const int out_width = s.heads * s.latent;
  std::vector<float> q = numbers_of(lanes, q_width, seed);
  const std::vector<std::vector<float>> weights = {random_floats(size_of(s.heads), seed, 4)};
  const float scale = 1.0F / std::sqrt(static_cast<float>(s.key_dim()));
  Plan plan;
  plan.shape.tokens = bucket;
  plan.buffers = {{"q", Extent::kTokens, q_width}, {"out", Extent::kTokens, out_width}};
  const AttentionOp op{.q = BufferId{0},
                       .cache = CacheId{0},
                       .heads = s.heads,
                       .scale = scale,
                       .sinks = s.sinks ? WeightId{0} : WeightId{},
                       .out = BufferId{1}};
  plan.ops = {op};
  const Host host(plan, weights, std::vector<WeightDecl>(1), cache.view(), tables.host());
  const BoundPlan& bound = host.bound();
  std::copy(q.begin(), q.end(), bound.buffer(op.q));
  reference::run(op, bound);
  Result result;
  result.want = buffer_of(bound, 1, live * size_of(out_width));

  q.resize(size_of(bucket * q_width), NAN);
  const DeviceArray<float> device_q(q), sinks(weights[0]), out(size_of(bucket * out_width));
  const DeviceArray<std::byte> keys(cache.bytes);
  AttentionArgs args;
  args.q = device_q.data();
  args.out = out.data();
  args.heads = s.heads;
  args.scale = scale;
  args.sinks = s.sinks ? sinks.data() : nullptr;
  args.cache = view_of(s, keys.data());
  args.state = tables.device();
  args.tokens = bucket;
  attend_latent(args, test_launch(dependent));
  result.out = out.read();
  EXPECT_TRUE(out.intact());
  for (std::size_t i = result.want.size(); i < result.out.size(); ++i) {
    EXPECT_TRUE(std::isnan(result.out[i])) << s.name() << ": padding was written";
    if (testing::Test::HasFailure()) break;
  }
  result.out.resize(result.want.size());
  EXPECT_EQ(keys.read(), cache.bytes) << s.name();
  return result;
}

// Values are of size 1, so this is also a relative tolerance, as for attend_encoder().
constexpr double kTolerance = 2e-5;

void compare(const Shape& s, const std::vector<Lane>& lanes, int bucket) {
  SCOPED_TRACE(s.name() + ", " + std::to_string(bucket) + " tokens");
  const Result result = attend_both(s, lanes, bucket, 1);
  ASSERT_EQ(result.out.size(), result.want.size());
  expect_near(result.out.data(), result.want.data(), result.out.size(), kTolerance);
}

TEST(AttendLatent, SmallStepsMatchTheReference) {
  for (const DType dtype : kCacheTypes) {
    for (const Shape& s : shapes(dtype)) {
      compare(s, small_lanes(), 16);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

// Two heads a block.
TEST(AttendLatent, SmallHeadsOfLargeStepsMatchTheReference) {
  for (const DType dtype : kCacheTypes) {
    for (const Shape& s : shapes(dtype)) {
      compare(s, small_lanes(), 65);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

// A row's token at every edge of units, rounds of warps and blocks.
TEST(AttendLatent, LengthsMatchTheReference) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kI8}) {
    const Shape s{.dtype = dtype, .latent = 512, .turned = 64};
    for (const int first : {0, 96}) compare(s, {run_of(3, first, 96)}, 96);
    if (testing::Test::HasFatalFailure()) return;
  }
}

TEST(AttendLatent, ATokensBitsDoNotDependOnItsStep) {
  for (const DType dtype : kCacheTypes) {
    for (const Shape& s : shapes(dtype)) {
      SCOPED_TRACE(s.name());
      const std::vector<Lane> many = {run_of(3, 40, 90), {1, {-1, 7}}, {4, {191}}};
      const std::vector<float> all = attend_both(s, many, 130, 9).out;
      const auto width = size_of(s.heads * s.latent);
      const auto expect_same = [&](const std::vector<float>& got, std::size_t at,
                                   std::size_t token) {
        ASSERT_EQ(std::memcmp(got.data() + at * width, all.data() + token * width, width * 4), 0);
      };
      for (const int position : {40, 63, 64, 129}) {
        const std::vector<float> alone = attend_both(s, {{3, {position}}}, 1, 9, true).out;
        expect_same(alone, 0, size_of(position - 40));
      }
      const std::vector<float> few = attend_both(s, {{4, {191}}, {1, {7}}, {3, {99}}}, 64, 9).out;
      expect_same(few, 0, 92);
      expect_same(few, 1, 91);
      expect_same(few, 2, 59);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

// --- HeadLinearOp. ---

// Heads of `cols` and the matrices they are multiplied by.
struct Heads {
  Heads(DType dtype, int heads, int rows, int cols) : width(heads * cols), out(heads * rows) {
    stack = weights.matrices(dtype, heads, rows, cols, 40);
  }
  Machine::Record record() const {
    return [this](Recorder& r, BufferId x, BufferId) {
      const BufferId to = r.buffer("out", Extent::kTokens, out);
      r.record(HeadLinearOp{.in = x, .weight = stack, .out = to});
      return to;
    };
  }
  Tokens tokens(int count) const {
    const auto n = size_of(count) * size_of(width);
    return {count, random_floats(n, 5), random_floats(n, 6), {}};
  }

  Weights weights;
  WeightId stack;
  int width;
  int out;
};

void compare(const Heads& heads, std::initializer_list<int> counts,
             const BackendOptions& options = {}) {
  Machine reference("reference", {}, heads.weights);
  Machine machine("cuda", options, heads.weights);
  for (const int count : counts) {
    SCOPED_TRACE(std::to_string(count) + " tokens");
    const Tokens tokens = heads.tokens(count);
    const std::vector<float> want = reference.run(tokens, heads.record());
    const std::vector<float> got = machine.run(tokens, heads.record(), count + 3);
    float largest = 0;
    for (const float v : want) largest = std::max(largest, std::fabs(v));
    // Sums in f32 of a few hundred products.
    expect_near(got.data(), want.data(), want.size(), 1e-5 * (1 + largest));
    for (std::size_t i = want.size(); i < got.size(); ++i) {
      ASSERT_TRUE(std::isnan(got[i])) << "padding was written";
    }
    const std::vector<float> alone = machine.run(one_token(tokens, count - 1), heads.record());
    ASSERT_EQ(std::memcmp(alone.data(), got.data() + size_of(count - 1) * size_of(heads.out),
                          size_of(heads.out) * 4),
              0);
  }
}

constexpr DType kForms[] = {DType::kF32,  DType::kF16,  DType::kBF16, DType::kQ4_0,
                            DType::kQ4_1, DType::kQ5_0, DType::kQ5_1, DType::kQ8_0,
                            DType::kQ4_K, DType::kQ5_K, DType::kQ6_K};

TEST(CudaHeadLinear, SmallHeadsOfEveryFormMatchTheReference) {
  for (const DType dtype : kForms) {
    SCOPED_TRACE(dtype_name(dtype));
    compare(Heads(dtype, 3, 10, 256), {1, 5}, {.eager = true});
    if (testing::Test::HasFatalFailure()) return;
  }
}

TEST(CudaHeadLinear, MatchesTheReference) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    SCOPED_TRACE(dtype_name(dtype));
    for (const auto& [heads, rows, cols] :
         {std::tuple{1, 1, 8}, {4, 32, 24}, {5, 40, 72}, {2, 130, 512}, {16, 512, 128}}) {
      compare(Heads(dtype, heads, rows, cols), {1, 2, 8, 9, 64, 70});
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST(Latents, WiderKeysThanThereIsAKernelForAreRefused) {
  const auto backend = make_backend("cuda", {});
  const std::vector<AttentionSpec> specs = {
      {.kv_heads = 1, .key_dim = 776, .value_dim = 712, .latent = true}};
  Plan plan;
  plan.ops = {AttentionOp{.cache = CacheId{0}, .heads = 2}};
  PlanTables tables;
  tables.caches = CacheSpecs(specs);
  expect_error(ErrorCode::kUnsupported, "at most 768", [&] { backend->check(plan, tables); });
}

}  // namespace
}  // namespace pianola::cuda
