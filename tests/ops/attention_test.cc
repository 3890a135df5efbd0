// Attention kernels, every instruction set this machine has, against double precision on fresh
// random inputs; memory beyond the sequences holds NaN.
#include "backends/cpu/kernels/attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <memory>
#include <new>
#include <numeric>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "backends/reference/ops.h"
#include "base/thread_pool.h"
#include "cache/cache_type.h"

namespace pianola::cpu {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

template <typename T>
class Aligned {
 public:
  explicit Aligned(std::size_t count)
      : data_(static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t{64}))) {}
  T* get() const { return data_.get(); }

 private:
  struct Free {
    void operator()(T* p) const { ::operator delete(p, std::align_val_t{64}); }
  };
  std::unique_ptr<T, Free> data_;
};

std::size_t product(std::initializer_list<int> sizes) {
  std::size_t n = 1;
  for (const int size : sizes) n *= static_cast<std::size_t>(size);
  return n;
}

// Scalar conversions of the test's own, independent of the kernels'.
float f16_value(std::uint16_t h) {
  const int exponent = (h >> 10) & 31;
  const int fraction = h & 1023;
  double v = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  if (exponent == 31) v = fraction == 0 ? HUGE_VAL : std::nan("");
  return static_cast<float>((h & 0x8000) != 0 ? -v : v);
}
float bf16_value(std::uint16_t h) {
  const std::uint32_t bits = std::uint32_t{h} << 16;
  float v = 0;
  std::memcpy(&v, &bits, 4);
  return v;
}

float e4m3_value(std::uint8_t f) {
  const int exponent = (f >> 3) & 15;
  const int fraction = f & 7;
  double v = exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);
  if ((f & 0x7F) == 0x7F) v = std::nan("");
  return static_cast<float>((f & 0x80) != 0 ? -v : v);
}

struct Shape {
  int heads = 4;
  int kv_heads = 2;
  int head_dim = 64;
  int capacity = 256;
  int slots = 1;
  DType dtype = DType::kF16;
  int window = 0;
  int latent_dim = 0;  // the values are the first elements of the keys

  int value_dim() const { return latent_dim > 0 ? latent_dim : head_dim; }
};

// A cache full of NaN.
struct Cache {
  explicit Cache(const Shape& s)
      : shape(s),
        slot_elements(product({s.capacity, s.kv_heads, s.head_dim})),
        elements(static_cast<std::size_t>(s.slots) * slot_elements),
        slot_bytes(slot_elements * dtype_info(s.dtype).bytes +
                   (s.dtype == DType::kI8 ? product({s.capacity, s.kv_heads, 4}) : 0)),
        bytes(static_cast<std::size_t>(s.slots) * slot_bytes),
        keys(bytes),
        values(bytes) {
    std::memset(keys.get(), 0xFF, bytes);  // NaN in all types, of int8 the scales
    std::memset(values.get(), 0xFF, bytes);
  }
  KvCache view() const {
    return {keys.get(),     values.get(),   shape.dtype,  shape.capacity,
            shape.kv_heads, shape.head_dim, shape.window, shape.latent_dim};
  }
  // The contract's formula: [slots, capacity / 64, kv_heads, 64, head_dim].
  std::size_t index(int slot, int position, int head) const {
    position %= shape.capacity;
    const std::size_t block =
        product({slot, shape.capacity / 64}) + static_cast<std::size_t>(position / 64);
    return ((block * static_cast<std::size_t>(shape.kv_heads) + static_cast<std::size_t>(head)) *
                64 +
            static_cast<std::size_t>(position % 64)) *
           static_cast<std::size_t>(shape.head_dim);
  }
  // Where element i lies, and the scale of its position and head.
  std::byte* element(std::byte* data, std::size_t i) const {
    return data + i / slot_elements * slot_bytes +
           i % slot_elements * dtype_info(shape.dtype).bytes;
  }
  float* scale(std::byte* data, std::size_t i) const {
    return reinterpret_cast<float*>(data + i / slot_elements * slot_bytes + slot_elements) +
           i % slot_elements / static_cast<std::size_t>(shape.head_dim);
  }
  double value(std::byte* data, std::size_t i) const {
    const std::byte* at = element(data, i);
    if (shape.dtype == DType::kI8) {
      return static_cast<double>(*reinterpret_cast<const std::int8_t*>(at)) *
             static_cast<double>(*scale(data, i));
    }
    if (shape.dtype == DType::kF8E4M3) return e4m3_value(std::to_integer<std::uint8_t>(*at));
    if (shape.dtype == DType::kF32) return *reinterpret_cast<const float*>(at);
    const std::uint16_t h = *reinterpret_cast<const std::uint16_t*>(at);
    return shape.dtype == DType::kF16 ? f16_value(h) : bf16_value(h);
  }
  // Makes one position and head NaN.
  void poison(int slot, int position, int head) const {
    const std::size_t i = index(slot, position, head);
    for (std::byte* data : {keys.get(), values.get()}) {
      std::memset(element(data, i), 0xFF,
                  static_cast<std::size_t>(shape.head_dim) * dtype_info(shape.dtype).bytes);
      if (shape.dtype == DType::kI8) *scale(data, i) = kNan;
    }
  }

  Shape shape;
  std::size_t slot_elements;
  std::size_t elements;
  std::size_t slot_bytes;
  std::size_t bytes;
  Aligned<std::byte> keys;
  Aligned<std::byte> values;
};

