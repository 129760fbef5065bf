// Part of packing.h: what a pack looks like, and numpy's dtypes under program.h's numbers.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "packing.h"
#include "program.h"

namespace recom::packing {

namespace py = pybind11;
using py::detail::npy_api;

constexpr int64_t kPage = 4096;

inline int64_t RoundUp(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// program.h's numbers, under the names used here.
enum Dtype : int {
  kNoDtype = -1,
  kPred = recom::dtype::k_PRED,
  kS8 = recom::dtype::k_S8,
  kS16 = recom::dtype::k_S16,
  kS32 = recom::dtype::k_S32,
  kS64 = recom::dtype::k_S64,
  kU8 = recom::dtype::k_U8,
  kU16 = recom::dtype::k_U16,
  kU32 = recom::dtype::k_U32,
  kU64 = recom::dtype::k_U64,
  kF16 = recom::dtype::k_F16,
  kF32 = recom::dtype::k_F32,
  kF64 = recom::dtype::k_F64,
  kBF16 = recom::dtype::k_BF16,
};

// Bytes of an element; 0 for a number that isn't a dtype that packs.
int ItemSize(int dtype);
// numpy's number of ml_dtypes.bfloat16, assigned when ml_dtypes registers it; -1 without it.
int Bf16TypeNum();
// numpy's number of a dtype.
int TypeNumOf(int dtype);

// The dtype of numpy's number. Here, as checking a batch asks for each leaf.
inline int DtypeOf(int type_num, int bf16_type_num) {
  switch (type_num) {
    case npy_api::NPY_BOOL_:
      return kPred;
    case npy_api::NPY_BYTE_:
      return kS8;
    case npy_api::NPY_UBYTE_:
      return kU8;
    case npy_api::NPY_SHORT_:
      return kS16;
    case npy_api::NPY_USHORT_:
      return kU16;
    case npy_api::NPY_INT_:
      return kS32;
    case npy_api::NPY_UINT_:
      return kU32;
    case npy_api::NPY_LONG_:
      return sizeof(long) == 8 ? kS64 : kS32;
    case npy_api::NPY_ULONG_:
      return sizeof(long) == 8 ? kU64 : kU32;
    case npy_api::NPY_LONGLONG_:
      return kS64;
    case npy_api::NPY_ULONGLONG_:
      return kU64;
    case npy_api::NPY_FLOAT_:
      return kF32;
    case npy_api::NPY_DOUBLE_:
      return kF64;
    case 23 /* NPY_HALF */:
      return kF16;
    default:
      return bf16_type_num >= 0 && type_num == bf16_type_num ? kBF16 : kNoDtype;
  }
}

inline bool NativeOrder(char order) {
  const uint16_t one = 1;
  const bool little = *reinterpret_cast<const char*>(&one) == 1;
  return order == '=' || order == '|' || order == (little ? '<' : '>');
}

struct Entry {
  int dtype = kNoDtype;
  int rank = 0;
  int64_t dims[kPackMaxRank] = {};
  int64_t offset = 0;
  int64_t nbytes = 0;
};

struct Layout {
  std::vector<Entry> entries;
  int64_t header_bytes = 0;
  int64_t total_bytes = 0;
  size_t hash = 0;

  void Append(int dtype, int rank, const int64_t* dims);
  void Finish();  // after the last entry: where each one lies
  void WriteHeader(char* to) const;
  const Entry& At(int64_t i) const;  // raises IndexError
  bool operator==(const Layout& other) const;
};

// specs: (dtype or its number, shape) pairs.
std::shared_ptr<Layout> MakeLayout(const py::iterable& specs);
py::tuple ShapeOf(const Entry& entry);

}  // namespace recom::packing
