// The host's rows and the device's agree, also after a write that failed.
#include "engine/row_table.h"

#include <gtest/gtest.h>

#include <cstring>

#include "base/check.h"
#include "expect_error.h"

namespace pianola {
namespace {

constexpr int kRows = 2;
constexpr int kMaxSeqLen = 32;
constexpr int kVocab = 100;

// Host memory whose writes fail when they are told to. Only the writes are used.
class FailingBackend final : public Backend {
 public:
  int writes_until_failure = -1;  // negative: none fails

  void write(void* device, const void* host, std::size_t bytes) override {
    if (writes_until_failure == 0) fail(ErrorCode::kDevice, "the write failed");
    if (writes_until_failure > 0) --writes_until_failure;
    std::memcpy(device, host, bytes);
  }
  void read(void* host, const void* device, std::size_t bytes) override {
    std::memcpy(host, device, bytes);
  }
  void copy(void* to, const void* from, std::size_t bytes) override { write(to, from, bytes); }

  const char* name() const override { return "failing"; }
  std::string description() const override { return name(); }
  std::size_t available_memory() const override { return 0; }
  std::unique_ptr<DeviceMemory> allocate(std::size_t, MemoryUse) override { return nullptr; }
  WeightLayout weight_layout(const WeightDecl&) const override { return {}; }
  void repack(const WeightDecl&, const WeightLayout&, const std::byte*, std::byte*) override {}
  void check(const Plan&, const PlanTables&) const override {}
  std::size_t scratch_bytes(const Plan&, const PlanTables&) const override { return 0; }
  std::unique_ptr<Program> compile(const Plan&, const Binding&) override { return nullptr; }
};

class RowTableTest : public testing::Test {
 protected:
  RowTableTest()
      : layout_({.rows = kRows, .max_seq_len = kMaxSeqLen}),
        memory_(layout_.bytes() + kAlign),
        shared_(layout_.shared_bytes() + kAlign),
        state_(layout_.bind(aligned(memory_), aligned(shared_))),
        caches_(std::vector<AttentionSpec>{{1, 8, 8}}, {.max_seq_len = kMaxSeqLen}),
        table_(state_, kRows, kMaxSeqLen, kVocab, caches_, {}, backend_) {}

  static constexpr std::size_t kAlign = 128;
  static std::byte* aligned(std::vector<std::byte>& memory) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
    return memory.data() + (kAlign - address % kAlign) % kAlign;
  }

  std::vector<std::byte> device_row(int index) const {
    const auto* bytes = reinterpret_cast<const std::byte*>(state_.row + index);
    return {bytes, bytes + sizeof(RowState)};
  }

  // What host and device say of an open row is the same.
  void expect_agreement(int index) {
    const RowTable::Row& row = table_.row(index);
    const RowState& device = state_.row[index];
    EXPECT_EQ(device.length, row.length);
    EXPECT_EQ(device.history_length, static_cast<int>(row.history.size()));
    EXPECT_EQ(device.max_length, row.max_length);
    EXPECT_EQ(device.status, row.status);
    const TokenId* history = state_.history + std::int64_t{index} * state_.history_stride;
    EXPECT_TRUE(std::equal(row.history.begin(), row.history.end(), history));
  }

  // `call` fails at each of its writes and changes nothing; then it works.
  template <typename Call>
  void survives_failures(int index, int writes, Call&& call) {
    for (int write = 0; write < writes; ++write) {
      SCOPED_TRACE(write);
      const RowTable::Row row = table_.row(index);
      const std::vector<std::byte> device = device_row(index);
      backend_.writes_until_failure = write;
      expect_error(ErrorCode::kDevice, "the write failed", call);
      const RowTable::Row& after = table_.row(index);
      EXPECT_EQ(after.length, row.length);
      EXPECT_EQ(after.max_length, row.max_length);
      EXPECT_EQ(after.status, row.status);
      EXPECT_EQ(after.history, row.history);
      EXPECT_EQ(device_row(index), device);
      expect_agreement(index);
    }
    backend_.writes_until_failure = writes;  // as many as there are
    call();
    backend_.writes_until_failure = -1;
    expect_agreement(index);
  }

