// Models with an encoder on a GPU: executors agree bit for bit, inputs of different lengths decode
// together, and nothing is allocated or captured once there are Programs.
#include <gtest/gtest.h>

#include <cstdio>

#include "cuda/counted_new.h"
#include "cuda/engine_fixture.h"
#include "engine/engine_audit.h"

namespace pianola::cuda {
namespace {

constexpr int kTokens = 128;  // of the vocabulary

// Inputs on both sides of where a block, a Program and the largest distance end; prompts too.
std::vector<RowPlan> rows_of(std::size_t count) {
  constexpr int kInputs[] = {150, 1, 63, 64, 65, 129, 17, 300};
  constexpr int kPrompts[] = {1, 63, 3, 64, 1, 130, 1, 2};
  std::vector<RowPlan> plans;
  for (std::size_t i = 0; i < count; ++i) {
    const int seed = static_cast<int>(i) + 40;
    plans.push_back({prompt(seed, kPrompts[i % 8], kTokens), sampled(seed, 210 + 7 * seed % 50),
                     prompt(seed + 7, kInputs[i % 8] + static_cast<int>(i / 8), kTokens)});
  }
  return plans;
}

class CudaEncoder : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { model_ = tiny_t5(GetParam()); }
  static EngineOptions options(int slots, const std::string& cache_type = "f16") {
    return {.backend = "cuda",
            .max_seq_len = 400,
            .slots = slots,
            .max_input_len = 320,
            .chunk = 64,
            .cache_type = cache_type};
  }

  std::shared_ptr<const CausalModel> model_;
};

TEST_P(CudaEncoder, EveryExecutorGivesTheSameBits) {
  for (const char* type : {"f16", "f32", "bf16", "int8", "fp8"}) {
    for (const std::size_t count : {std::size_t{1}, std::size_t{3}, std::size_t{16}}) {
      if (count == 16 && std::string(type) != "f16") continue;
      SCOPED_TRACE(std::string(type) + ", rows " + std::to_string(count));
      const std::vector<RowPlan> plans = rows_of(count);
      std::vector<RowTrace> expected;
      for (const Executor& executor : kExecutors) {
        EngineOptions own = options(static_cast<int>(count), type);
        own.eager = executor.eager;
        own.dependent_launch = executor.dependent;
        Engine engine(model_, own);
        const std::vector<RowTrace> traces = play(engine, plans, executor.drive);
        if (expected.empty()) expected = traces;
        for (std::size_t row = 0; row < count; ++row) {
          EXPECT_EQ(difference(traces[row], expected[row]), "") << executor.name << ", row " << row;
          EXPECT_EQ(traces[row].status, RowStatus::kLength);
        }
      }
    }
  }
}

// Rows of inputs of different lengths, each as it is alone in an engine.
TEST_P(CudaEncoder, ARowAmongOthersIsTheRowAlone) {
  const std::vector<RowPlan> plans = rows_of(8);
  Engine together(model_, options(8));
  const std::vector<RowTrace> traces = play(together, plans, Drive::kLoop);
  for (std::size_t row = 0; row < plans.size(); ++row) {
    Engine alone(model_, options(1));
    EXPECT_EQ(difference(play(alone, {plans[row]}, Drive::kLoop)[0], traces[row]), "") << row;
  }
}

// Decoding reads every position of the input that is there, and none behind it.
TEST_P(CudaEncoder, ADamagedInputFailsItsRowAndNoOther) {
  Engine engine(model_, options(2));
  const std::vector<RowPlan> plans = rows_of(2);
  std::vector<int> rows;
  for (const RowPlan& plan : plans) {
    rows.push_back(engine.open_row(plan.options));
    engine.encode(rows.back(), plan.input);
    engine.append(rows.back(), plan.prompt);
  }
  EngineAudit::poison(engine);
  engine.step();
  for (const int row : rows) EXPECT_EQ(engine.status(row), RowStatus::kRunning);
  auto& impl = EngineTestAccess::impl(engine);
  const std::vector<std::byte> nan(2, std::byte{0xFF});
  for (const LayerCacheView& view : impl.caches) {
    if (view.holds != CacheHolds::kInput) continue;
    // The last position of the first row's input, its first head.
    const int last = engine.input_length(rows[0]) - 1;
    const std::size_t at = cache_index(last, 0, view.kv_heads, view.key_dim) * nan.size();
    EngineTestAccess::write(engine, view.key_slot(impl.rows->row(rows[0]).input_slot) + at, nan);
    break;
  }
  engine.run(10);
  EXPECT_EQ(engine.status(rows[0]), RowStatus::kFailed);
  EXPECT_EQ(engine.status(rows[1]), RowStatus::kRunning);
}

TEST_P(CudaEncoder, InputsAndRoundsAllocateAndCaptureNothing) {
  Engine engine(model_, options(3));
  const std::vector<RowPlan> plans = rows_of(8);
  std::vector<int> rows;
  for (int i = 0; i < 3; ++i) rows.push_back(engine.open_row(sampled(i, 400)));
  const auto round = [&](std::size_t turn, Drive drive) {
    for (std::size_t i = 0; i < rows.size(); ++i) {
      engine.reset(rows[i]);
      const RowPlan& plan = plans[(turn + i) % plans.size()];
      engine.encode(rows[i], plan.input);
      engine.append(rows[i], plan.prompt);
    }
    for (int i = 0; i < 30 && engine.has_work(); ++i) compute(engine, drive);
  };
  for (std::size_t turn = 0; turn < 16; ++turn) round(turn, Drive::kStep);
  for (std::size_t turn = 0; turn < 16; ++turn) round(turn, Drive::kLoop);
  check(cudaDeviceSynchronize(), "warm-up");
  const std::size_t memory = free_memory();
  const EngineCounters before = engine.counters();
  const std::size_t blocks = allocation_count();
  for (std::size_t turn = 0; turn < 40; ++turn) round(turn, Drive::kStep);
  for (std::size_t turn = 0; turn < 40; ++turn) round(turn, Drive::kLoop);
  const std::size_t new_blocks = allocation_count() - blocks;
  const EngineCounters after = engine.counters();
  check(cudaDeviceSynchronize(), "the rounds");
  EXPECT_EQ(new_blocks, 0U) << "blocks from operator new";
  EXPECT_EQ(free_memory(), memory);
  EXPECT_EQ(after.captures, before.captures);
  EXPECT_EQ(after.plans, before.plans);
  EXPECT_EQ(after.address_hash, before.address_hash);
  EXPECT_GT(after.steps, before.steps + 1000);
}

// An input is one graph launch, too.
TEST_P(CudaEncoder, AnInputIsALaunch) {
  Engine engine(model_, options(1));
  const int row = engine.open_row({});
  for (const int length : {1, 64, 65, 320}) {
    const EngineCounters before = engine.counters();
    engine.encode(row, prompt(3, length, kTokens));
    EXPECT_EQ(engine.counters().launches - before.launches, 1U);
    EXPECT_EQ(engine.counters().captures, before.captures);
  }
}

INSTANTIATE_TEST_SUITE_P(Models, CudaEncoder, testing::Values("gated", "relu"));

}  // namespace
}  // namespace pianola::cuda
