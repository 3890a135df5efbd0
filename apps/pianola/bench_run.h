// The measurements of `pianola bench`: which tests, and how one is run.
//
//   for (const BenchTest& test : bench_tests({512}, {64}, {0, 4096})) {
//     BenchResult result = run_test(engine, test, 5, seed);
//   }
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "pianola/engine.h"

namespace pianola::cli {

// `prompt` tokens computed at once and `generate` tokens one by one, behind `depth` tokens that are
// in the cache already; in each of `rows` sequences together.
struct BenchTest {
  int prompt = 0;
  int generate = 0;
  int depth = 0;
  int rows = 1;
  // As llama-bench names them: "pp512", "tg64 @ d4096", "pp512+tg64"; "x8" for eight rows.
  std::string name() const;
  int tokens() const { return prompt + generate; }  // of one row
};

struct BenchResult {
  BenchTest test;
  std::vector<double> tok_s;  // of each repetition, in order
  double bandwidth = 0;       // bytes a second just before or after, whichever is more; 0: unknown

  double median() const;
  double min() const;
  double max() const;
  double mean() const;
  double deviation() const;  // standard deviation; 0 for one repetition
};

// Every depth with each prompt alone, each generation alone, and each pair of both. Zero lengths
// are left out.
std::vector<BenchTest> bench_tests(const std::vector<int>& prompts,
                                   const std::vector<int>& generations,
                                   const std::vector<int>& depths, int rows);

// Times the test after one run that is not counted. The tokens are random, by seed; choosing the
// most likely next token is included. Throws Interrupted, and Error when the model fails.
BenchResult run_test(Engine& engine, const BenchTest& test, int repetitions, std::uint64_t seed);

}  // namespace pianola::cli
