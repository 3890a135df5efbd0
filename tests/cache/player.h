// Plays commands on an engine and knows what must come of each: a mirror of its rows that has never
// looked into it, and an Oracle for the tokens.
//
// On a GPU a stream goes on computing while its reader is away: how far is a matter of time, and
// the only thing here that is not the same in every run. Those tokens are looked at when whatever
// comes next has ended the run, and must be handed out by the next step, run or stream of their
// row.
//
//   Player player(stack, oracle, tally);  // inside a RapidCheck property: it fails there
//   for (const Command& command : commands) player.play(command);
//   player.finish();
#pragma once

#include <rapidcheck.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "cache/commands.h"
#include "cache/mirror.h"
#include "cache/rows.h"
#include "cache/stacks.h"
#include "engine/engine_audit.h"
#include "engine_test_access.h"
#include "pianola/engine.h"

namespace pianola {

class Player {
 public:
  Player(const Stack& stack, Oracle& oracle, Tally& tally)
      : stack_(stack),
        oracle_(oracle),
        tally_(tally),
        engine_(tiny_model(stack.model), engine_options(stack)),
        before_(engine_.counters()) {
    const auto& e = EngineTestAccess::impl(engine_);
    has_states_ = !e.states.empty();
    has_windows_ =
        std::ranges::any_of(e.caches, [](const LayerCacheView& v) { return v.window > 0; });
    has_rings_ = std::ranges::any_of(e.caches, [&](const LayerCacheView& v) {
      return v.capacity < e.layout.cache_layout().capacity();
    });
    if (stack.pages == 0) return;
    const LayerCacheView& keys = e.caches[0];  // as the values, and those of other layers
    const std::size_t page = e.backend->page_bytes();
    page_tokens_ =
        static_cast<int>(page * static_cast<std::size_t>(keys.capacity) / keys.key_slot_bytes);
    e.cache_memory->set_limit(page * static_cast<std::size_t>(stack.pages) * 2 * e.caches.size());
  }

  void play(const Command& command) {
    if (rows_.empty() && command.verb != Verb::kOpen) open(0);
    execute(command);
    verify(command.n);
    ++tally_.operations;
  }

  // Every row answers once more.
  void finish() {
    settle();
    for (const int row : open_rows()) {
      if (!rows_.at(row).unseen.empty()) accept(engine_.step({&row, 1}), {row});
      RC_ASSERT(rows_.at(row).unseen.empty());
      if (rows_.at(row).status != RowStatus::kRunning) go_on(row);
      for (int i = 0; i < kMaxSeqLen && rows_.at(row).status == RowStatus::kRunning; ++i) {
        std::span<const TokenEvent> events;
        if (!find_memory({row}, [&] { events = engine_.step({&row, 1}); })) break;
        const bool answered = !events.empty();
        accept(events, {row});
        if (answered) break;
      }
      verify(row);
    }
  }

 private:
  void execute(const Command& c) {
    if (is_of_the_histories(c.verb)) settle();
    const int row = rows_.empty() ? 0 : pick(c.a);
    switch (c.verb) {
      case Verb::kOpen:
        return open(c.n);
      case Verb::kAppend:
        return append(row, c.b % 3, c.n);
      case Verb::kContinue:
        return go_on(row);
      case Verb::kLogits:
        return logits(row, c.b % 3, 1 + c.n % std::min(stack_.chunk, 20));
      case Verb::kStep:
        return compute(c, [this](auto rows) { return engine_.step(rows); });
      case Verb::kRun:
        return compute(c, [&](auto rows) { return engine_.run(1 + c.n % 12, rows); });
      case Verb::kStream:
        return compute(c, [this](auto rows) { return engine_.stream(rows); });
      case Verb::kKeepFirst:
        return keep_first(row, c.n % (rows_.at(row).known() + 2), false);
      case Verb::kKeepLeast: {
        const int least = rows_.at(row).known() - engine_.max_rewind(row);
        return least > 1 ? keep_first(row, least - c.n % 2, false) : void();
      }
      case Verb::kDropLast: {
        const int dropped = c.n % 2 == 0 ? c.n / 2 % 3 : c.n / 2 % 24;
        return keep_first(row, rows_.at(row).known() - dropped, true);
      }
      case Verb::kRollback:
        return rollback(counts(row, c));
      case Verb::kKernelRollback:
        return kernel_rollback(counts(row, c));
      case Verb::kReset:
        return reset(row);
      case Verb::kFork:
        return fork(row, 1 + c.b % kSlots, c.n);
      case Verb::kSwap:
        return swap(row, pick(c.b));
      case Verb::kConfigure:
        return configure(row, c.n);
      case Verb::kSnapshot:
        return snapshot(row, c.b % 2, c.n % 3 == 0);
      case Verb::kRestore:
        return restore(row, c.b % 2);
      case Verb::kPoison:
        return poison();
      case Verb::kClose:
        return close(row);
    }
  }

