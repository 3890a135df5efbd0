// What `pianola check` asks of an engine: poison reaches all that holds no token and nothing else,
// and the support matrix says what loading would say.
#include <gtest/gtest.h>

#include <algorithm>
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
