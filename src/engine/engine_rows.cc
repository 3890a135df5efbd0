// Rows: what a caller does to them between steps.
#include <algorithm>
#include <bit>

#include "backends/address_hash.h"
#include "base/check.h"
#include "engine/engine_impl.h"
#include "engine/slot_regions.h"

namespace pianola {

int Engine::open_row(const RowOptions& options) {
  impl_->settle();
  return impl_->guarded([&] { return impl_->rows->open(options); });
}
void Engine::close_row(int row) {
  impl_->settle();
  impl_->rows->close(row);
  impl_->drop_waiting(row);
}
void Engine::configure_row(int row, const RowOptions& options) {
  impl_->settle();
  impl_->guarded([&] { impl_->rows->configure(row, options); });
}
void Engine::append(int row, std::span<const std::int32_t> tokens) {
  impl_->settle();
  impl_->guarded([&] { impl_->rows->append(row, tokens); });
}
RowStatus Engine::status(int row) const { return impl_->rows->row(row).status; }
std::span<const std::int32_t> Engine::history(int row) const {
  return impl_->rows->row(row).history;
}
int Engine::length(int row) const { return impl_->rows->row(row).length; }
void Engine::keep_first(int row, int n) {
  impl_->settle();
  impl_->guarded([&] { impl_->rows->keep_first(row, n); });
  impl_->drop_waiting(row);
}
void Engine::drop_last(int row, int n) {
  impl_->settle();
  const std::size_t size = impl_->rows->row(row).history.size();
  if (n < 0 || static_cast<std::size_t>(n) > size) {
    fail(ErrorCode::kContextOverflow, "engine: row {} holds {} tokens and cannot drop the last {}",
         row, size, n);
  }
  keep_first(row, static_cast<int>(size) - n);
}
void Engine::reset(int row) {
  keep_first(row, 0);
  impl_->guarded([&] { impl_->rows->drop_input(row); });
}
void Engine::rollback(std::span<const int> counts) {
  impl_->settle();
  impl_->guarded([&] { impl_->rows->rollback(counts); });
  for (std::size_t row = 0; row < counts.size(); ++row) {
    if (counts[row] > 0) impl_->drop_waiting(static_cast<int>(row));
  }
}
std::int32_t* Engine::device_rollback() {
  impl_->settle();
  impl_->guarded([&] { impl_->rows->let_kernels_roll_back(); });
  return impl_->state.rollback;
}
int Engine::max_rewind(int row) const { return impl_->rows->max_rewind(row); }
int Engine::keepable(int row, int n) const {
  const int size = static_cast<int>(impl_->rows->row(row).history.size());
  return impl_->rows->keepable(row, std::clamp(n, 0, size));
}

bool Engine::has_work() const {
  const auto rows = impl_->rows->rows();
  return std::any_of(rows.begin(), rows.end(), [](const RowTable::Row& r) { return r.running(); });
}

// --- Copies ------------------------------------------------------------------------------------

namespace {

std::size_t total_bytes(const std::vector<SlotRegion>& regions) {
  std::size_t bytes = 0;
  for (const SlotRegion& region : regions) bytes += region.bytes;
  return bytes;
}

}  // namespace

std::uint64_t Engine::Impl::fingerprint() const {
  AddressHash hash;
  const auto add_text = [&hash](std::string_view text) {
    for (const char c : text) hash.add_word(static_cast<unsigned char>(c));
    hash.add_word(text.size());
  };
  // The model: its tensors' names, shapes and first bytes, and the constants made at load.
  for (const TensorInfo& tensor : model->checkpoint().tensors()) {
    constexpr std::size_t kLooked = 64;
    const TensorView view = model->checkpoint().view(tensor);
    add_text(tensor.name);
    add_text(tensor.shape.to_string());
    add_text(
        {reinterpret_cast<const char*>(view.data), std::min<std::size_t>(kLooked, view.bytes)});
  }
  for (const WeightDecl& weight : layout.tables().weights) {
    for (const float value : weight.constant) hash.add_word(std::bit_cast<std::uint32_t>(value));
  }
  // The shapes that bytes are laid out by. The capacity of a layer without a window is none.
  for (const LayerCacheView& view : caches) {
    for (const int n :
         {static_cast<int>(view.dtype), view.kv_heads, view.key_dim, view.value_dim, view.window,
          view.window > 0 ? view.capacity : 0, static_cast<int>(view.holds)}) {
      hash.add_word(static_cast<std::uint64_t>(n));
    }
  }
  for (const StateView& view : states) {
    for (const int n : {view.spec.heads, view.spec.key_dim, view.spec.value_dim,
                        view.spec.conv_width, view.spec.conv_taps, view.interval, view.anchors}) {
      hash.add_word(static_cast<std::uint64_t>(n));
    }
  }
  return hash.value();
}

std::vector<int> Engine::fork(int row, int count, const RowOptions& options) {
  impl_->settle();
  return fork(row, count, options, static_cast<int>(impl_->rows->row(row).history.size()));
}

std::vector<int> Engine::fork(int row, int count, const RowOptions& options, int n) {
  Impl& e = *impl_;
  e.settle();
  const RowTable::Row like = e.rows->fork_of(row, n);
  const auto all = e.rows->rows();
  const auto free = std::ranges::count_if(all, [](const RowTable::Row& r) { return !r.open; });
  if (count < 1 || count > static_cast<int>(all.size())) {
    fail(ErrorCode::kInvalidArgument, "engine: {} forks of row {}, expected 1 to {}", count, row,
         all.size());
  }
  if (free < count) return {};
  const bool restores = e.rows->needs_checkpoint(row, n);
  const std::span<const StateView> copied_states =
      restores ? std::span<const StateView>() : e.states;
  const std::vector<SlotRegion> regions = slot_regions(e.caches, copied_states, like.held());
  std::vector<int> forks;
  RowOptions own = options;
  std::vector<RowPages::Need> needs;
  for (int slot = 0; static_cast<int>(needs.size()) < count; ++slot) {
    if (!all[static_cast<std::size_t>(slot)].open) needs.push_back({slot, like.held()});
  }
  e.guarded([&] {
    e.pages->require(needs, all);
    for (int i = 0; i < count; ++i) {
      const int fork = e.rows->open(own);
      forks.push_back(fork);
      for (const SlotRegion& region : regions) {
        e.backend->copy(region.of(fork), region.of(row), region.bytes);
      }
      if (restores) e.rows->restore_states(fork, row, n);
      e.rows->adopt(fork, like.history, like);
      ++own.sampling.choice;
    }
  });
  return forks;
}

void Engine::swap(int a, int b) {
  Impl& e = *impl_;
  e.settle();
  const int used = std::max(e.rows->row(a).held(), e.rows->row(b).held());
  if (a == b) return;
  constexpr std::size_t kPiece = std::size_t{1} << 20;
  std::vector<std::byte> piece(kPiece);
  e.guarded([&] {
    const RowPages::Need needs[] = {{a, used}, {b, used}};
    e.pages->require(needs, e.rows->rows());
    for (const SlotRegion& region : slot_regions(e.caches, e.states, used, true)) {
      for (std::size_t done = 0; done < region.bytes; done += kPiece) {
        const std::size_t bytes = std::min(kPiece, region.bytes - done);
        e.backend->read(piece.data(), region.of(a) + done, bytes);
        e.backend->copy(region.of(a) + done, region.of(b) + done, bytes);
        e.backend->write(region.of(b) + done, piece.data(), bytes);
      }
    }
    e.rows->swap(a, b);
  });
  for (TokenEvent& event : e.waiting) {
    if (event.row == a || event.row == b) event.row = event.row == a ? b : a;
  }
}

RowSnapshot Engine::snapshot(int row) {
  Impl& e = *impl_;
  e.settle();
  const RowTable::Row& r = e.rows->row(row);
  RowSnapshot snapshot;
  snapshot.header_ = {
      e.fingerprint(), r.length,      std::max(r.written, r.length), std::max(r.folded, r.length),
      r.floor,         r.input_length};
  snapshot.history_ = r.history;
  const std::vector<SlotRegion> regions = slot_regions(e.caches, e.states, r.held());
  const std::vector<SlotRegion> inputs = input_regions(e.caches, r.input_length);
  snapshot.data_.resize(total_bytes(regions) + total_bytes(inputs));
  std::byte* to = snapshot.data_.data();
  const auto read = [&](const std::vector<SlotRegion>& from, int slot) {
    for (const SlotRegion& region : from) {
      e.backend->read(to, region.of(slot), region.bytes);
      to += region.bytes;
    }
  };
  e.guarded([&] {
    read(regions, row);
    read(inputs, r.input_slot);
  });
  return snapshot;
}

void Engine::restore(int row, const RowSnapshot& snapshot) {
  Impl& e = *impl_;
  e.settle();
  e.rows->row(row);
  const RowSnapshot::Header& header = snapshot.header_;
  if (header.fingerprint != e.fingerprint()) {
    fail(ErrorCode::kInvalidArgument,
         "engine: the snapshot is of another model, cache type, rollback depth or chunk size");
  }
  const int known = static_cast<int>(snapshot.history_.size());
  const int used = std::max(header.written, header.folded);
  // The last token of a full row is in no cache.
  if (known > max_seq_len() + 1 || used > max_seq_len()) {
    fail(ErrorCode::kContextOverflow,
         "engine: the snapshot holds {} tokens and held up to {}, the slot holds {}", known, used,
         max_seq_len());
  }
  if (header.input > max_input_len()) {
    fail(ErrorCode::kContextOverflow,
         "engine: the snapshot has an input of {} tokens, there is room for {}", header.input,
         max_input_len());
  }
  const std::vector<SlotRegion> regions = slot_regions(e.caches, e.states, used);
  const std::vector<SlotRegion> inputs = input_regions(e.caches, std::max(header.input, 0));
  const auto in_order = [](std::initializer_list<int> values) {
    return std::ranges::is_sorted(values);
  };
  if (total_bytes(regions) + total_bytes(inputs) != snapshot.data_.size() || header.input < 0 ||
      (max_input_len() > 0 && header.input == 0 && known > 0) ||
      !in_order({0, header.length, known}) || !in_order({header.length, header.written}) ||
      !in_order({0, header.floor, header.length, header.folded}) ||
      std::ranges::any_of(
          snapshot.history_, [this](std::int32_t t) { return t < 0 || t >= vocab_size(); })) {
    fail(ErrorCode::kInvalidArgument, "engine: the snapshot contradicts itself");
  }
  const std::byte* from = snapshot.data_.data();
  e.guarded([&] {
    const RowPages::Need need{row, used};
    e.pages->require({&need, 1}, e.rows->rows());
    e.rows->keep_first(row, 0);
    e.rows->drop_input(row);
    if (header.input > 0) e.rows->take_input(row, header.input);
    const int input_slot = e.rows->row(row).input_slot;
    const auto write = [&](const std::vector<SlotRegion>& to, int slot) {
      for (const SlotRegion& region : to) {
        e.backend->write(region.of(slot), from, region.bytes);
        from += region.bytes;
      }
    };
    write(regions, row);
    write(inputs, input_slot);
    e.rows->adopt(row, snapshot.history_,
                  {.length = header.length,
                   .written = header.written,
                   .folded = header.folded,
                   .floor = header.floor,
                   .input_slot = input_slot,
                   .input_length = header.input});
  });
  e.drop_waiting(row);
}

}  // namespace pianola
