// A step's layers as one kernel against the same ops as kernels of their own, which other tests
// compare with sums in double: every result, of every op, must have the same bits.
#include "backends/cuda/kernels/persistent.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <memory>
#include <string>

#include "cuda/graph_timing.h"
#include "cuda/matrix_fixture.h"
#include "cuda/state_fixture.h"
#include "expect_error.h"

namespace pianola::cuda {
namespace {

struct Model {
  const char* name;
  DType weights = DType::kBF16;
  DType value_weights = DType::kBF16;  // of v and down: other forms, as in mixed files
  DType head_weights = DType::kBF16;
  DType cache = DType::kBF16;
  int hidden = 512;
  int heads = 8;
  int kv_heads = 2;
  int dim = 64;
  int ff = 1024;
  int vocab = 1000;
  bool biases = false;
  bool head_norms = false;
  int turned = 64;  // elements of a head
};

const Model kModels[] = {
    {.name = "llama"},
    {.name = "wide heads",
     .cache = DType::kF16,
     .hidden = 1024,
     .heads = 16,
     .kv_heads = 2,
     .dim = 128,
     .ff = 3072,
     .head_norms = true,
     .turned = 128},
    {.name = "groups of 16 heads, a wide vocabulary", .heads = 16, .kv_heads = 1, .vocab = 9000},
    {.name = "f16, biases",
     .weights = DType::kF16,
     .value_weights = DType::kF16,
     .head_weights = DType::kF16,
     .cache = DType::kF16,
     .hidden = 448,  // slices of unequal length, rows that are no multiple of eight tiles
     .heads = 14,
     .kv_heads = 2,
     .ff = 2432,
     .vocab = 1003,
     .biases = true,
     .turned = 24},
    {.name = "Q4_1",
     .weights = DType::kQ4_1,
     .value_weights = DType::kQ4_1,
     .head_weights = DType::kQ8_0,
     .cache = DType::kF16,
     .hidden = 576,
     .heads = 9,
     .kv_heads = 3,
     .ff = 1536},
    {.name = "Q4_K, Q6_K",
     .weights = DType::kQ4_K,
     .value_weights = DType::kQ6_K,
     .head_weights = DType::kBF16,
     .hidden = 768,
     .heads = 12,
     .kv_heads = 4,
     .ff = 2048},
    {.name = "Q5_K",
     .weights = DType::kQ5_K,
     .value_weights = DType::kQ5_K,
     .head_weights = DType::kQ6_K,
     .ff = 5120,
     .vocab = 4100},
    {.name = "one matrix row of one tile",
     .hidden = 64,
     .heads = 1,
     .kv_heads = 1,
     .ff = 96,
     .vocab = 5},
};

// What a step leaves behind, by name.
using Results = std::vector<std::pair<std::string, std::vector<std::uint32_t>>>;

constexpr int kLayers = 2;
constexpr int kCapacity = 1216;
constexpr int kRows = 32;

// The tokens of a step: lanes of consecutive positions.
struct Lane {
  int row;
  int position;
  int tokens = 1;
};
struct Step {
  std::string name;
  int bucket;
  std::vector<Lane> lanes;
  bool last_only = false;  // logits of each lane's last token
};

std::vector<Step> steps() {
  constexpr int kPositions[] = {0,   1,   62,  63,  64,   127,  128, 500,
                                520, 575, 700, 900, 1023, 1024, 1100};
  std::vector<Step> all;
  for (const int position : kPositions) {
    all.push_back({"one token at " + std::to_string(position), 1, {{3, position}}});
  }
  for (const int bucket : {2, 4, 8, 16, 32}) {
    for (const int live : {bucket, bucket - 1}) {
      Step s{std::to_string(live) + " rows of " + std::to_string(bucket), bucket, {}};
      for (int r = 0; r < live; ++r)
        s.lanes.push_back({kRows - 1 - r, kPositions[r % std::size(kPositions)]});
      all.push_back(s);
    }
  }
  all.push_back({"4 tokens of one row", 4, {{5, 62, 4}}, true});
  all.push_back({"7 tokens of 3 rows, a bucket of 8", 8, {{5, 62, 3}, {1, 0, 2}, {9, 1020, 2}}});
  all.push_back({"masked tokens", 4, {{5, 62}, {6, -1}, {7, 1000}, {8, -1}}});
  all.push_back({"29 tokens of a row", 32, {{2, 1000, 29}}, true});
  return all;
}

class Layers {
 public:
  explicit Layers(const Model& model) : m_(model), state_(limits()) {
    const auto q = m_.heads * m_.dim;
    const auto kv = m_.kv_heads * m_.dim;
    unsigned seed = 1;
    const auto matrix = [&](DType dtype, int rows, int cols) {
      return make_matrix(dtype, rows, cols, ++seed);
    };
    const auto vector = [&](int n) {
      return DeviceArray<float>(random_floats(static_cast<std::size_t>(n), ++seed));
    };
    for (Layer& l : layers_) {
      l.q = matrix(m_.weights, q, m_.hidden);
      l.k = matrix(m_.weights, kv, m_.hidden);
      l.v = matrix(m_.value_weights, kv, m_.hidden);
      l.o = matrix(m_.weights, m_.hidden, q);
      l.gate = matrix(m_.weights, m_.ff, m_.hidden);
      l.up = matrix(m_.weights, m_.ff, m_.hidden);
      l.down = matrix(m_.value_weights, m_.hidden, m_.ff);
      l.first_norm = vector(m_.hidden);
      l.second_norm = vector(m_.hidden);
      l.q_norm = vector(m_.dim);
      l.k_norm = vector(m_.dim);
      l.q_bias = vector(q);
      l.k_bias = vector(kv);
      l.v_bias = vector(kv);
      const std::size_t slot = size(kCapacity, kv);
      std::vector<std::uint16_t> numbers(slot * kRows);
      std::mt19937 random(++seed);
      std::normal_distribution<float> normal;
      for (std::uint16_t& x : numbers) {
        const float value = normal(random);
        x = m_.cache == DType::kF16 ? f32_to_f16(value) : f32_to_bf16(value);
      }
      l.old_keys = numbers;
      std::shuffle(numbers.begin(), numbers.end(), random);
      l.old_values = numbers;
      l.keys = DeviceArray<std::uint16_t>(l.old_keys);
      l.values = DeviceArray<std::uint16_t>(l.old_values);
    }
    head_ = matrix(m_.head_weights, m_.vocab, m_.hidden);
    head_norm_ = vector(m_.hidden);
    std::vector<float> frequencies;
    for (int i = 0; i < m_.turned / 2; ++i) {
      frequencies.push_back(
          std::pow(10000.0F, -2.0F * static_cast<float>(i) / static_cast<float>(m_.turned)));
    }
    frequencies_ = DeviceArray<float>(frequencies);
    x_start_ = random_floats(size(kPersistentTokens, m_.hidden), ++seed);
    x_ = DeviceArray<float>(x_start_);
    q_ = DeviceArray<float>(size(kPersistentTokens, q));
    k_ = DeviceArray<float>(size(kPersistentTokens, kv));
    v_ = DeviceArray<float>(size(kPersistentTokens, kv));
    attended_ = DeviceArray<float>(size(kPersistentTokens, q));
    gate_ = DeviceArray<float>(size(kPersistentTokens, m_.ff));
    logits_ = DeviceArray<float>(size(kPersistentTokens, m_.vocab));
    scratch_ = DeviceArray<std::byte>(
        linear_scratch_bytes(kPersistentTokens, std::max({m_.hidden, q, m_.ff})));
    attention_scratch_ = DeviceArray<std::byte>(4096);
    attention_scratch_.zero();
  }

