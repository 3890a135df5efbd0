#include "engine/row_table.h"

#include <algorithm>
#include <cstddef>

#include "base/check.h"

namespace pianola {
namespace {

void validate(const RowOptions& options, int max_seq_len, int vocab_size) {
  pianola::validate(options.sampling);
  if (options.max_length < 0 || options.max_length > max_seq_len) {
    fail(ErrorCode::kInvalidArgument, "row options: max_length is {}, expected 0 to {}",
         options.max_length, max_seq_len);
  }
  if (options.stop_tokens.size() > kMaxStopTokens) {
    fail(ErrorCode::kInvalidArgument, "row options: {} stop tokens, at most {}",
         options.stop_tokens.size(), kMaxStopTokens);
  }
  const auto check_token = [vocab_size](TokenId token, const char* what) {
    if (token < 0 || token >= vocab_size) {
      fail(ErrorCode::kInvalidArgument, "row options: {} {} is outside the vocabulary of {}", what,
           token, vocab_size);
    }
  };
  for (const TokenId token : options.stop_tokens) check_token(token, "stop token");
  for (const TokenBias& bias : options.sampling.logit_bias) check_token(bias.token, "biased token");
}

SamplingState sampling_state(const SamplingParams& p) {
  return {.temperature = p.temperature,
          .top_k = p.top_k,
          .top_p = p.top_p,
          .min_p = p.min_p,
          .repeat_penalty = p.repeat_penalty,
          .presence_penalty = p.presence_penalty,
          .frequency_penalty = p.frequency_penalty,
          .penalty_window = p.penalty_window,
          .seed = p.seed,
          .choice = p.choice,
          .want_logprob = p.logprobs ? 1 : 0};
}

}  // namespace

RowTable::RowTable(const StepState& state, int rows, int max_seq_len, int vocab_size,
                   Backend& backend)
    : rows_(static_cast<std::size_t>(rows)),
      images_(static_cast<std::size_t>(rows)),
      state_(state),
      backend_(&backend),
      max_seq_len_(max_seq_len),
      vocab_size_(vocab_size) {
  for (Row& row : rows_) row.history.reserve(static_cast<std::size_t>(max_seq_len) + 1);
}

RowTable::Row& RowTable::at(int index) {
  return const_cast<Row&>(static_cast<const RowTable*>(this)->row(index));
}

const RowTable::Row& RowTable::row(int index) const {
  if (index < 0 || index >= static_cast<int>(rows_.size()) ||
      !rows_[static_cast<std::size_t>(index)].open) {
    fail(ErrorCode::kInvalidArgument, "engine: row {} is not open", index);
  }
  return rows_[static_cast<std::size_t>(index)];
}

int RowTable::open(const RowOptions& options) {
  validate(options, max_seq_len_, vocab_size_);
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    if (rows_[i].open) continue;
    rows_[i].open = true;
    rows_[i].length = 0;
    rows_[i].history.clear();
    configure(static_cast<int>(i), options);
    return static_cast<int>(i);
  }
  return -1;
}

void RowTable::close(int index) {
  Row& row = at(index);
  row.open = false;
  row.status = RowStatus::kIdle;
}

void RowTable::configure(int index, const RowOptions& options) {
  Row& row = at(index);
  validate(options, max_seq_len_, vocab_size_);
  row.max_length = options.max_length ? options.max_length : max_seq_len_;
  row.status = RowStatus::kIdle;
  write_header(index, &options);
}

void RowTable::append(int index, std::span<const TokenId> tokens) {
  Row& row = at(index);
  const std::size_t total = row.history.size() + tokens.size();
  if (total > static_cast<std::size_t>(max_seq_len_)) {
    fail(ErrorCode::kContextOverflow,
         "engine: row {} holds {} tokens and {} more do not fit its capacity of {}; shorten the "
         "prompt or load with a larger max_seq_len",
         index, row.history.size(), tokens.size(), max_seq_len_);
  }
  for (const TokenId token : tokens) {
    if (token < 0 || token >= vocab_size_) {
      fail(ErrorCode::kInvalidArgument, "engine: token {} is outside the vocabulary of {}", token,
           vocab_size_);
    }
  }
  if (total == 0) {
    fail(ErrorCode::kInvalidArgument, "engine: row {} has no tokens to go on from", index);
  }
  if (!tokens.empty()) {
    backend_->write(state_.history + static_cast<std::int64_t>(index) * state_.history_stride +
                        static_cast<std::int64_t>(row.history.size()),
                    tokens.data(), tokens.size_bytes());
    row.history.insert(row.history.end(), tokens.begin(), tokens.end());
  }
  if (row.pending() == 0) --row.length;
  row.status = RowStatus::kRunning;
  write_header(index, nullptr);
}

void RowTable::keep_first(int index, int n) {
  Row& row = at(index);
  if (n < 0 || n > static_cast<int>(row.history.size())) {
    fail(ErrorCode::kContextOverflow, "engine: row {} holds {} tokens and cannot keep the first {}",
         index, row.history.size(), n);
  }
  row.history.resize(static_cast<std::size_t>(n));
  row.length = std::min(row.length, n);
  row.status = RowStatus::kIdle;
  write_header(index, nullptr);
}

void RowTable::apply(const TokenEvent& event) {
  Row& row = rows_[static_cast<std::size_t>(event.row)];
  if (event.token >= 0) row.history.push_back(event.token);
  row.status = event.status;
}

void RowTable::set_idle(int index) {
  rows_[static_cast<std::size_t>(index)].status = RowStatus::kIdle;
}

void RowTable::write_header(int index, const RowOptions* options) {
  const Row& row = rows_[static_cast<std::size_t>(index)];
  RowState& image = images_[static_cast<std::size_t>(index)];
  image.length = row.length;
  image.history_length = static_cast<std::int32_t>(row.history.size());
  image.max_length = row.max_length;
  image.status = row.status;
  std::size_t bytes = offsetof(RowState, bias);
  if (options) {
    image.sampling = sampling_state(options->sampling);
    image.stop_count = static_cast<std::int32_t>(options->stop_tokens.size());
    std::copy(options->stop_tokens.begin(), options->stop_tokens.end(), image.stop_tokens);
    image.bias_count = static_cast<std::int32_t>(options->sampling.logit_bias.size());
    for (std::size_t i = 0; i < options->sampling.logit_bias.size(); ++i) {
      const TokenBias& bias = options->sampling.logit_bias[i];
      image.bias[i] = {bias.token, bias.bias};
    }
    bytes += options->sampling.logit_bias.size() * sizeof(LogitBias);
  }
  backend_->write(state_.row + index, &image, bytes);
}

}  // namespace pianola
