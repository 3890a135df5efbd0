// The CUDA backend: the step as one graph, or the whole generation as one.
#pragma once

#include <memory>

#include "backends/backend.h"
#include "backends/cuda/device.h"
#include "backends/cuda/step_kernels.h"

namespace pianola::cuda {

class CudaBackend final : public Backend {
 public:
  explicit CudaBackend(const BackendOptions& options);
  ~CudaBackend() override;

  const char* name() const override { return "cuda"; }
  std::string description() const override;
  std::size_t available_memory() const override { return device_.available_memory(); }
  std::size_t page_bytes() const override { return device_.page_bytes(); }
  std::unique_ptr<DeviceMemory> allocate(std::size_t bytes, MemoryUse use) override {
    return device_.allocate(bytes, use);
  }
  WeightLayout weight_layout(const WeightDecl& decl) const override;
  void repack(const WeightDecl& decl, const WeightLayout& layout, const std::byte* source,
              std::byte* destination) override;
  void check(const Plan& plan, const PlanTables& tables) const override;
  std::size_t scratch_bytes(const Plan& plan, const PlanTables& tables) const override;
  std::unique_ptr<Program> compile(const Plan& plan, const Binding& binding) override;
  void write(void* device, const void* host, std::size_t bytes) override {
    device_.write(device, host, bytes);
  }
  void copy(void* to, const void* from, std::size_t bytes) override {
    device_.copy(to, from, bytes);
  }
  void read(void* host, const void* device, std::size_t bytes) override {
    device_.read(host, device, bytes);
  }
  BackendCounters counters() const override { return counters_; }

 private:
  // Device memory for the source of one weight while it is repacked; freed before Programs exist.
  std::byte* staging(std::size_t bytes);
  void free_staging();

  CudaOptions options_;
  Device device_;
  std::unique_ptr<GemmLibrary> gemm_;  // loaded when the first chunk is compiled
  BackendCounters counters_;
  std::byte* staging_ = nullptr;
  std::size_t staging_bytes_ = 0;
};

}  // namespace pianola::cuda
