#include "model_checks.h"

#include <malloc.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>

#include "base/check.h"
#include "engine/engine_audit.h"
#include "models/model.h"
#include "plan/step_state.h"
#include "signals.h"
#include "trace_checks.h"

namespace pianola::cli {
namespace {

using Result = ModelCheck::Result;

// Three rows in four slots: a lane of their steps is padding. Together the prompts are one step of
// the decode class, of which a row gets the same bits alone and among others.
constexpr int kRows = 3;
constexpr int kSlots = 4;
constexpr std::array<int, kRows> kPromptTokens = {24, 13, 7};
// How much of the answer each row gives: some stop while others go on.
constexpr std::array<int, kRows> kQuarters = {4, 3, 2};
// Parameters times tokens: some ten seconds of the reference, which then sees what its time allows.
constexpr double kReferenceWork = 6e9;
constexpr std::size_t kLeastCompared = 8;  // tokens of an answer
constexpr int kInputTokens = 100;          // of an encoder
constexpr int kDecodeTokens = 64;          // the most in one step of the decode class

constexpr const char* kTexts[kRows] = {
    "A player piano reads its music from a roll of paper: a hole for every note, in order.",
    "Ada Lovelace wrote that the engine might compose elaborate pieces of music.",
    "One, two, three, four, five, six"};

using Traces = std::array<Trace, kRows>;

ModelCheck skipped(std::string name, std::string why) {
  return {std::move(name), Result::kSkipped, std::move(why), {}, {}};
}

// --- The prompt ---------------------------------------------------------------------------------

std::vector<TokenId> draw_tokens(std::uint64_t seed, int count, std::int64_t vocab_size) {
  std::vector<TokenId> tokens;
  for (int i = 0; i < count; ++i) {
    const double u = uniform_random(seed, 0, static_cast<std::uint32_t>(i), RandomPurpose::kSample);
    tokens.push_back(static_cast<TokenId>(u * static_cast<double>(vocab_size)));
  }
  return tokens;
}

std::array<std::vector<TokenId>, kRows> make_prompts(const Model& model, std::uint64_t seed) {
  std::array<std::vector<TokenId>, kRows> prompts;
  for (std::size_t i = 0; i < kRows; ++i) {
    const auto most = static_cast<std::size_t>(kPromptTokens[i]);
    if (model.has_tokenizer()) {
      prompts[i] = model.tokenizer().encode(kTexts[i], {.add_special = true});
      prompts[i].resize(std::min(prompts[i].size(), most));
    } else {
      prompts[i] = draw_tokens(seed + i, kPromptTokens[i], model.causal()->config().vocab_size);
    }
  }
  return prompts;
}

// --- The checks ---------------------------------------------------------------------------------

class Checker {
 public:
  Checker(const Model& model, const ModelOptions& options, const CheckSettings& settings)
      : model_(model), options_(options), settings_(settings) {
    prompts_ = make_prompts(model, settings.seed);
    EngineOptions& e = options_.engine;
    if (model.causal()->config().encoder.num_layers > 0) {
      input_ = draw_tokens(settings.seed + kRows, e.max_input_len ? e.max_input_len : kInputTokens,
                           model.causal()->config().vocab_size);
    }
    const auto prompt = static_cast<int>(prompts_[0].size());
    const int longest = e.max_seq_len
                            ? e.max_seq_len
                            : static_cast<int>(std::min<std::int64_t>(
                                  model.causal()->config().max_position_embeddings, 1 << 20));
    tokens_ = std::min(settings.tokens, longest - prompt);
    if (settings.tokens < 1 || tokens_ < 1) {
      fail(ErrorCode::kInvalidArgument,
           "check: no room for an answer: {} tokens were asked for, and a sequence holds {}, of "
           "which the prompt takes {}",
           settings.tokens, longest, prompt);
    }
    e.max_seq_len = prompt + tokens_;
    e.slots = kSlots;
    e.score = input_.empty();
    report_.prompt_tokens = prompt;
    report_.prompt = model.has_tokenizer() ? "a text" : fmt::format("seed {}", settings.seed);
  }

  CheckReport run() {
    check_main_engine();
    check_routed_scores();
    check_executors();
    check_against();
    return std::move(report_);
  }

