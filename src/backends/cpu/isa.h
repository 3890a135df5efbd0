// Which instruction set the CPU kernels use, decided once at run time.
//
//   const Isa isa = detect_isa();                 // the best this machine has
//   if (isa_supported(Isa::kAvx2)) ...            // tests force each tier that the machine has
#pragma once

#include <optional>
#include <string_view>
#include <vector>

namespace pianola::cpu {

// Tiers, each a superset of the one before.
enum class Isa {
  kPortable,    // plain C++, any machine
  kAvx2,        // AVX2, FMA, F16C
  kAvx512,      // AVX-512 F, BW, DQ, VL and VNNI
  kAvx512Bf16,  // and the bfloat16 dot product
  kAmx,         // and tiles with int8 and bfloat16, where the kernel lets this process use them
};

const char* isa_name(Isa isa);
std::optional<Isa> parse_isa(std::string_view name);
bool isa_supported(Isa isa);
Isa detect_isa();
std::vector<Isa> supported_isas();

}  // namespace pianola::cpu
