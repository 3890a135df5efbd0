#include "backends/cpu/isa.h"

#include <array>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace pianola::cpu {
namespace {

constexpr std::array<const char*, 5> kNames = {"portable", "avx2", "avx512", "avx512bf16", "amx"};

#if defined(__x86_64__)
// Linux hands out tile registers only to processes that ask for them (arch_prctl,
// ARCH_REQ_XCOMP_PERM).
bool request_amx() {
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const bool tile = (d >> 24) & 1U;
  const bool int8 = (d >> 25) & 1U;
  const bool bf16 = (d >> 22) & 1U;
  constexpr long kRequestPermission = 0x1023;
  constexpr long kTileData = 18;
  return tile && int8 && bf16 && ::syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

Isa detect() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return Isa::kPortable;
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !((c >> 29) & 1U)) return Isa::kPortable;  // F16C
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl") ||
      !__builtin_cpu_supports("avx512vnni")) {
    return Isa::kAvx2;
  }
  if (!__builtin_cpu_supports("avx512bf16")) return Isa::kAvx512;
  return request_amx() ? Isa::kAmx : Isa::kAvx512Bf16;
}
#else
Isa detect() { return Isa::kPortable; }
#endif

}  // namespace

const char* isa_name(Isa isa) { return kNames[static_cast<std::size_t>(isa)]; }

std::optional<Isa> parse_isa(std::string_view name) {
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    if (name == kNames[i]) return static_cast<Isa>(i);
  }
  return std::nullopt;
}

Isa detect_isa() {
  static const Isa isa = detect();
  return isa;
}

bool isa_supported(Isa isa) { return isa <= detect_isa(); }

std::vector<Isa> supported_isas() {
  std::vector<Isa> isas;
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    if (isa_supported(static_cast<Isa>(i))) isas.push_back(static_cast<Isa>(i));
  }
  return isas;
}

}  // namespace pianola::cpu