  void set(const Step& step) {
    const StepState& s = state_.host;
    int tokens = 0;
    int logits = 0;
    int lane = 0;
    for (const Lane& l : step.lanes) {
      s.row_of[lane] = l.row;
      s.first_token[lane] = tokens;
      for (int i = 0; i < l.tokens; ++i, ++tokens) {
        s.position[tokens] = l.position < 0 ? -1 : l.position + i;
        s.lane_of[tokens] = lane;
        if (!step.last_only || i + 1 == l.tokens) s.logit_token[logits++] = tokens;
      }
      s.first_token[++lane] = tokens;
    }
    *s.counts = {.tokens = tokens, .lanes = lane, .logit_rows = logits, .feed = 0};
    state_.upload();
    bucket_ = step.bucket;
    logit_bucket_ = step.last_only ? static_cast<int>(step.lanes.size()) : step.bucket;
  }

  std::vector<PersistentOp> ops() const {
    std::vector<PersistentOp> all;
    const auto add = [&](LinearArgs args) {
      args.scratch = scratch_.data();
      args.in_rows = bucket_;
      all.push_back({.linear = args});
    };
    const auto bias = [&](const DeviceArray<float>& b) { return m_.biases ? b.data() : nullptr; };
    for (const Layer& l : layers_) {
      LinearArgs qkv = product(x_, m_.hidden, &l.first_norm);
      const LinearPart k = part(l.k, bias(l.k_bias), k_);
      const LinearPart v = part(l.v, bias(l.v_bias), v_);
      qkv.part[0] = part(l.q, bias(l.q_bias), q_);
      qkv.part[1] = k;
      qkv.parts = 2;
      if (m_.value_weights == m_.weights) {
        qkv.part[2] = v;
        qkv.parts = 3;
        add(qkv);
      } else {
        add(qkv);
        LinearArgs alone = product(x_, m_.hidden, &l.first_norm);
        alone.part[0] = v;
        add(alone);
      }
      PersistentOp attention{.attends = true};
      attention.heads = heads(l);
      attention.attention = {.q = q_.data(),
                             .out = attended_.data(),
                             .heads = m_.heads,
                             .scale = 1.0F / std::sqrt(static_cast<float>(m_.dim)),
                             .cache = attention.heads.cache,
                             .state = state_.device,
                             .tokens = bucket_,
                             .scratch = attention_scratch_.data()};
      all.push_back(attention);
      LinearArgs o = product(attended_, m_.heads * m_.dim, nullptr);
      o.part[0] = part(l.o, nullptr, x_);
      o.residual = x_.data();
      add(o);
      LinearArgs gated = product(x_, m_.hidden, &l.second_norm);
      gated.part[0] = part(l.gate, nullptr, gate_);
      gated.part[1] = part(l.up, nullptr, gate_);
      gated.parts = 2;
      gated.end = LinearEnd::kGated;
      add(gated);
      LinearArgs down = product(gate_, m_.ff, nullptr);
      down.part[0] = part(l.down, nullptr, x_);
      down.residual = x_.data();
      add(down);
    }
    LinearArgs head = product(x_, m_.hidden, &head_norm_);
    head.part[0] = part(head_, nullptr, logits_);
    head.tokens = logit_bucket_;
    head.count = &state_.device.counts->logit_rows;
    head.gather = state_.device.logit_token;
    add(head);
    return all;
  }

