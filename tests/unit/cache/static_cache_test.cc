// Sizes of caches before there is memory, and the addresses inside it.
#include "cache/static_cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "cache/cache_type.h"
#include "expect_error.h"

namespace pianola {
namespace {

const std::vector<AttentionSpec> kLayers = {{2, 16, 16}, {1, 8, 24}, {3, 64, 64}};

TEST(CacheLayout, CapacityIsWholeBlocks) {
  for (const auto& [asked, given] : std::vector<std::pair<int, int>>{
           {1, 64}, {63, 64}, {64, 64}, {65, 128}, {8192, 8192}, {(1 << 24) - 1, 1 << 24}}) {
    const CacheLayout layout(kLayers, {.max_seq_len = asked});
    EXPECT_EQ(layout.capacity(), given);
    EXPECT_EQ(layout.options().max_seq_len, asked);
  }
}

TEST(CacheLayout, BytesAreThoseOfTheElements) {
  const CacheLayout half(kLayers, {.max_seq_len = 100, .slots = 3, .dtype = DType::kF16});
  EXPECT_EQ(half.key_bytes(1), 128U * 1 * 8 * 2);
  EXPECT_EQ(half.value_bytes(1), 128U * 1 * 24 * 2);
  const std::size_t per_token = (2 * 32 + 32 + 3 * 128) * 2;
  EXPECT_EQ(half.bytes_per_slot(), 128 * per_token);
  EXPECT_EQ(half.total_bytes(), 3 * 128 * per_token);
  const CacheLayout full(kLayers, {.max_seq_len = 100, .slots = 3, .dtype = DType::kF32});
  EXPECT_EQ(full.total_bytes(), 2 * half.total_bytes());
  EXPECT_EQ(CacheLayout({}, {.max_seq_len = 8}).total_bytes(), 0U);  // a stack without attention
}

// int8: a byte an element, and a scale of 4 bytes for each position and head of keys and of values.
TEST(CacheLayout, Int8CountsItsScales) {
  const CacheLayout bytes(kLayers, {.max_seq_len = 100, .slots = 3, .dtype = DType::kI8});
  EXPECT_EQ(bytes.key_bytes(1), 128U * 1 * (8 + 4));
  EXPECT_EQ(bytes.value_bytes(1), 128U * 1 * (24 + 4));
  const std::size_t per_token = (2 * 32 + 32 + 3 * 128) + (2 + 1 + 3) * 2 * 4;
  EXPECT_EQ(bytes.bytes_per_slot(), 128 * per_token);
  EXPECT_EQ(bytes.total_bytes(), 3 * 128 * per_token);
  const CacheLayout fp8(kLayers, {.max_seq_len = 100, .slots = 3, .dtype = DType::kF8E4M3});
  EXPECT_EQ(fp8.total_bytes(), 3 * 128 * std::size_t{2 * 32 + 32 + 3 * 128});
  EXPECT_EQ(CacheLayout(std::vector<AttentionSpec>{{2, 16, 16, 100}},
                        {.max_seq_len = 4096, .chunk = 29, .dtype = DType::kI8})
                .key_bytes(0),
            128U * 2 * (16 + 4));
}

// A latent and what turns, once for all heads, and no values: of int8 with one scale.
TEST(CacheLayout, ALatentIsStoredOnce) {
  const std::vector<AttentionSpec> layers = {
      {.kv_heads = 1, .key_dim = 576, .value_dim = 512, .latent = true}, {2, 16, 16}};
  const CacheLayout half(layers, {.max_seq_len = 100, .slots = 3, .dtype = DType::kF16});
  EXPECT_EQ(half.key_bytes(0), 128U * (512 + 64) * 2);
  EXPECT_EQ(half.value_bytes(0), 0U);
  EXPECT_EQ(half.bytes_per_slot(), 128U * ((512 + 64) * 2 + 2 * 32 * 2));
  const CacheLayout bytes(layers, {.max_seq_len = 100, .slots = 3, .dtype = DType::kI8});
  EXPECT_EQ(bytes.key_bytes(0), 128U * (512 + 64 + 4));
  Arena arena;
  const StaticCache cache(half, arena);
  EXPECT_EQ(arena.size(), 3 * half.bytes_per_slot());
  // One page for the keys of each layer's first block, and one for the values of the second.
  EXPECT_EQ(cache.first_token_bytes(4096), (18U + 2U) * 4096);
  // NOLINTNEXTLINE(performance-no-int-to-ptr): an address that is never read
  arena.seal(reinterpret_cast<std::byte*>(std::uintptr_t{1} << 40));
  const LayerCacheView view = cache.layer(0);
  EXPECT_TRUE(view.latent);
  EXPECT_EQ(view.values, view.keys);
  EXPECT_EQ(view.value_slot(2), view.key_slot(2));
  EXPECT_EQ(view.value_stride(), 576);
  EXPECT_FALSE(cache.layer(1).latent);
  EXPECT_EQ(cache.layer(1).value_stride(), 16);
}

TEST(CacheType, NamesAreThoseOfUsers) {
  EXPECT_EQ(cache_type_names(), "f16, bf16, f32, int8 or fp8");
  EXPECT_EQ(parse_cache_type("int8"), DType::kI8);
  EXPECT_EQ(parse_cache_type("fp8"), DType::kF8E4M3);
  EXPECT_EQ(parse_cache_type("bf16"), DType::kBF16);
  for (const char* name : {"", "q8_0", "i32", "u8", "i8", "fp16", "INT8"}) {
    EXPECT_FALSE(parse_cache_type(name)) << name;
  }
}

// A window's ring does not grow with the sequence, holds a step's tokens beside the window, and is
// never larger than a layer without one.
TEST(CacheLayout, AWindowTakesWhatItNeeds) {
  const std::vector<AttentionSpec> layers = {{2, 16, 16, 100}, {2, 16, 16}, {2, 16, 16, 1}};
  const CacheLayout layout(layers, {.max_seq_len = 4096, .chunk = 29});
  EXPECT_EQ(layout.capacity(0), 128);
  EXPECT_EQ(layout.capacity(1), 4096);
  EXPECT_EQ(layout.capacity(2), 64);
  EXPECT_EQ(layout.key_bytes(0), 128U * 2 * 16 * 2);
  EXPECT_EQ(CacheLayout(layers, {.max_seq_len = 4096, .chunk = 30}).capacity(0), 192);
  EXPECT_EQ(CacheLayout(layers, {.max_seq_len = 1 << 20, .chunk = 29}).key_bytes(0),
            layout.key_bytes(0));
  EXPECT_EQ(CacheLayout(layers, {.max_seq_len = 4096, .rollback_depth = 93}).capacity(0), 256);
  EXPECT_EQ(CacheLayout(layers, {.max_seq_len = 110, .chunk = 110}).capacity(0), 128);
  // What is left when more than the ring holds has been written.
  EXPECT_EQ(layout.least_kept_by_windows(64), 0);
  EXPECT_EQ(layout.least_kept_by_windows(65), 1);  // position 0 is gone; the window of 1 needs none
  EXPECT_EQ(layout.least_kept_by_windows(128), 64);
  EXPECT_EQ(layout.least_kept_by_windows(129), 100);
  EXPECT_EQ(layout.least_kept_by_windows(4000), 3971);
  // So far a row may run ahead and come back.
  EXPECT_EQ(layout.most_ahead(), 1);
  const CacheLayout deep(layers, {.max_seq_len = 4096, .rollback_depth = 93});
  EXPECT_EQ(deep.most_ahead(), 93);
  EXPECT_LE(deep.least_kept_by_windows(3000 + deep.most_ahead()), 3000);
  EXPECT_EQ(CacheLayout(layers, {.max_seq_len = 110, .chunk = 110}).most_ahead(), 128);
  EXPECT_EQ(
      CacheLayout(std::vector<AttentionSpec>{{2, 16, 16, 100}}, {.max_seq_len = 90}).most_ahead(),
      128);
  Arena arena;
  const StaticCache cache(layout, arena);
  // NOLINTNEXTLINE(performance-no-int-to-ptr): an address that is never read
  arena.seal(reinterpret_cast<std::byte*>(std::uintptr_t{1} << 40));
  EXPECT_EQ(cache.layer(0).window, 100);
  EXPECT_EQ(cache.layer(0).capacity, 128);
  EXPECT_EQ(cache.layer(1).window, 0);
}

TEST(CacheLayout, AWindowBeginsWhereItShould) {
  EXPECT_EQ(window_begin(5, 0), 0);
  EXPECT_EQ(window_begin(3, 4), 0);  // 0 to 3 are four positions
  EXPECT_EQ(window_begin(4, 4), 1);
  EXPECT_EQ(window_begin(9, 1), 9);
}

// Inputs are as long as they may be, in as many slots as rows; the encoder's step has one, in f32.
// Neither says how far a row goes back.
TEST(CacheLayout, InputsHaveALengthOfTheirOwn) {
  const std::vector<AttentionSpec> layers = {
      {2, 16, 16}, {2, 16, 16, 0, CacheHolds::kInput}, {2, 16, 8, 0, CacheHolds::kStep}};
  const CacheLayout layout(layers, {.max_seq_len = 4096, .slots = 3, .max_input_len = 100});
  EXPECT_EQ(layout.capacity(0), 4096);
  EXPECT_EQ(layout.capacity(1), 128);
  EXPECT_EQ(layout.capacity(2), 128);
  EXPECT_EQ(layout.slots(1), 3);
  EXPECT_EQ(layout.slots(2), 1);
  EXPECT_EQ(layout.key_bytes(1), 128U * 2 * 16 * 2);
  EXPECT_EQ(layout.key_bytes(2), 128U * 2 * 16 * 4);
  const std::size_t step = layout.key_bytes(2) + layout.value_bytes(2);
  EXPECT_EQ(layout.bytes_per_slot(),
            2 * layout.key_bytes(0) + 2 * layout.key_bytes(1));  // values are as wide
  EXPECT_EQ(layout.bytes_per_input(), 2 * layout.key_bytes(1));
  EXPECT_EQ(layout.total_bytes(), 3 * layout.bytes_per_slot() + step);
  EXPECT_EQ(layout.least_kept_by_windows(4000), 0);
  EXPECT_EQ(layout.most_ahead(), 4096);
  EXPECT_EQ(layout.shape().input_capacity, 128);
  Arena arena;
  const StaticCache cache(layout, arena);
  EXPECT_GE(arena.size(), layout.total_bytes());
  EXPECT_LT(arena.size(), layout.total_bytes() + 2 * layers.size() * Arena::kAlignment);
  // NOLINTNEXTLINE(performance-no-int-to-ptr): an address that is never read
  arena.seal(reinterpret_cast<std::byte*>(std::uintptr_t{1} << 40));
  EXPECT_EQ(cache.layer(0).holds, CacheHolds::kTokens);
  EXPECT_EQ(cache.layer(1).holds, CacheHolds::kInput);
  EXPECT_EQ(cache.layer(2).dtype, DType::kF32);
  EXPECT_EQ(cache.layer(2).capacity, 128);
  // Pages of a byte: all that inputs and the step have, and a block of one row.
  EXPECT_EQ(cache.first_token_bytes(1),
            3 * 2 * layout.key_bytes(1) + step + 2 * cache_element_bytes(DType::kF16, 64, 2, 16));
}

// No size wraps around: the largest options on a model of the largest kind.
TEST(CacheLayout, LargeSizesDoNotWrap) {
  const std::vector<AttentionSpec> layers(1000, {128, 512, 512});
  const CacheLayout layout(layers, {.max_seq_len = 1 << 24, .slots = 1, .dtype = DType::kF32});
  EXPECT_EQ(layout.total_bytes() >> 24, std::size_t{1000} * 128 * 1024 * 4);
  const CacheLayout int8(layers, {.max_seq_len = 1 << 24, .slots = 1, .dtype = DType::kI8});
  EXPECT_EQ(int8.total_bytes() >> 24, std::size_t{1000} * 128 * (1024 + 8));
}

TEST(CacheLayout, OptionsOutOfRangeAreRefused) {
  const auto refuse = [](ErrorCode code, const CacheOptions& options, const char* part) {
    expect_error(code, part, [&] { CacheLayout(kLayers, options); });
  };
  constexpr auto kArgument = ErrorCode::kInvalidArgument;
  refuse(kArgument, {.max_seq_len = 0}, "max_seq_len");
  refuse(kArgument, {.max_seq_len = -5}, "max_seq_len");
  refuse(kArgument, {.max_seq_len = (1 << 24) + 1}, "max_seq_len");
  refuse(kArgument, {.max_seq_len = 8, .slots = 0}, "slots");
  refuse(kArgument, {.max_seq_len = 8, .slots = 4097}, "slots");
  refuse(ErrorCode::kUnsupported, {.max_seq_len = 8, .dtype = DType::kQ8_0}, "q8_0");
  refuse(ErrorCode::kUnsupported, {.max_seq_len = 8, .dtype = DType::kI32}, "i32");
  refuse(ErrorCode::kUnsupported, {.max_seq_len = 8, .dtype = DType::kU8}, "int8 or fp8");
}

// Every element of every slot of every layer has bytes of its own, inside the arena.
TEST(StaticCache, RegionsAreApart) {
  constexpr int kSlots = 3;
  const CacheLayout layout(kLayers, {.max_seq_len = 100, .slots = kSlots});
  Arena arena;
  const StaticCache cache(layout, arena);
  EXPECT_GE(arena.size(), layout.total_bytes());
  EXPECT_LT(arena.size(), layout.total_bytes() + 2 * kLayers.size() * Arena::kAlignment);
  // NOLINTNEXTLINE(performance-no-int-to-ptr): an address that is never read
  auto* base = reinterpret_cast<std::byte*>(std::uintptr_t{1} << 40);  // addresses only
  arena.seal(base);
  std::vector<std::pair<const std::byte*, const std::byte*>> regions;
  for (int layer = 0; layer < 3; ++layer) {
    const LayerCacheView view = cache.layer(layer);
    EXPECT_EQ(view.capacity, 128);
    EXPECT_EQ(view.key_dim, kLayers[static_cast<std::size_t>(layer)].key_dim);
    EXPECT_EQ(view.value_dim, kLayers[static_cast<std::size_t>(layer)].value_dim);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(view.keys) % Arena::kAlignment, 0U);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(view.values) % Arena::kAlignment, 0U);
    for (int slot = 0; slot < kSlots; ++slot) {
      regions.emplace_back(view.key_slot(slot), view.key_slot(slot) + layout.key_bytes(layer));
      regions.emplace_back(view.value_slot(slot),
                           view.value_slot(slot) + layout.value_bytes(layer));
    }
  }
  std::sort(regions.begin(), regions.end());
  EXPECT_GE(regions.front().first, base);
  EXPECT_LE(regions.back().second, base + arena.size());
  for (std::size_t i = 1; i < regions.size(); ++i) {
    EXPECT_LE(regions[i - 1].second, regions[i].first);
  }
}

