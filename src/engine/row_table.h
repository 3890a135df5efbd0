// The host's side of the rows: what the engine knows of each sequence, mirrored to StepState when
// it changes. The mirror is exact whenever a step's results have been read back, and after a call
// that throws: what the device was not told has not changed here either.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "backends/backend.h"
#include "cache/static_cache.h"
#include "engine/checkpoint_ladder.h"
#include "pianola/engine.h"
#include "plan/step_state.h"

namespace pianola {

class RowTable {
 public:
  // `caches` and `states` outlive the table.
  RowTable(const StepState& state, int rows, int max_seq_len, int vocab_size,
           const CacheLayout& caches, std::span<const StateView> states, Backend& backend);

  int open(const RowOptions& options);  // -1 when every row is taken
  void close(int row);
  void configure(int row, const RowOptions& options);
  void append(int row, std::span<const TokenId> tokens);
  void keep_first(int row, int n);
  // What RollbackOp does of every row, told to the device for the next step. ContextOverflow, or
  // InvalidArgument for a row that is not open or has stopped, and nothing has changed.
  void rollback(std::span<const int> counts);
  // A step has begun, which starts with that.
  void has_rolled_back();
  // From now on kernels write counts: the host's are told to the device at once, so that neither
  // overwrites the other's.
  void let_kernels_roll_back();
  // Reads what they have had taken back, or were refused.
  void read_rollbacks();
  // Tokens of the history that can be taken back; all can be forgotten in any case.
  int max_rewind(int row) const;
  // The most first tokens, at most n, that can be kept: n, or those of a checkpoint, or none.
  int keepable(int row, int n) const;
  // Gives an empty row a slot for an input of so many tokens: its own, or a free one when others
  // share it. Nothing is in it yet.
  void take_input(int row, int length);
  // The row has no input.
  void drop_input(int row);
  // Remembers the states of a row with state layers, to go back to them later.
  void checkpoint(int row);

  struct Row {
    bool open = false;
    int length = 0;   // tokens in the caches
    int written = 0;  // the most they have held before tokens were taken back
    int folded = 0;   // the same of the states, since a checkpoint was restored
    int floor = 0;    // below this many tokens there is no state since then
    int owed = 0;     // tokens taken back that the device still counts, until its next step
    int max_length = 0;
    int input_slot = 0;    // of an encoder's input; rows may share one
    int input_length = 0;  // 0: none
    RowStatus status = RowStatus::kIdle;
    std::vector<TokenId> history;  // capacity max_seq_len + 1: never grows

    // Tokens that the row's buffers hold something of.
    int held() const { return std::max({written, folded, length}); }
    int pending() const { return static_cast<int>(history.size()) - length; }
    bool running() const { return status == RowStatus::kRunning; }
  };

  const Row& row(int index) const;  // InvalidArgument when it is not an open row
  std::span<const Row> rows() const { return rows_; }

  // What another row, or a snapshot, has put into the caches of an open row: `like` says of how
  // many tokens. The row is idle.
  void adopt(int row, std::span<const TokenId> history, const Row& like);
  // What a copy of the row that keeps its first n tokens will be; ContextOverflow when the row
  // cannot keep them. Of its states a copy needs none when there is a checkpoint to restore.
  Row fork_of(int row, int n) const;
  bool needs_checkpoint(int row, int n) const;
  // A checkpoint of `from` becomes the states of `to`.
  void restore_states(int to, int from, int n);
  // Two open rows change places; their slots have done so already.
  void swap(int a, int b);

  // Mirror what a step did: tokens computed, and a token it produced.
  void computed(int row, int tokens) { rows_[static_cast<std::size_t>(row)].length += tokens; }
  void apply(const TokenEvent& event);
  // The row goes idle: all of its tokens are computed and none was to be sampled.
  void set_idle(int row);

 private:
  // What changes of a row; the first fields of RowState.
  struct Header {
    int length = 0;
    int history_length = 0;
    int max_length = 0;
    RowStatus status = RowStatus::kIdle;
    int reach = 0;
    int floor = 0;
  };

  Row& at(int index);
  TokenId* device_history(int index) const {
    return state_.history + static_cast<std::int64_t>(index) * state_.history_stride;
  }
  // The most tokens that layers which forget have held.
  int reach(const Row& row) const;
  // Of an idle row.
  Header header(const Row& row) const;
  void check_rollback(int index, int count) const;
  void check_keepable(int index, int n) const;
  // What the row's lengths become when it keeps its first n tokens.
  Row kept(const Row& row, int n) const;
  // Tells the device at once what it would do with its next step. What a kernel has asked for, and
  // no step has seen, is dropped.
  void settle_rollback(int index);
  // Writes what is queued, and the header.
  void tell(int index);
  int least_kept(const Row& row) const;
  // Whether an open row besides this one has its input there.
  bool in_use(int input_slot, int besides) const;
  int max_length(const RowOptions& options) const {
    return options.max_length ? options.max_length : max_seq_len_;
  }
  // Tells the device, with the sampling when there are options, and then the row.
  void change(int index, const Header& header, const RowOptions* options);

  std::vector<Row> rows_;
  RowState image_;  // what is written to the device
  StepState state_;
  const CacheLayout* caches_;
  CheckpointLadder ladder_;
  Backend* backend_;
  int max_seq_len_;
  int vocab_size_;
  bool kernels_roll_back_ = false;
  std::vector<std::int32_t> counts_;  // [rows] to or from the device
};

}  // namespace pianola
