// Sampling against backends/reference/sample.cc: the same token for the same logits and seed, for
// all ways to choose, with rows of different ways in one launch.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <random>

#include "backends/cuda/kernels/token.h"
#include "backends/reference/ops.h"
#include "cuda/cuda_fixture.h"
#include "cuda/state_fixture.h"

namespace pianola::cuda {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr TokenId kUntouched = -77;

std::string describe(const SamplingState& p, int style) {
  char text[256];
  std::snprintf(text, sizeof(text),
                "style %d temperature %g top_k %d top_p %g min_p %g penalties %g %g %g window %d",
                style, p.temperature, p.top_k, p.top_p, p.min_p, p.repeat_penalty,
                p.presence_penalty, p.frequency_penalty, p.penalty_window);
  return text;
}

class RandomRow {
 public:
  explicit RandomRow(unsigned seed) : random_(seed) {}

  int below(int n) { return static_cast<int>(random_() % static_cast<unsigned>(n)); }
  template <typename T>
  T one_of(std::initializer_list<T> values) {
    return values.begin()[below(static_cast<int>(values.size()))];
  }

  static constexpr int kStyles = 12;

  // Logits of a shape that has given samplers trouble.
  void logits(float* to, int vocab, int style) {
    std::normal_distribution<float> normal;
    for (int i = 0; i < vocab; ++i) {
      float& x = to[i];
      switch (style) {
        case 0:  // like a model's
          x = 3 * normal(random_);
          break;
        case 1:  // ties everywhere
          x = std::round(2 * normal(random_)) / 2;
          break;
        case 2:  // a grammar allows few tokens
          x = below(20) ? -kInfinity : 4 * normal(random_);
          break;
        case 3:
          x = 1.5F;
          break;
        case 4:  // sure of itself
          x = below(vocab) < 5 ? 40 + normal(random_) : normal(random_);
          break;
        case 5:  // neighbours in f32
          x = 1000 + 0.001F * normal(random_);
          break;
        case 6:
        case 7:
        case 8:
          x = normal(random_);
          break;
        case 9:  // most have no mass at all
          x = static_cast<float>(below(200000)) * 0.01F - 1000;
          break;
        case 10:  // both zeros, and a pair of values
          x = below(3) ? 0.0F * static_cast<float>(below(2) ? 1 : -1) : -1.25F;
          break;
        default:  // flat
          x = 0.05F * normal(random_);
      }
    }
    if (style == 6) to[below(vocab)] = NAN;
    if (style == 7) to[below(vocab)] = kInfinity;
    if (style == 8) std::fill_n(to, vocab, -kInfinity);
  }

  void choice(RowState& row, int vocab) {
    SamplingState& p = row.sampling;
    p = SamplingState{};
    p.temperature = one_of({0.0F, 0.1F, 0.8F, 0.8F, 1.0F, 1.0F, 2.0F, 1e-30F, 1e30F});
    p.top_k = one_of({0, 0, 0, 1, 2, 40, 40, 1000, 2048, 5000, vocab - 1, vocab, vocab + 10});
    p.top_p = one_of({1.0F, 1.0F, 0.95F, 0.95F, 0.5F, 0.1F, 0.999F, 0.75F, 1e-6F});
    p.min_p = one_of({0.0F, 0.0F, 0.0F, 0.05F, 0.5F, 1.0F});
    p.seed = random_() * 0x100000001ULL + random_();
    p.choice = static_cast<std::uint32_t>(below(3));
    p.want_logprob = below(2);
    if (below(3) == 0) {
      p.repeat_penalty = one_of({1.0F, 1.1F, 2.0F, 0.7F});
      p.presence_penalty = one_of({0.0F, 0.3F, -1.0F});
      p.frequency_penalty = one_of({0.0F, 0.2F, -0.1F});
      p.penalty_window = one_of({-1, 0, 1, 64, 100000});
    }
    row.bias_count = below(3) ? 0 : one_of({1, 5, 20, kMaxLogitBias});
    for (int i = 0; i < row.bias_count; ++i) {  // some tokens more than once
      const float bias = below(6) ? static_cast<float>(below(2000)) * 0.01F - 10 : -kInfinity;
      row.bias[i] = {below(std::min(vocab, below(2) ? 12 : vocab)), bias};
    }
  }

  std::mt19937& random() { return random_; }

 private:
  std::mt19937 random_;
};

// A decoding step of kRows rows in a bucket of two more.
class Sampler {
 public:
  static constexpr int kRows = 6;
  static constexpr int kBucket = kRows + 2;
  static constexpr int kHistory = 3000;

