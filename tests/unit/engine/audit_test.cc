// What `pianola check` asks of an engine: poison reaches all that holds no token and nothing else,
// routers can be watched and overruled, and the support matrix says what loading would say.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "engine/engine_audit.h"
#include "engine/support_matrix.h"
#include "engine_test_access.h"
#include "models/golden.h"
#include "models/model.h"

namespace pianola {
namespace {

std::shared_ptr<const CausalModel> tiny_model() {
  return CausalModel::open(golden_folder() / "llama/untied/f32.gguf");
}

// For each position of a slot: whether it is all ones, in every head, and its scales as well.
std::vector<bool> poisoned(const LayerCacheView& view, const std::vector<std::byte>& slot,
                           int dim) {
  const std::size_t row = row_bytes(view.dtype, static_cast<std::size_t>(dim));
  const std::size_t scale = has_scales(view.dtype) ? sizeof(float) : 0;
  const std::size_t scales =
      cache_element_bytes(view.dtype, view.capacity, view.kv_heads, dim);  // where they begin
  std::vector<bool> result;
  for (int p = 0; p < view.capacity; ++p) {
    std::size_t ones = 0;
    for (int h = 0; h < view.kv_heads; ++h) {
      const std::size_t index = cache_index(p, h, view.kv_heads, 1);
      const auto count = [&](std::size_t at, std::size_t bytes) {
        const auto from = slot.begin() + static_cast<std::ptrdiff_t>(at);
        return static_cast<std::size_t>(
            std::count(from, from + static_cast<std::ptrdiff_t>(bytes), std::byte{0xFF}));
      };
      ones += count(index * row, row) + count(scales + index * scale, scale);
    }
    result.push_back(ones == (row + scale) * static_cast<std::size_t>(view.kv_heads));
  }
  return result;
}

TEST(EngineAudit, PoisonReachesAllThatHoldsNoToken) {
  for (const char* type : {"f16", "f32", "int8", "fp8"}) {
    for (const int length : {1, 63, 64, 65, 128, 150}) {
      Engine engine(tiny_model(),
                    {.threads = 1, .max_seq_len = 192, .slots = 2, .cache_type = type});
      std::vector<TokenId> tokens(static_cast<std::size_t>(length));
      std::iota(tokens.begin(), tokens.end(), 1);
      const int row = engine.open_row({});
      engine.append(row, tokens);
      while (engine.length(row) < length) engine.step();
      EngineAudit::poison(engine);
      for (int layer = 0; layer < EngineTestAccess::layers(engine); ++layer) {
        const LayerCacheView& view =
            EngineTestAccess::impl(engine).caches[static_cast<std::size_t>(layer)];
        for (int slot = 0; slot < 2; ++slot) {
          std::vector<bool> want(static_cast<std::size_t>(view.capacity), true);
          if (slot == row) std::fill_n(want.begin(), length, false);
          EXPECT_EQ(poisoned(view, EngineTestAccess::keys(engine, layer, slot), view.key_dim), want)
              << type << " " << length;
          EXPECT_EQ(poisoned(view, EngineTestAccess::values(engine, layer, slot), view.value_dim),
                    want)
              << type << " " << length;
        }
      }
      const auto& e = EngineTestAccess::impl(engine);
      const auto work =
          EngineTestAccess::read(engine, e.work_memory->data(), e.layout.workspace_bytes());
      EXPECT_EQ(std::count(work.begin(), work.end(), std::byte{0xFF}),
                static_cast<std::ptrdiff_t>(work.size()));
    }
  }
}

// Models with routers: all experts, some layers dense, a shared expert with state layers.
constexpr const char* kRouted[] = {"qwen3_moe/all", "qwen3_moe/some", "qwen3_next/experts"};

Engine routed_engine(const char* model, const char* backend, int chunk, const char* isa = "") {
  EngineOptions options = {.backend = backend, .threads = 2, .isa = isa, .max_seq_len = 64};
  options.chunk = chunk;
  options.cache_type = "f32";
  options.score = true;
  return Engine(CausalModel::open(golden_folder() / model / "hf"), options);
}

std::vector<TokenId> routed_tokens() {
  std::vector<TokenId> tokens;
  for (int i = 0; i < 40; ++i) tokens.push_back((i * 37 + 11) % 100);
  return tokens;
}

// Every router: its experts, and how many of them a token gets.
std::vector<std::pair<int, int>> routers_of(Engine& engine) {
  std::vector<std::pair<int, int>> routers;
  const auto& e = EngineTestAccess::impl(engine);
  const ModelTables tables = e.model->tables(64);
  const ProgramCache::Entry* entry =
      e.programs->find({.tokens = 1, .lanes = 1, .logit_rows = 1}, StepVariant::kScore);
  for (const Op& op : entry->plan->ops) {
    const auto* route = std::get_if<RouteOp>(&op);
    if (!route) continue;
    const WeightDecl& router = tables.weights[static_cast<std::size_t>(route->weight.index)];
    routers.emplace_back(static_cast<int>(router.rows), route->top_k);
  }
  return routers;
}

TEST(EngineAudit, WatchingRoutersChangesNothing) {
  for (const char* model : kRouted) {
    for (const char* backend : {"reference", "cpu"}) {
      SCOPED_TRACE(std::string(model) + " " + backend);
      Engine engine = routed_engine(model, backend, 16);
      const std::vector<TokenId> tokens = routed_tokens();
      const std::vector<float> want = engine.score(tokens);
      const RoutedScores watched = EngineAudit::score(engine, tokens);
      EXPECT_EQ(watched.logprobs, want);
      EXPECT_EQ(watched.tokens_elsewhere, 0);
      const auto routers = routers_of(engine);
      ASSERT_GT(routers.size(), 0U);
      ASSERT_EQ(watched.routes.size(), 3 * routers.size());  // 39 tokens in chunks of 16
      for (std::size_t i = 0; i < watched.routes.size(); ++i) {
        const auto [experts, top_k] = routers[i % routers.size()];
        const std::size_t width = 2 * static_cast<std::size_t>(top_k);
        const std::vector<float>& routes = watched.routes[i];
        ASSERT_EQ(routes.size(), width * (i / routers.size() < 2 ? 16 : 7));
        for (std::size_t at = 0; at < routes.size(); ++at) {
          if (at % width >= static_cast<std::size_t>(top_k)) continue;  // a weight
          EXPECT_EQ(routes[at], std::floor(routes[at]));
          EXPECT_GE(routes[at], 0);
          EXPECT_LT(routes[at], experts);
        }
      }
      const RoutedScores again = EngineAudit::score(engine, tokens, watched.routes);
      EXPECT_EQ(again.logprobs, want);
      EXPECT_EQ(again.tokens_elsewhere, 0);
      EXPECT_EQ(engine.score(tokens), want) << "after an audit";
    }
  }
}

float largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
  float largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) largest = std::max(largest, std::abs(a[i] - b[i]));
  return largest;
}

