// What moves whole rows: fork, swap, snapshot and restore, checkpoints. A row that was moved goes
// on as if it had been alone from its first token, to the bit; what is refused changes nothing.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <fstream>
#include <limits>

#include "cache/rows.h"
#include "engine_test_access.h"
#include "expect_error.h"
#include "pianola/engine.h"

namespace pianola {
namespace {

struct Stack {
  std::string name;
  std::string model;
  std::string cache_type = "f16";
  bool exact = false;
};

void PrintTo(const Stack& stack, std::ostream* out) { *out << stack.name; }

std::vector<Stack> stacks() {
  return {{"full", "llama/untied"},     {"int8", "llama/untied", "int8"},
          {"window", "mistral/window"}, {"experts", "gpt_oss/mixed"},
          {"hybrid", "qwen3_5/hybrid"}, {"exact", "qwen3_5/hybrid", "f16", true}};
}

EngineOptions engine_options(const Stack& stack, int slots) {
  return {.backend = "cpu",
          .threads = 1,
          .max_seq_len = 150,
          .slots = slots,
          .chunk = 16,
          .cache_type = stack.cache_type,
          .rollback_depth = 4,
          .exact_rollback = stack.exact,
          .checkpoints = 3};
}

class RowVerbs : public testing::TestWithParam<Stack> {
 protected:
  static Engine make_engine(int slots) {
    return Engine(tiny_model(GetParam().model), engine_options(GetParam(), slots));
  }
  // What an engine that has held nothing else says after these tokens.
  static Said alone(const std::vector<TokenId>& tokens, const RowOptions& options, int count) {
    Engine engine = make_engine(1);
    const int row = engine.open_row(options);
    engine.append(row, tokens);
    return say(engine, row, count);
  }
  // A row that has said something.
  static int begin_row(Engine& engine, int text, int tokens, const RowOptions& options) {
    const int row = engine.open_row(options);
    engine.append(row, text_tokens(text, 0, tokens));
    say(engine, row, 5);
    return row;
  }
};

INSTANTIATE_TEST_SUITE_P(Stacks, RowVerbs, testing::ValuesIn(stacks()),
                         [](const auto& stack) { return stack.param.name; });

TEST_P(RowVerbs, ForksAreTheRowAloneAndTheirChoicesCountUp) {
  Engine engine = make_engine(4);
  const int row = begin_row(engine, 1, 90, sampled(3));
  const std::vector<TokenId> known = history(engine, row);
  const std::vector<int> forks = engine.fork(row, 3, sampled(8, 5));
  ASSERT_EQ(forks.size(), 3U);
  for (const int fork : forks) {
    EXPECT_EQ(engine.status(fork), RowStatus::kIdle);
    EXPECT_EQ(history(engine, fork), known);
    EXPECT_EQ(engine.length(fork), engine.length(row));
    engine.append(fork, {});
  }
  std::vector<Said> said(4);
  while (engine.has_work()) {
    for (const TokenEvent& event : engine.run(8)) {
      said[static_cast<std::size_t>(event.row)].add(event);
    }
  }
  const int count = 150 - static_cast<int>(known.size());
  EXPECT_EQ(said[static_cast<std::size_t>(row)], alone(known, sampled(3), count));
  for (std::uint32_t i = 0; i < 3; ++i) {
    EXPECT_EQ(said[static_cast<std::size_t>(forks[i])], alone(known, sampled(8, 5 + i), count))
        << i;
  }
}

TEST_P(RowVerbs, AForkTakesQueuedTokensAlong) {
  Engine engine = make_engine(2);
  const int row = engine.open_row(sampled(1));
  engine.append(row, text_tokens(2, 0, 40));
  engine.step();
  ASSERT_EQ(engine.length(row), 16);
  const std::vector<int> forks = engine.fork(row, 1, sampled(2));
  ASSERT_EQ(forks.size(), 1U);
  EXPECT_EQ(engine.length(forks[0]), 16);
  EXPECT_EQ(history(engine, forks[0]), text_tokens(2, 0, 40));
  EXPECT_EQ(go_on(engine, forks[0], 6), alone(text_tokens(2, 0, 40), sampled(2), 6));
  EXPECT_EQ(engine.length(row), 16);
  EXPECT_EQ(say(engine, row, 6), alone(text_tokens(2, 0, 40), sampled(1), 6));
}

TEST_P(RowVerbs, AForkGoesBackAsFarAsItsRow) {
  Engine engine = make_engine(2);
  const int row = begin_row(engine, 1, 90, sampled(3));
  const std::vector<int> forks = engine.fork(row, 1, sampled(4));
  ASSERT_EQ(forks.size(), 1U);
  const int rewind = engine.max_rewind(row);
  EXPECT_GE(rewind, 4);
  EXPECT_EQ(engine.max_rewind(forks[0]), rewind);
  engine.drop_last(forks[0], rewind);
  const std::vector<TokenId> kept = history(engine, forks[0]);
  engine.append(forks[0], text_tokens(3, 0, 2));
  std::vector<TokenId> changed = kept;
  for (const TokenId token : text_tokens(3, 0, 2)) changed.push_back(token);
  EXPECT_EQ(say(engine, forks[0], 6), alone(changed, sampled(4), 6));
}

TEST_P(RowVerbs, SwappedRowsGoOnWithTheirOptions) {
  Engine engine = make_engine(3);
  const int a = begin_row(engine, 1, 100, sampled(3));
  const int b = begin_row(engine, 2, 7, sampled(4));
  const int empty = engine.open_row(sampled(5));
  const std::vector<TokenId> of_a = history(engine, a);
  const std::vector<TokenId> of_b = history(engine, b);
  engine.swap(a, b);
  EXPECT_EQ(history(engine, a), of_b);
  EXPECT_EQ(history(engine, b), of_a);
  engine.swap(empty, b);
  EXPECT_EQ(history(engine, b), std::vector<TokenId>());
  engine.swap(a, a);
  EXPECT_EQ(say(engine, a, 8), alone(of_b, sampled(4), 8));
  EXPECT_EQ(say(engine, empty, 8), alone(of_a, sampled(3), 8));
  engine.append(b, text_tokens(0, 0, 20));
  EXPECT_EQ(say(engine, b, 3), alone(text_tokens(0, 0, 20), sampled(5), 3));
}

// A device may be a round ahead of what the caller has seen: the tokens follow their row.
TEST_P(RowVerbs, TokensThatNobodyHasSeenAreSwappedWithTheirRows) {
  Engine engine = make_engine(2);
  const int rows[2] = {begin_row(engine, 1, 30, sampled(3)), begin_row(engine, 2, 7, sampled(4))};
  const std::vector<TokenId> known[2] = {history(engine, rows[0]), history(engine, rows[1])};
  Said said[2];
  for (const TokenEvent& event : engine.stream()) said[event.row].add(event);
  EngineTestAccess::impl(engine).running->wait();  // a round goes by
  engine.swap(rows[0], rows[1]);
  EXPECT_EQ(engine.history(0).size(), known[1].size() + 2);
  const int first = 0;
  const auto events = engine.step({&first, 1});
  ASSERT_EQ(events.size(), 1U);
  EXPECT_EQ(events[0].row, 0);
  said[1].add(events[0]);
  engine.swap(rows[0], rows[1]);
  const int other = 0;
  for (const TokenEvent& event : engine.step({&other, 1})) said[event.row].add(event);
  EXPECT_EQ(said[0], alone(known[0], sampled(3), 2));
  EXPECT_EQ(said[1], alone(known[1], sampled(4), 2));
}

TEST_P(RowVerbs, ASnapshotGoesOnElsewhere) {
  const auto file =
      std::filesystem::temp_directory_path() / ("pianola_snapshot_" + std::to_string(getpid()));
  Engine engine = make_engine(1);
  const int row = begin_row(engine, 1, 90, sampled(3));
  const RowSnapshot snapshot = engine.snapshot(row);
  const std::vector<TokenId> known = history(engine, row);
  snapshot.save(file);
  const Said next = alone(known, sampled(3), 8);
  EXPECT_EQ(say(engine, row, 8), next);  // the row itself is as it was
  EngineOptions longer = engine_options(GetParam(), 2);
  longer.max_seq_len = 240;
  Engine other(tiny_model(GetParam().model), longer);
  begin_row(other, 2, 120, sampled(9));
  const int in_memory = begin_row(other, 0, 130, sampled(3));
  other.restore(in_memory, snapshot);
  EXPECT_EQ(other.status(in_memory), RowStatus::kIdle);
  EXPECT_EQ(history(other, in_memory), known);
  EXPECT_EQ(go_on(other, in_memory, 8), next);
  other.restore(in_memory, RowSnapshot::load(file));
  EXPECT_EQ(go_on(other, in_memory, 8), next);
  EXPECT_TRUE(std::filesystem::remove(file));
}

// Going back after a restore: what the snapshot holds of it, and no more.
TEST_P(RowVerbs, ARestoredRowGoesBackAsFarAsTheOneItWas) {
  Engine engine = make_engine(1);
  const int row = begin_row(engine, 1, 120, sampled(3));
  engine.drop_last(row, 3);
  const std::vector<TokenId> known = history(engine, row);
  const int rewind = engine.max_rewind(row);
  const RowSnapshot snapshot = engine.snapshot(row);
  engine.reset(row);
  engine.restore(row, snapshot);
  EXPECT_EQ(engine.max_rewind(row), rewind);
  engine.drop_last(row, rewind);
  std::vector<TokenId> shorter = known;
  shorter.resize(known.size() - static_cast<std::size_t>(rewind));
  if (shorter.empty()) {
    EXPECT_EQ(engine.length(row), 0);
    return;
  }
  engine.append(row, text_tokens(0, 0, 1));
  shorter.push_back(text_token(0, 0));
  EXPECT_EQ(say(engine, row, 6), alone(shorter, sampled(3), 6));
}

// With its last token, which is in no cache.
TEST_P(RowVerbs, ARowAtItsCapacityIsSavedAndRestored) {
  Engine engine = make_engine(2);
  const int row = engine.open_row(sampled(3));
  engine.append(row, text_tokens(1, 0, 150));
  say(engine, row, 1);
  EXPECT_EQ(engine.status(row), RowStatus::kLength);
  const std::vector<TokenId> known = history(engine, row);
  ASSERT_EQ(known.size(), 151U);
  const int other = engine.open_row(sampled(3));
  engine.restore(other, engine.snapshot(row));
  EXPECT_EQ(history(engine, other), known);
  EXPECT_EQ(engine.length(other), 150);
  expect_error(ErrorCode::kContextOverflow, "150", [&] { engine.append(other, {}); });
  engine.drop_last(other, 3);
  EXPECT_EQ(go_on(engine, other, 1), alone({known.begin(), known.begin() + 148}, sampled(3), 1));
}

// To compute the last token again is to go back by one: what was overwritten is still gone.
TEST_P(RowVerbs, GoingOnFromTheLastTokenBringsNothingBack) {
  EngineOptions options = engine_options(GetParam(), 1);
  options.logits = true;
  Engine engine(tiny_model(GetParam().model), options);
  for (int tokens = 60; tokens < 130; tokens += 5) {
    const int row = engine.open_row(sampled(1));
    for (int done = 0; done < tokens; done += 5) {
      engine.logits(row, text_tokens(1, done, 5));  // leaves nothing to compute
    }
    const int rewind = engine.max_rewind(row);
    engine.append(row, {});
    EXPECT_EQ(engine.length(row), tokens - 1);
    EXPECT_EQ(engine.max_rewind(row), rewind) << tokens;
    engine.drop_last(row, std::min(rewind, tokens - 1));
    std::vector<TokenId> known = history(engine, row);
    known.push_back(text_token(0, 0));
    engine.append(row, text_tokens(0, 0, 1));
    EXPECT_EQ(say(engine, row, 3), alone(known, sampled(1), 3)) << tokens;
    engine.close_row(row);
  }
}

TEST(Fork, TooFewSlotsOrBadOptionsChangeNothing) {
  Engine engine(tiny_model("llama/untied"), engine_options(stacks()[0], 3));
  const int row = engine.open_row(sampled(1));
  engine.append(row, text_tokens(1, 0, 30));
  say(engine, row, 2);
  const std::vector<TokenId> known = history(engine, row);
  EXPECT_TRUE(engine.fork(row, 3, {}).empty());
  for (const int count : {0, -1, 4, std::numeric_limits<int>::min()}) {
    expect_error(ErrorCode::kInvalidArgument, "expected 1 to 3",
                 [&] { engine.fork(row, count, {}); });
  }
  expect_error(ErrorCode::kInvalidArgument, "max_length",
               [&] { engine.fork(row, 2, {.max_length = 151}); });
  expect_error(ErrorCode::kInvalidArgument, "not open", [&] { engine.fork(1, 1, {}); });
  EXPECT_EQ(history(engine, row), known);
  EXPECT_EQ(engine.status(row), RowStatus::kRunning);
  EXPECT_EQ(engine.fork(row, 2, {}).size(), 2U);  // both places are still free
  EXPECT_TRUE(engine.fork(row, 1, {}).empty());
}

TEST(Swap, NeedsOpenRows) {
  Engine engine(tiny_model("llama/untied"), engine_options(stacks()[0], 2));
  const int row = engine.open_row({});
  for (const int bad : {1, 2, -1}) {
    expect_error(ErrorCode::kInvalidArgument, "not open", [&] { engine.swap(row, bad); });
    expect_error(ErrorCode::kInvalidArgument, "not open", [&] { engine.swap(bad, row); });
  }
}

// --- Snapshots that do not fit, and files that are damaged
// ----------------------------------------

// An engine with a row that must not change, whatever is tried.
class SnapshotRefusal : public testing::Test {
 protected:
  SnapshotRefusal()
      : engine_(tiny_model("qwen3_5/hybrid"), engine_options(stacks()[4], 1)),
        row_(engine_.open_row(sampled(1))),
        file_(std::filesystem::temp_directory_path() /
              ("pianola_refusal_" + std::to_string(getpid()))) {
    engine_.append(row_, text_tokens(1, 0, 40));
    say(engine_, row_, 3);
    snapshot_ = engine_.snapshot(row_);
    snapshot_.save(file_);
    bytes_ = read_text_file(file_, std::size_t{1} << 30);
    say(engine_, row_, 2);
  }
  ~SnapshotRefusal() override {
    const std::vector<TokenId> known = history(engine_, row_);
    EXPECT_EQ(known.size(), 45U);
    EXPECT_EQ(engine_.status(row_), RowStatus::kRunning);
    Engine fresh(tiny_model("qwen3_5/hybrid"), engine_options(stacks()[4], 1));
    const int row = fresh.open_row(sampled(1));
    fresh.append(row, known);
    EXPECT_EQ(say(engine_, row_, 3), say(fresh, row, 3));
    std::filesystem::remove(file_);
  }

