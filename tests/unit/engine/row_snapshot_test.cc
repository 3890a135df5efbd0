// Snapshots that do not fit and files that are damaged are refused, and nothing has changed then.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <fstream>
#include <limits>

#include "cache/rows.h"
#include "expect_error.h"
#include "pianola/engine.h"

namespace pianola {
namespace {

EngineOptions engine_options(int slots) {
  return {.backend = "cpu",
          .threads = 1,
          .max_seq_len = 150,
          .slots = slots,
          .chunk = 16,
          .rollback_depth = 4,
          .checkpoints = 3};
}

// An engine with a row that must not change, whatever is tried.
class SnapshotRefusal : public testing::Test {
 protected:
  SnapshotRefusal()
      : engine_(tiny_model("qwen3_5/hybrid"), engine_options(1)),
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
  void TearDown() override {
    const std::vector<TokenId> known = history(engine_, row_);
    EXPECT_EQ(known.size(), 45U);
    EXPECT_EQ(engine_.status(row_), RowStatus::kRunning);
    Engine fresh(tiny_model("qwen3_5/hybrid"), engine_options(1));
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
  static constexpr std::size_t kInput = 56;
  static constexpr std::size_t kTokens = 64;

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
    EngineOptions options = engine_options(1);
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
  EngineOptions options = engine_options(2);
  options.chunk = 50;
  options.checkpoints = 0;
  Engine other(tiny_model(hybrid), options);
  EXPECT_NO_THROW(other.restore(other.open_row({}), snapshot_));
  EXPECT_EQ(other.length(0), snapshot_.length());
}

TEST(Snapshot, OfAWindowNeedsTheSameRing) {
  Engine engine(tiny_model("mistral/window"), engine_options(1));
  const RowSnapshot snapshot = engine.snapshot(engine.open_row({}));
  EngineOptions options = engine_options(1);
  options.chunk = 60;  // 16 + 59 positions take two blocks instead of one
  Engine other(tiny_model("mistral/window"), options);
  expect_error(ErrorCode::kInvalidArgument, "chunk size",
               [&] { other.restore(other.open_row({}), snapshot); });
}

TEST_F(SnapshotRefusal, OfDamagedFiles) {
  for (const std::size_t size : {0UL, 7UL, 63UL}) {
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
  flip(kVersion, "version 18, this is version 2");
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
  refuse(kInput, -1, part);
  refuse(kWritten, 70, part);  // then there would be more bytes
  refuse(kTokens, -1, part);
  refuse(kTokens, 1 << 20, part);
  refuse(kFingerprint, 1, "another model");
  const auto overflow = [&](std::size_t at, std::int32_t value, const std::string& holds) {
    std::string changed = bytes_;
    put(changed, at, value);
    sign(changed);
    write_file(changed);
    expect_error(ErrorCode::kContextOverflow, holds,
                 [&] { engine_.restore(row_, RowSnapshot::load(file_)); });
  };
  overflow(kWritten, 151, "the slot holds 150");
  overflow(kFolded, std::numeric_limits<std::int32_t>::max(), "the slot holds 150");
  overflow(kInput, 1, "there is room for 0");  // the model has no encoder
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

}  // namespace
}  // namespace pianola
