// Caches whose pages come as rows grow: on the host, over memory that faults where there is none.
#include <gtest/gtest.h>

#include <algorithm>
#include <tuple>

#include "cache/rows.h"
#include "engine/engine_audit.h"
#include "engine_test_access.h"
#include "expect_error.h"
#include "host_pages.h"
#include "pianola/engine.h"

namespace pianola {
namespace {

constexpr std::size_t kPage = 4096;

// --- Memory -----------------------------------------------------------------------------------

TEST(PagedMemory, PagesComeAndGoWhole) {
  const HostPages pages(kPage);
  const auto memory = allocate_host_memory(10 * kPage + 100, MemoryUse::kOnDemand);
  std::byte* data = memory->data();
  EXPECT_EQ(memory->size(), 10 * kPage + 100);
  EXPECT_EQ(memory->resident_bytes(), 0U);
  memory->require(3 * kPage - 1, 2);
  memory->require(10 * kPage + 99, 1);
  memory->require(0, 0);
  EXPECT_EQ(memory->resident_bytes(), 3 * kPage);
  EXPECT_EQ(data[2 * kPage], std::byte{0});
  data[2 * kPage] = data[4 * kPage - 1] = data[10 * kPage + 99] = std::byte{7};
  memory->require(2 * kPage, 2 * kPage);  // again: they keep what they hold
  EXPECT_EQ(data[2 * kPage], std::byte{7});

  const auto expect_first = [&](MemoryRange within, std::size_t begin, std::size_t end) {
    const MemoryRange range = memory->first_resident(within);
    EXPECT_EQ(range.begin, begin);
    EXPECT_EQ(range.end, end);
  };
  expect_first({0, memory->size()}, 2 * kPage, 4 * kPage);
  expect_first({3 * kPage + 5, 3 * kPage + 6}, 3 * kPage + 5, 3 * kPage + 6);
  expect_first({4 * kPage, 10 * kPage}, 0, 0);
  expect_first({4 * kPage, memory->size()}, 10 * kPage, memory->size());

  memory->give_back(2 * kPage + 1, 2 * kPage - 2);  // no whole page
  EXPECT_EQ(memory->resident_bytes(), 3 * kPage);
  memory->give_back(2 * kPage + 1, 8 * kPage + 99);
  EXPECT_EQ(memory->resident_bytes(), kPage);
  EXPECT_EQ(data[2 * kPage], std::byte{7});
  memory->require(3 * kPage, 1);
  EXPECT_EQ(data[4 * kPage - 1], std::byte{0}) << "a page that came again";
}

TEST(PagedMemory, NoMorePagesThanAreAllowed) {
  const HostPages pages(kPage);
  const auto memory = allocate_host_memory(10 * kPage, MemoryUse::kOnDemand);
  memory->set_limit(3 * kPage - 1);
  expect_error(ErrorCode::kOutOfMemory, "no more than", [&] { memory->require(0, 4 * kPage); });
  EXPECT_EQ(memory->resident_bytes(), 3 * kPage);
  memory->give_back(0, kPage);
  memory->require(9 * kPage, 1);
}

TEST(PagedMemoryDeathTest, WhatWasNotRequiredCannotBeTouched) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const HostPages pages(kPage);
  const auto memory = allocate_host_memory(4 * kPage, MemoryUse::kOnDemand);
  memory->require(kPage, kPage);
  memory->data()[kPage] = std::byte{1};
  const auto touch = [&](std::size_t at) {
    *static_cast<volatile std::byte*>(memory->data() + at) = std::byte{1};
  };
  EXPECT_DEATH(touch(kPage - 1), "");
  EXPECT_DEATH(touch(2 * kPage), "");
}

// --- Engines ----------------------------------------------------------------------------------

struct Stack {
  std::string name;
  std::string model;
  std::string backend = "cpu";
  std::string cache_type = "f16";
  bool exact = false;
};

void PrintTo(const Stack& stack, std::ostream* out) { *out << stack.name; }

std::vector<Stack> stacks() {
  return {{"full", "llama/untied"},
          {"int8", "llama/untied", "cpu", "int8"},
          {"window", "mistral/window"},
          {"experts", "gpt_oss/mixed"},
          {"hybrid", "qwen3_5/hybrid"},
          {"exact", "qwen3_5/hybrid", "cpu", "f16", true},
          {"mamba", "bamba/hybrid"},
          {"reference_full", "llama/untied", "reference"},
          {"reference_window", "mistral/window", "reference", "int8"},
          {"reference_hybrid", "qwen3_5/hybrid", "reference"}};
}

class RowPagesTest : public testing::TestWithParam<Stack> {
 protected:
  static constexpr int kCeiling = 1 << 15;

