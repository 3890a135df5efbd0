// Pages behind the caches, as rows grow. Addresses are those of the whole caches from the
// beginning; only what a step, a run or a copy is about to touch has memory.
//
//   const RowPages::Need need{.row = 0, .positions = 300};
//   pages.require({&need, 1}, rows);  // OutOfMemory before anything is launched
//
// Positions come in blocks of 64, and blocks in whole pages. State layers and the inputs of an
// encoder, whose size no row's length changes, have all of theirs from the beginning: a row that
// was opened does not fail for them. Nothing here does anything where the system brings pages
// itself (Backend::page_bytes() of 0).
#pragma once

#include <span>
#include <vector>

#include "engine/row_table.h"

namespace pianola {

class RowPages {
 public:
  // `memory` holds the caches of so many slots and outlives this. Throws OutOfMemory.
  RowPages(DeviceMemory& memory, std::size_t page_bytes, std::span<const LayerCacheView> caches,
           std::span<const StateView> states, int slots);

  struct Need {
    int row = 0;
    int positions = 0;  // the first ones
  };
  // Pages for all of `needs`. When memory runs out, those go that neither they nor what `rows` hold
  // need: of closed rows, and of what runs were expected to come to. Throws OutOfMemory when it is
  // still too little; then rows can be closed or reset, and work goes on with those that have
  // pages.
  void require(std::span<const Need> needs, std::span<const RowTable::Row> rows);

 private:
  // A block of one layer's keys, values or scales in slot 0.
  struct Region {
    std::size_t offset = 0;
    std::size_t stride = 0;  // from slot to slot
    std::size_t block_bytes = 0;
    int blocks = 0;  // of a slot
  };

  static int blocks_of(int positions);
  bool has(const Need& need) const;
  void bring(const Need& need);
  void give_back(int row, int positions);

  DeviceMemory* memory_;
  std::vector<Region> regions_;  // empty: nothing to do
  std::vector<int> blocks_;      // of each row that have pages in all regions
};

}  // namespace pianola
