// The element loops of the interpreter, as tables of function pointers.
//
// kernels.inc holds the loops once; each kernels_<isa>.cc compiles them for one instruction set and
// fills a table. A null entry means that the operation does not exist for that dtype, and the
// decoder refuses it.

#ifndef RECOM_JAX_CSRC_KERNELS_H_
#define RECOM_JAX_CSRC_KERNELS_H_

#include <cstdint>

#include "program.h"

namespace recom {

// A table and what a lookup index means. All sizes are in elements; `limit` is the number of row
// indexes that are inside the buffer, so an index is safe exactly when (uint64)index < limit.
struct TableRef {
  const void* base;  // already offset
  int64_t row_stride;
  int64_t limit;
  int64_t width;     // D
  const void* fill;  // one element, of the destination's dtype
};

// Arguments of one POOL over positions [0, n) of one bag. `first` starts from `init`, else from
// dst.
struct PoolArgs {
  TableRef table;
  const int64_t* idx;
  const void* weight;  // may be null
  const void* init;    // one element
  int64_t positions;   // of one bag
  int64_t bags;  // bags in this call, dst_pitch elements apart, each with `positions` positions
  int64_t dst_pitch;
  bool first;
};

struct Kernels {
  using Unary = void (*)(void* d, const void* a, int64_t n);
  using Binary = void (*)(void* d, const void* a, const void* b, int64_t n);
  using Select = void (*)(void* d, const uint8_t* p, const void* f, const void* t, int64_t n);
  using Fill = void (*)(void* d, const void* value, int64_t n);
  using Strided = void (*)(void* d, int64_t d_stride, const void* s, int64_t s_stride, int64_t n);
  using Search = void (*)(int32_t* d, const void* x, const void* bounds, int64_t n_bounds, int side,
                          int64_t n);
  using Uniform = void (*)(int32_t* d, const void* x, uint64_t start, uint64_t step,
                           int64_t n_bounds, int side, int64_t n);
  using Index = void (*)(int64_t* d, const void* src, int64_t rows, int64_t n);
  // Returns false if an index was neither inside the table nor -1 or -2.
  using Take = bool (*)(const TableRef& t, const int64_t* idx, void* d, int64_t d_pitch, int64_t n);
  using Pool = bool (*)(const PoolArgs& a, void* d);
  // d[i] = d[i] combined with rows of a: n rows of `width`, in order, into one row.
  using Acc = void (*)(void* d, const void* a, int64_t n, int64_t width);

  Unary unary[12][dtype::k_count];
  Binary binary[19][dtype::k_count];
  Binary binary_imm[19][dtype::k_count];          // b is one element
  Unary convert[dtype::k_count][dtype::k_count];  // [from][to]
  Select select[9];                               // by element size
  Fill fill[9];
  Strided strided[9];
  Search search[3][dtype::k_count];
  Uniform uniform[dtype::k_count];
  Index index[2][dtype::k_count];
  Take take[dtype::k_count][dtype::k_count];     // [table][dst]
  Pool pool[4][dtype::k_count][dtype::k_count];  // [kind][table][dst]
  Acc acc[4][dtype::k_count];
  Unary canonical_zero[dtype::k_count];  // d = a + 0.0
  bool (*any_non_finite[dtype::k_count])(const void* a, int64_t n);
  void (*predicate)(int64_t* d, const int64_t* idx, const uint8_t* mask, int64_t n);
  // Lookups of several columns at once: see kernels_lookup.inc.
  bool (*row_pointers)(const TableRef& t, int64_t row_bytes, const int64_t* idx, const char* fill,
                       const char* zero, const char** out, int64_t n);
  using CopyRows = void (*)(const char* const* rows, int64_t stride, int64_t k, char* d,
                            int64_t pitch, int64_t n);
  CopyRows copy_rows[4];    // rows of 16, 32, 64 and 128 bytes
  CopyRows stream_rows[4];  // likewise, past the caches
  void (*affine)(int64_t* d, int64_t start, int64_t stride, int64_t n);
  // Smallest and largest of n int64 values (n > 0).
  void (*range)(const int64_t* a, int64_t n, int64_t* lo, int64_t* hi);
  const char* name;
};

const Kernels& base_kernels();
const Kernels* avx2_kernels();  // null where this build or machine has no such thing
const Kernels* avx512_kernels();
// The best table for this machine (RECOM_CPU_ISA=base|avx2|avx512 caps it, for tests).
const Kernels& kernels();

}  // namespace recom

#endif  // RECOM_JAX_CSRC_KERNELS_H_
