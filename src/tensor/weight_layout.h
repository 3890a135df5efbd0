// What a model asks to be loaded, and how a backend wants to have it.
//
// A model declares its weights as WeightDecls; a backend answers with a WeightLayout for each; the
// loader brings the bytes from the checkpoint into that layout, one tensor at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "tensor/dtype.h"

namespace pianola {

enum class WeightRole : std::uint8_t {
  kLinear,     // [rows, cols]: y = W x; a stack has `experts` of them
  kRouter,     // [rows, cols]: y = W x in f32, whatever the checkpoint holds
  kEmbedding,  // [rows, cols]: rows are looked up
  kVector,     // [cols]: norms, biases, constants; always f32 for the ops
};

const char* weight_role_name(WeightRole role);

// Rows of a weight that lie scattered in the checkpoint's tensor: row i is source row
// begin + i / group * stride + i % group. Of a vector, a row is one element.
struct RowSlice {
  std::int64_t begin = 0;
  std::int64_t group = 1;   // neighbours
  std::int64_t stride = 1;  // from the first of a group to the first of the next
  std::int64_t count = 0;   // rows taken

  std::int64_t source_row(std::int64_t i) const { return begin + i / group * stride + i % group; }
};

// How a stack of matrices lies in a checkpoint when it is not [experts, rows, cols] in one tensor.
struct StackSource {
  // One tensor [rows, cols] for each expert, in order; `source` of the weight is the first.
  std::vector<std::string> tensors;
  // Not 0: one tensor [experts, cols, rows * columns], transposed, whose column r * columns +
  // first_column is row r: matrices that share a tensor take turns. A vector's element i is element
  // i * columns + first_column of the tensor. Only element types that are no blocks.
  std::int32_t columns = 0;
  std::int32_t first_column = 0;
  // Not 0: the tensor has so many rows an expert, of which those from first_row on are meant.
  std::int64_t source_rows = 0;
  std::int64_t first_row = 0;

  bool operator==(const StackSource&) const = default;
};

struct WeightDecl {
  std::string name;    // pianola's own: "layers.3.q_proj", "embed_tokens", "lm_head"
  std::string source;  // name in the checkpoint; empty for a constant
  WeightRole role = WeightRole::kLinear;
  DType dtype = DType::kF32;  // in the checkpoint
  std::int64_t rows = 1;
  std::int64_t cols = 0;
  std::int64_t experts = 1;  // not 1: a stack of matrices, packed one behind the other
  StackSource stack;
  std::vector<RowSlice> slices;  // what is taken, in this order; empty: all of the tensor
  std::vector<float> constant;   // [cols]: computed by the model instead of read (rope frequencies)
  float offset = 0;              // of a vector: added to each element that is read (norms by 1 + w)
  float scale = 1;               // and what the sum is multiplied by
  bool negative_exponentials = false;  // of a vector: it is x where the checkpoint has -e^x

  // Of all matrices, without what else a tensor that they share holds.
  std::size_t source_bytes() const {
    return static_cast<std::size_t>(experts * rows) * row_bytes(dtype, cols);
  }
};

// The bytes that `slices` take of a tensor, in order.
std::vector<std::byte> gather_rows(const WeightDecl& decl, const std::byte* source);

// One matrix of a stack as a weight of its own: what a backend is asked to lay out and to repack.
WeightDecl one_matrix(const WeightDecl& stack);

// A vector's [cols] values from its bytes in the checkpoint, unaligned. Throws InvalidModel when
// one that should be -e^x is not.
void read_vector(const WeightDecl& decl, const std::byte* source, float* values);

// Where the bytes of a weight are when the model runs.
struct WeightLayout {
  // True: used in place, from the mapped file. False: `bytes` of device memory, filled by the
  // backend's repacker.
  bool mapped = false;
  std::size_t bytes = 0;      // device memory; 0 when mapped
  DType dtype = DType::kF32;  // of the stored form; packing is the backend's own
  // Not 0: weights with the same source and form share one copy (a tied head). One that would be
  // mapped is read from the copy that another of its form needs, and has that one's layout.
  int form = 0;
};

// A weight with its final address.
struct BoundWeight {
  const WeightDecl* decl = nullptr;
  WeightLayout layout;
  const std::byte* data = nullptr;

  const float* f32() const { return reinterpret_cast<const float*>(data); }
  // The packed matrix of one expert.
  const std::byte* matrix(std::int64_t expert) const {
    return data + static_cast<std::size_t>(expert) *
                      (layout.bytes / static_cast<std::size_t>(decl->experts));
  }
};

}  // namespace pianola