  // What a verb does, or whether it can, follows from how many tokens there are: a run is ended
  // before. The others end it themselves.
  static bool is_of_the_histories(Verb verb) {
    for (const Verb v :
         {Verb::kContinue, Verb::kLogits, Verb::kKeepFirst, Verb::kKeepLeast, Verb::kDropLast,
          Verb::kRollback, Verb::kKernelRollback, Verb::kSwap, Verb::kRestore, Verb::kPoison}) {
      if (v == verb) return true;
    }
    return false;
  }

  // Ends a run that goes on, and does nothing else.
  void settle() {
    if (ahead_.empty() || rows_.empty()) return;
    const int row = rows_.begin()->first;
    engine_.swap(row, row);
    settled();
  }

  // It has ended.
  void settled() {
    absorb();
    ahead_.clear();
  }

  // Calls what may throw OutOfMemory: then it is true that there is none, and nothing has changed.
  // `needs()` are the pages with which the call can be done.
  template <typename Call, typename Needs>
  bool finds_memory(Call&& call, Needs&& needs) {
    try {
      call();
      return true;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kOutOfMemory || stack_.pages == 0) throw;
    }
    settled();
    RC_LOG() << "  out of memory\n";
    RC_ASSERT(needs() > stack_.pages);
    ++tally_.shortages;
    return false;
  }
  // The rows hold what they know.
  template <typename Call>
  bool find_memory(const std::vector<int>& rows, Call&& call) {
    return finds_memory(call, [&] {
      std::map<int, int> needs;
      for (const int row : rows) {
        const Row& r = rows_.at(row);
        if (r.status == RowStatus::kRunning) needs[row] = r.known();
      }
      return pages_with(needs);
    });
  }
  int pages(int tokens) const { return (tokens + page_tokens_ - 1) / page_tokens_; }
  // Of all rows, when some hold so many tokens as well.
  int pages_with(const std::map<int, int>& needs) const {
    int sum = 0;
    for (const auto& [row, r] : rows_) {
      const auto need = needs.find(row);
      sum += pages(need == needs.end() ? r.held() : std::max(r.held(), need->second));
    }
    return sum;
  }

  void open(int n) {
    const RowOptions options = row_options(n);
    const int row = engine_.open_row(options);
    settled();
    RC_LOG() << "open -> " << row << "\n";
    RC_ASSERT((row < 0) == (rows_.size() == kSlots));
    if (row < 0) return;
    RC_ASSERT(!rows_.contains(row));
    configured(rows_[row], options);
  }

  void append(int row, int text, int n) {
    Row& r = rows_.at(row);
    const int count = n % 4 == 0 ? 1 + n / 4 % 3 : 1 + n / 4 % 60;
    const std::vector<TokenId> tokens = text_tokens(text, r.known(), count);
    RC_LOG() << "append " << count << " of text " << text << " to row " << row << "\n";
    if (is_too_much(r, count)) return;
    bool is_refused = false;
    try {
      engine_.append(row, tokens);
    } catch (const Error& error) {
      RC_ASSERT(error.code() == ErrorCode::kContextOverflow);
      is_refused = true;
      ++tally_.refusals;
    }
    absorb(row, is_refused ? 0 : count);
    RC_ASSERT(is_refused == (r.known() + count > stack_.max_seq_len));
    if (!is_refused) {
      r.history.insert(r.history.end(), tokens.begin(), tokens.end());
      r.status = RowStatus::kRunning;
    }
    settled();
  }