 private:
  using Drive = std::function<std::span<const TokenEvent>(Engine&)>;

  static std::span<const TokenEvent> step(Engine& engine) { return engine.step(); }
  static std::span<const TokenEvent> loop(Engine& engine) { return engine.run(1 << 20); }
  static std::span<const TokenEvent> stream(Engine& engine) { return engine.stream(); }
  static std::span<const TokenEvent> poisoned_step(Engine& engine) {
    EngineAudit::poison(engine);
    return engine.step();
  }

  // Queues tokens; behind an encoder, which reads a prompt of its own first.
  void begin(Engine& engine, int row, std::span<const TokenId> tokens) const {
    if (!input_.empty()) engine.encode(row, input_);
    engine.append(row, tokens);
  }

  void add(ModelCheck check) { report_.checks.push_back(std::move(check)); }

  // Greedy, and two ways to draw.
  RowOptions row_options(int row) const {
    RowOptions o;
    o.sampling.logprobs = true;
    o.sampling.seed = settings_.seed + static_cast<std::uint64_t>(row);
    if (row == 1) {
      o.sampling.temperature = 0.8F;
      o.sampling.top_k = 40;
      o.sampling.top_p = 0.95F;
    } else if (row == 2) {
      o.sampling.temperature = 1;
      o.sampling.repeat_penalty = 1.1F;
      o.sampling.frequency_penalty = 0.2F;
    }
    const auto index = static_cast<std::size_t>(row);
    o.max_length =
        static_cast<int>(prompts_[index].size()) + std::max(1, tokens_ * kQuarters[index] / 4);
    return o;
  }

  // Everything that the rows [first, last) say. Rows are opened in order and closed at the end.
  Traces generate(Engine& engine, const Drive& drive, int first = 0, int last = kRows) const {
    Traces traces;
    std::array<int, kSlots> row_of_slot{};
    std::vector<int> slots;
    for (int i = first; i < last; ++i) {
      const int slot = engine.open_row(row_options(i));
      row_of_slot[static_cast<std::size_t>(slot)] = i;
      slots.push_back(slot);
      begin(engine, slot, prompts_[static_cast<std::size_t>(i)]);
    }
    while (engine.has_work()) {
      throw_if_interrupted();
      for (const TokenEvent& event : drive(engine)) {
        const int row = row_of_slot[static_cast<std::size_t>(event.row)];
        record(event, traces[static_cast<std::size_t>(row)]);
      }
    }
    for (const int slot : slots) engine.close_row(slot);
    return traces;
  }

  static void record(const TokenEvent& event, Trace& trace) {
    trace.finite = trace.finite && event.token >= 0 && std::isfinite(event.logprob);
    trace.tokens.push_back(event.token);
    trace.logprobs.push_back(event.logprob);
  }

  Engine make(const EngineOptions& engine) const {
    ModelOptions options = options_;
    options.engine = engine;
    return make_engine(model_, options);
  }

  // The history of a row: its prompt and what it said.
  std::vector<TokenId> sequence(std::size_t row) const {
    std::vector<TokenId> all = prompts_[row];
    all.insert(all.end(), stepped_[row].tokens.begin(), stepped_[row].tokens.end());
    return all;
  }

  void check_main_engine() {
    Engine engine = make(options_.engine);
    report_.backend = engine.backend_description();
    const EngineCounters before = engine.counters();
    stepped_ = generate(engine, step);
    check_numbers();
    if (!usable_) return;
    report_.tokens = sequence(0);
    add(compare_bits("a run of rounds = its steps", generate(engine, loop), stepped_));
    add(compare_bits("a stream = its steps", generate(engine, stream), stepped_));
    check_rows_alone(engine);
    add(compare_bits("NaN wherever no token is = nothing", generate(engine, poisoned_step),
                     stepped_));
    check_going_back(engine);
    check_scores(engine);
    check_counters(engine, before);
    report_.counters = engine.counters();
  }

  void check_numbers() {
    std::size_t tokens = 0;
    for (std::size_t i = 0; i < kRows; ++i) {
      if (!stepped_[i].finite) {
        usable_ = false;
        add({"every number is finite",
             Result::kFailed,
             fmt::format("row {}: NaN or infinity after {} tokens", i, stepped_[i].tokens.size()),
             {},
             {}});
        return;
      }
      tokens += stepped_[i].tokens.size();
    }
    add({"every number is finite",
         Result::kPassed,
         fmt::format("{} tokens of {} rows", tokens, kRows),
         {},
         {}});
  }