  void write_file(std::string_view bytes) const {
    std::ofstream(file_, std::ios::binary | std::ios::trunc) << bytes;
  }
  void expect_refusal(const std::string& part) {
    expect_error(ErrorCode::kInvalidArgument, part,
                 [&] { engine_.restore(row_, RowSnapshot::load(file_)); });
  }

  // The fields of a file, by their offsets in snapshot.cc.
  static constexpr std::size_t kVersion = 8;
  static constexpr std::size_t kHistory = 12;
  static constexpr std::size_t kData = 16;
  static constexpr std::size_t kChecksum = 24;
  static constexpr std::size_t kFingerprint = 32;
  static constexpr std::size_t kLength = 40;
  static constexpr std::size_t kWritten = 44;
  static constexpr std::size_t kFolded = 48;
  static constexpr std::size_t kFloor = 52;
  static constexpr std::size_t kTokens = 56;

  template <typename T>
  static void put(std::string& bytes, std::size_t at, T value) {
    std::memcpy(bytes.data() + at, &value, sizeof(value));
  }
  // As whoever made the file would have summed it: header, tokens and caches, each in words of
  // eight bytes.
  static void sign(std::string& bytes) {
    std::uint32_t count = 0;
    std::memcpy(&count, bytes.data() + kHistory, sizeof(count));
    const std::size_t data = kTokens + std::size_t{count} * sizeof(TokenId);
    std::uint64_t sum = 0xcbf29ce484222325ULL;
    for (const auto& [begin, end] :
         {std::pair{kFingerprint, kTokens}, {kTokens, data}, {data, bytes.size()}}) {
      for (std::size_t at = begin; at < end; at += 8) {
        std::uint64_t word = 0;
        std::memcpy(&word, bytes.data() + at, std::min<std::size_t>(8, end - at));
        sum = (sum ^ word) * 0x100000001b3ULL;
        sum ^= sum >> 29;
      }
    }
    put(bytes, kChecksum, sum);
  }

