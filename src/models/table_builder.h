// Fills the weight table of a model from a checkpoint's tensors: each is looked up by its part,
// checked for its shape, and declared as the model wants to have it.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "models/model.h"
#include "models/tensor_names.h"

namespace pianola {

// Fills the weight table from a checkpoint's tensors.
class TableBuilder {
 public:
  TableBuilder(const Checkpoint& checkpoint, TensorNaming naming, ModelTables& tables)
      : checkpoint_(checkpoint), naming_(naming), tables_(tables) {}

  void set_layer(std::int64_t layer) { layer_ = layer; }

  WeightId matrix(Part part, std::int64_t rows, std::int64_t cols,
                  WeightRole role = WeightRole::kLinear) {
    return add(part, Shape{rows, cols}, role);
  }
  // A matrix of one row, which GGUF keeps as a vector.
  WeightId row(Part part, std::int64_t cols, WeightRole role) {
    const TensorInfo* tensor = checkpoint_.find(name_of(part));
    const bool flat = tensor && tensor->shape.rank() == 1;
    return add(part, flat ? Shape{cols} : Shape{1, cols}, role);
  }
  WeightId vector(Part part, std::int64_t size) {
    return add(part, Shape{size}, WeightRole::kVector);
  }
  WeightId norm(Part part, std::int64_t size, double offset) {
    const WeightId id = vector(part, size);
    tables_.weights.back().offset = static_cast<float>(offset);
    return id;
  }
  // Logarithms: GGUF holds -e^x of each, Hugging Face files x.
  WeightId log_vector(Part part, std::int64_t size) {
    const WeightId id = vector(part, size);
    tables_.weights.back().negative_exponentials =
        checkpoint_.format() == Checkpoint::Format::kGguf;
    return id;
  }
  // The norm before the head: what it gives is multiplied by `scale`.
  WeightId scaled_norm(Part part, std::int64_t size, double offset, double scale) {
    const WeightId id = norm(part, size, offset);
    tables_.weights.back().scale = static_cast<float>(scale);
    return id;
  }
  // A matrix [rows, cols] whose elements ops look up, as a vector.
  WeightId flat(Part part, std::int64_t rows, std::int64_t cols) {
    const TensorInfo& tensor = checked(part, Shape{rows, cols});
    return push(declare(part, tensor, WeightRole::kVector, 1, rows * cols));
  }
  WeightId vector_if(bool present, Part part, std::int64_t size) {
    return present ? vector(part, size) : WeightId{};
  }
  WeightId constant(std::string name, std::vector<float> values) {
    WeightDecl decl{.name = std::move(name), .role = WeightRole::kVector};
    decl.cols = static_cast<std::int64_t>(values.size());
    decl.constant = std::move(values);
    return push(std::move(decl));
  }
  // Rows taken out of a tensor of another shape, in the order of the slices: a matrix [rows, cols],
  // or elements of a tensor as a vector.
  WeightId sliced_matrix(Part part, Part tensor, const Shape& shape, std::vector<RowSlice> slices) {
    const std::int64_t rows = total(slices);
    WeightDecl decl =
        declare(part, checked(tensor, shape), WeightRole::kLinear, rows, shape.dim(-1));
    decl.slices = std::move(slices);
    return push(std::move(decl));
  }
  WeightId sliced_vector(Part part, const Shape& shape, std::vector<RowSlice> slices) {
    const TensorInfo& info = checked(part, shape);
    require_floats(info);
    WeightDecl decl = declare(part, info, WeightRole::kVector, 1, total(slices));
    decl.slices = std::move(slices);
    return push(std::move(decl));
  }
  bool has(Part part) const { return checkpoint_.find(name_of(part)) != nullptr; }
  // 0 when there is no such tensor.
  int rank(Part part) const {
    const TensorInfo* tensor = checkpoint_.find(name_of(part));
    return tensor ? static_cast<int>(tensor->shape.rank()) : 0;
  }