  // Everything as it was before the step.
  void reset() {
    x_.write(x_start_);
    for (DeviceArray<float>* a : {&q_, &k_, &v_, &attended_, &gate_, &logits_}) a->poison();
    for (Layer& l : layers_) {
      l.keys.write(l.old_keys);
      l.values.write(l.old_values);
    }
  }

  Results results() const {
    Results all;
    const auto add = [&](const char* name, const DeviceArray<float>& a) {
      const std::vector<float> values = a.read();
      std::vector<std::uint32_t> bits(values.size());
      std::memcpy(bits.data(), values.data(), 4 * values.size());
      all.emplace_back(name, bits);
    };
    add("q", q_);
    add("k", k_);
    add("v", v_);
    add("attention", attended_);
    add("gate and up", gate_);
    add("x", x_);
    add("logits", logits_);
    for (const Layer& l : layers_) {
      for (const auto* cache : {&l.keys, &l.values}) {
        const std::vector<std::uint16_t> values = cache->read();
        all.emplace_back("cache", std::vector<std::uint32_t>(values.begin(), values.end()));
      }
    }
    for (const DeviceArray<float>* a : {&x_, &q_, &k_, &v_, &attended_, &gate_, &logits_}) {
      EXPECT_TRUE(a->intact());
    }
    return all;
  }

 private:
  struct Layer {
    Matrix q, k, v, o, gate, up, down;
    DeviceArray<float> first_norm, second_norm, q_norm, k_norm, q_bias, k_bias, v_bias;
    std::vector<std::uint16_t> old_keys, old_values;
    DeviceArray<std::uint16_t> keys, values;  // [rows, capacity / 64, kv_heads, 64, dim]
  };

