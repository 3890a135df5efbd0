#include "pianola/engine.h"

#include <algorithm>

#include "base/check.h"
#include "engine/engine_impl.h"

namespace pianola {

// The walk of one token: fill the tables, replay one Program, read what it produced.
std::span<const TokenEvent> Engine::step(std::span<const int> rows) {
  Impl& e = *impl_;
  e.events.clear();
  e.fill_tables(rows);
  if (e.lanes.empty()) return e.events;
  e.replay(StepVariant::kSample, 1);
  for (const Impl::Lane& lane : e.lanes) e.computed(lane.row, lane.tokens);
  e.read_events();
  return e.events;
}

// The same for many rounds at once: the tables of a decode step feed themselves.
std::span<const TokenEvent> Engine::run(int max_rounds, std::span<const int> rows) {
  Impl& e = *impl_;
  if (max_rounds < 1) {
    fail(ErrorCode::kInvalidArgument, "engine: run() of {} rounds, expected 1 or more", max_rounds);
  }
  if (max_rounds == 1 || !e.all_decode(rows)) return step(rows);
  e.events.clear();
  e.fill_tables(rows);
  if (e.lanes.empty()) return e.events;
  e.tables->set_feed(true);
  e.replay(StepVariant::kSample, max_rounds);
  e.read_events();
  for (const TokenEvent& event : e.events) e.computed(event.row, 1);
  return e.events;
}

namespace {

bool is_wanted(std::span<const int> only, int row) {
  return only.empty() || std::find(only.begin(), only.end(), row) != only.end();
}

}  // namespace

bool Engine::Impl::all_decode(std::span<const int> only) const {
  const auto all = rows->rows();
  for (int row = 0; row < static_cast<int>(all.size()); ++row) {
    const RowTable::Row& r = all[static_cast<std::size_t>(row)];
    if (is_wanted(only, row) && r.running() && r.pending() != 1) return false;
  }
  return true;
}

void Engine::Impl::fill_tables(std::span<const int> only) {
  for (const int row : only) rows->row(row);  // InvalidArgument when it is not open
  tables->clear();
  lanes.clear();
  const auto all = rows->rows();
  const int count = static_cast<int>(all.size());
  for (int row = 0; row < count; ++row) {
    const RowTable::Row& r = all[static_cast<std::size_t>(row)];
    if (is_wanted(only, row) && r.running() && r.pending() == 1) add_lane(row, 1, 1);
  }
  for (int i = 0; i < count; ++i) {
    const int row = (next_prompt + i) % count;
    const RowTable::Row& r = all[static_cast<std::size_t>(row)];
    const int room = step_tokens - tables->counts().tokens;
    if (!is_wanted(only, row) || !r.running() || r.pending() <= 1 || room == 0) continue;
    const int tokens = std::min(r.pending(), room);
    add_lane(row, tokens, tokens == r.pending() ? 1 : 0);
    if (tokens == room) next_prompt = row;  // its prompt was cut: it goes on first
  }
}

void Engine::Impl::add_lane(int row, int tokens, int logit_rows) {
  const RowTable::Row& r = rows->row(row);
  tables->add_lane(row, r.length, r.history.data() + r.length, tokens, logit_rows);
  lanes.push_back({row, tokens});
}

void Engine::Impl::replay(StepVariant variant, int max_rounds) {
  if (!healthy) {
    fail(ErrorCode::kDevice, "engine: an earlier device error has poisoned it; load it again");
  }
  const ProgramCache::Entry* entry = programs->find(tables->counts(), variant);
  PIANOLA_CHECK(entry, "no Program holds a step of {} tokens, {} lanes, {} logit rows ({})",
                tables->counts().tokens, tables->counts().lanes, tables->counts().logit_rows,
                step_variant_name(variant));
  try {
    tables->write(state, *backend);
    int rounds = 1;
    if (tables->counts().feed) {
      rounds = entry->program->run(max_rounds).rounds;
    } else {
      entry->program->replay();
    }
    counters.steps += static_cast<std::uint64_t>(rounds);
  } catch (const Error& error) {
    healthy = error.code() != ErrorCode::kDevice;
    throw;
  }
}

void Engine::Impl::computed(int row, int count) {
  rows->computed(row, count);
  counters.tokens += static_cast<std::uint64_t>(count);
}

void Engine::Impl::read_events() {
  std::uint64_t head = 0;
  backend->read(&head, state.ring_head, sizeof(head));
  std::uint64_t tail = 0;
  backend->read(&tail, state.ring_tail, sizeof(tail));
  for (; tail < head; ++tail) {
    TokenEvent event;
    const auto slot = tail % static_cast<std::uint64_t>(state.ring_capacity);
    backend->read(&event, state.ring + slot, sizeof(event));
    rows->apply(event);
    events.push_back(event);
  }
  backend->write(state.ring_tail, &tail, sizeof(tail));
}

void Engine::Impl::compute_all_rows(int row, int count, StepVariant variant) {
  lanes.clear();
  add_lane(row, count, count);
  replay(variant, 1);
  computed(row, count);
}

// --- Rows -------------------------------------------------------------------------------------

int Engine::open_row(const RowOptions& options) { return impl_->rows->open(options); }
void Engine::close_row(int row) { impl_->rows->close(row); }
void Engine::configure_row(int row, const RowOptions& options) {
  impl_->rows->configure(row, options);
}
void Engine::append(int row, std::span<const std::int32_t> tokens) {
  impl_->rows->append(row, tokens);
}
RowStatus Engine::status(int row) const { return impl_->rows->row(row).status; }
std::span<const std::int32_t> Engine::history(int row) const {
  return impl_->rows->row(row).history;
}
int Engine::length(int row) const { return impl_->rows->row(row).length; }
void Engine::keep_first(int row, int n) { impl_->rows->keep_first(row, n); }
void Engine::drop_last(int row, int n) {
  const std::size_t size = impl_->rows->row(row).history.size();
  if (n < 0 || static_cast<std::size_t>(n) > size) {
    fail(ErrorCode::kContextOverflow, "engine: row {} holds {} tokens and cannot drop the last {}",
         row, size, n);
  }
  impl_->rows->keep_first(row, static_cast<int>(size) - n);
}
void Engine::reset(int row) { impl_->rows->keep_first(row, 0); }

bool Engine::has_work() const {
  const auto rows = impl_->rows->rows();
  return std::any_of(rows.begin(), rows.end(), [](const RowTable::Row& r) { return r.running(); });
}

// --- Scores and logits ------------------------------------------------------------------------

std::vector<float> Engine::score(std::span<const std::int32_t> tokens,
                                 const std::function<void(std::size_t)>& progress) {
  Impl& e = *impl_;
  if (!e.layout.options().score) {
    fail(ErrorCode::kInvalidArgument, "engine: score() needs EngineOptions::score at load");
  }
  if (tokens.size() < 2) return {};
  const int row = open_row({});
  if (row < 0) fail(ErrorCode::kInvalidArgument, "engine: score() needs a free row");
  std::vector<float> logprobs(tokens.size() - 1);
  try {
    e.rows->append(row, tokens);
    // The last token is only a target: nothing is asked of what follows it.
    for (std::size_t begin = 0; begin < logprobs.size();) {
      const std::size_t count =
          std::min(logprobs.size() - begin, static_cast<std::size_t>(e.layout.options().chunk));
      e.tables->clear();
      for (std::size_t i = 0; i < count; ++i) {
        e.tables->set_target(static_cast<int>(i), tokens[begin + i + 1]);
      }
      e.compute_all_rows(row, static_cast<int>(count), StepVariant::kScore);
      e.backend->read(logprobs.data() + begin, e.state.logprob, count * sizeof(float));
      begin += count;
      if (progress) progress(begin);
    }
  } catch (...) {
    close_row(row);
    throw;
  }
  close_row(row);
  return logprobs;
}

std::span<const float> Engine::logits(int row, std::span<const std::int32_t> tokens) {
  Impl& e = *impl_;
  if (!e.layout.options().logits) {
    fail(ErrorCode::kInvalidArgument, "engine: logits() needs EngineOptions::logits at load");
  }
  const int count = static_cast<int>(tokens.size());
  if (count < 1 || count > logits_chunk() || e.rows->row(row).pending() != 0) {
    fail(ErrorCode::kInvalidArgument,
         "engine: logits() takes 1 to {} tokens of a row with nothing queued, found {} and {}",
         logits_chunk(), count, e.rows->row(row).pending());
  }
  e.rows->append(row, tokens);
  e.tables->clear();
  e.compute_all_rows(row, count, StepVariant::kLogits);
  e.rows->set_idle(row);
  const std::size_t size = tokens.size() * static_cast<std::size_t>(vocab_size());
  e.backend->read(e.logits.data(), e.device_logits(), size * sizeof(float));
  return {e.logits.data(), size};
}

int Engine::logits_chunk() const { return logits_chunk_of(impl_->layout.options()); }

}  // namespace pianola
