// Brings weights from a checkpoint into the layout that a backend wants, one tensor at a time.
// A backend sees the matrices of a stack one by one, and never has to know how a checkpoint keeps
// them: its packed form is theirs, one behind the other, each aligned as the arena aligns.
//
//   WeightStore store(decls, [&](const WeightDecl& d) { return backend.weight_layout(d); }, arena);
//   arena.seal(memory);
//   store.load(checkpoint, repack, progress);
//   store.bound();        // addresses by WeightId, valid while checkpoint and memory live
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "tensor/arena.h"
#include "tensor/weight_layout.h"
#include "weights/checkpoint.h"

namespace pianola {

using LayoutFunction = std::function<WeightLayout(const WeightDecl&)>;
// (decl, layout, source bytes, destination of layout.bytes)
using RepackFunction =
    std::function<void(const WeightDecl&, const WeightLayout&, const std::byte*, std::byte*)>;
// (source bytes done, source bytes in all, tensor at hand)
using LoadCallback = std::function<void(std::uint64_t, std::uint64_t, std::string_view)>;

class WeightStore {
 public:
  // Asks for every layout and reserves what is not mapped. `decls` outlive the store.
  WeightStore(std::span<const WeightDecl> decls, const LayoutFunction& layout, Arena& arena);

  std::size_t device_bytes() const { return device_bytes_; }  // repacked copies
  std::size_t mapped_bytes() const { return mapped_bytes_; }  // used in place

  // Repacks in the order of the declarations and drops the source pages of each tensor behind it,
  // so that the peak stays near the packed size plus one tensor. `progress` may be empty.
  void load(const Checkpoint& checkpoint, const RepackFunction& repack,
            const LoadCallback& progress);

  std::span<const BoundWeight> bound() const { return bound_; }

 private:
  struct Entry {
    WeightLayout layout;
    std::size_t offset = 0;
    std::optional<std::size_t> copy_of;  // another entry, which holds the bytes
  };
  // The entry whose copy serves weight `i` as well.
  std::optional<std::size_t> find_copy(std::size_t i) const;
  // Repacks the matrices of a stack one after the other. Beside its packed form there is at most
  // one matrix that had to be put together first.
  void load_stack(const WeightDecl& decl, const Entry& entry, const Checkpoint& checkpoint,
                  const RepackFunction& repack) const;

  std::span<const WeightDecl> decls_;
  Arena* arena_;
  std::vector<Entry> entries_;
  std::vector<BoundWeight> bound_;
  std::size_t device_bytes_ = 0;
  std::size_t mapped_bytes_ = 0;
};

}  // namespace pianola
