// Bit-exact promises of the engine, on every backend and instruction set this machine has: a row's
// results depend on its own tokens and on nothing else.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <filesystem>

#include "backends/cpu/isa.h"
#include "engine/engine_audit.h"
#include "engine_test_access.h"
#include "expect_error.h"
#include "models/golden.h"
#include "models/model.h"

namespace pianola {
namespace {

struct Case {
  std::string backend;
  std::string isa;
  std::string form;  // of the checkpoint: "hf", "q4_0", ...; "window": with a sliding window;
                     // "experts": with that, sinks and a mixture of experts; "shared": a mixture
                     // with a shared expert; "hybrid": with layers of linear attention, "exact":
                     // and their states kept; "ssm": with layers of Mamba-2;
                     // "shared_kv": layers that attend to the caches of others, windows among them;
                     // "latent": multi-head latent attention
  std::string cache_type = "f16";
};

void PrintTo(const Case& c, std::ostream* out) {
  *out << c.backend << " " << c.isa << " " << c.form << " " << c.cache_type;
}

std::vector<Case> cases() {
  // CMake says which backends this program tests: those of any machine, or the one of a GPU.
  if (std::string_view(PIANOLA_TEST_BACKENDS) == "cuda") {
    return {
        {"cuda", "", "f32"},           {"cuda", "", "f16"},         {"cuda", "", "q8_0"},
        {"cuda", "", "q4_0"},          {"cuda", "", "window"},      {"cuda", "", "experts"},
        {"cuda", "", "shared"},        {"cuda", "", "hybrid"},      {"cuda", "", "exact"},
        {"cuda", "", "ssm"},           {"cuda", "", "f32", "int8"}, {"cuda", "", "window", "int8"},
        {"cuda", "", "f32", "fp8"},    {"cuda", "", "shared_kv"},   {"cuda", "", "latent"},
        {"cuda", "", "latent", "int8"}};
  }
  std::vector<Case> all = {{"reference", "", "f32"},         {"reference", "", "window"},
                           {"reference", "", "experts"},     {"reference", "", "hybrid"},
                           {"reference", "", "exact"},       {"reference", "", "ssm"},
                           {"reference", "", "f32", "int8"}, {"reference", "", "window", "int8"},
                           {"reference", "", "f32", "fp8"},  {"reference", "", "shared_kv"},
                           {"reference", "", "latent"},      {"reference", "", "latent", "int8"}};
  for (const cpu::Isa isa : cpu::supported_isas()) {
    for (const char* form : {"f32", "f16", "q8_0", "q4_0", "window", "experts", "hybrid", "exact",
                             "ssm", "shared_kv", "latent"}) {
      all.push_back({"cpu", cpu::isa_name(isa), form});
    }
    all.push_back({"cpu", cpu::isa_name(isa), "f32", "int8"});
    all.push_back({"cpu", cpu::isa_name(isa), "window", "int8"});
    all.push_back({"cpu", cpu::isa_name(isa), "latent", "int8"});
    all.push_back({"cpu", cpu::isa_name(isa), "f32", "fp8"});
  }
  return all;
}

// The files of the llama goldens, by form.
std::filesystem::path checkpoint_of_form(const std::string& form) {
  for (const ModelGolden& golden : read_all_goldens()) {
    if (!golden.name.starts_with("llama/")) continue;
    for (const GoldenFile& file : golden.files) {
      if (file.form == form && file.weights_from.empty()) return file.path;
    }
  }
  return {};
}

// What a row has left behind: its tokens, the bits of their log-probabilities, and the bytes of its
// slot up to its length.
struct Trace {
  std::vector<TokenId> tokens;
  std::vector<float> logprobs;
  std::vector<std::byte> cache;
  bool operator==(const Trace& other) const {
    const auto bits = [](float x) { return std::bit_cast<std::uint32_t>(x); };
    return tokens == other.tokens && cache == other.cache &&
           std::ranges::equal(logprobs, other.logprobs, {}, bits, bits);
  }
};

class CaptureTest : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (GetParam().form == "window") {
      model_ = windowed_model();
      return;
    }
    if (GetParam().form == "experts") {
      model_ = CausalModel::open(golden_folder() / "gpt_oss" / "mixed" / "hf");
      return;
    }
    if (GetParam().form == "shared") {
      model_ = CausalModel::open(golden_folder() / "qwen2_moe" / "shared" / "hf");
      return;
    }
    if (GetParam().form == "hybrid" || GetParam().form == "exact") {
      model_ = CausalModel::open(golden_folder() / "qwen3_5" / "hybrid" / "hf");
      return;
    }
    if (GetParam().form == "ssm") {
      model_ = CausalModel::open(golden_folder() / "bamba" / "hybrid" / "hf");
      return;
    }
    if (GetParam().form == "shared_kv") {
      model_ = CausalModel::open(golden_folder() / "gemma3" / "shared" / "hf");
      return;
    }
    if (GetParam().form == "latent") {
      model_ = CausalModel::open(golden_folder() / "deepseek" / "v3" / "hf");
      return;
    }
    const auto path = checkpoint_of_form(GetParam().form);
    ASSERT_FALSE(path.empty()) << "no llama golden in form " << GetParam().form;
    model_ = CausalModel::open(path);
  }

