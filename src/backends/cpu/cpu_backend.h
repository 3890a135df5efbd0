// The CPU backend: packed weights, vector kernels chosen at run time, a pool with a fixed
// partition. Results do not depend on the number of threads, on how a prompt is cut into chunks, or
// on what else is in a batch.
#pragma once

#include "backends/backend.h"
#include "backends/cpu/isa.h"
#include "base/thread_pool.h"

namespace pianola::cpu {

class CpuBackend final : public Backend {
 public:
  // InvalidArgument for an instruction set that is not known; Unsupported for one that this machine
  // does not have.
  explicit CpuBackend(const BackendOptions& options);

  const char* name() const override { return "cpu"; }
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

 private:
  Isa isa_;
  ThreadPool pool_;
};

}  // namespace pianola::cpu
