// Random sequences of everything that can be done to the rows of an engine, on every kind of stack.
// What a row has been through must not show: each token that comes, and its log-probability to the
// bit, is what an engine answers that has never held anything and computes the row's tokens from
// the first one on, in one step. What is promised can be done, what is refused changes nothing, and
// no row knows of another. RapidCheck shortens a sequence that fails and prints it.
//
// PIANOLA_PROPERTY_OPERATIONS=100000 runs so many commands, shared out over the stacks.
// PIANOLA_PROPERTY_SEED=n begins elsewhere; without it, every run is the same.
// RapidCheck's RC_PARAMS has no effect but for `reproduce`.
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <map>
#include <sstream>
#include <tuple>

#include "cache/rows.h"
#include "engine/engine_audit.h"
#include "engine_test_access.h"
#include "host_pages.h"
#include "pianola/engine.h"
#include "sanitized.h"

namespace pianola {
namespace {

#ifdef PIANOLA_TEST_SANITIZED
constexpr std::uint64_t kOperations = 3000;
#else
constexpr std::uint64_t kOperations = 16000;
#endif

constexpr int kMaxSeqLen = 150;  // above two blocks: a ring of one block wraps twice
constexpr int kSlots = 3;

struct Stack {
  std::string name;
  std::string backend;
  std::string model;
  std::string cache_type;
  int rollback_depth = 16;
  int chunk = 16;
  bool exact = false;
  int checkpoints = 4;
  std::size_t page_bytes = 0;  // not 0: what no page was required for cannot be touched
};

void PrintTo(const Stack& stack, std::ostream* out) { *out << stack.name; }

const std::vector<Stack>& stacks() {
  static const std::vector<Stack> all = {
      {"full", "cpu", "llama/untied", "f16"},
      {"full_int8", "cpu", "llama/untied", "int8", 1, 150},
      {"window", "cpu", "mistral/window", "f16", 4, 33},
      {"window_int8", "cpu", "mistral/window", "int8", 40, 7},
      {"experts", "cpu", "gpt_oss/mixed", "f16", 16, 20},
      {"hybrid", "cpu", "qwen3_5/hybrid", "f16", 4, 16},
      {"hybrid_deep", "cpu", "qwen3_5/hybrid", "int8", 16, 40, false, 1},
      {"hybrid_no_checkpoints", "cpu", "qwen3_5/hybrid", "f16", 7, 9, false, 0},
      {"hybrid_shallow", "cpu", "qwen3_5/hybrid", "f16", 1, 24, false, 2},
      {"hybrid_exact", "cpu", "qwen3_5/hybrid", "f16", 3, 16, true, 4},
      {"hybrid_exact_int8", "cpu", "qwen3_5/hybrid", "int8", 12, 30, true, 0},
      {"reference_full", "reference", "llama/untied", "f16"},
      {"reference_window_int8", "reference", "mistral/window", "int8", 4, 33},
      {"reference_experts", "reference", "gpt_oss/mixed", "f16", 16, 20},
      {"reference_hybrid", "reference", "qwen3_5/hybrid", "f16", 4, 16},
      {"pages", "cpu", "llama/untied", "f16", 16, 16, false, 4, 4096},
      {"pages_int8", "cpu", "llama/untied", "int8", 1, 150, false, 4, 4096},
      {"pages_window", "cpu", "mistral/window", "f16", 4, 33, false, 4, 4096},
      {"pages_hybrid", "cpu", "qwen3_5/hybrid", "f16", 4, 16, false, 4, 4096},
      {"reference_pages", "reference", "llama/untied", "f16", 16, 16, false, 4, 4096},
      {"reference_hybrid_exact", "reference", "qwen3_5/hybrid", "f16", 3, 16, true, 4},
      {"shared_kv", "cpu", "gemma3/shared", "f16", 4, 33},
      {"shared_kv_int8", "cpu", "gemma3/shared", "int8", 40, 7},
      {"pages_shared_kv", "cpu", "gemma3/shared", "f16", 4, 33, false, 4, 4096},
      {"reference_shared_kv", "reference", "gemma3/shared", "f16", 4, 33},
      {"latent", "cpu", "deepseek/v2_lite", "f16", 16, 20},
      {"latent_int8", "cpu", "deepseek/v3", "int8", 1, 150},
      {"pages_latent", "cpu", "deepseek/v3", "f16", 4, 33, false, 4, 4096},
      {"reference_latent", "reference", "deepseek/v2", "f16"}};
  return all;
}

EngineOptions engine_options(const Stack& stack) {
  return {.backend = stack.backend,
          .threads = 1,
          .max_seq_len = kMaxSeqLen,
          .slots = kSlots,
          .chunk = stack.chunk,
          .cache_type = stack.cache_type,
          .rollback_depth = stack.rollback_depth,
          .exact_rollback = stack.exact,
          .checkpoints = stack.checkpoints,
          .logits = true};
}

// How a row chooses its tokens: one of a few ways.
struct Choosing {
  int way = 0;
  std::uint32_t choice = 0;
  auto operator<=>(const Choosing&) const = default;
};

SamplingParams sampling_params(const Choosing& choosing) {
  SamplingParams p;
  p.logprobs = true;
  p.choice = choosing.choice;
  if (choosing.way == 0) return p;
  p.temperature = 0.8F;
  p.seed = 5;
  if (choosing.way == 1) return p;
  p.repeat_penalty = 1.2F;
  p.penalty_window = 20;
  return p;
}

// Answers for histories, from an engine whose caches are as they were allocated.
class Oracle {
 public:
  struct Answer {
    TokenId token = 0;
    std::uint32_t logprob = 0;  // its bits
    bool operator==(const Answer&) const = default;
  };