  explicit Sampler(int vocab)
      : vocab_(vocab),
        state_({.rows = kBucket,
                .max_seq_len = kHistory,
                .tokens = kBucket,
                .lanes = kBucket,
                .logit_rows = kBucket}),
        logits_(static_cast<std::size_t>(kBucket) * static_cast<std::size_t>(vocab), NAN),
        device_logits_(logits_.size()) {
    fill_decode_tables(state_.host, kRows);
    // Rows in another order than lanes.
    for (int r = 0; r < kRows; ++r) state_.host.row_of[r] = (r + 3) % kRows;
  }

  void set(int r, const SamplingState& p, int history_length) {
    RowState fresh;
    fresh.sampling = p;
    fresh.history_length = history_length;
    row(r) = fresh;
  }
  float* logits(int r) { return logits_.data() + std::ptrdiff_t{r} * vocab_; }
  RowState& row(int r) { return state_.host.row[state_.host.row_of[r]]; }
  TokenId* history(int r) {
    return state_.host.history + std::int64_t{state_.host.row_of[r]} * state_.host.history_stride;
  }
  void mask(int r, bool masked) { state_.host.position[r] = masked ? -1 : 0; }

  void run(bool dependent = false) {
    for (int r = 0; r < kBucket; ++r) {
      state_.host.sampled[r] = kUntouched;
      state_.host.logprob[r] = NAN;
    }
    state_.upload();
    device_logits_.write(logits_);
    sample({.logits = device_logits_.data(),
            .vocab = vocab_,
            .state = state_.device,
            .logit_rows = kBucket},
           test_launch(dependent));
    state_.download();
  }
  TokenId token(int r) const { return state_.host.sampled[r]; }
  float logprob(int r) const { return state_.host.logprob[r]; }

  TokenId want(int r) {
    std::vector<std::byte> scratch(reference::sample_scratch_bytes(vocab_));
    return reference::sample_token({logits(r), static_cast<std::size_t>(vocab_)}, row(r),
                                   {history(r), static_cast<std::size_t>(row(r).history_length)},
                                   scratch.data());
  }
  double want_logprob(int r, TokenId token) {
    return reference::log_probability({logits(r), static_cast<std::size_t>(vocab_)}, token);
  }

