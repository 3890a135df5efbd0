// The ops of an encoder and of a decoder behind it, in every form of weights and of the MLP, on
// every executor against the reference: small steps, and such large ones as have products of their
// own. Inputs of two rows lie in the caches when a third row reads one of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <ostream>
#include <random>

#include "backends/backend.h"
#include "backends/cpu/isa.h"
#include "cache/static_cache.h"
#include "plan/recorder.h"
#include "tensor/arena.h"
#include "tensor/quant_format.h"

namespace pianola {
namespace {

std::size_t size_of(std::int64_t n) { return static_cast<std::size_t>(n); }

struct Executor {
  std::string backend;
  std::string isa;
};
void PrintTo(const Executor& e, std::ostream* out) { *out << e.backend << " " << e.isa; }

// CMake says which backends this program tests: those of any machine, or the one of a GPU.
std::vector<Executor> executors() {
  if (std::string_view(PIANOLA_TEST_BACKENDS) == "cuda") return {{"cuda", ""}};
  std::vector<Executor> all;
  for (const cpu::Isa isa : cpu::supported_isas()) all.push_back({"cpu", cpu::isa_name(isa)});
  return all;
}

enum class Gate { kNone, kSameForm, kOtherForm };

// A layer of an encoder and one of its decoder.
struct Model {
  DType weights = DType::kF32;
  DType up_weights = DType::kF32;
  Gate gate = Gate::kNone;
  Activation activation = Activation::kRelu;
  bool biases = false;

  bool rounds_activations() const {
    return weights != DType::kF32 && weights != DType::kF16 && up_weights != DType::kF32;
  }
  std::string name() const {
    std::string text = std::string(dtype_name(weights)) + " and " + dtype_name(up_weights) + ", " +
                       activation_name(activation);
    if (gate == Gate::kNone) text += " without a gate";
    return text + (biases ? ", biases" : "");
  }
};

std::vector<Model> models() {
  std::vector<Model> all;
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16, DType::kQ8_0}) {
    for (const Activation activation :
         {Activation::kRelu, Activation::kGeluTanh, Activation::kSilu}) {
      all.push_back({dtype, dtype, Gate::kNone, activation, activation == Activation::kRelu});
    }
    all.push_back({dtype, dtype, Gate::kSameForm, Activation::kGeluTanh});
    all.push_back({dtype, dtype, Gate::kSameForm, Activation::kRelu, true});
  }
  all.push_back({DType::kBF16, DType::kF16, Gate::kOtherForm, Activation::kRelu});
  all.push_back({DType::kBF16, DType::kF16, Gate::kOtherForm, Activation::kGeluTanh});
  all.push_back({DType::kQ8_0, DType::kBF16, Gate::kOtherForm, Activation::kRelu});
  return all;
}

constexpr int kWidth = 96;
constexpr int kHeads = 4;
constexpr int kDim = 24;
constexpr int kInner = 160;
constexpr int kRows = 3;
constexpr int kTokens = 150;  // of the largest step
constexpr int kSmallTokens = 40;

// Tokens of one row, from a position on.
struct Lane {
  int row = 0;
  int position = 0;
  int count = 0;
};

class Machine {
 public:
  Machine(const Executor& executor, const Model& model)
      : model_(model),
        backend_(
            make_backend(executor.backend, executor.backend == "cpu"
                                               ? BackendOptions{.threads = 2, .isa = executor.isa}
                                               : BackendOptions{})),
        cache_layout_(CacheSpecs(specs_), {.max_seq_len = 192,
                                           .slots = kRows,
                                           .chunk = kTokens,
                                           .dtype = DType::kF32,
                                           .max_input_len = kTokens}),
        cache_(cache_layout_, arena_) {
    load_weights();
    cache_memory_ = backend_->allocate(arena_.size() + 128, MemoryUse::kDense);
    arena_.seal(cache_memory_->data());
    for (int i = 0; i < 3; ++i) views_.push_back(cache_.layer(i));
    const std::vector<std::byte> nan(cache_memory_->size(), std::byte{0xFF});
    backend_->write(cache_memory_->data(), nan.data(), nan.size());
    state_memory_ = backend_->allocate(state_layout_.bytes(), MemoryUse::kDense);
    host_state_ = backend_->allocate(state_layout_.bytes(), MemoryUse::kShared);
    shared_ = backend_->allocate(state_layout_.shared_bytes(), MemoryUse::kShared);
    state_ = state_layout_.bind(host_state_->data(), shared_->data());
    for (const int tokens : {kSmallTokens, kTokens}) {
      programs_.push_back(compile(tokens, true));
      programs_.push_back(compile(tokens, false));
    }
  }

