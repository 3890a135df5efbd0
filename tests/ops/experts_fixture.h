// Routing and experts as any backend runs them: random layers, steps of tokens, and a machine that
// holds the weights. Memory that nobody has written holds NaN.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <new>

#include "backends/backend.h"
#include "ops/linear_fixture.h"
#include "plan/recorder.h"
#include "tensor/arena.h"

namespace pianola {

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

inline std::vector<float> random_floats(std::size_t n, unsigned seed, float scale = 1.0F) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal(0.0F, scale);
  std::vector<float> v(n);
  for (float& x : v) x = normal(engine);
  return v;
}

// Weights with the bytes that a checkpoint would have.
struct Weights {
  std::vector<WeightDecl> decls;
  std::vector<std::vector<std::byte>> bytes;

  WeightId add(WeightDecl decl, const void* data) {
    const auto* from = static_cast<const std::byte*>(data);
    bytes.emplace_back(from, from + decl.source_bytes());
    decl.name = "weight " + std::to_string(decls.size());
    decls.push_back(std::move(decl));
    return {static_cast<std::int32_t>(decls.size()) - 1};
  }
  WeightId vector(const std::vector<float>& values) {
    WeightDecl decl{.role = WeightRole::kVector};
    decl.cols = static_cast<std::int64_t>(values.size());
    return add(decl, values.data());
  }
  // One matrix [rows, cols], or the matrices of a stack, each by its own seed.
  WeightId matrices(DType dtype, int experts, int rows, int cols, unsigned seed,
                    WeightRole role = WeightRole::kLinear) {
    WeightDecl decl{.role = role, .dtype = dtype};
    decl.rows = rows;
    decl.cols = cols;
    decl.experts = experts;
    std::vector<std::uint8_t> file;
    for (int e = 0; e < experts; ++e) {
      const cpu::TestWeight one = cpu::make_weight(dtype, rows, cols, cpu::Scales::kOrdinary,
                                                   seed + static_cast<unsigned>(e));
      file.insert(file.end(), one.file.begin(), one.file.end());
    }
    return add(decl, file.data());
  }
};

// The tokens of a step. A token whose mask is set has position -1.
struct Tokens {
  int count = 0;
  std::vector<float> x;         // [count, width]
  std::vector<float> residual;  // [count, width]
  std::vector<bool> masked;     // [count], or none
};

// Zeroed bytes at a boundary where a StepState may lie.
class AlignedZeros {
 public:
  explicit AlignedZeros(std::size_t bytes)
      : data_(static_cast<std::byte*>(::operator new(bytes, kAlign))) {
    std::memset(data_.get(), 0, bytes);
  }
  std::byte* data() const { return data_.get(); }

 private:
  static constexpr std::align_val_t kAlign{128};
  struct Delete {
    void operator()(std::byte* p) const { ::operator delete(p, kAlign); }
  };
  std::unique_ptr<std::byte, Delete> data_;
};

// A backend that holds the weights, and runs what is recorded on them.
class Machine {
 public:
  Machine(std::string_view name, const BackendOptions& options, const Weights& weights)
      : backend_(make_backend(name, options)), decls_(weights.decls) {
    for (std::size_t i = 0; i < decls_.size(); ++i) {
      const WeightDecl& decl = decls_[i];
      const auto experts = static_cast<std::size_t>(decl.experts);
      const WeightDecl one = one_matrix(decl);
      WeightLayout layout = backend_->weight_layout(one);
      layout.bytes = (layout.bytes + Arena::kAlignment - 1) / Arena::kAlignment * Arena::kAlignment;
      memory_.push_back(backend_->allocate(layout.bytes * experts, MemoryUse::kDense));
      for (std::size_t e = 0; e < experts; ++e) {
        backend_->repack(one, layout, weights.bytes[i].data() + e * one.source_bytes(),
                         memory_.back()->data() + e * layout.bytes);
      }
      layout.bytes *= experts;
      bound_.push_back({&decl, layout, memory_.back()->data()});
    }
  }