  // Matrices [rows, cols] of all experts, as GGUF keeps them or as Hugging Face does.
  WeightId stack(ExpertTensors tensors, Part part, std::int64_t experts, std::int64_t rows,
                 std::int64_t cols) {
    if (tensors == ExpertTensors::kStacked) {
      return push_stack(part, checked(part, Shape{experts, rows, cols}), experts, rows, cols);
    }
    StackSource source;
    const TensorInfo* first = nullptr;
    for (std::int64_t e = 0; e < experts; ++e) {
      const std::string name = expert_tensor_name(checkpoint_.format(), part, layer_, e);
      const TensorInfo& tensor = checked(name, Shape{rows, cols});
      if (!first) first = &tensor;
      if (tensor.dtype != first->dtype) {
        fail(ErrorCode::kUnsupported, "tensor '{}': element type {}, that of '{}' is {}",
             tensor.name, dtype_name(tensor.dtype), first->name, dtype_name(first->dtype));
      }
      source.tensors.push_back(tensor.name);
    }
    return push_stack(part, *first, experts, rows, cols, std::move(source));
  }
  // The same from `tensor`, transposed, whose columns it shares with others: [experts, cols,
  // rows * columns].
  WeightId transposed_stack(Part part, Part tensor, std::int64_t experts, std::int64_t rows,
                            std::int64_t cols, std::int32_t columns, std::int32_t first_column) {
    const TensorInfo& info = checked(tensor, Shape{experts, cols, rows * columns});
    require_floats(info);
    return push_stack(part, info, experts, rows, cols,
                      {.columns = columns, .first_column = first_column});
  }
  // Matrices [rows, cols] of all heads from one tensor, which has source.source_rows rows a head:
  // those from source.first_row on, or with one column what they are transposed.
  WeightId head_stack(Part part, Part tensor, std::int64_t heads, std::int64_t rows,
                      std::int64_t cols, StackSource source) {
    const bool transposed = source.columns > 0;
    const TensorInfo& info =
        checked(tensor, Shape{heads * source.source_rows, transposed ? rows : cols});
    if (transposed) require_floats(info);
    return push_stack(part, info, heads, rows, cols, std::move(source));
  }
  // A vector [experts * size] from a tensor [experts, size * columns].
  WeightId expert_vector(Part part, Part tensor, std::int64_t experts, std::int64_t size,
                         std::int32_t columns = 1, std::int32_t first_column = 0) {
    const TensorInfo& info = checked(tensor, Shape{experts, size * columns});
    WeightDecl decl = declare(part, info, WeightRole::kVector, 1, experts * size);
    if (columns != 1) {
      require_floats(info);
      decl.stack = {.columns = columns, .first_column = first_column};
    }
    return push(std::move(decl));
  }

  // The head of a model with tied embeddings: the same tensor in its second role.
  WeightId tied_head(Part embedding, std::int64_t rows, std::int64_t cols) {
    const WeightId id = matrix(embedding, rows, cols);
    tables_.weights.back().name = weight_name(Part::kHead);
    return id;
  }

 private:
  std::string name_of(Part part) const {
    return tensor_name(checkpoint_.format(), part, layer_, naming_);
  }
  static std::int64_t total(const std::vector<RowSlice>& slices) {
    std::int64_t rows = 0;
    for (const RowSlice& slice : slices) rows += slice.count;
    return rows;
  }
  WeightId add(Part part, const Shape& shape, WeightRole role) {
    return push(declare(part, checked(part, shape), role, shape.rank() == 2 ? shape.dim(0) : 1,
                        shape.dim(-1)));
  }
  WeightId push_stack(Part part, const TensorInfo& tensor, std::int64_t experts, std::int64_t rows,
                      std::int64_t cols, StackSource source = {}) {
    WeightDecl decl = declare(part, tensor, WeightRole::kLinear, rows, cols);
    decl.experts = experts;
    decl.stack = std::move(source);
    return push(std::move(decl));
  }
  WeightDecl declare(Part part, const TensorInfo& tensor, WeightRole role, std::int64_t rows,
                     std::int64_t cols) const {
    WeightDecl decl{
        .name = weight_name(part, layer_, naming_), .source = tensor.name, .role = role};
    decl.dtype = tensor.dtype;
    decl.rows = rows;
    decl.cols = cols;
    return decl;
  }
  const TensorInfo& checked(Part part, const Shape& shape) const {
    return checked(name_of(part), shape);
  }
  const TensorInfo& checked(const std::string& name, const Shape& shape) const {
    const TensorInfo& tensor = checkpoint_.get(name);
    if (tensor.shape != shape) {
      fail(ErrorCode::kInvalidModel, "{}: tensor '{}': expected shape {}, found {}",
           checkpoint_.paths()[tensor.file].filename().string(), tensor.name, shape.to_string(),
           tensor.shape.to_string());
    }
    const DTypeInfo& type = dtype_info(tensor.dtype);
    if (tensor.dtype == DType::kI32 || tensor.dtype == DType::kI64 ||
        shape.dim(-1) % type.elements != 0) {
      fail(ErrorCode::kUnsupported, "tensor '{}': element type {} with {} columns", tensor.name,
           type.name, shape.dim(-1));
    }
    return tensor;
  }
  static void require_floats(const TensorInfo& tensor) {
    if (dtype_info(tensor.dtype).elements == 1) return;
    fail(ErrorCode::kUnsupported, "tensor '{}': element type {} cannot be taken apart by columns",
         tensor.name, dtype_name(tensor.dtype));
  }
  WeightId push(WeightDecl decl) {
    tables_.weights.push_back(std::move(decl));
    return {static_cast<std::int32_t>(tables_.weights.size()) - 1};
  }

  const Checkpoint& checkpoint_;
  TensorNaming naming_;
  ModelTables& tables_;
  std::int64_t layer_ = 0;
};

}  // namespace pianola