  static EngineOptions options(int slots, int max_seq_len) {
    return {.backend = GetParam().backend,
            .threads = 1,
            .max_seq_len = max_seq_len,
            .slots = slots,
            .chunk = 16,
            .cache_type = GetParam().cache_type,
            .rollback_depth = 4,
            .exact_rollback = GetParam().exact,
            .checkpoints = 2,
            .score = true,
            .logits = true};
  }
  static std::shared_ptr<const CausalModel> model() { return tiny_model(GetParam().model); }
  // From an engine whose memory is there from the beginning.
  static Said alone(const std::vector<TokenId>& tokens, const RowOptions& how, int count) {
    set_host_page_bytes(0);
    Engine engine(model(), options(1, 512));
    set_host_page_bytes(kPage);
    const int row = engine.open_row(how);
    engine.append(row, tokens);
    return say(engine, row, count);
  }

  const HostPages pages_{kPage};
};

INSTANTIATE_TEST_SUITE_P(Stacks, RowPagesTest, testing::ValuesIn(stacks()),
                         [](const auto& stack) { return stack.param.name; });

TEST_P(RowPagesTest, ACeilingTakesAddressesAndRowsTakeMemory) {
  const MemoryPlan plan = Engine::plan(*model(), options(2, kCeiling));
  Engine engine(model(), options(2, kCeiling));
  const EngineCounters loaded = engine.counters();
  EXPECT_EQ(plan.page_bytes, kPage);
  EXPECT_EQ(loaded.cache_reserved, plan.cache);
  EXPECT_LE(loaded.cache_resident, plan.cache_at_first);
  const bool grows = GetParam().model != "mistral/window";  // where every layer is a small ring
  if (grows) {
    EXPECT_LT(plan.cache_at_first, plan.cache / 8);
  }
  const int row = engine.open_row(sampled(3));
  const auto text = text_tokens(1, 0, 21);
  engine.append(row, text);
  Said said = say(engine, row, 1);
  EXPECT_EQ(engine.counters().cache_resident, plan.cache_at_first);
  const Said rest = say(engine, row, 299);
  said.tokens.insert(said.tokens.end(), rest.tokens.begin(), rest.tokens.end());
  said.logprobs.insert(said.logprobs.end(), rest.logprobs.begin(), rest.logprobs.end());
  EXPECT_EQ(said, alone(text, sampled(3), 300));
  const EngineCounters now = engine.counters();
  if (grows) {
    EXPECT_GT(now.cache_resident, plan.cache_at_first);
    EXPECT_LT(now.cache_resident, plan.cache / 4);
  }
  EXPECT_EQ(now.address_hash, loaded.address_hash);
  EXPECT_EQ(now.plans, loaded.plans);
  EXPECT_EQ(now.captures, loaded.captures);
}

TEST_P(RowPagesTest, RunsAndStreamsFindTheirPages) {
  Engine engine(model(), options(3, kCeiling));
  std::vector<int> rows;
  std::vector<Said> said(3);
  for (int i = 0; i < 3; ++i) {
    RowOptions how = sampled(static_cast<std::uint64_t>(i));
    how.max_length = 150 + 60 * i;
    rows.push_back(engine.open_row(how));
    engine.append(rows.back(), text_tokens(i, 0, 5 + 70 * i));
  }
  for (int i = 0; engine.has_work(); ++i) {
    for (const TokenEvent& event : i % 2 ? engine.run(40) : engine.stream()) {
      said[static_cast<std::size_t>(event.row)].add(event);
    }
    if (i % 7 == 3) EngineAudit::poison(engine);
  }
  for (int i = 0; i < 3; ++i) {
    RowOptions how = sampled(static_cast<std::uint64_t>(i));
    const auto count = 150 + 60 * i - (5 + 70 * i);
    EXPECT_EQ(said[static_cast<std::size_t>(i)], alone(text_tokens(i, 0, 5 + 70 * i), how, count));
  }
}

TEST_P(RowPagesTest, RowsMoveWhole) {
  Engine engine(model(), options(4, kCeiling));
  const int row = engine.open_row(sampled(3));
  engine.append(row, text_tokens(1, 0, 200));
  say(engine, row, 5);
  const std::vector<TokenId> known = history(engine, row);
  const RowSnapshot snapshot = engine.snapshot(row);
  const std::vector<int> forks = engine.fork(row, 2, sampled(3));
  const int other = engine.open_row(sampled(3));
  engine.append(other, text_tokens(2, 0, 3));
  say(engine, other, 1);
  engine.swap(row, other);  // a long row to a slot that has held little
  const Said expected = alone(known, sampled(3), 100);
  EXPECT_EQ(go_on(engine, forks[0], 100), expected);
  EXPECT_EQ(go_on(engine, forks[1], 100), alone(known, sampled(3, 1), 100));
  EXPECT_EQ(go_on(engine, other, 100), expected);
  engine.restore(row, snapshot);
  engine.configure_row(row, sampled(3));
  EXPECT_EQ(go_on(engine, row, 100), expected);
}

TEST_P(RowPagesTest, ScoresAndLogitsAreThoseOfWholeCaches) {
  const auto text = text_tokens(5, 0, 230);
  std::vector<float> scores;
  std::vector<float> logits;
  for (const std::size_t page : {std::size_t{0}, kPage}) {
    set_host_page_bytes(page);
    Engine engine(model(), options(1, page ? kCeiling : 512));
    const std::vector<float> said = engine.score(text);
    const int row = engine.open_row({});
    std::vector<float> all;
    for (int at = 0; at < 160; at += 16) {
      const auto some =
          engine.logits(row, std::span(text).subspan(static_cast<std::size_t>(at), 16));
      all.insert(all.end(), some.begin(), some.end());
    }
    if (page == 0) {
      scores = said;
      logits = all;
    }
    EXPECT_EQ(said, scores);
    EXPECT_EQ(all, logits);
  }
}

// --- When memory ends -------------------------------------------------------------------------

// A block of each of the four regions of this model takes one page.
class OutOfPages : public testing::TestWithParam<const char*> {
 protected:
  static constexpr int kRegions = 4;