std::vector<float> random_floats(std::size_t n, unsigned seed, float scale = 1.0F) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal(0.0F, scale);
  std::vector<float> v(n);
  for (float& x : v) x = normal(engine);
  return v;
}

// A step: which tokens, with their queries; run() computes it with some number of workers.
struct Step {
  std::vector<std::int32_t> positions;
  std::vector<std::int32_t> slots;
  std::vector<float> queries;           // [tokens, heads, head_dim]
  std::vector<float> sinks;             // [heads], or none
  std::vector<std::int32_t> ends = {};  // of each token's positions, or none
  std::vector<float> bias = {};         // [offsets -kReach..kReach, heads], or none

  static constexpr int kReach = 90;
  int end(int t) const {
    const auto i = static_cast<std::size_t>(t);
    return ends.empty() ? positions[i] + 1 : ends[i];
  }
  int tokens() const { return static_cast<int>(positions.size()); }
};

std::vector<float> run(const Cache& cache, const Step& step, Isa isa, int workers) {
  const Shape& s = cache.shape;
  const int width = s.heads * s.value_dim();
  // Rows of the output are further apart than they need be; the gap must stay as it is.
  std::vector<float> output(product({step.tokens(), width + 8}), -7.0F);
  AttentionArgs args;
  args.isa = isa;
  args.cache = cache.view();
  args.tokens = step.tokens();
  args.heads = s.heads;
  args.scale = 1.0F / std::sqrt(static_cast<float>(s.head_dim));
  args.positions = step.positions.data();
  args.slots = step.slots.data();
  args.queries = step.queries.data();
  args.query_stride = s.heads * s.head_dim;
  args.output = output.data();
  args.output_stride = width + 8;
  args.sinks = step.sinks.empty() ? nullptr : step.sinks.data();
  args.ends = step.ends.empty() ? nullptr : step.ends.data();
  std::vector<std::int32_t> buckets(2 * Step::kReach + 1);  // a bucket for each offset
  std::iota(buckets.begin(), buckets.end(), 0);
  if (!step.bias.empty()) args.bias = {step.bias.data(), buckets.data(), Step::kReach};
  const std::size_t bytes = attention_scratch_bytes(args.cache, s.heads, step.tokens(), workers);
  Aligned<std::byte> scratch(bytes + 64);
  std::memset(scratch.get(), 0xFF, bytes + 64);
  // The partition is what matters here, not the threads: one after the other is the same.
  for (int w = 0; w < workers; ++w) attend(args, scratch.get(), w, workers);
  if (attention_needs_combine(args, workers)) {
    for (int w = workers - 1; w >= 0; --w) combine(args, scratch.get(), w, workers);
  }
  for (std::size_t i = bytes; i < bytes + 64; ++i) {
    EXPECT_EQ(scratch.get()[i], std::byte{0xFF}) << "scratch overrun";
  }
  std::vector<float> dense;
  for (int t = 0; t < step.tokens(); ++t) {
    const float* row = output.data() + t * (width + 8);
    dense.insert(dense.end(), row, row + width);
    for (int i = width; i < width + 8; ++i) EXPECT_EQ(row[i], -7.0F);
  }
  return dense;
}

// Appends random keys and values for positions 0..length-1 of a slot.
void fill(const Cache& cache, int slot, int length, Isa isa, unsigned seed) {
  const Shape& s = cache.shape;
  const std::size_t n = product({length, s.kv_heads, s.head_dim});
  const std::vector<float> keys = random_floats(n, seed);
  const std::vector<float> values = random_floats(n, seed + 1);
  std::vector<std::int32_t> positions(static_cast<std::size_t>(length));
  for (int i = 0; i < length; ++i) positions[static_cast<std::size_t>(i)] = i;
  const std::vector<std::int32_t> slots(static_cast<std::size_t>(length), slot);
  AppendArgs args{isa,          cache.view(), length,        positions.data(),
                  slots.data(), keys.data(),  values.data(), s.kv_heads * s.head_dim};
  for (int w = 0; w < 3; ++w) append(args, w, 3);
}

Step tail_step(const Cache& cache, int slot, int length, int tokens, unsigned seed) {
  Step step;
  for (int t = 0; t < tokens; ++t) step.positions.push_back(length - tokens + t);
  step.slots.assign(static_cast<std::size_t>(tokens), slot);
  step.queries =
      random_floats(product({tokens, cache.shape.heads, cache.shape.head_dim}), seed, 2.0F);
  return step;
}

