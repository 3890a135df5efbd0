// RollbackOp, which the kernel of the embedding does, against backends/reference/rollback.cc.
#include <algorithm>
#include <random>

#include "backends/backend.h"
#include "backends/cuda/kernels/token.h"
#include "backends/reference/ops.h"
#include "cuda/graph_timing.h"
#include "cuda/state_fixture.h"

namespace pianola::cuda {
namespace {

constexpr int kDepth = 16;
constexpr int kWidth = 64;
constexpr int kVocab = 100;

void reference_rollback(const StepState& state) {
  const Plan plan;
  Binding binding;
  binding.state = state;
  reference::run(RollbackOp{}, BoundPlan(plan, binding));
}

// A table of f32, as large as these tests need.
class Table {
 public:
  Table() : values_(std::size_t{kVocab} * kWidth) {
    for (std::size_t i = 0; i < values_.size(); ++i) values_[i] = static_cast<float>(i);
    EXPECT_TRUE(packed_form(DType::kF32, weight_.codes, weight_.scales));
    memory_ = DeviceArray<float>(values_);
    weight_.data = reinterpret_cast<const std::byte*>(memory_.data());
    weight_.rows = kVocab;
    weight_.cols = kWidth;
  }
  const PackedWeight& weight() const { return weight_; }
  float at(int token, int col) const {
    return values_[static_cast<std::size_t>(token) * kWidth + static_cast<std::size_t>(col)];
  }

