// Layers that fold tokens into a state, and what stands around them: every executor against the
// published formulas, and the state cache behind it: bit for bit the same whatever the chunking,
// the neighbours, and the tokens that were taken back. Memory that must not be read holds NaN.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <ostream>
#include <random>

#include "backends/cpu/isa.h"
#include "state_machine.h"

namespace pianola {
namespace {

struct Executor {
  std::string backend;
  std::string isa;
  BackendOptions options(int threads = 1) const {
    return backend == "cpu" ? BackendOptions{.threads = threads, .isa = isa} : BackendOptions{};
  }
};

void PrintTo(const Executor& e, std::ostream* out) { *out << e.backend << " " << e.isa; }

// CMake says which backends this program tests: those of any machine, or the one of a GPU.
std::vector<Executor> executors() {
  if (std::string_view(PIANOLA_TEST_BACKENDS) == "cuda") return {{"cuda", ""}};
  std::vector<Executor> all = {{"reference", ""}};
  for (const cpu::Isa isa : cpu::supported_isas()) all.push_back({"cpu", cpu::isa_name(isa)});
  return all;
}

class StateOps : public testing::TestWithParam<Executor> {
 protected:
  static Machine make(const Layer& layer, int threads = 1) {
    return Machine(GetParam().backend, GetParam().options(threads), layer);
  }
  static Machine make(const Layer& layer, const CacheOptions& cache) {
    return Machine(GetParam().backend, GetParam().options(), layer, cache);
  }
};
INSTANTIATE_TEST_SUITE_P(Executors, StateOps, testing::ValuesIn(executors()),
                         [](const auto& executor) {
                           return executor.param.backend +
                                  (executor.param.isa.empty() ? "" : "_" + executor.param.isa);
                         });

std::vector<int> sequence(int length, int seed) {
  std::vector<int> tokens(size_of(length));
  for (int i = 0; i < length; ++i) tokens[size_of(i)] = 1000 * seed + i;
  return tokens;
}

bool same_bits(const float* a, const float* b, std::size_t n) {
  return std::memcmp(a, b, n * sizeof(float)) == 0;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && same_bits(a.data(), b.data(), a.size());
}

// --- What the ops compute -----------------------------------------------------------------------

// Rows of unequal lengths in one step, against the formulas over each row as a whole.
TEST_P(StateOps, ComputeTheFormulas) {
  for (const auto& [name, layer] : conforming_layers()) {
    SCOPED_TRACE(name);
    Machine machine = make(layer);
    const std::vector<Lane> lanes = {{2, 0, sequence(17, 1)},
                                     {0, 0, sequence(1, 2)},
                                     {3, 0, sequence(40, 3)},
                                     {1, 0, sequence(5, 4)}};
    const std::vector<float> got = machine.run(lanes);
    std::size_t at = 0;
    for (const Lane& lane : lanes) {
      const std::vector<double> want = layer.expected(layer.inputs(lane.tokens));
      double largest = 1;
      for (const double x : want) largest = std::max(largest, std::abs(x));
      // A state is rounded to f32 with every token and decays: some 16 roundings of the largest
      // output. On the CPU and on a GPU sums over up to 128 keys are in f32 besides, whose
      // roundings are noise.
      const double tolerance = (GetParam().backend == "reference" ? 16 : 64) * 0x1p-24 * largest;
      for (const double x : want) {
        ASSERT_NEAR(got[at], x, tolerance) << "element " << at;
        ++at;
      }
    }
    EXPECT_EQ(at, got.size());
  }
}

// A row's tokens in any pieces, beside other rows that come and go.
TEST_P(StateOps, ChunkingDoesNotChangeTheBits) {
  std::mt19937 random(5);
  for (const auto& [name, layer] : conforming_layers()) {
    SCOPED_TRACE(name);
    const std::size_t width = size_of(layer.out_width);
    std::vector<std::vector<int>> rows;
    std::vector<std::vector<float>> want;
    for (int r = 0; r < Machine::kLanes; ++r) {
      rows.push_back(sequence(10 + 13 * r, 10 + r));
      Machine whole = make(layer);
      want.push_back(whole.run_whole(r, rows.back()));
    }
    Machine machine = make(layer);
    EXPECT_TRUE(same_bits(machine.run_whole(3, rows[3], 1), want[3]));
    if (layer.spec.heads > 0 || layer.spec.conv_width > 0) machine.forget(3);
    std::vector<std::size_t> known(rows.size());
    while (known != std::vector<std::size_t>{10, 23, 36, 49}) {
      std::vector<Lane> lanes;
      for (std::size_t r = 0; r < rows.size(); ++r) {
        const std::size_t count = std::min<std::size_t>(random() % 9, rows[r].size() - known[r]);
        if (count == 0) continue;
        const auto begin = rows[r].begin() + static_cast<std::ptrdiff_t>(known[r]);
        lanes.push_back({static_cast<int>(r),
                         static_cast<int>(known[r]),
                         {begin, begin + static_cast<std::ptrdiff_t>(count)}});
      }
      if (lanes.empty()) continue;
      std::shuffle(lanes.begin(), lanes.end(), random);
      const std::vector<float> got = machine.run(lanes);
      const float* out = got.data();
      for (const Lane& lane : lanes) {
        const auto r = size_of(lane.slot);
        ASSERT_TRUE(same_bits(out, want[r].data() + known[r] * width, lane.tokens.size() * width))
            << "row " << r << " from " << known[r];
        out += lane.tokens.size() * width;
        known[r] += lane.tokens.size();
      }
    }
  }
}

// Masked tokens in every place of a lane: their outputs are 0, and the others do not notice them.
TEST_P(StateOps, MaskedTokensStoreAndReadNothing) {
  for (const auto& [name, layer] : conforming_layers()) {
    if (layer.spec.heads == 0 && layer.spec.conv_width == 0) continue;
    SCOPED_TRACE(name);
    const std::size_t width = size_of(layer.out_width);
    const std::vector<int> row = sequence(12, 6);
    Machine whole = make(layer);
    const std::vector<float> want = whole.run_whole(0, row);
    Machine machine = make(layer);
    std::vector<float> got;
    int position = 0;
    const auto step = [&](std::vector<int> tokens) {
      const std::vector<std::byte> before = machine.cache_bytes();
      const std::vector<float> out =
          machine.run({{1, 0, {kMasked}}, {0, position, tokens}, {2, 0, {kMasked, kMasked}}});
      tokens.insert(tokens.begin(), kMasked);
      tokens.insert(tokens.end(), 2, kMasked);
      bool stored = false;
      for (std::size_t t = 0; t < tokens.size(); ++t) {
        const auto begin = out.begin() + static_cast<std::ptrdiff_t>(t * width);
        const auto end = begin + static_cast<std::ptrdiff_t>(width);
        if (tokens[t] != kMasked) {
          got.insert(got.end(), begin, end);
          ++position;
          stored = true;
        } else {
          EXPECT_TRUE(std::all_of(begin, end, [](float x) { return x == 0; })) << "token " << t;
        }
      }
      EXPECT_EQ(machine.cache_bytes() != before, stored);
    };
    step({kMasked});
    step({row[0]});
    step({kMasked, kMasked, row[1], row[2]});
    step({kMasked, kMasked});
    step({kMasked, row[3], row[4], kMasked, kMasked, row[5]});
    step({row[6], kMasked, row[7]});
    step({kMasked, kMasked, row[8], row[9], row[10], row[11], kMasked});
    EXPECT_TRUE(same_bits(got, want));
  }
}

TEST_P(StateOps, WorkersDoNotChangeTheBits) {
  if (GetParam().backend != "cpu") GTEST_SKIP() << "only the cpu backend has workers";
  for (const auto& [name, layer] : conforming_layers()) {
    SCOPED_TRACE(name);
    const std::vector<Lane> lanes = {
        {1, 0, sequence(19, 1)}, {3, 0, sequence(2, 2)}, {0, 0, sequence(33, 3)}};
    Machine one = make(layer);
    const std::vector<float> want = one.run(lanes);
    for (const int threads : {2, 3, 5}) {
      Machine machine = make(layer, threads);
      EXPECT_TRUE(same_bits(machine.run(lanes), want)) << threads << " workers";
    }
  }
}

// --- Going back ---------------------------------------------------------------------------------

// Small layers with both ops, whose inputs reach back over several steps.
std::vector<std::pair<std::string, Layer>> rolling_layers() {
  std::vector<std::pair<std::string, Layer>> layers;
  layers.emplace_back("delta",
                      delta_layer({.heads = 2, .key_heads = 1, .key_dim = 3, .value_dim = 5}, 4));
  layers.emplace_back("ssm", ssm_layer({.heads = 2, .groups = 1, .key_dim = 2, .value_dim = 3}, 3));
  layers.emplace_back("conv", conv_layer({.width = 3, .taps = 4}));
  return layers;
}

CacheOptions rolling(int depth, StateRollback rollback) {
  return {.max_seq_len = 1 << 20,
          .slots = Machine::kLanes,
          .rollback_depth = depth,
          .chunk = Machine::kTokens,
          .state_rollback = rollback};
}

struct Rolling {
  int depth;
  StateRollback rollback;
};
constexpr Rolling kRollings[] = {{1, StateRollback::kExact},   {2, StateRollback::kExact},
                                 {5, StateRollback::kExact},   {16, StateRollback::kExact},
                                 {1, StateRollback::kCompact}, {2, StateRollback::kCompact},
                                 {5, StateRollback::kCompact}, {16, StateRollback::kCompact}};

// From every length up to some beyond the second multiple of the interval, by every count; then
// other tokens, past the next multiples; and back once more.
TEST_P(StateOps, GoingBackLeavesNothingBehind) {
  for (const auto& [name, layer] : rolling_layers()) {
    const std::size_t width = size_of(layer.out_width);
    Machine fresh = make(layer);  // that never goes back
    for (const auto& [depth, rollback] : kRollings) {
      SCOPED_TRACE(name + ", depth " + std::to_string(depth) +
                   (rollback == StateRollback::kExact ? ", exact" : ", compact"));
      Machine machine = make(layer, rolling(depth, rollback));
      const std::vector<int> first = sequence(2 * depth + 3, 1);
      for (int length = 1; length <= static_cast<int>(first.size()); ++length) {
        for (int count = 0; count <= std::min(depth, length); ++count) {
          std::vector<int> row(first.begin(), first.begin() + length);
          machine.forget(0);
          machine.run_whole(0, row, 1 + (length + count) % 4);
          for (const int back : {count, std::min(depth, 1 + count)}) {
            const int kept = static_cast<int>(row.size()) - back;
            machine.poison(0, static_cast<int>(row.size()), kept);
            row.resize(size_of(kept));
            const std::vector<int> more =
                sequence(1 + (count + length) % (depth + 2) + back, 2 + back);
            row.insert(row.end(), more.begin(), more.end());
            const std::vector<float> got = machine.run({{0, kept, more}});
            fresh.forget(0);
            const std::vector<float> want = fresh.run_whole(0, row);
            ASSERT_TRUE(same_bits(got.data(), want.data() + size_of(kept) * width, got.size()))
                << "length " << length << ", back " << back << " to " << kept;
          }
        }
      }
    }
  }
}

// Speculation: rows that accept no token, all, or some of each draft, side by side.
TEST_P(StateOps, AThousandRoundsOfSpeculation) {
  constexpr int kRounds = 1000;
  for (const auto& [name, layer] : rolling_layers()) {
    const std::size_t width = size_of(layer.out_width);
    Machine fresh = make(layer);
    for (const auto& [depth, rollback] : kRollings) {
      SCOPED_TRACE(name + ", depth " + std::to_string(depth) +
                   (rollback == StateRollback::kExact ? ", exact" : ", compact"));
      Machine machine = make(layer, rolling(depth, rollback));
      std::mt19937 random(static_cast<unsigned>(depth));
      struct Row {
        std::vector<int> tokens;
        std::vector<float> out;
      };
      std::array<Row, 3> rows;  // that accept none, all, some
      for (std::size_t r = 0; r < rows.size(); ++r) {
        rows[r].tokens = sequence(7 + 10 * static_cast<int>(r), static_cast<int>(r));
        rows[r].out = machine.run_whole(static_cast<int>(r), rows[r].tokens);
      }
      int next = 10000;
      for (int round = 0; round < kRounds; ++round) {
        std::vector<Lane> lanes;
        for (std::size_t i = 0; i < rows.size(); ++i) {
          const std::size_t r = (i + size_of(round)) % rows.size();
          Lane lane{static_cast<int>(r), static_cast<int>(rows[r].tokens.size()), {}};
          for (int n = static_cast<int>(random() % size_of(depth)); n >= 0; --n) {
            lane.tokens.push_back(next++);
          }
          lanes.push_back(std::move(lane));
        }
        const std::vector<float> got = machine.run(lanes);
        auto out = got.begin();
        for (const Lane& lane : lanes) {
          Row& row = rows[size_of(lane.slot)];
          const std::size_t drafted = lane.tokens.size();
          const std::size_t accepted = lane.slot == 0   ? 0
                                       : lane.slot == 1 ? drafted
                                                        : random() % (drafted + 1);
          row.tokens.insert(row.tokens.end(), lane.tokens.begin(),
                            lane.tokens.begin() + static_cast<std::ptrdiff_t>(accepted));
          row.out.insert(row.out.end(), out, out + static_cast<std::ptrdiff_t>(accepted * width));
          out += static_cast<std::ptrdiff_t>(drafted * width);
          machine.poison(lane.slot, lane.position + static_cast<int>(drafted),
                         static_cast<int>(row.tokens.size()));
        }
      }
      for (std::size_t r = 0; r < rows.size(); ++r) {
        // What is still there after all: one more token.
        rows[r].tokens.push_back(next);
        const int last = static_cast<int>(rows[r].tokens.size()) - 1;
        const std::vector<float> out = machine.run({{static_cast<int>(r), last, {next}}});
        rows[r].out.insert(rows[r].out.end(), out.begin(), out.end());
        fresh.forget(0);
        EXPECT_TRUE(same_bits(rows[r].out, fresh.run_whole(0, rows[r].tokens))) << "row " << r;
      }
    }
  }
}

// Steps of one slot leave every byte of the others' states alone, and NaN in them does not spread.
TEST_P(StateOps, SlotsAreIndependent) {
  for (const auto& [name, layer] : rolling_layers()) {
    for (const auto& [depth, rollback] : kRollings) {
      SCOPED_TRACE(name + ", depth " + std::to_string(depth));
      Machine machine = make(layer, rolling(depth, rollback));
      Machine other = make(layer, rolling(depth, rollback));
      const std::vector<int> row = sequence(41, 3);
      const std::vector<float> want = machine.run_whole(2, row, 7);
      EXPECT_TRUE(same_bits(other.run_whole(0, row, 5), want));
      EXPECT_TRUE(std::ranges::all_of(want, [](float x) { return std::isfinite(x); }));
      machine.forget(2);  // nothing is left but what the row has written
      const std::vector<std::byte> bytes = machine.cache_bytes();
      EXPECT_TRUE(std::ranges::all_of(bytes, [](std::byte b) { return b == std::byte{0xFF}; }));
    }
  }
}

}  // namespace
}  // namespace pianola
