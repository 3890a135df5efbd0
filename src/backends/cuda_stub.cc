// What a build without CUDA says in the place of the CUDA backend.
#include "backends/cuda.h"
#include "base/check.h"
#include "pianola/graph.h"

namespace pianola::cuda {

bool built_in() { return false; }

std::unique_ptr<Backend> make_cuda_backend(const BackendOptions&) {
  fail(ErrorCode::kUnsupported,
       "backend 'cuda': this build has no CUDA; configure with -DPIANOLA_CUDA=ON on a machine with "
       "the CUDA toolkit");
}

}  // namespace pianola::cuda

namespace pianola {

// There is no GraphRunner: the only constructor throws.
struct GraphRunner::Impl {};

namespace {

[[noreturn]] void no_cuda() {
  fail(ErrorCode::kUnsupported,
       "graph: this build has no CUDA, and graphs run on GPUs only; configure with "
       "-DPIANOLA_CUDA=ON on a machine with the CUDA toolkit");
}

}  // namespace

GraphRunner::GraphRunner(StaticKvCache&, const GraphRunnerOptions&) { no_cuda(); }
GraphRunner::~GraphRunner() = default;
GraphRunner::GraphRunner(GraphRunner&&) noexcept = default;
GraphRunner& GraphRunner::operator=(GraphRunner&&) noexcept = default;
// By value as the header says: the real one keeps it.
void GraphRunner::capture(Forward) { no_cuda(); }  // NOLINT(performance-unnecessary-value-param)
bool GraphRunner::captured() const { no_cuda(); }
std::size_t GraphRunner::nodes() const { no_cuda(); }
bool GraphRunner::replay() { no_cuda(); }
bool GraphRunner::eager() { no_cuda(); }
LoopResult GraphRunner::run(int) { no_cuda(); }
void GraphRunner::begin(int) { no_cuda(); }
std::optional<LoopResult> GraphRunner::poll() { no_cuda(); }
LoopResult GraphRunner::wait() { no_cuda(); }
void GraphRunner::stop() { no_cuda(); }
void GraphRunner::set_slots(const std::vector<int>&) { no_cuda(); }
CudaStream GraphRunner::stream() const { no_cuda(); }

}  // namespace pianola