  Engine engine_;
  int row_;
  std::filesystem::path file_;
  RowSnapshot snapshot_;
  std::string bytes_;
};

TEST_F(SnapshotRefusal, OfAnotherModelCacheTypeDepthOrLength) {
  const auto refuse = [&](const std::string& model, auto change, ErrorCode code,
                          const std::string& part) {
    EngineOptions options = engine_options(stacks()[4], 1);
    change(options);
    Engine other(tiny_model(model), options);
    const int row = other.open_row({});
    other.append(row, text_tokens(2, 0, 9));
    expect_error(code, part, [&] { other.restore(row, snapshot_); });
    EXPECT_EQ(history(other, row), text_tokens(2, 0, 9));
    EXPECT_EQ(other.status(row), RowStatus::kRunning);
    expect_error(code, part, [&] { other.restore(row, RowSnapshot::load(file_)); });
  };
  const std::string hybrid = "qwen3_5/hybrid";
  const auto invalid = ErrorCode::kInvalidArgument;
  refuse("llama/untied", [](EngineOptions&) {}, invalid, "another model");
  refuse("qwen3_next/experts", [](EngineOptions&) {}, invalid, "another model");
  refuse(hybrid, [](EngineOptions& o) { o.cache_type = "int8"; }, invalid, "cache type");
  refuse(hybrid, [](EngineOptions& o) { o.rollback_depth = 5; }, invalid, "rollback depth");
  refuse(hybrid, [](EngineOptions& o) { o.exact_rollback = true; }, invalid, "rollback depth");
  refuse(hybrid, [](EngineOptions& o) { o.max_seq_len = 40; }, ErrorCode::kContextOverflow, "40");
  // What shapes no cache of this stack is no reason.
  EngineOptions options = engine_options(stacks()[4], 2);
  options.chunk = 50;
  options.checkpoints = 0;
  Engine other(tiny_model(hybrid), options);
  EXPECT_NO_THROW(other.restore(other.open_row({}), snapshot_));
  EXPECT_EQ(other.length(0), snapshot_.length());
}

TEST(Snapshot, OfAWindowNeedsTheSameRing) {
  Engine engine(tiny_model("mistral/window"), engine_options(stacks()[2], 1));
  const RowSnapshot snapshot = engine.snapshot(engine.open_row({}));
  EngineOptions options = engine_options(stacks()[2], 1);
  options.chunk = 60;  // 16 + 59 positions take two blocks instead of one
  Engine other(tiny_model("mistral/window"), options);
  expect_error(ErrorCode::kInvalidArgument, "chunk size",
               [&] { other.restore(other.open_row({}), snapshot); });
}

TEST_F(SnapshotRefusal, OfDamagedFiles) {
  for (const std::size_t size : {0UL, 7UL, 55UL}) {
    write_file(std::string_view(bytes_).substr(0, size));
    expect_refusal("does not begin like one");
  }
  for (const std::size_t size : {kTokens, kTokens + 100, bytes_.size() - 1}) {
    write_file(std::string_view(bytes_).substr(0, size));
    expect_refusal("behind its header");
  }
  write_file(bytes_ + "x");
  expect_refusal("behind its header");
  const auto flip = [&](std::size_t at, const std::string& part) {
    std::string changed = bytes_;
    changed[at] = static_cast<char>(changed[at] ^ 0x10);
    write_file(changed);
    expect_refusal(part);
  };
  flip(0, "does not begin like one");
  flip(7, "does not begin like one");
  flip(kVersion, "version 17, this is version 1");
  flip(kHistory, "behind its header");
  flip(kData + 7, "behind its header");
  for (const std::size_t at : {kChecksum, kFingerprint, kLength, kFloor + 3, kTokens,
                               kTokens + 43 * 4, bytes_.size() / 2, bytes_.size() - 1}) {
    flip(at, "checksum");
  }
  expect_error(ErrorCode::kNotFound, "cannot be opened",
               [&] { RowSnapshot::load(file_.string() + ".none"); });
}

TEST_F(SnapshotRefusal, OfAbsurdLengths) {
  const auto claim = [&](std::uint32_t tokens, std::uint64_t data) {
    std::string changed = bytes_;
    put(changed, kHistory, tokens);
    put(changed, kData, data);
    write_file(changed);
    expect_refusal("behind its header");
  };
  const std::uint64_t rest = bytes_.size() - kTokens;
  claim(0xFFFFFFFFU, 0);
  claim(0xFFFFFFFFU, rest - 4 * std::uint64_t{0xFFFFFFFFU});  // right, modulo 2^64
  claim(43, ~std::uint64_t{0});
  claim(43, std::uint64_t{1} << 62);
  claim(0, 0);
}

// Signed with the right checksum, so that only sense can tell.
TEST_F(SnapshotRefusal, OfHeadersThatContradictThemselves) {
  const auto refuse = [&](std::size_t at, std::int32_t value, const std::string& part) {
    std::string changed = bytes_;
    put(changed, at, value);
    sign(changed);
    write_file(changed);
    SCOPED_TRACE(std::to_string(at) + " is " + std::to_string(value));
    expect_refusal(part);
  };
  const std::string part = "contradicts itself";
  refuse(kLength, 44, part);  // of 43 tokens
  refuse(kLength, -1, part);
  refuse(kLength, std::numeric_limits<std::int32_t>::max(), part);
  refuse(kWritten, 41, part);  // of 42 that it holds
  refuse(kWritten, -5, part);
  refuse(kFolded, 41, part);
  refuse(kFloor, 43, part);
  refuse(kFloor, -1, part);
  refuse(kWritten, 70, part);  // then there would be more bytes
  refuse(kTokens, -1, part);
  refuse(kTokens, 1 << 20, part);
  refuse(kFingerprint, 1, "another model");
  const auto overflow = [&](std::size_t at, std::int32_t value) {
    std::string changed = bytes_;
    put(changed, at, value);
    sign(changed);
    write_file(changed);
    expect_error(ErrorCode::kContextOverflow, "the slot holds 150",
                 [&] { engine_.restore(row_, RowSnapshot::load(file_)); });
  };
  overflow(kWritten, 151);
  overflow(kFolded, std::numeric_limits<std::int32_t>::max());
  // As it was written, it is signed as this test signs.
  std::string same = bytes_;
  sign(same);
  EXPECT_EQ(same, bytes_);
}

TEST_F(SnapshotRefusal, LeavesTheFileThatWasThere) {
  const std::filesystem::path nowhere = file_.string() + ".folder/row";
  expect_error(ErrorCode::kNotFound, "cannot be written", [&] { snapshot_.save(nowhere); });
  // A full disk: the process may write no more than a part of it.
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit old_limit{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old_limit), 0);
  const rlimit limit{.rlim_cur = bytes_.size() / 2, .rlim_max = old_limit.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  const RowSnapshot other = engine_.snapshot(row_);
  expect_error(ErrorCode::kNotFound, "cannot be written", [&] { other.save(file_); });
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &old_limit), 0);
  std::signal(SIGXFSZ, old_handler);
  EXPECT_EQ(read_text_file(file_, std::size_t{1} << 30), bytes_);
  for (const auto& entry : std::filesystem::directory_iterator(file_.parent_path())) {
    const std::string name = entry.path().filename();
    EXPECT_FALSE(name.starts_with(file_.filename().string() + ".")) << name << " was left";
  }
}