  // Rows stay within kMaxSeqLen where slots hold much more.
  bool is_too_much(const Row& r, int count) const {
    return stack_.max_seq_len > kMaxSeqLen && r.known() + count > kMaxSeqLen;
  }

  void go_on(int row) {
    Row& r = rows_.at(row);
    const bool again = r.known() == r.length;
    if (r.known() > 0 && again && !is_clean(r, r.length - 1)) return;
    RC_LOG() << "continue row " << row << "\n";
    const auto call = [&] { engine_.append(row, {}); };
    if (r.known() > stack_.max_seq_len) return refuse(ErrorCode::kContextOverflow, call);
    if (r.known() == 0) return refuse(ErrorCode::kInvalidArgument, call);
    if (again && engine_.max_rewind(row) < 1) return refuse(ErrorCode::kContextOverflow, call);
    call();
    if (again) --r.length;
    r.status = RowStatus::kRunning;
  }

  void logits(int row, int text, int count) {
    Row& r = rows_.at(row);
    const std::vector<TokenId> tokens = text_tokens(text, r.known(), count);
    RC_LOG() << "logits of " << count << " of text " << text << " in row " << row << "\n";
    const auto call = [&] { engine_.logits(row, tokens); };
    if (r.known() != r.length) return refuse(ErrorCode::kInvalidArgument, call);
    if (is_too_much(r, count)) return;
    if (r.known() + count > stack_.max_seq_len) return refuse(ErrorCode::kContextOverflow, call);
    if (!finds_memory(call, [&] { return pages_with({{row, r.known() + count}}); })) return;
    r.history.insert(r.history.end(), tokens.begin(), tokens.end());
    computed(r, r.known());
    r.status = RowStatus::kIdle;
  }

  template <typename Call>
  void compute(const Command& c, Call&& call) {
    std::vector<int> rows;
    for (const int row : open_rows()) {
      if (c.b == 0 || (c.a + 1) >> row & 1) rows.push_back(row);
    }
    const bool all = c.b == 0 || rows.empty();
    if (all) rows = open_rows();
    RC_LOG() << kVerbNames[static_cast<std::size_t>(c.verb)] << " rows";
    for (const int row : rows) RC_LOG() << " " << row;
    RC_LOG() << "\n";
    const bool work = std::ranges::any_of(
        rows, [this](int row) { return rows_.at(row).status == RowStatus::kRunning; });
    const bool is_waiting =
        std::ranges::any_of(rows, [this](int row) { return !rows_.at(row).unseen.empty(); });
    const bool may_be_ahead = !ahead_.empty();
    const std::uint64_t tokens = engine_.counters().tokens;
    std::span<const TokenEvent> events;
    const bool is_done = find_memory(
        rows, [&] { events = call(all ? std::span<const int>() : std::span<const int>(rows)); });
    if (!is_done) return;
    accept(events, rows);
    const bool is_more = engine_.counters().tokens > tokens;
    RC_ASSERT(is_more || !work || is_waiting);
    RC_ASSERT(!is_more || work || may_be_ahead);
    if (c.verb != Verb::kStream) {
      ahead_.clear();
    } else if (!is_waiting) {  // else a run may go on, of those rows as before
      ahead_ = rows;
    }
  }