  static std::size_t size(int a, int b) {
    return static_cast<std::size_t>(a) * static_cast<std::size_t>(b);
  }
  static StepLimits limits() {
    return {.rows = kRows,
            .max_seq_len = kCapacity,
            .tokens = kPersistentTokens,
            .lanes = kRows,
            .logit_rows = kPersistentTokens};
  }
  static LinearPart part(const Matrix& m, const float* bias, const DeviceArray<float>& out) {
    return {m.view, bias, out.data(), m.view.rows};
  }
  LinearArgs product(const DeviceArray<float>& in, int width,
                     const DeviceArray<float>* norm) const {
    LinearArgs args;
    args.in = in.data();
    args.in_ld = width;
    args.norm = norm ? norm->data() : nullptr;
    args.eps = 1e-5F;
    args.count = &state_.device.counts->tokens;
    args.tokens = bucket_;
    return args;
  }
  HeadsArgs heads(const Layer& l) const {
    HeadsArgs h;
    h.q = h.q_out = q_.data();
    h.k = k_.data();
    h.v = v_.data();
    if (m_.head_norms) {
      h.q_norm = l.q_norm.data();
      h.k_norm = l.k_norm.data();
      h.q_norm_eps = h.k_norm_eps = 1e-6F;
    }
    h.inverse_frequencies = frequencies_.data();
    h.turned = m_.turned;
    h.heads = m_.heads;
    h.cache.dtype = m_.cache;
    h.cache.kv_heads = m_.kv_heads;
    h.cache.key_dim = h.cache.value_dim = m_.dim;
    h.cache.capacity = kCapacity;
    h.cache.key_slot_bytes = h.cache.value_slot_bytes = 2 * size(kCapacity, m_.kv_heads * m_.dim);
    h.cache.keys = reinterpret_cast<std::byte*>(l.keys.data());
    h.cache.values = reinterpret_cast<std::byte*>(l.values.data());
    h.state = state_.device;
    h.tokens = bucket_;
    return h;
  }

