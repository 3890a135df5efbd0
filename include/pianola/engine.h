// The engine: one model's recorded steps over static caches, replayed for every token.
//
// At load it records every Plan it can run, sizes and allocates everything, and compiles each Plan
// for its backend; afterwards no step allocates or records anything. A row is one sequence in
// flight and owns a cache slot; a step computes some tokens of some rows together.
//
//   Engine engine(model.causal(), {.threads = 2, .max_seq_len = 4096, .slots = 2});
//   int row = engine.open_row({.max_length = 200, .stop_tokens = {2}});
//   engine.append(row, prompt);                     // queued; computed by the next steps
//   while (engine.status(row) == RowStatus::kRunning) {
//     for (const TokenEvent& event : engine.stream()) use(event.token);
//   }
//   engine.close_row(row);
//
// Not thread-safe: one caller at a time. After a Device error healthy() is false and every call
// that computes throws Device.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "pianola/error.h"
#include "pianola/sampling.h"
#include "pianola/snapshot.h"
#include "pianola/token_event.h"

namespace pianola {

class CausalModel;

struct LoadProgress {
  std::uint64_t done_bytes = 0;
  std::uint64_t total_bytes = 0;
  std::string_view tensor;
};

struct EngineOptions {
  std::string backend = "cpu";     // "cuda", "cpu" or "reference"
  int threads = 0;                 // 0: one for each processor that this process may use
  std::string isa;                 // CPU instruction set; "": the best this machine has
  int max_seq_len = 0;             // 0: the least of the model's own, 8,192 and what fits
  int slots = 1;                   // rows at a time
  int max_input_len = 0;           // of an encoder: 0: the least of the model's own and 8,192
  int chunk = 512;                 // most prompt tokens in one step
  std::string cache_type = "f16";  // f16, bf16, f32, int8 or fp8 (e4m3)
  int rollback_depth = 16;         // last tokens of a row that can be taken back at any time
  // State layers (linear attention) keep the state after each of those tokens, instead of two older
  // ones and what was folded in since: more memory, and nothing to compute again after a rollback.
  bool exact_rollback = false;
  // And they keep as many older states a row, from the ends of prompt chunks, so that a changed or
  // repeated turn of a conversation does not begin from its first token.
  int checkpoints = 4;
  bool score = false;            // record the steps that score() needs
  bool logits = false;           // record the steps that logits() needs
  std::size_t memory_limit = 0;  // bytes; 0: what the device has free
  // Of the cuda backend; eager, check_each and no dependent_launch are InvalidArgument on another.
  int device = 0;                // which GPU
  bool eager = false;            // op by op instead of a captured graph
  bool check_each = false;       // with eager: wait for each op, and name the one that failed
  bool dependent_launch = true;  // let a kernel start while the one before it ends
  bool batch_invariant = false;  // prompts in the order of summation of decoding: slower, and any
                                 // chunking gives the same bits, as always on the other backends
  std::function<void(const LoadProgress&)> on_progress;
};

// What loading takes, computed before anything is allocated. Bytes.
struct MemoryPlan {
  std::string backend;
  int max_seq_len = 0;
  int max_input_len = 0;  // of an encoder, whose inputs are part of `cache`; 0: there is none
  int slots = 0;
  std::size_t weights = 0;  // repacked copies
  std::size_t mapped = 0;   // used in place in the mapped file
  std::size_t cache_per_slot = 0;
  std::size_t cache_per_input = 0;  // of cache_per_slot
  std::size_t cache = 0;
  std::size_t state = 0;
  std::size_t workspace = 0;  // activations and scratch
  std::size_t total = 0;      // without `mapped`
  std::size_t available = 0;
  // Where pages come behind the caches as rows grow: their size, and what of `cache` has them after
  // a first token. 0: the system brings pages when memory is touched.
  std::size_t page_bytes = 0;
  std::size_t cache_at_first = 0;
  // With all that rows can grow to.
  bool fits() const { return total <= available; }
  // Or at least as far as a first token: rows can grow until memory ends.
  bool loads() const {
    return fits() || (page_bytes > 0 && total - cache + cache_at_first <= available);
  }
  // A table for people, one line a part.
  std::string to_string() const;
};

struct RowOptions {
  SamplingParams sampling;
  int max_length = 0;  // the row stops when prompt and answer have this many tokens; 0: max_seq_len
  std::vector<std::int32_t> stop_tokens;  // at most 32
};

struct EngineCounters {
  std::uint64_t steps = 0;         // rounds replayed
  std::uint64_t tokens = 0;        // computed, prompts included
  std::uint64_t plans = 0;         // Plans recorded: constant after load
  std::uint64_t address_hash = 0;  // of every address in every Program: constant after load
  std::size_t cache_reserved = 0;  // bytes of addresses: constant after load
  std::size_t cache_resident = 0;  // and of memory behind them
  std::uint64_t captures = 0;      // graphs: constant after load
  std::uint64_t launches = 0;      // of graphs
  double capture_seconds = 0;
  std::size_t capture_bytes = 0;  // device memory that graphs took
};

class Engine {
 public:
  // Throws OutOfMemory with the plan's table when it does not fit, before anything is allocated;
  // Unsupported when the backend cannot run the model; InvalidArgument for options.
  Engine(std::shared_ptr<const CausalModel> model, const EngineOptions& options);
  ~Engine();
  Engine(Engine&&) noexcept;
  Engine& operator=(Engine&&) noexcept;

