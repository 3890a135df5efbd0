// What a user sees of a GPU that fails: an error with a type, never a hang, nothing left behind.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <optional>
#include <thread>

#include "backends/cuda/cuda_error.h"
#include "cuda/engine_fixture.h"
#include "cuda/trap_kernel.h"

namespace pianola::cuda {
namespace {

using testing::HasSubstr;

std::optional<Error> error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

// --- A model without kernels ------------------------------------------------------------------

TEST(CudaEngine, RefusesABiasOfTooManyDistancesAtLoad) {
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / fmt::format("pianola_t5_{}", ::getpid());
  std::filesystem::copy(golden_folder() / "t5" / "gated" / "hf", folder);
  const std::filesystem::path config = folder / "config.json";
  std::string text = read_text_file(config, 1 << 20);
  const std::string field = "\"relative_attention_max_distance\": 128";
  ASSERT_NE(text.find(field), std::string::npos);
  text.replace(text.find(field), field.size(), "\"relative_attention_max_distance\": 1025");
  std::ofstream(config) << text;
  const auto model = CausalModel::open(folder);
  const std::optional<Error> error =
      error_of([&] { Engine(model, {.backend = "cuda", .max_seq_len = 64}); });
  std::filesystem::remove_all(folder);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kUnsupported);
  EXPECT_THAT(error->what(),
              HasSubstr("attention: a relative position bias that tells apart more"));
}

// --- A device that is lost ---------------------------------------------------------------------

// All of this runs in a process of its own: a kernel that traps ends the process's use of the GPU.
constexpr unsigned kMostSeconds = 30;

struct Loss {
  const char* name;
  bool eager;
  // Called again and again on a row that decodes; without `next`, the device is lost meanwhile.
  std::function<void(Engine&, int)> compute;
  // The first call after the loss.
  std::function<void(Engine&, int)> next;
};

void PrintTo(const Loss& loss, std::ostream* out) { *out << loss.name; }

void expect_device_error(const std::optional<Error>& error, const char* what) {
  if (!error || error->code() != ErrorCode::kDevice) {
    fail(ErrorCode::kInternal, "{}: expected a device error, found {}", what,
         error ? error->what() : "none");
  }
}

void lose_the_device(const Loss& loss) {
  const auto model = tiny_llama("q8_0");
  Engine engine(model, {.backend = "cuda", .max_seq_len = 4096, .slots = 2, .eager = loss.eager});
  const int row = engine.open_row(sampled(0, 4096));
  engine.append(row, prompt(1, 20));
  for (int i = 0; i < 3; ++i) loss.compute(engine, row);
  PIANOLA_CHECK(engine.healthy(), "healthy before");

  cudaStream_t beside = nullptr;
  check(cudaStreamCreateWithFlags(&beside, cudaStreamNonBlocking), "a stream");
  ::alarm(kMostSeconds);  // a hang is a signal
  std::optional<Error> error;
  if (loss.next) {
    check(launch_trap(beside), "the trap");
    PIANOLA_CHECK(cudaStreamSynchronize(beside) != cudaSuccess, "the kernel did not trap");
    error = error_of([&] { loss.next(engine, row); });
  } else {
    std::thread other([beside] {
      std::this_thread::sleep_for(std::chrono::milliseconds(3));
      launch_trap(beside);
    });
    while (!error && engine.has_work()) error = error_of([&] { loss.compute(engine, row); });
    other.join();
  }
  expect_device_error(error, "the next call");
  std::fprintf(stderr, "%s: %s\n", loss.name, error->what());
  PIANOLA_CHECK(!engine.healthy(), "still healthy after '{}'", error->what());
  // Whoever asks again is told again, and none of it takes long.
  const std::vector<std::int32_t> tokens = {1, 2};
  expect_device_error(error_of([&] { engine.step(); }), "step()");
  expect_device_error(error_of([&] { engine.run(100); }), "run()");
  expect_device_error(error_of([&] { engine.stream({&row, 1}); }), "stream()");
  expect_device_error(error_of([&] { engine.append(row, tokens); }), "append()");
  PIANOLA_CHECK(!engine.healthy(), "healthy again");
  // Nor can a second engine be made on it.
  expect_device_error(error_of([&] { Engine(model, {.backend = "cuda", .max_seq_len = 64}); }),
                      "a new engine");
}

[[noreturn]] void run_in_child(const Loss& loss) {
  int status = 1;
  try {
    ::alarm(4 * kMostSeconds);
    lose_the_device(loss);
    std::fprintf(stderr, "the engine is gone, the process goes on\n");
    status = 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
  }
  std::fflush(stderr);
  std::_Exit(status);
}

const auto kStepRow = [](Engine& engine, int) { engine.step(); };
const auto kRunRow = [](Engine& engine, int) { engine.run(500); };
const auto kStreamRow = [](Engine& engine, int row) { engine.stream({&row, 1}); };

std::vector<Loss> losses() {
  return {
      {"InTheLoopOfStream", false, kStreamRow, {}},
      {"InTheLoopOfRun", false, kRunRow, {}},
      {"InAStep", false, kStepRow, {}},
      {"OpByOp", true, kStepRow, {}},
      {"InALoopBeforeStep", false, kStreamRow, kStepRow},
      {"InALoopBeforeOpenRow", false, kStreamRow, [](Engine& e, int) { e.open_row({}); }},
      {"InALoopBeforeKeepFirst", false, kStreamRow,
       [](Engine& e, int row) { e.keep_first(row, 3); }},
      {"BetweenStepsBeforeOpenRow", false, kStepRow, [](Engine& e, int) { e.open_row({}); }},
      {"BetweenStepsBeforeAppend", false, kStepRow,
       [](Engine& e, int row) { e.append(row, std::vector<std::int32_t>{1}); }},
  };
}

class CudaDeviceDeathTest : public testing::TestWithParam<Loss> {
 protected:
  // The child is started anew: it inherits nothing of this process's use of the GPU.
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

TEST_P(CudaDeviceDeathTest, ALostDeviceIsATypedError) {
  EXPECT_EXIT(run_in_child(GetParam()), testing::ExitedWithCode(0), "the process goes on");
}

INSTANTIATE_TEST_SUITE_P(Losses, CudaDeviceDeathTest, testing::ValuesIn(losses()),
                         [](const auto& loss) { return loss.param.name; });

// --- Memory ------------------------------------------------------------------------------------

class CudaMemory : public testing::Test {
 protected:
  // The first engine of a process pays for what the driver keeps.
  void SetUp() override { load({.backend = "cuda", .max_seq_len = 256}); }