std::vector<double> reference(const Cache& cache, const Step& step) {
  const Shape& s = cache.shape;
  const int group = s.heads / s.kv_heads;
  const double scale = 1.0F / std::sqrt(static_cast<float>(s.head_dim));
  std::vector<double> keys(cache.elements);
  std::vector<double> values(cache.elements);
  for (std::size_t i = 0; i < cache.elements; ++i) {
    keys[i] = cache.value(cache.keys.get(), i);
    values[i] = cache.value(s.latent_dim > 0 ? cache.keys.get() : cache.values.get(), i);
  }
  std::vector<double> output;
  for (int t = 0; t < step.tokens(); ++t) {
    const int length = step.end(t);
    if (length <= 0) {
      output.insert(output.end(), product({s.heads, s.head_dim}), 0.0);
      continue;
    }
    const int slot = step.slots[static_cast<std::size_t>(t)];
    for (int h = 0; h < s.heads; ++h) {
      const float* q = step.queries.data() + (t * s.heads + h) * s.head_dim;
      std::vector<double> scores(static_cast<std::size_t>(length));
      const int begin = s.window > 0 ? std::max(0, length - s.window) : 0;
      double top = -HUGE_VAL;
      for (int p = begin; p < length; ++p) {
        const double* key = keys.data() + cache.index(slot, p, h / group);
        double sum = 0;
        for (int d = 0; d < s.head_dim; ++d) sum += static_cast<double>(q[d]) * key[d];
        double& score = scores[static_cast<std::size_t>(p)];
        score = sum * scale;
        if (!step.bias.empty()) {
          const int offset = std::clamp(p - step.positions[static_cast<std::size_t>(t)],
                                        -Step::kReach, Step::kReach);
          const int at = (offset + Step::kReach) * s.heads + h;
          score += step.bias[static_cast<std::size_t>(at)];
        }
        top = std::max(top, score);
      }
      double total = 0;
      if (!step.sinks.empty()) {
        const double sink = step.sinks[static_cast<std::size_t>(h)];
        top = std::max(top, sink);
        total = std::exp(sink - top);
      }
      std::vector<double> acc(static_cast<std::size_t>(s.value_dim()));
      for (int p = begin; p < length; ++p) {
        const double* value = values.data() + cache.index(slot, p, h / group);
        const double weight = std::exp(scores[static_cast<std::size_t>(p)] - top);
        total += weight;
        for (std::size_t d = 0; d < acc.size(); ++d) acc[d] += weight * value[d];
      }
      for (const double v : acc) output.push_back(v / total);
    }
  }
  return output;
}

// Values are of size 1, so this is also a relative tolerance; measured errors are below 1e-6.
constexpr double kTolerance = 4e-6;

void expect_near(const std::vector<float>& got, const std::vector<double>& want,
                 const std::string& what) {
  ASSERT_EQ(got.size(), want.size());
  double worst = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double error = std::abs(static_cast<double>(got[i]) - want[i]);
    if (!(error <= kTolerance)) {
      FAIL() << what << ": element " << i << " is " << got[i] << ", expected " << want[i];
    }
    worst = std::max(worst, error);
  }
  testing::Test::RecordProperty("worst", std::to_string(worst));
}

bool same_bits(const float* a, const float* b, int n) {
  return std::memcmp(a, b, static_cast<std::size_t>(n) * sizeof(float)) == 0;
}

// The tiers above AVX-512 share its kernels.
std::vector<Isa> distinct_isas() {
  std::vector<Isa> isas = supported_isas();
  std::erase_if(isas, [](Isa isa) { return isa > Isa::kAvx512; });
  return isas;
}

class Attention : public testing::TestWithParam<Isa> {};
INSTANTIATE_TEST_SUITE_P(Isas, Attention, testing::ValuesIn(distinct_isas()),
                         [](const auto& isa) { return std::string(isa_name(isa.param)); });

TEST_P(Attention, EqualsDoublePrecisionAtEveryLength) {
  for (const DType dtype : kCacheTypes) {
    const Cache cache({.capacity = 1024, .dtype = dtype});
    for (const int length :
         {1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 255, 256, 257, 511, 513, 1000, 1024}) {
      fill(cache, 0, length, GetParam(), static_cast<unsigned>(length));
      const Step step = tail_step(cache, 0, length, 1, 7);
      for (const int workers : {1, 2}) {
        expect_near(run(cache, step, GetParam(), workers), reference(cache, step),
                    std::string(dtype_name(dtype)) + " length " + std::to_string(length));
      }
    }
  }
}

// One key of a latent and a part that turns for all heads, whose values are the latent. Values have
// no memory of their own: what the cache has for them stays NaN.
TEST_P(Attention, LatentsEqualDoublePrecision) {
  unsigned seed = 400;
  for (const auto& [latent, turned, heads] : std::vector<std::tuple<int, int, int>>{
           {24, 8, 4}, {32, 16, 4}, {128, 64, 3}, {512, 64, 16}, {512, 64, 128}}) {
    const Cache cache({.heads = heads,
                       .kv_heads = 1,
                       .head_dim = latent + turned,
                       .capacity = 640,
                       .dtype = kCacheTypes[seed % kCacheTypes.size()],
                       .latent_dim = latent});
    ASSERT_TRUE(attention_supported(cache.shape.dtype, heads, 1, latent + turned, latent));
    for (const int length : {1, 40, 64, 257, 600}) {
      fill(cache, 0, length, GetParam(), ++seed);
      for (const int tokens : {1, 3, 30}) {
        if (tokens > length || (heads == 128 && tokens * length > 600)) continue;
        const Step step = tail_step(cache, 0, length, tokens, ++seed);
        const std::vector<float> got = run(cache, step, GetParam(), 1);
        expect_near(got, reference(cache, step),
                    "latent " + std::to_string(latent) + " length " + std::to_string(length));
        // Workers change no bit, nor do the tokens beside one.
        const std::vector<float> shared = run(cache, step, GetParam(), 3);
        EXPECT_TRUE(same_bits(got.data(), shared.data(), static_cast<int>(got.size())));
        Step last;
        last.positions = {step.positions.back()};
        last.slots = {step.slots.back()};
        last.queries.assign(step.queries.end() - std::ptrdiff_t{heads} * (latent + turned),
                            step.queries.end());
        const std::vector<float> alone = run(cache, last, GetParam(), 1);
        EXPECT_TRUE(same_bits(got.data() + (got.size() - alone.size()), alone.data(),
                              static_cast<int>(alone.size())));
      }
    }
  }
  EXPECT_FALSE(attention_supported(DType::kF16, 4, 1, 1032, 1024));
  EXPECT_FALSE(attention_supported(DType::kF16, 4, 1, 32, 40));
  EXPECT_FALSE(attention_supported(DType::kF16, 4, 1, 32, 12));
}

