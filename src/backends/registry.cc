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

namespace {

// Options that would change nothing.
void refuse_without_effect(std::string_view name, const BackendOptions& options) {
  const auto refuse = [name](const char* option, const char* why) {
    fail(ErrorCode::kInvalidArgument, "backend '{}': {} has no effect: {}", name, option, why);
  };
  if (name != "cuda") {
    constexpr const char* kWhy = "it is an option of the cuda backend; leave it out";
    if (options.eager) refuse("eager", kWhy);
    if (options.check_each) refuse("check_each", kWhy);
    if (!options.dependent_launch) refuse("no dependent_launch", kWhy);
  } else if (options.check_each && !options.eager) {
    refuse("check_each without eager", "a captured step is launched as a whole; set eager as well");
  }
}

}  // namespace

std::unique_ptr<Backend> make_backend(std::string_view name, const BackendOptions& options) {
  if (name != "cpu" && name != "cuda" && name != "reference") {
    fail(ErrorCode::kInvalidArgument, "backend '{}' is not known; there are: {}", name,
         fmt::join(backend_names(), ", "));
  }
  refuse_without_effect(name, options);
  if (name == "cpu") return std::make_unique<cpu::CpuBackend>(options);
  if (name == "cuda") return cuda::make_cuda_backend(options);
  return std::make_unique<reference::ReferenceBackend>(options);
}

}  // namespace pianola
