#include "capability.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#if defined(PAGED_KV_HAS_AVX2) || defined(PAGED_KV_HAS_AVX512)
#include <cpuid.h>
#endif
#ifdef PAGED_KV_HAS_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace paged_kv::cpu {
namespace {

#if defined(PAGED_KV_HAS_AVX2) || defined(PAGED_KV_HAS_AVX512)
bool has_f16c() {  // __builtin_cpu_supports knows it in Clang from 19 on
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
}
#endif

#ifdef PAGED_KV_HAS_AVX2
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c(); }
#endif

#ifdef PAGED_KV_HAS_AVX512
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bf16") && has_f16c();
}
#endif

#ifdef PAGED_KV_HAS_AMX
// The operating system hands the tiles' state to processes that ask, once.
bool has_amx() {
  constexpr unsigned kBFloat16 = 1u << 22, kTiles = 1u << 24;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  unsigned a, b, c, d;
  if (!has_avx512() || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kBFloat16) == 0 || (d & kTiles) == 0)
    return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

struct Candidate {
  const char* name;
  Capability capability;
  bool supported;
};

// Best first. The build defines PAGED_KV_HAS_* for the instruction sets that its compiler knows. AMX was tested with its
// tiles emulated: until it has run on a machine that has them, it is taken only where it is named.
Capability choose() {
  const char* wanted = std::getenv("PAGED_KV_CPU_CAPABILITY");
  const Candidate candidates[] = {
#ifdef PAGED_KV_HAS_AMX
      {"amx", Capability::amx, wanted && std::strcmp(wanted, "amx") == 0 && has_amx()},
#endif
#ifdef PAGED_KV_HAS_AVX512
      {"avx512", Capability::avx512, has_avx512()},
#endif
#ifdef PAGED_KV_HAS_AVX2
      {"avx2", Capability::avx2, has_avx2()},
#endif
      {"generic", Capability::generic, true},
  };
  for (const Candidate& candidate : candidates)
    if (candidate.supported && (!wanted || !*wanted || std::strcmp(wanted, candidate.name) == 0))
      return candidate.capability;
  throw std::invalid_argument(std::string("PAGED_KV_CPU_CAPABILITY must name an instruction set of this machine "
                                          "(generic, avx2, avx512, amx), got ") +
                              wanted);
}

}  // namespace

Capability capability() {
  static const Capability chosen = choose();
  return chosen;
}

}  // namespace paged_kv::cpu