// --- Checkpoints --------------------------------------------------------------------------------

// Steps of 16 tokens, checkpoints of multiples of the rollback depth, 4, with 3 places.
class Checkpoints : public testing::TestWithParam<bool> {
 protected:
  static Stack stack() { return {"hybrid", "qwen3_5/hybrid", "f16", GetParam()}; }
  static Engine make_engine(int places, int slots = 2) {
    EngineOptions options = engine_options(stack(), slots);
    options.checkpoints = places;
    return Engine(tiny_model("qwen3_5/hybrid"), options);
  }
  static int prompted(Engine& engine, int tokens) {
    const int row = engine.open_row(sampled(3));
    engine.append(row, text_tokens(1, 0, tokens));
    while (engine.length(row) < tokens) engine.step({&row, 1});
    return row;
  }
  // The lengths that can be kept, besides those of the last few tokens.
  static std::vector<int> kept_below(const Engine& engine, int row, int length) {
    std::vector<int> kept;
    for (int n = 1; n < length; ++n) {
      if (engine.keepable(row, n) == n) kept.push_back(n);
    }
    return kept;
  }
  static void expect_alone(Engine& engine, int row) {
    const std::vector<TokenId> known = history(engine, row);
    Engine fresh = make_engine(0, 1);
    const int alone = fresh.open_row(sampled(3));
    fresh.append(alone, known);
    EXPECT_EQ(say(engine, row, 4), say(fresh, alone, 4));
  }
};

