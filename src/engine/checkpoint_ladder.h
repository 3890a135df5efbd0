// States of long ago, so that a row with state layers can go back further than its rollback depth:
// copies of anchors inside the cache's own memory, a few a row, taken at the ends of prompt chunks.
// When a row's places are full the one goes whose neighbours are closest together.
//
//   ladder.take(row, 1024);              // the row holds 1024 tokens or a few more
//   ladder.longest(row, 3000);           // 1024
//   ladder.restore(row, row, 1024);      // and the row's length is to be 1024 again
//
// Stacks without state layers have none: longest() is 0.
#pragma once

#include <span>
#include <vector>

#include "backends/backend.h"

namespace pianola {

class CheckpointLadder {
 public:
  CheckpointLadder(std::span<const StateView> states, int slots, Backend& backend);

  // `length`: a multiple of the interval whose anchors are still kept.
  void take(int row, int length);
  // The most tokens, at most n, that there is a checkpoint of; 0: none.
  int longest(int row, int n) const;
  // The states of row `from` after `length` tokens, of which it has a checkpoint, become the newest
  // of `row`: the same row, or one that is to hold the same first tokens.
  void restore(int row, int from, int length);
  // After the row has been cut back to n tokens.
  void forget_beyond(int row, int n);
  // Two rows change places.
  void swap(int a, int b);

 private:
  struct Checkpoint {
    int length = 0;
    int place = 0;
  };
  int free_place(std::vector<Checkpoint>& taken) const;
  // Between the buffers of a row and a place of a row's checkpoints.
  void copy(int row, int owner, const Checkpoint& checkpoint, bool back);

  std::span<const StateView> states_;
  Backend* backend_;
  std::vector<std::vector<Checkpoint>> taken_;  // of each row, by length; never grows
  std::vector<std::int32_t> lengths_;           // what restore() writes, one a head
};

}  // namespace pianola
