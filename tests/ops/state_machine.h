// A backend with one of the layers of state_formulas.h compiled, and a state cache that a test may
// look into, wherever it lies. What nobody has written holds NaN.
//
//   Machine machine("cpu", {.isa = "avx2"}, layer, {.max_seq_len = 256, .slots = 4});
//   machine.run({{.slot = 2, .position = 0, .tokens = {7, 8, 9}}});    // [tokens, out_width]
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "backends/backend.h"
#include "cache/static_cache.h"
#include "plan/recorder.h"
#include "state_formulas.h"
#include "tensor/arena.h"

namespace pianola {

// Tokens of one row in a step.
struct Lane {
  int slot = 0;
  int position = 0;         // of the first that is not masked
  std::vector<int> tokens;  // or kMasked
};

// A backend with a layer compiled for steps of up to kTokens tokens, and for smaller ones, and its
// state cache. Memory of the backend is reached through its copies alone.
class Machine {
 public:
  static constexpr int kTokens = 96;
  static constexpr int kLanes = 4;

  Machine(std::string_view name, const BackendOptions& options, const Layer& layer,
          const CacheOptions& cache = {.max_seq_len = 256, .slots = kLanes})
      : layer_(layer),
        backend_(make_backend(name, options)),
        specs_(has_cache() ? 1U : 0U, layer.spec),
        cache_layout_(caches(), cache),
        cache_(cache_layout_, cache_arena_) {
    load_weights();
    cache_memory_ = backend_->allocate(cache_arena_.size() + 128, MemoryUse::kDense);
    cache_arena_.seal(cache_memory_->data());
    if (has_cache()) views_.push_back(cache_.state(0));
    state_memory_ = backend_->allocate(state_layout_.bytes(), MemoryUse::kDense);
    host_state_ = backend_->allocate(state_layout_.bytes(), MemoryUse::kShared);
    shared_ = backend_->allocate(state_layout_.shared_bytes(), MemoryUse::kShared);
    state_ = state_layout_.bind(host_state_->data(), shared_->data());
    record(kSmallTokens);
    record(kTokens);
    make_poison();
    fill(cache_memory_->data(), cache_memory_->size());
    for (Compiled& c : compiled_) compile(c);
  }

  // The outputs of all tokens, [tokens, out_width].
  std::vector<float> run(const std::vector<Lane>& lanes) {
    std::vector<int> tokens;
    *state_.counts = {.lanes = static_cast<std::int32_t>(lanes.size())};
    for (std::size_t lane = 0; lane < lanes.size(); ++lane) {
      state_.first_token[lane] = static_cast<std::int32_t>(tokens.size());
      state_.row_of[lane] = lanes[lane].slot;
      int position = lanes[lane].position;
      for (const int token : lanes[lane].tokens) {
        state_.position[tokens.size()] = token == kMasked ? -1 : position++;
        state_.lane_of[tokens.size()] = static_cast<std::int32_t>(lane);
        tokens.push_back(token);
      }
    }
    state_.first_token[lanes.size()] = static_cast<std::int32_t>(tokens.size());
    state_.counts->tokens = static_cast<std::int32_t>(tokens.size());
    backend_->write(state_memory_->data(), host_state_->data(), host_state_->size());
    const Compiled& c = compiled_[tokens.size() <= size_of(kSmallTokens) ? 0 : 1];
    fill(work_->data(), c.places.bytes + c.scratch_bytes + 128);
    const Inputs in = layer_.inputs(tokens);
    for (std::size_t i = 0; i < c.inputs.size(); ++i) {
      backend_->write(buffer(c, c.inputs[i]), in.values[i].data(),
                      in.values[i].size() * sizeof(float));
    }
    c.program->replay();
    std::vector<std::byte> guard(128);
    backend_->read(guard.data(), work_->data() + c.places.bytes + c.scratch_bytes, guard.size());
    EXPECT_TRUE(std::ranges::all_of(guard, [](std::byte b) { return b == std::byte{0xFF}; }))
        << "scratch overrun";
    std::vector<float> out(tokens.size() * size_of(layer_.out_width));
    backend_->read(out.data(), buffer(c, c.out), out.size() * sizeof(float));
    return out;
  }

  // One row from its beginning, in steps of at most `chunk` tokens.
  std::vector<float> run_whole(int slot, const std::vector<int>& tokens, int chunk = kTokens) {
    std::vector<float> out;
    for (std::size_t at = 0; at < tokens.size();) {
      const std::size_t count = std::min(tokens.size() - at, size_of(chunk));
      const auto begin = tokens.begin() + static_cast<std::ptrdiff_t>(at);
      const std::vector<float> piece =
          run({{slot, static_cast<int>(at), {begin, begin + static_cast<std::ptrdiff_t>(count)}}});
      out.insert(out.end(), piece.begin(), piece.end());
      at += count;
    }
    return out;
  }