INSTANTIATE_TEST_SUITE_P(Rollback, Checkpoints, testing::Bool(),
                         [](const auto& exact) { return exact.param ? "Exact" : "Compact"; });

// The newest is never dropped; of the others the one whose neighbours are closest, the first of
// equals. Before the first there is 0.
TEST_P(Checkpoints, WhenTheyAreFullTheClosestNeighboursLoseTheOneBetween) {
  const struct {
    int tokens;
    std::vector<int> kept;
  } cases[] = {{48, {16, 32}},     // and 48, which is within the last tokens
               {64, {32, 48}},     // 16 went: 32 - 0 and 48 - 16 are equal
               {80, {32, 64}},     // 48 went: 64 - 32 is less than 48 - 0
               {96, {32, 80}},     // 64 went: 80 - 32 is less than 64 - 0
               {112, {32, 96}},    // 80 went: 96 - 32 is less than 80 - 0
               {128, {32, 112}}};  // 96 went: 112 - 32 is less than 96 - 0
  for (const auto& c : cases) {
    Engine engine = make_engine(3);
    const int row = prompted(engine, c.tokens);
    EXPECT_EQ(kept_below(engine, row, c.tokens - 8), c.kept) << c.tokens;
  }
}

TEST_P(Checkpoints, OnePlaceHoldsTheNewestAndNoPlaceNone) {
  Engine one = make_engine(1);
  const int row = prompted(one, 96);
  for (int i = 0; i < 20; ++i) one.step();  // decoding takes none
  EXPECT_EQ(kept_below(one, row, 100), std::vector<int>{96});
  Engine none = make_engine(0);
  EXPECT_EQ(kept_below(none, prompted(none, 96), 88), std::vector<int>());
}

