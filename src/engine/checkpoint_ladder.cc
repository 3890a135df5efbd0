#include "engine/checkpoint_ladder.h"

#include <algorithm>

#include "base/check.h"

namespace pianola {

CheckpointLadder::CheckpointLadder(std::span<const StateView> states, int slots, Backend& backend)
    : states_(states), backend_(&backend), taken_(static_cast<std::size_t>(slots)) {
  std::size_t heads = 0;
  for (const StateView& view : states) {
    heads = std::max(heads, static_cast<std::size_t>(view.spec.heads));
  }
  lengths_.resize(heads);
  if (states.empty()) return;
  for (std::vector<Checkpoint>& taken : taken_) {
    taken.reserve(static_cast<std::size_t>(states.front().checkpoints) + 1);
  }
}

void CheckpointLadder::take(int row, int length) {
  if (states_.empty() || states_.front().checkpoints == 0 || length == 0) return;
  std::vector<Checkpoint>& taken = taken_[static_cast<std::size_t>(row)];
  if (!taken.empty() && taken.back().length >= length) return;
  const Checkpoint checkpoint{length, free_place(taken)};
  copy(row, row, checkpoint, false);
  taken.push_back(checkpoint);
}

int CheckpointLadder::free_place(std::vector<Checkpoint>& taken) const {
  const int places = states_.front().checkpoints;
  if (static_cast<int>(taken.size()) < places) {
    for (int place = 0;; ++place) {
      if (std::ranges::find(taken, place, &Checkpoint::place) == taken.end()) return place;
    }
  }
  // The newest stays: the next edit of a conversation is most often of its end.
  std::size_t dropped = 0;
  for (std::size_t i = 1; i + 1 < taken.size(); ++i) {
    const auto gap = [&taken](std::size_t k) {
      return taken[k + 1].length - (k == 0 ? 0 : taken[k - 1].length);
    };
    if (gap(i) < gap(dropped)) dropped = i;
  }
  const int place = taken[dropped].place;
  taken.erase(taken.begin() + static_cast<std::ptrdiff_t>(dropped));
  return place;
}

int CheckpointLadder::longest(int row, int n) const {
  int longest = 0;
  for (const Checkpoint& checkpoint : taken_[static_cast<std::size_t>(row)]) {
    if (checkpoint.length <= n) longest = checkpoint.length;
  }
  return longest;
}

void CheckpointLadder::restore(int row, int from, int length) {
  const std::vector<Checkpoint>& taken = taken_[static_cast<std::size_t>(from)];
  const auto found = std::ranges::find(taken, length, &Checkpoint::length);
  PIANOLA_CHECK(found != taken.end(), "row {} has no checkpoint of {} tokens", from, length);
  copy(row, from, *found, true);
}

void CheckpointLadder::copy(int row, int owner, const Checkpoint& checkpoint, bool back) {
  const int length = checkpoint.length;
  std::ranges::fill(lengths_, length);
  for (const StateView& view : states_) {
    const std::size_t states = view.spec.states_size();
    const std::size_t bytes = states * sizeof(float);
    float* stored = view.checkpoint_at(owner, checkpoint.place);
    if (view.spec.heads > 0) {
      float* anchors = view.anchor_at(row, 0, length);
      backend_->copy(back ? anchors : stored, back ? stored : anchors, bytes);
      if (back && view.interval > 1) {
        backend_->copy(view.newest_at(row, 0), stored, bytes);
        backend_->write(view.newest_length_at(row, 0), lengths_.data(),
                        static_cast<std::size_t>(view.spec.heads) * sizeof(std::int32_t));
      }
    }
    for (int i = 1; i < view.spec.conv_taps && i <= length; ++i) {
      const auto width = static_cast<std::size_t>(view.spec.conv_width);
      float* kept = stored + states + static_cast<std::size_t>(i - 1) * width;
      float* input = view.conv_at(row, length - i);
      backend_->copy(back ? input : kept, back ? kept : input, width * sizeof(float));
    }
  }
}

void CheckpointLadder::forget_beyond(int row, int n) {
  std::erase_if(taken_[static_cast<std::size_t>(row)],
                [n](const Checkpoint& checkpoint) { return checkpoint.length > n; });
}

void CheckpointLadder::swap(int a, int b) {
  std::swap(taken_[static_cast<std::size_t>(a)], taken_[static_cast<std::size_t>(b)]);
}

}  // namespace pianola
