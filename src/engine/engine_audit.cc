#include "engine/engine_audit.h"

#include <algorithm>

#include "base/check.h"
#include "engine/engine_impl.h"

namespace pianola {
namespace {

constexpr std::size_t kPiece = std::size_t{1} << 20;

// Where NaN goes: to what has memory behind it.
struct Target {
  Backend& backend;
  DeviceMemory& memory;
};

// NaN in every type that a cache or a buffer has, but for int8.
void fill_with_nan(const Target& target, std::byte* to, std::size_t bytes) {
  static const std::vector<std::byte> nan(kPiece, std::byte{0xFF});
  const auto begin = static_cast<std::size_t>(to - target.memory.data());
  MemoryRange rest{begin, begin + bytes};
  while (rest.begin < rest.end) {
    const MemoryRange range = target.memory.first_resident(rest);
    if (range.begin == range.end) return;
    for (std::size_t at = range.begin; at < range.end; at += kPiece) {
      target.backend.write(target.memory.data() + at, nan.data(), std::min(kPiece, range.end - at));
    }
    rest.begin = range.end;
  }
}

// Positions from `length` on of one slot of one layer's keys, values or scales, of which a position
// and head has `row` bytes.
void fill_positions(const Target& target, const LayerCacheView& view, std::byte* slot,
                    std::size_t row, int length) {
  const std::size_t block = row * kCacheBlock * static_cast<std::size_t>(view.kv_heads);
  const int whole = (length + kCacheBlock - 1) / kCacheBlock;  // blocks that hold a token
  const int inner = length % kCacheBlock;
  for (int head = 0; inner != 0 && head < view.kv_heads; ++head) {
    const std::size_t at =
        static_cast<std::size_t>(whole - 1) * block +
        (static_cast<std::size_t>(head) * kCacheBlock + static_cast<std::size_t>(inner)) * row;
    fill_with_nan(target, slot + at, static_cast<std::size_t>(kCacheBlock - inner) * row);
  }
  const int blocks = view.capacity / kCacheBlock;
  fill_with_nan(target, slot + static_cast<std::size_t>(whole) * block,
                static_cast<std::size_t>(blocks - whole) * block);
}

// What a window's ring holds besides the positions that the token at `length` attends to.
void fill_ring(const Target& target, const LayerCacheView& view, std::byte* slot, std::size_t row,
               int length) {
  for (int place = 0; place < view.capacity; ++place) {
    // The latest position below `length` that lies here, if there is one.
    const int position = length - 1 - (length - 1 - place + view.capacity) % view.capacity;
    if (length > 0 && position >= window_begin(length, view.window)) continue;
    for (int head = 0; head < view.kv_heads; ++head) {
      fill_with_nan(target, slot + cache_index(place, head, view.kv_heads, 1) * row, row);
    }
  }
}

// int8 has no NaN: its scales have.
void fill_heads(const Target& target, const LayerCacheView& view, std::byte* slot, int dim,
                int length) {
  const auto fill = view.window > 0 ? fill_ring : fill_positions;
  fill(target, view, slot, row_bytes(view.dtype, static_cast<std::size_t>(dim)), length);
  if (has_scales(view.dtype)) {
    std::byte* scales = slot + cache_element_bytes(view.dtype, view.capacity, view.kv_heads, dim);
    fill(target, view, scales, sizeof(float), length);
  }
}

void fill_layer(const Target& target, const LayerCacheView& view, int slot, int length) {
  fill_heads(target, view, view.key_slot(slot), view.key_dim, length);
  if (!view.latent) fill_heads(target, view, view.value_slot(slot), view.value_dim, length);
}

// What a state layer's slot holds besides what the token at `length` folds into and reads.
void fill_state(const Target& target, const StateView& view, int slot, int length) {
  const StateSpec& spec = view.spec;
  const std::size_t state = spec.state_size() * sizeof(float);
  const auto fill = [&target](void* to, std::size_t bytes) {
    fill_with_nan(target, static_cast<std::byte*>(to), bytes);
  };
  const int base = length / view.interval * view.interval;
  for (int head = 0; head < spec.heads; ++head) {
    // The anchor of `base` is read when the newest state is of another length.
    std::int32_t newest = -1;
    if (view.interval > 1) {
      target.backend.read(&newest, view.newest_length_at(slot, head), sizeof(newest));
      if (newest != length || length == 0) {
        newest = -1;
        fill(view.newest_at(slot, head), state);
        fill(view.newest_length_at(slot, head), sizeof(newest));
      }
    }
    for (int i = 0; i < view.anchors; ++i) {
      const int at = base - i * view.interval;
      if (at <= 0 || i > 0 || newest == length) {
        fill(view.anchor_at(slot, head, base + (view.anchors - i) * view.interval), state);
      }
    }
    for (int i = 0; i < view.step_capacity; ++i) {
      const int position = base + i;  // each place of the ring once
      if (position >= length || newest == length) {
        fill(view.step_at(slot, head, position), spec.step_size() * sizeof(float));
      }
    }
  }
  for (int i = 0; i < view.conv_capacity; ++i) {
    const int position = length - 1 - i;
    if (i >= spec.conv_taps - 1 || position < 0) {
      fill(view.conv_at(slot, position + view.conv_capacity),
           static_cast<std::size_t>(spec.conv_width) * sizeof(float));
    }
  }
}

// Whether two routings of a token name the same experts, in whatever order: as a sum they are the
// same.
bool same_experts(std::span<const float> a, std::span<const float> b) {
  const auto top_k = static_cast<std::ptrdiff_t>(a.size() / 2);
  return std::is_permutation(a.begin(), a.begin() + top_k, b.begin(), b.begin() + top_k);
}

// Replays a Program router by router.
class RouteWatch {
 public:
  RouteWatch(Backend& backend, std::byte* workspace, const Routes& imposed, RoutedScores& result)
      : backend_(backend), workspace_(workspace), imposed_(imposed), result_(result) {}