  // Read once: its files are put together in a folder that goes away.
  static std::shared_ptr<const CausalModel> windowed_model() {
    static const std::shared_ptr<const CausalModel> model = [] {
      const auto folder =
          std::filesystem::temp_directory_path() / ("pianola_capture_" + std::to_string(getpid()));
      for (const ModelGolden& golden : read_all_goldens()) {
        if (golden.name != "mistral/window") continue;
        auto opened = CausalModel::open(prepare_golden_file(golden.files[0], folder));
        std::filesystem::remove_all(folder);
        return opened;
      }
      return std::shared_ptr<const CausalModel>();
    }();
    return model;
  }

  Engine make_engine(int slots = 1, int chunk = 32, int threads = 1, int max_seq_len = 256) const {
    return Engine(model_, {.backend = GetParam().backend,
                           .threads = threads,
                           .isa = GetParam().isa,
                           .max_seq_len = max_seq_len,
                           .slots = slots,
                           .chunk = chunk,
                           .cache_type = GetParam().cache_type,
                           .exact_rollback = GetParam().form == "exact",
                           .eager = eager_,
                           .dependent_launch = dependent_launch_,
                           .batch_invariant = true});
  }

  std::vector<TokenId> prompt(int seed, int length) const {
    std::vector<TokenId> tokens;
    std::uint32_t state = static_cast<std::uint32_t>(seed) * 2654435761U + 1;
    for (int i = 0; i < length; ++i) {
      state = state * 1664525U + 1013904223U;
      tokens.push_back(static_cast<TokenId>(
          (state >> 8) % static_cast<std::uint32_t>(model_->config().vocab_size)));
    }
    return tokens;
  }

  // Whether a row of this model cannot go back to any of its tokens.
  static bool forgets() {
    const std::string& form = GetParam().form;
    return form == "window" || form == "experts" || form == "hybrid" || form == "exact" ||
           form == "ssm" || form == "shared_kv";
  }

  static RowOptions options(std::uint64_t seed, int max_length) {
    RowOptions o;
    o.sampling.temperature = 0.8F;
    o.sampling.seed = seed;
    o.sampling.logprobs = true;
    o.max_length = max_length;
    return o;
  }

  static void record(std::span<const TokenEvent> events, std::vector<Trace>& traces) {
    for (const TokenEvent& event : events) {
      traces[static_cast<std::size_t>(event.row)].tokens.push_back(event.token);
      traces[static_cast<std::size_t>(event.row)].logprobs.push_back(event.logprob);
    }
  }

