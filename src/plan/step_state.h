// Everything that changes from token to token, in device memory: one entry a row (a sequence, by
// its cache slot), and the tables of the step that runs. Ops read positions, lengths and sampling
// parameters here and never hold them by value, so one Program serves every step of its shape.
//
//   StepStateLayout layout(limits);                    // sizes
//   StepState state = layout.bind(base, shared);       // addresses
//   state.row[2].length = 0;
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "pianola/token_event.h"

namespace pianola {

using TokenId = std::int32_t;

inline constexpr int kMaxStopTokens = 32;
inline constexpr int kMaxLogitBias = 1024;

struct LogitBias {
  TokenId token = 0;
  float bias = 0;
};

// How a row chooses its tokens. Zero-initialised means greedy.
struct SamplingState {
  float temperature = 0;   // 0: greedy
  std::int32_t top_k = 0;  // 0: off
  float top_p = 1;
  float min_p = 0;
  float repeat_penalty = 1;
  float presence_penalty = 0;
  float frequency_penalty = 0;
  std::int32_t penalty_window = 0;  // last tokens of the history that count; -1: all
  std::uint64_t seed = 0;
  std::uint32_t choice = 0;
  std::int32_t want_logprob = 0;
};

struct RowState {
  std::int32_t length = 0;          // tokens in the caches
  std::int32_t history_length = 0;  // tokens known: those in the caches and those to compute next
  std::int32_t max_length = 0;      // the row stops when its history reaches this
  RowStatus status = RowStatus::kIdle;
  std::int32_t reach = 0;  // the most tokens that layers which forget have held before a rollback
  std::int32_t floor = 0;  // fewer tokens than these cannot be gone back to
  std::int32_t input_slot = 0;    // of the caches that hold inputs; rows may share one
  std::int32_t input_length = 0;  // tokens of the input that cross attention reads; 0: none
  SamplingState sampling;
  std::int32_t stop_count = 0;
  TokenId stop_tokens[kMaxStopTokens] = {};
  std::int32_t bias_count = 0;
  LogitBias bias[kMaxLogitBias] = {};
};

// How much of each table of a step is real. What lies beyond is padding: computed by no op, stored
// by no op.
struct StepCounts {
  std::int32_t tokens = 0;
  std::int32_t lanes = 0;
  std::int32_t logit_rows = 0;
  std::int32_t feed = 0;  // 1: AdvanceOp writes the next round's tokens and positions (decode)
};

// A loop that runs on the device: how far it may go, and how far it went.
struct RunControl {
  std::int32_t max_rounds = 0;
  std::int32_t rounds = 0;
  std::uint64_t published = 0;  // the device's own copy of ring_head
};

// Addresses of the state. `rows`, `max_seq_len`, ... are fixed at load.
struct StepState {
  std::int32_t rows = 0;
  std::int32_t history_stride = 0;
  std::int32_t ring_capacity = 0;
  std::int32_t rollback_depth = 0;  // most tokens of a row that RollbackOp takes back
  std::int32_t most_ahead = 0;      // most tokens that a row may have held beyond where it goes

  RowState* row = nullptr;     // [rows]
  TokenId* history = nullptr;  // [rows, history_stride]

  // What RollbackOp takes back of each row, and sets to 0. Written by the host, or on the device by
  // whatever runs before the step.
  std::int32_t* rollback = nullptr;  // [rows]
  // Where it was asked for something since the host has set this to 0: n + 1, when n tokens were
  // the fewest that the row has had.
  std::int32_t* went_back = nullptr;  // [rows]

  StepCounts* counts = nullptr;         // [1]
  TokenId* token = nullptr;             // [tokens]
  std::int32_t* position = nullptr;     // [tokens]; -1: masked, the token stores and reads nothing
  std::int32_t* lane_of = nullptr;      // [tokens]
  std::int32_t* first_token = nullptr;  // [lanes + 1]
  std::int32_t* row_of = nullptr;       // [lanes]
  std::int32_t* logit_token = nullptr;  // [logit_rows] index of a token of this step
  TokenId* target = nullptr;            // [logit_rows] for ScoreOp

  TokenId* sampled = nullptr;  // [logit_rows] -1: the row failed
  float* logprob = nullptr;    // [logit_rows] of `sampled` or of `target`

  std::int32_t* yield = nullptr;  // [1] the host asks a running loop to end after its round
  RunControl* control = nullptr;  // [1] only for executors whose loop runs on the device

  // In memory that host and device both reach: the host reads events while a loop runs. The device
  // writes the payload before the head; the host never lets more rounds run than the ring holds.
  std::uint64_t* ring_head = nullptr;  // [1] events published so far
  std::uint64_t* ring_tail = nullptr;  // [1] events consumed so far, written by the host
  TokenEvent* ring = nullptr;          // [ring_capacity]
};

struct StepLimits {
  int rows = 1;
  int max_seq_len = 0;
  int tokens = 1;  // of the largest step
  int lanes = 1;
  int logit_rows = 1;
  int rollback_depth = 0;
  int most_ahead = 0;  // at least rollback_depth
};

class StepStateLayout {
 public:
  explicit StepStateLayout(const StepLimits& limits);
  std::size_t bytes() const { return bytes_; }
  std::size_t shared_bytes() const { return shared_bytes_; }
  // `base` holds bytes() zeroed bytes, `shared` shared_bytes() of them that the host can reach;
  // both aligned to 128.
  StepState bind(std::byte* base, std::byte* shared) const;

 private:
  StepLimits limits_;
  std::size_t bytes_ = 0;
  std::size_t shared_bytes_ = 0;
};

// A uniform number in [0, 1) that depends on nothing but its arguments: the same draw whatever the
// row's lane, its neighbours, the bucket or the backend (Philox 4x32-10, keyed by the seed).
enum class RandomPurpose : std::uint32_t { kSample = 0, kDraft = 1, kAccept = 2 };
double uniform_random(std::uint64_t seed, std::uint32_t choice, std::uint32_t position,
                      RandomPurpose purpose);
// Philox 4x32-10 (Salmon et al., 2011): four random words from a counter and a key.
std::array<std::uint32_t, 4> philox4x32(std::array<std::uint32_t, 4> counter, std::uint64_t key);

}  // namespace pianola
