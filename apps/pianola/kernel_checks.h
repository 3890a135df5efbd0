// Self-test of the CPU kernels on this machine: every instruction set it has, every kernel, against
// plain loops in double precision.
//
//   for (const KernelCheck& check : check_kernels()) if (!check.passed()) ...;
#pragma once

#include <string>
#include <vector>

namespace pianola::cli {

struct KernelCheck {
  std::string kernel;  // "linear q4_1", "attention f16", "rms_norm"
  std::string isa;
  // The largest error, as a multiple of what rounding explains: inputs rounded as the kernel is
  // said to round them, and sums in single precision. NaN when a result was no number.
  double error = 0;
  bool passed() const { return error <= 1; }  // false for NaN
};

// Throws Interrupted after Ctrl-C.
std::vector<KernelCheck> check_kernels();

}  // namespace pianola::cli
