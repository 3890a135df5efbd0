// What a backend is: it says how it wants weights stored, how much memory a Plan needs, and turns a
// Plan bound to addresses into a Program. It takes nothing: all memory is handed to it.
//
//   auto backend = make_backend("cpu", {.threads = 2});
//   backend->check(plan, tables);                       // Unsupported, naming op and layer
//   auto program = backend->compile(plan, binding);
//   program->replay();                                  // one round
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cache/layer_cache.h"
#include "plan/plan.h"
#include "plan/step_state.h"
#include "plan/workspace.h"
#include "tensor/weight_layout.h"

namespace pianola {

// The tables that a Plan's ids point into, before there are addresses.
struct PlanTables {
  std::span<const WeightDecl> weights;
  CacheSpecs caches;
  CacheShape cache_shape;
};

// Every address a Program may touch.
struct Binding {
  PlanTables tables;  // that the Plan was recorded against
  std::span<const BoundWeight> weights;
  std::span<const LayerCacheView> caches;
  std::span<const StateView> states;
  StepState state;
  std::byte* workspace = nullptr;  // plan_workspace(plan).bytes
  std::byte* scratch = nullptr;    // backend.scratch_bytes(plan)
  std::size_t scratch_bytes = 0;
};

// A Plan with its addresses: what an executor works on. Refers to its Plan, which must outlive it.
class BoundPlan {
 public:
  BoundPlan(const Plan& plan, const Binding& binding);

  const Plan& plan() const { return *plan_; }
  const StepState& state() const { return state_; }
  const BoundWeight& weight(WeightId id) const {
    return weights_[static_cast<std::size_t>(id.index)];
  }
  // Null for an id that is not valid: an optional bias.
  const float* vector(WeightId id) const { return id.valid() ? weight(id).f32() : nullptr; }
  const LayerCacheView& cache(CacheId id) const {
    return caches_[static_cast<std::size_t>(id.index)];
  }
  const StateView& state_cache(StateId id) const {
    return states_[static_cast<std::size_t>(id.index)];
  }
  float* buffer(BufferId id) const {
    return reinterpret_cast<float*>(workspace_ + offsets_[static_cast<std::size_t>(id.index)]);
  }
  std::int64_t width(BufferId id) const { return plan_->buffer(id).width; }
  std::byte* scratch() const { return scratch_; }

  // A hash of every address above: equal before and after any use of the Program.
  std::uint64_t address_certificate() const;

 private:
  const Plan* plan_;
  std::vector<BoundWeight> weights_;
  std::vector<LayerCacheView> caches_;
  std::vector<StateView> states_;
  StepState state_;
  std::byte* workspace_;
  std::vector<std::size_t> offsets_;
  std::byte* scratch_;
};

enum class RunEnd : std::uint8_t { kAllStopped, kBound, kYield, kRingFull };

struct RunResult {
  int rounds = 0;
  RunEnd end = RunEnd::kAllStopped;
};

class Program {
 public:
  virtual ~Program() = default;
  // Runs one round over the tables in StepState. Runs no model code and allocates nothing.
  virtual void replay() = 0;
  // The ops [first, last) of a round. All of them in order are replay(): for who looks between two.
  virtual void replay_ops(std::size_t first, std::size_t last) = 0;

  // Rounds until every lane has stopped, stop() was called, the ring may overflow, or max_rounds
  // is reached; only for a step that feeds itself (counts->feed). begin() returns at once. wait()
  // returns the end of the run, or nothing when there is news in the ring and the run goes on. A
  // device computes meanwhile; an executor whose loop is on the host computes a round in wait().
  virtual void begin(int max_rounds) = 0;
  virtual std::optional<RunResult> wait() = 0;
  // Asks the run to end after the round at hand; wait() still has to see its end.
  virtual void stop() = 0;