 private:
  int vocab_;
  MirroredState state_;
  std::vector<float> logits_;  // [kBucket, vocab]
  DeviceArray<float> device_logits_;
};

void compare_random_rows(int vocab, int launches, unsigned seed) {
  Sampler sampler(vocab);
  RandomRow random(seed);
  std::vector<int> styles(Sampler::kRows);
  for (int launch = 0; launch < launches; ++launch) {
    for (int r = 0; r < Sampler::kRows; ++r) {
      int& style = styles[static_cast<std::size_t>(r)];
      style = random.below(3) ? random.below(2) : random.below(RandomRow::kStyles);
      random.logits(sampler.logits(r), vocab, style);
      random.choice(sampler.row(r), vocab);
      sampler.mask(r, random.below(8) == 0);
      sampler.row(r).history_length = random.one_of({1, 7, 200, Sampler::kHistory});
      const int kinds = random.one_of({2, 50, vocab});
      for (int i = 0; i < Sampler::kHistory; ++i) {
        sampler.history(r)[i] = random.below(std::min(kinds, vocab));
      }
    }
    sampler.run();
    std::vector<std::pair<TokenId, float>> first;
    for (int r = 0; r < Sampler::kBucket; ++r) {
      first.emplace_back(sampler.token(r), sampler.logprob(r));
    }
    sampler.run(launch % 2);
    for (int r = 0; r < Sampler::kBucket; ++r) {
      const auto [token, logprob] = first[static_cast<std::size_t>(r)];
      ASSERT_EQ(sampler.token(r), token) << "a second run";
      const float again = sampler.logprob(r);
      ASSERT_EQ(std::memcmp(&again, &logprob, sizeof(float)), 0) << "a second run";
      if (r >= Sampler::kRows || token == kUntouched) {
        ASSERT_EQ(token, kUntouched) << "padding row " << r;
        ASSERT_TRUE(std::isnan(logprob));
        continue;
      }
      SCOPED_TRACE("vocab " + std::to_string(vocab) + " launch " + std::to_string(launch) +
                   " row " + std::to_string(r) + " biases " +
                   std::to_string(sampler.row(r).bias_count) + " " +
                   describe(sampler.row(r).sampling, styles[static_cast<std::size_t>(r)]));
      ASSERT_EQ(token, sampler.want(r));
      if (sampler.row(r).sampling.want_logprob && token >= 0) {
        const double expected = sampler.want_logprob(r, token);
        ASSERT_NEAR(logprob, expected, 1e-5 + 1e-6 * std::fabs(expected));
      } else {
        ASSERT_EQ(logprob, 0);
      }
    }
  }
}

TEST(Sample, TinyVocabulary) { compare_random_rows(7, 300, 1); }
TEST(Sample, AThousandTokens) { compare_random_rows(1000, 200, 2); }
TEST(Sample, OddVocabulary) { compare_random_rows(32003, 20, 3); }
TEST(Sample, SmolLmVocabulary) { compare_random_rows(49152, 40, 4); }
TEST(Sample, LlamaVocabulary) { compare_random_rows(128256, 40, 5); }
TEST(Sample, GemmaVocabulary) { compare_random_rows(262144, 6, 6); }
TEST(Sample, SmallLaunches) {
  compare_random_rows(7, 6, 11);
  // Some rows have more candidates than one block finishes alone.
  compare_random_rows(4099, 6, 12);
  compare_random_rows(4100, 6, 13);
}

// Masked rows are not touched, whatever their logits; others in the launch are.
TEST(Sample, MaskedRowsAreLeftAlone) {
  Sampler sampler(1000);
  RandomRow random(7);
  for (int r = 0; r < Sampler::kRows; ++r) {
    random.logits(sampler.logits(r), 1000, 0);
    sampler.set(r, {}, 1);
    sampler.mask(r, r % 2 == 0);
  }
  sampler.run();
  for (int r = 0; r < Sampler::kBucket; ++r) {
    const bool live = r < Sampler::kRows && r % 2;
    EXPECT_EQ(sampler.token(r), live ? sampler.want(r) : kUntouched) << r;
    EXPECT_EQ(std::isnan(sampler.logprob(r)), !live) << r;
  }
}

// Every seed's draw, so that a candidate too many or too few shows.
TEST(Sample, ManySeeds) {
  for (const int vocab : {1000, 49152}) {
    Sampler sampler(vocab);
    RandomRow random(8);
    const auto set = [&](int r, const SamplingState& p) {
      random.logits(sampler.logits(r), vocab, 0);
      sampler.set(r, p, 5);
    };
    set(0, {.temperature = 0.8F, .top_k = 40, .top_p = 0.95F});
    set(1, {.temperature = 1});
    set(2, {.temperature = 1.5F, .top_p = 0.9F});
    set(3, {.temperature = 0.7F, .min_p = 0.05F});
    set(4, {.temperature = 1, .top_k = vocab / 2, .top_p = 0.8F});
    set(5, {.temperature = 2, .top_k = vocab / 3});
    for (std::uint64_t seed = 0; seed < 60; ++seed) {
      for (int r = 0; r < Sampler::kRows; ++r) sampler.row(r).sampling.seed = seed;
      sampler.run();
      for (int r = 0; r < Sampler::kRows; ++r) {
        ASSERT_EQ(sampler.token(r), sampler.want(r))
            << "vocab " << vocab << " row " << r << " seed " << seed;
      }
    }
  }
}

void compare_targets(std::initializer_list<int> vocabularies) {
  RandomRow random(9);
  for (const int vocab : vocabularies) {
    constexpr int kRows = 5;    // of the tile
    constexpr int kFirst = 60;  // its place in the step
    constexpr int kLive = 64;   // logit rows of the step: the last row of the tile is padding
    MirroredState state({.rows = 1, .max_seq_len = 8, .tokens = 80, .lanes = 1, .logit_rows = 80});
    state.host.counts->logit_rows = kLive;
    std::vector<float> logits(static_cast<std::size_t>(kRows) * static_cast<std::size_t>(vocab));
    for (int r = 0; r < kRows; ++r) {
      const int style = r == 4 ? 6 : std::array{0, 2, 9, 5}[static_cast<std::size_t>(r)];
      random.logits(logits.data() + std::ptrdiff_t{r} * vocab, vocab, style);
    }
    for (int r = 0; r < 80; ++r) {
      state.host.target[r] = random.below(vocab);
      state.host.logprob[r] = NAN;
    }
    logits[static_cast<std::size_t>(vocab + state.host.target[kFirst + 1])] = 2;  // not impossible
    state.upload();
    const DeviceArray<float> device(logits);
    target_logprob({.logits = device.data(),
                    .vocab = vocab,
                    .state = state.device,
                    .first = kFirst,
                    .rows = kRows},
                   test_launch());
    state.download();
    for (int r = 0; r < 80; ++r) {
      const int at = r - kFirst;
      if (at < 0 || r >= kLive) {
        ASSERT_TRUE(std::isnan(state.host.logprob[r])) << r;
        continue;
      }
      const double want = reference::log_probability(
          {logits.data() + std::ptrdiff_t{at} * vocab, static_cast<std::size_t>(vocab)},
          state.host.target[r]);
      ASSERT_NEAR(state.host.logprob[r], want, 1e-5 + 1e-6 * std::fabs(want))
          << "vocab " << vocab << " row " << r;
    }
  }
}

TEST(TargetLogprob, IsTheReference) { compare_targets({7, 1000, 32003, 128256}); }
TEST(TargetLogprob, SmallVocabulariesAreTheReference) { compare_targets({7, 1000}); }

// --- timing ---

// Microseconds of one sample() in a graph of many, the way a step would have it.
double time_sample(const SamplingState& p, int rows, int style, int history, bool dependent) {
  constexpr int kVocab = 128256;
  constexpr int kTimes = 50;
  MirroredState state(
      {.rows = rows, .max_seq_len = 9000, .tokens = rows, .lanes = rows, .logit_rows = rows});
  fill_decode_tables(state.host, rows);
  RandomRow random(10);
  std::vector<float> logits(static_cast<std::size_t>(rows) * kVocab);
  for (int r = 0; r < rows; ++r) {
    random.logits(logits.data() + std::ptrdiff_t{r} * kVocab, kVocab, style);
    state.host.row[r].sampling = p;
    state.host.row[r].sampling.seed = static_cast<std::uint64_t>(r);
    state.host.row[r].history_length = history;
    for (int i = 0; i < history; ++i) {
      state.host.history[std::int64_t{r} * state.host.history_stride + i] = random.below(kVocab);
    }
  }
  state.upload();
  const DeviceArray<float> device(logits);
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  cudaEvent_t begin;
  cudaEvent_t end;
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  Launch launch = test_launch(dependent);
  launch.stream = stream;
  check(cudaDeviceSynchronize(), "upload");
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  for (int i = 0; i < kTimes; ++i) {
    sample({.logits = device.data(), .vocab = kVocab, .state = state.device, .logit_rows = rows},
           launch);
  }
  cudaGraph_t graph;
  check(cudaStreamEndCapture(stream, &graph), "capture");
  cudaGraphExec_t program;
  check(cudaGraphInstantiate(&program, graph, 0), "instantiate");
  float least = kInfinity;
  for (int pass = 0; pass < 5; ++pass) {
    check(cudaEventRecord(begin, stream), "record");
    check(cudaGraphLaunch(program, stream), "launch");
    check(cudaEventRecord(end, stream), "record");
    check(cudaEventSynchronize(end), "sample");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end), "time");
    if (pass > 0) least = std::min(least, ms);
  }
  check(cudaGraphExecDestroy(program), "graph");
  check(cudaGraphDestroy(graph), "graph");
  check(cudaEventDestroy(begin), "event");
  check(cudaEventDestroy(end), "event");
  check(cudaStreamDestroy(stream), "stream");
  return 1e3 * static_cast<double>(least) / kTimes;
}