TEST_P(Attention, EqualsDoublePrecisionForEveryShape) {
  unsigned seed = 100;
  for (const int head_dim : {8, 16, 24, 32, 64, 80, 96, 128, 256}) {
    for (const int group : {1, 2, 3, 4, 5, 7, 8}) {
      const int kv_heads = 1 + group % 3;
      const Cache cache({.heads = kv_heads * group,
                         .kv_heads = kv_heads,
                         .head_dim = head_dim,
                         .capacity = 128,
                         .dtype = kCacheTypes[seed % kCacheTypes.size()]});
      ASSERT_TRUE(attention_supported(cache.shape.dtype, cache.shape.heads, kv_heads, head_dim));
      fill(cache, 0, 75, GetParam(), ++seed);
      for (const int tokens : {1, 3, 30}) {
        const Step step = tail_step(cache, 0, 75, tokens, ++seed);
        expect_near(run(cache, step, GetParam(), 2), reference(cache, step),
                    "head_dim " + std::to_string(head_dim) + " group " + std::to_string(group));
      }
    }
  }
}

TEST_P(Attention, EqualsDoublePrecisionForChunks) {
  for (const DType dtype : kCacheTypes) {
    const Cache cache({.heads = 9, .kv_heads = 3, .capacity = 384, .dtype = dtype});
    fill(cache, 0, 300, GetParam(), 5);
    for (const int tokens : {2, 17, 31, 32, 33, 64, 70, 300}) {
      const Step step = tail_step(cache, 0, 300, tokens, static_cast<unsigned>(tokens));
      expect_near(run(cache, step, GetParam(), 2), reference(cache, step),
                  std::to_string(tokens) + " tokens");
    }
  }
}

// A window in a ring that is overwritten again and again: the bits of a cache that forgets nothing,
// which are those of double precision but for rounding. What no token attends to holds NaN.
TEST_P(Attention, AWindowSeesItsPositionsAndNoOther) {
  constexpr int kLength = 450;
  constexpr int kMost = 70;  // tokens of a step
  for (const auto& [window, dtype] :
       {std::pair(1, DType::kF32), std::pair(16, DType::kF16), std::pair(63, DType::kBF16),
        std::pair(64, DType::kF32), std::pair(65, DType::kF16), std::pair(200, DType::kBF16),
        std::pair(300, DType::kF16), std::pair(16, DType::kI8), std::pair(65, DType::kI8),
        std::pair(200, DType::kI8), std::pair(63, DType::kF8E4M3)}) {
    Shape shape{.heads = 9, .kv_heads = 3, .capacity = 1024, .dtype = dtype, .window = window};
    const Cache whole(shape);
    shape.capacity = (window + kMost - 1 + 63) / 64 * 64;
    const Cache ring(shape);
    const int width = shape.kv_heads * shape.head_dim;
    const std::size_t count = product({kLength, width});
    const std::vector<float> keys = random_floats(count, 31);
    const std::vector<float> values = random_floats(count, 32);
    std::mt19937 engine(33);
    for (int at = 0; at < kLength;) {
      constexpr int kSizes[] = {1, 1, 1, 2, 3, 5, 17, 33, kMost};
      const int tokens = std::min(kSizes[engine() % std::size(kSizes)], kLength - at);
      const Step step = tail_step(ring, 0, at + tokens, tokens, static_cast<unsigned>(at));
      for (const Cache* cache : {&whole, &ring}) {
        const AppendArgs args{GetParam(),
                              cache->view(),
                              tokens,
                              step.positions.data(),
                              step.slots.data(),
                              keys.data() + at * width,
                              values.data() + at * width,
                              width};
        append(args, 0, 1);
        // The position that has just left the window of the step's first token.
        for (int h = 0; at >= window && h < shape.kv_heads; ++h) cache->poison(0, at - window, h);
      }
      const std::vector<float> want = run(whole, step, GetParam(), 1);
      expect_near(want, reference(whole, step), "window " + std::to_string(window));
      for (const int workers : {1, 2, 5}) {
        const std::vector<float> got = run(ring, step, GetParam(), workers);
        ASSERT_TRUE(same_bits(got.data(), want.data(), static_cast<int>(want.size())))
            << "window " << window << ' ' << dtype_name(dtype) << ": " << tokens << " tokens from "
            << at << " with " << workers << " workers";
      }
      at += tokens;
    }
  }
}

