#include "engine/row_pages.h"

#include <algorithm>

#include "base/check.h"
#include "engine/slot_regions.h"

namespace pianola {

RowPages::RowPages(DeviceMemory& memory, std::size_t page_bytes,
                   std::span<const LayerCacheView> caches, std::span<const StateView> states,
                   int slots)
    : memory_(&memory), blocks_(static_cast<std::size_t>(slots)) {
  if (page_bytes == 0) return;
  const auto offset = [&memory](const SlotRegion& region) {
    return static_cast<std::size_t>(region.base - memory.data());
  };
  for (const LayerCacheView& view : caches) {
    if (view.holds != CacheHolds::kTokens) {
      const auto own = static_cast<std::size_t>(view.holds == CacheHolds::kInput ? slots : 1);
      memory.require(static_cast<std::size_t>(view.keys - memory.data()),
                     view.key_slot_bytes * own);
      memory.require(static_cast<std::size_t>(view.values - memory.data()),
                     view.value_slot_bytes * own);
    }
    for (const SlotRegion& block : slot_regions({&view, 1}, {}, kCacheBlock)) {
      regions_.push_back({.offset = offset(block),
                          .stride = block.stride,
                          .block_bytes = block.bytes,
                          .blocks = view.capacity / kCacheBlock});
    }
  }
  for (const SlotRegion& region : slot_regions({}, states, 1, true)) {
    memory.require(offset(region), region.stride * static_cast<std::size_t>(slots));
  }
}

int RowPages::blocks_of(int positions) { return (positions + kCacheBlock - 1) / kCacheBlock; }

bool RowPages::has(const Need& need) const {
  return blocks_of(need.positions) <= blocks_[static_cast<std::size_t>(need.row)];
}

void RowPages::require(std::span<const Need> needs, std::span<const RowTable::Row> rows) {
  if (regions_.empty()) return;
  const auto bring_all = [&] {
    for (const Need& need : needs) bring(need);
  };
  if (std::ranges::all_of(needs, [this](const Need& need) { return has(need); })) return;
  try {
    return bring_all();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kOutOfMemory) throw;
  }
  for (int row = 0; row < static_cast<int>(rows.size()); ++row) {
    const RowTable::Row& r = rows[static_cast<std::size_t>(row)];
    int kept = r.open ? r.held() : 0;
    for (const Need& need : needs) {
      if (need.row == row) kept = std::max(kept, need.positions);
    }
    give_back(row, kept);
  }
  try {
    bring_all();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kOutOfMemory) throw;
    const auto missing = std::ranges::find_if(needs, [this](const Need& n) { return !has(n); });
    fail(ErrorCode::kOutOfMemory,
         "engine: row {} cannot grow to {} tokens, there is no memory for its caches: close or "
         "reset rows ({} bytes are in use) ({})",
         missing->row, missing->positions, memory_->resident_bytes(), error.what());
  }
}

void RowPages::bring(const Need& need) {
  if (has(need)) return;
  int& had = blocks_[static_cast<std::size_t>(need.row)];
  const int blocks = blocks_of(need.positions);
  for (const Region& region : regions_) {
    const int first = std::min(had, region.blocks);  // a ring is whole before its row is
    const int count = std::min(blocks, region.blocks) - first;
    memory_->require(region.offset + static_cast<std::size_t>(need.row) * region.stride +
                         static_cast<std::size_t>(first) * region.block_bytes,
                     static_cast<std::size_t>(count) * region.block_bytes);
  }
  had = blocks;
}

void RowPages::give_back(int row, int positions) {
  const int kept = blocks_of(positions);
  for (const Region& region : regions_) {
    const int first = std::min(kept, region.blocks);
    memory_->give_back(region.offset + static_cast<std::size_t>(row) * region.stride +
                           static_cast<std::size_t>(first) * region.block_bytes,
                       static_cast<std::size_t>(region.blocks - first) * region.block_bytes);
  }
  int& had = blocks_[static_cast<std::size_t>(row)];
  had = std::min(had, kept);
}

}  // namespace pianola
