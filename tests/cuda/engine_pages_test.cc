// Caches whose pages come as rows grow, on a GPU: nothing is captured again, the tokens are those
// of caches that are there as a whole, and where memory ends is an error that rows survive.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <memory>

#include "cuda/engine_fixture.h"
#include "engine/engine_audit.h"
#include "expect_error.h"

namespace pianola::cuda {
namespace {

constexpr int kCeiling = 1 << 17;

// A page holds so many tokens of a layer's keys of the tiny llamas, f16: [2 heads, 16].
constexpr int kPageTokens = (2 << 20) / 64;

void map_all(Engine& engine) {
  DeviceMemory& caches = *EngineTestAccess::impl(engine).cache_memory;
  caches.require(0, caches.size());
}

void expect_nothing_captured(const Engine& engine, const EngineCounters& before) {
  const EngineCounters now = engine.counters();
  EXPECT_EQ(now.captures, before.captures);
  EXPECT_EQ(now.capture_bytes, before.capture_bytes);
  EXPECT_EQ(now.plans, before.plans);
  EXPECT_EQ(now.address_hash, before.address_hash);
  EXPECT_EQ(now.cache_reserved, before.cache_reserved);
}

// --- Memory -----------------------------------------------------------------------------------

TEST(CudaPages, SmallComeZeroedAndGoBack) {
  const auto backend = make_backend("cuda", {});
  const std::size_t page = backend->page_bytes();
  ASSERT_GT(page, 0U);
  backend->allocate(page, MemoryUse::kOnDemand)->require(0, 1);  // for what the driver keeps
  const std::size_t before = free_memory();
  {
    const auto memory = backend->allocate(1000 * page + 5, MemoryUse::kOnDemand);
    EXPECT_EQ(free_memory(), before);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory->data()) % page, 0U);
    const auto byte_at = [&](std::size_t at) {
      std::byte value{1};
      backend->read(&value, memory->data() + at, 1);
      return value;
    };
    const std::byte seven{7};
    memory->require(3 * page - 1, 2);
    memory->require(1000 * page, 5);
    EXPECT_EQ(memory->resident_bytes(), 3 * page);
    EXPECT_GE(before - free_memory(), 3 * page);
    EXPECT_EQ(byte_at(3 * page), std::byte{0});
    backend->write(memory->data() + 3 * page, &seven, 1);
    backend->write(memory->data() + 1000 * page + 4, &seven, 1);
    memory->require(2 * page, 2 * page);
    EXPECT_EQ(byte_at(3 * page), seven) << "a page that was there";
    memory->give_back(3 * page, page);
    EXPECT_EQ(memory->resident_bytes(), 2 * page);
    memory->require(3 * page, 1);
    EXPECT_EQ(byte_at(3 * page), std::byte{0}) << "a page that came again";
    EXPECT_EQ(byte_at(1000 * page + 4), seven);
    const MemoryRange range = memory->first_resident({0, memory->size()});
    EXPECT_EQ(range.begin, 2 * page);
    EXPECT_EQ(range.end, 4 * page);
  }
  EXPECT_EQ(free_memory(), before);
}

// --- Growth -----------------------------------------------------------------------------------

TEST(CudaPages, RowsGrowThroughPagesWithTheTokensOfWholeCaches) {
  const auto model = tiny_llama("f16");
  const EngineOptions options{.backend = "cuda", .max_seq_len = kCeiling, .slots = 2};
  // The first crosses into another page in its prompt and again in its answer.
  const std::vector<RowPlan> plans = {
      {prompt(1, 2 * kPageTokens - 100), sampled(1, 2 * kPageTokens + 200)},
      {prompt(2, 300), sampled(2, 700)}};
  std::vector<RowTrace> expected;
  {
    Engine whole(model, options);
    map_all(whole);
    EXPECT_GE(whole.counters().cache_resident, whole.counters().cache_reserved);
    expected = play(whole, plans, Drive::kLoop);
  }
  const MemoryPlan plan = Engine::plan(*model, options);
  for (const Drive drive : {Drive::kStep, Drive::kLoop, Drive::kStream}) {
    SCOPED_TRACE(static_cast<int>(drive));
    const std::size_t free = free_memory();
    Engine engine(model, options);
    const EngineCounters loaded = engine.counters();
    EXPECT_EQ(loaded.cache_reserved, plan.cache);
    EXPECT_EQ(loaded.cache_resident, 0U);
    EXPECT_LT(plan.cache_at_first, plan.cache / 4);
    EXPECT_LT(free - free_memory(),
              plan.total - plan.cache + loaded.capture_bytes + (std::size_t{64} << 20));
    Session session(engine, plans);
    const std::size_t prompts = engine.counters().cache_resident;
    EXPECT_GT(prompts, plan.cache_at_first);
    EXPECT_LT(prompts, plan.cache / 2);
    session.decode(drive);
    EXPECT_GT(engine.counters().cache_resident, prompts);
    if (drive == Drive::kLoop) {
      EXPECT_EQ(session.launches(), 1U);
    }
    const std::vector<RowTrace> traces = session.close();
    for (std::size_t row = 0; row < traces.size(); ++row) {
      EXPECT_EQ(difference(traces[row], expected[row]), "") << "row " << row;
    }
    expect_nothing_captured(engine, loaded);
  }
}

