#include "generate/prefix_pool.h"

#include <algorithm>

#include "base/check.h"

namespace pianola {

PrefixPool::PrefixPool(Engine& engine, int least_shared)
    : engine_(engine),
      least_shared_(least_shared),
      rows_(static_cast<std::size_t>(engine.slots())) {
  if (least_shared < 0) {
    fail(ErrorCode::kInvalidArgument, "generate: least_shared is {}, expected 0 or more",
         least_shared);
  }
}

PrefixPool::~PrefixPool() {
  for (int row = 0; row < size(); ++row) {
    if (at(row).use == Use::kNotOurs) continue;
    try {
      engine_.close_row(row);
    } catch (const Error&) {
      at(row).use = Use::kNotOurs;  // somebody else has closed it
    }
  }
}

int PrefixPool::take(std::span<const std::int32_t> prompt) {
  if (least_shared_ > 0) {
    const Source other = best_to_fork(prompt);
    const Source own = best_to_continue(prompt);
    if (other.tokens >= std::max(least_shared_, own.tokens)) {
      int row = fork(other);
      // Without a free slot a kept row is its own copy, and gives up what follows the prompt.
      if (row < 0 && at(other.row).use == Use::kKept) row = other.row;
      if (row < 0 && close_one_kept()) row = fork(other);
      if (row >= 0) return put_in_use(row);
    }
    if (own.tokens >= least_shared_) return put_in_use(own.row);
  }
  int row = engine_.open_row({});
  if (row < 0 && close_one_kept()) row = engine_.open_row({});
  return row < 0 ? row : put_in_use(row);
}

void PrefixPool::give_back(int row, bool keep) {
  if (keep && least_shared_ > 0 && engine_.length(row) >= least_shared_) {
    at(row) = {Use::kKept, ++clock_};
    return;
  }
  at(row).use = Use::kNotOurs;
  engine_.close_row(row);
}

bool PrefixPool::close_kept() {
  bool any = false;
  while (close_one_kept()) any = true;
  return any;
}

bool PrefixPool::should_wait(std::span<const std::int32_t> prompt) {
  if (least_shared_ == 0 || !waiting_helps_) return false;
  const int now = std::max(best_to_fork(prompt).tokens, best_to_continue(prompt).tokens);
  Source coming;
  for (int row = 0; row < size(); ++row) {
    if (at(row).use != Use::kInUse || engine_.status(row) != RowStatus::kRunning) continue;
    const int tokens = shared(row, prompt);
    if (tokens > std::max(coming.tokens, engine_.length(row))) coming = {row, tokens};
  }
  // It takes some tokens to begin to wait, and then all of them are waited for.
  if (coming.tokens >= now + (coming.row == awaited_.row ? 1 : least_shared_)) {
    awaited_ = coming;
    return true;
  }
  // A long step can take a row so far beyond what it shares that its windows and states cannot go
  // back there. It would be the same with the next prompt.
  if (awaited_.row >= 0 && at(awaited_.row).use != Use::kNotOurs &&
      engine_.length(awaited_.row) >= awaited_.tokens && now < least_shared_) {
    waiting_helps_ = false;
  }
  awaited_ = {};
  return false;
}

int PrefixPool::shared(int row, std::span<const std::int32_t> prompt) const {
  if (prompt.empty()) return 0;
  const std::span<const std::int32_t> known = engine_.history(row);
  const auto body = prompt.first(prompt.size() - 1);  // the last token is computed in any case
  return static_cast<int>(std::ranges::mismatch(body, known).in1 - body.begin());
}

int PrefixPool::computed(int row, std::span<const std::int32_t> prompt) const {
  return std::min(shared(row, prompt), engine_.length(row));
}

int PrefixPool::keepable(int row, std::span<const std::int32_t> prompt) const {
  return engine_.keepable(row, computed(row, prompt));
}

PrefixPool::Source PrefixPool::best_to_fork(std::span<const std::int32_t> prompt) const {
  Source best;
  for (int row = 0; row < size(); ++row) {
    if (at(row).use == Use::kNotOurs) continue;
    const int tokens = keepable(row, prompt);
    if (tokens > best.tokens) best = {row, tokens};
  }
  return best;
}

PrefixPool::Source PrefixPool::best_to_continue(std::span<const std::int32_t> prompt) const {
  Source best;
  for (int row = 0; row < size(); ++row) {
    if (at(row).use != Use::kKept) continue;
    const int tokens = keepable(row, prompt);
    if (tokens > best.tokens) best = {row, tokens};
  }
  return best;
}

int PrefixPool::fork(const Source& source) {
  std::vector<int> forks;
  try {
    forks = engine_.fork(source.row, 1, {}, source.tokens);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kOutOfMemory) throw;
  }
  if (forks.empty()) return -1;
  at(source.row).used_at = ++clock_;
  return forks.front();
}

bool PrefixPool::close_one_kept() {
  int oldest = -1;
  for (int row = 0; row < size(); ++row) {
    if (at(row).use != Use::kKept) continue;
    if (oldest < 0 || at(row).used_at < at(oldest).used_at) oldest = row;
  }
  if (oldest < 0) return false;
  at(oldest).use = Use::kNotOurs;
  engine_.close_row(oldest);
  return true;
}

int PrefixPool::put_in_use(int row) {
  at(row).use = Use::kInUse;
  return row;
}

}  // namespace pianola
