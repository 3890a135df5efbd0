#include "engine/row_table.h"

#include <algorithm>
#include <cstddef>
#include <utility>

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
                   const CacheLayout& caches, std::span<const StateView> states, Backend& backend)
    : rows_(static_cast<std::size_t>(rows)),
      state_(state),
      caches_(&caches),
      ladder_(states, rows, backend),
      backend_(&backend),
      max_seq_len_(max_seq_len),
      vocab_size_(vocab_size),
      counts_(static_cast<std::size_t>(rows)) {
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
    const std::int32_t none = 0;
    backend_->write(state_.rollback + i, &none, sizeof(none));
    rows_[i].owed = 0;
    rows_[i].input_length = 0;
    change(static_cast<int>(i), {.max_length = max_length(options)}, &options);
    rows_[i].open = true;
    rows_[i].written = rows_[i].folded = rows_[i].floor = 0;
    rows_[i].history.clear();
    ladder_.forget_beyond(static_cast<int>(i), 0);
    return static_cast<int>(i);
  }
  return -1;
}

void RowTable::close(int index) {
  Row& row = at(index);
  row.open = false;
  row.status = RowStatus::kIdle;
  row.input_length = 0;
}

bool RowTable::in_use(int input_slot, int besides) const {
  for (int i = 0; i < static_cast<int>(rows_.size()); ++i) {
    const Row& row = rows_[static_cast<std::size_t>(i)];
    if (i != besides && row.open && row.input_length > 0 && row.input_slot == input_slot) {
      return true;
    }
  }
  return false;
}

void RowTable::take_input(int index, int length) {
  Row& row = at(index);
  PIANOLA_CHECK(row.history.empty() && length > 0, "an input for row {} of {} tokens", index,
                row.history.size());
  // There are as many slots as rows, so one is free.
  int slot = row.input_length > 0 ? row.input_slot : index;
  while (in_use(slot, index)) slot = (slot + 1) % static_cast<int>(rows_.size());
  const int before = row.input_length;
  const int slot_before = row.input_slot;
  row.input_slot = slot;
  row.input_length = length;
  try {
    change(index, {.max_length = row.max_length}, nullptr);
  } catch (...) {
    row.input_slot = slot_before;
    row.input_length = before;
    throw;
  }
}

void RowTable::drop_input(int index) {
  Row& row = at(index);
  if (row.input_length == 0) return;
  row.input_length = 0;
  change(index,
         {.length = row.length,
          .history_length = static_cast<int>(row.history.size()),
          .max_length = row.max_length},
         nullptr);
}

void RowTable::configure(int index, const RowOptions& options) {
  Header next = header(at(index));
  validate(options, max_seq_len_, vocab_size_);
  next.max_length = max_length(options);
  change(index, next, &options);
}

void RowTable::append(int index, std::span<const TokenId> tokens) {
  Row& row = at(index);
  if (caches_->options().max_input_len > 0 && row.input_length == 0) {
    fail(ErrorCode::kInvalidArgument,
         "engine: row {} has no input: encode() one before there is anything to decode", index);
  }
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
  if (tokens.empty() && row.length == static_cast<int>(total) && max_rewind(index) < 1) {
    fail(ErrorCode::kContextOverflow,
         "engine: row {} cannot compute its last token again: its layers have let go of what it "
         "needs",
         index);
  }
  if (tokens.empty()) {
    // The last token may be none that the device has queued.
    if (row.owed > 0) settle_rollback(index);
  } else {
    backend_->write(
        device_history(index) + static_cast<std::int64_t>(row.history.size()) + row.owed,
        tokens.data(), tokens.size_bytes());
  }
  const int known = static_cast<int>(total);
  const int held = row.length;
  Header next = header(row);
  next.length = held == known ? known - 1 : held;
  next.history_length = known;
  next.status = RowStatus::kRunning;
  change(index, next, nullptr);
  row.written = std::max(row.written, held);
  row.folded = std::max(row.folded, held);
  row.history.insert(row.history.end(), tokens.begin(), tokens.end());
}

void RowTable::check_keepable(int index, int n) const {
  const Row& row = this->row(index);
  if (n < 0 || n > static_cast<int>(row.history.size())) {
    fail(ErrorCode::kContextOverflow, "engine: row {} holds {} tokens and cannot keep the first {}",
         index, row.history.size(), n);
  }
  if (keepable(index, n) != n) {
    fail(ErrorCode::kContextOverflow,
         "engine: row {} holds {} tokens, of which the last {} can be taken back: its layers have "
         "let go of what the first {} need, and keep at most {}",
         index, row.history.size(), max_rewind(index), n, keepable(index, n));
  }
}

RowTable::Row RowTable::kept(const Row& row, int n) const {
  if (n == 0) return {};
  Row next = {.length = std::min(row.length, n),
              .written = std::max(row.written, row.length),
              .folded = std::max(row.folded, row.length),
              .floor = row.floor};
  if (n < least_kept(row)) next.folded = next.floor = n;
  return next;
}

