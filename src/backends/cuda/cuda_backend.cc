#include "backends/cuda/cuda_backend.h"

#include <vector>

#include "backends/cuda.h"
#include "backends/cuda/cuda_error.h"
#include "backends/cuda/cuda_program.h"
#include "backends/cuda/kernels/attention.h"
#include "backends/cuda/kernels/packed_weight.h"
#include "backends/cuda/kernels/repack.h"
#include "backends/cuda/kernels/route.h"
#include "base/check.h"
#include "tensor/quant_format.h"

namespace pianola::cuda {

CudaBackend::CudaBackend(const BackendOptions& options)
    : options_{.eager = options.eager,
               .check_each = options.check_each,
               .dependent_launch = options.dependent_launch,
               .batch_invariant = options.batch_invariant,
               .persistent = options.persistent},
      device_(options.device) {}

CudaBackend::~CudaBackend() { free_staging(); }

std::string CudaBackend::description() const {
  std::string text = "cuda: " + device_.name();
  text += options_.eager ? ", op by op" : ", captured";
  if (!options_.dependent_launch) text += ", no dependent launch";
  if (options_.batch_invariant) text += ", batch-invariant";
  if (gemm_ && !gemm_->loaded()) {
    text += ", cuBLASLt not found: prompts run in the order of decoding, slower";
  }
  return text;
}

WeightLayout CudaBackend::weight_layout(const WeightDecl& decl) const {
  if (decl.role == WeightRole::kVector) {
    return {.mapped = false,
            .bytes = static_cast<std::size_t>(decl.cols) * sizeof(float),
            .dtype = DType::kF32};
  }
  if (decl.role == WeightRole::kRouter) {
    if (decl.cols % 4 != 0 || decl.rows > kMostExperts) {
      fail(ErrorCode::kUnsupported,
           "cuda backend: weight '{}': a router [{}, {}] has no kernel (a width that is a multiple "
           "of 4, at most {} experts)",
           decl.name, decl.rows, decl.cols, kMostExperts);
    }
    return {.mapped = false,
            .bytes = static_cast<std::size_t>(decl.rows * decl.cols) * sizeof(float),
            .dtype = DType::kF32};
  }
  Codes codes = {};
  Scales scales = {};
  if (!packed_form(decl.dtype, codes, scales) || decl.cols % 8 != 0) {
    fail(ErrorCode::kUnsupported, "cuda backend: weight '{}': {} [{}, {}] has no kernel", decl.name,
         dtype_name(decl.dtype), decl.rows, decl.cols);
  }
  return {.mapped = false,
          .bytes =
              packed_bytes(codes, scales, static_cast<int>(decl.rows), static_cast<int>(decl.cols)),
          .dtype = decl.dtype,
          .form = 1};
}

std::byte* CudaBackend::staging(std::size_t bytes) {
  if (bytes > staging_bytes_) {
    free_staging();
    void* data = nullptr;
    cuda::check(cudaMalloc(&data, bytes), "staging for a weight");
    staging_ = static_cast<std::byte*>(data);
    staging_bytes_ = bytes;
  }
  return staging_;
}

void CudaBackend::free_staging() {
  cudaFree(staging_);
  staging_ = nullptr;
  staging_bytes_ = 0;
}

void CudaBackend::repack(const WeightDecl& decl, const WeightLayout&, const std::byte* source,
                         std::byte* destination) {
  if (decl.role == WeightRole::kVector) {
    std::vector<float> values(static_cast<std::size_t>(decl.cols));
    read_vector(decl, source, values.data());
    device_.write(destination, values.data(), values.size() * sizeof(float));
    device_.synchronize();
    return;
  }
  if (decl.role == WeightRole::kRouter) {
    std::vector<float> values(static_cast<std::size_t>(decl.rows * decl.cols));
    dequantize_row(decl.dtype, source, values.data(), values.size());
    device_.write(destination, values.data(), values.size() * sizeof(float));
    device_.synchronize();
    return;
  }
  Codes codes = {};
  Scales scales = {};
  packed_form(decl.dtype, codes, scales);
  if (scales == Scales::kNone) {
    device_.write(destination, source, decl.source_bytes());
    device_.synchronize();
    return;
  }
  std::byte* raw = staging(decl.source_bytes());
  device_.write(raw, source, decl.source_bytes());
  cuda::repack(decl.dtype, static_cast<int>(decl.rows), static_cast<int>(decl.cols), raw,
               destination, {.stream = device_.stream(), .sms = device_.multiprocessors()});
  device_.synchronize();
}

namespace {

// What the op set has and no kernel of this backend computes; null when there is nothing.
const char* missing_kernel(const Op& op) {
  if (const auto* embed = std::get_if<EmbedOp>(&op)) {
    return embed->scale != 1 ? "an embedding that is scaled" : nullptr;
  }
  if (const auto* norm = std::get_if<NormOp>(&op)) {
    return norm->residual.valid() ? "a norm before the residual" : nullptr;
  }
  if (const auto* linear = std::get_if<LinearOp>(&op)) {
    return linear->norm ? "a norm before a single matrix" : nullptr;
  }
  if (std::holds_alternative<ShortConvOp>(op) || std::holds_alternative<DeltaRuleOp>(op) ||
      std::holds_alternative<SsmOp>(op)) {
    return "a state layer";
  }
  if (std::holds_alternative<GateOp>(op) || std::holds_alternative<GatedNormOp>(op)) {
    return "a gate";
  }
  if (const auto* mlp = std::get_if<GatedMlpOp>(&op)) {
    if (mlp->activation != Activation::kSilu) return "an activation other than silu";
    return mlp->residual.valid() ? nullptr : "an MLP without a residual";
  }
  if (const auto* attention = std::get_if<AttentionOp>(&op)) {
    return attention->sinks.valid() ? "an attention sink" : nullptr;
  }
  return nullptr;
}

// The weight of an op by which a person finds its layer: " 'layers.3.router'".
std::string weight_of(const Op& op, const PlanTables& tables) {
  WeightId id;
  if (const auto* attention = std::get_if<AttentionOp>(&op)) id = attention->sinks;
  if (!id.valid()) return "";
  return fmt::format(" '{}'", tables.weights[static_cast<std::size_t>(id.index)].name);
}

}  // namespace

void CudaBackend::check(const Plan& plan, const PlanTables& tables) const {
  for (const Op& op : plan.ops) {
    if (const char* missing = missing_kernel(op)) {
      fail(ErrorCode::kUnsupported, "cuda backend: {}{}: {} has no kernel", op_name(op),
           weight_of(op, tables), missing);
    }
    if (const auto* qkv = std::get_if<QkvOp>(&op)) {
      const WeightId rope = qkv->rope.inverse_frequencies;
      const std::int64_t turned = 2 * tables.weights[static_cast<std::size_t>(rope.index)].cols;
      const int dim = tables.caches.attention[static_cast<std::size_t>(qkv->cache.index)].key_dim;
      if (turned != dim) {
        fail(ErrorCode::kUnsupported,
             "cuda backend: qkv of layer cache {}: a rope that turns {} of {} elements of a head "
             "has no kernel",
             qkv->cache.index, turned, dim);
      }
    }
    const auto* attention = std::get_if<AttentionOp>(&op);
    if (!attention) continue;
    const DType dtype = tables.cache_shape.dtype;
    if (dtype != DType::kF32 && dtype != DType::kF16 && dtype != DType::kBF16) {
      fail(ErrorCode::kUnsupported,
           "cuda backend: attention of layer {}: a cache of {} has no kernel; choose cache_type "
           "f16, bf16 or f32",
           attention->cache.index, dtype_name(dtype));
    }
    const AttentionSpec& kv =
        tables.caches.attention[static_cast<std::size_t>(attention->cache.index)];
    if (kv.window > 0) {
      fail(ErrorCode::kUnsupported,
           "cuda backend: attention of layer {}: a sliding window of {} tokens that rows outgrow "
           "has "
           "no kernel; choose max_seq_len at most {}",
           attention->cache.index, kv.window, kv.window);
    }
    if (!attention_supported(attention->heads, kv.kv_heads, kv.key_dim, kv.value_dim)) {
      fail(
          ErrorCode::kUnsupported,
          "cuda backend: attention of layer {}: {} heads on {} with widths {} and {} has no kernel "
          "(widths must be multiples of 8 and at most 256)",
          attention->cache.index, attention->heads, kv.kv_heads, kv.key_dim, kv.value_dim);
    }
  }
}

std::size_t CudaBackend::scratch_bytes(const Plan& plan, const PlanTables& tables) const {
  return plan_scratch(plan, tables, options_).bytes;
}

std::unique_ptr<Program> CudaBackend::compile(const Plan& plan, const Binding& binding) {
  free_staging();
  if (step_class(plan, options_) == StepClass::kChunk && !gemm_) {
    gemm_ = std::make_unique<GemmLibrary>();
  }
  const GemmLibrary* library = gemm_ && gemm_->loaded() ? gemm_.get() : nullptr;
  return std::make_unique<CudaProgram>(plan, binding, options_, library, device_, counters_);
}

bool built_in() { return true; }

std::unique_ptr<Backend> make_cuda_backend(const BackendOptions& options) {
  return std::make_unique<CudaBackend>(options);
}

}  // namespace pianola::cuda
