// GraphRunner: a user's forward as a graph of one round, and as the body of a loop.
//
// A capture that breaks tells little: CUDA invalidates it and says so at its end. So capture()
// rehearses first, on a graph that is thrown away, and looks at what the calls of the forward left
// behind, at the nodes that came out, and at whether anything ran that should have been captured.
#include "pianola/graph.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <numeric>
#include <string>
#include <utility>

#include "backends/cuda/cuda_error.h"
#include "backends/cuda/cuda_program.h"
#include "backends/cuda/device.h"
#include "backends/cuda/kernels/round.h"
#include "base/check.h"

namespace pianola {
namespace {

using cuda::check;

// What came out of capturing a forward once.
struct Rehearsal {
  cudaError_t call = cudaSuccess;  // the last error of the forward's calls
  cudaError_t end = cudaSuccess;   // of ending the capture
  std::exception_ptr thrown;       // by the forward
  cudaGraph_t graph = nullptr;

  Rehearsal() = default;
  Rehearsal(const Rehearsal&) = delete;
  Rehearsal& operator=(const Rehearsal&) = delete;
  ~Rehearsal() {
    if (graph) cudaGraphDestroy(graph);
  }

  // What the forward threw, in its own words; "" when it did not.
  std::string words() const {
    if (!thrown) return "";
    try {
      std::rethrow_exception(thrown);
    } catch (const std::exception& error) {
      return error.what();
    } catch (...) {
      return "";
    }
  }
  // A forward that checks its calls takes their errors away; its words mostly hold CUDA's.
  bool saw(cudaError_t error) const {
    return call == error || end == error ||
           words().find(cudaGetErrorString(error)) != std::string::npos;
  }
};

const char* node_kind(cudaGraphNodeType type) {
  switch (type) {
    case cudaGraphNodeTypeHost:
      return "a host function";
    case cudaGraphNodeTypeEventRecord:
    case cudaGraphNodeTypeWaitEvent:
      return "an event of another graph";
    case cudaGraphNodeTypeExtSemaphoreSignal:
    case cudaGraphNodeTypeExtSemaphoreWait:
      return "an external semaphore";
    default:
      return "a node of a kind that a loop cannot hold";
  }
}

bool fits_a_loop(cudaGraphNodeType type) {
  switch (type) {
    case cudaGraphNodeTypeKernel:
    case cudaGraphNodeTypeMemcpy:
    case cudaGraphNodeTypeMemset:
    case cudaGraphNodeTypeGraph:
    case cudaGraphNodeTypeEmpty:
    case cudaGraphNodeTypeConditional:
      return true;
    default:
      return false;
  }
}

[[noreturn]] void refuse_allocation() {
  fail(ErrorCode::kInvalidArgument,
       "graph: the forward allocates or frees memory; a replay would not: allocate before "
       "capture()");
}

[[noreturn]] void refuse_stream(const char* what) {
  fail(ErrorCode::kInvalidArgument,
       "graph: {}, which is not captured; launch everything on the stream that the forward is "
       "given, or on streams forked from it by events and joined again",
       what);
}

[[noreturn]] void refuse_call(cudaError_t status) {
  fail(ErrorCode::kInvalidArgument, "graph: a CUDA call of the forward failed: {} ({})",
       cudaGetErrorString(status), cudaGetErrorName(status));
}

// One of the errors that only capturing makes.
bool is_of_capture(cudaError_t status) {
  return status >= cudaErrorStreamCaptureUnsupported && status <= cudaErrorStreamCaptureWrongThread;
}

void check_nodes(cudaGraph_t graph, bool loop) {
  std::size_t count = 0;
  check(cudaGraphGetNodes(graph, nullptr, &count), "counting nodes");
  if (count == 0) refuse_stream("the forward launches nothing, or only on another stream");
  std::vector<cudaGraphNode_t> nodes(count);
  check(cudaGraphGetNodes(graph, nodes.data(), &count), "listing nodes");
  for (const cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type = cudaGraphNodeTypeEmpty;
    check(cudaGraphNodeGetType(node, &type), "the kind of a node");
    if (type == cudaGraphNodeTypeMemAlloc || type == cudaGraphNodeTypeMemFree) refuse_allocation();
    if (loop && !fits_a_loop(type)) {
      fail(ErrorCode::kUnsupported,
           "graph: the forward holds {}, which cannot run in a loop on the device; with .loop = "
           "false it can be replayed",
           node_kind(type));
    }
  }
}

}  // namespace

struct GraphRunner::Impl {
  Impl(StaticKvCache& given, const GraphRunnerOptions& given_options)
      : cache(given), options(given_options), device(device_of(given)) {
    if (options.appends < 0) {
      fail(ErrorCode::kInvalidArgument, "graph: a round appends {} tokens", options.appends);
    }
    set_slots(options.slots);
    word_memory = device.allocate(sizeof(Words), MemoryUse::kDense);
    report_memory = device.allocate(sizeof(cuda::RoundReport), MemoryUse::kShared);
    words = reinterpret_cast<Words*>(word_memory->data());
    report = reinterpret_cast<cuda::RoundReport*>(report_memory->data());
    check(cudaEventCreateWithFlags(&done, cudaEventDisableTiming | cudaEventBlockingSync),
          "making an event");
    // Not cudaStreamNonBlocking: only then does CUDA refuse a launch on the default stream during
    // capture, the commonest mistake.
    const cudaError_t status = cudaStreamCreate(&stream);
    if (status != cudaSuccess) cudaEventDestroy(done);
    check(status, "making a stream");
  }
  ~Impl() {
    if (running) {
      try {
        stop();
      } catch (const Error&) {  // the device is lost: there is nothing left to stop
      }
      cudaStreamSynchronize(stream);
    }
    loop_graph.reset();
    step_graph.reset();
    cudaStreamDestroy(stream);
    cudaEventDestroy(done);
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  static int device_of(const StaticKvCache& cache) {
    const KvCacheOptions& o = cache.options();
    if (o.backend != "cuda") {
      fail(ErrorCode::kInvalidArgument,
           "graph: the cache is on the backend '{}'; a graph needs one on 'cuda'", o.backend);
    }
    return o.device;
  }

  void set_slots(const std::vector<int>& given) {
    const int count = cache.options().slots;
    std::vector<int> distinct = given;
    std::sort(distinct.begin(), distinct.end());
    for (std::size_t i = 0; i < distinct.size(); ++i) {
      if (distinct[i] < 0 || distinct[i] >= count || (i > 0 && distinct[i] == distinct[i - 1])) {
        fail(ErrorCode::kInvalidArgument, "graph: slot {} is not one of {}, or is named twice",
             distinct[i], count);
      }
    }
    if (distinct.empty()) {
      distinct.resize(static_cast<std::size_t>(count));
      std::iota(distinct.begin(), distinct.end(), 0);
    }
    slots = std::move(distinct);
  }

  cuda::Launch launch() const { return {.stream = stream, .sms = device.multiprocessors()}; }
  void end_round(const cudaGraphConditionalHandle* handle) const {
    cuda::end_round(&words->loop, report, handle, launch());
  }

  // One value for all that lies in the cache and in the words. Waits for the whole device.
  std::uint64_t fingerprint() const {
    check(cudaDeviceSynchronize(), "waiting for the device");
    check(cudaMemsetAsync(&words->sum, 0, sizeof(words->sum), stream), "clearing a sum");
    cuda::add_fingerprint(cache.memory().data(), cache.memory().size(), &words->sum, launch());
    cuda::add_fingerprint(&words->loop, sizeof(words->loop), &words->sum, launch());
    std::uint64_t sum = 0;
    check(cudaMemcpyAsync(&sum, &words->sum, sizeof(sum), cudaMemcpyDeviceToHost, stream),
          "reading a sum");
    check(cudaStreamSynchronize(stream), "reading a sum");
    return sum;
  }

  void rehearse(const Forward& forward, cudaStreamCaptureMode mode, Rehearsal& result) const {
    cudaGetLastError();
    check(cudaStreamBeginCapture(stream, mode), "beginning capture");
    try {
      forward(stream, &words->loop);
    } catch (...) {
      result.thrown = std::current_exception();
    }
    result.call = cudaGetLastError();
    result.end = cudaStreamEndCapture(stream, &result.graph);
    cudaGetLastError();
  }

  // Throws what breaks the capture of `forward`, if anything does.
  void check_forward(const Forward& forward) const {
    const std::uint64_t before = fingerprint();
    Rehearsal r;
    rehearse(forward, cudaStreamCaptureModeThreadLocal, r);
    if (r.call != cudaSuccess && !is_of_capture(r.call)) refuse_call(r.call);
    if (r.saw(cudaErrorStreamCaptureImplicit)) {
      refuse_stream(
          "the forward uses the default stream (a launch without a stream, cudaMemcpy, "
          "cudaMemset)");
    }
    if (r.saw(cudaErrorStreamCaptureUnjoined)) {
      refuse_stream("the forward ends before a stream that it forked was joined again");
    }
    if (r.saw(cudaErrorStreamCaptureIsolation) || r.saw(cudaErrorStreamCaptureMerge) ||
        r.saw(cudaErrorStreamCaptureUnmatched)) {
      refuse_stream("the forward waits for a stream that began outside it");
    }
    if (r.saw(cudaErrorStreamCaptureUnsupported) || r.saw(cudaErrorStreamCaptureInvalidated)) {
      refuse_unsafe_call(forward, r);
    }
    if (r.thrown) std::rethrow_exception(r.thrown);
    if (r.call != cudaSuccess) refuse_call(r.call);
    check(r.end, "ending capture");
    if (fingerprint() != before) {
      refuse_stream(
          "the forward wrote to the cache while it was captured: it launches on a stream");
    }
    check_nodes(r.graph, options.loop);
  }

  // Allocations and waiting break a capture with the same error, and the calls behind them replace
  // it by another. In the relaxed mode, where CUDA allows allocations, the rest still breaks it.
  [[noreturn]] void refuse_unsafe_call(const Forward& forward, const Rehearsal& r) const {
    Rehearsal relaxed;
    rehearse(forward, cudaStreamCaptureModeRelaxed, relaxed);
    if (relaxed.end == cudaSuccess) refuse_allocation();
    const std::string says = r.words();
    fail(ErrorCode::kInvalidArgument,
         "graph: the forward waits for the device (cudaDeviceSynchronize, cudaStreamSynchronize, "
         "cudaMemcpy), or uses the default stream or an event from outside; a replay would do none "
         "of it: keep on the device what the forward wants to know{}",
         says.empty() ? "" : fmt::format(" (the forward says: {})", says));
  }

  void capture(Forward given) {
    check_idle();
    check(cudaSetDevice(cache.options().device), "choosing the device");
    if (!given) fail(ErrorCode::kInvalidArgument, "graph: there is no forward to capture");
    const std::uint64_t addresses = cache.address_certificate();
    check_forward(given);
    const cuda::IssueRound issue = [&](cudaStream_t, const cudaGraphConditionalHandle* handle) {
      given(stream, &words->loop);
      end_round(handle);
    };
    auto step = std::make_unique<cuda::CapturedGraph>(issue, stream, false);
    std::unique_ptr<cuda::CapturedGraph> loop;
    if (options.loop) {
      try {
        loop = std::make_unique<cuda::CapturedGraph>(issue, stream, true);
      } catch (const Error& error) {
        cudaGetLastError();
        if (error.code() != ErrorCode::kDevice) throw;
        fail(ErrorCode::kUnsupported,
             "graph: the forward cannot run in a loop on the device: {}; with .loop = false it can "
             "be replayed",
             error.what());
      }
    }
    check(cudaStreamSynchronize(stream), "uploading graphs");
    captured_forward = std::move(given);
    step_graph = std::move(step);
    loop_graph = std::move(loop);
    certificate = addresses;
  }

  void check_idle() const {
    if (running) {
      fail(ErrorCode::kInvalidArgument, "graph: a loop is running; stop() it, then wait() for it");
    }
  }
  void check_ready() const {
    check_idle();
    if (!step_graph) fail(ErrorCode::kInvalidArgument, "graph: nothing has been captured");
    if (cache.address_certificate() != certificate) {
      fail(ErrorCode::kInvalidArgument,
           "graph: the cache is not at the addresses that were captured: it was moved or replaced; "
           "capture again");
    }
  }

  bool round(bool eager) {
    check_ready();
    cache.allow(slots, options.appends);
    if (eager) {
      check(cudaSetDevice(cache.options().device), "choosing the device");
      cudaGetLastError();
      captured_forward(stream, &words->loop);
      check(cudaGetLastError(), "the forward");
      end_round(nullptr);
    } else {
      step_graph->launch(stream);
    }
    check(cudaStreamSynchronize(stream), "a round");
    return report->again != 0;
  }

  void begin(int max_rounds) {
    check_ready();
    if (!loop_graph) {
      fail(ErrorCode::kInvalidArgument, "graph: the loop was not captured (.loop = false)");
    }
    if (max_rounds < 1) {
      fail(ErrorCode::kInvalidArgument, "graph: a loop of {} rounds", max_rounds);
    }
    int rounds = max_rounds;
    if (options.appends > 0) {
      rounds = std::min(max_rounds, cache.room(slots) / options.appends);
      if (rounds < 1) rounds = 1;  // allow() says which slot is full
    }
    cache.allow(slots, rounds * options.appends);
    full = rounds < max_rounds;
    limit = rounds;
    const LoopWords start = {.again = 0, .rounds = 0, .max_rounds = rounds, .yield = 0};
    check(cudaMemcpyAsync(&words->loop, &start, sizeof(start), cudaMemcpyHostToDevice, stream),
          "beginning a loop");
    // A stop() right after this must not be overtaken by these words.
    check(cudaStreamSynchronize(stream), "beginning a loop");
    loop_graph->launch(stream);
    running = true;
    check(cudaEventRecord(done, stream), "recording an event");
  }

  std::optional<LoopResult> poll(bool wait) {
    if (!running) fail(ErrorCode::kInvalidArgument, "graph: no loop is running");
    const cudaError_t status = wait ? cudaEventSynchronize(done) : cudaEventQuery(done);
    if (status == cudaErrorNotReady) return std::nullopt;
    running = false;
    check(status, "running a loop");
    LoopResult result{.rounds = report->rounds, .end = LoopEnd::kStopped};
    if (report->again == 0) {
      result.end = LoopEnd::kDone;
    } else if (result.rounds >= limit) {
      result.end = full ? LoopEnd::kFull : LoopEnd::kBound;
    }
    return result;
  }

  void stop() {
    if (running) device.write_word_beside(&words->loop.yield, 1);
  }

  // In device memory.
  struct Words {
    LoopWords loop;
    std::uint64_t sum;
  };

  StaticKvCache& cache;
  GraphRunnerOptions options;
  std::vector<int> slots;
  cuda::Device device;
  std::unique_ptr<DeviceMemory> word_memory;
  std::unique_ptr<DeviceMemory> report_memory;
  Words* words = nullptr;
  cuda::RoundReport* report = nullptr;
  cudaStream_t stream = nullptr;
  cudaEvent_t done = nullptr;
  Forward captured_forward;
  std::unique_ptr<cuda::CapturedGraph> step_graph;
  std::unique_ptr<cuda::CapturedGraph> loop_graph;  // null: no loop
  std::uint64_t certificate = 0;
  int limit = 0;      // rounds of the loop that runs
  bool full = false;  // it ends where a slot may be full
  std::atomic<bool> running = false;
};

GraphRunner::GraphRunner(StaticKvCache& cache, const GraphRunnerOptions& options)
    : impl_(std::make_unique<Impl>(cache, options)) {}
GraphRunner::~GraphRunner() = default;
GraphRunner::GraphRunner(GraphRunner&&) noexcept = default;
GraphRunner& GraphRunner::operator=(GraphRunner&&) noexcept = default;

void GraphRunner::capture(Forward forward) { impl_->capture(std::move(forward)); }
bool GraphRunner::captured() const { return impl_->step_graph != nullptr; }
std::size_t GraphRunner::nodes() const {
  return impl_->step_graph ? impl_->step_graph->nodes() : 0;
}
bool GraphRunner::replay() { return impl_->round(false); }
bool GraphRunner::eager() { return impl_->round(true); }
LoopResult GraphRunner::run(int max_rounds) {
  begin(max_rounds);
  return wait();
}
void GraphRunner::begin(int max_rounds) { impl_->begin(max_rounds); }
std::optional<LoopResult> GraphRunner::poll() { return impl_->poll(false); }
LoopResult GraphRunner::wait() { return *impl_->poll(true); }
void GraphRunner::stop() { impl_->stop(); }
void GraphRunner::set_slots(const std::vector<int>& slots) {
  impl_->check_idle();
  impl_->set_slots(slots);
}
CudaStream GraphRunner::stream() const { return impl_->stream; }

}  // namespace pianola