  // Events are those of the given rows, and right; the mirror follows.
  void accept(std::span<const TokenEvent> events, const std::vector<int>& rows) {
    const std::vector<TokenEvent> copies(events.begin(), events.end());
    const bool is_waiting =
        std::ranges::any_of(rows, [this](int row) { return !rows_.at(row).unseen.empty(); });
    for (const TokenEvent& event : copies) {
      RC_ASSERT(std::ranges::find(rows, event.row) != rows.end());
      const Answer answer{event.token, std::bit_cast<std::uint32_t>(event.logprob)};
      std::deque<Answer>& unseen = rows_.at(event.row).unseen;
      if (unseen.empty()) {
        RC_ASSERT(answer == answered(event.row, event.token));
      } else {
        RC_ASSERT(answer == unseen.front());
        unseen.pop_front();
      }
    }
    if (is_waiting) {  // then it is all of those at once
      for (const int row : rows) RC_ASSERT(rows_.at(row).unseen.empty());
    }
    absorb();
    for (const int row : rows) {  // and a prompt may have got further
      Row& r = rows_.at(row);
      const int length = engine_.length(row);
      RC_ASSERT(length >= r.length);
      RC_ASSERT(length == r.length || r.status == RowStatus::kRunning);
      computed(r, length);
    }
  }

  // A row's next token, which must be what a new engine says.
  Answer answered(int row, TokenId token) {
    Row& r = rows_.at(row);
    RC_ASSERT(r.status == RowStatus::kRunning);
    const Answer want = oracle_.answer(r.history, r.choosing);
    RC_LOG() << "  row " << row << " at " << r.known() << ": token " << token << ", wanted "
             << want.token << "\n";
    RC_ASSERT(token == want.token);
    r.history.push_back(token);
    r.status = r.known() >= r.max_length ? RowStatus::kLength : RowStatus::kRunning;
    computed(r, r.known() - 1);
    ++tally_.answers;
    if (r.known() > stack_.max_seq_len) ++tally_.full;
    return want;
  }

  static void computed(Row& r, int length) {
    r.length = length;
    r.written = std::max(r.written, length);
    r.folded = std::max(r.folded, length);
  }

  // What a stream computed until it was ended, while nobody looked. Behind it lie `appended`
  // tokens.
  void absorb(int row, int appended = 0) {
    Row& r = rows_.at(row);
    const auto found = engine_.history(row);
    RC_ASSERT(static_cast<int>(found.size()) >= r.known() + appended);
    while (r.known() + appended < static_cast<int>(found.size())) {
      RC_ASSERT(stack_.on_gpu());
      RC_ASSERT(std::ranges::find(ahead_, row) != ahead_.end());
      r.unseen.push_back(answered(row, found[r.history.size()]));
      ++tally_.ahead;
    }
  }
  void absorb() {
    for (const int row : open_rows()) absorb(row);
  }

  void keep_first(int row, int n, bool drop) {
    Row& r = rows_.at(row);
    RC_LOG() << (drop ? "drop_last, so that " : "keep_first: ") << n << " of " << r.known()
             << " stay of row " << row << "\n";
    const auto call = [&](int kept) {
      if (drop) {
        engine_.drop_last(row, r.known() - kept);
      } else {
        engine_.keep_first(row, kept);
      }
    };
    if (n < 0 || n > r.known()) return refuse(ErrorCode::kContextOverflow, [&] { call(n); });
    const int kept = engine_.keepable(row, n);
    if (kept != n) {
      refuse(ErrorCode::kContextOverflow, [&] { call(n); });
      verify(n);
      RC_LOG() << "  refused, so " << kept << "\n";
    }
    if (!is_clean(r, kept)) return;
    const int least = r.known() - engine_.max_rewind(row);
    call(kept);
    count_cut(r, kept, least);
    cut(r, kept, least);
  }
  // `least`: below it only a checkpoint can be kept.
  void count_cut(const Row& r, int kept, int least) {
    if (kept > 0 && kept < r.length) ++tally_.rewinds;
    if (kept > 0 && kept < least) ++tally_.checkpoints;
  }
  static void cut(Row& r, int kept, int least) {
    if (kept == 0) {
      r.written = r.folded = r.floor = 0;
      r.poisoned = -1;
    } else if (kept < least) {
      r.folded = r.floor = kept;
    }
    r.history.resize(static_cast<std::size_t>(kept));
    r.length = std::min(r.length, kept);
    r.status = RowStatus::kIdle;
    r.unseen.clear();
  }