// (position, head) to element is one to one onto the slot, and a head's block lies together.
TEST(StaticCache, IndexCoversASlotOnce) {
  constexpr int kHeads = 3;
  constexpr int kDim = 8;
  constexpr int kCapacity = 192;
  std::vector<int> used(kCapacity * kHeads * kDim);
  for (int position = 0; position < kCapacity; ++position) {
    for (int head = 0; head < kHeads; ++head) {
      const std::size_t at = cache_index(position, head, kHeads, kDim);
      for (std::size_t i = 0; i < kDim; ++i) ++used.at(at + i);
      if (position % kCacheBlock != 0) {
        EXPECT_EQ(at, cache_index(position - 1, head, kHeads, kDim) + kDim);
      }
    }
  }
  EXPECT_EQ(std::count(used.begin(), used.end(), 1), static_cast<std::ptrdiff_t>(used.size()));
}

// --- State layers -------------------------------------------------------------------------------

const std::vector<StateSpec> kStates = {
    {.heads = 3, .key_dim = 4, .value_dim = 5, .conv_width = 11, .conv_taps = 4},
    {.conv_width = 8, .conv_taps = 3}};

CacheLayout states(int max_seq_len, int depth, StateRollback rollback, int checkpoints = 0) {
  return CacheLayout(CacheSpecs({}, kStates), {.max_seq_len = max_seq_len,
                                               .slots = 2,
                                               .rollback_depth = depth,
                                               .state_rollback = rollback,
                                               .checkpoints = checkpoints});
}