// Sinks below, among and above the scores, with and without a window, in one split and in many.
TEST_P(Attention, SinksJoinTheDenominatorAndNothingElse) {
  for (const auto& [window, dtype] :
       {std::pair(0, DType::kF32), std::pair(0, DType::kF16), std::pair(70, DType::kBF16)}) {
    const Cache cache(
        {.heads = 6, .kv_heads = 2, .capacity = 1024, .dtype = dtype, .window = window});
    for (const int length : {1, 2, 64, 257, 300, 1000}) {
      fill(cache, 0, length, GetParam(), static_cast<unsigned>(length));
      for (const int tokens : {1, 2, std::min(length, 40)}) {
        if (tokens > length) continue;
        Step step = tail_step(cache, 0, length, tokens, 7);
        const std::vector<float> without = run(cache, step, GetParam(), 1);
        step.sinks = {-40.0F, -1.5F, 0.0F, 1.25F, 6.0F, 90.0F};
        const std::vector<float> want = run(cache, step, GetParam(), 1);
        expect_near(want, reference(cache, step), "length " + std::to_string(length));
        for (const int workers : {2, 3, 16}) {
          const std::vector<float> got = run(cache, step, GetParam(), workers);
          ASSERT_TRUE(same_bits(got.data(), want.data(), static_cast<int>(want.size())))
              << length << ' ' << tokens << ' ' << workers;
        }
        step.sinks.assign(6, -std::numeric_limits<float>::infinity());
        const std::vector<float> none = run(cache, step, GetParam(), 2);
        ASSERT_TRUE(same_bits(none.data(), without.data(), static_cast<int>(want.size())));
      }
    }
  }
}

// A number by offset and head, on positions before the token and behind it, in one split and in
// many, with rows few and many.
TEST_P(Attention, ABiasIsAddedToScores) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kI8}) {
    const Cache cache({.heads = 6, .kv_heads = 3, .capacity = 640, .dtype = dtype});
    const std::vector<float> bias =
        random_floats(product({2 * Step::kReach + 1, cache.shape.heads}), 91, 2.0F);
    for (const int length : {1, 2, 64, 65, 300, 640}) {
      fill(cache, 0, length, GetParam(), static_cast<unsigned>(length));
      for (const int tokens : {1, 2, std::min(length, 40)}) {
        if (tokens > length) continue;
        Step step = tail_step(cache, 0, length, tokens, 7);
        step.bias = bias;
        for (const bool both : {false, true}) {
          if (both) step.ends.assign(static_cast<std::size_t>(tokens), length);
          const std::vector<float> want = run(cache, step, GetParam(), 1);
          expect_near(want, reference(cache, step), "length " + std::to_string(length));
          for (const int workers : {2, 5}) {
            const std::vector<float> got = run(cache, step, GetParam(), workers);
            ASSERT_TRUE(same_bits(got.data(), want.data(), static_cast<int>(want.size())))
                << length << ' ' << tokens << ' ' << workers;
          }
        }
      }
    }
  }
}

// Tokens of several slots, each with an end of its own whatever its position is; two lanes of one
// slot stand together. Behind the ends there is NaN.
TEST_P(Attention, PositionsEndWhereTheEndsSay) {
  const Cache cache({.heads = 4, .kv_heads = 2, .capacity = 384, .slots = 2});
  const int lengths[] = {70, 300};
  for (int slot = 0; slot < 2; ++slot) {
    for (int p = 0; p < 384; ++p) {
      for (int h = 0; h < 2; ++h) cache.poison(slot, p, h);
    }
    fill(cache, slot, lengths[slot], GetParam(), static_cast<unsigned>(slot) + 3);
  }
  Step step;
  step.slots = {1, 1, 1, 0, 0, 1, 0};
  step.positions = {0, 1, 500, 7, 3, -1, 9};
  step.ends = {300, 300, 300, 70, 70, 0, 0};
  step.queries = random_floats(product({7, 4, cache.shape.head_dim}), 5, 2.0F);
  const std::vector<float> want = run(cache, step, GetParam(), 1);
  expect_near(want, reference(cache, step), "ends");
  const int width = 4 * cache.shape.head_dim;
  for (int t = 0; t < step.tokens(); ++t) {
    const auto i = static_cast<std::size_t>(t);
    const Step one{{step.positions[i]},
                   {step.slots[i]},
                   {step.queries.begin() + t * width, step.queries.begin() + (t + 1) * width},
                   {},
                   {step.ends[i]}};
    for (const int workers : {1, 3}) {
      const std::vector<float> got = run(cache, one, GetParam(), workers);
      EXPECT_TRUE(same_bits(got.data(), want.data() + t * width, width)) << t;
    }
  }
}

// Each token of a chunk and alone.
TEST_P(Attention, SinksDoNotDependOnChunks) {
  const Cache cache({.heads = 8, .kv_heads = 1, .capacity = 640, .window = 90});
  constexpr int kLength = 600;
  constexpr int kWidth = 8 * 64;
  fill(cache, 0, kLength, GetParam(), 41);
  Step whole = tail_step(cache, 0, kLength, 60, 42);
  whole.sinks = random_floats(8, 43, 3.0F);
  const std::vector<float> want = run(cache, whole, GetParam(), 2);
  for (int t = 0; t < whole.tokens(); ++t) {
    Step one{{whole.positions[static_cast<std::size_t>(t)]}, {0}, {}, whole.sinks};
    one.queries.assign(whole.queries.begin() + t * kWidth,
                       whole.queries.begin() + (t + 1) * kWidth);
    const std::vector<float> got = run(cache, one, GetParam(), 1 + t % 3);
    ASSERT_TRUE(same_bits(got.data(), want.data() + t * kWidth, kWidth)) << t;
  }
}

