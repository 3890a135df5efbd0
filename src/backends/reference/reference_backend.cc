#include "backends/reference/reference_backend.h"

#include <algorithm>
#include <cstring>

#include "backends/host_memory.h"
#include "backends/reference/ops.h"
#include "base/check.h"
#include "tensor/quant_format.h"

namespace pianola::reference {
namespace {

class ReferenceProgram final : public Program {
 public:
  ReferenceProgram(const Plan& plan, const Binding& binding) : bound_(plan, binding) {}

  void replay() override { replay_ops(0, bound_.plan().ops.size()); }
  void replay_ops(std::size_t first, std::size_t last) override {
    for (; first < last; ++first) {
      std::visit([this](const auto& o) { run(o, bound_); }, bound_.plan().ops[first]);
    }
  }
  void begin(int max_rounds) override { rounds_.begin(bound_.state(), max_rounds); }
  std::optional<RunResult> wait() override { return rounds_.next(*this, bound_.state()); }
  void stop() override { *bound_.state().yield = 1; }
  std::uint64_t address_certificate() const override { return bound_.address_certificate(); }

 private:
  template <typename O>
  static void run(const O& op, const BoundPlan& bound) {
    reference::run(op, bound);
  }
  BoundPlan bound_;
  HostRounds rounds_;
};

}  // namespace

ReferenceBackend::ReferenceBackend(const BackendOptions&) {}

std::string ReferenceBackend::description() const {
  return "reference: scalar f32, sums in double, 1 thread";
}

std::size_t ReferenceBackend::available_memory() const { return available_host_memory(); }

std::size_t ReferenceBackend::page_bytes() const { return host_page_bytes(); }

std::unique_ptr<DeviceMemory> ReferenceBackend::allocate(std::size_t bytes, MemoryUse use) {
  return allocate_host_memory(bytes, use);
}

WeightLayout ReferenceBackend::weight_layout(const WeightDecl& decl) const {
  if (decl.role == WeightRole::kEmbedding) return {.mapped = true, .bytes = 0, .dtype = decl.dtype};
  const std::size_t bytes = static_cast<std::size_t>(decl.rows * decl.cols) * sizeof(float);
  return {.mapped = false, .bytes = bytes, .dtype = DType::kF32};
}

void ReferenceBackend::repack(const WeightDecl& decl, const WeightLayout&, const std::byte* source,
                              std::byte* destination) {
  if (decl.role == WeightRole::kVector) {
    return read_vector(decl, source, reinterpret_cast<float*>(destination));
  }
  dequantize_row(decl.dtype, source, reinterpret_cast<float*>(destination),
                 static_cast<std::size_t>(decl.rows * decl.cols));
}

void ReferenceBackend::check(const Plan&, const PlanTables&) const {}  // it runs every op

std::size_t ReferenceBackend::scratch_bytes(const Plan& plan, const PlanTables& tables) const {
  std::size_t bytes = 0;
  for (const Op& op : plan.ops) bytes = std::max(bytes, reference::scratch_bytes(op, plan, tables));
  return bytes;
}

std::unique_ptr<Program> ReferenceBackend::compile(const Plan& plan, const Binding& binding) {
  return std::make_unique<ReferenceProgram>(plan, binding);
}

void ReferenceBackend::write(void* device, const void* host, std::size_t bytes) {
  std::memcpy(device, host, bytes);
}

void ReferenceBackend::read(void* host, const void* device, std::size_t bytes) {
  std::memcpy(host, device, bytes);
}

void ReferenceBackend::copy(void* to, const void* from, std::size_t bytes) {
  std::memcpy(to, from, bytes);
}

}  // namespace pianola::reference