  // Of a row, and sometimes of another: up to one more than can be.
  std::vector<int> counts(int row, const Command& c) const {
    std::vector<int> counts(kSlots);
    const auto most = [this](int i) { return std::min(stack_.rollback_depth, rows_.at(i).length); };
    const int other = pick(c.b);
    if (c.n % 3 == 0) counts[static_cast<std::size_t>(other)] = c.n / 3 % (most(other) + 1);
    counts[static_cast<std::size_t>(row)] = c.n % (most(row) + 2);
    RC_LOG() << "rollback " << counts[0] << " " << counts[1] << " " << counts[2] << "\n";
    return counts;
  }
  static bool has_stopped(const Row& r) {
    return r.status != RowStatus::kIdle && r.status != RowStatus::kRunning;
  }
  bool can_roll_back(const Row& r, int count) const {
    const int held = std::max({r.length, has_states_ ? r.folded : 0, has_rings_ ? r.written : 0});
    const bool forgets = has_states_ || has_rings_;
    return !has_stopped(r) && count <= stack_.rollback_depth && count <= r.length - r.floor &&
           (!forgets || held - (r.length - count) <= stack_.rollback_depth);
  }
  bool is_clean(const std::vector<int>& counts) const {
    return std::ranges::all_of(rows_, [&](const auto& row) {
      const Row& r = row.second;
      const int count = counts[static_cast<std::size_t>(row.first)];
      return !can_roll_back(r, count) || is_clean(r, r.length - count);
    });
  }
  void rolled_back(Row& r, int count) {
    if (count == 0) return;
    const auto end = r.history.begin() + r.length;
    r.history.erase(end - count, end);
    r.length -= count;
    r.unseen.clear();
    ++tally_.rollbacks;
  }

  void rollback(const std::vector<int>& counts) {
    if (!is_clean(counts)) return;
    const auto call = [&] { engine_.rollback(counts); };
    for (const auto& [row, r] : rows_) {
      const int count = counts[static_cast<std::size_t>(row)];
      if (count == 0 || can_roll_back(r, count)) continue;
      return refuse(has_stopped(r) ? ErrorCode::kInvalidArgument : ErrorCode::kContextOverflow,
                    call);
    }
    call();
    for (auto& [row, r] : rows_) rolled_back(r, counts[static_cast<std::size_t>(row)]);
  }

  // Nobody but the device knows of it until the step's results are read.
  void kernel_rollback(const std::vector<int>& counts) {
    const auto is_unseen = [](const auto& row) { return !row.second.unseen.empty(); };
    if (stack_.pages > 0 || std::ranges::any_of(rows_, is_unseen) || !is_clean(counts)) return;
    const auto runs = [](const auto& row) { return row.second.status == RowStatus::kRunning; };
    if (std::ranges::none_of(rows_, runs)) return;
    std::int32_t* to = engine_.device_rollback();
    for (auto& [row, r] : rows_) {
      const std::int32_t count = counts[static_cast<std::size_t>(row)];
      if (count == 0) continue;
      EngineTestAccess::impl(engine_).backend->write(to + row, &count, sizeof(count));
      if (can_roll_back(r, count)) {
        rolled_back(r, count);
      } else if (!has_stopped(r)) {
        r.status = RowStatus::kRefused;
      }
    }
    accept(engine_.step(), open_rows());
  }

  void reset(int row) {
    RC_LOG() << "reset row " << row << "\n";
    engine_.reset(row);
    Row& r = rows_.at(row);
    r = {.choosing = r.choosing, .max_length = r.max_length};
    settled();
  }

