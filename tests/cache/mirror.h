// What a Player knows of an engine's rows, and what it has seen of them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <ostream>
#include <vector>

#include "cache/stacks.h"
#include "pianola/engine.h"

namespace pianola {

// What is known of a row without having looked into the engine.
struct Row {
  std::vector<TokenId> history;
  int length = 0;
  RowStatus status = RowStatus::kIdle;
  Choosing choosing;
  int max_length = kMaxSeqLen;
  int written = 0;            // the most tokens that its windows have held since it was empty
  int folded = 0;             // and its states since a checkpoint was restored
  int floor = 0;              // the tokens of that checkpoint
  int poisoned = -1;          // its length when all was poisoned that the next token does not need
  std::deque<Answer> unseen;  // the last of its tokens that no event has told of yet

  int known() const { return static_cast<int>(history.size()); }
  int held() const { return std::max({written, folded, length}); }
};

// What sequences came to: that they are no idle play.
struct Tally {
  std::uint64_t operations = 0;
  std::uint64_t answers = 0;
  std::uint64_t refusals = 0;
  std::uint64_t rewinds = 0;
  std::uint64_t rollbacks = 0;    // of the tokens of a row
  std::uint64_t checkpoints = 0;  // gone back to
  std::uint64_t full = 0;         // rows at their capacity
  std::uint64_t ahead = 0;        // tokens that were computed before anybody asked
  std::uint64_t shortages = 0;    // calls that found no memory
  double seconds = 0;

  void add(const Tally& other) {
    operations += other.operations;
    answers += other.answers;
    refusals += other.refusals;
    rewinds += other.rewinds;
    rollbacks += other.rollbacks;
    checkpoints += other.checkpoints;
    full += other.full;
    ahead += other.ahead;
    shortages += other.shortages;
    seconds += other.seconds;
  }
};

inline std::ostream& operator<<(std::ostream& out, const Tally& t) {
  return out << t.operations << " operations in " << t.seconds << " s ("
             << static_cast<double>(t.operations) / t.seconds << "/s), " << t.answers
             << " answers, " << t.refusals << " refusals, " << t.rewinds << " rewinds, "
             << t.rollbacks << " rollbacks, " << t.checkpoints << " to checkpoints, " << t.full
             << " full rows, " << t.ahead << " tokens ahead of their reader, " << t.shortages
             << " times out of memory";
}

}  // namespace pianola
