#include "weights/weight_loader.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace pianola {
namespace {

bool is_stack(const WeightDecl& decl) { return decl.experts != 1 || decl.stack != StackSource{}; }

WeightLayout layout_of(const WeightDecl& decl, const LayoutFunction& layout) {
  if (!is_stack(decl)) return layout(decl);
  WeightLayout stack = layout(one_matrix(decl));
  PIANOLA_CHECK(!stack.mapped, "stack {} cannot be mapped", decl.name);
  stack.bytes = (stack.bytes + Arena::kAlignment - 1) / Arena::kAlignment * Arena::kAlignment *
                static_cast<std::size_t>(decl.experts);
  stack.form = 0;  // no other weight is made from the same elements
  return stack;
}

// out [rows, cols] from the columns of source [cols, rows * columns] that a matrix has in it.
template <std::size_t kElementBytes>
void transpose(const StackSource& stack, const std::byte* source, std::int64_t rows,
               std::int64_t cols, std::byte* out) {
  constexpr std::int64_t kTile = 16;  // rows whose elements of the source are near each other
  for (std::int64_t first = 0; first < rows; first += kTile) {
    const std::int64_t end = std::min(first + kTile, rows);
    for (std::int64_t c = 0; c < cols; ++c) {
      for (std::int64_t r = first; r < end; ++r) {
        const std::int64_t from = (c * rows + r) * stack.columns + stack.first_column;
        std::memcpy(out + static_cast<std::size_t>(r * cols + c) * kElementBytes,
                    source + static_cast<std::size_t>(from) * kElementBytes, kElementBytes);
      }
    }
  }
}

void take_columns(const WeightDecl& decl, const std::byte* source, std::byte* out) {
  const DTypeInfo& type = dtype_info(decl.dtype);
  PIANOLA_CHECK(type.elements == 1 && (type.bytes == 2 || type.bytes == 4),
                "columns of {} in {} cannot be taken apart", decl.name, type.name);
  // A vector is a matrix of one column.
  const bool vector = decl.role == WeightRole::kVector;
  const auto take = type.bytes == 2 ? transpose<2> : transpose<4>;
  take(decl.stack, source, vector ? decl.cols : decl.rows, vector ? 1 : decl.cols, out);
}

}  // namespace

WeightStore::WeightStore(std::span<const WeightDecl> decls, const LayoutFunction& layout,
                         Arena& arena)
    : decls_(decls), arena_(&arena) {
  for (const WeightDecl& decl : decls) entries_.push_back({layout_of(decl, layout), 0, {}});
  for (std::size_t i = 0; i < decls.size(); ++i) {
    Entry& entry = entries_[i];
    PIANOLA_CHECK(!entry.layout.mapped || (decls[i].constant.empty() && decls[i].slices.empty()),
                  "weight {} is not in the file as it is used", decls[i].name);
    entry.copy_of = find_copy(i);
    if (entry.copy_of) {
      entry.layout = entries_[*entry.copy_of].layout;
    } else if (entry.layout.mapped) {
      mapped_bytes_ += decls[i].source_bytes();
    } else {
      entry.offset = arena.reserve(entry.layout.bytes);
      device_bytes_ += entry.layout.bytes;
    }
  }
}

std::optional<std::size_t> WeightStore::find_copy(std::size_t i) const {
  const WeightLayout& layout = entries_[i].layout;
  if (layout.form == 0 || decls_[i].source.empty() || !decls_[i].slices.empty()) {
    return std::nullopt;
  }
  const std::size_t end = layout.mapped ? entries_.size() : i;
  for (std::size_t j = 0; j < end; ++j) {
    const Entry& other = entries_[j];
    if (!other.layout.mapped && !other.copy_of && other.layout.form == layout.form &&
        decls_[j].source == decls_[i].source && decls_[j].slices.empty()) {
      return j;
    }
  }
  return std::nullopt;
}

