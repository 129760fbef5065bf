// The element loops for the baseline instruction set, and the choice between sets.

#include <cstdlib>
#include <cstring>

#include "kernels.h"
#include "program.h"

#if defined(__clang__)
#define RECOM_IVDEP _Pragma("clang loop vectorize(assume_safety)")
#else
#define RECOM_IVDEP _Pragma("GCC ivdep")
#endif
#define RECOM_HAVE_FMA 0
#define RECOM_VECTOR_BYTES 16

namespace recom {
namespace base {
namespace {
#include "kernels.inc"
#include "kernels_lookup.inc"
#include "kernels_search.inc"
#include "kernels_table.inc"
}  // namespace
}  // namespace base

const Kernels& base_kernels() {
  static const Kernels table = base::make_table("base");
  return table;
}

#if defined(__x86_64__)
static bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
         __builtin_cpu_supports("popcnt");
}
static bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512cd");
}
#else
static bool has_avx2() { return false; }
static bool has_avx512() { return false; }
#endif

const Kernels& kernels() {
  static const Kernels& best = []() -> const Kernels& {
    const char* cap = std::getenv("RECOM_CPU_ISA");
    const bool base_only = cap && !std::strcmp(cap, "base");
    const bool no_512 = base_only || (cap && !std::strcmp(cap, "avx2"));
    const Kernels* k = nullptr;
    if (!no_512 && has_avx512()) k = avx512_kernels();
    if (!k && !base_only && has_avx2()) k = avx2_kernels();
    return k ? *k : base_kernels();
  }();
  return best;
}

}  // namespace recom
