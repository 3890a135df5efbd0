// The public cache on memory of the host, and what GraphRunner says without a GPU. On a GPU:
// tests/cuda/own_model_test.cu.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "backends/cuda.h"
#include "cache/static_cache.h"
#include "expect_error.h"
#include "pianola/cache.h"
#include "pianola/graph.h"

namespace pianola {
namespace {

KvCacheOptions small() {
  return {.layers = {{2, 16, 16}, {1, 8, 24}, {3, 64, 64}},
          .max_seq_len = 100,
          .slots = 3,
          .type = KvType::kF32,
          .backend = "reference"};
}

TEST(KvIndex, IsThatOfTheLayerCaches) {
  static_assert(kKvBlock == kCacheBlock);
  static_assert(kv_index(65, 1, 2, 16) == ((1 * 2 + 1) * 64 + 1) * 16);
  for (const int heads : {1, 2, 3, 8}) {
    for (const int dim : {1, 24, 128}) {
      for (const int position : {0, 1, 63, 64, 65, 127, 128, 8191, (1 << 24) - 1}) {
        for (int head = 0; head < heads; ++head) {
          EXPECT_EQ(kv_index(position, head, heads, dim), cache_index(position, head, heads, dim));
        }
      }
    }
  }
}

TEST(StaticKvCache, BytesAreThoseOfTheLayoutAndAreAllocated) {
  const KvCacheOptions options = small();
  const KvCacheBytes planned = StaticKvCache::plan(options);
  const std::vector<AttentionSpec> specs = {{2, 16, 16}, {1, 8, 24}, {3, 64, 64}};
  const CacheLayout layout(specs, {.max_seq_len = 100, .slots = 3, .dtype = DType::kF32});
  EXPECT_EQ(planned.per_slot, layout.bytes_per_slot());
  EXPECT_EQ(planned.per_slot, 128U * (2 * 32 + 32 + 3 * 128) * 4);
  EXPECT_GE(planned.total, layout.total_bytes() + 3 * sizeof(std::int32_t));
  EXPECT_LT(planned.total, layout.total_bytes() + 7 * Arena::kAlignment);
  EXPECT_NE(planned.to_string().find(std::to_string(planned.total)), std::string::npos);

  const StaticKvCache cache(options);
  EXPECT_EQ(cache.bytes().total, planned.total);
  EXPECT_EQ(cache.memory().size(), planned.total);
  EXPECT_TRUE(std::all_of(cache.memory().begin(), cache.memory().end(),
                          [](std::byte b) { return b == std::byte{0}; }));
}

// What the views address and the lengths cover all memory that is not alignment, each byte once.
TEST(StaticKvCache, ViewsDoNotOverlap) {
  const StaticKvCache cache(small());
  std::vector<int> used(cache.memory().size());
  const auto mark = [&](const void* p, std::size_t bytes) {
    const auto at =
        static_cast<std::size_t>(static_cast<const std::byte*>(p) - cache.memory().data());
    for (std::size_t i = 0; i < bytes; ++i) ++used.at(at + i);
  };
  for (int l = 0; l < 3; ++l) {
    const KvLayer<float> layer = cache.layer<float>(l);
    EXPECT_EQ(layer.capacity, 128);
    for (int slot = 0; slot < 3; ++slot) {
      for (int position = 0; position < layer.capacity; ++position) {
        for (int head = 0; head < layer.kv_heads; ++head) {
          mark(layer.key(slot, position, head), sizeof(float) * layer.key_dim);
          mark(layer.value(slot, position, head), sizeof(float) * layer.value_dim);
        }
      }
    }
  }
  mark(cache.lengths(), 3 * sizeof(std::int32_t));
  EXPECT_LE(*std::max_element(used.begin(), used.end()), 1);
  EXPECT_EQ(static_cast<std::size_t>(std::count(used.begin(), used.end(), 1)),
            3 * cache.bytes().per_slot + 3 * sizeof(std::int32_t));
}

TEST(StaticKvCache, OptionsOutOfRangeAreRefused) {
  const auto refuse = [](ErrorCode code, const char* part, auto&& change) {
    KvCacheOptions options = small();
    change(options);
    expect_error(code, part, [&] { StaticKvCache::plan(options); });
    expect_error(code, part, [&] { StaticKvCache cache(options); });
  };
  constexpr auto kArgument = ErrorCode::kInvalidArgument;
  refuse(kArgument, "layers", [](KvCacheOptions& o) { o.layers.clear(); });
  refuse(kArgument, "kv_heads", [](KvCacheOptions& o) { o.layers[1].kv_heads = 0; });
  refuse(kArgument, "key_dim", [](KvCacheOptions& o) { o.layers[1].key_dim = -1; });
  refuse(kArgument, "value_dim", [](KvCacheOptions& o) { o.layers[2].value_dim = 1 << 20; });
  refuse(kArgument, "max_seq_len", [](KvCacheOptions& o) { o.max_seq_len = 0; });
  refuse(kArgument, "slots", [](KvCacheOptions& o) { o.slots = 0; });
  refuse(kArgument, "f32, f16 and bf16",
         [](KvCacheOptions& o) { o.type = static_cast<KvType>(3); });
  refuse(kArgument, "any device", [](KvCacheOptions& o) {
    o.layers.assign(4096, {.kv_heads = 4096, .key_dim = 4096, .value_dim = 4096});
    o.max_seq_len = 1 << 24;
    o.slots = 4096;
  });
  expect_error(kArgument, "not known", [] {
    KvCacheOptions options = small();
    options.backend = "tpu";
    StaticKvCache cache(options);
  });
}

TEST(StaticKvCache, MoreThanThereIsIsRefusedWithThePlan) {
  KvCacheOptions options = small();
  options.layers.assign(1000, {.kv_heads = 4096, .key_dim = 4096, .value_dim = 4096});
  options.max_seq_len = 1 << 18;
  expect_error(ErrorCode::kOutOfMemory, std::to_string(StaticKvCache::plan(options).total),
               [&] { StaticKvCache cache(options); });
}

TEST(StaticKvCache, HasOneElementType) {
  const StaticKvCache cache(small());
  expect_error(ErrorCode::kInvalidArgument, "holds f32 and was asked for as f16",
               [&] { cache.layer<__half>(0); });
  expect_error(ErrorCode::kInvalidArgument, "as bf16", [&] { cache.layer<__nv_bfloat16>(2); });
  expect_error(ErrorCode::kInvalidArgument, "layer 3", [&] { cache.layer<float>(3); });
  expect_error(ErrorCode::kInvalidArgument, "layer -1", [&] { cache.layer<float>(-1); });
}

TEST(StaticKvCache, LengthsMoveAndNothingElse) {
  StaticKvCache cache(small());
  std::memset(cache.layer<float>(0).keys, 0x5a, 64);
  cache.advance(1, 100);
  EXPECT_EQ(cache.length(0), 0);
  EXPECT_EQ(cache.length(1), 100);
  EXPECT_EQ(cache.lengths()[1], 100);
  expect_error(ErrorCode::kContextOverflow, "slot 1 holds 100 of 100 tokens; 1 more",
               [&] { cache.advance(1, 1); });
  cache.advance(1, 0);
  cache.keep_first(1, 70);
  EXPECT_EQ(cache.length(1), 70);
  expect_error(ErrorCode::kContextOverflow, "first 71", [&] { cache.keep_first(1, 71); });
  expect_error(ErrorCode::kContextOverflow, "last 71", [&] { cache.drop_last(1, 71); });
  expect_error(ErrorCode::kContextOverflow, "first -1", [&] { cache.keep_first(1, -1); });
  EXPECT_EQ(cache.length(1), 70);
  cache.drop_last(1, 69);
  EXPECT_EQ(cache.length(1), 1);
  cache.keep_first(1, 1);
  cache.reset(1);
  EXPECT_EQ(cache.length(1), 0);
  expect_error(ErrorCode::kInvalidArgument, "slot 3", [&] { cache.reset(3); });
  expect_error(ErrorCode::kInvalidArgument, "slot -1", [&] { cache.length(-1); });
  expect_error(ErrorCode::kInvalidArgument, "-1", [&] { cache.advance(0, -1); });
  unsigned char first = 0;
  std::memcpy(&first, cache.layer<float>(0).keys, 1);
  EXPECT_EQ(first, 0x5a);
}

// Kernels move the words themselves: the host keeps upper bounds, and looks when they do not fit.
TEST(StaticKvCache, AllowsWhatFitsOrNothing) {
  StaticKvCache cache(small());
  const std::vector<int> slots = {0, 2};
  EXPECT_EQ(cache.room(slots), 100);
  cache.advance(2, 90);
  EXPECT_EQ(cache.room(slots), 10);
  cache.allow(slots, 10);  // the kernels of this test add nothing to slot 2
  cache.lengths()[0] += 10;
  cache.allow(slots, 10);
  cache.lengths()[0] += 10;
  expect_error(ErrorCode::kContextOverflow, "slot 2 holds 90 of 100",
               [&] { cache.allow(slots, 11); });
  cache.allow(slots, 10);  // the refusal changed nothing
  cache.lengths()[2] += 10;
  expect_error(ErrorCode::kContextOverflow, "slot 2 holds 100 of 100",
               [&] { cache.allow(slots, 1); });
  cache.allow(std::vector<int>{0}, 80);
  EXPECT_EQ(cache.room(std::vector<int>{0}), 80);  // read again: nothing was added
  expect_error(ErrorCode::kInvalidArgument, "slot 7", [&] { cache.allow(std::vector<int>{7}, 1); });
}

TEST(StaticKvCache, AddressesAreConstantAndMoveWithTheContents) {
  StaticKvCache cache(small());
  const std::uint64_t certificate = cache.address_certificate();
  const float* keys = cache.layer<float>(1).keys;
  cache.advance(0, 5);
  cache.reset(0);
  EXPECT_EQ(cache.address_certificate(), certificate);
  StaticKvCache other(small());
  EXPECT_NE(other.address_certificate(), certificate);
  StaticKvCache moved(std::move(cache));
  EXPECT_EQ(moved.address_certificate(), certificate);
  EXPECT_EQ(moved.layer<float>(1).keys, keys);
  // NOLINTBEGIN(bugprone-use-after-move): what it says then is the test
  EXPECT_NE(cache.address_certificate(), certificate);
  expect_error(ErrorCode::kInvalidArgument, "moved from", [&] { (void)cache.length(0); });
  // NOLINTEND(bugprone-use-after-move)
}

TEST(GraphRunner, NeedsAGpu) {
  StaticKvCache cache(small());
  if (cuda::built_in()) {
    expect_error(ErrorCode::kInvalidArgument, "on the backend 'reference'",
                 [&] { GraphRunner runner(cache); });
  } else {
    expect_error(ErrorCode::kUnsupported,
                 "this build has no CUDA, and graphs run on GPUs only; configure with "
                 "-DPIANOLA_CUDA=ON",
                 [&] { GraphRunner runner(cache); });
  }
}

TEST(StaticKvCache, CudaIsTheDefaultAndRefusedWithoutIt) {
  KvCacheOptions options = small();
  options.backend = KvCacheOptions{}.backend;
  EXPECT_EQ(options.backend, "cuda");
  if (!cuda::built_in()) {
    expect_error(ErrorCode::kUnsupported, "this build has no CUDA",
                 [&] { StaticKvCache cache(options); });
  }
}

}  // namespace
}  // namespace pianola