  void check_rows_alone(Engine& engine) {
    Traces alone;
    for (int i = 0; i < kRows; ++i) {
      alone[static_cast<std::size_t>(i)] =
          std::move(generate(engine, loop, i, i + 1)[static_cast<std::size_t>(i)]);
    }
    add(compare_bits("a row alone = the row among others", alone, stepped_));
  }

  // The next token of row 0 after some of its history: what a row gives that has gone back there,
  // and one that computes all of it as a prompt.
  void check_going_back(Engine& engine) {
    const std::size_t prompt = prompts_[0].size();
    const std::vector<TokenId> all = sequence(0);
    const int row = engine.open_row(row_options(0));
    begin(engine, row, prompts_[0]);
    while (engine.status(row) == RowStatus::kRunning) engine.step();
    // Going back comes first: a prompt computed in chunks leaves caches of other bits on a GPU.
    std::vector<std::size_t> places;
    Trace want;
    Trace back;
    Trace chunked;
    const std::size_t tokens = stepped_[0].tokens.size();
    for (std::size_t i = tokens; i-- > 0;) {
      const int kept = static_cast<int>(prompt + i);
      // Layers that forget take back no more than they must: then the last places are all there
      // are.
      if ((i % 13 != 0 && i + 1 != tokens) || engine.keepable(row, kept) != kept) continue;
      places.push_back(i);
      want.tokens.push_back(stepped_[0].tokens[i]);
      want.logprobs.push_back(stepped_[0].logprobs[i]);
      engine.keep_first(row, kept);
      engine.append(row, {});
      record_next(engine, row, back);
    }
    for (const std::size_t i : places) {
      engine.keep_first(row, 0);
      engine.append(row, std::span(all).first(prompt + i));
      record_next(engine, row, chunked);
    }
    engine.close_row(row);
    add(compare_bits("going back = never having left", {&back, 1}, {&want, 1}));

    const EngineOptions& e = options_.engine;
    const auto chunk = std::min(all.size(), static_cast<std::size_t>(engine.chunk()));
    const std::string name = "a prompt in one chunk = token by token";
    if (e.backend != "cuda" || e.batch_invariant || chunk <= kDecodeTokens) {
      add(compare_bits(name, {&chunked, 1}, {&want, 1}));
    } else {
      add(compare_within(name, chunked.logprobs, want.logprobs, chunk_bar(e.backend)));
    }
  }

  static void record_next(Engine& engine, int row, Trace& trace) {
    const std::size_t before = trace.tokens.size();
    while (trace.tokens.size() == before && engine.status(row) == RowStatus::kRunning) {
      throw_if_interrupted();
      for (const TokenEvent& event : engine.step()) record(event, trace);
    }
  }

  void check_scores(Engine& engine) {
    if (!input_.empty()) {
      return add(skipped("score() = what the steps said", "it has no input for an encoder"));
    }
    const std::string name = "score() = what the steps said";
    const std::vector<TokenId> tokens = sequence(0);
    const std::vector<float> scores = engine.score(tokens);
    ModelCheck check = compare_scores(name, scores, options_.engine.backend);
    if (!check.failed() || !std::isfinite(*check.difference) || !chooses_in_chunks(engine)) {
      return add(std::move(check));
    }
    // Other experts, or a fault: check_routed_scores() tells, running the ops of the step in parts.
    own_choices_ = check.difference;
    const std::vector<TokenId> targets(tokens.begin() + 1, tokens.end());
    const Trace whole{targets, scores};
    const Trace parts{targets, EngineAudit::score(engine, tokens).logprobs};
    add(compare_bits("score() router by router = score()", {&parts, 1}, {&whole, 1}));
  }

  ModelCheck compare_scores(std::string name, std::span<const float> scores,
                            std::string_view backend) const {
    return compare_within(std::move(name), scores.subspan(prompts_[0].size() - 1),
                          stepped_[0].logprobs, chunk_bar(backend));
  }

