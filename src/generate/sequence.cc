#include "generate/sequence.h"

#include <algorithm>

#include "base/check.h"

namespace pianola {
namespace {

// The tokens at which the engine itself stops the row.
std::vector<TokenId> stop_tokens(const GenerationRequest& request, const Model& model) {
  std::vector<TokenId> tokens = request.stop_tokens;
  if (!request.ignore_eos) {
    tokens.insert(tokens.end(), model.stop_tokens().begin(), model.stop_tokens().end());
  }
  std::sort(tokens.begin(), tokens.end());
  tokens.erase(std::unique(tokens.begin(), tokens.end()), tokens.end());
  return tokens;
}

std::size_t common_prefix(std::span<const TokenId> a, std::span<const TokenId> b) {
  return static_cast<std::size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first -
                                  a.begin());
}

double seconds_between(std::chrono::steady_clock::time_point a,
                       std::chrono::steady_clock::time_point b) {
  return std::chrono::duration<double>(b - a).count();
}

}  // namespace

Sequence::Sequence(Engine& engine, const Model& model, GenerationRequest request, int row)
    : engine_(engine), request_(std::move(request)), stop_(request_.stop) {
  if (request_.prompt.empty()) {
    fail(ErrorCode::kInvalidArgument, "request: the prompt is empty; at least one token is needed");
  }
  if (request_.max_tokens < -1) {
    fail(ErrorCode::kInvalidArgument, "request: max_tokens is {}, expected -1 (no limit) or more",
         request_.max_tokens);
  }
  for (const TokenId token : request_.prompt) {  // before a continued row gives up what it holds
    if (token < 0 || token >= engine.vocab_size()) {
      fail(ErrorCode::kInvalidArgument,
           "request: token {} of the prompt is outside the vocabulary "
           "of {}",
           token, engine.vocab_size());
    }
  }
  if (model.has_tokenizer()) {
    detokenizer_ = std::make_unique<Detokenizer>(model.shared_tokenizer(), true);
    vocab_size_ = model.tokenizer().vocab_size();
  } else if (!request_.stop.empty()) {
    fail(ErrorCode::kInvalidArgument, "request: stop strings need a model with a tokenizer");
  }
  request_.stop_tokens = stop_tokens(request_, model);
  before_ = engine.max_input_len() > 0
                ? 1
                : static_cast<int>(std::min(request_.prompt.size(),
                                            static_cast<std::size_t>(engine.max_seq_len()) + 1));
  limit_ = request_.max_tokens < 0 || request_.max_tokens > engine.max_seq_len() - before_
               ? engine.max_seq_len()
               : before_ + request_.max_tokens;
  start(row);
}

Sequence::~Sequence() {
  if (!owns_row_) return;
  try {
    engine_.close_row(row_);
  } catch (const Error&) {
    row_ = -1;  // somebody else has closed it
  }
}

void Sequence::begin(int row) {
  if (engine_.max_input_len() == 0) return engine_.append(row, request_.prompt);
  engine_.encode(row, request_.prompt);
  const TokenId first = engine_.decoder_start_token();
  engine_.append(row, {&first, 1});
}

