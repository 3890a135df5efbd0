#include "backends/cuda/cuda_program.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "backends/cuda/cuda_error.h"
#include "base/check.h"

namespace pianola::cuda {
namespace {

// How long the host sleeps between two looks at the ring: a look and a wake-up cost several
// microseconds, so this keeps it under a twentieth of a core also where a round takes less.
constexpr std::chrono::microseconds kPoll{200};

std::uint64_t ring_head(const StepState& state) {
  return std::atomic_ref(*state.ring_head).load(std::memory_order_acquire);
}

}  // namespace

CapturedGraph::CapturedGraph(const IssueRound& issue, cudaStream_t stream, bool loop) {
  check(cudaGraphCreate(&graph_, 0), "making a graph");
  try {
    cudaGraphConditionalHandle handle = 0;
    body_ = graph_;
    if (loop) {
      check(cudaGraphConditionalHandleCreate(&handle, graph_, 1, cudaGraphCondAssignDefault),
            "making the condition of the loop");
      cudaGraphNodeParams params = {};
      params.type = cudaGraphNodeTypeConditional;
      params.conditional.handle = handle;
      params.conditional.type = cudaGraphCondTypeWhile;
      params.conditional.size = 1;
      cudaGraphNode_t node = nullptr;
      check(cudaGraphAddNode(&node, graph_, nullptr, nullptr, 0, &params), "making the loop");
      body_ = params.conditional.phGraph_out[0];
    }
    check(cudaStreamBeginCaptureToGraph(stream, body_, nullptr, nullptr, 0,
                                        cudaStreamCaptureModeThreadLocal),
          "beginning capture");
    try {
      issue(stream, loop ? &handle : nullptr);
    } catch (...) {
      cudaGraph_t ignored = nullptr;
      cudaStreamEndCapture(stream, &ignored);
      throw;
    }
    cudaGraph_t captured = nullptr;
    check(cudaStreamEndCapture(stream, &captured), "ending capture");
    check(cudaGraphGetNodes(body_, nullptr, &nodes_), "counting nodes");
    check(cudaGraphInstantiate(&executable_, graph_, 0), "instantiating a graph");
    check(cudaGraphUpload(executable_, stream), "uploading a graph");
  } catch (...) {
    if (executable_) cudaGraphExecDestroy(executable_);
    cudaGraphDestroy(graph_);
    throw;
  }
}

CapturedGraph::~CapturedGraph() {
  cudaGraphExecDestroy(executable_);
  cudaGraphDestroy(graph_);
}

void CapturedGraph::launch(cudaStream_t stream) const {
  check(cudaGraphLaunch(executable_, stream), "launching a graph");
}

CudaProgram::CudaProgram(const Plan& plan, const Binding& binding, const CudaOptions& options,
                         const GemmLibrary* library, Device& device, BackendCounters& counters)
    : kernels_(plan, binding, options, library, device.multiprocessors()),
      device_(device),
      counters_(counters),
      check_each_(options.check_each),
      positions_(static_cast<std::size_t>(plan.shape.tokens)) {
  check(cudaEventCreateWithFlags(&armed_, cudaEventDisableTiming), "making an event");
  check(cudaEventCreateWithFlags(&done_, cudaEventDisableTiming), "making an event");
  if (options.eager) return;
  const auto begin = std::chrono::steady_clock::now();
  std::size_t before = 0;
  std::size_t after = 0;
  std::size_t total = 0;
  cudaMemGetInfo(&before, &total);
  const IssueRound issue = [this](cudaStream_t stream, const cudaGraphConditionalHandle* handle) {
    kernels_.issue(stream, handle);
  };
  step_ = std::make_unique<CapturedGraph>(issue, device.stream(), false);
  ++counters_.captures;
  if (plan.shape.feeds_itself()) {
    loop_ = std::make_unique<CapturedGraph>(issue, device.stream(), true);
    ++counters_.captures;
  }
  device.synchronize();
  cudaMemGetInfo(&after, &total);
  counters_.capture_bytes += before > after ? before - after : 0;
  counters_.capture_seconds +=
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

CudaProgram::~CudaProgram() {
  if (armed_) cudaEventDestroy(armed_);
  if (done_) cudaEventDestroy(done_);
}

std::uint64_t CudaProgram::address_certificate() const {
  return kernels_.bound().address_certificate();
}

void CudaProgram::issue_round() {
  if (step_) {
    step_->launch(device_.stream());
  } else if (check_each_) {
    const std::vector<Op>& ops = kernels_.bound().plan().ops;
    for (int i = 0; i < kernels_.op_count(); ++i) {
      kernels_.issue_ops(device_.stream(), i, i + 1, nullptr);
      const cudaError_t status = cudaStreamSynchronize(device_.stream());
      if (status != cudaSuccess) {
        fail(ErrorCode::kDevice, "cuda: op {} ({}): {}", i,
             op_name(ops[static_cast<std::size_t>(i)]), cudaGetErrorString(status));
      }
    }
  } else {
    kernels_.issue(device_.stream(), nullptr);
  }
  ++counters_.launches;
}

void CudaProgram::replay() {
  issue_round();
  device_.synchronize();
}

void CudaProgram::replay_ops(std::size_t first, std::size_t last) {
  kernels_.issue_ops(device_.stream(), static_cast<int>(first), static_cast<int>(last), nullptr);
  device_.synchronize();
  if (first == 0) ++counters_.launches;
}

void CudaProgram::begin(int max_rounds) {
  const StepState& s = kernels_.bound().state();
  const int lanes = kernels_.bound().plan().shape.lanes;
  // The ring is empty: the engine reads what is in it before it begins a run.
  const int room = s.ring_capacity / lanes;
  ring_bound_ = room < max_rounds;
  max_rounds_ = std::min(room, max_rounds);
  rounds_ = 0;
  stopping_ = false;
  seen_ = ring_head(s);
  const std::int32_t none = 0;
  const std::int32_t limits[2] = {max_rounds_, 0};  // RunControl: max_rounds, rounds
  device_.write(s.yield, &none, sizeof(none));
  device_.write(s.control, limits, sizeof(limits));
  if (!loop_) return;
  // A stop() right behind must not be overtaken by the word that it overwrites.
  check(cudaEventRecord(armed_, device_.stream()), "recording an event");
  loop_->launch(device_.stream());
  ++counters_.launches;
  check(cudaEventRecord(done_, device_.stream()), "recording an event");
}

std::optional<RunResult> CudaProgram::wait() {
  const StepState& s = kernels_.bound().state();
  if (!loop_) {  // the host is the loop
    if (rounds_ >= max_rounds_ || stopping_) return finish(rounds_);
    replay();
    ++rounds_;
    StepCounts counts;
    device_.read(&counts, s.counts, sizeof(counts));
    device_.read(positions_.data(), s.position, positions_.size() * sizeof(std::int32_t));
    const bool again = std::any_of(positions_.begin(), positions_.begin() + counts.tokens,
                                   [](std::int32_t position) { return position >= 0; });
    return again && rounds_ < max_rounds_ && !stopping_ ? std::nullopt : finish(rounds_);
  }
  while (true) {
    // The driver is asked only where the ring, a look at memory, has nothing new; and the ring once
    // more behind it, so that no event before the end is missed.
    cudaError_t status = cudaErrorNotReady;
    if (ring_head(s) == seen_) status = cudaEventQuery(done_);
    if (status != cudaErrorNotReady) check(status, "running the loop");
    const std::uint64_t head = ring_head(s);
    if (head != seen_) {
      seen_ = head;
      return std::nullopt;
    }
    if (status == cudaSuccess) {
      RunControl control;
      device_.read(&control, s.control, sizeof(control));
      return finish(control.rounds);
    }
    std::this_thread::sleep_for(kPoll);
  }
}

std::optional<RunResult> CudaProgram::finish(int rounds) {
  RunResult result{rounds, RunEnd::kAllStopped};
  if (rounds >= max_rounds_) {
    result.end = ring_bound_ ? RunEnd::kRingFull : RunEnd::kBound;
  } else if (stopping_) {
    result.end = RunEnd::kYield;
  }
  return result;
}

void CudaProgram::stop() {
  stopping_ = true;
  if (loop_) device_.write_word_beside(kernels_.bound().state().yield, 1, armed_);
}

}  // namespace pianola::cuda