  void load(const EngineOptions& options) {
    Engine engine(model_, options);
    play(engine, {{prompt(1, 20), sampled(0, 40)}}, Drive::kLoop);
  }

  // Options of an engine whose plan needs at least so many bytes.
  EngineOptions options_for(std::size_t bytes) const {
    EngineOptions options{.backend = "cuda", .max_seq_len = 1 << 22, .slots = 1};
    while (Engine::plan(*model_, options).total < bytes) {
      PIANOLA_CHECK(options.slots < 1024, "no engine is as large as {} bytes", bytes);
      options.slots *= 2;
    }
    return options;
  }

  std::shared_ptr<const CausalModel> model_ = tiny_llama("q8_0");
};

TEST_F(CudaMemory, WhatDoesNotFitIsRefusedBeforeAnythingIsAllocated) {
  EngineOptions options = options_for(free_memory() + 1);
  options.memory_limit = Engine::plan(*model_, options).state;
  const MemoryPlan plan = Engine::plan(*model_, options);
  EXPECT_FALSE(plan.fits());
  EXPECT_FALSE(plan.loads());
  EXPECT_GT(plan.cache, plan.total / 2);
  error_of([&] { Engine(model_, options); });  // once, for what the driver keeps
  const std::size_t before = free_memory();
  const auto error = error_of([&] { Engine(model_, options); });
  EXPECT_EQ(free_memory(), before);
  ASSERT_TRUE(error) << "it was not refused";
  EXPECT_EQ(error->code(), ErrorCode::kOutOfMemory);
  for (const char* part : {"memory plan (cuda backend)", "weights", "cache", "state", "workspace",
                           "total", "available", "it does not fit"}) {
    EXPECT_THAT(error->what(), HasSubstr(part));
  }
  load({.backend = "cuda", .max_seq_len = 256});
}

TEST_F(CudaMemory, AnEngineLeavesNothingBehind) {
  const std::size_t before = free_memory();
  const EngineOptions options{.backend = "cuda", .max_seq_len = 1 << 20, .slots = 4};
  const MemoryPlan plan = Engine::plan(*model_, options);
  EXPECT_GT(plan.total, std::size_t{512} << 20);
  {
    Engine engine(model_, options);
    const std::size_t used = before - free_memory();
    std::printf("  planned %.1f MiB, used %.1f MiB, %.1f MiB of it for graphs\n",
                static_cast<double>(plan.total) / (1 << 20), static_cast<double>(used) / (1 << 20),
                static_cast<double>(engine.counters().capture_bytes) / (1 << 20));
    EXPECT_GE(used, plan.total - plan.cache);
    EXPECT_LT(used, plan.total);
  }
  for (int i = 0; i < 3; ++i) load(options);
  EXPECT_NEAR(static_cast<double>(free_memory()), static_cast<double>(before), 64 << 20);
  const std::size_t settled = free_memory();
  for (int i = 0; i < 3; ++i) load(options);
  EXPECT_EQ(free_memory(), settled);
}

TEST_F(CudaMemory, WhatOthersHoldIsNotAvailable) {
  constexpr std::size_t kLeft = std::size_t{2} << 30;
  constexpr std::size_t kWanted = std::size_t{4} << 30;
  const EngineOptions options = options_for(kWanted);
  const MemoryPlan alone = Engine::plan(*model_, options);
  ASSERT_TRUE(alone.fits()) << alone.to_string();
  void* others = nullptr;
  const std::size_t held = free_memory() - kLeft;
  check(cudaMalloc(&others, held), "memory of others");
  const MemoryPlan shared = Engine::plan(*model_, options);
  EngineOptions limited = options;
  limited.memory_limit = shared.state;
  const std::size_t before = free_memory();
  const auto error = error_of([&] { Engine(model_, limited); });
  const std::size_t after = free_memory();
  const auto small = error_of([&] { load({.backend = "cuda", .max_seq_len = 256}); });
  const auto part = error_of([&] { load(options); });  // rows that stay short
  check(cudaFree(others), "memory of others");

  EXPECT_LE(shared.available, kLeft);
  EXPECT_NEAR(static_cast<double>(alone.available - shared.available), static_cast<double>(held),
              256 << 20);
  EXPECT_EQ(shared.total, alone.total);
  EXPECT_FALSE(shared.fits());
  EXPECT_TRUE(shared.loads());
  EXPECT_FALSE(part) << part->what();
  ASSERT_TRUE(error) << "it was not refused";
  EXPECT_EQ(error->code(), ErrorCode::kOutOfMemory);
  EXPECT_EQ(after, before);
  EXPECT_FALSE(small) << small->what();
  load(options);
}

TEST_F(CudaMemory, ADeviceThatIsNotThereIsAnInvalidArgument) {
  for (const int device : {-1, 64}) {
    const auto error = error_of([&] { Engine(model_, {.backend = "cuda", .device = device}); });
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error->what(), HasSubstr(std::to_string(device)));
  }
}

}  // namespace
}  // namespace pianola::cuda
