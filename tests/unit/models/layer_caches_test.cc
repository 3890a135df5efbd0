// Which layers of a model have caches, and what these cost.
#include <gtest/gtest.h>
#include <unistd.h>

#include <boost/json.hpp>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "base/json_reader.h"
#include "cache/static_cache.h"
#include "expect_error.h"
#include "models/golden.h"
#include "models/model.h"

namespace pianola {
namespace {

int count_of(const Plan& plan, std::string_view op) {
  return static_cast<int>(
      std::ranges::count_if(plan.ops, [&](const Op& o) { return op == op_name(o); }));
}

// Four layers, of which the last two attend to the caches of the first two.
TEST(LayerCaches, ASharedOneIsThereOnce) {
  const auto model = CausalModel::open(golden_folder() / "gemma3" / "shared" / "hf");
  const ModelTables tables = model->tables(256);
  ASSERT_EQ(tables.layers.size(), 4U);
  ASSERT_EQ(tables.caches.size(), 2U);
  EXPECT_EQ(tables.caches[0].window, 16);
  EXPECT_EQ(tables.caches[1].window, 0);
  for (std::size_t layer = 0; layer < 4; ++layer) {
    const LayerWeights& w = tables.layers[layer];
    EXPECT_EQ(w.cache.index, static_cast<std::int32_t>(layer % 2));
    EXPECT_EQ(w.k.valid() && w.v.valid() && w.k_norm.valid(), layer < 2);
  }
  const Plan plan = model->record(tables, {.tokens = 4});
  EXPECT_EQ(count_of(plan, "qkv"), 2);
  EXPECT_EQ(count_of(plan, "query"), 2);
  EXPECT_EQ(count_of(plan, "attention"), 4);
  // Keys and values of two heads of 32: the window of 16 and the step in one block, and 256 tokens.
  const CacheLayout layout(tables.cache_specs(),
                           {.max_seq_len = 256, .chunk = 16, .dtype = DType::kF32});
  EXPECT_EQ(layout.bytes_per_slot(), (64U + 256U) * 2 * (2 * 32) * sizeof(float));
}

// A token costs the latent and what turns, however many heads read them.
TEST(LayerCaches, ALatentIsOneForAllHeads) {
  const auto model = CausalModel::open(golden_folder() / "deepseek" / "v2_lite" / "hf");
  const ModelTables tables = model->tables(256);
  ASSERT_EQ(tables.caches.size(), 3U);
  EXPECT_EQ(model->config().num_attention_heads, 4);
  const CacheLayout layout(tables.cache_specs(), {.max_seq_len = 256, .dtype = DType::kF16});
  for (int layer = 0; layer < 3; ++layer) {
    EXPECT_EQ(layout.key_bytes(layer) + layout.value_bytes(layer), 256U * (32 + 16) * 2);
  }
  const Plan plan = model->record(tables, {.tokens = 4});
  EXPECT_EQ(count_of(plan, "latent_qkv"), 3);
  EXPECT_EQ(count_of(plan, "qkv"), 0);
  EXPECT_EQ(count_of(plan, "head_linear"), 3);
}

// The tensors of a draft behind the last layer are left alone, if the configuration says that they
// are there.
TEST(LayerCaches, ADraftIsLeftAlone) {
  const auto scratch =
      std::filesystem::temp_directory_path() / ("pianola_draft_" + std::to_string(getpid()));
  std::filesystem::copy(golden_folder() / "deepseek" / "v3" / "hf", scratch);
  const auto open_with = [&scratch](int layers, int drafts) {
    boost::json::value config =
        parse_json(read_text_file(scratch / "config.json", 1 << 20), "config.json");
    config.as_object()["num_hidden_layers"] = layers;
    config.as_object()["num_nextn_predict_layers"] = drafts;
    std::ofstream(scratch / "config.json") << boost::json::serialize(config);
    return CausalModel::open(scratch);
  };
  EXPECT_EQ(open_with(2, 1)->tables(64).layers.size(), 2U);
  expect_error(ErrorCode::kUnsupported, "model.layers.2.", [&] { open_with(2, 0); });
  expect_error(ErrorCode::kUnsupported, "model.layers.2.", [&] { open_with(1, 1); });
  std::filesystem::remove_all(scratch);
}

}  // namespace
}  // namespace pianola
