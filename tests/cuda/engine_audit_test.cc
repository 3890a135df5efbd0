// The graphs of an engine, node by node: nothing that changes from token to token is a launch
// argument, and kernels depend on each other as they were told to.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>

#include "backends/cuda/cuda_program.h"
#include "backends/cuda/kernels/token.h"
#include "cuda/engine_fixture.h"
#include "cuda/graph_audit.h"
#include "cuda/trap_kernel.h"

namespace pianola::cuda {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

class Stream {
 public:
  Stream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "a stream"); }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

struct NamedProgram {
  const Plan* plan = nullptr;
  const CudaProgram* program = nullptr;
};

std::vector<NamedProgram> programs_of(Engine& engine) {
  std::vector<NamedProgram> programs;
  auto& e = EngineTestAccess::impl(engine);
  for (const Plan& plan : e.layout.plans()) {
    const ProgramCache::Entry* entry = e.programs->find({.tokens = plan.shape.tokens,
                                                         .lanes = plan.shape.lanes,
                                                         .logit_rows = plan.shape.logit_rows},
                                                        plan.shape.variant);
    PIANOLA_CHECK(entry && entry->plan == &plan, "a plan without a program");
    programs.push_back({&plan, &dynamic_cast<const CudaProgram&>(*entry->program)});
  }
  return programs;
}

// All that the device knows of rows and of the step at hand.
using StateBytes = std::vector<std::byte>;

StateBytes save_state(Engine& engine) {
  const auto& e = EngineTestAccess::impl(engine);
  return EngineTestAccess::read(engine, e.state_memory->data(), e.layout.state().bytes());
}

void restore_state(Engine& engine, const StateBytes& bytes) {
  EngineTestAccess::write(engine, EngineTestAccess::impl(engine).state_memory->data(), bytes);
  check(cudaDeviceSynchronize(), "restoring the state");
}

// What the next calls leave uninitialised has these bytes: padding of arguments then differs.
[[gnu::noinline]] void fill_stack(char value) {
  volatile char bytes[1 << 16];
  for (volatile char& byte : bytes) byte = value;
}

GraphImage capture(const StepKernels& kernels, cudaStream_t stream, bool loop) {
  const CapturedGraph graph(
      [&](cudaStream_t s, const cudaGraphConditionalHandle* handle) { kernels.issue(s, handle); },
      stream, loop);
  return read_graph(graph.body());
}

// A form of the llama, a model with an encoder, or one with latent attention.
class GraphAudit : public testing::TestWithParam<const char*> {
 protected:
  static bool has_encoder() { return std::string_view(GetParam()).starts_with("t5_"); }
  static std::shared_ptr<const CausalModel> model() {
    const std::string name = GetParam();
    if (name.starts_with("deepseek_")) return tiny_deepseek(name.substr(9));
    return has_encoder() ? tiny_t5(name.substr(3)) : tiny_llama(name);
  }
  static std::vector<TokenId> text(int seed, int length) {
    return prompt(seed, length, has_encoder() ? 128 : kVocab);
  }
};

// Every Program is captured three times in each of three states: before any row was open; one row
// in the middle of a short text; three rows of other lengths with other parameters, and inputs.
TEST_P(GraphAudit, NoCaptureFreezesAValue) {
  Engine engine(model(), {.backend = "cuda",
                          .max_seq_len = 512,
                          .slots = 8,
                          .chunk = 128,
                          .score = true,
                          .logits = true});
  std::vector<StateBytes> states = {save_state(engine)};
  for (const std::vector<int>& lengths : {std::vector<int>{5}, std::vector<int>{63, 200, 129}}) {
    std::vector<RowPlan> plans;
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      const int seed = static_cast<int>(states.size() * 10 + i);
      plans.push_back({text(seed, lengths[i]), sampled(seed, 400)});
      if (has_encoder()) plans.back().input = text(seed, lengths[lengths.size() - 1 - i] / 2 + 1);
    }
    Session session(engine, plans);
    for (std::size_t i = 0; i < 3 * states.size(); ++i) engine.run(2);
    states.push_back(save_state(engine));
    session.close();
  }
  ASSERT_NE(states[1], states[2]);

  // The condition of a WHILE node belongs to its graph.
  const std::vector<DeclaredDifference> none;
  const std::vector<DeclaredDifference> of_loop = {
      {"advance_kernel", 0, offsetof(AdvanceArgs, handle), sizeof(AdvanceArgs::handle)}};
  const Stream stream;
  std::size_t values = 0;
  for (const NamedProgram& named : programs_of(engine)) {
    for (const bool loop : {false, true}) {
      const CapturedGraph* own = loop ? named.program->loop_graph() : named.program->step_graph();
      if (!own) continue;  // a step that does not feed itself has no loop
      SCOPED_TRACE(to_string(named.plan->shape) + (loop ? ", loop" : ", step"));
      std::vector<std::vector<GraphImage>> images(states.size());
      for (const char rest : {'\x00', '\xFF', '\x5A'}) {
        for (std::size_t s = 0; s < states.size(); ++s) {
          restore_state(engine, states[s]);
          fill_stack(rest);
          images[s].push_back(capture(named.program->kernels(), stream, loop));
        }
      }
      const GraphImage original = read_graph(own->body());
      for (const std::vector<GraphImage>& of_state : images) {
        for (const GraphImage& image : of_state) {
          ASSERT_EQ(structure_difference(original, image), "");
        }
      }
      EXPECT_THAT(frozen_values(images, loop ? of_loop : none), IsEmpty());
      for (const GraphNode& node : original.nodes) {
        EXPECT_FALSE(node.parameters.empty()) << node.name;
        for (const GraphParameter& parameter : node.parameters) values += parameter.bytes.size();
      }
    }
  }
  EXPECT_GT(values, 10000U) << "bytes of parameters that were compared";
}