  // The input of a row into a slot.
  std::vector<float> encode(int row, int slot, int length, const std::vector<float>& x) {
    state_.row[row].input_slot = slot;
    state_.row[row].input_length = length;
    return run({{row, 0, length}}, true, x);
  }
  void share(int row, int with) {
    state_.row[row].input_slot = state_.row[with].input_slot;
    state_.row[row].input_length = state_.row[with].input_length;
  }
  std::vector<float> decode(const std::vector<Lane>& lanes, const std::vector<float>& x) {
    return run(lanes, false, x);
  }

 private:
  struct Compiled {
    Plan plan;
    WorkspacePlan places;
    std::unique_ptr<DeviceMemory> work;
    std::unique_ptr<Program> program;
  };
  enum Weight {
    kNorm,
    kEncoderQ,
    kEncoderK,
    kEncoderV,
    kEncoderO,
    kCrossK,
    kCrossV,  // clang-format off
    kQ, kK, kV, kO, kCrossQ, kCrossO, kGateWeight, kUp, kDown, kGateBias, kUpBias, kDownBias,
    kBothWays, kOneWay, kWeights  // clang-format on
  };
  static WeightId id(Weight w) { return {static_cast<std::int32_t>(w)}; }
  RmsNorm norm() const { return {id(kNorm), 1e-6F}; }

  void load_weights() {
    std::mt19937 random(7);
    decls_.resize(kWeights);
    const auto add = [&](Weight w, WeightRole role, DType dtype, int rows, int cols, float size) {
      WeightDecl& decl = decls_[static_cast<std::size_t>(w)];
      decl.name = "weight " + std::to_string(w);
      decl.role = role;
      decl.dtype = dtype;
      decl.rows = rows;
      decl.cols = cols;
      std::normal_distribution<float> normal(w == kNorm ? 1.0F : 0.0F, size);
      std::vector<float> values(size_of(rows) * size_of(cols));
      for (float& v : values) v = normal(random);
      std::vector<std::byte> bytes(decl.source_bytes());
      for (int r = 0; r < rows; ++r) {
        quantize_row(dtype, values.data() + size_of(r) * size_of(cols),
                     bytes.data() + size_of(r) * row_bytes(dtype, size_of(cols)), size_of(cols));
      }
      sources_.push_back(std::move(bytes));
    };
    const auto matrix = [&](Weight w, DType dtype, int rows, int cols) {
      add(w, WeightRole::kLinear, dtype, rows, cols, 1 / std::sqrt(static_cast<float>(cols)));
    };
    const auto vector = [&](Weight w, int cols, float size) {
      add(w, WeightRole::kVector, DType::kF32, 1, cols, size);
    };
    vector(kNorm, kWidth, 0.2F);
    for (int w = kEncoderQ; w <= kCrossO; ++w) {
      matrix(static_cast<Weight>(w), model_.weights, kHeads * kDim, kWidth);
    }
    matrix(kGateWeight, model_.weights, kInner, kWidth);
    matrix(kUp, model_.up_weights, kInner, kWidth);
    matrix(kDown, model_.weights, kWidth, kInner);
    vector(kGateBias, kInner, 0.3F);
    vector(kUpBias, kInner, 0.3F);
    vector(kDownBias, kWidth, 0.3F);
    vector(kBothWays, 32 * kHeads, 1);
    vector(kOneWay, 32 * kHeads, 1);
    for (std::size_t i = 0; i < decls_.size(); ++i) {
      const WeightLayout layout = backend_->weight_layout(decls_[i]);
      weights_.push_back(backend_->allocate(layout.bytes, MemoryUse::kDense));
      backend_->repack(decls_[i], layout, sources_[i].data(), weights_.back()->data());
      bound_.push_back({&decls_[i], layout, weights_.back()->data()});
    }
  }

  GatedMlpOp mlp(BufferId x) const {
    GatedMlpOp op{.in = x, .norm = norm(), .gate = {}, .up = id(kUp), .down = id(kDown)};
    if (model_.gate != Gate::kNone) op.gate = id(kGateWeight);
    op.activation = model_.activation;
    if (model_.biases) {
      if (model_.gate != Gate::kNone) op.gate_bias = id(kGateBias);
      op.up_bias = id(kUpBias);
      op.down_bias = id(kDownBias);
    }
    op.residual = op.out = x;
    return op;
  }