TEST(StateLayout, BytesDoNotDependOnTheLength) {
  for (const StateRollback rollback : {StateRollback::kExact, StateRollback::kCompact}) {
    EXPECT_EQ(states(64, 8, rollback, 2).bytes_per_slot(),
              states(1 << 24, 8, rollback, 2).bytes_per_slot());
  }
}

TEST(StateLayout, BytesAreThoseOfTheParts) {
  constexpr std::size_t kState = 3 * 4 * 5 * 4;  // heads, key_dim, value_dim, bytes
  constexpr std::size_t kStep = 3 * (4 + 5 + 2) * 4;
  // Exact: nine states, and the inputs that nine lengths need.
  EXPECT_EQ(states(64, 8, StateRollback::kExact).bytes_per_slot(),
            9 * kState + (3 + 8) * 11 * 4 + (2 + 8) * 8 * 4);
  // Compact: two anchors and the newest with its three lengths; the steps of two intervals.
  EXPECT_EQ(states(64, 8, StateRollback::kCompact).bytes_per_slot(),
            3 * kState + 3 * 4 + 16 * kStep + (3 + 15) * 11 * 4 + (2 + 15) * 8 * 4);
  // A checkpoint: a state, and the inputs that the next convolution reads.
  EXPECT_EQ(states(64, 8, StateRollback::kExact, 5).bytes_per_slot() -
                states(64, 8, StateRollback::kExact).bytes_per_slot(),
            5 * (kState + 3 * 11 * 4 + 2 * 8 * 4));
}

