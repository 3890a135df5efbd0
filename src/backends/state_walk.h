// Folding the tokens of a step into the states of a layer, in order: where each state is read and
// written, whatever the recurrence. For backends whose kernels run on the host.
//
//   walk_states(view, slot, head, s.position + first, count, scratch,
//               [&](int i, const StateStep& step) { ... },        // fill step of the i-th token
//               [&](int i, const float* from, const StateStep& step, float* to) { ... });
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cache/layer_cache.h"

namespace pianola {

// What one token folds into one head's state: S <- decay S, then k u' is added, with u strength
// times the value, or times what the value is beyond S' k.
struct StateStep {
  float* key = nullptr;    // [key_dim]
  float* value = nullptr;  // [value_dim]
  float* decay = nullptr;
  float* strength = nullptr;
  float* query = nullptr;  // [key_dim]; null when a step is folded in once more

  static std::size_t scratch_floats(const StateSpec& spec) {
    return spec.step_size() + static_cast<std::size_t>(spec.key_dim);
  }
};

// Folds the tokens whose `positions` are not -1 into the state of one head of a row's slot. They
// follow each other, and the row holds what is before them. prepare() fills the key, value, decay,
// strength and query of the i-th token; fold() writes the state `to` from the one before, which is
// null for a zero state and may be `to`, and the token's output unless there is no query. `i` is -1
// for a step that is folded in once more. `scratch` holds StateStep::scratch_floats().
template <typename Prepare, typename Fold>
void walk_states(const StateView& view, int slot, int head, const std::int32_t* positions,
                 int count, float* scratch, Prepare prepare, Fold fold) {
  const auto key_dim = static_cast<std::size_t>(view.spec.key_dim);
  const auto step_over = [&](float* record) {
    float* rest = record + key_dim + static_cast<std::size_t>(view.spec.value_dim);
    return StateStep{record, record + key_dim, rest, rest + 1, nullptr};
  };
  const bool compact = view.interval > 1;
  const float* from = nullptr;
  std::int32_t length = -1;
  for (int i = 0; i < count; ++i) {
    const std::int32_t position = positions[i];
    if (position < 0) continue;
    if (length < 0) {  // the first of them: the state before it
      length = position / view.interval * view.interval;
      if (compact && position > 0 && *view.newest_length_at(slot, head) == position) {
        length = position;
        from = view.newest_at(slot, head);
      } else if (length > 0) {
        from = view.anchor_at(slot, head, length);
      }
      for (; length < position; ++length) {
        float* to = view.newest_at(slot, head);
        fold(-1, from, step_over(view.step_at(slot, head, length)), to);
        from = to;
      }
    }
    StateStep step = step_over(compact ? view.step_at(slot, head, position) : scratch);
    step.query = scratch + view.spec.step_size();
    prepare(i, step);
    float* to = compact ? view.newest_at(slot, head) : view.anchor_at(slot, head, position + 1);
    fold(i, from, step, to);
    from = to;
    length = position + 1;
    if (compact && length % view.interval == 0) {
      std::copy_n(to, view.spec.state_size(), view.anchor_at(slot, head, length));
    }
  }
  if (compact && length >= 0) *view.newest_length_at(slot, head) = length;
}

}  // namespace pianola