  static EngineOptions options(int slots) {
    return {.backend = GetParam(),
            .threads = 1,
            .max_seq_len = 4096,
            .slots = slots,
            .chunk = 16,
            .logits = true};
  }
  // An engine whose rows can have so many blocks of 64 tokens in all.
  Engine make_engine(int slots, int blocks) const {
    EngineOptions o = options(slots);
    const MemoryPlan plan = Engine::plan(*model_, o);
    EXPECT_EQ(plan.cache_at_first, kRegions * kPage);
    o.memory_limit = plan.total - plan.cache + static_cast<std::size_t>(kRegions * blocks) * kPage;
    return Engine(model_, o);
  }
  Said alone(const std::vector<TokenId>& tokens, const RowOptions& how, int count) const {
    Engine engine(model_, options(1));
    const int row = engine.open_row(how);
    engine.append(row, tokens);
    return say(engine, row, count);
  }
  static int begin_row(Engine& engine, int text, int tokens) {
    const int row = engine.open_row(sampled(3));
    engine.append(row, text_tokens(text, 0, tokens));
    return row;
  }
  // Fails for want of memory, and changes nothing that can be seen.
  template <typename Call>
  static void expect_refused(Engine& engine, const std::vector<int>& rows, Call&& call) {
    const auto look = [&] {
      std::vector<std::tuple<std::vector<TokenId>, int, RowStatus>> seen;
      for (const int row : rows) {
        seen.emplace_back(history(engine, row), engine.length(row), engine.status(row));
      }
      return seen;
    };
    const auto before = look();
    expect_error(ErrorCode::kOutOfMemory, "no memory for its caches", call);
    EXPECT_EQ(look(), before);
    EXPECT_TRUE(engine.healthy());
  }

