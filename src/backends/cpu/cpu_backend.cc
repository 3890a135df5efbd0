#include "backends/cpu/cpu_backend.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "backends/cpu/cpu_program.h"
#include "backends/cpu/kernels/attention.h"
#include "backends/cpu/kernels/linear.h"
#include "backends/host_memory.h"
#include "base/check.h"
#include "tensor/quant_format.h"

namespace pianola::cpu {
namespace {

Isa choose_isa(const std::string& name) {
  if (name.empty()) return detect_isa();
  const auto isa = parse_isa(name);
  if (!isa) {
    fail(ErrorCode::kInvalidArgument,
         "cpu backend: instruction set '{}' is not known; there are portable, avx2, avx512, "
         "avx512bf16 and amx",
         name);
  }
  if (!isa_supported(*isa)) {
    fail(ErrorCode::kUnsupported, "cpu backend: this machine has no {} (its best is {})", name,
         isa_name(detect_isa()));
  }
  return *isa;
}

int choose_threads(int threads) { return threads > 0 ? threads : usable_cpus(); }

}  // namespace

CpuBackend::CpuBackend(const BackendOptions& options)
    : isa_(choose_isa(options.isa)),
      pool_(choose_threads(options.threads), ThreadPool::Pinning::kOnePerCpu) {}

std::string CpuBackend::description() const {
  return fmt::format("cpu: {}, {} thread{}", isa_name(isa_), pool_.size(),
                     pool_.size() == 1 ? "" : "s");
}

std::size_t CpuBackend::available_memory() const { return available_host_memory(); }

std::size_t CpuBackend::page_bytes() const { return host_page_bytes(); }

std::unique_ptr<DeviceMemory> CpuBackend::allocate(std::size_t bytes, MemoryUse use) {
  return allocate_host_memory(bytes, use);
}

WeightLayout CpuBackend::weight_layout(const WeightDecl& decl) const {
  const int form = unpack_supported(decl.dtype) ? 1 : 0;
  switch (decl.role) {
    case WeightRole::kEmbedding:  // a few rows are read each step: in place, or in the tied head
      return {.mapped = true, .bytes = 0, .dtype = decl.dtype, .form = form};
    case WeightRole::kVector:
      return {.mapped = false,
              .bytes = static_cast<std::size_t>(decl.cols) * sizeof(float),
              .dtype = DType::kF32};
    case WeightRole::kRouter:
      return {.mapped = false,
              .bytes = packed_bytes(DType::kF32, decl.rows, decl.cols),
              .dtype = DType::kF32};
    case WeightRole::kLinear:
      if (!linear_supported(decl.dtype, decl.rows, decl.cols)) {
        fail(ErrorCode::kUnsupported, "cpu backend: weight '{}': {} [{}, {}] has no kernel",
             decl.name, dtype_name(decl.dtype), decl.rows, decl.cols);
      }
      return {.mapped = false,
              .bytes = packed_bytes(decl.dtype, decl.rows, decl.cols),
              .dtype = decl.dtype,
              .form = form};
  }
  fail(ErrorCode::kInternal, "unknown weight role");
}

void CpuBackend::repack(const WeightDecl& decl, const WeightLayout&, const std::byte* source,
                        std::byte* destination) {
  if (decl.role == WeightRole::kVector) {
    return read_vector(decl, source, reinterpret_cast<float*>(destination));
  }
  if (decl.role == WeightRole::kRouter) {
    std::vector<float> values(static_cast<std::size_t>(decl.rows * decl.cols));
    dequantize_row(decl.dtype, source, values.data(), values.size());
    return pack_rows(DType::kF32, values.data(), decl.rows, decl.cols, destination, 0, decl.rows);
  }
  pool_.run([&](int worker, int workers) {
    const RowRange rows = worker_rows(static_cast<int>(decl.rows), worker, workers);
    if (rows.begin < rows.end) {
      pack_rows(decl.dtype, source, decl.rows, decl.cols, destination, rows.begin, rows.end);
    }
  });
}

void CpuBackend::check(const Plan& plan, const PlanTables& tables) const {
  const auto decl = [&tables](WeightId id) -> const WeightDecl& {
    return tables.weights[static_cast<std::size_t>(id.index)];
  };
  for (const Op& op : plan.ops) {
    if (const auto* conv = std::get_if<ShortConvOp>(&op)) {
      const int taps = tables.caches.states[static_cast<std::size_t>(conv->state.index)].conv_taps;
      if (taps > kMaxConvTaps || (conv->activation && *conv->activation != Activation::kSilu)) {
        fail(ErrorCode::kUnsupported,
             "cpu backend: short_conv of state layer {}: {} taps (at most {}), and no activation "
             "or silu",
             conv->state.index, taps, kMaxConvTaps);
      }
    }
    if (const auto* experts = std::get_if<ExpertsOp>(&op)) {
      const WeightDecl& gate = decl(experts->gate);
      const WeightDecl& up = decl(experts->up);
      if (activation_kind(gate.dtype, isa_) != activation_kind(up.dtype, isa_)) {
        fail(ErrorCode::kUnsupported,
             "cpu backend: experts: '{}' in {} and '{}' in {} want activations of two kinds, which "
             "has no kernel",
             gate.name, dtype_name(gate.dtype), up.name, dtype_name(up.dtype));
      }
    }
    const auto* attention = std::get_if<AttentionOp>(&op);
    if (!attention) continue;
    const AttentionSpec& kv =
        tables.caches.attention[static_cast<std::size_t>(attention->cache.index)];
    const bool widths = kv.latent || kv.key_dim == kv.value_dim;
    if (!widths || !attention_supported(tables.cache_shape.type_of(kv), attention->heads,
                                        kv.kv_heads, kv.key_dim, kv.latent ? kv.value_dim : 0)) {
      fail(ErrorCode::kUnsupported,
           "cpu backend: attention of layer {}: {} heads on {} with widths {} and {} in {} has no "
           "kernel (the widths must be equal, a multiple of 8 and at most 512; of a latent cache "
           "multiples of 8 and at most 1024)",
           attention->cache.index, attention->heads, kv.kv_heads, kv.key_dim, kv.value_dim,
           dtype_name(tables.cache_shape.dtype));
    }
  }
}

std::size_t CpuBackend::scratch_bytes(const Plan& plan, const PlanTables& tables) const {
  return plan_cpu_scratch(plan, tables, isa_, pool_.size()).bytes;
}

std::unique_ptr<Program> CpuBackend::compile(const Plan& plan, const Binding& binding) {
  return std::make_unique<CpuProgram>(plan, binding, isa_, pool_);
}

void CpuBackend::write(void* device, const void* host, std::size_t bytes) {
  std::memcpy(device, host, bytes);
}

void CpuBackend::read(void* host, const void* device, std::size_t bytes) {
  std::memcpy(host, device, bytes);
}

void CpuBackend::copy(void* to, const void* from, std::size_t bytes) {
  std::memcpy(to, from, bytes);
}

}  // namespace pianola::cpu