  static RowOptions options(float temperature, int max_length) {
    RowOptions o{.max_length = max_length, .stop_tokens = {3, 4}};
    o.sampling.temperature = temperature;
    o.sampling.logit_bias = {{5, temperature}};
    return o;
  }

  FailingBackend backend_;
  StepStateLayout layout_;
  std::vector<std::byte> memory_;
  std::vector<std::byte> shared_;
  StepState state_;
  CacheLayout caches_;
  RowTable table_;
};

// A window keeps what the next token needs and a little more: further back only to the start.
TEST_F(RowTableTest, AWindowBoundsHowFarARowGoesBack) {
  constexpr int kLong = 400;
  const StepStateLayout layout({.rows = 1, .max_seq_len = kLong});
  std::vector<std::byte> memory(layout.bytes() + kAlign);
  std::vector<std::byte> shared(layout.shared_bytes() + kAlign);
  const StepState state = layout.bind(aligned(memory), aligned(shared));
  // A ring of 128 positions for a window of 70; the other layer could go back any way.
  const CacheLayout caches(std::vector<AttentionSpec>{{1, 8, 8, 70}, {1, 8, 8}},
                           {.max_seq_len = kLong, .chunk = 32});
  RowTable table(state, 1, kLong, kVocab, caches, {}, backend_);
  const int row = table.open({});
  const auto grow = [&](int n) {
    table.append(row, std::vector<TokenId>(static_cast<std::size_t>(n), 1));
    table.computed(row, n);
  };
  grow(128);
  EXPECT_EQ(table.max_rewind(row), 128);  // nothing has been overwritten
  grow(1);                                // position 0 has
  EXPECT_EQ(table.max_rewind(row), 59);   // 70 are left: position 70 reads 1 to 70
  expect_error(ErrorCode::kContextOverflow, "the last 59 can be taken back",
               [&] { table.keep_first(row, 69); });
  EXPECT_EQ(table.row(row).length, 129);
  table.keep_first(row, 70);
  EXPECT_EQ(table.max_rewind(row), 0);  // position 0 is still gone
  grow(20);
  EXPECT_EQ(table.max_rewind(row), 20);
  grow(50);  // 140 tokens: positions 0 to 11 are gone
  EXPECT_EQ(table.max_rewind(row), 140 - 81);
  table.keep_first(row, 0);  // always
  EXPECT_EQ(table.max_rewind(row), 0);
  grow(100);
  EXPECT_EQ(table.max_rewind(row), 100);
}

TEST_F(RowTableTest, AFailedWriteChangesNothing) {
  const int row = table_.open(options(1, 20));
  expect_agreement(row);
  const std::vector<TokenId> tokens = {7, 8, 9, 10, 11};
  survives_failures(row, 2, [&] { table_.append(row, tokens); });
  table_.computed(row, 5);
  state_.row[row].length = 5;
  survives_failures(row, 1, [&] { table_.append(row, {}); });  // the last token again
  EXPECT_EQ(table_.row(row).length, 4);
  survives_failures(row, 1, [&] { table_.configure(row, options(2, 25)); });
  EXPECT_EQ(state_.row[row].sampling.temperature, 2);
  EXPECT_EQ(state_.row[row].bias[0].bias, 2);
  survives_failures(row, 1, [&] { table_.keep_first(row, 3); });
  EXPECT_EQ(table_.row(row).length, 3);
}

// What was taken back is the device's until its next step: it counts those tokens, and what is
// queued lies behind them.
TEST_F(RowTableTest, WhatIsOwedIsToldWithWhateverIsToldBeforeTheNextStep) {
  const StepStateLayout layout(
      {.rows = kRows, .max_seq_len = kMaxSeqLen, .rollback_depth = 4, .most_ahead = kMaxSeqLen});
  std::vector<std::byte> memory(layout.bytes() + kAlign);
  std::vector<std::byte> shared(layout.shared_bytes() + kAlign);
  const StepState state = layout.bind(aligned(memory), aligned(shared));
  RowTable table(state, kRows, kMaxSeqLen, kVocab, caches_, {}, backend_);
  ASSERT_EQ(table.open({}), 0);
  table.append(0, std::vector<TokenId>{1, 2, 3, 4, 5, 6, 7, 8});
  table.computed(0, 6);
  state.row[0].length = 6;
  const auto device_history = [&] {
    return std::vector<TokenId>(state.history, state.history + state.row[0].history_length);
  };

  backend_.writes_until_failure = 0;
  expect_error(ErrorCode::kDevice, "the write failed", [&] { table.rollback({{3, 0}}); });
  backend_.writes_until_failure = -1;
  EXPECT_EQ(table.row(0).length, 6);
  table.rollback({{3, 0}});
  EXPECT_EQ(state.rollback[0], 3);
  EXPECT_EQ(state.row[0].length, 6);
  EXPECT_EQ(table.row(0).length, 3);
  EXPECT_EQ(table.row(0).history, (std::vector<TokenId>{1, 2, 3, 7, 8}));

  table.append(0, std::vector<TokenId>{9});
  EXPECT_EQ(state.row[0].length, 6);
  EXPECT_EQ(device_history(), (std::vector<TokenId>{1, 2, 3, 4, 5, 6, 7, 8, 9}));
  EXPECT_EQ(table.row(0).history, (std::vector<TokenId>{1, 2, 3, 7, 8, 9}));

  table.rollback({{1, 0}});  // and one more
  EXPECT_EQ(state.rollback[0], 4);
  table.rollback({{1, 0}});  // which is more than one step takes back
  EXPECT_EQ(state.rollback[0], 1);
  EXPECT_EQ(state.row[0].length, 2);
  EXPECT_EQ(device_history(), (std::vector<TokenId>{1, 2, 7, 8, 9}));
  EXPECT_EQ(table.row(0).history, (std::vector<TokenId>{1, 7, 8, 9}));

  expect_error(ErrorCode::kContextOverflow, "at most 1 of them, not 2",
               [&] { table.rollback({{2, 0}}); });
  expect_error(ErrorCode::kContextOverflow, "not -1", [&] { table.rollback({{-1, 0}}); });
  expect_error(ErrorCode::kInvalidArgument, "row 1 is not open", [&] { table.rollback({{1, 1}}); });
  expect_error(ErrorCode::kInvalidArgument, "a count for each of 2",
               [&] { table.rollback({{1}}); });
  EXPECT_EQ(state.rollback[0], 1);

  table.keep_first(0, 3);
  EXPECT_EQ(state.rollback[0], 0);
  EXPECT_EQ(state.row[0].length, 1);
  EXPECT_EQ(device_history(), (std::vector<TokenId>{1, 7, 8}));
}

TEST_F(RowTableTest, ARowThatFailsToOpenStaysFree) {
  ASSERT_EQ(table_.open({}), 0);
  backend_.writes_until_failure = 0;
  expect_error(ErrorCode::kDevice, "the write failed", [&] { table_.open({}); });
  expect_error(ErrorCode::kInvalidArgument, "not open", [&] { table_.row(1); });
  backend_.writes_until_failure = -1;
  EXPECT_EQ(table_.open(options(1, 8)), 1);
  expect_agreement(1);
  EXPECT_EQ(table_.open({}), -1);
}

// What a row was told once stays on the device when only its tokens change.
TEST_F(RowTableTest, TokensLeaveTheSamplingAlone) {
  const int row = table_.open(options(1, 20));
  table_.append(row, std::vector<TokenId>{1, 2});
  table_.open(options(3, 10));
  table_.keep_first(row, 1);
  EXPECT_EQ(state_.row[row].sampling.temperature, 1);
  EXPECT_EQ(state_.row[row].stop_count, 2);
  EXPECT_EQ(state_.row[row].bias_count, 1);
  EXPECT_EQ(state_.row[row].bias[0].bias, 1);
}

}  // namespace
}  // namespace pianola