RowTable::Row RowTable::fork_of(int index, int n) const {
  check_keepable(index, n);
  const Row& row = this->row(index);
  Row fork = kept(row, n);
  // A copy holds nothing beyond its length in layers that keep everything.
  if (!caches_->has_rings()) fork.written = fork.length;
  if (!caches_->has_states()) fork.folded = fork.length;
  fork.input_slot = row.input_slot;
  fork.input_length = row.input_length;
  fork.history.assign(row.history.begin(), row.history.begin() + n);
  return fork;
}

bool RowTable::needs_checkpoint(int index, int n) const {
  return n > 0 && n < least_kept(row(index));
}

void RowTable::restore_states(int to, int from, int n) { ladder_.restore(to, from, n); }

void RowTable::keep_first(int index, int n) {
  check_keepable(index, n);
  Row& row = at(index);
  const Row next = kept(row, n);
  const bool restores = needs_checkpoint(index, n);
  settle_rollback(index);
  if (restores) ladder_.restore(index, index, n);
  change(index,
         {.length = next.length,
          .history_length = n,
          .max_length = row.max_length,
          .reach = reach(next),
          .floor = next.floor},
         nullptr);
  row.written = next.written;
  row.folded = next.folded;
  row.floor = next.floor;
  row.history.resize(static_cast<std::size_t>(n));
  ladder_.forget_beyond(index, n);
}

int RowTable::reach(const Row& row) const {
  return std::max({row.folded, row.length, caches_->has_rings() ? row.written : 0});
}

RowTable::Header RowTable::header(const Row& row) const {
  return {.length = row.length,
          .history_length = static_cast<int>(row.history.size()),
          .max_length = row.max_length,
          .reach = reach(row),
          .floor = row.floor};
}

void RowTable::check_rollback(int index, int count) const {
  const Row& r = row(index);
  if (r.status != RowStatus::kRunning && r.status != RowStatus::kIdle) {
    fail(ErrorCode::kInvalidArgument, "engine: row {} has stopped and takes nothing back", index);
  }
  const int most = std::min(
      {state_.rollback_depth, r.length - r.floor, state_.most_ahead - (reach(r) - r.length)});
  if (count < 0 || count > most) {
    fail(ErrorCode::kContextOverflow,
         "engine: row {} holds {} tokens and can take back at most {} of them, not {} (the "
         "rollback depth is {})",
         index, r.length, std::max(0, most), count, state_.rollback_depth);
  }
}

void RowTable::rollback(std::span<const int> counts) {
  if (counts.size() != rows_.size()) {
    fail(ErrorCode::kInvalidArgument,
         "engine: rollback of {} rows, expected a count for each of {}", counts.size(),
         rows_.size());
  }
  for (int i = 0; i < state_.rows; ++i) {
    const int count = counts[static_cast<std::size_t>(i)];
    if (count != 0) check_rollback(i, count);
  }
  int first = state_.rows;
  int end = 0;
  for (int i = 0; i < state_.rows; ++i) {
    const int count = counts[static_cast<std::size_t>(i)];
    if (rows_[static_cast<std::size_t>(i)].owed + count > state_.rollback_depth) settle_rollback(i);
    counts_[static_cast<std::size_t>(i)] = rows_[static_cast<std::size_t>(i)].owed + count;
    if (count == 0) continue;
    first = std::min(first, i);
    end = i + 1;
  }
  if (end == 0) return;
  if (!kernels_roll_back_) {
    backend_->write(state_.rollback + first, counts_.data() + first,
                    static_cast<std::size_t>(end - first) * sizeof(std::int32_t));
  }
  for (int i = first; i < end; ++i) {
    const int count = counts[static_cast<std::size_t>(i)];
    if (count == 0) continue;
    Row& row = rows_[static_cast<std::size_t>(i)];
    row.written = std::max(row.written, row.length);
    row.folded = std::max(row.folded, row.length);
    const auto held = row.history.begin() + row.length;
    row.history.erase(held - count, held);
    row.length -= count;
    ladder_.forget_beyond(i, row.length);
    if (kernels_roll_back_) {
      tell(i);
    } else {
      row.owed += count;
    }
  }
}

void RowTable::has_rolled_back() {
  for (Row& row : rows_) row.owed = 0;
}

void RowTable::settle_rollback(int index) {
  Row& row = at(index);
  if (row.owed == 0 && !kernels_roll_back_) return;
  const std::int32_t none = 0;
  backend_->write(state_.rollback + index, &none, sizeof(none));
  if (row.owed == 0) return;
  row.owed = 0;
  tell(index);
}

void RowTable::tell(int index) {
  const Row& row = rows_[static_cast<std::size_t>(index)];
  if (row.pending() > 0) {
    backend_->write(device_history(index) + row.length, row.history.data() + row.length,
                    static_cast<std::size_t>(row.pending()) * sizeof(TokenId));
  }
  Header next = header(row);
  next.status = row.status;
  change(index, next, nullptr);
}

void RowTable::let_kernels_roll_back() {
  for (int i = 0; i < state_.rows; ++i) {
    if (rows_[static_cast<std::size_t>(i)].open) settle_rollback(i);
  }
  kernels_roll_back_ = true;
}