// Whatever has been computed, at least `depth` tokens can be taken back, and no more is promised
// than what is kept.
TEST(StateLayout, TheDepthIsAlwaysKept) {
  for (const StateRollback rollback : {StateRollback::kExact, StateRollback::kCompact}) {
    for (const int depth : {1, 2, 5, 16}) {
      const CacheLayout layout = states(4096, depth, rollback);
      const StateView view = layout.state_shape(0);
      for (int written = 0; written < 100; ++written) {
        const int least = layout.least_kept_by_states(written);
        EXPECT_LE(least, std::max(0, written - depth)) << depth << " of " << written;
        EXPECT_EQ(least % view.interval, 0);
        // All anchors from the least one on are kept, and every step since.
        EXPECT_LE(written / view.interval - least / view.interval + 1,
                  view.anchors + (least == 0 ? 1 : 0));
        if (view.interval > 1) {
          EXPECT_LE(written - least, view.step_capacity);
        }
        EXPECT_LE(written - least + view.spec.conv_taps - 1, view.conv_capacity);
      }
    }
  }
}

TEST(StateLayout, RefusesOptionsOutOfRange) {
  expect_error(ErrorCode::kInvalidArgument, "rollback_depth",
               [] { states(64, -1, StateRollback::kExact); });
  expect_error(ErrorCode::kInvalidArgument, "checkpoints",
               [] { states(64, 1, StateRollback::kExact, -1); });
}

