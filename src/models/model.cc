#include "models/model.h"

#include <algorithm>
#include <map>
#include <set>

#include "base/check.h"
#include "models/decoder_only.h"
#include "models/encoder.h"
#include "models/family.h"
#include "models/tensor_names.h"

namespace pianola {
namespace {

// What a GGUF file says only by the tensors it has.
void decide_by_tensors(const Checkpoint& checkpoint, ModelConfig& config) {
  const auto has = [&](Part part) {
    return checkpoint.find(tensor_name(checkpoint.format(), part, 0, config.tensor_naming)) !=
           nullptr;
  };
  config.tie_word_embeddings = !has(Part::kHead);
  config.qkv_bias = has(Part::kQBias);
  config.output_bias = has(Part::kOBias);
  config.mlp_bias = has(Part::kGateBias);
  config.has_rope_factors_tensor = has(Part::kRopeFactors);
  const Family* family = find_family_by_architecture(config.model_type);
  if (family && family->finish_gguf_tensors) {
    family->finish_gguf_tensors(has(Part::kGate), has(Part::kHead), config);
  }
}

ModelConfig read_config(const Checkpoint& checkpoint) {
  if (checkpoint.format() == Checkpoint::Format::kGguf) {
    ModelConfig config = parse_gguf_config(checkpoint.metadata());
    if (config.tensors_decide) decide_by_tensors(checkpoint, config);
    return config;
  }
  if (!checkpoint.config()) {
    fail(ErrorCode::kNotFound, "{}: there is no config.json", checkpoint.folder().string());
  }
  ModelConfig config = parse_hf_config(*checkpoint.config());
  if (config.head_by_tensor) {
    config.tie_word_embeddings =
        checkpoint.find(tensor_name(checkpoint.format(), Part::kHead)) == nullptr;
  }
  if (checkpoint.generation_config()) {
    apply_generation_config(*checkpoint.generation_config(), config);
  }
  return config;
}

// A tensor that nothing reads would mean a model that silently differs from its reference.
void refuse_unused_tensors(const Checkpoint& checkpoint, const ModelConfig& config,
                           const ModelTables& tables) {
  std::set<std::string, std::less<>> used;
  for (const WeightDecl& weight : tables.weights) {
    used.insert(weight.source);
    used.insert(weight.stack.tensors.begin(), weight.stack.tensors.end());
  }
  if (config.has_rope_factors_tensor) {
    used.insert(tensor_name(checkpoint.format(), Part::kRopeFactors));
  }
  // With tied embeddings a file may still carry the head; transformers ties it all the same.
  if (config.tie_word_embeddings) used.insert(tensor_name(checkpoint.format(), Part::kHead));
  const auto is_drafts = [&](std::string_view name) {
    const std::int64_t first = config.num_hidden_layers;
    for (std::int64_t i = 0; i < config.num_nextn_predict_layers; ++i) {
      if (is_of_layer(checkpoint.format(), name, first + i)) return true;
    }
    return false;
  };
  for (const TensorInfo& tensor : checkpoint.tensors()) {
    if (!used.contains(tensor.name) && !is_ignored_tensor(tensor.name) && !is_drafts(tensor.name)) {
      fail(
          ErrorCode::kUnsupported,
          "{}: tensor '{}' is not part of a {} model as pianola knows it; running without it would "
          "give wrong results",
          checkpoint.paths()[tensor.file].filename().string(), tensor.name, config.model_type);
    }
  }
}

}  // namespace

std::shared_ptr<const CausalModel> CausalModel::open(const std::filesystem::path& path) {
  return std::make_shared<const CausalModel>(open_checkpoint(path));
}

CausalModel::CausalModel(std::unique_ptr<const Checkpoint> checkpoint)
    : checkpoint_(std::move(checkpoint)), config_(read_config(*checkpoint_)) {
  constexpr int kAnyLength = 1;
  refuse_unused_tensors(*checkpoint_, config_, tables(kAnyLength));
}

std::int64_t CausalModel::parameter_count() const {
  std::int64_t count = 0;
  for (const TensorInfo& tensor : checkpoint_->tensors()) count += tensor.shape.elements();
  return count;
}

std::string CausalModel::weight_types() const {
  std::map<DType, std::uint64_t> bytes;
  for (const TensorInfo& tensor : checkpoint_->tensors()) {
    if (tensor.shape.rank() >= 2) bytes[tensor.dtype] += tensor.bytes;
  }
  std::vector<std::pair<DType, std::uint64_t>> types(bytes.begin(), bytes.end());
  std::stable_sort(types.begin(), types.end(),
                   [](const auto& a, const auto& b) { return a.second > b.second; });
  std::string text;
  for (const auto& [dtype, size] : types) {
    text += fmt::format("{}{}", text.empty() ? "" : " + ", dtype_name(dtype));
  }
  return text;
}

ModelTables CausalModel::tables(int max_seq_len) const {
  return decoder_tables(*checkpoint_, config_, max_seq_len);
}

Plan CausalModel::record(const ModelTables& tables, const StepShape& shape) const {
  if (shape.variant == StepVariant::kEncode) return record_encoder(config_, tables, shape);
  return record_decoder(config_, tables, shape);
}

}  // namespace pianola