  // The stored bytes of positions below the row's length, layer by layer: of a window's layer,
  // those that its next token attends to.
  static std::vector<std::byte> stored(Engine& engine, int row) {
    std::vector<std::byte> bytes;
    const int length = engine.length(row);
    for (int layer = 0; layer < EngineTestAccess::layers(engine); ++layer) {
      const LayerCacheView& view =
          EngineTestAccess::impl(engine).caches[static_cast<std::size_t>(layer)];
      const std::size_t size = row_bytes(view.dtype, static_cast<std::size_t>(view.key_dim));
      const std::size_t scale = has_scales(view.dtype) ? sizeof(float) : 0;
      const std::size_t scales =
          cache_element_bytes(view.dtype, view.capacity, view.kv_heads, view.key_dim);
      for (const auto& slot : {EngineTestAccess::keys(engine, layer, row),
                               EngineTestAccess::values(engine, layer, row)}) {
        const auto take = [&](std::size_t at, std::size_t count) {
          const auto from = slot.begin() + static_cast<std::ptrdiff_t>(at);
          bytes.insert(bytes.end(), from, from + static_cast<std::ptrdiff_t>(count));
        };
        for (int p = window_begin(length, view.window); p < length; ++p) {
          for (int h = 0; h < view.kv_heads; ++h) {
            const std::size_t index = cache_index(p % view.capacity, h, view.kv_heads, 1);
            take(index * size, size);
            take(scales + index * scale, scale);
          }
        }
      }
    }
    for (const StateView& view : EngineTestAccess::impl(engine).states) {
      const auto take = [&](const float* from, std::size_t count) {
        const auto taken = EngineTestAccess::read(engine, reinterpret_cast<const std::byte*>(from),
                                                  count * sizeof(float));
        bytes.insert(bytes.end(), taken.begin(), taken.end());
      };
      for (int head = 0; head < view.spec.heads; ++head) {
        take(view.interval > 1 ? view.newest_at(row, head) : view.anchor_at(row, head, length),
             view.spec.state_size());
      }
      for (int i = 1; i < view.spec.conv_taps && i <= length; ++i) {
        take(view.conv_at(row, length - i), static_cast<std::size_t>(view.spec.conv_width));
      }
    }
    return bytes;
  }

  // One row alone, to its limit.
  Trace solo(Engine& engine, const std::vector<TokenId>& tokens, const RowOptions& o) const {
    std::vector<Trace> traces(static_cast<std::size_t>(engine.slots()));
    const int row = engine.open_row(o);
    engine.append(row, tokens);
    while (engine.has_work()) record(engine.step(), traces);
    Trace trace = traces[static_cast<std::size_t>(row)];
    trace.cache = stored(engine, row);
    engine.close_row(row);
    return trace;
  }

  Trace solo(const std::vector<TokenId>& tokens, const RowOptions& o, int chunk = 32,
             int threads = 1) const {
    Engine engine = make_engine(1, chunk, threads);
    return solo(engine, tokens, o);
  }

  std::shared_ptr<const CausalModel> model_;
  bool eager_ = false;
  bool dependent_launch_ = true;
};

TEST_P(CaptureTest, ChunksOfAnySizeGiveTheSameBits) {
  const auto tokens = prompt(1, 150);
  const Trace whole = solo(tokens, options(5, 160), 150);
  for (const int chunk : {1, 2, 7, 64, 100}) {
    EXPECT_TRUE(solo(tokens, options(5, 160), chunk) == whole) << "chunk " << chunk;
  }
}

TEST_P(CaptureTest, ThreadsDoNotChangeTheBits) {
  if (GetParam().backend != "cpu") GTEST_SKIP() << "only the cpu backend has threads";
  const auto tokens = prompt(2, 90);
  const Trace one = solo(tokens, options(6, 110));
  for (const int threads : {2, 3, 5}) {
    EXPECT_TRUE(solo(tokens, options(6, 110), 32, threads) == one) << threads << " threads";
  }
}

