// The element loops compiled for AVX-512 (GCC on x86-64 only; others use the baseline).

#include <cstdint>

#include "kernels.h"
#include "program.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)

// Each intrinsic says itself what it needs.
#include <immintrin.h>

// From here to the end of the file, and with no standard header below it.
#pragma GCC target( \
    "avx512f,avx512bw,avx512dq,avx512vl,avx512cd,avx2,fma,f16c,bmi,bmi2,lzcnt,popcnt,prfchw,prefer-vector-width=512")
#define RECOM_IVDEP _Pragma("GCC ivdep")
#define RECOM_HAVE_FMA 1
#define RECOM_VECTOR_BYTES 64

namespace recom {
namespace avx512 {
namespace {
#include "kernels.inc"
#include "kernels_lookup.inc"
#include "kernels_search.inc"
#include "kernels_table.inc"
}  // namespace
}  // namespace avx512

// Compiled for AVX-512 itself: only called where kernels_base.cc has seen that the machine has it.
const Kernels* avx512_kernels() {
  static const Kernels table = avx512::make_table("avx512");
  return &table;
}

}  // namespace recom

#else

namespace recom {
const Kernels* avx512_kernels() { return nullptr; }
}  // namespace recom

#endif
