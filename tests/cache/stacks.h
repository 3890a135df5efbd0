// The stacks that random sequences are played on, and what answers for them: an engine that
// computes a history at once.
//
//   for (const Stack& stack : stacks()) Engine(tiny_model(stack.model), engine_options(stack));
//   Oracle oracle(stack);
//   oracle.answer(history, {.way = 1}).token;
#pragma once

#include <rapidcheck.h>

#include <bit>
#include <map>
#include <ostream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cache/rows.h"
#include "engine_test_access.h"
#include "pianola/engine.h"

namespace pianola {

constexpr int kMaxSeqLen = 150;  // above two blocks: a ring of one block wraps twice
constexpr int kSlots = 3;

struct Stack {
  std::string name;
  std::string backend;
  std::string model;
  std::string cache_type;
  int rollback_depth = 16;
  int chunk = 16;
  bool exact = false;
  int checkpoints = 4;
  std::size_t page_bytes = 0;    // of the host; not 0: what no page was required for is not touched
  int max_seq_len = kMaxSeqLen;  // more: no row gets there, and slots have pages of their own
  bool eager = false;
  int pages = 0;  // that the keys of a layer, or its values, may take; 0: all that rows ask for

  bool on_gpu() const { return backend == "cuda"; }
};

inline void PrintTo(const Stack& stack, std::ostream* out) { *out << stack.name; }

// CMake says which backends a program tests: those of any machine, or the one of a GPU.
inline bool tests_gpu() { return std::string_view(PIANOLA_TEST_BACKENDS) == "cuda"; }

// A row's first tokens take a page of 2 MiB of each layer.
inline constexpr int kManyPages = 1 << 17;

inline const std::vector<Stack>& stacks() {
  static const std::vector<Stack> of_any_machine = {
      {"full", "cpu", "llama/untied", "f16"},
      {"full_int8", "cpu", "llama/untied", "int8", 1, 150},
      {"full_fp8", "cpu", "llama/untied", "fp8", 5, 64},
      {"window", "cpu", "mistral/window", "f16", 4, 33},
      {"window_int8", "cpu", "mistral/window", "int8", 40, 7},
      {"mixed_bf16", "cpu", "gemma3/mixed", "bf16", 9, 21},
      {"experts", "cpu", "gpt_oss/mixed", "f16", 16, 20},
      {"hybrid", "cpu", "qwen3_5/hybrid", "f16", 4, 16},
      {"hybrid_deep", "cpu", "qwen3_5/hybrid", "int8", 16, 40, false, 1},
      {"hybrid_no_checkpoints", "cpu", "qwen3_5/hybrid", "f16", 7, 9, false, 0},
      {"hybrid_shallow", "cpu", "qwen3_5/hybrid", "f16", 1, 24, false, 2},
      {"hybrid_exact", "cpu", "qwen3_5/hybrid", "f16", 3, 16, true, 4},
      {"hybrid_exact_int8", "cpu", "qwen3_5/hybrid", "int8", 12, 30, true, 0},
      {"ssm", "cpu", "bamba/hybrid", "f16", 4, 16},
      {"ssm_exact", "cpu", "bamba/hybrid", "f32", 3, 16, true, 2},
      {"reference_full", "reference", "llama/untied", "f16"},
      {"reference_window_int8", "reference", "mistral/window", "int8", 4, 33},
      {"reference_experts", "reference", "gpt_oss/mixed", "f16", 16, 20},
      {"reference_hybrid", "reference", "qwen3_5/hybrid", "f16", 4, 16},
      {"pages", "cpu", "llama/untied", "f16", 16, 16, false, 4, 4096},
      {"pages_int8", "cpu", "llama/untied", "int8", 1, 150, false, 4, 4096},
      {"pages_window", "cpu", "mistral/window", "f16", 4, 33, false, 4, 4096},
      {"pages_hybrid", "cpu", "qwen3_5/hybrid", "f16", 4, 16, false, 4, 4096},
      {"pages_many", "cpu", "llama/untied", "f16", 16, 16, false, 4, 4096, 1 << 12},
      {.name = "pages_few",  // of nine: one for 64 tokens of a row
       .backend = "cpu",
       .model = "llama/untied",
       .cache_type = "f16",
       .page_bytes = 4096,
       .pages = 4},
      {"reference_pages", "reference", "llama/untied", "f16", 16, 16, false, 4, 4096},
      {"reference_hybrid_exact", "reference", "qwen3_5/hybrid", "f16", 3, 16, true, 4},
      {"shared_kv", "cpu", "gemma3/shared", "f16", 4, 33},
      {"shared_kv_int8", "cpu", "gemma3/shared", "int8", 40, 7},
      {"pages_shared_kv", "cpu", "gemma3/shared", "f16", 4, 33, false, 4, 4096},
      {"reference_shared_kv", "reference", "gemma3/shared", "f16", 4, 33},
      {"latent", "cpu", "deepseek/v2_lite", "f16", 16, 20},
      {"latent_int8", "cpu", "deepseek/v3", "int8", 1, 150},
      {"pages_latent", "cpu", "deepseek/v3", "f16", 4, 33, false, 4, 4096},
      {"reference_latent", "reference", "deepseek/v2", "f16"}};
  static const std::vector<Stack> of_a_gpu = {
      {"full", "cuda", "llama/untied", "f16"},
      {"full_f32", "cuda", "llama/untied", "f32", 16, 70},
      {"full_bf16", "cuda", "llama/untied", "bf16", 2, 16},
      {"full_int8", "cuda", "llama/untied", "int8", 1, 150},
      {"full_fp8", "cuda", "llama/untied", "fp8", 5, 64},
      {"quantised", "cuda", "llama/q4", "f16", 16, 80},
      {"window", "cuda", "mistral/window", "f16", 4, 33},
      {"window_int8", "cuda", "mistral/window", "int8", 40, 7},
      {"window_fp8", "cuda", "mistral/window", "fp8", 1, 90},
      {"mixed_bf16", "cuda", "gemma3/mixed", "bf16", 9, 21},
      {"experts", "cuda", "gpt_oss/mixed", "f16", 16, 20},  // with windows and sinks
      {"experts_int8", "cuda", "gpt_oss/mixed", "int8", 3, 100},
      {"experts_shared", "cuda", "qwen2_moe/shared", "fp8", 16, 70},
      {"hybrid", "cuda", "qwen3_5/hybrid", "f16", 4, 16},
      {"hybrid_deep", "cuda", "qwen3_5/hybrid", "int8", 16, 40, false, 1},
      {"hybrid_no_checkpoints", "cuda", "qwen3_5/hybrid", "f16", 7, 9, false, 0},
      {"hybrid_shallow", "cuda", "qwen3_5/hybrid", "f32", 1, 24, false, 2},
      {"hybrid_exact", "cuda", "qwen3_5/hybrid", "f16", 3, 16, true, 4},
      {"hybrid_exact_int8", "cuda", "qwen3_5/hybrid", "int8", 12, 100, true, 0},
      {"hybrid_experts", "cuda", "qwen3_next/experts", "bf16", 5, 70},
      {"ssm", "cuda", "bamba/hybrid", "f16", 4, 16},
      {"ssm_deep", "cuda", "bamba/hybrid", "fp8", 16, 100, false, 1},
      {"ssm_exact", "cuda", "bamba/hybrid", "f32", 3, 16, true, 2},
      {"latent", "cuda", "deepseek/v2_lite", "f16", 16, 20},
      {"latent_int8", "cuda", "deepseek/v3", "int8", 1, 150},
      {"latent_f32", "cuda", "deepseek/v2", "f32", 5, 70},
      {"pages_latent", "cuda", "deepseek/v3", "f16", 4, 33, false, 4, 0, kManyPages},
      {"pages", "cuda", "llama/untied", "f16", 16, 16, false, 4, 0, kManyPages},
      {"pages_int8", "cuda", "llama/untied", "int8", 1, 150, false, 4, 0, kManyPages},
      {"pages_mixed", "cuda", "gemma3/mixed", "f16", 4, 33, false, 4, 0, kManyPages},
      {"pages_hybrid", "cuda", "qwen3_5/hybrid", "f16", 4, 16, false, 4, 0, kManyPages},
      {.name = "pages_few",  // two rows can have one
       .backend = "cuda",
       .model = "llama/untied",
       .cache_type = "f16",
       .max_seq_len = kManyPages,
       .pages = 2},
      {.name = "eager",
       .backend = "cuda",
       .model = "qwen3_5/hybrid",
       .cache_type = "f16",
       .rollback_depth = 4,
       .eager = true},
      {.name = "heads64",  // of a size that the kernels of one token take
       .backend = "cuda",
       .model = "llama/heads64",
       .cache_type = "f16"}};
  return tests_gpu() ? of_a_gpu : of_any_machine;
}

// A GPU adds up a long prompt in the order of decoding only when it is asked to; the others have
// one order.
inline EngineOptions engine_options(const Stack& stack) {
  return {.backend = stack.backend,
          .threads = 1,
          .max_seq_len = stack.max_seq_len,
          .slots = kSlots,
          .chunk = stack.chunk,
          .cache_type = stack.cache_type,
          .rollback_depth = stack.rollback_depth,
          .exact_rollback = stack.exact,
          .checkpoints = stack.checkpoints,
          .logits = true,
          .eager = stack.eager,
          .batch_invariant = true};
}

// How a row chooses its tokens: one of a few ways.
struct Choosing {
  int way = 0;
  std::uint32_t choice = 0;
  auto operator<=>(const Choosing&) const = default;
};

inline SamplingParams sampling_params(const Choosing& choosing) {
  SamplingParams p;
  p.logprobs = true;
  p.choice = choosing.choice;
  if (choosing.way == 0) return p;
  p.temperature = 0.8F;
  p.seed = 5;
  if (choosing.way == 1) return p;
  p.repeat_penalty = 1.2F;
  p.penalty_window = 20;
  return p;
}

struct Answer {
  TokenId token = 0;
  std::uint32_t logprob = 0;  // its bits
  bool operator==(const Answer&) const = default;
};

// Answers for histories, from an engine whose caches are as they were allocated.
class Oracle {
 public:
  explicit Oracle(const Stack& stack) : engine_(tiny_model(stack.model), options(stack)) {}