  void record_encoder(Recorder& r, BufferId x, BufferId q, BufferId attended) const {
    r.record(QkvOp{.in = x,
                   .norm = norm(),
                   .q = id(kEncoderQ),
                   .k = id(kEncoderK),
                   .v = id(kEncoderV),
                   .rope = kNoRope,
                   .cache = CacheId{2},
                   .q_out = q});
    AttentionOp attention{
        .q = q, .cache = CacheId{2}, .heads = kHeads, .scale = 1, .out = attended};
    attention.bias = RelativeBias{
        .table = id(kBothWays), .buckets = 32, .max_distance = 50, .both_directions = true};
    r.record(attention);
    r.record(LinearOp{.in = attended, .weight = id(kEncoderO), .residual = x, .out = x});
    r.record(mlp(x));
    r.record(QkvOp{.in = x,
                   .norm = norm(),
                   .k = id(kCrossK),
                   .v = id(kCrossV),
                   .rope = kNoRope,
                   .cache = CacheId{1}});
  }

  void record_decoder(Recorder& r, BufferId x, BufferId q, BufferId attended) const {
    r.record(QkvOp{.in = x,
                   .norm = norm(),
                   .q = id(kQ),
                   .k = id(kK),
                   .v = id(kV),
                   .rope = kNoRope,
                   .cache = CacheId{0},
                   .q_out = q});
    AttentionOp attention{
        .q = q, .cache = CacheId{0}, .heads = kHeads, .scale = 1, .out = attended};
    attention.bias = RelativeBias{.table = id(kOneWay), .buckets = 32, .max_distance = 70};
    r.record(attention);
    r.record(LinearOp{.in = attended, .weight = id(kO), .residual = x, .out = x});
    r.record(LinearOp{.in = x, .norm = norm(), .weight = id(kCrossQ), .out = q});
    r.record(
        AttentionOp{.q = q, .cache = CacheId{1}, .heads = kHeads, .scale = 0.3F, .out = attended});
    r.record(LinearOp{.in = attended, .weight = id(kCrossO), .residual = x, .out = x});
    r.record(mlp(x));
    r.record(AdvanceOp{});
  }

  Compiled compile(int tokens, bool encodes) {
    StepShape shape{.tokens = tokens, .variant = StepVariant::kEncode};
    if (!encodes) shape = {tokens, kRows, 1, StepVariant::kLogits};
    Recorder r(decls_, CacheSpecs(specs_), shape);
    const BufferId x = r.buffer("x", Extent::kTokens, kWidth);
    const BufferId q = r.buffer("q", Extent::kTokens, kHeads * kDim);
    const BufferId attended = r.buffer("attended", Extent::kTokens, kHeads * kDim);
    encodes ? record_encoder(r, x, q, attended) : record_decoder(r, x, q, attended);
    auto plan = std::make_unique<Plan>(r.finish());
    const PlanTables tables{decls_, CacheSpecs(specs_), cache_layout_.shape()};
    backend_->check(*plan, tables);
    Compiled c{.plan = {}, .places = plan_workspace(*plan), .work = nullptr, .program = nullptr};
    const std::size_t scratch = backend_->scratch_bytes(*plan, tables);
    c.work = backend_->allocate(c.places.bytes + scratch, MemoryUse::kDense);
    c.program = backend_->compile(
        *plan, {.tables = tables,
                .weights = bound_,
                .caches = views_,
                .states = {},
                .state = state_layout_.bind(state_memory_->data(), shared_->data()),
                .workspace = c.work->data(),
                .scratch = c.work->data() + c.places.bytes,
                .scratch_bytes = scratch});
    plans_.push_back(std::move(plan));
    return c;
  }

  // x of all tokens, [tokens, kWidth].
  std::vector<float> run(const std::vector<Lane>& lanes, bool encodes,
                         const std::vector<float>& x) {
    int tokens = 0;
    int lane_index = 0;
    for (const Lane& lane : lanes) {
      state_.row_of[lane_index] = lane.row;
      state_.first_token[lane_index] = tokens;
      for (int i = 0; i < lane.count; ++i) {
        state_.position[tokens] = lane.position + i;
        state_.lane_of[tokens++] = lane_index;
      }
      state_.first_token[++lane_index] = tokens;
    }
    *state_.counts = {.tokens = tokens, .lanes = lane_index};
    backend_->write(state_memory_->data(), host_state_->data(), host_state_->size());
    const Compiled& c = programs_[(tokens <= kSmallTokens ? 0U : 2U) + (encodes ? 0U : 1U)];
    std::byte* at = c.work->data() + c.places.offsets[0];
    backend_->write(at, x.data(), size_of(tokens * kWidth) * sizeof(float));
    c.program->replay();
    std::vector<float> out(size_of(tokens * kWidth));
    backend_->read(out.data(), at, out.size() * sizeof(float));
    return out;
  }