TEST(StateCache, RegionsDoNotOverlap) {
  for (const StateRollback rollback : {StateRollback::kExact, StateRollback::kCompact}) {
    const CacheLayout layout = states(64, 4, rollback, 3);
    Arena arena;
    const StaticCache cache(layout, arena);
    std::vector<std::byte> memory(arena.size() + Arena::kAlignment);
    arena.seal(memory.data());
    std::vector<std::pair<const void*, std::size_t>> parts;
    for (int layer = 0; layer < 2; ++layer) {
      const StateView view = cache.state(layer);
      const std::size_t state = view.spec.state_size() * sizeof(float);
      for (int slot = 0; slot < 2; ++slot) {
        for (int head = 0; head < view.spec.heads; ++head) {
          for (int i = 0; i < view.anchors; ++i) {
            parts.emplace_back(view.anchor_at(slot, head, i * view.interval), state);
          }
          for (int i = 0; i < view.step_capacity; ++i) {
            parts.emplace_back(view.step_at(slot, head, i), view.spec.step_size() * sizeof(float));
          }
          if (view.interval == 1) continue;
          parts.emplace_back(view.newest_at(slot, head), state);
          parts.emplace_back(view.newest_length_at(slot, head), sizeof(std::int32_t));
        }
        for (int i = 0; i < view.conv_capacity; ++i) {
          parts.emplace_back(view.conv_at(slot, i),
                             static_cast<std::size_t>(view.spec.conv_width) * sizeof(float));
        }
        for (int i = 0; i < view.checkpoints; ++i) {
          parts.emplace_back(
              view.checkpoint_at(slot, i),
              (view.spec.states_size() + view.spec.conv_inputs_size()) * sizeof(float));
        }
      }
    }
    std::sort(parts.begin(), parts.end());
    for (std::size_t i = 1; i < parts.size(); ++i) {
      EXPECT_LE(static_cast<const std::byte*>(parts[i - 1].first) + parts[i - 1].second,
                static_cast<const std::byte*>(parts[i].first));
    }
    EXPECT_GE(parts.front().first, memory.data());
    EXPECT_LE(static_cast<const std::byte*>(parts.back().first) + parts.back().second,
              memory.data() + arena.size());
  }
}

}  // namespace
}  // namespace pianola