  // Makes NaN of what a slot's row of `written` tokens holds of those from `length` on.
  void poison(int slot, int written, int length) {
    const StateView& view = views_.at(0);
    for (int head = 0; head < view.spec.heads; ++head) {
      for (int n = written; n > length; --n) {
        const bool kept = n > written - view.anchors * view.interval;
        if (kept && n % view.interval == 0) {
          fill_floats(view.anchor_at(slot, head, n), view.spec.state_size());
        }
        if (n > written - view.step_capacity) {
          fill_floats(view.step_at(slot, head, n - 1), view.spec.step_size());
        }
      }
      if (view.interval > 1 && length < written) {
        fill_floats(view.newest_at(slot, head), view.spec.state_size());
      }
    }
    for (int n = written; n > std::max(length, written - view.conv_capacity); --n) {
      fill_floats(view.conv_at(slot, n - 1), size_of(view.spec.conv_width));
    }
  }
  // As a slot is that nobody has written.
  void forget(int slot) {
    const StateView& v = views_.at(0);
    const auto each = [this, slot](auto* base, std::size_t count) {
      if (count > 0) fill(base + size_of(slot) * count, count * sizeof(*base));
    };
    const std::size_t heads = size_of(v.spec.heads);
    each(v.anchor, size_of(v.anchors) * v.spec.states_size());
    each(v.steps, heads * size_of(v.step_capacity) * v.spec.step_size());
    each(v.newest, v.interval > 1 ? v.spec.states_size() : 0);
    each(v.newest_length, v.interval > 1 ? heads : 0);
    each(v.conv, size_of(v.conv_capacity) * size_of(v.spec.conv_width));
  }

  std::vector<std::byte> cache_bytes() const {
    std::vector<std::byte> bytes(cache_memory_->size());
    backend_->read(bytes.data(), cache_memory_->data(), bytes.size());
    return bytes;
  }

 private:
  static constexpr int kSmallTokens = 64;

  // The layer for steps of some size.
  struct Compiled {
    Plan plan;
    std::vector<BufferId> inputs;
    BufferId out;
    WorkspacePlan places;
    std::size_t scratch_bytes = 0;
    std::unique_ptr<Program> program;
  };

  bool has_cache() const { return layer_.spec.heads > 0 || layer_.spec.conv_width > 0; }
  CacheSpecs caches() const { return {{}, specs_}; }
  PlanTables tables() const { return {decls_, caches(), cache_layout_.shape()}; }

  void load_weights() {
    for (const std::vector<float>& values : layer_.weights.values) {
      WeightDecl decl{.name = "weight " + std::to_string(decls_.size()),
                      .role = WeightRole::kVector};
      decl.cols = static_cast<std::int64_t>(values.size());
      decls_.push_back(std::move(decl));
    }
    for (std::size_t i = 0; i < decls_.size(); ++i) {
      const WeightLayout layout = backend_->weight_layout(decls_[i]);
      weights_.push_back(
          backend_->allocate(std::max<std::size_t>(layout.bytes, 1), MemoryUse::kDense));
      backend_->repack(decls_[i], layout,
                       reinterpret_cast<const std::byte*>(layer_.weights.values[i].data()),
                       weights_.back()->data());
      bound_.push_back({&decls_[i], layout, weights_.back()->data()});
    }
  }

  void record(int tokens) {
    Recorder recorder(decls_, caches(),
                      {.tokens = tokens, .lanes = kLanes, .variant = StepVariant::kLogits});
    Compiled c;
    for (const int width : layer_.widths) {
      c.inputs.push_back(recorder.buffer("in", Extent::kTokens, width));
    }
    c.out = layer_.record(recorder, c.inputs);
    recorder.record(AdvanceOp{});
    c.plan = recorder.finish();
    backend_->check(c.plan, tables());
    c.places = plan_workspace(c.plan);
    c.scratch_bytes = backend_->scratch_bytes(c.plan, tables());
    compiled_.push_back(std::move(c));
  }

  // The work area and as much NaN as anything here can take.
  void make_poison() {
    std::size_t most = 0;
    for (const Compiled& c : compiled_) {
      most = std::max(most, c.places.bytes + c.scratch_bytes + 128);
    }
    work_ = backend_->allocate(most, MemoryUse::kDense);
    const std::vector<std::byte> nan(std::max(most, cache_memory_->size()), std::byte{0xFF});
    poison_ = backend_->allocate(nan.size(), MemoryUse::kDense);
    backend_->write(poison_->data(), nan.data(), nan.size());
  }
  void fill(void* at, std::size_t bytes) { backend_->copy(at, poison_->data(), bytes); }
  void fill_floats(float* at, std::size_t count) { fill(at, count * sizeof(float)); }

  void compile(Compiled& c) {
    c.program = backend_->compile(
        c.plan, {.tables = tables(),
                 .weights = bound_,
                 .caches = {},
                 .states = views_,
                 .state = state_layout_.bind(state_memory_->data(), shared_->data()),
                 .workspace = work_->data(),
                 .scratch = work_->data() + c.places.bytes,
                 .scratch_bytes = c.scratch_bytes});
  }

  float* buffer(const Compiled& c, BufferId id) const {
    return reinterpret_cast<float*>(work_->data() + c.places.offsets[size_of(id.index)]);
  }

  const Layer& layer_;
  std::unique_ptr<Backend> backend_;
  std::vector<StateSpec> specs_;
  CacheLayout cache_layout_;
  Arena cache_arena_;
  StaticCache cache_;
  StepStateLayout state_layout_{{.rows = kLanes, .tokens = kTokens, .lanes = kLanes}};
  std::unique_ptr<DeviceMemory> cache_memory_, work_, poison_, state_memory_, host_state_, shared_;
  std::vector<StateView> views_;
  std::vector<WeightDecl> decls_;
  std::vector<std::unique_ptr<DeviceMemory>> weights_;
  std::vector<BoundWeight> bound_;
  StepState state_;  // on the host
  std::vector<Compiled> compiled_;
};

}  // namespace pianola
