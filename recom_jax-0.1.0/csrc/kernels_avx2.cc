// The element loops compiled for AVX2 (GCC on x86-64 only; others use the baseline).

#include <cstdint>

#include "kernels.h"
#include "program.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)

// From here to the end of the file, and with no standard header below it.
#pragma GCC target("avx2,fma,f16c,bmi,bmi2,lzcnt,popcnt,prfchw")
#define RECOM_IVDEP _Pragma("GCC ivdep")
#define RECOM_HAVE_FMA 1
#define RECOM_VECTOR_BYTES 32

namespace recom {
namespace avx2 {
namespace {
#include "kernels.inc"
#include "kernels_lookup.inc"
#include "kernels_search.inc"
#include "kernels_table.inc"
}  // namespace
}  // namespace avx2

// Compiled for AVX2 itself: only called where kernels_base.cc has seen that the machine has it.
const Kernels* avx2_kernels() {
  static const Kernels table = avx2::make_table("avx2");
  return &table;
}

}  // namespace recom

#else

namespace recom {
const Kernels* avx2_kernels() { return nullptr; }
}  // namespace recom

#endif