TEST_P(CaptureTest, ARowInABatchIsTheRowAlone) {
  constexpr int kRows = 5;
  std::vector<std::vector<TokenId>> prompts;
  std::vector<Trace> alone;
  for (int i = 0; i < kRows; ++i) {
    prompts.push_back(prompt(10 + i, 1 + 23 * i));
    alone.push_back(solo(prompts.back(), options(static_cast<std::uint64_t>(i), 100 + 7 * i)));
  }
  Engine engine = make_engine(kRows);
  std::vector<Trace> traces(kRows);
  std::vector<int> rows;
  for (int i = 0; i < kRows; ++i) {
    rows.push_back(engine.open_row(options(static_cast<std::uint64_t>(i), 100 + 7 * i)));
    engine.append(rows.back(), prompts[static_cast<std::size_t>(i)]);
    record(engine.step(), traces);  // rows join while others decode
  }
  while (engine.has_work()) record(engine.step(), traces);
  for (int i = 0; i < kRows; ++i) {
    Trace& trace = traces[static_cast<std::size_t>(rows[static_cast<std::size_t>(i)])];
    trace.cache = stored(engine, rows[static_cast<std::size_t>(i)]);
    EXPECT_TRUE(trace == alone[static_cast<std::size_t>(i)]) << "row " << i;
  }
}

TEST_P(CaptureTest, AUsedSlotIsAsGoodAsAFreshOne) {
  const auto tokens = prompt(3, 70);
  const Trace fresh = solo(tokens, options(7, 90));
  Engine engine = make_engine();
  solo(engine, prompt(4, 200), options(8, 256));
  EXPECT_TRUE(solo(engine, tokens, options(7, 90)) == fresh);
}

TEST_P(CaptureTest, PoisonChangesNothing) {
  const auto tokens = prompt(5, 67);
  const Trace clean = solo(tokens, options(9, 90));
  Engine engine = make_engine(3);
  std::vector<Trace> traces(3);
  for (int slot = 0; slot < 3; ++slot) EngineAudit::poison_slot(engine, slot, 0);
  const int row = engine.open_row(options(9, 90));
  engine.append(row, tokens);
  while (engine.has_work()) {
    EngineAudit::poison_activations(engine);
    EngineAudit::poison_slot(engine, row, engine.length(row));
    record(engine.step(), traces);
  }
  traces[static_cast<std::size_t>(row)].cache = stored(engine, row);
  EXPECT_TRUE(traces[static_cast<std::size_t>(row)] == clean);
}

TEST_P(CaptureTest, PaddingAndStoppedRowsStoreNothing) {
  Engine engine = make_engine(4);  // three rows run in the bucket of four
  std::vector<int> rows;
  for (int i = 0; i < 3; ++i) {
    rows.push_back(engine.open_row(options(static_cast<std::uint64_t>(i), i == 1 ? 12 : 40)));
    engine.append(rows.back(), prompt(20 + i, 10));
  }
  const std::vector<std::byte> before = EngineTestAccess::keys(engine, 0, 3);
  while (engine.status(rows[1]) == RowStatus::kRunning) engine.step();
  const std::vector<std::byte> stopped = EngineTestAccess::keys(engine, 0, rows[1]);
  while (engine.has_work()) engine.run(100);
  EXPECT_EQ(EngineTestAccess::keys(engine, 0, 3), before);
  EXPECT_EQ(EngineTestAccess::keys(engine, 0, rows[1]), stopped);
}

