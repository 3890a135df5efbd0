// Answers of a tiny checkpoint without a tokenizer: what ends them, and what a batch changes
// (nothing).
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "host_pages.h"
#include "models/golden.h"
#include "pianola/generator.h"

namespace pianola {
namespace {

Model tiny_model() { return Model::open((golden_folder() / "llama/tied/q8_0.gguf").string()); }

Engine make_engine(const Model& model, int slots = 1) {
  return Engine(model.causal(),
                {.backend = "cpu", .threads = 1, .max_seq_len = 64, .slots = slots, .chunk = 16});
}

GenerationRequest request(int seed, int prompt, int max_tokens) {
  GenerationRequest r;
  for (int i = 0; i < prompt; ++i) r.prompt.push_back((seed * 37 + i * 11) % 200);
  r.sampling.temperature = 1.0F;
  r.sampling.seed = static_cast<std::uint64_t>(seed);
  r.max_tokens = max_tokens;
  r.ignore_eos = true;
  return r;
}

std::vector<TokenId> tokens_of(Generator& generator) {
  std::vector<TokenId> tokens;
  for (const Piece& piece : generator) tokens.push_back(piece.token);
  return tokens;
}

TEST(Generator, EndsForTheRightReason) {
  const Model model = tiny_model();
  Engine engine = make_engine(model);
  {
    Generator g(engine, model, request(1, 5, 7));
    EXPECT_EQ(tokens_of(g).size(), 7U);
    EXPECT_EQ(g.finish_reason(), FinishReason::kLength);
    EXPECT_EQ(g.stats().prompt_tokens, 5);
    EXPECT_EQ(g.stats().generated_tokens, 7);
  }
  {
    Generator g(engine, model, request(1, 5, 0));
    EXPECT_TRUE(tokens_of(g).empty());
    EXPECT_EQ(g.finish_reason(), FinishReason::kLength);
  }
  {
    Generator g(engine, model, request(1, 60, -1));
    EXPECT_EQ(tokens_of(g).size(), 4U);
    EXPECT_EQ(g.finish_reason(), FinishReason::kContext);
  }
  {
    Generator g(engine, model, request(1, 5, 20));
    ASSERT_TRUE(g.next());
    g.cancel();
    EXPECT_FALSE(g.next());
    EXPECT_EQ(g.finish_reason(), FinishReason::kCancelled);
  }
  {
    GenerationRequest r = request(1, 5, 20);
    Generator all(engine, model, r);
    r.stop_tokens = {tokens_of(all)[4]};
    Generator g(engine, model, r);
    EXPECT_EQ(tokens_of(g).back(), r.stop_tokens[0]);
    EXPECT_EQ(g.finish_reason(), FinishReason::kStopToken);
  }
  EXPECT_EQ(engine.open_row({}), 0);  // every answer gave its slot back
}

TEST(Generator, BadRequestsAreRefusedAndLoseNothing) {
  const Model model = tiny_model();
  Engine engine = make_engine(model);
  const auto refused = [&](const GenerationRequest& r) {
    EXPECT_THROW(Generator(engine, model, r), Error);
    const int row = engine.open_row({});
    EXPECT_EQ(row, 0);
    engine.close_row(row);
  };
  refused(request(1, 0, 5));
  refused(request(1, 5, -2));
  refused(request(1, 65, 5));
  GenerationRequest r = request(1, 5, 5);
  r.prompt[2] = 1 << 20;
  refused(r);
  r = request(1, 5, 5);
  r.sampling.top_p = 0;
  refused(r);
  r = request(1, 5, 5);
  r.stop = {"text"};  // the model has no tokenizer
  refused(r);
}

TEST(Generator, AContinuedRowKeepsWhatItShares) {
  const Model model = tiny_model();
  Engine engine = make_engine(model, 2);
  const int row = engine.open_row({});
  Generator first(engine, model, row, request(3, 20, 5));
  tokens_of(first);
  GenerationRequest next = request(3, 20, 8);
  next.prompt.resize(15);
  next.prompt.push_back(199);
  Generator continued(engine, model, row, next);
  EXPECT_EQ(continued.stats().reused_tokens, 15);
  Generator fresh(engine, model, next);
  EXPECT_EQ(tokens_of(continued), tokens_of(fresh));
  // The same prompt again: only its last token is computed.
  Generator again(engine, model, row, next);
  EXPECT_EQ(again.stats().reused_tokens, 16);
  // A refused request leaves the row as it was.
  const std::vector<TokenId> before(engine.history(row).begin(), engine.history(row).end());
  next.prompt.back() = -1;
  EXPECT_THROW(Generator(engine, model, row, next), Error);
  EXPECT_EQ(std::vector<TokenId>(engine.history(row).begin(), engine.history(row).end()), before);
}

// What a window has let go of is computed again: the answer is that of a fresh row either way.
TEST(Generator, AContinuedRowWithWindowsKeepsWhatItCan) {
  const auto folder =
      std::filesystem::temp_directory_path() / ("pianola_windows_" + std::to_string(getpid()));
  const std::vector<ModelGolden> goldens = read_all_goldens();
  const auto golden = std::find_if(goldens.begin(), goldens.end(),
                                   [](const ModelGolden& g) { return g.name == "mistral/window"; });
  ASSERT_NE(golden, goldens.end());
  const Model model = Model::open(prepare_golden_file(golden->files[0], folder).string());
  Engine engine(model.causal(),
                {.backend = "cpu", .threads = 1, .max_seq_len = 256, .slots = 2, .chunk = 16});
  const int row = engine.open_row({});
  for (const int shared : {190, 100}) {
    Generator first(engine, model, row, request(3, 200, 5));
    tokens_of(first);
    GenerationRequest next = request(3, 200, 8);
    next.prompt.resize(static_cast<std::size_t>(shared));
    next.prompt.push_back(199);
    Generator continued(engine, model, row, next);
    EXPECT_EQ(continued.stats().reused_tokens, shared == 190 ? 190 : 0);
    Generator fresh(engine, model, next);
    EXPECT_EQ(tokens_of(continued), tokens_of(fresh));
  }
  std::filesystem::remove_all(folder);
}

TEST(Generate, ManyAreEachAlone) {
  const Model model = tiny_model();
  std::vector<GenerationRequest> requests;
  for (int i = 0; i < 9; ++i) requests.push_back(request(i, 1 + 5 * i, 3 + i));
  requests[4].prompt.assign(70, 1);  // does not fit: refused alone
  Engine engine = make_engine(model, 3);
  std::size_t pieces = 0;
  const auto results = generate(engine, model, requests, [&](std::size_t i, const Piece&) {
    ++pieces;
    return i != 6;  // cancelled at its first token
  });
  ASSERT_EQ(results.size(), requests.size());
  Engine alone = make_engine(model);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    if (i == 4) {
      EXPECT_EQ(results[i].finish_reason, FinishReason::kFailed);
      EXPECT_FALSE(results[i].error.empty());
      continue;
    }
    Generator g(alone, model, requests[i]);
    std::vector<TokenId> want = tokens_of(g);
    if (i == 6) {
      EXPECT_EQ(results[i].finish_reason, FinishReason::kCancelled);
      want.resize(1);
    }
    EXPECT_EQ(results[i].tokens, want) << "request " << i;
    EXPECT_TRUE(results[i].error.empty()) << results[i].error;
  }
  EXPECT_GT(pieces, 20U);
}

// The answers that came first are finished; the rest say why they are not.
TEST(Generate, WhatCannotGrowGivesWay) {
  const HostPages pages(4096);
  const Model model = tiny_model();
  EngineOptions options{
      .backend = "cpu", .threads = 1, .max_seq_len = 512, .slots = 3, .chunk = 16};
  const MemoryPlan plan = Engine::plan(*model.causal(), options);
  options.memory_limit = plan.total - plan.cache + 4 * plan.cache_at_first;  // four blocks
  Engine engine(model.causal(), options);
  std::vector<GenerationRequest> requests;
  std::vector<std::vector<TokenId>> expected;
  for (int i = 0; i < 3; ++i) {
    requests.push_back(request(i, 20, 80));
    Generator alone(engine, model, requests.back());
    expected.push_back(tokens_of(alone));
  }
  const auto results = generate(engine, model, requests, {});
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(results[i].tokens, expected[i]) << i;
    EXPECT_EQ(results[i].finish_reason, FinishReason::kLength);
    EXPECT_EQ(results[i].error, "");
  }
  EXPECT_EQ(results[2].finish_reason, FinishReason::kFailed);
  EXPECT_NE(results[2].error.find("no memory for its caches"), std::string::npos);
  ASSERT_LT(results[2].tokens.size(), expected[2].size());
  EXPECT_TRUE(std::equal(results[2].tokens.begin(), results[2].tokens.end(), expected[2].begin()));
  EXPECT_EQ(engine.open_row({}), 0);
}

}  // namespace
}  // namespace pianola