void RowTable::read_rollbacks() {
  if (!kernels_roll_back_) return;
  backend_->read(counts_.data(), state_.went_back, counts_.size() * sizeof(std::int32_t));
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    if (counts_[i] == 0) continue;
    const std::int32_t none = 0;
    backend_->write(state_.went_back + i, &none, sizeof(none));
    Row& row = rows_[i];
    if (!row.open) continue;
    const int index = static_cast<int>(i);
    backend_->read(&image_, state_.row + i, offsetof(RowState, sampling));
    row.length = image_.length;  // first: what it was before may never have been held
    if (image_.reach > reach(row)) {
      row.written = std::max(row.written, image_.reach);
      row.folded = std::max(row.folded, image_.reach);
    }
    row.history.resize(static_cast<std::size_t>(image_.history_length));
    backend_->read(row.history.data(), device_history(index), row.history.size() * sizeof(TokenId));
    ladder_.forget_beyond(index, counts_[i] - 1);
    // The device is not told of every row that goes idle.
    if (row.running() || image_.status == RowStatus::kRefused) row.status = image_.status;
  }
}

int RowTable::least_kept(const Row& row) const {
  return std::max({row.floor, caches_->least_kept_by_windows(std::max(row.written, row.length)),
                   caches_->least_kept_by_states(std::max(row.folded, row.length))});
}

int RowTable::max_rewind(int index) const {
  const Row& r = row(index);
  return std::max(0, static_cast<int>(r.history.size()) - least_kept(r));
}

int RowTable::keepable(int index, int n) const {
  const Row& r = row(index);
  if (n >= least_kept(r)) return n;
  const int checkpoint = ladder_.longest(index, n);
  const int windows = caches_->least_kept_by_windows(std::max(r.written, r.length));
  return checkpoint >= windows ? checkpoint : 0;
}

void RowTable::checkpoint(int index) {
  const int interval = caches_->checkpoint_interval();
  ladder_.take(index, row(index).length / interval * interval);
}

void RowTable::adopt(int index, std::span<const TokenId> history, const Row& like) {
  Row& row = at(index);
  settle_rollback(index);
  if (!history.empty()) {
    backend_->write(device_history(index), history.data(), history.size_bytes());
  }
  row.input_slot = like.input_slot;
  row.input_length = like.input_length;
  change(index,
         {.length = like.length,
          .history_length = static_cast<int>(history.size()),
          .max_length = row.max_length,
          .reach = reach(like),
          .floor = like.floor},
         nullptr);
  row.written = like.written;
  row.folded = like.folded;
  row.floor = like.floor;
  row.history.assign(history.begin(), history.end());
  ladder_.forget_beyond(index, 0);
}

void RowTable::swap(int a, int b) {
  Row& first = at(a);
  Row& second = at(b);
  settle_rollback(a);
  settle_rollback(b);
  RowState other;
  backend_->read(&image_, state_.row + a, sizeof(image_));
  backend_->read(&other, state_.row + b, sizeof(other));
  backend_->write(state_.row + a, &other, sizeof(other));
  backend_->write(state_.row + b, &image_, sizeof(image_));
  for (const auto& [to, from] : {std::pair{a, &second}, std::pair{b, &first}}) {
    if (from->history.empty()) continue;
    backend_->write(device_history(to), from->history.data(),
                    from->history.size() * sizeof(TokenId));
  }
  std::swap(first, second);
  ladder_.swap(a, b);
}

void RowTable::apply(const TokenEvent& event) {
  Row& row = rows_[static_cast<std::size_t>(event.row)];
  if (event.token >= 0) row.history.push_back(event.token);
  row.status = event.status;
}

void RowTable::set_idle(int index) {
  rows_[static_cast<std::size_t>(index)].status = RowStatus::kIdle;
}

void RowTable::change(int index, const Header& header, const RowOptions* options) {
  Row& row = rows_[static_cast<std::size_t>(index)];
  image_.length = header.length + row.owed;
  image_.history_length = header.history_length + row.owed;
  image_.max_length = header.max_length;
  image_.status = header.status;
  image_.reach = header.reach;
  image_.floor = header.floor;
  image_.input_slot = rows_[static_cast<std::size_t>(index)].input_slot;
  image_.input_length = rows_[static_cast<std::size_t>(index)].input_length;
  std::size_t bytes = offsetof(RowState, sampling);
  if (options) {
    image_.sampling = sampling_state(options->sampling);
    image_.stop_count = static_cast<std::int32_t>(options->stop_tokens.size());
    std::copy(options->stop_tokens.begin(), options->stop_tokens.end(), image_.stop_tokens);
    const std::vector<TokenBias>& biases = options->sampling.logit_bias;
    image_.bias_count = static_cast<std::int32_t>(biases.size());
    std::transform(biases.begin(), biases.end(), image_.bias,
                   [](const TokenBias& b) { return LogitBias{b.token, b.bias}; });
    bytes = offsetof(RowState, bias) + biases.size() * sizeof(LogitBias);
  }
  backend_->write(state_.row + index, &image_, bytes);
  row.length = header.length;
  row.max_length = header.max_length;
  row.status = header.status;
}

}  // namespace pianola