  // Whether scores come from steps that round otherwise than those of the decode class, in a model
  // whose routers can take that for another choice.
  bool chooses_in_chunks(const Engine& engine) const {
    const EngineOptions& e = options_.engine;
    const ExpertsConfig& experts = model_.causal()->config().experts;
    const auto chunk = std::min(sequence(0).size(), static_cast<std::size_t>(engine.chunk()));
    return e.backend == "cuda" && !e.batch_invariant && chunk > kDecodeTokens &&
           experts.num_experts > experts.num_experts_per_tok;
  }

  // With routers, rounding is no small difference: another expert is another function. So a chunk
  // in the order of the decode class, whose routers choose what those of the steps chose, has to
  // say what the steps said; and a chunk as prompts are computed has to, with the same choices.
  void check_routed_scores() {
    if (!own_choices_) return;
    EngineOptions exact_options = options_.engine;
    exact_options.batch_invariant = true;
    const RoutedScores exact = routed_scores(exact_options, {});
    // In one order of summation, as on a CPU, whatever the chunk.
    add(compare_scores("score() in one order = what the steps said", exact.logprobs, "cpu"));
    const RoutedScores same = routed_scores(options_.engine, exact.routes);
    ModelCheck check = compare_scores("score() with the experts of the steps = what the steps said",
                                      same.logprobs, options_.engine.backend);
    check.detail += fmt::format(
        "; {} of {} tokens would go to other experts, and with them the largest is {:.3g}",
        same.tokens_elsewhere, same.logprobs.size(), *own_choices_);
    add(std::move(check));
  }

  RoutedScores routed_scores(const EngineOptions& options, const Routes& routes) const {
    Engine engine = make(options);
    return EngineAudit::score(engine, sequence(0), routes);
  }

  void check_counters(Engine& engine, const EngineCounters& before) {
    const EngineCounters after = engine.counters();
    const bool same = after.address_hash == before.address_hash && after.plans == before.plans &&
                      after.captures == before.captures;
    add({"addresses, Plans and captures are constant",
         same ? Result::kPassed : Result::kFailed,
         fmt::format("{} Plans, {} captures, addresses {:016x}; {} rounds", after.plans,
                     after.captures, after.address_hash, after.steps - before.steps),
         {},
         {}});
    check_heap(engine);
    check_launches(engine);
  }

  // What the heap holds before and after a decode, with nothing else in between.
  void check_heap(Engine& engine) {
    const int row = engine.open_row(row_options(0));
    begin(engine, row, prompts_[0]);
    engine.step();
    if (engine.has_work()) engine.step();
    const std::size_t before = mallinfo2().uordblks;
    int rounds = 0;
    for (; engine.has_work(); ++rounds) engine.step();
    const std::size_t after = mallinfo2().uordblks;
    engine.close_row(row);
    add({"the heap does not grow",
         after <= before ? Result::kPassed : Result::kFailed,
         fmt::format("{} bytes more after {} rounds", after - std::min(before, after), rounds),
         {},
         {}});
  }

  void check_launches(Engine& engine) {
    const std::string name = "a generation is one launch";
    const EngineOptions& e = options_.engine;
    if (e.backend != "cuda") return add(skipped(name, "of the cuda backend"));
    if (e.eager) return add(skipped(name, "--eager: the host launches op by op"));
    const int row = engine.open_row(row_options(0));
    begin(engine, row, prompts_[0]);
    engine.step();
    const EngineCounters before = engine.counters();
    while (engine.has_work()) engine.run(1 << 20);
    const EngineCounters after = engine.counters();
    engine.close_row(row);
    const std::uint64_t launches = after.launches - before.launches;
    add({name,
         launches <= 1 ? Result::kPassed : Result::kFailed,
         fmt::format("{} launches for {} rounds", launches, after.steps - before.steps),
         {},
         {}});
  }

  // Other executors of the same backend: an engine for each, one after the other.
  void check_executors() {
    if (!usable_) return;
    const EngineOptions& chosen = options_.engine;
    if (chosen.backend == "cuda") {
      for (const bool eager : {false, true}) {
        for (const bool dependent : {true, false}) {
          if (eager == chosen.eager && dependent == chosen.dependent_launch) continue;
          EngineOptions other = chosen;
          other.eager = eager;
          other.dependent_launch = dependent;
          other.check_each = chosen.check_each && eager;
          compare_executor(executor_name(other) + " = " + executor_name(chosen), other);
        }
      }
    } else if (chosen.backend == "cpu") {
      EngineOptions other = chosen;
      other.threads = chosen.threads == 1 ? 2 : 1;
      compare_executor(other.threads == 1 ? "one thread = all threads" : "two threads = one",
                       other);
    }
  }