  virtual std::uint64_t address_certificate() const = 0;
};

// How memory will be touched: all of it soon (weights, workspace); a little more with every token,
// where large pages would cost memory that no token uses; the same, and only what was required
// before (caches); or by host and device both.
enum class MemoryUse : std::uint8_t { kDense, kSparse, kOnDemand, kShared };

// Bytes [begin, end) of some memory.
struct MemoryRange {
  std::size_t begin = 0;
  std::size_t end = 0;
};

// Memory of a device. Its addresses are final when it is made, and it is zeroed: there, or, where a
// backend has page_bytes() and the use is kOnDemand, when pages come behind the addresses. Nothing
// may touch an address that has no page.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  virtual std::byte* data() const = 0;
  virtual std::size_t size() const = 0;

  // Pages behind `bytes` from `offset` on, in order with the rounds of every Program. Throws
  // OutOfMemory, keeping the pages that came before.
  virtual void require(std::size_t /*offset*/, std::size_t /*bytes*/) {}
  // Gives back the pages that lie wholly within that range; what they held is lost. Waits for the
  // device.
  virtual void give_back(std::size_t /*offset*/, std::size_t /*bytes*/) {}
  // The first part of a range that has pages behind it; empty when none has.
  virtual MemoryRange first_resident(MemoryRange within) const { return within; }
  virtual std::size_t resident_bytes() const { return size(); }
  // No more pages than this many bytes: require() throws OutOfMemory.
  virtual void set_limit(std::size_t /*bytes*/) {}
};

// What a backend has done since it was made. Constant after load but for `launches`.
struct BackendCounters {
  std::uint64_t captures = 0;  // graphs
  std::uint64_t launches = 0;  // of graphs, or of rounds op by op
  double capture_seconds = 0;
  std::size_t capture_bytes = 0;  // device memory that graphs took
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual const char* name() const = 0;
  // One line for a person: instruction set, threads, device.
  virtual std::string description() const = 0;

  // Bytes that could be allocated now.
  virtual std::size_t available_memory() const = 0;
  // Of the pages that come behind memory for MemoryUse::kOnDemand when they are required; 0 where
  // the system itself does that when memory is touched.
  virtual std::size_t page_bytes() const { return 0; }
  // Throws OutOfMemory.
  virtual std::unique_ptr<DeviceMemory> allocate(std::size_t bytes, MemoryUse use) = 0;

  // Throws Unsupported naming the weight.
  virtual WeightLayout weight_layout(const WeightDecl& decl) const = 0;
  // Fills `destination` (layout.bytes) from the checkpoint's bytes (decl.source_bytes(),
  // unaligned).
  virtual void repack(const WeightDecl& decl, const WeightLayout& layout, const std::byte* source,
                      std::byte* destination) = 0;

  // Throws Unsupported naming op and layer when the Plan cannot run here.
  virtual void check(const Plan& plan, const PlanTables& tables) const = 0;
  virtual std::size_t scratch_bytes(const Plan& plan, const PlanTables& tables) const = 0;
  // `plan` and the backend outlive the Program.
  virtual std::unique_ptr<Program> compile(const Plan& plan, const Binding& binding) = 0;

  // Copies between host and device memory, in order with the rounds of every Program. write() has
  // taken the host's bytes when it returns; read() is complete.
  virtual void write(void* device, const void* host, std::size_t bytes) = 0;
  virtual void read(void* host, const void* device, std::size_t bytes) = 0;
  // Between two places in device memory that do not overlap, in the same order.
  virtual void copy(void* to, const void* from, std::size_t bytes) = 0;

  virtual BackendCounters counters() const { return {}; }
};

struct BackendOptions {
  int threads = 0;  // 0: one for each processor this process may use
  std::string isa;  // "": the best this machine has; else "portable", "avx2", ...
  // Of the CUDA backend:
  int device = 0;
  bool eager = false;            // op by op instead of a captured graph
  bool check_each = false;       // with eager: wait for each op and name the one that failed
  bool dependent_launch = true;  // let a kernel start while the one before it ends
  bool batch_invariant = false;  // prompts in the order of summation of decoding: slower. The other
                                 // backends always have one order
};

// "cuda", "cpu" or "reference". InvalidArgument, listing the names, for anything else, and for an
// option that the backend would not look at.
std::unique_ptr<Backend> make_backend(std::string_view name, const BackendOptions& options);
std::vector<std::string> backend_names();

}  // namespace pianola
