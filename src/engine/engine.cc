#include "pianola/engine.h"

#include <algorithm>
#include <atomic>
#include <iterator>

#include "base/check.h"
#include "engine/engine_impl.h"

namespace pianola {
namespace {

bool is_wanted(std::span<const int> only, int row) {
  return only.empty() || std::find(only.begin(), only.end(), row) != only.end();
}

}  // namespace

// The walk of one token: fill the tables, replay one Program, read what it produced.
std::span<const TokenEvent> Engine::step(std::span<const int> rows) {
  Impl& e = *impl_;
  e.settle();
  if (e.take_waiting(rows)) return e.events;
  e.fill_tables(rows);
  if (e.lanes.empty()) return e.events;
  e.replay(StepVariant::kSample);
  for (const Impl::Lane& lane : e.lanes) e.computed(lane.row, lane.tokens);
  e.read_events(e.events);
  e.read_rollbacks();
  for (const Impl::Lane& lane : e.lanes) {
    if (lane.tokens > 1) e.checkpoint(lane.row);
  }
  return e.events;
}

// The same for many rounds at once: the tables of a decode step feed themselves.
std::span<const TokenEvent> Engine::run(int max_rounds, std::span<const int> rows) {
  Impl& e = *impl_;
  if (max_rounds < 1) {
    fail(ErrorCode::kInvalidArgument, "engine: run() of {} rounds, expected 1 or more", max_rounds);
  }
  e.settle();
  if (e.take_waiting(rows)) return e.events;
  if (max_rounds == 1 || !e.all_decode(rows)) return step(rows);
  e.begin_run(rows, max_rounds);
  while (e.wait_run(e.events)) {
  }
  return e.events;
}

// And without waiting for the end of them. A run goes no further than its rows can go back, so that
// rounds that the caller has not seen can be taken back; behind it the next one begins.
std::span<const TokenEvent> Engine::stream(std::span<const int> rows) {
  Impl& e = *impl_;
  if (e.take_waiting(rows)) return e.events;
  const int most = std::min(e.state.ring_capacity, e.layout.cache_layout().most_ahead());
  do {
    if (!e.running || !std::ranges::equal(e.running_rows, rows)) {
      e.settle();
      if (e.take_waiting(rows)) return e.events;
      if (!e.all_decode(rows)) return step(rows);
      e.begin_run(rows, most);
      if (!e.running) break;  // no row has work
    }
    while (e.events.empty() && e.wait_run(e.events)) {
    }
  } while (e.events.empty());
  return e.events;
}

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

const ProgramCache::Entry& Engine::Impl::write_tables(StepVariant variant) {
  if (!healthy) {
    fail(ErrorCode::kDevice, "engine: an earlier device error has poisoned it; load it again");
  }
  const ProgramCache::Entry* entry = programs->find(tables->counts(), variant);
  PIANOLA_CHECK(entry, "no Program holds a step of {} tokens, {} lanes, {} logit rows ({})",
                tables->counts().tokens, tables->counts().lanes, tables->counts().logit_rows,
                step_variant_name(variant));
  tables->write(state, *backend);
  return *entry;
}

int Engine::Impl::require_pages(int rounds) {
  for (;; rounds = std::max(1, rounds / 2)) {
    needs.clear();
    for (const Lane& lane : lanes) {
      const RowTable::Row& r = rows->row(lane.row);
      const int next = r.length + lane.tokens;
      needs.push_back({lane.row, std::max(next, std::min(next + rounds - 1, r.max_length))});
    }
    try {
      pages->require(needs, rows->rows());
      return rounds;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kOutOfMemory || rounds == 1) throw;
    }
  }
}

void Engine::Impl::replay(StepVariant variant) {
  guarded([&] {
    require_pages(1);
    const ProgramCache::Entry& entry = write_tables(variant);
    rows->has_rolled_back();
    if (audited_replay) return audited_replay(entry);
    entry.program->replay();
  });
  ++counters.steps;
}

void Engine::Impl::begin_run(std::span<const int> only, int max_rounds) {
  fill_tables(only);
  if (lanes.empty()) return;
  tables->set_feed(true);
  guarded([&] {
    // More rounds than events fit the ring are never run at once.
    const int most =
        std::clamp(state.ring_capacity / static_cast<int>(lanes.size()), 1, max_rounds);
    const int rounds = require_pages(most);
    Program& program = *write_tables(StepVariant::kSample).program;
    rows->has_rolled_back();
    program.begin(rounds < most ? rounds : max_rounds);
    running = &program;
    running_rows.assign(only.begin(), only.end());
  });
}

bool Engine::Impl::wait_run(std::vector<TokenEvent>& out) {
  if (!running) return false;
  const std::optional<RunResult> end = guarded([&] { return running->wait(); });
  const std::size_t before = out.size();
  read_events(out);
  for (std::size_t i = before; i < out.size(); ++i) computed(out[i].row, 1);
  if (!end) return true;
  running = nullptr;
  read_rollbacks();
  counters.steps += static_cast<std::uint64_t>(end->rounds);
  return false;
}

void Engine::Impl::settle() {
  if (!running) return;
  guarded([&] { running->stop(); });
  while (wait_run(waiting)) {
  }
}

bool Engine::Impl::take_waiting(std::span<const int> only) {
  events.clear();
  if (waiting.empty()) return false;
  const auto wanted = [only](const TokenEvent& event) { return is_wanted(only, event.row); };
  std::copy_if(waiting.begin(), waiting.end(), std::back_inserter(events), wanted);
  std::erase_if(waiting, wanted);
  return !events.empty();
}

void Engine::Impl::drop_waiting(int row) {
  std::erase_if(waiting, [row](const TokenEvent& event) { return event.row == row; });
}