  Model model_;
  std::unique_ptr<Backend> backend_;
  // Of a row's tokens, of inputs, and of the step at hand.
  std::vector<AttentionSpec> specs_ = {
      {.kv_heads = kHeads, .key_dim = kDim, .value_dim = kDim},
      {.kv_heads = kHeads, .key_dim = kDim, .value_dim = kDim, .holds = CacheHolds::kInput},
      {.kv_heads = kHeads, .key_dim = kDim, .value_dim = kDim, .holds = CacheHolds::kStep}};
  CacheLayout cache_layout_;
  Arena arena_;
  StaticCache cache_;
  StepStateLayout state_layout_{{.rows = kRows, .tokens = kTokens, .lanes = kRows}};
  std::unique_ptr<DeviceMemory> cache_memory_, state_memory_, host_state_, shared_;
  std::vector<LayerCacheView> views_;
  std::vector<WeightDecl> decls_;
  std::vector<std::vector<std::byte>> sources_;
  std::vector<std::unique_ptr<DeviceMemory>> weights_;
  std::vector<BoundWeight> bound_;
  StepState state_;  // on the host
  std::vector<std::unique_ptr<Plan>> plans_;
  std::vector<Compiled> programs_;
};

class EncoderOps : public testing::TestWithParam<Executor> {};
INSTANTIATE_TEST_SUITE_P(Executors, EncoderOps, testing::ValuesIn(executors()),
                         [](const auto& executor) {
                           return executor.param.backend +
                                  (executor.param.isa.empty() ? "" : "_" + executor.param.isa);
                         });

std::vector<float> random_floats(int tokens, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(size_of(tokens * kWidth));
  for (float& v : values) v = normal(random);
  return values;
}

TEST_P(EncoderOps, MatchTheReference) {
  for (const Model& model : models()) {
    SCOPED_TRACE(model.name());
    Machine machine(GetParam(), model);
    Machine reference({"reference", ""}, model);
    // Root mean square of the difference in that of what the reference says. Products of bfloat16
    // and of blocks may round activations to 8 bits, here up to six times in a row; others to no
    // fewer than 16.
    const double most = model.rounds_activations() ? 2e-2 : 5e-5;
    const auto compare = [&](const char* what, const std::vector<float>& got,
                             const std::vector<float>& want) {
      ASSERT_EQ(got.size(), want.size());
      double difference = 0;
      double size = 0;
      for (std::size_t i = 0; i < got.size(); ++i) {
        ASSERT_TRUE(std::isfinite(got[i])) << what << ", element " << i;
        difference += std::pow(static_cast<double>(got[i]) - static_cast<double>(want[i]), 2);
        size += std::pow(static_cast<double>(want[i]), 2);
      }
      const double share = std::sqrt(difference / size);
      testing::Test::RecordProperty(model.name() + ", " + what, std::to_string(share));
      EXPECT_LE(share, most) << what;
    };
    const auto encode = [&](const char* what, int row, int slot, int length) {
      const std::vector<float> x = random_floats(length, static_cast<unsigned>(length));
      compare(what, machine.encode(row, slot, length, x), reference.encode(row, slot, length, x));
    };
    encode("a long input", 1, 2, kTokens);
    encode("a short input", 0, 0, 17);
    machine.share(2, 1);
    reference.share(2, 1);
    const auto decode = [&](const char* what, const std::vector<Lane>& lanes) {
      int tokens = 0;
      for (const Lane& lane : lanes) tokens += lane.count;
      const std::vector<float> x = random_floats(tokens, static_cast<unsigned>(tokens));
      compare(what, machine.decode(lanes, x), reference.decode(lanes, x));
    };
    decode("a small step", {{1, 0, 3}, {0, 0, 5}, {2, 0, 1}});
    decode("a large step", {{0, 5, 61}, {2, 1, 2}, {1, 3, 80}});
    decode("a token a row", {{2, 3, 1}, {1, 83, 1}, {0, 66, 1}});
  }
}

}  // namespace
}  // namespace pianola
