// One answer in the making: turns the engine's events into text, watches for stop strings, and
// keeps the figures. Knows its row but computes nothing; Generator and generate() drive it.
#pragma once

#include <chrono>
#include <deque>

#include "generate/stop_strings.h"
#include "pianola/generator.h"

namespace pianola {

class Sequence {
 public:
  // Validates the request against the model. `row` < 0: a row is opened and belongs to the
  // sequence; else the open row is continued, keeping what its history shares with the prompt.
  Sequence(Engine& engine, const Model& model, GenerationRequest request, int row);
  ~Sequence();
  Sequence(const Sequence&) = delete;
  Sequence& operator=(const Sequence&) = delete;

  int row() const { return row_; }
  bool finished() const { return reason_ != FinishReason::kNone; }
  FinishReason finish_reason() const { return reason_; }
  const GenerationStats& stats() const { return stats_; }

  void accept(const TokenEvent& event);
  void cancel() { finish(FinishReason::kCancelled); }
  // The next piece that is ready; false when there is none.
  bool take(Piece& piece);

 private:
  using Clock = std::chrono::steady_clock;

  void start(int row);
  // Gives an empty row the prompt: as its first tokens, or, where the model has an encoder, as the
  // input of that, and the token that answers begin with.
  void begin(int row);
  void finish(FinishReason reason);
  FinishReason reason_for(RowStatus status) const;
  void emit(TokenId token, float logprob, const std::string& text);

  Engine& engine_;
  GenerationRequest request_;
  int row_ = -1;
  bool owns_row_ = false;
  int before_ = 0;  // tokens of the row in front of the answer
  int limit_ = 0;   // tokens of prompt and answer at which the answer is max_tokens long
  std::unique_ptr<Detokenizer> detokenizer_;  // null without a tokenizer: pieces have no text
  TokenId vocab_size_ = 0;                    // of the tokenizer
  StopStrings stop_;
  std::deque<Piece> ready_;
  FinishReason reason_ = FinishReason::kNone;
  GenerationStats stats_;
  Clock::time_point started_;
  Clock::time_point first_token_;
};

}  // namespace pianola