void Engine::Impl::computed(int row, int count) {
  rows->computed(row, count);
  counters.tokens += static_cast<std::uint64_t>(count);
}

void Engine::Impl::checkpoint(int row) {
  guarded([&] { rows->checkpoint(row); });
}

void Engine::Impl::read_events(std::vector<TokenEvent>& out) {
  const std::uint64_t head = std::atomic_ref(*state.ring_head).load(std::memory_order_acquire);
  std::uint64_t tail = *state.ring_tail;
  for (; tail < head; ++tail) {
    const TokenEvent event = state.ring[tail % static_cast<std::uint64_t>(state.ring_capacity)];
    rows->apply(event);
    out.push_back(event);
  }
  *state.ring_tail = tail;
}

void Engine::Impl::read_rollbacks() {
  guarded([&] { rows->read_rollbacks(); });
}

void Engine::Impl::compute_all_rows(int row, int count, StepVariant variant) {
  lanes.clear();
  add_lane(row, count, count);
  replay(variant);
  computed(row, count);
  read_rollbacks();
}

// --- Inputs of an encoder -----------------------------------------------------------------------

void Engine::encode(int row, std::span<const std::int32_t> input) {
  Impl& e = *impl_;
  if (max_input_len() == 0) {
    fail(ErrorCode::kInvalidArgument, "engine: encode() needs a model with an encoder");
  }
  e.settle();
  if (const std::size_t held = e.rows->row(row).history.size(); held > 0) {
    fail(ErrorCode::kInvalidArgument,
         "engine: row {} holds {} tokens behind its input: reset() it before another", row, held);
  }
  if (input.empty()) fail(ErrorCode::kInvalidArgument, "engine: encode() of no tokens");
  if (input.size() > static_cast<std::size_t>(max_input_len())) {
    fail(
        ErrorCode::kContextOverflow,
        "engine: an input of {} tokens for row {}, there is room for {}; shorten it or load with a "
        "larger max_input_len",
        input.size(), row, max_input_len());
  }
  for (const TokenId token : input) {
    if (token < 0 || token >= vocab_size()) {
      fail(ErrorCode::kInvalidArgument, "engine: token {} is outside the vocabulary of {}", token,
           vocab_size());
    }
  }
  const int count = static_cast<int>(input.size());
  e.tables->clear();
  e.tables->add_lane(row, 0, input.data(), count, 0);
  e.guarded([&] {
    e.rows->take_input(row, count);
    e.write_tables(StepVariant::kEncode).program->replay();
  });
  ++e.counters.steps;
  e.counters.tokens += input.size();
}

int Engine::input_length(int row) const { return impl_->rows->row(row).input_length; }

std::int32_t Engine::decoder_start_token() const {
  if (max_input_len() == 0) return -1;
  return static_cast<std::int32_t>(impl_->model->config().encoder.decoder_start_token_id);
}

// --- Scores and logits ------------------------------------------------------------------------

std::vector<float> Engine::score(std::span<const std::int32_t> tokens,
                                 const std::function<void(std::size_t)>& progress) {
  Impl& e = *impl_;
  if (!e.layout.options().score) {
    fail(ErrorCode::kInvalidArgument, "engine: score() needs EngineOptions::score at load");
  }
  if (max_input_len() > 0) {
    fail(ErrorCode::kInvalidArgument,
         "engine: score() has no input for the model's encoder; use encode() and logits()");
  }
  if (tokens.size() < 2) return {};
  const int row = open_row({});
  if (row < 0) fail(ErrorCode::kInvalidArgument, "engine: score() needs a free row");
  std::vector<float> logprobs(tokens.size() - 1);
  try {
    e.guarded([&] { e.rows->append(row, tokens); });
    // The last token is only a target: nothing is asked of what follows it.
    for (std::size_t begin = 0; begin < logprobs.size();) {
      const std::size_t count =
          std::min(logprobs.size() - begin, static_cast<std::size_t>(e.layout.options().chunk));
      e.tables->clear();
      for (std::size_t i = 0; i < count; ++i) {
        e.tables->set_target(static_cast<int>(i), tokens[begin + i + 1]);
      }
      e.compute_all_rows(row, static_cast<int>(count), StepVariant::kScore);
      e.guarded([&] {
        e.backend->read(logprobs.data() + begin, e.state.logprob, count * sizeof(float));
      });
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
  e.settle();
  const int count = static_cast<int>(tokens.size());
  if (count < 1 || count > logits_chunk() || e.rows->row(row).pending() != 0) {
    fail(ErrorCode::kInvalidArgument,
         "engine: logits() takes 1 to {} tokens of a row with nothing queued, found {} and {}",
         logits_chunk(), count, e.rows->row(row).pending());
  }
  e.guarded([&] {
    const RowPages::Need need{row, e.rows->row(row).length + count};
    if (need.positions <= max_seq_len()) e.pages->require({&need, 1}, e.rows->rows());
    e.rows->append(row, tokens);
  });
  e.tables->clear();
  e.compute_all_rows(row, count, StepVariant::kLogits);
  if (e.rows->row(row).status == RowStatus::kRefused) {
    fail(ErrorCode::kContextOverflow,
         "engine: a kernel asked to take back more of row {} than it can, and nothing was computed",
         row);
  }
  if (count > 1) e.checkpoint(row);
  e.rows->set_idle(row);
  const std::size_t size = tokens.size() * static_cast<std::size_t>(vocab_size());
  e.guarded([&] { e.backend->read(e.logits.data(), e.device_logits(), size * sizeof(float)); });
  return {e.logits.data(), size};
}

int Engine::logits_chunk() const { return logits_chunk_of(impl_->layout.options()); }

}  // namespace pianola