  Model m_;
  MirroredState state_;
  Layer layers_[kLayers];
  Matrix head_;
  DeviceArray<float> head_norm_, frequencies_, x_, q_, k_, v_, attended_, gate_, logits_;
  DeviceArray<std::byte> scratch_, attention_scratch_;
  std::vector<float> x_start_;
  int bucket_ = 1;
  int logit_bucket_ = 1;
};

// Indices of a few that differ.
std::string difference(const Results& a, const Results& b) {
  for (std::size_t r = 0; r < a.size(); ++r) {
    const std::vector<std::uint32_t>& x = a[r].second;
    const std::vector<std::uint32_t>& y = b[r].second;
    if (x == y) continue;
    std::string text;
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      if (x[i] != y[i] && ++wrong <= 4) text += " " + std::to_string(i);
    }
    return a[r].first + ": " + std::to_string(wrong) + " of " + std::to_string(x.size()) +
           " differ, the first at" + text;
  }
  return {};
}

class Persistent : public testing::TestWithParam<Model> {};

TEST_P(Persistent, GivesTheBitsOfKernelsOfTheirOwn) {
  Layers layers(GetParam());
  for (const Step& step : steps()) {
    SCOPED_TRACE(step.name);
    layers.set(step);
    const std::vector<PersistentOp> ops = layers.ops();
    layers.reset();
    for (const PersistentOp& op : ops) {
      if (op.attends) {
        attend(op.attention, &op.heads, test_launch());
      } else {
        linear(op.linear, test_launch());
      }
    }
    const Results expected = layers.results();
    const PersistentStep persistent(ops, step.bucket);
    for (int round = 0; round < 3; ++round) {
      layers.reset();
      persistent.launch(test_launch());
      ASSERT_EQ(difference(layers.results(), expected), "")
          << "round " << round << ", " << persistent.clusters() << " clusters";
    }
  }
}

// Nothing is left over from a step that the next one could trip over.
TEST_P(Persistent, RepeatsItselfThousandsOfTimes) {
  Layers layers(GetParam());
  for (const int bucket : {1, 8, 32}) {
    SCOPED_TRACE(bucket);
    Step step{"", bucket, {}};
    for (int r = 0; r < bucket; ++r) step.lanes.push_back({r, 100 + 31 * r});
    layers.set(step);
    const PersistentStep persistent(layers.ops(), bucket);
    // x grows from step to step: the same number of steps must leave the same bits.
    Results first;
    for (int repeat = 0; repeat < 3; ++repeat) {
      layers.reset();
      for (int i = 0; i < 400; ++i) persistent.launch(test_launch());
      const Results results = layers.results();
      if (repeat == 0) first = results;
      ASSERT_EQ(difference(results, first), "");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Models, Persistent, testing::ValuesIn(kModels), [](const auto& tested) {
  std::string name;
  for (const char c : std::string(tested.param.name)) {
    if (std::isalnum(static_cast<unsigned char>(c))) name += c;
  }
  return name;
});

TEST(PersistentStep, SaysWhyItCannotBeOneKernel) {
  Layers layers(kModels[0]);
  layers.set({"", 1, {{0, 5}}});
  const std::vector<PersistentOp> good = layers.ops();
  const auto refuse = [&](const auto& change, int tokens, const char* words) {
    std::vector<PersistentOp> ops = good;
    change(ops);
    expect_error(ErrorCode::kUnsupported, words, [&] { PersistentStep(ops, tokens); });
  };
  refuse([](auto&) {}, 33, "more than 32 tokens");
  refuse([](auto& ops) { ops[1].attention.cache.dtype = DType::kF32; }, 1, "an f32 cache");
  refuse([](auto& ops) { ops[1].attention.cache.key_dim = 80; }, 1, "heads of 80 and 64");
  refuse([](auto& ops) { ops[6].attention.cache.window = 100; }, 1, "a sliding window");
  const DeviceArray<float> sinks(std::vector<float>(8));
  refuse([&](auto& ops) { ops[6].attention.sinks = sinks.data(); }, 1, "attention sinks");
  refuse([](auto& ops) { ops[3].linear.activation = Activation::kGeluTanh; }, 1,
         "an activation other than silu");
  refuse([](auto& ops) { ops[6].attention.cache.kv_heads = 1; }, 1, "layers of different heads");
  refuse([](auto& ops) { ops[0].linear.part[0].weight.codes = Codes::kF32; }, 1, "f32 weights");
  refuse([](auto& ops) { ops[4].linear.part[0].weight.cols = 1000; }, 1, "rows of 1000 columns");
  refuse([](auto& ops) { ops.resize(2); }, 1, "less than one layer");
  // Activations of 32 tokens that no block can hold.
  refuse(
      [](auto& ops) {
        ops[4].linear.part[0].weight.cols = 16384;
        for (PersistentOp& op : ops) op.linear.tokens = 32;
      },
      32, "more shared memory than there is");
}

// Steps share kernels: none may take away what another needs.
TEST(PersistentStep, ServesManyStepsInAnyOrder) {
  Layers layers(kModels[0]);
  const auto step_of = [](int bucket) {
    Step s{"", bucket, {}};
    for (int r = 0; r < bucket; ++r) s.lanes.push_back({r, 600 + r});
    return s;
  };
  std::vector<std::unique_ptr<PersistentStep>> made;
  for (const int bucket : {8, 1}) {
    layers.set(step_of(bucket));
    made.push_back(std::make_unique<PersistentStep>(layers.ops(), bucket));
  }
  std::vector<Results> first(2);
  for (const int which : {0, 1, 0, 1, 1, 0}) {
    layers.set(step_of(which == 0 ? 8 : 1));
    layers.reset();
    made[static_cast<std::size_t>(which)]->launch(test_launch());
    const Results results = layers.results();
    Results& expected = first[static_cast<std::size_t>(which)];
    if (expected.empty()) expected = results;
    EXPECT_EQ(difference(results, expected), "");
  }
}

// Not a test: how long a step of two layers takes.
TEST(PersistentTiming, TwoLayers) {
  const Model models[] = {{.name = "Llama-3.2-1B",
                           .hidden = 2048,
                           .heads = 32,
                           .kv_heads = 8,
                           .ff = 8192,
                           .vocab = 4096},
                          {.name = "Qwen3-0.6B",
                           .hidden = 1024,
                           .heads = 16,
                           .kv_heads = 8,
                           .dim = 128,
                           .ff = 3072,
                           .vocab = 4096,
                           .head_norms = true}};
  const char* only = std::getenv("PIANOLA_TIMING_MODEL");
  for (const Model& model : models) {
    if (only && std::string(model.name).find(only) == std::string::npos) continue;
    Layers layers(model);
    for (const int bucket : {1, 8}) {
      Step step{"", bucket, {}};
      for (int r = 0; r < bucket; ++r) step.lanes.push_back({r, 400 + r});
      layers.set(step);
      const std::vector<PersistentOp> ops = layers.ops();
      layers.reset();
      const PersistentStep persistent(ops, bucket);
      constexpr int kRounds = 50;
      const double one =
          microseconds(kRounds, [&](const Launch& launch, int) { persistent.launch(launch); });
      const double many = microseconds(kRounds, [&](const Launch& launch, int) {
        for (const PersistentOp& op : ops) {
          if (op.attends) {
            attend(op.attention, &op.heads, launch);
          } else {
            linear(op.linear, launch);
          }
        }
      });
      std::printf("%s, %d rows: %.1f us as one kernel, %.1f us as kernels of their own\n",
                  model.name, bucket, one, many);
    }
  }
}

}  // namespace
}  // namespace pianola::cuda