void Sequence::start(int row) {
  const RowOptions options{request_.sampling, limit_, request_.stop_tokens};
  stats_.prompt_tokens = static_cast<int>(request_.prompt.size());
  started_ = first_token_ = Clock::now();
  if (row < 0) {
    row_ = engine_.open_row(options);
    if (row_ < 0) {
      fail(ErrorCode::kInvalidArgument, "engine: all {} slots are taken", engine_.slots());
    }
    owns_row_ = true;
    try {
      begin(row_);
    } catch (...) {
      engine_.close_row(row_);
      throw;
    }
  } else if (engine_.max_input_len() > 0) {
    engine_.configure_row(row, options);
    engine_.reset(row);
    begin(row);
    row_ = row;
  } else {
    const std::span<const TokenId> prompt(request_.prompt);
    if (static_cast<int>(prompt.size()) > engine_.max_seq_len()) {
      fail(ErrorCode::kContextOverflow, "request: a prompt of {} tokens, the slot holds {}",
           prompt.size(), engine_.max_seq_len());
    }
    engine_.configure_row(row, options);  // throws before anything has changed
    std::size_t shared = common_prefix(engine_.history(row), prompt);
    // The last token of the prompt is computed in any case.
    const bool whole = shared == prompt.size();
    const int wanted = static_cast<int>(shared) - (whole ? 1 : 0);
    const int kept = engine_.keepable(row, wanted);
    if (kept < wanted) shared = static_cast<std::size_t>(kept);
    stats_.reused_tokens = std::min(static_cast<int>(shared), engine_.length(row));
    engine_.keep_first(row, static_cast<int>(shared));
    engine_.append(row, prompt.subspan(shared));
    row_ = row;
  }
}

FinishReason Sequence::reason_for(RowStatus status) const {
  switch (status) {
    case RowStatus::kStopToken:
      return FinishReason::kStopToken;
    case RowStatus::kLength:
      return request_.max_tokens >= 0 && stats_.generated_tokens >= request_.max_tokens
                 ? FinishReason::kLength
                 : FinishReason::kContext;
    case RowStatus::kFailed:
    case RowStatus::kRefused:
      return FinishReason::kFailed;
    case RowStatus::kIdle:
    case RowStatus::kRunning:
      break;
  }
  return FinishReason::kNone;
}

void Sequence::accept(const TokenEvent& event) {
  if (finished()) return;  // the engine had computed more than was wanted
  const auto now = Clock::now();
  if (stats_.generated_tokens == 0) {
    first_token_ = now;
    stats_.prompt_seconds = seconds_between(started_, now);
  }
  stats_.generate_seconds = seconds_between(first_token_, now);
  if (event.status == RowStatus::kFailed) return finish(FinishReason::kFailed);
  if (request_.max_tokens == 0) {  // the prompt is computed; its first answer is not wanted
    engine_.drop_last(row_, 1);
    return finish(FinishReason::kLength);
  }
  ++stats_.generated_tokens;
  // A model's vocabulary may be padded: what lies behind the tokenizer's has no text.
  const bool has_text = detokenizer_ && event.token < vocab_size_;
  emit(event.token, event.logprob, has_text ? detokenizer_->push(event.token) : std::string());
  if (stop_.found()) return finish(FinishReason::kStopString);
  const FinishReason reason = reason_for(event.status);
  if (reason != FinishReason::kNone) finish(reason);
}

void Sequence::emit(TokenId token, float logprob, const std::string& text) {
  std::string safe = stop_.push(text);
  if (token >= 0 || !safe.empty()) ready_.push_back({token, std::move(safe), logprob});
}

void Sequence::finish(FinishReason reason) {
  if (finished()) return;
  if (reason != FinishReason::kStopString) {
    emit(-1, 0, detokenizer_ ? detokenizer_->flush() : std::string());
    std::string rest = stop_.flush();
    if (!rest.empty()) ready_.push_back({-1, std::move(rest), 0});
  }
  reason_ = reason;
  if (owns_row_) {
    engine_.close_row(row_);
    owns_row_ = false;
  } else {
    // The row keeps the prompt and what was handed out, and computes nothing more.
    const std::size_t known = engine_.history(row_).size();
    const auto seen =
        static_cast<std::size_t>(before_) + static_cast<std::size_t>(stats_.generated_tokens);
    const int kept = static_cast<int>(std::min(known, seen));
    engine_.keep_first(row_, engine_.keepable(row_, kept));
  }
}

bool Sequence::take(Piece& piece) {
  if (ready_.empty()) return false;
  piece = std::move(ready_.front());
  ready_.pop_front();
  return true;
}

}  // namespace pianola
