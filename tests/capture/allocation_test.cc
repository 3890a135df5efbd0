// After warm-up, no step allocates from the heap. malloc and its kin are counted for the whole
// process, so allocations of worker threads and of libraries count as well.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <string>
#include <utility>

#include "models/golden.h"
#include "models/model.h"
#include "pianola/engine.h"
#include "sanitized.h"

#ifdef PIANOLA_TEST_SANITIZED
#define PIANOLA_COUNTS_ALLOCATIONS 0
#else
#define PIANOLA_COUNTS_ALLOCATIONS 1
#endif

namespace {
std::atomic<std::size_t> allocations = 0;
}

#if PIANOLA_COUNTS_ALLOCATIONS
extern "C" {
void* __libc_malloc(std::size_t size);
void* __libc_calloc(std::size_t count, std::size_t size);
void* __libc_realloc(void* block, std::size_t size);
void* malloc(std::size_t size) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  return __libc_malloc(size);
}
void* calloc(std::size_t count, std::size_t size) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  return __libc_calloc(count, size);
}
void* realloc(void* block, std::size_t size) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  return __libc_realloc(block, size);
}
}
#endif

namespace pianola {
namespace {

struct Case {
  const char* backend;
  const char* file;  // below the folder of the models' goldens
  const char* cache_type = "f16";
};

class AllocationTest : public testing::TestWithParam<Case> {};

TEST_P(AllocationTest, DecodingAllocatesNothing) {
  if (!PIANOLA_COUNTS_ALLOCATIONS) GTEST_SKIP() << "a sanitizer owns malloc in this build";
  const auto model = CausalModel::open(golden_folder() / GetParam().file);
  Engine engine(model, {.backend = GetParam().backend,
                        .threads = 2,
                        .max_seq_len = 512,
                        .slots = 3,
                        .cache_type = GetParam().cache_type});
  RowOptions options;
  options.sampling.temperature = 0.7F;
  options.sampling.top_k = 40;
  options.sampling.top_p = 0.9F;
  options.sampling.repeat_penalty = 1.1F;
  options.sampling.logprobs = true;
  std::vector<int> rows;
  const std::vector<std::int32_t> prompt = {1, 2, 3, 4, 5};
  for (int i = 0; i < 3; ++i) {
    options.sampling.seed = static_cast<std::uint64_t>(i);
    rows.push_back(engine.open_row(options));
    if (engine.max_input_len() > 0) engine.encode(rows.back(), prompt);
    engine.append(rows.back(), prompt);
  }
  for (int i = 0; i < 3; ++i) engine.step();  // warm-up

  const std::size_t before = allocations.load();
  std::size_t tokens = 0;
  for (int i = 0; i < 100; ++i) tokens += engine.step().size();
  for (int i = 0; i < 10; ++i) tokens += engine.run(10).size();
  for (const int row : rows) engine.drop_last(row, 8);
  for (const int row : rows) engine.append(row, prompt);  // a prompt and decode tokens in one step
  for (int i = 0; i < 100; ++i) tokens += engine.step().size();
  for (const int row : rows) {
    engine.reset(row);
    if (engine.max_input_len() > 0) engine.encode(row, prompt);
  }
  EXPECT_EQ(allocations.load() - before, 0U);
  EXPECT_EQ(tokens, 900U);
}

INSTANTIATE_TEST_SUITE_P(
    Backends, AllocationTest,
    testing::Values(Case{"reference", "llama/tied/q8_0.gguf"}, Case{"cpu", "llama/tied/q8_0.gguf"},
                    Case{"cpu", "llama/tied/q8_0.gguf", "int8"},
                    Case{"cpu", "llama/tied/q8_0.gguf", "fp8"},
                    Case{"reference", "qwen3_moe/all/f16.gguf"},
                    Case{"cpu", "qwen3_moe/all/f16.gguf"}, Case{"reference", "qwen3_5/hybrid/hf"},
                    Case{"cpu", "qwen3_5/hybrid/hf"}, Case{"reference", "bamba/hybrid/hf"},
                    Case{"cpu", "bamba/hybrid/hf"}, Case{"reference", "t5/gated/hf"},
                    Case{"cpu", "t5/relu/hf"}, Case{"reference", "deepseek/v2/hf"},
                    Case{"cpu", "deepseek/v3/hf"}, Case{"cpu", "deepseek/v2_lite/hf", "int8"},
                    Case{"reference", "gemma3/shared/hf"}, Case{"cpu", "gemma3/shared/hf"}));

TEST(AllocationCounter, Counts) {
  if (!PIANOLA_COUNTS_ALLOCATIONS) GTEST_SKIP() << "a sanitizer owns malloc in this build";
  const std::size_t before = allocations.load();
  std::vector<int>* block = new std::vector<int>(100);
  EXPECT_GE(allocations.load() - before, 2U);
  delete block;
}

}  // namespace
}  // namespace pianola
