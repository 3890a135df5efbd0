// Answers as text: pieces, stop strings, ends, and callers who change their mind.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "base/utf8.h"
#include "pianola/generator.h"
#include "text_model.h"

namespace pianola {
namespace {

using test::bytes_of;
using test::text_model;

Engine make_engine(int slots = 1) {
  return Engine(text_model().causal(),
                {.backend = "cpu", .threads = 1, .max_seq_len = 128, .slots = slots, .chunk = 16});
}

// An answer made only of some bytes, in random order.
GenerationRequest request(int seed, std::string_view bytes, int max_tokens = 60) {
  GenerationRequest r{.prompt = bytes_of("once"), .max_tokens = max_tokens};
  r.sampling.temperature = 2;
  r.sampling.seed = static_cast<std::uint64_t>(seed);
  for (const TokenId id : bytes_of(bytes)) r.sampling.logit_bias.push_back({id, 100});
  return r;
}

struct Answer {
  std::string text;
  std::vector<TokenId> tokens;
  FinishReason reason = FinishReason::kNone;
};

Answer answer_of(Engine& engine, const GenerationRequest& r) {
  Generator generator(engine, text_model(), r);
  Answer answer;
  for (const Piece& piece : generator) {
    EXPECT_TRUE(is_valid_utf8(piece.text)) << "a piece ends inside a character";
    answer.text += piece.text;
    if (piece.token >= 0) answer.tokens.push_back(piece.token);
  }
  answer.reason = generator.finish_reason();
  return answer;
}

TEST(GeneratorText, PiecesAreTheDecodedTokens) {
  Engine engine = make_engine();
  for (int seed = 0; seed < 20; ++seed) {
    // Bytes that are characters alone, and parts of longer ones that mostly do not fit.
    const Answer a = answer_of(engine, request(seed, "a\xC3\xA9\xE2\x82\xAC\xF0\x9F"));
    EXPECT_EQ(a.tokens.size(), 60U);
    EXPECT_EQ(a.text, sanitize_utf8(text_model().tokenizer().decode(a.tokens, true)));
  }
}

// The model's vocabulary is larger than the tokenizer's: such a token has no text and no harm.
TEST(GeneratorText, TokensBeyondTheTokenizerHaveNoText) {
  const auto vocab = text_model().tokenizer().vocab_size();
  Engine engine = make_engine(2);
  ASSERT_LT(vocab, engine.vocab_size());
  GenerationRequest r = request(1, "ab", 40);
  r.sampling.logit_bias.push_back({vocab, 100});
  r.sampling.logit_bias.push_back({engine.vocab_size() - 1, 100});
  const Answer a = answer_of(engine, r);
  EXPECT_EQ(a.tokens.size(), 40U);
  EXPECT_GE(std::count_if(a.tokens.begin(), a.tokens.end(), [&](TokenId t) { return t >= vocab; }),
            1);
  std::string want;
  for (const TokenId t : a.tokens) {
    if (t < vocab) want += text_model().tokenizer().token_bytes(t);
  }
  EXPECT_EQ(a.text, want);
}

TEST(GeneratorText, StopStringsEndTheAnswerAndNeverShow) {
  Engine engine = make_engine();
  int found = 0;
  for (int seed = 0; seed < 30; ++seed) {
    const Answer whole = answer_of(engine, request(seed, "abc"));
    ASSERT_EQ(whole.text.size(), 60U);
    GenerationRequest r = request(seed, "abc");
    r.stop = {whole.text.substr(static_cast<std::size_t>(seed), 5), "abcabc!"};
    const Answer stopped = answer_of(engine, r);
    EXPECT_EQ(stopped.reason, FinishReason::kStopString);
    EXPECT_EQ(stopped.text, whole.text.substr(0, whole.text.find(r.stop[0])));
    EXPECT_EQ(stopped.tokens.size(), stopped.text.size() + 5);
    ++found;
    // A string that does not come: all of the text does, also what was held back at its end.
    r.stop = {whole.text.substr(55) + "!", whole.text.substr(50) + "a!"};
    const Answer held = answer_of(engine, r);
    EXPECT_EQ(held.reason, FinishReason::kLength);
    EXPECT_EQ(held.text, whole.text);
  }
  EXPECT_EQ(found, 30);
}

// A stop string of more than one character, each of more than one byte.
TEST(GeneratorText, StopStringsInUtf8) {
  Engine engine = make_engine();
  GenerationRequest r = request(0, "");
  r.sampling.logit_bias = {{bytes_of("\xC3")[0], 100}, {bytes_of("\xA9")[0], 100}};
  int stopped = 0;
  for (int seed = 0; seed < 10; ++seed) {
    r.sampling.seed = static_cast<std::uint64_t>(seed);
    r.stop.clear();
    const std::string whole = answer_of(engine, r).text;
    r.stop = {"éé"};
    const Answer a = answer_of(engine, r);
    EXPECT_EQ(a.text, whole.substr(0, whole.find("éé")));
    stopped += a.reason == FinishReason::kStopString;
  }
  EXPECT_GT(stopped, 0);
}

TEST(GeneratorText, TheEndTokenHasNoText) {
  Engine engine = make_engine();
  GenerationRequest r = request(1, "a", 5);
  r.sampling.logit_bias = {{test::kEnd, 1000}};
  const Answer a = answer_of(engine, r);
  EXPECT_EQ(a.reason, FinishReason::kStopToken);
  EXPECT_EQ(a.tokens, std::vector<TokenId>{test::kEnd});
  EXPECT_EQ(a.text, "");
  r.ignore_eos = true;
  const Answer on = answer_of(engine, r);
  EXPECT_EQ(on.reason, FinishReason::kLength);
  EXPECT_EQ(on.tokens.size(), 5U);
}

TEST(GeneratorText, AFailedRowSaysSo) {
  Engine engine = make_engine();
  GenerationRequest r = request(1, "a", 5);
  r.sampling.logit_bias.clear();
  for (TokenId id = 0; id < engine.vocab_size(); ++id) {
    r.sampling.logit_bias.push_back({id, -std::numeric_limits<float>::infinity()});
  }
  const Answer a = answer_of(engine, r);
  EXPECT_EQ(a.reason, FinishReason::kFailed);
  EXPECT_TRUE(a.tokens.empty());
}

// Turns of a conversation in one row: each continues what is there, and says what a fresh row says.
TEST(GeneratorText, TurnsInOneRow) {
  Engine engine = make_engine(2);
  const int row = engine.open_row({});
  std::vector<ChatMessage> messages;
  int reused = 0;
  for (int turn = 0; turn < 3; ++turn) {
    messages.push_back({"user", "go"});
    GenerationRequest r = request(turn, "xyz", 6);
    r.prompt = text_model().encode_chat(messages);
    if (turn == 1) r.stop = {"x", "y", "z"};
    Generator generator(engine, text_model(), row, r);
    EXPECT_EQ(generator.stats().reused_tokens > 0, turn > 0);
    EXPECT_GE(generator.stats().reused_tokens, reused);
    reused = generator.stats().reused_tokens;
    std::string text;
    for (const Piece& piece : generator) text += piece.text;
    EXPECT_EQ(text, answer_of(engine, r).text);
    messages.push_back({"assistant", text});
  }
  EXPECT_EQ(engine.status(row), RowStatus::kIdle);
}

// Somebody else's call on the row ends the answer; it does not hang, and nothing is closed twice.
TEST(GeneratorText, ARowThatIsTakenAwayEndsTheAnswer) {
  Engine engine = make_engine();
  {
    Generator generator(engine, text_model(), request(1, "ab"));
    ASSERT_TRUE(generator.next());
    engine.reset(generator.row());
    while (generator.next()) {
    }
    EXPECT_EQ(generator.finish_reason(), FinishReason::kCancelled);
  }
  {
    Generator generator(engine, text_model(), request(1, "ab"));
    ASSERT_TRUE(generator.next());
    engine.close_row(generator.row());
    EXPECT_THROW(
        {
          while (generator.next()) {
          }
        },
        Error);
  }
  EXPECT_EQ(engine.open_row({}), 0);
}

TEST(GenerateText, AfterFalseNothingMoreIsSaid) {
  Engine engine = make_engine(2);
  std::vector<GenerationRequest> requests = {request(1, "ab"), request(2, "ab", 8)};
  requests[0].stop = {"aaaaaaaaaaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbbbbbbbbbb"};  // holds text back
  int calls = 0;
  std::string said;
  const auto results =
      generate(engine, text_model(), requests, [&](std::size_t i, const Piece& piece) {
        if (i != 0) return true;
        said += piece.text;
        return ++calls < 3;
      });
  EXPECT_EQ(calls, 3);
  EXPECT_EQ(results[0].finish_reason, FinishReason::kCancelled);
  EXPECT_EQ(results[0].text, said);
  EXPECT_EQ(results[0].tokens.size(), 3U);
  EXPECT_EQ(results[1].finish_reason, FinishReason::kLength);
  EXPECT_EQ(results[1].tokens.size(), 8U);
}

// A callback that throws leaves no row behind.
TEST(GenerateText, AThrowingCallbackGivesEverySlotBack) {
  Engine engine = make_engine(2);
  const std::vector<GenerationRequest> requests(5, request(1, "ab"));
  EXPECT_THROW(generate(engine, text_model(), requests,
                        [](std::size_t, const Piece&) -> bool { throw std::runtime_error("x"); }),
               std::runtime_error);
  EXPECT_EQ(engine.open_row({}), 0);
  EXPECT_EQ(engine.open_row({}), 1);
}

// Rows that somebody else holds: the requests take turns in what is left, or are refused.
TEST(GenerateText, SlotsHeldByOthers) {
  Engine engine = make_engine(2);
  const int held = engine.open_row({});
  std::vector<GenerationRequest> requests;
  for (int i = 0; i < 4; ++i) requests.push_back(request(i, "abc", 10));
  requests[2].sampling.top_p = 0;  // refused alone
  const auto results = generate(engine, text_model(), requests);
  for (std::size_t i = 0; i < results.size(); ++i) {
    EXPECT_EQ(results[i].error.empty(), i != 2) << results[i].error;
    if (i != 2) {
      EXPECT_EQ(results[i].text, answer_of(engine, requests[i]).text);
    }
  }
  const int second = engine.open_row({});
  ASSERT_GE(second, 0);
  for (const GenerationResult& result : generate(engine, text_model(), requests)) {
    EXPECT_EQ(result.finish_reason, FinishReason::kFailed);
    EXPECT_FALSE(result.error.empty());
  }
  engine.close_row(held);
}

}  // namespace
}  // namespace pianola
