// The end of a round against backends/reference/advance.cc: the whole state, the ring and the loop.
#include <algorithm>
#include <map>
#include <random>

#include "backends/backend.h"
#include "backends/cuda/kernels/token.h"
#include "backends/reference/ops.h"
#include "cuda/cuda_fixture.h"
#include "cuda/state_fixture.h"

namespace pianola::cuda {
namespace {

void reference_advance(const StepState& state, bool samples) {
  Plan plan;
  plan.shape.variant = samples ? StepVariant::kSample : StepVariant::kLogits;
  Binding binding;
  binding.state = state;
  reference::run(AdvanceOp{}, BoundPlan(plan, binding));
}

constexpr StepLimits kLimits = {
    .rows = 70, .max_seq_len = 200, .tokens = 1024, .lanes = 64, .logit_rows = 64};

// A step of some lanes of one token or of several, some masked, some without a logit row.
void fill_randomly(const StepState& s, bool feed, std::mt19937& random) {
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  const int lanes = 1 + below(kLimits.lanes);
  *s.counts = {.tokens = 0, .lanes = lanes, .logit_rows = 0, .feed = feed};
  std::vector<int> rows(static_cast<std::size_t>(kLimits.rows));
  for (int i = 0; i < kLimits.rows; ++i) rows[static_cast<std::size_t>(i)] = i;
  std::shuffle(rows.begin(), rows.end(), random);
  for (int i = 0; i < kLimits.rows; ++i) {
    RowState& row = s.row[i];
    row.length = below(100);
    row.history_length = row.length + below(20);
    row.max_length = row.history_length + 1 + below(4);
    row.status = RowStatus::kRunning;
    row.stop_count = below(3) ? below(6) : below(kMaxStopTokens + 1);
    for (TokenId& stop : row.stop_tokens) stop = below(60);
  }
  int t = 0;
  for (int lane = 0; lane < lanes; ++lane) {
    const int row = rows[static_cast<std::size_t>(lane)];
    const int tokens = feed ? 1 : 1 + below(16);
    const bool masked = below(5) == 0;
    s.row_of[lane] = row;
    s.first_token[lane] = t;
    for (int i = 0; i < tokens; ++i, ++t) {
      s.lane_of[t] = lane;
      s.token[t] = 1000 + t;
      s.position[t] = masked ? -1 : s.row[row].length + i;
    }
    if (feed || below(4)) {
      const int r = s.counts->logit_rows++;
      s.logit_token[r] = t - 1;
      s.sampled[r] = below(8) ? below(60) : -1;
      s.logprob[r] = static_cast<float>(below(1000)) * -0.001F;
    }
  }
  s.first_token[lanes] = t;
  s.counts->tokens = t;
}

void expect_equal(const StepState& got, const StepState& want) {
  for (int i = 0; i < kLimits.rows; ++i) {
    ASSERT_EQ(std::memcmp(got.row + i, want.row + i, sizeof(RowState)), 0) << "row " << i;
  }
  const auto equal = [](const auto* a, const auto* b, std::size_t count) {
    return std::memcmp(a, b, count * sizeof(*a)) == 0;
  };
  ASSERT_TRUE(equal(got.history, want.history,
                    std::size_t{kLimits.rows} * static_cast<std::size_t>(want.history_stride)));
  ASSERT_TRUE(equal(got.token, want.token, kLimits.tokens));
  ASSERT_TRUE(equal(got.position, want.position, kLimits.tokens));
  ASSERT_EQ(*got.ring_head, *want.ring_head);
  for (int i = 0; i < want.ring_capacity; ++i) {
    ASSERT_TRUE(equal(got.ring + i, want.ring + i, 1)) << "event " << i;
  }
}

TEST(Advance, SmallStepsAreTheReferenceOnRandomStates) {
  std::mt19937 random(1);
  MirroredState want(kLimits);
  MirroredState got(kLimits);
  std::uint64_t head = 0;
  for (int i = 0; i < 200; ++i) {
    SCOPED_TRACE("state " + std::to_string(i));
    const bool feed = i % 2 == 0;
    const bool samples = i % 10 != 9;
    // At ends of the ring, where the modulus of 64 bits begins, and just on.
    if (i % 20 == 5) head = static_cast<std::uint64_t>(want.host.ring_capacity) * (i + 1) - 3;
    if (i % 50 == 17) head = (std::uint64_t{1} << 32) - 10;
    const auto seed = static_cast<unsigned>(random());
    for (const MirroredState* state : {&want, &got}) {
      std::mt19937 same(seed);
      fill_randomly(state->host, feed && samples, same);
      *state->host.ring_head = head;
    }
    *got.host.control = {.max_rounds = 5, .rounds = 3, .published = head};
    got.upload();
    advance({.state = got.device, .samples = samples}, test_launch());
    got.download();
    reference_advance(want.host, samples);
    ASSERT_NO_FATAL_FAILURE(expect_equal(got.host, want.host));
    head = *want.host.ring_head;
    EXPECT_EQ(got.host.control->published, head);
    EXPECT_EQ(got.host.control->rounds, feed && samples ? 4 : 3);
  }
}

// More logit rows than threads: the kernel takes them in turns.
TEST(Advance, AThousandLanes) {
  constexpr StepLimits kMany = {
      .rows = 1000, .max_seq_len = 20, .tokens = 1000, .lanes = 1000, .logit_rows = 1000};
  std::mt19937 random(2);
  MirroredState want(kMany);
  MirroredState got(kMany);
  const auto seed = static_cast<unsigned>(random());
  for (MirroredState* state : {&want, &got}) {
    std::mt19937 same(seed);
    const StepState& s = state->host;
    fill_decode_tables(s, kMany.rows);
    s.counts->feed = 1;
    for (int r = 0; r < kMany.rows; ++r) {
      s.row[r].history_length = 1 + static_cast<int>(same() % 3);
      s.row[r].max_length = 3;
      s.position[r] = same() % 7 ? 0 : -1;
      s.sampled[r] = static_cast<int>(same() % 100) - 5;
    }
  }
  got.upload();
  advance({.state = got.device}, test_launch());
  got.download();
  reference_advance(want.host, true);
  ASSERT_EQ(*got.host.ring_head, *want.host.ring_head);
  ASSERT_GT(*got.host.ring_head, 700U);
  for (std::uint64_t i = 0; i < *got.host.ring_head; ++i) {
    ASSERT_EQ(std::memcmp(got.host.ring + i, want.host.ring + i, sizeof(TokenEvent)), 0) << i;
  }
  for (int r = 0; r < kMany.rows; ++r) {
    ASSERT_EQ(std::memcmp(got.host.row + r, want.host.row + r, sizeof(RowState)), 0) << r;
    ASSERT_EQ(got.host.position[r], want.host.position[r]) << r;
  }
}

// --- timing --- and what else needs a real device: loops as graphs.

// A WHILE node whose body is advance() alone, launched once. Every row draws the token 7 each
// round.
class Loop {
 public:
  Loop() : state_({.rows = 4, .max_seq_len = 2000, .tokens = 4, .lanes = 4, .logit_rows = 4}) {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
    check(cudaGraphCreate(&graph_, 0), "graph");
    cudaGraphConditionalHandle handle;
    check(cudaGraphConditionalHandleCreate(&handle, graph_, 1, cudaGraphCondAssignDefault),
          "condition");
    cudaGraphNodeParams node = {};
    node.type = cudaGraphNodeTypeConditional;
    node.conditional.handle = handle;
    node.conditional.type = cudaGraphCondTypeWhile;
    node.conditional.size = 1;
    cudaGraphNode_t added;
    check(cudaGraphAddNode(&added, graph_, nullptr, nullptr, 0, &node), "WHILE node");
    cudaGraph_t body = node.conditional.phGraph_out[0];
    check(cudaStreamBeginCaptureToGraph(stream_, body, nullptr, nullptr, 0,
                                        cudaStreamCaptureModeThreadLocal),
          "capture");
    Launch launch = test_launch();
    launch.stream = stream_;
    advance({.state = state_.device, .loop = true, .handle = handle}, launch);
    check(cudaStreamEndCapture(stream_, &body), "capture");
    check(cudaGraphInstantiate(&program_, graph_, 0), "instantiate");
  }
  ~Loop() {
    cudaGraphExecDestroy(program_);
    cudaGraphDestroy(graph_);
    cudaStreamDestroy(stream_);
  }