  const HostPages pages_{kPage};
  const std::shared_ptr<const CausalModel> model_ = tiny_model("llama/untied");
};

INSTANTIATE_TEST_SUITE_P(Backends, OutOfPages, testing::Values("cpu", "reference"),
                         [](const auto& backend) { return std::string(backend.param); });

TEST_P(OutOfPages, WhatFitsOnlyInPartIsLoadedAndSaysSo) {
  EngineOptions o = options(1);
  const MemoryPlan whole = Engine::plan(*model_, o);
  EXPECT_TRUE(whole.fits());
  o.memory_limit = whole.total - whole.cache + whole.cache_at_first;
  const MemoryPlan plan = Engine::plan(*model_, o);
  EXPECT_FALSE(plan.fits());
  EXPECT_TRUE(plan.loads());
  for (const char* word : {"at first", "pages of 4.0 KiB", "it does not fit as a whole"}) {
    EXPECT_NE(plan.to_string().find(word), std::string::npos) << word;
  }
  Engine engine(model_, o);
  say(engine, begin_row(engine, 1, 20), 45);
  o.memory_limit -= 1;
  EXPECT_FALSE(Engine::plan(*model_, o).loads());
  expect_error(ErrorCode::kOutOfMemory, "it does not fit\n", [&] { Engine(model_, o); });
  o.max_seq_len = 0;  // what fits as a whole, where that is enough
  o.memory_limit = whole.total / 2;
  EXPECT_TRUE(Engine::plan(*model_, o).fits());
}

TEST_P(OutOfPages, ARowThatCannotGrowStopsNoOther) {
  Engine engine = make_engine(3, 3);
  const int a = begin_row(engine, 1, 120);
  const int b = begin_row(engine, 2, 10);
  Said said_a = say(engine, a, 9);
  Said said_b = say(engine, b, 1);
  ASSERT_EQ(engine.length(a), 128);
  EXPECT_EQ(engine.counters().cache_resident, 3 * kRegions * kPage);
  for (int i = 0; i < 2; ++i) {
    expect_refused(engine, {a, b}, [&] { engine.step(); });
    expect_refused(engine, {a, b}, [&] { engine.step({&a, 1}); });
    expect_refused(engine, {a, b}, [&] { engine.run(100); });
    expect_refused(engine, {a, b}, [&] { engine.stream({&a, 1}); });
    expect_refused(engine, {a, b}, [&] { engine.fork(b, 1, {}); });
    expect_refused(engine, {a, b}, [&] { engine.swap(a, b); });
  }
  while (engine.length(b) < 64) {  // all that its block holds
    for (const TokenEvent& event : engine.run(1000, {&b, 1})) said_b.add(event);
  }
  expect_refused(engine, {a, b}, [&] { engine.step({&b, 1}); });
  engine.close_row(a);  // its pages go to whom they are needed by
  const Said rest = say(engine, b, 150 - static_cast<int>(said_b.tokens.size()));
  said_b.tokens.insert(said_b.tokens.end(), rest.tokens.begin(), rest.tokens.end());
  said_b.logprobs.insert(said_b.logprobs.end(), rest.logprobs.begin(), rest.logprobs.end());
  EXPECT_EQ(said_a, alone(text_tokens(1, 0, 120), sampled(3), 9));
  EXPECT_EQ(said_b,
            alone(text_tokens(2, 0, 10), sampled(3), static_cast<int>(said_b.tokens.size())));
  EXPECT_EQ(engine.length(b), 150 + 10 - 1);
}

TEST_P(OutOfPages, ARowGoesOnWhenAnotherIsReset) {
  Engine engine = make_engine(2, 2);
  const int a = begin_row(engine, 1, 60);
  const int b = begin_row(engine, 2, 60);
  Said said = say(engine, a, 5);
  say(engine, b, 5);
  expect_refused(engine, {a, b}, [&] { engine.step({&a, 1}); });
  engine.keep_first(b, 30);  // keeps its page
  expect_refused(engine, {a, b}, [&] { engine.step({&a, 1}); });
  engine.reset(b);
  const Said rest = say(engine, a, 20);
  said.tokens.insert(said.tokens.end(), rest.tokens.begin(), rest.tokens.end());
  said.logprobs.insert(said.logprobs.end(), rest.logprobs.begin(), rest.logprobs.end());
  EXPECT_EQ(said, alone(text_tokens(1, 0, 60), sampled(3), 25));
  engine.append(b, text_tokens(2, 0, 5));
  expect_refused(engine, {a, b}, [&] { engine.step({&b, 1}); });
  engine.close_row(a);
  EXPECT_EQ(say(engine, b, 30), alone(text_tokens(2, 0, 5), sampled(3), 30));
}

TEST_P(OutOfPages, RestoringAndLogitsChangeNothingWhenTheyFail) {
  Engine engine = make_engine(2, 3);
  const int a = begin_row(engine, 1, 100);
  say(engine, a, 1);
  const RowSnapshot snapshot = engine.snapshot(a);
  const int b = engine.open_row(sampled(3));
  engine.append(b, text_tokens(2, 0, 7));
  say(engine, b, 1);
  expect_refused(engine, {a, b}, [&] { engine.restore(b, snapshot); });
  engine.keep_first(b, 7);
  for (int at = 7; at < 64; ++at) engine.logits(b, text_tokens(2, at, 1));
  expect_refused(engine, {a, b}, [&] { engine.logits(b, text_tokens(2, 64, 16)); });
  engine.close_row(a);
  engine.restore(b, snapshot);
  const std::vector<TokenId> known = history(engine, b);
  EXPECT_EQ(go_on(engine, b, 30), alone(known, sampled(3), 30));
}

}  // namespace
}  // namespace pianola