  explicit Oracle(const Stack& stack) : engine_(tiny_model(stack.model), options(stack)) {}

  Answer answer(const std::vector<TokenId>& history, const Choosing& choosing) {
    const auto [known, is_new] = known_.try_emplace({choosing, history});
    if (is_new) known->second = compute(history, choosing);
    const Answer answer = known->second;
    if (known_.size() > 50000) known_.clear();
    return answer;
  }

 private:
  static EngineOptions options(const Stack& stack) {
    EngineOptions o = engine_options(stack);
    o.slots = 1;
    o.chunk = kMaxSeqLen;
    return o;
  }

  Answer compute(const std::vector<TokenId>& history, const Choosing& choosing) {
    DeviceMemory& caches = *EngineTestAccess::impl(engine_).cache_memory;
    zeros_.resize(caches.size());
    EngineTestAccess::write(engine_, caches.data(), zeros_);
    const int row = engine_.open_row({.sampling = sampling_params(choosing)});
    engine_.append(row, history);
    const auto events = engine_.step();
    RC_ASSERT(events.size() == 1U);
    const Answer answer{events[0].token, std::bit_cast<std::uint32_t>(events[0].logprob)};
    engine_.close_row(row);
    return answer;
  }

  Engine engine_;
  std::vector<std::byte> zeros_;
  std::map<std::pair<Choosing, std::vector<TokenId>>, Answer> known_;
};

enum class Verb {
  kOpen,
  kAppend,
  kContinue,  // append() of nothing
  kLogits,
  kStep,
  kRun,
  kStream,
  kKeepFirst,
  kKeepLeast,  // as few as can be kept, or one less than that
  kDropLast,
  kReset,
  kFork,
  kSwap,
  kConfigure,
  kSnapshot,
  kRestore,
  kPoison,
  kClose,
};

constexpr const char* kVerbNames[] = {"open",    "append", "continue",   "logits",     "step",
                                      "run",     "stream", "keep_first", "keep_least", "drop_last",
                                      "reset",   "fork",   "swap",       "configure",  "snapshot",
                                      "restore", "poison", "close"};

// The numbers choose among what is there when it is executed, so that any part of a sequence is a
// sequence: rows a and b of the open ones, and n for the rest.
struct Command {
  Verb verb = Verb::kOpen;
  int a = 0;
  int b = 0;
  int n = 0;
};

std::ostream& operator<<(std::ostream& out, const Command& c) {
  return out << kVerbNames[static_cast<std::size_t>(c.verb)] << "(" << c.a << ", " << c.b << ", "
             << c.n << ")";
}

rc::Gen<Command> any_command() {
  const auto verb = rc::gen::weightedElement<Verb>({{4, Verb::kOpen},
                                                    {16, Verb::kAppend},
                                                    {14, Verb::kContinue},
                                                    {3, Verb::kLogits},
                                                    {14, Verb::kStep},
                                                    {14, Verb::kRun},
                                                    {12, Verb::kStream},
                                                    {5, Verb::kKeepFirst},
                                                    {5, Verb::kKeepLeast},
                                                    {10, Verb::kDropLast},
                                                    {1, Verb::kReset},
                                                    {4, Verb::kFork},
                                                    {4, Verb::kSwap},
                                                    {2, Verb::kConfigure},
                                                    {4, Verb::kSnapshot},
                                                    {5, Verb::kRestore},
                                                    {3, Verb::kPoison},
                                                    {2, Verb::kClose}});
  const auto row = rc::gen::inRange(0, 6);
  return rc::gen::apply([](Verb v, int a, int b, int n) { return Command{v, a, b, n}; }, verb, row,
                        row, rc::gen::inRange(0, 1000));
}

// What is known of a row without having looked into the engine.
struct Row {
  std::vector<TokenId> history;
  int length = 0;
  RowStatus status = RowStatus::kIdle;
  Choosing choosing;
  int max_length = kMaxSeqLen;
  int written = 0;    // the most tokens that its windows have held since it was empty
  int folded = 0;     // and its states since a checkpoint was restored
  int floor = 0;      // the tokens of that checkpoint
  int poisoned = -1;  // its length when all was poisoned that the next token does not need

