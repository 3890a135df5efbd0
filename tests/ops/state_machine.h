// A backend with one of the layers of state_formulas.h compiled, and a state cache that a test may
// look into. What nobody has written holds NaN.
//
//   Machine machine("cpu", {.isa = "avx2"}, layer, {.max_seq_len = 256, .slots = 4});
//   machine.run({{.slot = 2, .position = 0, .tokens = {7, 8, 9}}});    // [tokens, out_width]
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
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

// A backend with a layer compiled for steps of up to kTokens tokens, and its state cache.
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
    std::memset(cache_memory_->data(), 0xFF, cache_memory_->size());
    if (has_cache()) views_.push_back(cache_.state(0));
    compile();
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
    std::memset(work_->data(), 0xFF, work_->size());
    const Inputs in = layer_.inputs(tokens);
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      std::memcpy(buffer(inputs_[i]), in.values[i].data(), in.values[i].size() * sizeof(float));
    }
    program_->replay();
    for (std::size_t i = work_->size() - 128; i < work_->size(); ++i) {
      EXPECT_EQ(work_->data()[i], std::byte{0xFF}) << "scratch overrun";
    }
    const float* out = buffer(out_);
    return {out, out + tokens.size() * size_of(layer_.out_width)};
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
    const auto fill = [](float* at, std::size_t n) { std::memset(at, 0xFF, n * sizeof(float)); };
    for (int head = 0; head < view.spec.heads; ++head) {
      for (int n = written; n > length; --n) {
        const bool kept = n > written - view.anchors * view.interval;
        if (kept && n % view.interval == 0) {
          fill(view.anchor_at(slot, head, n), view.spec.state_size());
        }
        if (n > written - view.step_capacity) {
          fill(view.step_at(slot, head, n - 1), view.spec.step_size());
        }
      }
      if (view.interval > 1 && length < written) {
        fill(view.newest_at(slot, head), view.spec.state_size());
      }
    }
    for (int n = written; n > std::max(length, written - view.conv_capacity); --n) {
      fill(view.conv_at(slot, n - 1), size_of(view.spec.conv_width));
    }
  }
  // As a slot is that nobody has written.
  void forget(int slot) {
    const StateView& v = views_.at(0);
    const auto fill = [slot](auto* base, std::size_t each) {
      if (each > 0) std::memset(base + size_of(slot) * each, 0xFF, each * sizeof(*base));
    };
    const std::size_t heads = size_of(v.spec.heads);
    fill(v.anchor, size_of(v.anchors) * v.spec.states_size());
    fill(v.steps, heads * size_of(v.step_capacity) * v.spec.step_size());
    fill(v.newest, v.interval > 1 ? v.spec.states_size() : 0);
    fill(v.newest_length, v.interval > 1 ? heads : 0);
    fill(v.conv, size_of(v.conv_capacity) * size_of(v.spec.conv_width));
  }

  std::vector<std::byte> cache_bytes() const {
    return {cache_memory_->data(), cache_memory_->data() + cache_memory_->size()};
  }

 private:
  bool has_cache() const { return layer_.spec.heads > 0 || layer_.spec.conv_width > 0; }
  CacheSpecs caches() const { return {{}, specs_}; }

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

  void compile() {
    Recorder recorder(decls_, caches(),
                      {.tokens = kTokens, .lanes = kLanes, .variant = StepVariant::kLogits});
    for (const int width : layer_.widths) {
      inputs_.push_back(recorder.buffer("in", Extent::kTokens, width));
    }
    out_ = layer_.record(recorder, inputs_);
    recorder.record(AdvanceOp{});
    plan_ = recorder.finish();
    const PlanTables tables{decls_, caches(), cache_layout_.shape()};
    backend_->check(plan_, tables);
    places_ = plan_workspace(plan_);
    const std::size_t scratch_bytes = backend_->scratch_bytes(plan_, tables);
    work_ = backend_->allocate(places_.bytes + scratch_bytes + 128, MemoryUse::kDense);
    const StepStateLayout layout({.rows = kLanes, .tokens = kTokens, .lanes = kLanes});
    state_memory_ = backend_->allocate(layout.bytes(), MemoryUse::kDense);
    shared_ = backend_->allocate(layout.shared_bytes(), MemoryUse::kShared);
    state_ = layout.bind(state_memory_->data(), shared_->data());
    program_ = backend_->compile(plan_, {.tables = tables,
                                         .weights = bound_,
                                         .caches = {},
                                         .states = views_,
                                         .state = state_,
                                         .workspace = work_->data(),
                                         .scratch = work_->data() + places_.bytes,
                                         .scratch_bytes = scratch_bytes});
  }

  float* buffer(BufferId id) const {
    return reinterpret_cast<float*>(work_->data() +
                                    places_.offsets[static_cast<std::size_t>(id.index)]);
  }

  const Layer& layer_;
  std::unique_ptr<Backend> backend_;
  std::vector<StateSpec> specs_;
  CacheLayout cache_layout_;
  Arena cache_arena_;
  StaticCache cache_;
  std::unique_ptr<DeviceMemory> cache_memory_, work_, state_memory_, shared_;
  std::vector<StateView> views_;
  std::vector<WeightDecl> decls_;
  std::vector<std::unique_ptr<DeviceMemory>> weights_;
  std::vector<BoundWeight> bound_;
  std::vector<BufferId> inputs_;
  BufferId out_;
  Plan plan_;
  WorkspacePlan places_;
  StepState state_;
  std::unique_ptr<Program> program_;
};

}  // namespace pianola