// Large scores: the running maximum moves often, most weights underflow.
TEST_P(Attention, HandlesPeakedScores) {
  const Cache cache({.capacity = 640});
  fill(cache, 0, 600, GetParam(), 9);
  Step step = tail_step(cache, 0, 600, 20, 11);
  for (float& q : step.queries) q *= 40.0F;
  const std::vector<float> got = run(cache, step, GetParam(), 2);
  const std::vector<double> want = reference(cache, step);
  for (std::size_t i = 0; i < got.size(); ++i) {
    // Scores of some hundreds carry an absolute error of 1e-4, and so do the weights.
    ASSERT_NEAR(got[i], want[i], 1e-3) << i;
  }
}

// The invariant the engine rests on: how a step is cut does not matter, to the last bit.
TEST_P(Attention, TheBitsDoNotDependOnChunksOrWorkers) {
  for (const auto& [heads, kv_heads, head_dim] :
       {std::tuple(9, 3, 64), std::tuple(4, 4, 80), std::tuple(8, 1, 128), std::tuple(2, 1, 24)}) {
    for (const DType dtype : kCacheTypes) {
      if (head_dim > 64 && dtype_info(dtype).bytes == 1) continue;  // a sanitizer's time
      const Cache cache({.heads = heads,
                         .kv_heads = kv_heads,
                         .head_dim = head_dim,
                         .capacity = 640,
                         .dtype = dtype});
      constexpr int kLength = 530;  // three splits
      const int width = heads * head_dim;
      fill(cache, 0, kLength, GetParam(), 21);
      const Step whole = tail_step(cache, 0, kLength, kLength, 22);
      const std::vector<float> want = run(cache, whole, GetParam(), 1);
      const std::vector<float> shared = run(cache, whole, GetParam(), 3);
      ASSERT_TRUE(same_bits(want.data(), shared.data(), static_cast<int>(want.size())));
      std::mt19937 engine(23);
      for (int at = 0; at < kLength;) {
        // Mostly short steps, where the kernels differ; singles near every boundary.
        constexpr int kSizes[] = {1, 1, 1, 2, 3, 4, 5, 7, 16, 33, 70};
        const int tokens = std::min(kSizes[engine() % std::size(kSizes)], kLength - at);
        Step part;
        part.positions.assign(whole.positions.begin() + at, whole.positions.begin() + at + tokens);
        part.slots.assign(static_cast<std::size_t>(tokens), 0);
        part.queries.assign(whole.queries.begin() + at * width,
                            whole.queries.begin() + (at + tokens) * width);
        for (const int workers : {1, 2, 5, 16}) {
          const std::vector<float> got = run(cache, part, GetParam(), workers);
          ASSERT_TRUE(same_bits(got.data(), want.data() + at * width, tokens * width))
              << isa_name(GetParam()) << ' ' << dtype_name(dtype) << " heads " << heads << '/'
              << kv_heads << 'x' << head_dim << ": " << tokens << " tokens from " << at << " with "
              << workers << " workers";
        }
        at += tokens;
      }
    }
  }
}

TEST_P(Attention, NeighboursAndPaddingChangeNothing) {
  const Cache cache({.heads = 6, .kv_heads = 2, .capacity = 512, .slots = 4});
  const int width = 6 * 64;
  const int lengths[] = {1, 64, 300, 500};
  Step mixed;
  std::vector<std::vector<float>> alone;
  for (int slot = 3; slot >= 0; --slot) {
    fill(cache, slot, lengths[slot], GetParam(), static_cast<unsigned>(40 + slot));
    const int tokens = std::min(lengths[slot], 1 + slot);
    const Step step = tail_step(cache, slot, lengths[slot], tokens, 50);
    alone.push_back(run(cache, step, GetParam(), 1));
    mixed.positions.insert(mixed.positions.end(), step.positions.begin(), step.positions.end());
    mixed.slots.insert(mixed.slots.end(), step.slots.begin(), step.slots.end());
    mixed.queries.insert(mixed.queries.end(), step.queries.begin(), step.queries.end());
    mixed.positions.push_back(-1);  // padding between the rows, its slot and query are rubbish
    mixed.slots.push_back(-12345);
    mixed.queries.insert(mixed.queries.end(), static_cast<std::size_t>(width), kNan);
  }
  for (const int workers : {1, 2, 7}) {
    const std::vector<float> got = run(cache, mixed, GetParam(), workers);
    const float* at = got.data();
    for (const std::vector<float>& want : alone) {
      ASSERT_TRUE(same_bits(at, want.data(), static_cast<int>(want.size())));
      at += want.size();
      for (int i = 0; i < width; ++i) ASSERT_EQ(at[i], 0.0F);
      at += width;
    }
  }
}

