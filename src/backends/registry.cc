#include <fmt/ranges.h>

#include "backends/backend.h"
#include "backends/cpu/cpu_backend.h"
#include "backends/cuda.h"
#include "backends/reference/reference_backend.h"
#include "base/check.h"

namespace pianola {

std::vector<std::string> backend_names() {
  std::vector<std::string> names = {"cpu", "reference"};
  if (cuda::built_in()) names.insert(names.begin(), "cuda");
  return names;
}

std::unique_ptr<Backend> make_backend(std::string_view name, const BackendOptions& options) {
  if (name == "cpu") return std::make_unique<cpu::CpuBackend>(options);
  if (name == "cuda") return cuda::make_cuda_backend(options);
  if (name == "reference") return std::make_unique<reference::ReferenceBackend>(options);
  fail(ErrorCode::kInvalidArgument, "backend '{}' is not known; there are: {}", name,
       fmt::join(backend_names(), ", "));
}

}  // namespace pianola
