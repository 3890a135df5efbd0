// Generating text: one answer token by token, or many at once.
//
//   Generator answer(engine, model, {.prompt = ids, .max_tokens = 100});
//   for (const Piece& piece : answer) std::cout << piece.text << std::flush;
//   answer.finish_reason();                      // kStopToken, kLength, ...
//
//   generate(engine, model, requests, [](std::size_t i, const Piece& piece) { ...; return true; });
//
// Pieces are whole UTF-8 characters. Text that might turn out to start a stop string is held back.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "pianola/engine.h"
#include "pianola/model.h"

namespace pianola {

enum class FinishReason {
  kNone,        // still going
  kStopToken,   // an end-of-answer token
  kStopString,  // one of the request's stop strings; it is not part of the text
  kLength,      // max_tokens
  kContext,     // the slot is full
  kCancelled,
  kFailed,  // NaN or +inf from the model
};
// "stop_token", "stop_string", "length", "context", "cancelled", "failed"
const char* finish_reason_name(FinishReason reason);

struct GenerationRequest {
  std::vector<TokenId> prompt;  // of a model with an encoder: its input
  SamplingParams sampling;
  int max_tokens = -1;               // -1: to the end of the slot; 0: compute the prompt only
  std::vector<std::string> stop;     // at most 16 strings of 1 to 256 bytes
  std::vector<TokenId> stop_tokens;  // besides the model's own
  bool ignore_eos = false;           // the model's own do not stop the answer
};

struct Piece {
  TokenId token = -1;  // -1: text that was held back, without a token of its own
  std::string text;    // may be empty
  float logprob = 0;   // when SamplingParams::logprobs is set
};

struct GenerationStats {
  int prompt_tokens = 0;
  int reused_tokens = 0;  // of the prompt, found in the caches of this row or of another
  int generated_tokens = 0;
  double prompt_seconds = 0;    // to the first token
  double generate_seconds = 0;  // from the first token to the last
};

class Generator {
 public:
  // Opens a row for this answer and closes it at the end. Throws InvalidArgument when every slot is
  // taken or the request is out of range, ContextOverflow when the prompt does not fit.
  Generator(Engine& engine, const Model& model, GenerationRequest request);
  // Continues an open row: what its history shares with the prompt is kept, the rest replaced. The
  // row stays open, with the prompt and the answer in it.
  Generator(Engine& engine, const Model& model, int row, GenerationRequest request);
  ~Generator();
  Generator(Generator&&) noexcept;
  Generator& operator=(Generator&&) noexcept;

  // The next piece, or nullopt when the answer has ended.
  std::optional<Piece> next();
  // Ends the answer before its next token; safe from another thread or a signal handler.
  void cancel() noexcept;

  FinishReason finish_reason() const;
  const GenerationStats& stats() const;
  int row() const;

  // An input range over next().
  class Iterator {
   public:
    using value_type = Piece;
    using difference_type = std::ptrdiff_t;
    explicit Iterator(Generator* generator) : generator_(generator) { ++*this; }
    Iterator() = default;
    const Piece& operator*() const { return *piece_; }
    Iterator& operator++() {
      piece_ = generator_->next();
      return *this;
    }
    void operator++(int) { ++*this; }
    bool operator==(std::default_sentinel_t) const { return !piece_; }

   private:
    Generator* generator_ = nullptr;
    std::optional<Piece> piece_;
  };
  Iterator begin() { return Iterator(this); }
  std::default_sentinel_t end() const { return {}; }

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

struct GenerationResult {
  std::string text;
  std::vector<TokenId> tokens;
  std::vector<float> logprobs;  // when asked for
  FinishReason finish_reason = FinishReason::kNone;
  GenerationStats stats;
  std::string error;  // why the request was refused, or ended for want of memory; the others go on
};

struct GenerateOptions {
  // A prompt that shares at least so many first tokens with an earlier request of the call goes on
  // from a copy of what that one computed, as far as windows and states keep it; 0: never.
  int least_shared = 32;
};

// Answers all requests, as many at a time as the engine has free slots, all in the same steps, and
// computes what prompts share once: put those with one system prompt together. The answers are
// those of the requests alone, wherever the engine's bits do not depend on chunks (always but for
// prompts on a GPU without EngineOptions::batch_invariant). The callback may be empty; false from
// it cancels that request.
std::vector<GenerationResult> generate(
    Engine& engine, const Model& model, std::span<const GenerationRequest> requests,
    const std::function<bool(std::size_t, const Piece&)>& on_piece = {},
    const GenerateOptions& options = {});

}  // namespace pianola