TEST_P(CaptureTest, GoingBackAndAppendingAgainGivesTheSameBits) {
  const auto tokens = prompt(6, 130);
  Engine engine = make_engine();
  const int row = engine.open_row(options(3, 200));
  std::vector<Trace> first(1);
  engine.append(row, tokens);
  while (engine.has_work()) record(engine.step(), first);
  for (const int keep : {0, 1, 63, 64, 65, 129, 130, 150, 160, 180, 198}) {
    const std::vector<TokenId> all(engine.history(row).begin(), engine.history(row).end());
    if (const int kept = engine.keepable(row, keep); kept != keep) {
      EXPECT_LT(keep, static_cast<int>(all.size()) - engine.max_rewind(row));
      EXPECT_LT(kept, keep);
      EXPECT_EQ(engine.keepable(row, kept), kept);
      EXPECT_TRUE(forgets()) << "kept " << keep;
      expect_error(ErrorCode::kContextOverflow, "have let go",
                   [&] { engine.keep_first(row, keep); });
      continue;
    }
    const std::vector<std::byte> bytes = stored(engine, row);
    engine.keep_first(row, keep);
    std::vector<Trace> again(1);
    engine.append(row, std::span(all).subspan(static_cast<std::size_t>(keep),
                                              all.size() - 1 - static_cast<std::size_t>(keep)));
    while (engine.has_work()) record(engine.step(), again);
    EXPECT_EQ(again[0].tokens, std::vector<TokenId>{all.back()}) << "kept " << keep;
    EXPECT_EQ(std::bit_cast<std::uint32_t>(again[0].logprobs[0]),
              std::bit_cast<std::uint32_t>(first[0].logprobs.back()));
    EXPECT_EQ(stored(engine, row), bytes) << "kept " << keep;
  }
}

constexpr int kDepth = 16;  // EngineOptions::rollback_depth

// Any number of the last tokens taken back on the device and appended again: the bits are those of
// never having gone back.
TEST_P(CaptureTest, TakingBackOnTheDeviceAndAppendingAgainGivesTheSameBits) {
  const auto tokens = prompt(7, 70);
  const Trace whole = solo(tokens, options(4, 140));
  Engine engine = make_engine(2);
  const int row = engine.open_row(options(4, 140));
  std::vector<Trace> traces(2);
  engine.append(row, tokens);
  while (traces[0].tokens.size() < 20) record(engine.step(), traces);
  for (int count = 0; count <= kDepth; ++count) {
    engine.drop_last(row, 1);  // the token that is in no cache yet
    traces[0].tokens.pop_back();
    traces[0].logprobs.pop_back();
    std::vector<TokenId> all = tokens;
    all.insert(all.end(), traces[0].tokens.begin(), traces[0].tokens.end());
    const int length = engine.length(row);
    ASSERT_EQ(length, static_cast<int>(all.size()));
    engine.rollback({{count, 0}});
    EXPECT_EQ(engine.length(row), length - count);
    EXPECT_EQ(static_cast<int>(engine.history(row).size()), length - count);
    engine.append(row, std::span(all).last(static_cast<std::size_t>(count)));
    record(engine.step(), traces);  // the token that was dropped
    record(engine.step(), traces);
    EXPECT_EQ(engine.length(row), length + 1) << "count " << count;
  }
  while (engine.has_work()) record(engine.run(1000), traces);
  traces[0].cache = stored(engine, row);
  EXPECT_EQ(traces[0].tokens, whole.tokens);
  EXPECT_TRUE(traces[0] == whole);
}

