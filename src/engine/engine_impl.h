// What an Engine holds. Apart from engine.cc so that tests can look at addresses and caches.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "engine/engine_layout.h"
#include "engine/program_cache.h"
#include "engine/row_pages.h"
#include "engine/row_table.h"
#include "engine/step_tables.h"

namespace pianola {

struct Engine::Impl {
  Impl(std::shared_ptr<const CausalModel> model_in, const EngineOptions& options);

  struct Lane {
    int row = 0;
    int tokens = 0;
  };

  // Declared in the order of dependence: memory outlives what points into it.
  std::shared_ptr<const CausalModel> model;
  std::unique_ptr<Backend> backend;
  EngineLayout layout;
  std::unique_ptr<DeviceMemory> weight_memory;
  std::unique_ptr<DeviceMemory> cache_memory;
  std::unique_ptr<DeviceMemory> state_memory;
  std::unique_ptr<DeviceMemory> shared_memory;  // the ring of events
  std::unique_ptr<DeviceMemory> work_memory;
  StepState state;
  std::vector<LayerCacheView> caches;
  std::vector<StateView> states;
  std::unique_ptr<ProgramCache> programs;
  std::unique_ptr<RowTable> rows;
  std::unique_ptr<RowPages> pages;
  std::unique_ptr<StepTables> tables;
  std::vector<Lane> lanes;            // of the step at hand; never grows
  std::vector<RowPages::Need> needs;  // of the lanes; never grows
  std::vector<TokenEvent> events;     // of the last call; never grows
  std::vector<TokenEvent> waiting;    // computed, and not handed out yet
  Program* running = nullptr;         // a run that stream() began and that may still go on
  std::vector<int> running_rows;      // its rows; empty: all
  std::vector<float> logits;          // [logits_chunk, vocab] when recorded
  EngineCounters counters;
  bool healthy = true;
  int step_tokens = 0;  // most tokens in one step that samples
  int next_prompt = 0;  // the row whose prompt is served first: they take turns
  // Replays a Program in steps of its own, while an audit looks between the ops.
  std::function<void(const ProgramCache::Entry&)> audited_replay;

  void allocate();
  void bind();

  // Runs what may call the device: an error of it poisons the engine, whatever the caller wanted.
  template <typename Call>
  auto guarded(Call&& call) {
    try {
      return call();
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kDevice) {
        healthy = false;
        running = nullptr;
      }
      throw;
    }
  }

  // Fills `tables` and `lanes` with the work at hand: a token of each decoding row, then prompts.
  void fill_tables(std::span<const int> only);
  void add_lane(int row, int tokens, int logit_rows);
  // Pages for what so many rounds of the lanes append, or for fewer of them: for how many. A row
  // goes no further than its limit. Throws OutOfMemory when there are none for the first round.
  int require_pages(int rounds);
  // Writes the tables and replays the Program that holds them.
  void replay(StepVariant variant);
  // Writes the tables and begins a run of the Program that holds them.
  void begin_run(std::span<const int> only, int max_rounds);
  // Waits for news of the run and adds its events to `out`; false when it is over.
  bool wait_run(std::vector<TokenEvent>& out);
  // Ends a run that goes on; what it computed and nobody has seen waits. Every call that changes a
  // row or computes something starts here.
  void settle();
  // Hands out what waits of some rows; false when there is nothing.
  bool take_waiting(std::span<const int> only);
  void drop_waiting(int row);
  // `count` tokens of a row are in the caches now.
  void computed(int row, int count);
  void checkpoint(int row);
  void read_events(std::vector<TokenEvent>& out);
  // What kernels have had taken back: lengths are right again.
  void read_rollbacks();
  // Of the model and of what shapes its caches: a snapshot fits an engine with the same.
  std::uint64_t fingerprint() const;
  const ProgramCache::Entry& write_tables(StepVariant variant);
  // Computes `tokens` of an otherwise empty step; logits are wanted of all of them.
  void compute_all_rows(int row, int tokens, StepVariant variant);
  // Whether every running row has one token to compute.
  bool all_decode(std::span<const int> only) const;
  const float* device_logits() const;
};

}  // namespace pianola