  // `record` takes the buffers x and residual and says which one it has written. With a bucket the
  // step has room for more tokens than there are; the result has as many rows.
  using Record = std::function<BufferId(Recorder&, BufferId, BufferId)>;
  std::vector<float> run(const Tokens& tokens, const Record& record, int bucket = 0) {
    const std::int64_t width = static_cast<std::int64_t>(tokens.x.size()) / tokens.count;
    const int room = std::max(bucket, tokens.count);
    const PlanTables tables{decls_, {}, {}};
    Recorder recorder(decls_, {}, {.tokens = room, .variant = StepVariant::kLogits});
    const BufferId x = recorder.buffer("x", Extent::kTokens, width);
    const BufferId residual = recorder.buffer("residual", Extent::kTokens, width);
    const BufferId out = record(recorder, x, residual);
    recorder.record(AdvanceOp{});
    const Plan plan = recorder.finish();
    backend_->check(plan, tables);

    const WorkspacePlan places = plan_workspace(plan);
    const std::size_t scratch_bytes = backend_->scratch_bytes(plan, tables);
    constexpr std::size_t kGuard = 128;
    const auto work = backend_->allocate(places.bytes + scratch_bytes + kGuard, MemoryUse::kDense);
    const std::vector<std::byte> poison(work->size(), std::byte{0xFF});
    backend_->write(work->data(), poison.data(), poison.size());
    const auto buffer = [&](BufferId id) {
      return work->data() + places.offsets[static_cast<std::size_t>(id.index)];
    };
    const StepStateLayout layout({.tokens = room});
    const auto state_memory = backend_->allocate(layout.bytes(), MemoryUse::kDense);
    const auto shared = backend_->allocate(layout.shared_bytes(), MemoryUse::kShared);
    const StepState state = layout.bind(state_memory->data(), shared->data());
    const AlignedZeros image(layout.bytes());
    const StepState host = layout.bind(image.data(), shared->data());
    *host.counts = {.tokens = tokens.count, .lanes = 1, .logit_rows = 1};
    host.first_token[1] = tokens.count;
    for (int t = 0; t < tokens.count; ++t) {
      const auto at = static_cast<std::size_t>(t);
      host.position[t] = !tokens.masked.empty() && tokens.masked[at] ? -1 : t;
    }
    backend_->write(state_memory->data(), image.data(), layout.bytes());
    const auto program = backend_->compile(plan, {.tables = tables,
                                                  .weights = bound_,
                                                  .caches = {},
                                                  .state = state,
                                                  .workspace = work->data(),
                                                  .scratch = work->data() + places.bytes,
                                                  .scratch_bytes = scratch_bytes});
    // The residual first: when no op reads it, it has no place of its own.
    backend_->write(buffer(residual), tokens.residual.data(),
                    tokens.residual.size() * sizeof(float));
    backend_->write(buffer(x), tokens.x.data(), tokens.x.size() * sizeof(float));
    program->replay();
    std::vector<std::byte> guard(kGuard);
    backend_->read(guard.data(), work->data() + places.bytes + scratch_bytes, kGuard);
    for (const std::byte b : guard) EXPECT_EQ(b, std::byte{0xFF}) << "scratch overrun";
    std::vector<float> result(plan.bytes(out) / sizeof(float));
    backend_->read(result.data(), buffer(out), plan.bytes(out));
    return result;
  }

 private:
  std::unique_ptr<Backend> backend_;
  std::vector<WeightDecl> decls_;
  std::vector<std::unique_ptr<DeviceMemory>> memory_;
  std::vector<BoundWeight> bound_;
};

struct LayerShape {
  int experts = 6;
  int top_k = 3;
  int width = 64;
  int ff = 48;
  DType dtype = DType::kF32;
  bool biases = true;
  Activation activation = Activation::kSilu;
  RouteScore score = RouteScore::kSoftmaxOfChosen;
  bool norm_route = true;
  bool choice_bias = false;
  RouteGroups groups = {};
  float scale = 1;
};