// Where a token goes to other experts than its own, another function is computed, and it is the
// same one whoever computes it. (Instruction sets that multiply in bfloat16 round the activations
// of a prompt, which these sharp little models show.)
TEST(EngineAudit, RoutersCanBeOverruled) {
  for (const char* model : kRouted) {
    SCOPED_TRACE(model);
    Engine reference = routed_engine(model, "reference", 40);
    Engine cpu = routed_engine(model, "cpu", 40, "portable");
    const std::vector<TokenId> tokens = routed_tokens();
    const RoutedScores own = EngineAudit::score(reference, tokens);
    const auto routers = routers_of(reference);
    Routes other = own.routes;  // every second token, of every router that has a choice
    for (std::size_t i = 0; i < other.size(); ++i) {
      const auto [experts, top_k] = routers[i];
      const std::size_t width = 2 * static_cast<std::size_t>(top_k);
      for (std::size_t at = 0; experts > top_k && at < other[i].size(); ++at) {
        if (at % width >= static_cast<std::size_t>(top_k) || at / width % 2 == 0) continue;
        other[i][at] = static_cast<float>((static_cast<int>(other[i][at]) + 1) % experts);
      }
    }
    const RoutedScores want = EngineAudit::score(reference, tokens, other);
    const RoutedScores got = EngineAudit::score(cpu, tokens, other);
    // Of 39 tokens 19; the first is not among them, so nothing changes for it.
    EXPECT_GE(want.tokens_elsewhere, 19);
    EXPECT_EQ(want.logprobs[0], own.logprobs[0]);
    EXPECT_GT(largest_difference(want.logprobs, own.logprobs), 0.01F);
    EXPECT_LT(largest_difference(want.logprobs, got.logprobs), 0.001F);
  }
}

TEST(EngineAudit, RoutesOfOtherStepsAreRefused) {
  Engine one = routed_engine("qwen3_moe/all", "reference", 40);
  Engine two = routed_engine("qwen3_moe/all", "reference", 16);
  const Routes routes = EngineAudit::score(one, routed_tokens()).routes;
  const std::vector<float> want = two.score(routed_tokens());
  EXPECT_THROW(EngineAudit::score(two, routed_tokens(), routes), Error);
  EXPECT_EQ(two.score(routed_tokens()), want);
}

TEST(SupportMatrix, SaysWhatLoadingSays) {
  const auto model = tiny_model();
  int works = 0;
  for (const SupportEntry& entry : support_matrix(*model, {})) {
    if (entry.captured || entry.backend == "cuda") continue;
    EXPECT_EQ(entry.refused, "") << entry.backend << " " << entry.verb;
    EXPECT_NE(entry.how, "");
    const auto load = [&] {
      return Engine(model, {.backend = entry.backend,
                            .threads = 1,
                            .max_seq_len = 64,
                            .cache_type = entry.cache_type,
                            .score = entry.verb == "score",
                            .logits = entry.verb == "logits"});
    };
    EXPECT_NO_THROW(load());
    ++works;
  }
  EXPECT_EQ(works, 2 * 5 * 9);  // backends, types of cache, verbs
}

}  // namespace
}  // namespace pianola