  Answer answer(const std::vector<TokenId>& history, const Choosing& choosing) {
    const auto [known, is_new] = known_.try_emplace({choosing, history});
    if (is_new) known->second = compute(history, choosing);
    const Answer answer = known->second;
    if (known_.size() > 50000) known_.clear();
    return answer;
  }

 private:
  static constexpr int kLongest = 256;  // above what a row of any stack holds

  static EngineOptions options(const Stack& stack) {
    EngineOptions o = engine_options(stack);
    o.max_seq_len = kLongest;
    o.slots = 1;
    o.chunk = kLongest;
    return o;
  }

  Answer compute(const std::vector<TokenId>& history, const Choosing& choosing) {
    DeviceMemory& caches = *EngineTestAccess::impl(engine_).cache_memory;
    zeros_.resize(caches.size());
    EngineTestAccess::write(engine_, caches.data(), zeros_);
    const int row = engine_.open_row({.sampling = sampling_params(choosing)});
    engine_.append(row, history);
    const auto events = engine_.step();
    RC_ASSERT(events.size() == 1U);
    const Answer answer{events[0].token, std::bit_cast<std::uint32_t>(events[0].logprob)};
    engine_.close_row(row);
    return answer;
  }

  Engine engine_;
  std::vector<std::byte> zeros_;
  std::map<std::pair<Choosing, std::vector<TokenId>>, Answer> known_;
};

}  // namespace pianola
