#include "weights/weight_loader.h"

#include <algorithm>
#include <numeric>

namespace pianola {

WeightStore::WeightStore(std::span<const WeightDecl> decls, const LayoutFunction& layout,
                         Arena& arena)
    : decls_(decls), arena_(&arena) {
  for (const WeightDecl& decl : decls) {
    Entry entry{layout(decl), 0};
    PIANOLA_CHECK(!entry.layout.mapped || decl.constant.empty(), "constant {} cannot be mapped",
                  decl.name);
    if (entry.layout.mapped) {
      mapped_bytes_ += decl.source_bytes();
    } else if (const auto other = find_equal(decl, entry.layout)) {
      entry.offset = entries_[*other].offset;
      entry.copy_of = other;
    } else {
      entry.offset = arena.reserve(entry.layout.bytes);
      device_bytes_ += entry.layout.bytes;
    }
    entries_.push_back(entry);
  }
}

std::optional<std::size_t> WeightStore::find_equal(const WeightDecl& decl,
                                                   const WeightLayout& layout) const {
  if (layout.form == 0 || decl.source.empty()) return std::nullopt;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    if (decls_[i].source == decl.source && entries_[i].layout.form == layout.form &&
        entries_[i].layout.bytes == layout.bytes) {
      return i;
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
      data = arena_->address(entry.offset);
    } else if (!decl.constant.empty()) {
      data = arena_->address(entry.offset);
      repack(decl, entry.layout, reinterpret_cast<const std::byte*>(decl.constant.data()),
             arena_->address(entry.offset));
    } else {
      const TensorInfo& tensor = checkpoint.get(decl.source);
      const TensorView view = checkpoint.view(tensor);
      PIANOLA_CHECK(view.bytes == decl.source_bytes() && view.dtype == decl.dtype,
                    "weight {} is not what the model declared", decl.name);
      data = view.data;
      if (!entry.layout.mapped) {
        data = arena_->address(entry.offset);
        repack(decl, entry.layout, view.data, arena_->address(entry.offset));
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
