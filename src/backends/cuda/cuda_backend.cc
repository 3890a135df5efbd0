#include "backends/cuda/cuda_backend.h"

#include <vector>

#include "backends/cuda.h"
#include "backends/cuda/cuda_error.h"
#include "backends/cuda/cuda_program.h"
#include "backends/cuda/kernels/attention_encoder.h"
#include "backends/cuda/kernels/latent.h"
#include "backends/cuda/kernels/packed_weight.h"
#include "backends/cuda/kernels/repack.h"
#include "backends/cuda/kernels/route.h"
#include "backends/cuda/kernels/state.h"
#include "base/check.h"
#include "tensor/quant_format.h"

namespace pianola::cuda {

CudaBackend::CudaBackend(const BackendOptions& options)
    : options_{.eager = options.eager,
               .check_each = options.check_each,
               .dependent_launch = options.dependent_launch,
               .batch_invariant = options.batch_invariant},
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

void CudaBackend::repack(const WeightDecl& decl, const WeightLayout& layout,
                         const std::byte* source, std::byte* destination) {
  if (decl.role == WeightRole::kVector || decl.role == WeightRole::kRouter) {
    std::vector<float> values(layout.bytes / sizeof(float));
    if (decl.role == WeightRole::kVector) {
      read_vector(decl, source, values.data());
    } else {
      dequantize_row(decl.dtype, source, values.data(), values.size());
    }
    device_.write(destination, values.data(), layout.bytes);
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

// The state that an op folds tokens into.
StateId state_of(const Op& op) {
  if (const auto* delta = std::get_if<DeltaRuleOp>(&op)) return delta->state;
  if (const auto* ssm = std::get_if<SsmOp>(&op)) return ssm->state;
  return {};
}

// Forms of an op that have no kernel.
void refuse_missing_forms(const Plan& plan, const PlanTables& tables) {
  const auto refuse = [](const Op& op, const char* what) {
    fail(ErrorCode::kUnsupported,
         "cuda backend: {}: {} has no kernel; the cpu backend has one (--backend cpu)", op_name(op),
         what);
  };
  for (const Op& op : plan.ops) {
    if (const auto* attention = std::get_if<AttentionOp>(&op)) {
      const auto layer = static_cast<std::size_t>(attention->cache.index);
      if (tables.caches.attention[layer].latent && attention->bias) {
        refuse(op, "a relative position bias over latents");
      }
      if (attention->bias && !bias_supported(*attention->bias)) {
        refuse(op,
               "a relative position bias that tells apart more than 1,024 distances, or more "
               "than 64 groups of far ones,");
      }
    } else if (const auto* experts = std::get_if<ExpertsOp>(&op)) {
      if (experts->activation == Activation::kRelu) refuse(op, "relu");
    }
  }
}

}  // namespace

void CudaBackend::check(const Plan& plan, const PlanTables& tables) const {
  if (plan.ops.size() > 1 && std::holds_alternative<RollbackOp>(plan.ops.front()) &&
      !std::holds_alternative<EmbedOp>(plan.ops[1])) {
    fail(ErrorCode::kUnsupported,
         "cuda backend: rollback in front of {} has no kernel (it is part of that of embed)",
         op_name(plan.ops[1]));
  }
  refuse_missing_forms(plan, tables);
  for (const Op& op : plan.ops) {
    if (const auto* conv = std::get_if<ShortConvOp>(&op)) {
      if (conv->activation.value_or(Activation::kSilu) != Activation::kSilu) {
        fail(ErrorCode::kUnsupported,
             "cuda backend: {} of state {}: an activation other than silu has no kernel",
             op_name(op), conv->state.index);
      }
    }
    if (const StateId state = state_of(op); state.valid()) {
      const int dim = tables.caches.states[static_cast<std::size_t>(state.index)].key_dim;
      if (dim > kMaxStateKeyDim) {
        fail(ErrorCode::kUnsupported,
             "cuda backend: {} of state {}: keys of {} elements have no kernel (at most {})",
             op_name(op), state.index, dim, kMaxStateKeyDim);
      }
    }
    const auto* attention = std::get_if<AttentionOp>(&op);
    if (!attention) continue;
    const AttentionSpec& kv =
        tables.caches.attention[static_cast<std::size_t>(attention->cache.index)];
    if (kv.latent) {
      if (latent_supported(kv.key_dim, kv.value_dim)) continue;
      fail(ErrorCode::kUnsupported,
           "cuda backend: latent attention of layer {}: keys of {} elements with a latent of {} "
           "have no kernel (multiples of 8, at most {})",
           attention->cache.index, kv.key_dim, kv.value_dim, kMaxLatentKeyDim);
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
