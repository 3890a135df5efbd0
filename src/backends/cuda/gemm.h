// Matrix products of prompt chunks by cuBLASLt, which is loaded when the first of them is compiled.
// Algorithms are chosen at compile time and the workspace is given, so that a product can be
// captured and does the same in every replay.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <memory>

namespace pianola::cuda {

inline constexpr std::size_t kGemmWorkspaceBytes = std::size_t{32} << 20;
inline constexpr std::size_t kGemmWorkspaceAlignment = 256;

enum class GemmOut { kF32, kBF16 };

class Gemm;

// The library; null (with the reason) when it cannot be loaded.
class GemmLibrary {
 public:
  GemmLibrary();
  ~GemmLibrary();
  GemmLibrary(const GemmLibrary&) = delete;
  GemmLibrary& operator=(const GemmLibrary&) = delete;

  bool loaded() const { return handle_ != nullptr; }

 private:
  friend class Gemm;
  void* library_ = nullptr;
  void* handle_ = nullptr;  // cublasLtHandle_t
};

// y[t] = W x[t] (+ bias) (+ residual[t]) with x [tokens, cols] and W [rows, cols] in bfloat16, sums
// in f32.
class Gemm {
 public:
  // Throws Device when no algorithm does it.
  Gemm(const GemmLibrary& library, int tokens, int rows, int cols, GemmOut out, bool bias,
       bool residual);
  ~Gemm();
  Gemm(Gemm&&) noexcept;
  Gemm& operator=(Gemm&&) noexcept;

  // `y` [tokens, rows] of the form chosen; `residual` f32, may be y; `workspace`
  // kGemmWorkspaceBytes.
  void run(const void* weight, const void* x, const float* bias, const float* residual, void* y,
           std::byte* workspace, cudaStream_t stream) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace pianola::cuda