  int known() const { return static_cast<int>(history.size()); }
};

// What sequences came to: that they are no idle play.
struct Tally {
  std::uint64_t operations = 0;
  std::uint64_t answers = 0;
  std::uint64_t refusals = 0;
  std::uint64_t rewinds = 0;
  std::uint64_t checkpoints = 0;  // gone back to
  std::uint64_t full = 0;         // rows at their capacity
};

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
  }

  void play(const Command& command) {
    if (rows_.empty() && command.verb != Verb::kOpen) open(0);
    execute(command);
    verify(command.n);
    ++tally_.operations;
  }

  // Every row answers once more.
  void finish() {
    const std::vector<int> rows = open_rows();
    for (const int row : rows) {
      if (rows_.at(row).status != RowStatus::kRunning) go_on(row);
      for (int i = 0; i < kMaxSeqLen && rows_.at(row).status == RowStatus::kRunning; ++i) {
        const auto events = engine_.step({&row, 1});
        const bool answered = !events.empty();
        accept(events, {row});
        if (answered) break;
      }
      verify(row);
    }
  }

 private:
  void execute(const Command& c) {
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

  void open(int n) {
    const RowOptions options = row_options(n);
    const int row = engine_.open_row(options);
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
    if (r.known() + count > kMaxSeqLen) {
      return refuse(ErrorCode::kContextOverflow, [&] { engine_.append(row, tokens); });
    }
    engine_.append(row, tokens);
    r.history.insert(r.history.end(), tokens.begin(), tokens.end());
    r.status = RowStatus::kRunning;
  }

  void go_on(int row) {
    Row& r = rows_.at(row);
    const bool again = r.known() == r.length;
    if (r.known() > 0 && again && !is_clean(r, r.length - 1)) return;
    RC_LOG() << "continue row " << row << "\n";
    const auto call = [&] { engine_.append(row, {}); };
    if (r.known() > kMaxSeqLen) return refuse(ErrorCode::kContextOverflow, call);
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
    if (r.known() + count > kMaxSeqLen) return refuse(ErrorCode::kContextOverflow, call);
    call();
    r.history.insert(r.history.end(), tokens.begin(), tokens.end());
    r.length = r.known();
    r.written = std::max(r.written, r.length);
    r.folded = std::max(r.folded, r.length);
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
    const std::uint64_t tokens = engine_.counters().tokens;
    accept(call(all ? std::span<const int>() : std::span<const int>(rows)), rows);
    RC_ASSERT((engine_.counters().tokens > tokens) == work);
  }

  // Events are those of the given rows, and right; the mirror follows.
  void accept(std::span<const TokenEvent> events, const std::vector<int>& rows) {
    const std::vector<TokenEvent> copies(events.begin(), events.end());
    for (const TokenEvent& event : copies) {
      RC_ASSERT(std::ranges::find(rows, event.row) != rows.end());
      Row& r = rows_.at(event.row);
      RC_ASSERT(r.status == RowStatus::kRunning);
      const Oracle::Answer want = oracle_.answer(r.history, r.choosing);
      RC_LOG() << "  row " << event.row << " at " << r.known() << ": token " << event.token
               << ", wanted " << want.token << "\n";
      RC_ASSERT(event.token == want.token);
      RC_ASSERT(std::bit_cast<std::uint32_t>(event.logprob) == want.logprob);
      r.history.push_back(event.token);
      r.status = r.known() >= r.max_length ? RowStatus::kLength : RowStatus::kRunning;
      r.length = r.known() - 1;
      ++tally_.answers;
      if (r.known() > kMaxSeqLen) ++tally_.full;
    }
    for (const int row : rows) {  // and a prompt may have got further
      Row& r = rows_.at(row);
      const int length = engine_.length(row);
      RC_ASSERT(length >= r.length);
      RC_ASSERT(length == r.length || r.status == RowStatus::kRunning);
      r.length = length;
      r.written = std::max(r.written, length);
      r.folded = std::max(r.folded, length);
    }
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
    if (kept > 0 && kept < r.length) ++tally_.rewinds;
    if (kept == 0) {
      r.written = r.folded = r.floor = 0;
      r.poisoned = -1;
    } else if (kept < least) {
      r.folded = r.floor = kept;
      ++tally_.checkpoints;
    }
    r.history.resize(static_cast<std::size_t>(kept));
    r.length = std::min(r.length, kept);
    r.status = RowStatus::kIdle;
  }

  void reset(int row) {
    RC_LOG() << "reset row " << row << "\n";
    engine_.reset(row);
    Row& r = rows_.at(row);
    r = {.choosing = r.choosing, .max_length = r.max_length};
  }

  void fork(int row, int count, int n) {
    const RowOptions options = row_options(n);
    const std::vector<int> forks = engine_.fork(row, count, options);
    RC_LOG() << "fork row " << row << " " << count << " times ->";
    for (const int fork : forks) RC_LOG() << " " << fork;
    RC_LOG() << "\n";
    const std::size_t free = kSlots - rows_.size();
    RC_ASSERT(forks.size() == (static_cast<std::size_t>(count) > free ? 0U : count));
    const Row like = rows_.at(row);
    for (std::size_t i = 0; i < forks.size(); ++i) {
      RC_ASSERT(!rows_.contains(forks[i]));
      Row& fork = rows_[forks[i]] = like;
      configured(fork, options);
      fork.choosing.choice = static_cast<std::uint32_t>(i);
    }
  }

  void swap(int a, int b) {
    RC_LOG() << "swap rows " << a << " and " << b << "\n";
    engine_.swap(a, b);
    std::swap(rows_.at(a), rows_.at(b));
  }

  void configure(int row, int n) {
    RC_LOG() << "configure row " << row << "\n";
    const RowOptions options = row_options(n);
    engine_.configure_row(row, options);
    configured(rows_.at(row), options);
  }

  void snapshot(int row, int place, bool by_file) {
    RC_LOG() << "snapshot " << place << " of row " << row << (by_file ? ", by file\n" : "\n");
    RowSnapshot snapshot = engine_.snapshot(row);
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
    engine_.restore(row, found->second.first);
    Row& r = rows_.at(row);
    const RowOptions kept{.sampling = {}, .max_length = r.max_length};
    const Choosing choosing = r.choosing;
    r = found->second.second;
    r.choosing = choosing;
    r.max_length = kept.max_length;
    r.status = RowStatus::kIdle;
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
    RC_ASSERT(engine_.has_work() == std::ranges::any_of(rows_, [](const auto& row) {
                return row.second.status == RowStatus::kRunning;
              }));
  }

  static RowOptions row_options(int n) {
    return {.sampling = sampling_params({.way = n % 3}),
            .max_length = n / 3 % 3 == 0 ? 20 + n % 120 : 0};
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
  bool has_states_ = false;
  bool has_windows_ = false;
  std::map<int, Row> rows_;
  std::map<int, std::pair<RowSnapshot, Row>> snapshots_;
};

std::uint64_t from_environment(const char* name, std::uint64_t otherwise) {
  const char* value = std::getenv(name);
  return value ? std::strtoull(value, nullptr, 10) : otherwise;
}

class RowProperty : public testing::TestWithParam<Stack> {};

TEST_P(RowProperty, WhatARowHasBeenThroughDoesNotShow) {
  const std::uint64_t wanted =
      from_environment("PIANOLA_PROPERTY_OPERATIONS", kOperations) / stacks().size();
  const HostPages pages(GetParam().page_bytes);
  Oracle oracle(GetParam());
  Tally tally;
  const auto property = [&] {
    const auto commands =
        *rc::gen::scale(3.0, rc::gen::container<std::vector<Command>>(any_command()))
             .as("commands");
    Player player(GetParam(), oracle, tally);
    for (const Command& command : commands) player.play(command);
    player.finish();
  };
  const testing::TestInfo& info = *testing::UnitTest::GetInstance()->current_test_info();
  const rc::detail::TestMetadata metadata{.id = info.name(), .description = info.name()};
  rc::detail::TestParams params;
  // Not the same sequences on every stack.
  const auto place = std::ranges::find(stacks(), GetParam().name, &Stack::name) - stacks().begin();
  params.seed = from_environment("PIANOLA_PROPERTY_SEED", 1) + 1000 * static_cast<unsigned>(place);
  params.maxSuccess = static_cast<int>(std::clamp<std::uint64_t>(wanted / 100, 3, 50));
  for (; tally.operations < wanted; ++params.seed) {
    const auto result = rc::detail::checkTestable(property, metadata, params);
    if (result.is<rc::detail::SuccessResult>()) continue;
    std::ostringstream message;
    rc::detail::printResultMessage(result, message);
    FAIL() << "seed " << params.seed << "\n" << message.str();
  }
  std::cout << tally.operations << " operations, " << tally.answers << " answers, "
            << tally.refusals << " refusals, " << tally.rewinds << " rewinds, " << tally.checkpoints
            << " to checkpoints, " << tally.full << " full rows\n";
}

INSTANTIATE_TEST_SUITE_P(Stacks, RowProperty, testing::ValuesIn(stacks()),
                         [](const auto& stack) { return stack.param.name; });

}  // namespace
}  // namespace pianola