TEST_P(Checkpoints, ARowGoesOnFromOne) {
  Engine engine = make_engine(3);
  const int row = prompted(engine, 96);
  engine.keep_first(row, 80);
  EXPECT_EQ(engine.max_rewind(row), 0);
  EXPECT_EQ(engine.length(row), 80);
  expect_error(ErrorCode::kContextOverflow, "let go", [&] { engine.append(row, {}); });
  engine.append(row, text_tokens(2, 0, 3));
  expect_alone(engine, row);
}

TEST_P(Checkpoints, AndBackAgain) {
  Engine engine = make_engine(3);
  const int row = prompted(engine, 96);  // 32, 80, 96
  for (const int n : {80, 80, 32, 32}) {
    engine.keep_first(row, n);
    engine.append(row, text_tokens(2, n, 17));
    while (engine.length(row) < n + 17) engine.step();
    EXPECT_EQ(engine.keepable(row, n), n);
    expect_alone(engine, row);
  }
  engine.keep_first(row, 32);
  EXPECT_EQ(engine.keepable(row, 31), 0);
  expect_error(ErrorCode::kContextOverflow, "let go", [&] { engine.keep_first(row, 31); });
  EXPECT_EQ(engine.length(row), 32);
  engine.append(row, text_tokens(0, 0, 1));
  expect_alone(engine, row);
}