// One layer: a router and experts, and the same experts as matrices of their own.
struct Layer {
  explicit Layer(const LayerShape& s) : shape(s) {
    const auto size = [](int n) { return static_cast<std::size_t>(n); };
    norm = weights.vector(random_floats(size(s.width), 1));
    router = weights.matrices(DType::kF32, 1, s.experts, s.width, 2, WeightRole::kRouter);
    gate = weights.matrices(s.dtype, s.experts, s.ff, s.width, 100);
    up = weights.matrices(s.dtype, s.experts, s.ff, s.width, 200);
    down = weights.matrices(s.dtype, s.experts, s.width, s.ff, 300);
    if (s.choice_bias) choice_bias = weights.vector(random_floats(size(s.experts), 7, 0.2F));
    if (!s.biases) return;
    router_bias = weights.vector(random_floats(size(s.experts), 3, 0.3F));
    gate_bias = weights.vector(random_floats(size(s.experts * s.ff), 4));
    up_bias = weights.vector(random_floats(size(s.experts * s.ff), 5));
    down_bias = weights.vector(random_floats(size(s.experts * s.width), 6));
  }
  // Matrices and biases of expert e for GatedMlpOp.
  GatedMlpOp add_expert(int e) {
    const auto seed = static_cast<unsigned>(e);
    const LayerShape& s = shape;
    const auto part = [&](WeightId all, int rows) {
      if (!all.valid()) return WeightId{};
      const auto* values =
          reinterpret_cast<const float*>(weights.bytes[static_cast<std::size_t>(all.index)].data());
      return weights.vector({values + e * rows, values + (e + 1) * rows});
    };
    return {.norm = {norm, 1e-5F},
            .gate = weights.matrices(s.dtype, 1, s.ff, s.width, 100 + seed),
            .up = weights.matrices(s.dtype, 1, s.ff, s.width, 200 + seed),
            .down = weights.matrices(s.dtype, 1, s.width, s.ff, 300 + seed),
            .gate_bias = part(gate_bias, s.ff),
            .up_bias = part(up_bias, s.ff),
            .down_bias = part(down_bias, s.width),
            .activation = s.activation};
  }

  BufferId record_route(Recorder& r, BufferId x) const {
    const BufferId out = r.buffer("routing", Extent::kTokens, 2 * shape.top_k);
    r.record(
        RouteOp{.in = x,
                .norm = shape.norm_route ? std::optional<RmsNorm>({norm, 1e-5F}) : std::nullopt,
                .weight = router,
                .bias = router_bias,
                .top_k = shape.top_k,
                .score = shape.score,
                .choice_bias = choice_bias,
                .groups = shape.groups,
                .scale = shape.scale,
                .out = out});
    return out;
  }
  BufferId record_all(Recorder& r, BufferId x, BufferId residual) const {
    const BufferId out = r.buffer("out", Extent::kTokens, shape.width);
    r.record(ExpertsOp{.in = x,
                       .norm = {norm, 1e-5F},
                       .routing = record_route(r, x),
                       .gate = gate,
                       .up = up,
                       .down = down,
                       .gate_bias = gate_bias,
                       .up_bias = up_bias,
                       .down_bias = down_bias,
                       .activation = shape.activation,
                       .residual = residual,
                       .out = out});
    return out;
  }
  Machine::Record routes() const {
    return [this](Recorder& r, BufferId x, BufferId) { return record_route(r, x); };
  }
  Machine::Record all() const {
    return
        [this](Recorder& r, BufferId x, BufferId residual) { return record_all(r, x, residual); };
  }

  Tokens tokens(int count, unsigned seed) const {
    const auto n = static_cast<std::size_t>(count) * static_cast<std::size_t>(shape.width);
    return {count, random_floats(n, seed), random_floats(n, seed + 1), {}};
  }

  LayerShape shape;
  Weights weights;
  WeightId norm, router, gate, up, down;
  WeightId choice_bias, router_bias, gate_bias, up_bias, down_bias;
};

// Token t of a step as a step of its own.
inline Tokens one_token(const Tokens& all, int t) {
  const auto width = static_cast<std::ptrdiff_t>(all.x.size()) / all.count;
  const auto row = [&](const std::vector<float>& v) {
    return std::vector<float>(v.begin() + t * width, v.begin() + (t + 1) * width);
  };
  return {1, row(all.x), row(all.residual), {}};
}

inline bool same_bits(const float* a, const float* b, std::size_t n) {
  return std::memcmp(a, b, n * sizeof(float)) == 0;
}

}  // namespace pianola