 private:
  std::vector<float> values_;
  DeviceArray<float> memory_;
  PackedWeight weight_;
};

// Rows that can take back what they are asked for, and rows that cannot for any of the reasons; in
// the step and not; with one token queued, none, or a long prompt.
void fill_randomly(const StepState& s, const StepLimits& limits, std::mt19937& random) {
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  std::vector<int> rows(static_cast<std::size_t>(limits.rows));
  for (int i = 0; i < limits.rows; ++i) rows[static_cast<std::size_t>(i)] = i;
  std::shuffle(rows.begin(), rows.end(), random);
  for (int i = 0; i < limits.rows; ++i) {
    RowState& row = s.row[i];
    row.length = below(3) ? below(150) : below(20);
    row.history_length =
        row.length + (below(3) ? below(3) : below(limits.max_seq_len - row.length));
    row.max_length = limits.max_seq_len;
    row.status = below(6) ? RowStatus::kRunning : static_cast<RowStatus>(below(6));
    row.reach = below(2) ? 0 : row.length + below(12);
    row.floor = below(3) ? 0 : std::max(0, row.length - below(30));
    for (int t = 0; t < s.history_stride; ++t) {
      s.history[std::int64_t{i} * s.history_stride + t] = below(kVocab);
    }
    s.rollback[i] = below(2) ? below(12) : below(3) ? 0 : below(40) - 10;
    s.went_back[i] = below(2) ? 0 : 1 + below(150);
  }
  const int lanes = 1 + below(limits.lanes);
  *s.counts = {.tokens = 0, .lanes = lanes};
  int t = 0;
  for (int lane = 0; lane < lanes; ++lane) {
    const int row = rows[static_cast<std::size_t>(lane)];
    const int most = std::max(1, (limits.tokens - t) / (lanes - lane));
    const int count = below(2) ? 1 : 1 + below(most);
    const bool masked = below(6) == 0;
    s.row_of[lane] = row;
    s.first_token[lane] = t;
    for (int i = 0; i < count; ++i, ++t) {
      s.lane_of[t] = lane;
      s.token[t] = below(kVocab);
      s.position[t] = masked ? -1 : s.row[row].length + i;
    }
  }
  s.first_token[lanes] = t;
  s.counts->tokens = t;
}

void expect_equal(const StepState& got, const StepState& want, const StepLimits& limits) {
  const auto equal = [](const auto* a, const auto* b, int count) {
    return std::memcmp(a, b, static_cast<std::size_t>(count) * sizeof(*a)) == 0;
  };
  for (int i = 0; i < limits.rows; ++i) {
    ASSERT_TRUE(equal(got.row + i, want.row + i, 1)) << "row " << i;
    // What lies behind the history is nobody's: it may have been moved from there.
    ASSERT_TRUE(equal(got.history + std::int64_t{i} * got.history_stride,
                      want.history + std::int64_t{i} * want.history_stride,
                      want.row[i].history_length))
        << "history of row " << i;
  }
  ASSERT_TRUE(equal(got.rollback, want.rollback, limits.rows));
  ASSERT_TRUE(equal(got.went_back, want.went_back, limits.rows));
  ASSERT_TRUE(equal(got.position, want.position, limits.tokens));
  ASSERT_TRUE(equal(got.token, want.token, limits.tokens));
}

void compare(const StepLimits& limits, int states) {
  const Table table;
  std::mt19937 random(3);
  MirroredState want(limits);
  MirroredState got(limits);
  const std::size_t floats = static_cast<std::size_t>(limits.tokens) * kWidth;
  int refused = 0;
  int taken = 0;
  for (int i = 0; i < states; ++i) {
    SCOPED_TRACE("state " + std::to_string(i));
    const auto seed = static_cast<unsigned>(random());
    for (const MirroredState* state : {&want, &got}) {
      std::mt19937 same(seed);
      fill_randomly(state->host, limits, same);
    }
    const std::vector<std::int32_t> asked(want.host.rollback, want.host.rollback + limits.rows);
    got.upload();
    DeviceArray<float> out(floats);
    embed({.table = table.weight(),
           .out = out.data(),
           .state = got.device,
           .tokens = limits.tokens,
           .rolls_back = true},
          test_launch());
    got.download();
    reference_rollback(want.host);
    ASSERT_NO_FATAL_FAILURE(expect_equal(got.host, want.host, limits));
    for (int row = 0; row < limits.rows; ++row) {
      if (asked[static_cast<std::size_t>(row)] == 0) continue;
      (want.host.row[row].status == RowStatus::kRefused ? refused : taken) += 1;
    }
    const std::vector<float> values = out.read();
    ASSERT_TRUE(out.intact());
    for (int t = 0; t < want.host.counts->tokens; ++t) {
      if (want.host.position[t] < 0) continue;  // nobody reads those
      for (int c = 0; c < kWidth; ++c) {
        ASSERT_EQ(values[static_cast<std::size_t>(t) * kWidth + static_cast<std::size_t>(c)],
                  table.at(want.host.token[t], c))
            << "token " << t;
      }
    }
  }
  EXPECT_GT(refused, states);
  EXPECT_GT(taken, states);
}

TEST(Rollback, IsTheReferenceOnRandomStates) {
  compare({.rows = 64,
           .max_seq_len = 700,
           .tokens = 64,
           .lanes = 64,
           .rollback_depth = kDepth,
           .most_ahead = kDepth},
          150);
}

TEST(Rollback, LayersThatForgetNothingGoBackFurther) {
  compare({.rows = 7,
           .max_seq_len = 300,
           .tokens = 512,
           .lanes = 7,
           .rollback_depth = kDepth,
           .most_ahead = 300},
          60);
}

TEST(Rollback, AThousandRows) {
  compare({.rows = 1000,
           .max_seq_len = 200,
           .tokens = 1024,
           .lanes = 1000,
           .rollback_depth = kDepth,
           .most_ahead = kDepth},
          4);
}

// What the op adds to the embedding, and taking back to that. In front of each: copies that make
// the rows and counts what they were, the same for all three.
TEST(RollbackTiming, Embedding) {
  constexpr int kParts = 64;
  const Table table;
  for (const int rows : {1, 8, 64}) {
    const StepLimits limits = {.rows = rows,
                               .max_seq_len = 2000,
                               .tokens = rows,
                               .lanes = rows,
                               .logit_rows = rows,
                               .rollback_depth = kDepth,
                               .most_ahead = kDepth};
    const auto time = [&](bool op, int count) {
      MirroredState state(limits);
      MirroredState before(limits);
      for (const MirroredState* s : {&state, &before}) {
        fill_decode_tables(s->host, rows);
        for (int r = 0; r < rows; ++r) {
          RowState& row = s->host.row[r];
          row.length = 1000;
          row.history_length = 1001;
          row.max_length = 2000;
          row.status = RowStatus::kRunning;
          s->host.position[r] = 1000;
          s->host.rollback[r] = count;
        }
      }
      state.upload();
      before.upload();
      DeviceArray<float> out(static_cast<std::size_t>(rows) * kWidth);
      return microseconds(kParts, [&](const Launch& launch, int) {
        Launch l = launch;
        l.dependent = false;  // copies are in front of it
        const auto n = static_cast<std::size_t>(rows);
        check(cudaMemcpyAsync(state.device.row, before.device.row, n * sizeof(RowState),
                              cudaMemcpyDeviceToDevice, launch.stream),
              "copy");
        check(cudaMemcpyAsync(state.device.rollback, before.device.rollback,
                              n * sizeof(std::int32_t), cudaMemcpyDeviceToDevice, launch.stream),
              "copy");
        embed({.table = table.weight(),
               .out = out.data(),
               .state = state.device,
               .tokens = rows,
               .rolls_back = op},
              l);
      });
    };
    const double without = time(false, 0);
    std::printf("rollback, %2d rows: %+.2f us when nothing is taken back, %+.2f us for 8 each\n",
                rows, time(true, 0) - without, time(true, 8) - without);
  }
}

}  // namespace
}  // namespace pianola::cuda
