#include "bench_run.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <random>

#include "base/check.h"
#include "signals.h"

namespace pianola::cli {
namespace {

std::vector<std::int32_t> random_tokens(int count, int vocab_size, std::mt19937_64& random) {
  std::uniform_int_distribution<std::int32_t> token(0, vocab_size - 1);
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(count));
  for (auto& t : tokens) t = token(random);
  return tokens;
}

// Steps until the row has produced `count` tokens.
void produce(Engine& engine, int row, int count) {
  while (count > 0) {
    throw_if_interrupted();
    for (const TokenEvent& event : engine.stream({&row, 1})) {
      if (event.status == RowStatus::kFailed) {
        fail(ErrorCode::kInternal, "bench: the model gave NaN or infinite values");
      }
      --count;
    }
  }
}

class Row {
 public:
  explicit Row(Engine& engine) : engine_(engine), index_(engine.open_row({})) {}
  ~Row() { engine_.close_row(index_); }
  Row(const Row&) = delete;
  Row& operator=(const Row&) = delete;
  int index() const { return index_; }

 private:
  Engine& engine_;
  int index_;
};

}  // namespace

std::string BenchTest::name() const {
  std::string text;
  if (prompt > 0) text += fmt::format("pp{}", prompt);
  if (generate > 0) text += fmt::format("{}tg{}", text.empty() ? "" : "+", generate);
  if (depth > 0) text += fmt::format(" @ d{}", depth);
  return text;
}

double BenchResult::median() const {
  std::vector<double> sorted = tok_s;
  std::sort(sorted.begin(), sorted.end());
  const std::size_t half = sorted.size() / 2;
  return sorted.size() % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}
double BenchResult::min() const { return *std::min_element(tok_s.begin(), tok_s.end()); }
double BenchResult::max() const { return *std::max_element(tok_s.begin(), tok_s.end()); }
double BenchResult::mean() const {
  return std::accumulate(tok_s.begin(), tok_s.end(), 0.0) / static_cast<double>(tok_s.size());
}
double BenchResult::deviation() const {
  if (tok_s.size() < 2) return 0;
  double sum = 0;
  for (const double x : tok_s) sum += (x - mean()) * (x - mean());
  return std::sqrt(sum / static_cast<double>(tok_s.size() - 1));
}

std::vector<BenchTest> bench_tests(const std::vector<int>& prompts,
                                   const std::vector<int>& generations,
                                   const std::vector<int>& depths) {
  std::vector<BenchTest> tests;
  const auto add = [&tests](int prompt, int generate, int depth) {
    if (prompt + generate > 0) tests.push_back({prompt, generate, depth});
  };
  for (const int depth : depths) {
    for (const int prompt : prompts) add(prompt, 0, depth);
    for (const int generate : generations) add(0, generate, depth);
    for (const int prompt : prompts) {
      for (const int generate : generations) {
        if (prompt > 0 && generate > 0) add(prompt, generate, depth);
      }
    }
  }
  return tests;
}

BenchResult run_test(Engine& engine, const BenchTest& test, int repetitions, std::uint64_t seed) {
  const Row row(engine);
  std::mt19937_64 random(seed);
  if (test.depth > 0) {
    engine.append(row.index(), random_tokens(test.depth, engine.vocab_size(), random));
    produce(engine, row.index(), 1);
  }
  // A generation of its own begins with one given token, the others are the model's.
  const auto prompt = random_tokens(std::max(test.prompt, 1), engine.vocab_size(), random);
  BenchResult result{test, {}, 0};
  for (int i = -1; i < repetitions; ++i) {
    engine.keep_first(row.index(), test.depth);
    // Not a token more than is counted: a loop on a device would run ahead.
    const int produced = test.prompt > 0 ? 1 + test.generate : test.generate;
    const int length = test.depth + static_cast<int>(prompt.size()) + produced;
    engine.configure_row(row.index(), {.max_length = std::min(length, engine.max_seq_len())});
    const auto begin = std::chrono::steady_clock::now();
    engine.append(row.index(), prompt);
    // The prompt's last step yields the first token, and each further step one more. With a prompt,
    // generating N tokens takes N steps behind the prompt's own.
    produce(engine, row.index(), produced);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    if (i >= 0) result.tok_s.push_back(test.tokens() / seconds.count());
  }
  return result;
}

}  // namespace pianola::cli