  void replay(const ProgramCache::Entry& entry, std::size_t tokens) {
    const std::vector<Op>& ops = entry.plan->ops;
    const std::vector<std::size_t> offsets = plan_workspace(*entry.plan).offsets;
    std::vector<bool> elsewhere(tokens);
    std::size_t first = 0;
    for (std::size_t i = 0; i < ops.size(); ++i) {
      const auto* route = std::get_if<RouteOp>(&ops[i]);
      if (!route) continue;
      entry.program->replay_ops(first, i + 1);
      first = i + 1;
      const auto width = static_cast<std::size_t>(entry.plan->buffer(route->out).width);
      std::vector<float> routes(tokens * width);
      std::byte* at = workspace_ + offsets[static_cast<std::size_t>(route->out.index)];
      const std::size_t bytes = routes.size() * sizeof(float);
      backend_.read(routes.data(), at, bytes);
      if (!imposed_.empty()) {
        impose(routes, width, elsewhere);
        backend_.write(at, routes.data(), bytes);
      }
      result_.routes.push_back(std::move(routes));
    }
    entry.program->replay_ops(first, ops.size());
    result_.tokens_elsewhere +=
        static_cast<int>(std::count(elsewhere.begin(), elsewhere.end(), true));
  }

 private:
  void impose(std::vector<float>& routes, std::size_t width, std::vector<bool>& elsewhere) const {
    const std::size_t index = result_.routes.size();
    PIANOLA_CHECK(index < imposed_.size() && imposed_[index].size() == routes.size(),
                  "routes of other steps");
    for (std::size_t t = 0; t < elsewhere.size(); ++t) {
      const std::span<const float> want = std::span(imposed_[index]).subspan(t * width, width);
      const std::span<float> own = std::span(routes).subspan(t * width, width);
      if (same_experts(own, want)) continue;
      std::copy(want.begin(), want.end(), own.begin());
      elsewhere[t] = true;
    }
  }

  Backend& backend_;
  std::byte* workspace_;
  const Routes& imposed_;
  RoutedScores& result_;
};

}  // namespace

RoutedScores EngineAudit::score(Engine& engine, std::span<const std::int32_t> tokens,
                                const Routes& routes) {
  Engine::Impl& e = *engine.impl_;
  e.settle();
  RoutedScores result;
  RouteWatch watch(*e.backend, e.work_memory->data(), routes, result);
  e.audited_replay = [&e, &watch](const ProgramCache::Entry& entry) {
    watch.replay(entry, static_cast<std::size_t>(e.lanes.front().tokens));
  };
  try {
    result.logprobs = engine.score(tokens);
  } catch (...) {
    e.audited_replay = nullptr;
    throw;
  }
  e.audited_replay = nullptr;
  return result;
}

void EngineAudit::poison(Engine& engine) {
  engine.impl_->settle();  // lengths are final then
  const auto rows = engine.impl_->rows->rows();
  poison_inputs(engine);
  for (int slot = 0; slot < static_cast<int>(rows.size()); ++slot) {
    const RowTable::Row& row = rows[static_cast<std::size_t>(slot)];
    poison_slot(engine, slot, row.open ? row.length : 0);
  }
  poison_activations(engine);
}

void EngineAudit::poison_slot(Engine& engine, int slot, int first) {
  Engine::Impl& e = *engine.impl_;
  e.settle();
  const Target target{*e.backend, *e.cache_memory};
  for (const LayerCacheView& view : e.caches) {
    if (view.holds == CacheHolds::kTokens) fill_layer(target, view, slot, first);
  }
  for (const StateView& view : e.states) fill_state(target, view, slot, first);
}

void EngineAudit::poison_inputs(Engine& engine) {
  Engine::Impl& e = *engine.impl_;
  e.settle();
  const auto rows = e.rows->rows();
  std::vector<int> lengths(rows.size());  // by slot of inputs
  for (const RowTable::Row& row : rows) {
    if (row.open && row.input_length > 0) {
      lengths[static_cast<std::size_t>(row.input_slot)] = row.input_length;
    }
  }
  const Target target{*e.backend, *e.cache_memory};
  for (const LayerCacheView& view : e.caches) {
    if (view.holds == CacheHolds::kStep) fill_layer(target, view, 0, 0);
    for (std::size_t slot = 0; view.holds == CacheHolds::kInput && slot < rows.size(); ++slot) {
      fill_layer(target, view, static_cast<int>(slot), lengths[slot]);
    }
  }
}

void EngineAudit::poison_activations(Engine& engine) {
  Engine::Impl& e = *engine.impl_;
  e.settle();
  fill_with_nan({*e.backend, *e.work_memory}, e.work_memory->data(), e.layout.workspace_bytes());
}

}  // namespace pianola