void WeightStore::load(const Checkpoint& checkpoint, const RepackFunction& repack,
                       const LoadCallback& progress) {
  std::uint64_t total = 0;
  for (const WeightDecl& decl : decls_) total += decl.source_bytes();
  // The largest first, while little else is resident: source and copy of a tensor exist together.
  std::vector<std::size_t> order(decls_.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [this](std::size_t a, std::size_t b) {
    return decls_[a].source_bytes() > decls_[b].source_bytes();
  });
  bound_.resize(decls_.size());
  std::uint64_t done = 0;
  for (const std::size_t i : order) {
    const WeightDecl& decl = decls_[i];
    const Entry& entry = entries_[i];
    const std::byte* data = nullptr;
    if (entry.copy_of) {
      data = arena_->address(entries_[*entry.copy_of].offset);
    } else if (!decl.constant.empty()) {
      data = arena_->address(entry.offset);
      repack(decl, entry.layout, reinterpret_cast<const std::byte*>(decl.constant.data()),
             arena_->address(entry.offset));
    } else if (is_stack(decl)) {
      data = arena_->address(entry.offset);
      load_stack(decl, entry, checkpoint, repack);
    } else {
      const TensorInfo& tensor = checkpoint.get(decl.source);
      const TensorView view = checkpoint.view(tensor);
      PIANOLA_CHECK(
          view.dtype == decl.dtype && (decl.slices.empty() ? view.bytes == decl.source_bytes()
                                                           : view.bytes >= decl.source_bytes()),
          "weight {} is not what the model declared", decl.name);
      data = view.data;
      if (!entry.layout.mapped) {
        data = arena_->address(entry.offset);
        if (decl.slices.empty()) {
          repack(decl, entry.layout, view.data, arena_->address(entry.offset));
        } else {
          repack(decl, entry.layout, gather_rows(decl, view.data).data(),
                 arena_->address(entry.offset));
        }
        checkpoint.drop(tensor);
      }
    }
    bound_[i] = {&decl, entry.layout, data};
    done += decl.source_bytes();
    if (progress) progress(done, total, decl.name);
  }
  // The headers, and what the system read around the edges of tensors.
  checkpoint.drop_all();
}

void WeightStore::load_stack(const WeightDecl& decl, const Entry& entry,
                             const Checkpoint& checkpoint, const RepackFunction& repack) const {
  const StackSource& stack = decl.stack;
  const auto view_of = [&](const TensorInfo& tensor, std::size_t bytes) {
    const TensorView view = checkpoint.view(tensor);
    PIANOLA_CHECK(view.bytes == bytes && view.dtype == decl.dtype,
                  "stack {} is not what the model declared", decl.name);
    return view.data;
  };
  const WeightDecl one = one_matrix(decl);
  const auto experts = static_cast<std::size_t>(decl.experts);
  // The rows of one expert in a tensor of all.
  const bool vector = decl.role == WeightRole::kVector;
  const std::int64_t across = vector ? 1 : decl.rows;
  const std::size_t row = row_bytes(
      decl.dtype, static_cast<std::size_t>(stack.columns > 0 ? across * stack.columns : decl.cols));
  const std::int64_t along = stack.columns > 0 ? decl.cols : decl.rows;
  const std::size_t stride =
      row * static_cast<std::size_t>(stack.source_rows > 0 ? stack.source_rows : along);
  const std::size_t first = row * static_cast<std::size_t>(stack.first_row);
  WeightLayout layout = entry.layout;
  layout.bytes /= experts;
  std::vector<std::byte> taken(stack.columns > 0 ? one.source_bytes() : 0);
  for (std::size_t e = 0; e < experts; ++e) {
    const bool apart = !stack.tensors.empty();
    const TensorInfo& tensor = checkpoint.get(apart ? stack.tensors[e] : decl.source);
    const std::byte* source = apart ? view_of(tensor, one.source_bytes())
                                    : view_of(tensor, experts * stride) + e * stride + first;
    if (!taken.empty()) {
      take_columns(decl, source, taken.data());
      source = taken.data();
    }
    repack(one, layout, source, arena_->address(entry.offset) + e * layout.bytes);
    if (apart || e + 1 == experts) checkpoint.drop(tensor);
  }
}

}  // namespace pianola