  void fork(int row, int count, int n) {
    const RowOptions options = row_options(n);
    const int known = rows_.at(row).known();
    const int wanted = n % 3 == 0 ? known : n % (known + 2);
    const int kept = wanted > known ? known : engine_.keepable(row, wanted);
    if (kept != wanted) {
      refuse(ErrorCode::kContextOverflow, [&] { engine_.fork(row, count, options, wanted); });
      settled();
      verify(wanted);
    }
    if (kept < known && !is_clean(rows_.at(row), kept)) return;
    const int least = known - engine_.max_rewind(row);
    // Of layers that keep everything a fork has no more than its tokens.
    const auto forked = [&] {
      Row fork = rows_.at(row);
      cut(fork, kept, least);
      if (!has_rings_) fork.written = fork.length;
      if (!has_states_) fork.folded = fork.length;
      return fork;
    };
    std::vector<int> forks;
    const bool is_done =
        finds_memory([&] { forks = engine_.fork(row, count, options, kept); },
                     [&] { return pages_with({}) + count * pages(forked().held()); });
    if (!is_done) return;
    settled();
    RC_LOG() << "fork " << kept << " of row " << row << " " << count << " times ->";
    for (const int fork : forks) RC_LOG() << " " << fork;
    RC_LOG() << "\n";
    const std::size_t free = kSlots - rows_.size();
    RC_ASSERT(forks.size() == (static_cast<std::size_t>(count) > free ? 0U : count));
    if (!forks.empty()) count_cut(rows_.at(row), kept, least);
    const Row like = forked();
    for (std::size_t i = 0; i < forks.size(); ++i) {
      RC_ASSERT(!rows_.contains(forks[i]));
      Row& fork = rows_[forks[i]] = like;
      configured(fork, options);
      fork.choosing.choice = static_cast<std::uint32_t>(i);
    }
  }

  void swap(int a, int b) {
    RC_LOG() << "swap rows " << a << " and " << b << "\n";
    const int held = std::max(rows_.at(a).held(), rows_.at(b).held());
    const bool is_done = finds_memory([&] { engine_.swap(a, b); },
                                      [&] { return pages_with({{a, held}, {b, held}}); });
    if (!is_done) return;
    std::swap(rows_.at(a), rows_.at(b));
  }

  void configure(int row, int n) {
    RC_LOG() << "configure row " << row << "\n";
    const RowOptions options = row_options(n);
    engine_.configure_row(row, options);
    settled();
    configured(rows_.at(row), options);
  }

  void snapshot(int row, int place, bool by_file) {
    RC_LOG() << "snapshot " << place << " of row " << row << (by_file ? ", by file\n" : "\n");
    RowSnapshot snapshot = engine_.snapshot(row);
    settled();
    const Row& r = rows_.at(row);
    if (by_file) {
      const std::filesystem::path file =
          std::filesystem::temp_directory_path() / ("pianola_property_" + std::to_string(getpid()));
      snapshot.save(file);
      snapshot = RowSnapshot::load(file);
      std::filesystem::remove(file);
    }
    RC_ASSERT(std::ranges::equal(snapshot.history(), r.history));
    RC_ASSERT(snapshot.length() == r.length);
    snapshots_.insert_or_assign(place, std::pair(std::move(snapshot), r));
  }

  void restore(int row, int place) {
    const auto found = snapshots_.find(place);
    if (found == snapshots_.end()) return;
    RC_LOG() << "restore " << place << " into row " << row << "\n";
    const int held = found->second.second.held();
    const bool is_done = finds_memory([&] { engine_.restore(row, found->second.first); },
                                      [&] { return pages_with({{row, held}}); });
    if (!is_done) return;
    Row& r = rows_.at(row);
    const RowOptions kept{.sampling = {}, .max_length = r.max_length};
    const Choosing choosing = r.choosing;
    r = found->second.second;
    r.choosing = choosing;
    r.max_length = kept.max_length;
    r.status = RowStatus::kIdle;
    r.unseen.clear();
  }

  void poison() {
    RC_LOG() << "poison\n";
    EngineAudit::poison(engine_);
    for (auto& [row, r] : rows_) r.poisoned = r.length > 0 ? r.length : -1;
  }

