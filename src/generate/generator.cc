#include "pianola/generator.h"

#include <atomic>

#include "base/check.h"
#include "generate/prefix_pool.h"
#include "generate/sequence.h"

namespace pianola {

struct Generator::Impl {
  Engine& engine;
  Sequence sequence;
  std::atomic<bool> cancelled = false;
};

Generator::Generator(Engine& engine, const Model& model, GenerationRequest request)
    : Generator(engine, model, -1, std::move(request)) {}

Generator::Generator(Engine& engine, const Model& model, int row, GenerationRequest request)
    : impl_(new Impl{engine, Sequence(engine, model, std::move(request), row)}) {}

Generator::~Generator() = default;
Generator::Generator(Generator&&) noexcept = default;
Generator& Generator::operator=(Generator&&) noexcept = default;

// The walk of one token begins here: ask the engine for a step, let the sequence make text of it.
std::optional<Piece> Generator::next() {
  Sequence& sequence = impl_->sequence;
  const int row = sequence.row();
  Piece piece;
  while (!sequence.take(piece)) {
    if (sequence.finished()) return std::nullopt;
    if (impl_->cancelled.load(std::memory_order_relaxed)) {
      sequence.cancel();
      continue;
    }
    for (const TokenEvent& event : impl_->engine.stream({&row, 1})) sequence.accept(event);
    // Somebody else has moved the row back: nothing more will come of it.
    if (!sequence.finished() && impl_->engine.status(row) != RowStatus::kRunning) sequence.cancel();
  }
  return piece;
}

void Generator::cancel() noexcept { impl_->cancelled.store(true, std::memory_order_relaxed); }
FinishReason Generator::finish_reason() const { return impl_->sequence.finish_reason(); }
const GenerationStats& Generator::stats() const { return impl_->sequence.stats(); }
int Generator::row() const { return impl_->sequence.row(); }

const char* finish_reason_name(FinishReason reason) {
  switch (reason) {
    case FinishReason::kNone:
      return "none";
    case FinishReason::kStopToken:
      return "stop_token";
    case FinishReason::kStopString:
      return "stop_string";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kContext:
      return "context";
    case FinishReason::kCancelled:
      return "cancelled";
    case FinishReason::kFailed:
      return "failed";
  }
  return "none";
}

namespace {

// The requests that have a slot, and what came of all of them.
class Batch {
 public:
  Batch(Engine& engine, const Model& model, std::span<const GenerationRequest> requests,
        const std::function<bool(std::size_t, const Piece&)>& on_piece,
        const GenerateOptions& options)
      : engine_(engine),
        model_(model),
        requests_(requests),
        on_piece_(on_piece),
        results_(requests.size()),
        // Rows behind an encoder begin with no token of their prompt.
        pool_(engine, engine.max_input_len() > 0 ? 0 : options.least_shared),
        at_row_(static_cast<std::size_t>(engine.slots())) {}

  std::vector<GenerationResult> run() {
    while (true) {
      admit();
      if (active_ == 0) return std::move(results_);
      rows_.clear();
      for (std::size_t row = 0; row < at_row_.size(); ++row) {
        if (at_row_[row].sequence) rows_.push_back(static_cast<int>(row));
      }
      try {
        for (const TokenEvent& event : engine_.stream(rows_)) {
          at_row_[static_cast<std::size_t>(event.row)].sequence->accept(event);
        }
      } catch (const Error& error) {
        if (error.code() != ErrorCode::kOutOfMemory) throw;
        if (!pool_.close_kept()) fail_newest(error);
        continue;
      }
      for (const int row : rows_) deliver(at_row_[static_cast<std::size_t>(row)]);
    }
  }

 private:
  struct Active {
    std::size_t request = 0;
    std::unique_ptr<Sequence> sequence;
  };

  // In order: a request whose first tokens are just being computed waits for them, and so do those
  // behind it, whose prompts would be computed after that one in any case.
  void admit() {
    while (next_ < requests_.size() && active_ < at_row_.size()) {
      const GenerationRequest& request = requests_[next_];
      if (pool_.should_wait(request.prompt)) return;
      const int row = pool_.take(request.prompt);
      // A free slot may be held by somebody else's row: then this one waits for ours.
      if (row < 0 && active_ > 0) return;
      start(row, next_++);
    }
    if (next_ == requests_.size()) pool_.close_kept();
  }

  void start(int row, std::size_t request) {
    try {
      if (row < 0) {
        fail(ErrorCode::kInvalidArgument, "engine: all {} slots are taken", engine_.slots());
      }
      Active& active = at_row_[static_cast<std::size_t>(row)];
      active = {request, std::make_unique<Sequence>(engine_, model_, requests_[request], row)};
      ++active_;
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kDevice) throw;
      if (row >= 0) pool_.give_back(row, true);
      results_[request].finish_reason = FinishReason::kFailed;
      results_[request].error = error.what();
    }
  }

  // When rows cannot grow any more, the request that came last gives way to the others.
  void fail_newest(const Error& error) {
    Active* newest = nullptr;
    for (Active& active : at_row_) {
      if (active.sequence && (!newest || active.request > newest->request)) newest = &active;
    }
    GenerationResult& result = results_[newest->request];
    result.finish_reason = FinishReason::kFailed;
    result.stats = newest->sequence->stats();
    result.error = error.what();
    end(*newest, false);
  }

  void end(Active& active, bool keep) {
    const int row = active.sequence->row();
    active.sequence.reset();
    --active_;
    pool_.give_back(row, keep);
  }

  void deliver(Active& active) {
    Piece piece;
    GenerationResult& result = results_[active.request];
    while (active.sequence->take(piece)) {
      result.text += piece.text;
      if (piece.token >= 0) {
        result.tokens.push_back(piece.token);
        if (requests_[active.request].sampling.logprobs) result.logprobs.push_back(piece.logprob);
      }
      if (on_piece_ && !on_piece_(active.request, piece)) {
        active.sequence->cancel();
        break;  // what was held back is not wanted either
      }
    }
    if (!active.sequence->finished()) return;
    result.finish_reason = active.sequence->finish_reason();
    result.stats = active.sequence->stats();
    // Nobody is left to share what the last ones hold; and what failed is not to be gone on from.
    const bool keep = next_ < requests_.size() && result.finish_reason != FinishReason::kFailed;
    end(active, keep);
  }

  Engine& engine_;
  const Model& model_;
  std::span<const GenerationRequest> requests_;
  const std::function<bool(std::size_t, const Piece&)>& on_piece_;
  std::vector<GenerationResult> results_;
  PrefixPool pool_;  // owns the rows
  std::vector<Active> at_row_;
  std::vector<int> rows_;
  std::size_t next_ = 0;
  std::size_t active_ = 0;
};

}  // namespace

std::vector<GenerationResult> generate(
    Engine& engine, const Model& model, std::span<const GenerationRequest> requests,
    const std::function<bool(std::size_t, const Piece&)>& on_piece,
    const GenerateOptions& options) {
  return Batch(engine, model, requests, on_piece, options).run();
}

}  // namespace pianola