TEST(CudaPages, SmallPoisonForksAndSnapshotsTouchOnlyWhatThereIs) {
  const auto model = tiny_llama("q8_0");
  Engine engine(model, {.backend = "cuda", .max_seq_len = kCeiling, .slots = 4});
  const EngineCounters loaded = engine.counters();
  const auto go_on = [&](int row) {
    std::vector<TokenId> tokens;
    engine.append(row, {});
    for (int i = 0; i < 20; ++i) {
      EngineAudit::poison(engine);
      for (const TokenEvent& event : engine.step({&row, 1})) tokens.push_back(event.token);
    }
    return tokens;
  };
  const int row = engine.open_row({});
  engine.append(row, prompt(3, 100));
  engine.step();
  const RowSnapshot snapshot = engine.snapshot(row);
  const int fork = engine.fork(row, 1, {}).at(0);
  const int other = engine.open_row({});
  engine.swap(row, other);
  const int restored = engine.open_row({});
  engine.restore(restored, snapshot);
  const std::vector<TokenId> tokens = go_on(other);
  EXPECT_EQ(tokens.size(), 20U);
  EXPECT_EQ(go_on(fork), tokens);
  EXPECT_EQ(go_on(restored), tokens);
  EXPECT_LE(engine.counters().cache_resident,
            4 * Engine::plan(*model, {.backend = "cuda", .max_seq_len = kCeiling, .slots = 4})
                    .cache_at_first);
  expect_nothing_captured(engine, loaded);
}

// --- Where memory ends ------------------------------------------------------------------------

TEST(CudaPages, ALimitIsKeptAndWhatFitsInPartIsLoaded) {
  const auto model = tiny_llama("q8_0");
  EngineOptions options{.backend = "cuda", .max_seq_len = kCeiling, .slots = 2};
  const MemoryPlan whole = Engine::plan(*model, options);
  options.memory_limit = whole.total - whole.cache + whole.cache_at_first;
  const MemoryPlan plan = Engine::plan(*model, options);
  EXPECT_FALSE(plan.fits());
  EXPECT_TRUE(plan.loads());
  Engine engine(model, options);
  const int a = engine.open_row({});
  engine.append(a, prompt(1, 50));
  engine.run(10);
  const int b = engine.open_row({});
  engine.append(b, prompt(2, 50));
  expect_error(ErrorCode::kOutOfMemory, "no memory for its caches", [&] { engine.step({&b, 1}); });
  EXPECT_TRUE(engine.healthy());
  EXPECT_EQ(engine.length(b), 0);
  EXPECT_FALSE(engine.run(10, {&a, 1}).empty());
  engine.close_row(a);
  EXPECT_FALSE(engine.step().empty());
  options.memory_limit -= 1;
  expect_error(ErrorCode::kOutOfMemory, "it does not fit", [&] { Engine(model, options); });
}

// All that is left of the device's memory, in pieces.
class Ballast {
 public:
  Ballast() {
    for (std::size_t size = std::size_t{1} << 34; size >= std::size_t{2} << 20; size /= 2) {
      void* piece = nullptr;
      while (cudaMalloc(&piece, size) == cudaSuccess) pieces_.push_back(piece);
      cudaGetLastError();
    }
  }
  ~Ballast() {
    for (void* piece : pieces_) cudaFree(piece);
  }
  Ballast(const Ballast&) = delete;
  Ballast& operator=(const Ballast&) = delete;

 private:
  std::vector<void*> pieces_;
};

TEST(CudaPages, ADeviceThatIsFullStopsOnlyWhoNeedsMore) {
  const DeepModel deep;  // a first token takes a page of each of 128 regions
  const EngineOptions options{.backend = "cuda", .max_seq_len = 1 << 16, .slots = 2};
  const std::vector<RowPlan> plans = {{prompt(1, 60), sampled(1, 200)},
                                      {prompt(2, 60), sampled(2, 200)}};
  std::vector<RowTrace> expected;
  {
    Engine alone(deep.model(), options);
    expected = play(alone, plans, Drive::kLoop);
  }
  Engine engine(deep.model(), options);
  const EngineCounters loaded = engine.counters();
  const int a = engine.open_row(plans[0].options);
  engine.append(a, plans[0].prompt);
  std::vector<TokenId> said_a;
  std::vector<TokenId> said_b;
  const auto compute = [&](int row, std::vector<TokenId>& said, bool run) {
    for (const TokenEvent& event : run ? engine.run(1 << 20, {&row, 1}) : engine.step({&row, 1})) {
      said.push_back(event.token);
    }
  };
  compute(a, said_a, false);
  const int b = engine.open_row(plans[1].options);
  engine.append(b, plans[1].prompt);
  {
    const Ballast ballast;
    for (int i = 0; i < 2; ++i) {
      expect_error(ErrorCode::kOutOfMemory, "no memory for its caches", [&] { engine.step(); });
      expect_error(ErrorCode::kOutOfMemory, "no memory for its caches",
                   [&] { engine.stream({&b, 1}); });
    }
    EXPECT_TRUE(engine.healthy());
    while (engine.status(a) == RowStatus::kRunning) compute(a, said_a, true);
  }
  while (engine.status(b) == RowStatus::kRunning) compute(b, said_b, true);
  EXPECT_EQ(said_a, expected[0].tokens);
  EXPECT_EQ(said_b, expected[1].tokens);
  expect_nothing_captured(engine, loaded);
}

// What a page costs, for docs/static-cache.md.
TEST(CudaPages, PagesTakeLittleTime) {
  const auto backend = make_backend("cuda", {});
  const std::size_t page = backend->page_bytes();
  constexpr int kPages = 512;
  const auto memory = backend->allocate(kPages * page, MemoryUse::kOnDemand);
  memory->require(0, 1);
  const auto begin = std::chrono::steady_clock::now();
  memory->require(0, kPages * page);
  check(cudaDeviceSynchronize(), "clearing pages");
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  std::printf("  %.1f us a page of %zu KiB\n", seconds.count() / (kPages - 1) * 1e6, page >> 10);
  EXPECT_LT(seconds.count(), 1);
}

}  // namespace
}  // namespace pianola::cuda