// What is queued moves up behind what is kept. By every executor, and in a loop, whose first round
// takes back and whose others follow; also when a kernel says how many, and nobody knows before the
// results are read.
TEST_P(CaptureTest, ARowGoesOnFromWhatItsStepTakesBack) {
  const std::vector<int> counts = {0, 1, 7, kDepth};
  constexpr int kOther = 30;  // tokens of a row that takes nothing back
  std::vector<Trace> want(counts.size());
  for (const bool eager : {true, false}) {
    for (const bool dependent : {true, false}) {
      if (GetParam().backend != "cuda" && (eager || !dependent)) continue;  // it has neither
      for (const auto& [rounds, kernel] : {std::pair{1, false}, {1, true}, {9, false}, {9, true}}) {
        SCOPED_TRACE(testing::Message() << "eager " << eager << ", dependent " << dependent
                                        << ", rounds " << rounds << ", kernel " << kernel);
        eager_ = eager;
        dependent_launch_ = dependent;
        Engine engine = make_engine(2);
        const std::uint64_t captures = engine.counters().captures;
        const int other = engine.open_row(options(9, 0));
        engine.append(other, prompt(8, kOther));
        const int row = engine.open_row(options(5, 0));
        engine.append(row, prompt(9, 50));
        for (std::size_t i = 0; i < counts.size(); ++i) {
          for (int n = 0; n < 20; ++n) engine.step();
          std::vector<TokenId> all(engine.history(row).begin(), engine.history(row).end());
          const int length = engine.length(row);
          ASSERT_EQ(static_cast<int>(all.size()), length + 1);
          all.erase(all.end() - 1 - counts[i], all.end() - 1);
          std::vector<Trace> traces(2);
          if (kernel) {
            std::int32_t* device = engine.device_rollback();
            EngineTestAccess::impl(engine).backend->write(device + row, &counts[i],
                                                          sizeof(std::int32_t));
            EXPECT_EQ(engine.length(row), length);
          } else {
            engine.rollback({{0, counts[i]}});
            EXPECT_TRUE(std::ranges::equal(engine.history(row), all));
          }
          for (int n = 0; n < 9; n += rounds) record(engine.run(rounds), traces);
          EXPECT_EQ(engine.length(row), length - counts[i] + 9);
          Trace& got = traces[static_cast<std::size_t>(row)];
          ASSERT_EQ(got.tokens.size(), 9U);
          got.cache = stored(engine, row);
          if (want[i].tokens.empty()) {
            Engine fresh = make_engine(1);
            std::vector<Trace> alone(1);
            fresh.open_row(options(5, 0));
            fresh.append(0, all);
            while (alone[0].tokens.size() < 9) record(fresh.step(), alone);
            alone[0].cache = stored(fresh, 0);
            want[i] = alone[0];
          }
          EXPECT_TRUE(got == want[i]) << "count " << counts[i];
          all.insert(all.end(), got.tokens.begin(), got.tokens.end());
          EXPECT_TRUE(std::ranges::equal(engine.history(row), all));
        }
        EXPECT_EQ(engine.counters().captures, captures);
      }
    }
  }
}

// A kernel that asks for too much stops its row, of which nothing has changed, and no other.
TEST_P(CaptureTest, WhatCannotBeTakenBackStopsItsRow) {
  const Trace whole = solo(prompt(11, 20), options(6, 60));
  for (const bool loop : {false, true}) {
    Engine engine = make_engine(3);
    std::vector<Trace> traces(3);
    const int good = engine.open_row(options(6, 60));
    engine.append(good, prompt(11, 20));
    const int bad = engine.open_row(options(7, 200));
    engine.append(bad, prompt(12, 40));
    const int done = engine.open_row(options(8, 43));
    engine.append(done, prompt(13, 40));
    while (traces[static_cast<std::size_t>(bad)].tokens.size() < 5) record(engine.step(), traces);
    ASSERT_EQ(engine.status(done), RowStatus::kLength);
    const std::vector<std::byte> bytes = stored(engine, bad);
    const std::vector<TokenId> known(engine.history(bad).begin(), engine.history(bad).end());
    const int length = engine.length(bad);

    expect_error(ErrorCode::kContextOverflow, "can take back at most 16",
                 [&] { engine.rollback({{0, kDepth + 1, 0}}); });
    expect_error(ErrorCode::kContextOverflow, "not -1", [&] { engine.rollback({{1, -1, 0}}); });
    expect_error(ErrorCode::kInvalidArgument, "row 2 has stopped",
                 [&] { engine.rollback({{1, 1, 1}}); });
    const std::int32_t counts[] = {0, kDepth + 1, 1};
    EngineTestAccess::impl(engine).backend->write(engine.device_rollback(), counts, sizeof(counts));
    record(loop ? engine.run(1000) : engine.step(), traces);
    EXPECT_EQ(engine.status(bad), RowStatus::kRefused);
    EXPECT_EQ(engine.status(done), RowStatus::kLength);
    EXPECT_EQ(engine.length(bad), length);
    EXPECT_TRUE(std::ranges::equal(engine.history(bad), known));
    EXPECT_EQ(stored(engine, bad), bytes);
    EXPECT_EQ(traces[static_cast<std::size_t>(bad)].tokens.size(), 5U);

    while (engine.status(good) == RowStatus::kRunning) record(engine.step(), traces);
    traces[static_cast<std::size_t>(good)].cache = stored(engine, good);
    EXPECT_TRUE(traces[static_cast<std::size_t>(good)] == whole);
    engine.append(bad, {});  // it goes on from where it was
    while (traces[static_cast<std::size_t>(bad)].tokens.size() < 10) record(engine.step(), traces);
    std::vector<Trace> alone(1);
    Engine fresh = make_engine();
    fresh.open_row(options(7, 200));
    fresh.append(0, prompt(12, 40));
    while (alone[0].tokens.size() < 10) record(fresh.step(), alone);
    EXPECT_EQ(traces[static_cast<std::size_t>(bad)].tokens, alone[0].tokens);
  }
}