  void close(int row) {
    RC_LOG() << "close row " << row << "\n";
    engine_.close_row(row);
    rows_.erase(row);
    settled();
  }

  // The call throws; that nothing has changed is verified afterwards, as always.
  template <typename Call>
  void refuse(ErrorCode code, Call&& call) {
    try {
      call();
    } catch (const Error& error) {
      RC_ASSERT(error.code() == code);
      ++tally_.refusals;
      return;
    }
    RC_FAIL("what should be refused was done");
  }

  // Whether a row can go back to n tokens after a poisoning: it takes what only earlier lengths
  // need.
  bool is_clean(const Row& r, int n) const {
    if (r.poisoned < 0 || n == 0 || n >= r.length) return true;
    if (!has_states_) return !has_windows_ || n >= r.poisoned;
    const int interval = stack_.exact ? 1 : stack_.rollback_depth;
    return n / interval * interval > r.poisoned;
  }

  // Everything that can be asked is as it should be.
  void verify(int n) {
    for (const auto& [row, r] : rows_) {
      RC_ASSERT(std::ranges::equal(engine_.history(row), r.history));
      RC_ASSERT(engine_.length(row) == r.length);
      RC_ASSERT(engine_.status(row) == r.status);
      const int depth = stack_.rollback_depth;
      const int windows = has_windows_ ? r.written - depth : 0;
      const int states = has_states_ ? std::max(r.floor, r.folded - depth) : 0;
      const int rewind = engine_.max_rewind(row);
      RC_ASSERT(rewind >= r.known() - std::max({0, windows, states}));
      RC_ASSERT(rewind <= r.known());
      const int wanted = n % (r.known() + 1);
      const int kept = engine_.keepable(row, wanted);
      RC_ASSERT(kept >= 0);
      RC_ASSERT(kept <= wanted);
      RC_ASSERT(kept == wanted || wanted < r.known() - rewind);
      RC_ASSERT(engine_.keepable(row, kept) == kept);
    }
    const EngineCounters now = engine_.counters();
    RC_ASSERT(now.address_hash == before_.address_hash);
    RC_ASSERT(now.plans == before_.plans);
    RC_ASSERT(now.captures == before_.captures);
    RC_ASSERT(stack_.max_seq_len == kMaxSeqLen || now.cache_resident < now.cache_reserved);
    RC_ASSERT(stack_.pages == 0 || pages_with({}) <= stack_.pages);
    RC_ASSERT(engine_.has_work() == std::ranges::any_of(rows_, [](const auto& row) {
                return row.second.status == RowStatus::kRunning;
              }));
  }

  RowOptions row_options(int n) const {
    const int most = stack_.max_seq_len > kMaxSeqLen ? kMaxSeqLen : 0;  // of the slot
    return {.sampling = sampling_params({.way = n % 3}),
            .max_length = n / 3 % 3 == 0 ? 20 + n % 120 : most};
  }

  // The other way round.
  static void configured(Row& r, const RowOptions& options) {
    const SamplingParams& p = options.sampling;
    r.choosing = {.way = p.temperature == 0 ? 0 : p.repeat_penalty == 1 ? 1 : 2};
    r.max_length = options.max_length ? options.max_length : kMaxSeqLen;
    r.status = RowStatus::kIdle;
  }

  std::vector<int> open_rows() const {
    std::vector<int> rows;
    for (const auto& [row, r] : rows_) rows.push_back(row);
    return rows;
  }
  int pick(int n) const { return open_rows()[static_cast<std::size_t>(n) % rows_.size()]; }

  const Stack& stack_;
  Oracle& oracle_;
  Tally& tally_;
  Engine engine_;
  EngineCounters before_;
  int page_tokens_ = 1;  // of the keys of a layer
  bool has_states_ = false;
  bool has_windows_ = false;
  bool has_rings_ = false;  // windows that rows outgrow
  std::map<int, Row> rows_;
  std::vector<int> ahead_;  // rows that a stream may be computing
  std::map<int, std::pair<RowSnapshot, Row>> snapshots_;
};

}  // namespace pianola
