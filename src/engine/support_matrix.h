// What works with a model and what is refused, asked of the code that would refuse it: for every
// combination an engine is laid out, as loading would, and the error it gives is the reason.
//
//   for (const SupportEntry& entry : support_matrix(*model, options)) {
//     entry.refused.empty() ? "works" : entry.refused;
//   }
#pragma once

#include <string>
#include <vector>

#include "pianola/engine.h"
#include "tensor/dtype.h"

namespace pianola {

// Layer kind, cache type, verb, backend and whether it is captured: one combination.
struct SupportEntry {
  std::string layer;       // "full attention", "sliding window"
  std::string cache_type;  // "f16", "bf16", "f32", "int8", "fp8"
  std::string verb;        // "step", "run", "score", ...
  std::string backend;     // "reference", "cpu", "cuda"
  bool captured = false;
  std::string how;      // who runs the rounds, where it works: "one graph a step"
  std::string refused;  // the reason; empty: it works
};

// Nothing is loaded and no weight is read. Of `options`, what chooses a device counts.
std::vector<SupportEntry> support_matrix(const CausalModel& model, const EngineOptions& options);

struct WeightSupport {
  DType dtype = DType::kF32;
  std::string backend;
  std::string refused;  // the reason; empty: it works
};

// Every type of element that a matrix in a model file can have, on every backend.
std::vector<WeightSupport> weight_support(const EngineOptions& options);

}  // namespace pianola
