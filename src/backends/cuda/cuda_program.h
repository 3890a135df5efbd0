// Executors of a Plan on a GPU. All issue the same kernels on the same addresses; they differ in
// who launches them: the host, op by op; one graph a step; or one graph a generation, whose WHILE
// node runs the step until every row has stopped.
#pragma once

#include <cuda_runtime.h>

#include <functional>
#include <vector>

#include "backends/backend.h"
#include "backends/cuda/device.h"
#include "backends/cuda/step_kernels.h"

namespace pianola::cuda {

// Launches one round on the stream. In a loop, the handle is the condition of its node, which the
// round sets; otherwise it is null.
using IssueRound = std::function<void(cudaStream_t, const cudaGraphConditionalHandle*)>;

// A graph and its executable form, on the device.
class CapturedGraph {
 public:
  // Captures one round. With `loop`, as the body of a WHILE node.
  CapturedGraph(const IssueRound& issue, cudaStream_t stream, bool loop);
  ~CapturedGraph();
  CapturedGraph(const CapturedGraph&) = delete;
  CapturedGraph& operator=(const CapturedGraph&) = delete;

  void launch(cudaStream_t stream) const;
  std::size_t nodes() const { return nodes_; }
  // The graph that holds the kernels of a round.
  cudaGraph_t body() const { return body_; }

 private:
  cudaGraph_t graph_ = nullptr;
  cudaGraph_t body_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
  std::size_t nodes_ = 0;
};

class CudaProgram final : public Program {
 public:
  CudaProgram(const Plan& plan, const Binding& binding, const CudaOptions& options,
              const GemmLibrary* library, Device& device, BackendCounters& counters);
  ~CudaProgram() override;

  void replay() override;
  void replay_ops(std::size_t first, std::size_t last) override;
  void begin(int max_rounds) override;
  std::optional<RunResult> wait() override;
  void stop() override;
  std::uint64_t address_certificate() const override;

  const StepKernels& kernels() const { return kernels_; }
  const CapturedGraph* step_graph() const { return step_.get(); }
  const CapturedGraph* loop_graph() const { return loop_.get(); }

 private:
  void issue_round();  // one round on the stream, without waiting
  std::optional<RunResult> finish(int rounds);

  StepKernels kernels_;
  Device& device_;
  BackendCounters& counters_;
  bool check_each_ = false;
  std::unique_ptr<CapturedGraph> step_;  // null: eager
  std::unique_ptr<CapturedGraph> loop_;  // null: no loop on the device
  cudaEvent_t armed_ = nullptr;  // the words of a run are on the device: stop() waits for it
  cudaEvent_t done_ = nullptr;
  std::uint64_t seen_ = 0;  // events of the ring that wait() has told of
  int max_rounds_ = 0;
  int rounds_ = 0;                       // of a run whose loop is on the host
  std::vector<std::int32_t> positions_;  // [tokens] of such a round
  bool ring_bound_ = false;
  bool stopping_ = false;
};

}  // namespace pianola::cuda