  // What loading would take. Reads no weights and allocates nothing.
  static MemoryPlan plan(const CausalModel& model, const EngineOptions& options);
  // Every Plan that would be recorded, as text; `shape_filter` "" prints all, else those whose
  // first line contains it.
  static std::string plan_text(const CausalModel& model, const EngineOptions& options,
                               std::string_view shape_filter = "");

  const MemoryPlan& memory() const;
  const CausalModel& model() const;
  int max_seq_len() const;
  int max_input_len() const;  // 0: the model has no encoder
  int slots() const;
  int chunk() const;
  int vocab_size() const;
  std::string backend_description() const;
  bool healthy() const;
  EngineCounters counters() const;

  // A free row, or -1 when every slot is taken. Throws InvalidArgument for options out of range.
  int open_row(const RowOptions& options);
  void close_row(int row);
  // New sampling parameters, limit and stop tokens for a row that keeps its tokens: the next turn
  // of a conversation.
  void configure_row(int row, const RowOptions& options);

  // Of a model with an encoder: reads an input for an empty row, at once, in place of the one that
  // the row had. What follows is decoded against it: begin with the model's start token
  // (decoder_start_token()). The row keeps its input when it moves back; forks share it; reset()
  // and close_row() give it up. Throws ContextOverflow when it is longer than max_input_len(), and
  // InvalidArgument for no input, an id outside the vocabulary, a row that holds tokens, or a model
  // that has no encoder; then nothing has changed.
  void encode(int row, std::span<const std::int32_t> input);
  // Tokens of the row's input; 0: it has none, and nothing can be appended.
  int input_length(int row) const;
  // What an answer begins with behind an encoder; -1 where there is none.
  std::int32_t decoder_start_token() const;

  // Queues tokens behind the row's history and sets the row running. With no tokens, a row that has
  // computed all it knows computes its last token again, to go on from there. Throws
  // ContextOverflow naming length and capacity when they do not fit, and InvalidArgument for an id
  // outside the vocabulary; then nothing has changed.
  void append(int row, std::span<const std::int32_t> tokens);

  RowStatus status(int row) const;
  // Tokens known: computed and queued.
  std::span<const std::int32_t> history(int row) const;
  // Tokens in the caches.
  int length(int row) const;

  // Forgets all but the first n tokens, 0 ≤ n ≤ history (which may hold tokens that nobody has
  // seen, see stream()); the caches keep what they hold of them, and the row is idle until
  // something is appended. Throws ContextOverflow and changes nothing when n is out of range, or
  // when a layer has let go of what they need: see max_rewind() and keepable(). n = 0 always works.
  void keep_first(int row, int n);
  void drop_last(int row, int n);
  // How many of the last tokens drop_last() can take back, any number of them.
  int max_rewind(int row) const;
  // The most tokens, at most n, that keep_first() can keep: n itself within max_rewind(); beyond
  // it, those of a checkpoint, or 0.
  int keepable(int row, int n) const;
  // Empty, without an input, and as good as new.
  void reset(int row);