// With dependent launch, every kernel of a step but its first may start before the one in front of
// it has ended; without, none may.
TEST_P(GraphAudit, DependentLaunchIsInTheEdges) {
  for (const bool dependent : {true, false}) {
    Engine engine(model(), {.backend = "cuda",
                            .max_seq_len = 512,
                            .slots = 64,
                            .chunk = 128,
                            .dependent_launch = dependent});
    for (const NamedProgram& named : programs_of(engine)) {
      for (const CapturedGraph* graph :
           {named.program->step_graph(), named.program->loop_graph()}) {
        if (!graph) continue;
        SCOPED_TRACE(to_string(named.plan->shape) +
                     (graph == named.program->loop_graph() ? ", loop" : ", step"));
        const GraphImage image = read_graph(graph->body());
        const auto programmatic =
            std::count_if(image.edges.begin(), image.edges.end(), [](const GraphEdge& edge) {
              return edge.type == static_cast<int>(cudaGraphDependencyTypeProgrammatic);
            });
        EXPECT_GE(image.edges.size(), image.nodes.size() - 1);
        if (!dependent) {
          EXPECT_EQ(programmatic, 0);
        } else if (named.plan->shape.tokens <= kDecodeTokens) {
          EXPECT_EQ(static_cast<std::size_t>(programmatic), image.nodes.size() - 1);
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Forms, GraphAudit,
                         testing::Values("f32", "f16", "q8_0", "t5_gated", "t5_relu", "deepseek_v2",
                                         "deepseek_v3"));

// The audit itself: it must see what it is there for.

GraphImage capture_store(cudaStream_t stream, int* address, int value, unsigned blocks) {
  cudaGraph_t graph = nullptr;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  const cudaError_t launched = launch_store(stream, address, value, blocks);
  check(cudaStreamEndCapture(stream, &graph), "capture");
  check(launched, "store");
  const GraphImage image = read_graph(graph);
  check(cudaGraphDestroy(graph), "graph");
  return image;
}

TEST(GraphAuditItself, SeesAFrozenValue) {
  const Stream stream;
  int* const here = reinterpret_cast<int*>(std::uintptr_t{0x10000});
  int* const there = reinterpret_cast<int*>(std::uintptr_t{0x10100});
  const auto twice = [&](int* address, int value) {
    return std::vector<GraphImage>{capture_store(stream, address, value, 1),
                                   capture_store(stream, address, value, 1)};
  };
  const std::vector<DeclaredDifference> none;
  const std::vector<DeclaredDifference> value_is_declared = {{"store_kernel", 1, 0, 4}};
  const std::vector<GraphImage> five = twice(here, 5);
  ASSERT_EQ(five[0].nodes.size(), 1U);
  ASSERT_EQ(five[0].nodes[0].parameters.size(), 2U);
  EXPECT_EQ(five[0].nodes[0].parameters[0].bytes.size(), 8U);
  EXPECT_EQ(five[0].nodes[0].parameters[1].bytes, (std::vector<unsigned char>{5, 0, 0, 0}));
  EXPECT_THAT(five[0].nodes[0].name, HasSubstr("store_kernel"));

  std::vector<std::vector<GraphImage>> images = {five, twice(here, 5)};
  EXPECT_THAT(frozen_values(images, none), IsEmpty());
  images[1] = twice(here, 6);
  EXPECT_THAT(frozen_values(images, none),
              ElementsAre(HasSubstr("parameter 1: byte 0 depends on the state")));
  EXPECT_THAT(frozen_values(images, value_is_declared), IsEmpty());
  images[1] = twice(there, 5);
  EXPECT_THAT(frozen_values(images, none),
              ElementsAre(HasSubstr("parameter 0: byte 1 depends on the state")));
  images[1] = {five[0], capture_store(stream, here, 7, 1)};
  EXPECT_THAT(frozen_values(images, none),
              ElementsAre(HasSubstr("parameter 1: byte 0 varies from capture to capture")));
  EXPECT_THAT(structure_difference(five[0], capture_store(stream, here, 5, 2)),
              HasSubstr("launch value 0: 1 and 2"));
}

}  // namespace
}  // namespace pianola::cuda