// A later token of the same chunk may hold infinities; an earlier one must not see them.
TEST_P(Attention, NothingFlowsBackInTime) {
  const Cache cache({.heads = 3, .kv_heads = 1, .capacity = 128});
  fill(cache, 0, 40, GetParam(), 60);
  const Step step = tail_step(cache, 0, 40, 40, 61);
  const std::vector<float> want = run(cache, step, GetParam(), 1);
  auto* keys = reinterpret_cast<std::uint16_t*>(cache.keys.get());
  auto* values = reinterpret_cast<std::uint16_t*>(cache.values.get());
  keys[cache.index(0, 30, 0)] = 0x7E00;
  values[cache.index(0, 30, 0) + 1] = 0x7C00;
  const std::vector<float> got = run(cache, step, GetParam(), 1);
  EXPECT_TRUE(same_bits(got.data(), want.data(), 30 * 3 * 64));
  for (int i = 30 * 3 * 64; i < 40 * 3 * 64; ++i) {
    ASSERT_TRUE(std::isnan(got[static_cast<std::size_t>(i)])) << i;
  }
}

TEST_P(Attention, ANanInOneQueryStaysThere) {
  const Cache cache({.heads = 4, .kv_heads = 2, .capacity = 512});
  fill(cache, 0, 400, GetParam(), 70);
  for (const int tokens : {1, 3, 30}) {
    Step step = tail_step(cache, 0, 400, tokens, 71);
    const std::vector<float> want = run(cache, step, GetParam(), 2);
    step.queries[64 + 5] = kNan;  // token 0, head 1
    const std::vector<float> got = run(cache, step, GetParam(), 2);
    for (std::size_t i = 0; i < got.size(); ++i) {
      if (i / 64 == 1) {
        ASSERT_TRUE(std::isnan(got[i]));
      } else {
        ASSERT_EQ(got[i], want[i]);
      }
    }
  }
}

TEST_P(Attention, ThreadsOfAPoolGiveTheSame) {
  const Cache cache({.heads = 9, .kv_heads = 3, .capacity = 1024});
  fill(cache, 0, 1000, GetParam(), 80);
  ThreadPool pool(3);
  for (const int tokens : {1, 40}) {
    const Step step = tail_step(cache, 0, 1000, tokens, 81);
    const std::vector<float> want = run(cache, step, GetParam(), 1);
    std::vector<float> got(want.size());
    AttentionArgs args{
        GetParam(),        cache.view(),        tokens, 9,          0.125F, step.positions.data(),
        step.slots.data(), step.queries.data(), 9 * 64, got.data(), 9 * 64};
    Aligned<std::byte> scratch(attention_scratch_bytes(args.cache, 9, tokens, 3));
    pool.run([&](int worker, int workers) {
      attend(args, scratch.get(), worker, workers);
      if (attention_needs_combine(args, workers)) {
        pool.barrier();
        combine(args, scratch.get(), worker, workers);
      }
    });
    EXPECT_EQ(std::memcmp(got.data(), want.data(), want.size() * sizeof(float)), 0);
  }
}

// The most by which a number x of a head [40] may be rounded: half a unit in the last place, and of
// int8 half the scale.
double rounding(DType dtype, const float* head, float x) {
  const double size = std::abs(static_cast<double>(x));
  switch (dtype) {
    case DType::kF16:
      return size * 0x1p-11 + 0x1p-25;
    case DType::kBF16:
      return size * 0x1p-8;
    case DType::kF8E4M3:
      return std::max(size * 0x1p-4, 0x1p-10);
    case DType::kI8: {
      float largest = 0;
      for (int i = 0; i < 40; ++i) largest = std::max(largest, std::abs(head[i]));
      return static_cast<double>(largest) / 254 * (1 + 1e-5);
    }
    default:
      return 0;
  }
}

TEST_P(Attention, AppendWritesRoundedRowsAndNothingElse) {
  for (const DType dtype : kCacheTypes) {
    for (const int workers : {1, 2, 5}) {
      const Cache cache(
          {.kv_heads = 3, .head_dim = 40, .capacity = 128, .slots = 3, .dtype = dtype});
      const std::vector<std::int32_t> positions = {0, 63, 64, -1, 127, 5};
      const std::vector<std::int32_t> slots = {0, 1, 1, 77, 2, 0};
      const int width = 3 * 40;
      const std::vector<float> keys = random_floats(6 * 130, 90);
      const std::vector<float> values = random_floats(6 * 130, 91);
      const auto head_of = [](std::size_t i) { return i - i % 130 % 40; };
      const AppendArgs args{GetParam(),  cache.view(),  6,  positions.data(), slots.data(),
                            keys.data(), values.data(), 130};
      for (int w = 0; w < workers; ++w) append(args, w, workers);
      std::vector<bool> written(cache.elements);
      for (std::size_t t = 0; t < 6; ++t) {
        if (positions[t] < 0) continue;
        for (int i = 0; i < width; ++i) {
          const std::size_t at =
              cache.index(slots[t], positions[t], i / 40) + static_cast<std::size_t>(i % 40);
          const std::size_t from = t * 130 + static_cast<std::size_t>(i);
          written[at] = true;
          ASSERT_NEAR(cache.value(cache.keys.get(), at), keys[from],
                      rounding(dtype, keys.data() + head_of(from), keys[from]));
          ASSERT_NEAR(cache.value(cache.values.get(), at), values[from],
                      rounding(dtype, values.data() + head_of(from), values[from]));
        }
      }
      for (std::size_t i = 0; i < cache.elements; ++i) {
        if (written[i]) continue;
        ASSERT_TRUE(std::isnan(cache.value(cache.keys.get(), i)));
        ASSERT_TRUE(std::isnan(cache.value(cache.values.get(), i)));
      }
    }
  }
}

