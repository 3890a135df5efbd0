// The caches of a whole stack: sizes first, then addresses that never change.
//
//   CacheLayout layout(specs, {.max_seq_len = 8192, .slots = 4});
//   layout.bytes_per_slot();                      // printed by `plan` before anything is allocated
//   Arena arena;
//   StaticCache cache(layout, arena);             // reserves its regions
//   arena.seal(memory);                           // now cache.layer(3).keys is final
#pragma once

#include <span>
#include <vector>

#include "cache/layer_cache.h"
#include "tensor/arena.h"

namespace pianola {

struct CacheOptions {
  int max_seq_len = 0;     // tokens a slot can hold: the ceiling of all later calls
  int slots = 1;           // sequences at a time
  int rollback_depth = 0;  // tokens that may be appended and taken back
  int chunk = 1;           // most tokens of a row in one step
  DType dtype = DType::kF16;
  StateRollback state_rollback = StateRollback::kCompact;
  int checkpoints = 0;    // of state layers, a slot: lengths of long ago that it can go back to
  int max_input_len = 0;  // tokens of the longest input of an encoder; 0: there is none
};

// Sizes of every layer's buffers for given options. Throws InvalidArgument for options out of range
// and Unsupported for an element type that no cache has.
class CacheLayout {
 public:
  CacheLayout() = default;
  CacheLayout(const CacheSpecs& layers, const CacheOptions& options);

  const CacheOptions& options() const { return options_; }
  std::span<const AttentionSpec> layers() const { return layers_; }
  std::span<const StateSpec> states() const { return states_; }
  // max_seq_len rounded up to whole blocks.
  int capacity() const { return capacity_; }
  // Positions that a layer holds: all, or its window and what a step or a rollback needs besides.
  int capacity(int layer) const;
  // The fewest first tokens, besides none, that a row can be cut back to which has held `written`:
  // as far as its windows go, and its states.
  int least_kept_by_windows(int written) const;
  int least_kept_by_states(int written) const;
  // Whether some layer is a ring that rows outgrow.
  bool has_rings() const;
  bool has_states() const { return !states_.empty(); }
  // Tokens that a row may be ahead of any of its lengths and still go back to it.
  int most_ahead() const;
  // Checkpoints are of multiples of this many tokens.
  int checkpoint_interval() const;
  CacheShape shape() const { return {options_.dtype, options_.slots, capacity_, input_capacity_}; }
  // Slots of a layer: one for each row, or input; of the step at hand, one.
  int slots(int layer) const;
  std::size_t key_bytes(int layer) const;    // of one slot, with scales
  std::size_t value_bytes(int layer) const;  // of one slot; 0 when the keys hold them
  // Sizes of a state layer; no addresses.
  StateView state_shape(int layer) const;
  std::size_t bytes_per_slot() const;   // of what there is a slot for each row of
  std::size_t bytes_per_input() const;  // of them
  std::size_t total_bytes() const;

 private:
  std::vector<AttentionSpec> layers_;
  std::vector<StateSpec> states_;
  CacheOptions options_;
  int capacity_ = 0;
  int input_capacity_ = 0;
};

class StaticCache {
 public:
  // Reserves the regions of all layers; addresses exist once the arena is sealed.
  StaticCache(const CacheLayout& layout, Arena& arena);

  const CacheLayout& layout() const { return layout_; }
  LayerCacheView layer(int index) const;
  StateView state(int index) const;
  // Of the arena, in pages: those that state layers and inputs have, and a first token in one slot.
  // The arena holds nothing else and begins with a page.
  std::size_t first_token_bytes(std::size_t page) const;

 private:
  struct Region {
    std::size_t keys = 0;
    std::size_t values = 0;
  };
  struct StateRegion {
    std::size_t anchor = 0;
    std::size_t steps = 0;
    std::size_t newest = 0;
    std::size_t newest_length = 0;
    std::size_t conv = 0;
    std::size_t checkpoint = 0;
  };
  CacheLayout layout_;
  const Arena* arena_;
  std::vector<Region> regions_;
  std::vector<StateRegion> state_regions_;
};

}  // namespace pianola
