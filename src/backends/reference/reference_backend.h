// The reference backend: executes a Plan by the specification in ops.h, one thread, weights
// dequantised to f32 once. For tests and for `pianola score --backend reference`.
#pragma once

#include "backends/backend.h"

namespace pianola::reference {

class ReferenceBackend final : public Backend {
 public:
  explicit ReferenceBackend(const BackendOptions& options);

  const char* name() const override { return "reference"; }
  std::string description() const override;
  std::size_t available_memory() const override;
  std::size_t page_bytes() const override;
  std::unique_ptr<DeviceMemory> allocate(std::size_t bytes, MemoryUse use) override;
  WeightLayout weight_layout(const WeightDecl& decl) const override;
  void repack(const WeightDecl& decl, const WeightLayout& layout, const std::byte* source,
              std::byte* destination) override;
  void check(const Plan& plan, const PlanTables& tables) const override;
  std::size_t scratch_bytes(const Plan& plan, const PlanTables& tables) const override;
  std::unique_ptr<Program> compile(const Plan& plan, const Binding& binding) override;
  void write(void* device, const void* host, std::size_t bytes) override;
  void read(void* host, const void* device, std::size_t bytes) override;
  void copy(void* to, const void* from, std::size_t bytes) override;
};

}  // namespace pianola::reference