  // Takes back the last counts[row] tokens that each row has in its caches, counts of all slots,
  // most of them 0; what is queued behind them stays queued and follows those that are kept. The
  // device does it at the beginning of its next step, whichever rows that computes, and nothing
  // waits for it. At most EngineOptions::rollback_depth tokens of a row; layers that forget can
  // take back as many since the most tokens that the row has held. Throws ContextOverflow for more,
  // and InvalidArgument for a row that is not open or has stopped; then nothing has changed.
  void rollback(std::span<const int> counts);
  // For kernels that decide how many: an address in device memory, [slots], where a kernel writes
  // counts between steps, in order with them. A row that cannot do it stops with kRefused when the
  // next step begins, and nothing of it has changed; keep_first(), restore() and swap() drop counts
  // that no step has seen. From this call on lengths and histories are read back with the results
  // of every step; while a stream is running they are an upper bound.
  std::int32_t* device_rollback();

  // `count` new rows that continue from all that a row holds, or from its first n tokens, copied on
  // the device; idle until something is appended. Their options are these, with choice counting up.
  // None, and nothing has changed, when there are fewer free slots. Throws ContextOverflow when
  // keep_first(n) would (keepable() says which n there are); the row itself goes on as it is.
  std::vector<int> fork(int row, int count, const RowOptions& options);
  std::vector<int> fork(int row, int count, const RowOptions& options, int n);
  // Two rows change places, options and all.
  void swap(int a, int b);
  // A row to keep outside the engine, and back again in place of what an open row holds. restore()
  // throws InvalidArgument for a snapshot of another model, cache type, rollback depth or chunk
  // size, and ContextOverflow when it is too long; then nothing has changed.
  RowSnapshot snapshot(int row);
  void restore(int row, const RowSnapshot& snapshot);

  // Where caches take memory as rows grow (MemoryPlan::page_bytes), whatever needs more of it, that
  // is step(), run(), stream(), fork(), swap(), restore(), score() and logits(), throws OutOfMemory
  // when there is none, naming the row; then nothing has changed. Other rows can go on by
  // themselves, and after a row was closed or reset, any that its memory is enough for.

  // One round: a token of each running row that decodes, and the next chunk of prompts, up to
  // `chunk` tokens in all. `rows` limits it to some rows; empty means all. The events are valid
  // until the next call. An empty result with running rows means that only prompts were computed.
  std::span<const TokenEvent> step(std::span<const int> rows = {});
  // Rounds until every one of the rows has stopped, or max_rounds, or about 1,000 events, or memory
  // ends; a single round while a prompt is queued. The events of all rounds, in order.
  std::span<const TokenEvent> run(int max_rounds, std::span<const int> rows = {});
  // Events as they come: as run(), but returns as soon as there is one. A device goes on computing
  // between calls with the same `rows`; any other call that changes a row or computes ends that run
  // after its round, and tokens nobody has seen are handed out by the next step(), run() or
  // stream() of their row, or dropped with keep_first() and close_row(). Empty when no row runs, or
  // when only prompts were computed.
  std::span<const TokenEvent> stream(std::span<const int> rows = {});
  // True while some row is running.
  bool has_work() const;

  // Log-probabilities of tokens[1..] given what precedes each, computed from an empty row in
  // chunks; `progress` (tokens done) may be empty. Needs EngineOptions::score and a free row; a
  // model with an encoder has no input here, and is InvalidArgument.
  std::vector<float> score(std::span<const std::int32_t> tokens,
                           const std::function<void(std::size_t)>& progress = {});
  // Logits [chunk.size(), vocab] of the next tokens of a row, which are appended and computed at
  // once. At most logits_chunk() tokens. Needs EngineOptions::logits.
  std::span<const float> logits(int row, std::span<const std::int32_t> tokens);
  int logits_chunk() const;

 private:
  friend class EngineAudit;  // src/engine/engine_audit.h: what `pianola check` looks at
  friend class EngineTestAccess;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace pianola