  static std::string executor_name(const EngineOptions& options) {
    return std::string(options.eager ? "op by op" : "captured") +
           (options.dependent_launch ? "" : ", no dependent launch");
  }

  void compare_executor(const std::string& name, const EngineOptions& options) {
    Engine engine = make(options);
    add(compare_bits(name + ", by steps", generate(engine, step), stepped_));
    add(compare_bits(name + ", by a run", generate(engine, loop), stepped_));
  }

  // --- A second implementation

  void check_against() {
    const std::string name = "log-probabilities against another backend";
    const std::string& own = options_.engine.backend;
    if (!usable_) return;
    if (settings_.against == "none") return add(skipped(name, "--against none"));
    if (!input_.empty()) return add(skipped(name, "score() has no input for an encoder"));
    std::string other = settings_.against;
    std::size_t budget = std::numeric_limits<std::size_t>::max();  // tokens
    if (other == "auto") {
      budget =
          static_cast<std::size_t>(kReferenceWork / static_cast<double>(model_.info().parameters));
      other = "reference";
      if (own != other && budget < prompts_[0].size() + kLeastCompared) {
        other = "cpu";
        budget = std::numeric_limits<std::size_t>::max();
      }
    }
    if (other == own) {
      if (own == "reference") return add(skipped(name, "it is the reference"));
      return add(skipped(name, settings_.against == "auto"
                                   ? "the reference would take too long; --against reference takes "
                                     "the time"
                                   : "it is the same backend"));
    }
    try {
      compare_backend(other, budget);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kOutOfMemory && error.code() != ErrorCode::kUnsupported) throw;
      add(skipped(name, fmt::format("{}: {}", other, error.what())));
    }
  }

  // At most `budget` tokens in all, prompts included.
  void compare_backend(const std::string& other, std::size_t budget) {
    ModelOptions options = options_;
    const EngineOptions& own_options = options_.engine;
    options.engine = {.backend = other,
                      .threads = own_options.threads,
                      .max_seq_len = own_options.max_seq_len,
                      .cache_type = own_options.cache_type,
                      .score = true};
    options.memory.clear();
    Engine engine = make_engine(model_, options);
    std::vector<float> got;
    std::vector<float> want;
    for (std::size_t row = 0; row < kRows; ++row) {
      const std::size_t prompt = prompts_[row].size();
      std::vector<TokenId> tokens = sequence(row);
      tokens.resize(std::min(tokens.size(), budget));
      budget -= tokens.size();
      if (tokens.size() <= prompt) continue;
      const std::vector<float> scores =
          engine.score(tokens, [](std::size_t) { throw_if_interrupted(); });
      want.insert(want.end(), scores.begin() + static_cast<std::ptrdiff_t>(prompt) - 1,
                  scores.end());
      const auto& own = stepped_[row].logprobs;
      got.insert(got.end(), own.begin(),
                 own.begin() + static_cast<std::ptrdiff_t>(tokens.size() - prompt));
    }
    const std::string types = model_.info().weight_types;
    add(compare_within(fmt::format("log-probabilities against {}", other), got, want,
                       std::max(bar_of(options_.engine.backend, types), bar_of(other, types))));
  }

  const Model& model_;
  ModelOptions options_;
  CheckSettings settings_;
  std::array<std::vector<TokenId>, kRows> prompts_;
  std::vector<TokenId> input_;  // of an encoder; empty: there is none
  int tokens_ = 0;
  Traces stepped_;                     // what everything else is compared with
  std::optional<double> own_choices_;  // how far score() is, where experts may be why
  bool usable_ = true;
  CheckReport report_;
};

}  // namespace

bool CheckReport::passed() const {
  return std::none_of(checks.begin(), checks.end(),
                      [](const ModelCheck& check) { return check.failed(); });
}

CheckReport check_model(const Model& model, const ModelOptions& options,
                        const CheckSettings& settings) {
  return Checker(model, options, settings).run();
}

}  // namespace pianola::cli
