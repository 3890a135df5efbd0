// The rows of one batch, and which of them a prompt begins with: a prompt that shares its first
// tokens with a row goes on from a copy of it, or in the row itself when its answer is over. Rows
// that are given back are kept for that until their slots are needed.
//
//   PrefixPool pool(engine, 32);
//   if (pool.should_wait(prompt)) ...;           // a row is about to compute what it shares
//   int row = pool.take(prompt);                 // open; continue it with the prompt (Sequence)
//   pool.give_back(row, true);                   // a later prompt may begin as it does
//
// Windows and states do not keep every length: what they have let go of is not offered.
#pragma once

#include <cstdint>
#include <vector>

#include "pianola/engine.h"

namespace pianola {

class PrefixPool {
 public:
  // Prompts share at least `least_shared` tokens, or nothing; 0: nothing, ever.
  PrefixPool(Engine& engine, int least_shared);
  // Closes every row, in use or kept.
  ~PrefixPool();
  PrefixPool(const PrefixPool&) = delete;
  PrefixPool& operator=(const PrefixPool&) = delete;

  // An open row that the prompt continues, now in use; -1: no slot is free, and none is kept.
  int take(std::span<const std::int32_t> prompt);
  // The row is in use no more. With `keep` what it holds may be shared until its slot is needed.
  void give_back(int row, bool keep);
  // Closes what is only kept; whether there was any.
  bool close_kept();
  // True while a row in use is computing tokens that the prompt shares, and more of them than any
  // row has by now: then take() gives more in a few steps.
  bool should_wait(std::span<const std::int32_t> prompt);

 private:
  enum class Use { kNotOurs, kInUse, kKept };
  struct Row {
    Use use = Use::kNotOurs;
    std::uint64_t used_at = 0;  // when it was given back, or copied last
  };
  struct Source {
    int row = -1;
    int tokens = 0;
  };

  // Tokens of the prompt, all but its last, that a row begins with: known, and computed.
  int shared(int row, std::span<const std::int32_t> prompt) const;
  int computed(int row, std::span<const std::int32_t> prompt) const;
  // Tokens of the prompt that the row, or a copy of it, can keep.
  int keepable(int row, std::span<const std::int32_t> prompt) const;
  Source best_to_fork(std::span<const std::int32_t> prompt) const;
  Source best_to_continue(std::span<const std::int32_t> prompt) const;
  int fork(const Source& source);  // -1: no slot is free, or no memory for a copy
  bool close_one_kept();           // the one that was of no use for the longest time
  int put_in_use(int row);

  Row& at(int row) { return rows_[static_cast<std::size_t>(row)]; }
  const Row& at(int row) const { return rows_[static_cast<std::size_t>(row)]; }
  int size() const { return static_cast<int>(rows_.size()); }

  Engine& engine_;
  int least_shared_;
  std::vector<Row> rows_;  // by the engine's numbers
  std::uint64_t clock_ = 0;
  Source awaited_;             // what should_wait() said true for
  bool waiting_helps_ = true;  // until a row had let go of what was waited for
};

}  // namespace pianola