void print_times(const char* what, const SamplingState& p, int style = 0, int history = 100) {
  std::printf("%-40s", what);
  for (const int rows : {1, 8, 64}) {
    std::printf("  rows %2d: %6.2f us, dependent %6.2f us", rows,
                time_sample(p, rows, style, history, false),
                time_sample(p, rows, style, history, true));
  }
  std::printf("\n");
}

TEST(SampleTiming, Greedy) {
  print_times("greedy", {});
  print_times("greedy, log-probability", {.want_logprob = 1});
  print_times("greedy, penalties, history 8192", {.repeat_penalty = 1.1F, .penalty_window = -1}, 0,
              8192);
}

TEST(SampleTiming, TopKAndTopP) {
  print_times("top_k 40, top_p 0.95", {.temperature = 0.8F, .top_k = 40, .top_p = 0.95F});
  print_times("the same, sure", {.temperature = 0.8F, .top_k = 40, .top_p = 0.95F}, 4);
  print_times("the same, penalties", {.temperature = 0.8F,
                                      .top_k = 40,
                                      .top_p = 0.95F,
                                      .repeat_penalty = 1.1F,
                                      .penalty_window = 64});
  print_times("top_p 0.95, sure", {.temperature = 0.8F, .top_p = 0.95F}, 4);
}

TEST(SampleTiming, ManyCandidates) {
  print_times("temperature alone", {.temperature = 0.8F});
  print_times("min_p 0.05", {.temperature = 0.8F, .min_p = 0.05F});
  print_times("top_p 0.95, flat", {.temperature = 0.8F, .top_p = 0.95F}, 11);
  print_times("top_k 20000, flat", {.temperature = 0.8F, .top_k = 20000}, 11);
}

}  // namespace
}  // namespace pianola::cuda
