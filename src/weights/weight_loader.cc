#include "weights/weight_loader.h"

#include <algorithm>
#include <numeric>

namespace pianola {

WeightStore::WeightStore(std::span<const WeightDecl> decls, const LayoutFunction& layout,
                         Arena& arena)
    : decls_(decls), arena_(&arena) {
  for (const WeightDecl& decl : decls) entries_.push_back({layout(decl), 0, {}});
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

}  // namespace pianola