TEST_P(CaptureTest, ALoopIsItsSteps) {
  constexpr int kRows = 3;
  const auto start = [&](Engine& engine) {
    for (int i = 0; i < kRows; ++i) {
      const int row = engine.open_row(options(static_cast<std::uint64_t>(i), 60 + 30 * i));
      engine.append(row, prompt(30 + i, 5 + i));
    }
  };
  Engine stepped = make_engine(kRows);
  std::vector<Trace> by_step(kRows);
  start(stepped);
  while (stepped.has_work()) record(stepped.step(), by_step);
  Engine looped = make_engine(kRows);
  std::vector<Trace> by_loop(kRows);
  start(looped);
  while (looped.has_work()) record(looped.run(1000), by_loop);
  for (int i = 0; i < kRows; ++i) {
    by_step[static_cast<std::size_t>(i)].cache = stored(stepped, i);
    by_loop[static_cast<std::size_t>(i)].cache = stored(looped, i);
    EXPECT_TRUE(by_loop[static_cast<std::size_t>(i)] == by_step[static_cast<std::size_t>(i)]);
    EXPECT_EQ(looped.status(i), RowStatus::kLength);
  }
  EXPECT_EQ(looped.counters().tokens, stepped.counters().tokens);
}

// Rows of different lengths, one of which stops while the others go on: every executor gives the
// same bits. On a GPU: op by op, one graph a step, one graph for the whole, each with dependent
// launches and without.
TEST_P(CaptureTest, EveryExecutorGivesTheSameBits) {
  constexpr int kRows = 3;
  std::vector<Trace> first;
  for (const bool eager : {true, false}) {
    for (const bool dependent : {true, false}) {
      if (GetParam().backend != "cuda" && (eager || !dependent)) continue;  // it has neither
      for (const int rounds : {1, 1000}) {
        eager_ = eager;
        dependent_launch_ = dependent;
        Engine engine = make_engine(kRows + 1);
        std::vector<Trace> traces(kRows + 1);
        for (int i = 0; i < kRows; ++i) {
          const int row = engine.open_row(options(static_cast<std::uint64_t>(i), 70 + 60 * i));
          engine.append(row, prompt(70 + i, 58 + 3 * i));
        }
        while (engine.has_work()) record(engine.run(rounds), traces);
        for (int i = 0; i < kRows; ++i) {
          traces[static_cast<std::size_t>(i)].cache = stored(engine, i);
        }
        if (first.empty()) first = traces;
        EXPECT_TRUE(traces == first)
            << "eager " << eager << ", dependent " << dependent << ", rounds " << rounds;
      }
    }
  }
}

// stream() hands out the same tokens, and what it computed beyond what was seen is rolled back.
TEST_P(CaptureTest, AStreamIsItsStepsAndItsOverrunIsRolledBack) {
  const auto tokens = prompt(80, 20);
  const Trace whole = solo(tokens, options(11, 200));
  Engine engine = make_engine(2);
  for (const int wanted : {1, 5, 40}) {
    std::vector<Trace> traces(2);
    const int row = engine.open_row(options(11, 200));
    engine.append(row, tokens);
    while (static_cast<int>(traces[static_cast<std::size_t>(row)].tokens.size()) < wanted) {
      record(engine.stream({&row, 1}), traces);
    }
    auto& seen = traces[static_cast<std::size_t>(row)];
    seen.tokens.resize(static_cast<std::size_t>(wanted));
    seen.logprobs.resize(static_cast<std::size_t>(wanted));
    engine.keep_first(row, 20 + wanted);
    EXPECT_EQ(engine.history(row).size(), static_cast<std::size_t>(20 + wanted));
    engine.append(row, {});
    while (engine.has_work()) record(engine.stream({&row, 1}), traces);
    seen.cache = stored(engine, row);
    EXPECT_TRUE(seen == whole) << wanted;
    engine.close_row(row);
  }
}