// Heads of one position that an int8 or fp8 cache has to get right, [64] each.
std::vector<std::vector<float>> hard_heads() {
  std::vector<std::vector<float>> heads(9, random_floats(64, 95));
  heads[1].assign(64, 0.0F);
  heads[2].assign(64, -0.0F);
  heads[3][17] = kNan;
  heads[4][40] = std::numeric_limits<float>::infinity();
  heads[5][63] = -std::numeric_limits<float>::infinity();
  for (float& x : heads[6]) x *= 1e-39F;  // subnormal, as the scale would be
  for (float& x : heads[7]) x *= 1e37F;
  for (int i = 0; i < 64; ++i) {  // halves: ties go to even
    heads[8][static_cast<std::size_t>(i)] = static_cast<float>(i) + 0.5F;
  }
  heads[8][63] = 127.0F;
  return heads;
}

// The same bytes as the specification, whatever is in a head, and nothing of it reaches another.
TEST_P(Attention, AppendEqualsTheReferenceForHardHeads) {
  const std::vector<std::vector<float>> heads = hard_heads();
  const int count = static_cast<int>(heads.size());
  for (const DType dtype : {DType::kI8, DType::kF8E4M3}) {
    const Cache cache(
        {.heads = count, .kv_heads = count, .capacity = 64, .slots = 2, .dtype = dtype});
    std::vector<float> row;
    for (const auto& head : heads) row.insert(row.end(), head.begin(), head.end());
    const std::int32_t position = 37;
    const std::int32_t slot = 1;
    std::vector<float> values(row.rbegin(), row.rend());
    append({GetParam(), cache.view(), 1, &position, &slot, row.data(), values.data(), count * 64},
           0, 1);
    for (int h = 0; h < count; ++h) {
      for (const auto& [data, from] : {std::pair(cache.keys.get(), row.data() + h * 64),
                                       std::pair(cache.values.get(), values.data() + h * 64)}) {
        std::byte want[64];
        float scale = 0;
        reference::store_head(dtype, from, 64, want, dtype == DType::kI8 ? &scale : nullptr);
        const std::size_t at = cache.index(slot, position, h);
        EXPECT_EQ(std::memcmp(cache.element(data, at), want, 64), 0) << h;
        if (dtype == DType::kI8) {
          EXPECT_TRUE(same_bits(cache.scale(data, at), &scale, 1)) << h;
        }
      }
    }
  }
}

// The scale by its definition, in double; zeros stay zeros; what is not finite makes its own head
// NaN.
TEST_P(Attention, Int8HeadsHaveTheirOwnScales) {
  const std::vector<std::vector<float>> heads = hard_heads();
  const int count = static_cast<int>(heads.size());
  const Cache cache({.heads = count, .kv_heads = count, .capacity = 64, .dtype = DType::kI8});
  std::vector<float> row;
  for (const auto& head : heads) row.insert(row.end(), head.begin(), head.end());
  const std::int32_t zero = 0;
  append({GetParam(), cache.view(), 1, &zero, &zero, row.data(), row.data(), count * 64}, 0, 1);
  for (int h = 0; h < count; ++h) {
    const std::vector<float>& head = heads[static_cast<std::size_t>(h)];
    const std::size_t at = cache.index(0, 0, h);
    const double scale = *cache.scale(cache.keys.get(), at);
    if (h >= 3 && h <= 5) {
      EXPECT_TRUE(std::isnan(scale)) << h;
      continue;
    }
    double largest = 0;
    for (const float x : head) largest = std::max(largest, std::abs(static_cast<double>(x)));
    EXPECT_NEAR(scale, largest < 1e-35 ? 0 : largest / 127, largest / 127 * 1e-7) << h;
    for (std::size_t i = 0; i < 64; ++i) {
      const double code = std::to_integer<std::int8_t>(cache.keys.get()[at + i]);
      EXPECT_EQ(code, scale == 0 ? 0 : std::nearbyint(static_cast<double>(head[i]) / scale)) << h;
    }
  }
  // One position: its value is the output, with weight 1.
  Step step = tail_step(cache, 0, 1, 1, 96);
  const std::vector<float> got = run(cache, step, GetParam(), 1);
  for (std::size_t i = 0; i < got.size(); ++i) {
    const std::size_t h = i / 64;
    if (h >= 3 && h <= 5) {
      EXPECT_TRUE(std::isnan(got[i])) << i;
    } else {
      EXPECT_EQ(got[i], static_cast<float>(cache.value(
                            cache.values.get(), cache.index(0, 0, static_cast<int>(h)) + i % 64)))
          << i;
    }
  }
}

TEST(AttentionSupport, IsStated) {
  EXPECT_TRUE(attention_supported(DType::kF16, 9, 3, 64));
  EXPECT_FALSE(attention_supported(DType::kF16, 9, 2, 64));
  EXPECT_FALSE(attention_supported(DType::kF16, 9, 3, 60));
  EXPECT_FALSE(attention_supported(DType::kF16, 9, 3, 1024));
  EXPECT_TRUE(attention_supported(DType::kI8, 9, 3, 64));
  EXPECT_TRUE(attention_supported(DType::kF8E4M3, 9, 3, 64));
  EXPECT_FALSE(attention_supported(DType::kQ8_0, 9, 3, 64));
}

}  // namespace
}  // namespace pianola::cpu
