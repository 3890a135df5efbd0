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

class Rows {
 public:
  Rows(Engine& engine, int count) : engine_(engine) {
    for (int i = 0; i < count; ++i) indices_.push_back(engine.open_row({}));
  }
  ~Rows() {
    for (const int row : indices_) engine_.close_row(row);
  }
  Rows(const Rows&) = delete;
  Rows& operator=(const Rows&) = delete;
  const std::vector<int>& indices() const { return indices_; }

 private:
  Engine& engine_;
  std::vector<int> indices_;
};

// Steps until `count` tokens have been produced by all rows together.
void produce(Engine& engine, const Rows& rows, int count) {
  while (count > 0) {
    throw_if_interrupted();
    for (const TokenEvent& event : engine.stream(rows.indices())) {
      if (event.status == RowStatus::kFailed) {
        fail(ErrorCode::kInternal, "bench: the model gave NaN or infinite values");
      }
      --count;
    }
  }
}

}  // namespace

std::string BenchTest::name() const {
  std::string text;
  if (prompt > 0) text += fmt::format("pp{}", prompt);
  if (generate > 0) text += fmt::format("{}tg{}", text.empty() ? "" : "+", generate);
  if (depth > 0) text += fmt::format(" @ d{}", depth);
  if (rows > 1) text += fmt::format(" x{}", rows);
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
                                   const std::vector<int>& depths, int rows) {
  std::vector<BenchTest> tests;
  const auto add = [&tests, rows](int prompt, int generate, int depth) {
    if (prompt + generate > 0) tests.push_back({prompt, generate, depth, rows});
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
  const Rows rows(engine, test.rows);
  std::mt19937_64 random(seed);
  const auto append_all = [&](const std::vector<std::vector<std::int32_t>>& tokens) {
    for (std::size_t i = 0; i < tokens.size(); ++i) engine.append(rows.indices()[i], tokens[i]);
  };
  const auto draw = [&](int count) {
    std::vector<std::vector<std::int32_t>> all;
    for (int i = 0; i < test.rows; ++i) {
      all.push_back(random_tokens(count, engine.vocab_size(), random));
    }
    return all;
  };
  if (engine.max_input_len() > 0) {  // what is timed is decoding, behind the longest input
    for (const int row : rows.indices()) {
      engine.encode(row, random_tokens(engine.max_input_len(), engine.vocab_size(), random));
    }
  }
  if (test.depth > 0) {
    // One token each, so that no row waits for the next.
    for (const int row : rows.indices()) {
      engine.configure_row(row, {.max_length = test.depth + 1});
    }
    append_all(draw(test.depth));
    produce(engine, rows, test.rows);
  }
  // A generation of its own begins with one given token, the others are the model's.
  const auto prompts = draw(std::max(test.prompt, 1));
  const int produced = test.prompt > 0 ? 1 + test.generate : test.generate;
  const int length = test.depth + std::max(test.prompt, 1) + produced;
  BenchResult result{test, {}, 0};
  for (int i = -1; i < repetitions; ++i) {
    for (const int row : rows.indices()) {
      engine.keep_first(row, test.depth);
      // Not a token more than is counted: a loop on a device would run ahead.
      engine.configure_row(row, {.max_length = std::min(length, engine.max_seq_len())});
    }
    const auto begin = std::chrono::steady_clock::now();
    append_all(prompts);
    // The prompt's last step yields the first token, and each further step one more. With a prompt,
    // generating N tokens takes N steps behind the prompt's own.
    produce(engine, rows, test.rows * produced);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    if (i >= 0) result.tok_s.push_back(test.rows * test.tokens() / seconds.count());
  }
  return result;
}

}  // namespace pianola::cli