// Two callers that stream their own rows in turn: each run ends the other's, and no token is lost.
TEST_P(CaptureTest, StreamsThatTakeTurnsLoseNothing) {
  const Trace alone[2] = {solo(prompt(81, 9), options(1, 80)),
                          solo(prompt(82, 30), options(2, 90))};
  Engine engine = make_engine(2);
  std::vector<Trace> traces(2);
  int rows[2];
  for (int i = 0; i < 2; ++i) {
    rows[i] = engine.open_row(options(static_cast<std::uint64_t>(i) + 1, 80 + 10 * i));
    engine.append(rows[i], prompt(81 + i, i == 0 ? 9 : 30));
  }
  bool more = true;
  while (more) {
    more = false;
    for (const int& row : rows) {
      const auto events = engine.stream({&row, 1});
      more = more || !events.empty() || engine.has_work();
      record(events, traces);
    }
  }
  for (int i = 0; i < 2; ++i) {
    Trace& trace = traces[static_cast<std::size_t>(rows[i])];
    trace.cache = stored(engine, rows[i]);
    EXPECT_TRUE(trace == alone[i]) << i;
  }
}

TEST_P(CaptureTest, AddressesAndPlansAreConstant) {
  Engine engine = make_engine(2);
  const EngineCounters before = engine.counters();
  for (int i = 0; i < 4; ++i) solo(engine, prompt(40 + i, 1 + 60 * i), options(1, 200));
  const EngineCounters after = engine.counters();
  EXPECT_EQ(after.address_hash, before.address_hash);
  EXPECT_EQ(after.plans, before.plans);
  EXPECT_EQ(after.captures, before.captures);
  EXPECT_GT(after.steps, before.steps);
}

TEST_P(CaptureTest, NanFailsItsRowAndNoOther) {
  const auto tokens = prompt(50, 20);
  const Trace alone = solo(tokens, options(2, 40));
  Engine engine = make_engine(2);
  std::vector<Trace> traces(2);
  const int good = engine.open_row(options(2, 40));
  const int bad = engine.open_row(options(2, 40));
  engine.append(good, tokens);
  engine.append(bad, tokens);
  record(engine.step(), traces);
  EngineAudit::poison_slot(engine, bad, 0);
  while (engine.has_work()) record(engine.step(), traces);
  EXPECT_EQ(engine.status(bad), RowStatus::kFailed);
  EXPECT_EQ(traces[static_cast<std::size_t>(bad)].tokens.back(), -1);
  EXPECT_EQ(engine.status(good), RowStatus::kLength);
  traces[static_cast<std::size_t>(good)].cache = stored(engine, good);
  EXPECT_TRUE(traces[static_cast<std::size_t>(good)] == alone);
}

TEST_P(CaptureTest, CapacityDoesNotChangeTheBits) {
  const auto tokens = prompt(60, 80);
  const Trace small = solo(tokens, options(4, 100));
  Engine large = make_engine(1, 32, 1, 4096);
  EXPECT_TRUE(solo(large, tokens, options(4, 100)) == small);
}

INSTANTIATE_TEST_SUITE_P(
    Backends, CaptureTest, testing::ValuesIn(cases()), [](const auto& case_info) {
      return case_info.param.backend + "_" +
             (case_info.param.isa.empty() ? "" : case_info.param.isa + "_") + case_info.param.form +
             (case_info.param.cache_type == "f16" ? "" : "_" + case_info.param.cache_type);
    });

}  // namespace
}  // namespace pianola