TEST_P(Checkpoints, EndWithTheTokensTheyAreOf) {
  Engine engine = make_engine(3);
  const int row = prompted(engine, 96);
  engine.keep_first(row, 80);
  EXPECT_EQ(engine.keepable(row, 80), 80);
  engine.append(row, text_tokens(2, 0, 20));  // 96 again, and of other tokens
  while (engine.length(row) < 112) engine.step();
  EXPECT_EQ(engine.keepable(row, 99), 96);
  engine.keep_first(row, 96);
  engine.append(row, text_tokens(2, 90, 5));
  expect_alone(engine, row);
  engine.reset(row);
  engine.append(row, text_tokens(2, 0, 100));
  while (engine.length(row) < 10) engine.step();
  EXPECT_EQ(engine.keepable(row, 90), 90);  // queued, and nothing is lost
  engine.reset(row);
  engine.append(row, text_tokens(2, 0, 12));
  while (engine.length(row) < 12) engine.step();
  EXPECT_EQ(engine.keepable(row, 7), 0);  // none of the old ones
}

TEST_P(Checkpoints, AreSwappedWithTheirRowsAndNotForked) {
  Engine engine = make_engine(3, 3);
  const int a = prompted(engine, 96);
  const int b = prompted(engine, 48);
  engine.swap(a, b);
  EXPECT_EQ(kept_below(engine, b, 88), (std::vector<int>{32, 80}));
  EXPECT_EQ(kept_below(engine, a, 40), (std::vector<int>{16, 32}));
  const std::vector<int> forks = engine.fork(b, 1, sampled(3));
  ASSERT_EQ(forks.size(), 1U);
  EXPECT_EQ(engine.keepable(forks[0], 88), 0);
  engine.keep_first(b, 32);
  engine.keep_first(a, 16);
  for (const int row : {a, b}) {
    engine.append(row, text_tokens(2, row, 7));
    expect_alone(engine, row);
  }
}

}  // namespace
}  // namespace pianola
