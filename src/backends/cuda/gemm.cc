#include "backends/cuda/gemm.h"

#include <cublasLt.h>
#include <dlfcn.h>

#include "backends/cuda/cuda_error.h"
#include "base/check.h"
#include "tensor/arena.h"

namespace pianola::cuda {
namespace {

struct Functions {
  decltype(&cublasLtCreate) create;
  decltype(&cublasLtDestroy) destroy;
  decltype(&cublasLtMatmul) matmul;
  decltype(&cublasLtMatmulDescCreate) desc_create;
  decltype(&cublasLtMatmulDescDestroy) desc_destroy;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set;
  decltype(&cublasLtMatrixLayoutCreate) layout_create;
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create;
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic;
};

Functions functions;

template <typename F>
bool find(void* library, const char* name, F& function) {
  function = reinterpret_cast<F>(::dlsym(library, name));
  return function != nullptr;
}

bool find_all(void* library) {
  return find(library, "cublasLtCreate", functions.create) &&
         find(library, "cublasLtDestroy", functions.destroy) &&
         find(library, "cublasLtMatmul", functions.matmul) &&
         find(library, "cublasLtMatmulDescCreate", functions.desc_create) &&
         find(library, "cublasLtMatmulDescDestroy", functions.desc_destroy) &&
         find(library, "cublasLtMatmulDescSetAttribute", functions.desc_set) &&
         find(library, "cublasLtMatrixLayoutCreate", functions.layout_create) &&
         find(library, "cublasLtMatrixLayoutDestroy", functions.layout_destroy) &&
         find(library, "cublasLtMatmulPreferenceCreate", functions.preference_create) &&
         find(library, "cublasLtMatmulPreferenceDestroy", functions.preference_destroy) &&
         find(library, "cublasLtMatmulPreferenceSetAttribute", functions.preference_set) &&
         find(library, "cublasLtMatmulAlgoGetHeuristic", functions.heuristic);
}

void check_blas(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS) {
    fail(ErrorCode::kDevice, "cuda: cuBLASLt: {}: status {}", what, static_cast<int>(status));
  }
}

}  // namespace

GemmLibrary::GemmLibrary() {
  for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so",
                           "/usr/local/cuda/lib64/libcublasLt.so"}) {
    library_ = ::dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library_) break;
  }
  cublasLtHandle_t handle = nullptr;
  if (library_ && find_all(library_) && functions.create(&handle) == CUBLAS_STATUS_SUCCESS) {
    handle_ = handle;
  }
}

GemmLibrary::~GemmLibrary() {
  if (handle_) functions.destroy(static_cast<cublasLtHandle_t>(handle_));
  if (library_) ::dlclose(library_);
}

// Column-major, as the library sees it: Y' [rows, tokens] = W' ^T x', all with their own leading
// dimensions.
struct Gemm::Impl {
  cublasLtHandle_t handle = nullptr;
  cublasLtMatmulDesc_t desc = nullptr;
  cublasLtMatrixLayout_t w = nullptr;
  cublasLtMatrixLayout_t x = nullptr;
  cublasLtMatrixLayout_t y = nullptr;
  cublasLtMatmulAlgo_t algorithm = {};
  int tokens = 0;
  int rows = 0;
  int cols = 0;
  bool residual = false;
  bool bias = false;

  ~Impl() {
    if (y) functions.layout_destroy(y);
    if (x) functions.layout_destroy(x);
    if (w) functions.layout_destroy(w);
    if (desc) functions.desc_destroy(desc);
  }
};

Gemm::Gemm(const GemmLibrary& library, int tokens, int rows, int cols, GemmOut out, bool bias,
           bool residual)
    : impl_(std::make_unique<Impl>()) {
  Impl& g = *impl_;
  g.handle = static_cast<cublasLtHandle_t>(library.handle_);
  g.tokens = tokens;
  g.rows = rows;
  g.cols = cols;
  g.bias = bias;
  g.residual = residual;
  check_blas(functions.desc_create(&g.desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), "descriptor");
  const cublasOperation_t transposed = CUBLAS_OP_T;
  check_blas(
      functions.desc_set(g.desc, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof(transposed)),
      "transposition");
  if (bias) {
    const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    check_blas(
        functions.desc_set(g.desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof(epilogue)),
        "bias");
    const cudaDataType_t type = CUDA_R_32F;
    check_blas(functions.desc_set(g.desc, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &type, sizeof(type)),
               "bias type");
  }
  const auto n = [](int v) { return static_cast<std::uint64_t>(v); };
  check_blas(functions.layout_create(&g.w, CUDA_R_16BF, n(cols), n(rows), cols), "layout");
  check_blas(functions.layout_create(&g.x, CUDA_R_16BF, n(cols), n(tokens), cols), "layout");
  check_blas(functions.layout_create(&g.y, out == GemmOut::kF32 ? CUDA_R_32F : CUDA_R_16BF, n(rows),
                                     n(tokens), rows),
             "layout");
  cublasLtMatmulPreference_t preference = nullptr;
  check_blas(functions.preference_create(&preference), "preference");
  const std::size_t workspace = kGemmWorkspaceBytes;
  functions.preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                           sizeof(workspace));
  // Algorithms may ask for 256 unless told what there is.
  const std::uint32_t alignment = Arena::kAlignment;
  for (const auto matrix :
       {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
    functions.preference_set(preference, matrix, &alignment, sizeof(alignment));
  }
  cublasLtMatmulHeuristicResult_t result = {};
  int found = 0;
  const cublasStatus_t status =
      functions.heuristic(g.handle, g.desc, g.w, g.x, g.y, g.y, preference, 1, &result, &found);
  functions.preference_destroy(preference);
  check_blas(status, "choosing an algorithm");
  if (found == 0) {
    fail(ErrorCode::kDevice, "cuda: cuBLASLt has no algorithm for {} tokens by [{}, {}]", tokens,
         rows, cols);
  }
  g.algorithm = result.algo;
}

Gemm::~Gemm() = default;
Gemm::Gemm(Gemm&&) noexcept = default;
Gemm& Gemm::operator=(Gemm&&) noexcept = default;

void Gemm::run(const void* weight, const void* x, const float* bias, const float* residual, void* y,
               std::byte* workspace, cudaStream_t stream) const {
  const Impl& g = *impl_;
  const float one = 1;
  const float beta = g.residual ? 1.0F : 0.0F;
  if (g.bias) {
    check_blas(functions.desc_set(g.desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof(bias)),
               "bias");
  }
  const cublasStatus_t status = functions.matmul(
      g.handle, g.desc, &one, weight, g.w, x, g.x, &beta, g.residual ? residual : y, g.y, y, g.y,
      &g.algorithm, workspace, kGemmWorkspaceBytes, stream);
  if (status != CUBLAS_STATUS_SUCCESS) {
    fail(ErrorCode::kDevice, "cuda: cuBLASLt: {} tokens by [{}, {}]{}{}: status {}", g.tokens,
         g.rows, g.cols, g.bias ? ", bias" : "", g.residual ? ", residual" : "",
         static_cast<int>(status));
  }
}

}  // namespace pianola::cuda