  // Rounds made from a fresh start; `lengths` are what the rows may reach.
  int run(int max_rounds, const std::vector<int>& lengths, int yield = 0) {
    const StepState& s = state_.host;
    fill_decode_tables(s, 4);
    s.counts->feed = 1;
    for (int r = 0; r < 4; ++r) {
      s.row[r] = RowState{};
      s.row[r].history_length = 1;
      s.row[r].max_length = lengths[static_cast<std::size_t>(r)];
      s.row[r].status = RowStatus::kRunning;
      s.sampled[r] = 7;
    }
    *s.yield = yield;
    *s.ring_head = 0;
    *s.control = {.max_rounds = max_rounds, .rounds = 0, .published = 0};
    state_.upload();
    check(cudaGraphLaunch(program_, stream_), "launch");
    check(cudaStreamSynchronize(stream_), "loop");
    state_.download();
    return s.control->rounds;
  }
  const StepState& state() const { return state_.host; }

 private:
  MirroredState state_;
  cudaStream_t stream_ = nullptr;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t program_ = nullptr;
};

TEST(AdvanceLoop, EndsWhenAllRowsStopAtTheBoundAndOnYield) {
  Loop loop;
  // Rows that may reach 2, 5, 3 and 9 tokens, from one each: the longest needs 8 rounds.
  EXPECT_EQ(loop.run(100, {2, 5, 3, 9}), 8);
  EXPECT_EQ(*loop.state().ring_head, 1U + 4 + 2 + 8);
  for (int r = 0; r < 4; ++r) {
    EXPECT_EQ(loop.state().row[r].status, RowStatus::kLength);
    EXPECT_EQ(loop.state().row[r].length, loop.state().row[r].max_length - 1);
    EXPECT_EQ(loop.state().position[r], -1);
  }
  // Events of a round are in the order of its logit rows.
  std::map<int, int> seen;
  for (std::uint64_t i = 0; i < *loop.state().ring_head; ++i) {
    EXPECT_EQ(loop.state().ring[i].token, 7);
    ++seen[loop.state().ring[i].row];
  }
  EXPECT_EQ(seen, (std::map<int, int>{{0, 1}, {1, 4}, {2, 2}, {3, 8}}));

  EXPECT_EQ(loop.run(5, {2, 5, 3, 9}), 5);
  EXPECT_EQ(loop.state().row[3].status, RowStatus::kRunning);
  EXPECT_EQ(loop.state().position[3], loop.state().row[3].length);
  EXPECT_EQ(loop.run(1, {9, 9, 9, 9}), 1);
  EXPECT_EQ(loop.run(100, {9, 9, 9, 9}, 1), 1);  // asked to yield
}

TEST(AdvanceTiming, Round) {
  Loop loop;
  constexpr int kRounds = 256;
  cudaEvent_t begin;
  cudaEvent_t end;
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  MirroredState state(
      {.rows = 64, .max_seq_len = 2000, .tokens = 64, .lanes = 64, .logit_rows = 64});
  fill_decode_tables(state.host, 64);
  state.host.counts->feed = 1;
  for (int r = 0; r < 64; ++r) state.host.row[r].max_length = 2000;
  for (int r = 0; r < 64; ++r) state.host.sampled[r] = 7;
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  for (const bool dependent : {false, true}) {
    state.upload();
    Launch launch = test_launch(dependent);
    launch.stream = stream;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
    for (int i = 0; i < kRounds; ++i) advance({.state = state.device}, launch);
    cudaGraph_t graph;
    check(cudaStreamEndCapture(stream, &graph), "capture");
    cudaGraphExec_t program;
    check(cudaGraphInstantiate(&program, graph, 0), "instantiate");
    float ms = 0;
    for (int pass = 0; pass < 3; ++pass) {
      check(cudaEventRecord(begin, stream), "record");
      check(cudaGraphLaunch(program, stream), "launch");
      check(cudaEventRecord(end, stream), "record");
      check(cudaEventSynchronize(end), "rounds");
      check(cudaEventElapsedTime(&ms, begin, end), "time");
    }
    std::printf("advance, 64 lanes%s: %.2f us a round\n", dependent ? ", dependent launch" : "",
                1e3 * ms / kRounds);
    check(cudaGraphExecDestroy(program), "graph");
    check(cudaGraphDestroy(graph), "graph");
  }
  check(cudaStreamDestroy(stream), "stream");
  check(cudaEventDestroy(begin), "event");
  check(cudaEventDestroy(end), "event");
}

}  // namespace
}  // namespace pianola::cuda
