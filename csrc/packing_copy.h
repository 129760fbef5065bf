// Part of packing.h: how leaves are checked against a layout and copied into a pack.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "packing_layout.h"

namespace recom::packing {

struct FlatCopy {
  const char* src;
  char* dst;
  int64_t nbytes;
};

// kLow32: int64 -> int32, uint64 -> uint32 (both wrap).
enum class Kind : uint8_t { kSame, kLow32, kF64ToF32 };

struct StridedCopy {
  const char* src;
  char* dst;
  Kind kind;
  int src_size, dst_size;
  int rank;
  int64_t dims[kPackMaxRank];
  int64_t strides[kPackMaxRank];  // of src, in bytes; dst is row-major

  int64_t nbytes() const {  // of dst
    int64_t n = dst_size;
    for (int i = 0; i < rank; ++i) n *= dims[i];
    return n;
  }
};

// What has to be copied for one pack. Built with the GIL held, run with or without it.
class Plan {
 public:
  // [lo, hi): the destination; leaves already there are left alone.
  Plan(const Layout& layout, char* lo, char* hi) : lo_(lo), hi_(hi) {
    flat_.reserve(layout.entries.size());
  }

  void Add(const py::detail::PyArray_Proxy* array, const Entry& entry, int leaf_dtype);

  int64_t bytes() const { return bytes_; }

  void Execute(int max_threads) const;

 private:
  static StridedCopy Strided(const py::detail::PyArray_Proxy* array, const Entry& entry,
                             int leaf_dtype, char* dst);

  static void Split(const StridedCopy& copy, std::vector<StridedCopy>* out);

  char* const lo_;
  char* const hi_;
  int64_t bytes_ = 0;
  std::vector<FlatCopy> flat_;
  std::vector<StridedCopy> strided_;
  std::vector<std::unique_ptr<char[]>> temporaries_;
};

// Leaves checked against a layout, through numpy's C structs alone: no Python attribute is read.
class Checker {
 public:
  explicit Checker(bool narrow)
      : array_type_(npy_api::get().PyArray_Type_), bf16_type_num_(Bf16TypeNum()), narrow_(narrow) {}

  // `leaf`'s struct and dtype if it is exactly a numpy.ndarray of native byte order, otherwise
  // null.
  const py::detail::PyArray_Proxy* Array(PyObject* leaf, int* dtype) const;

  // The index of the first leaf that doesn't fit its entry, or -1; `plan`, if any, gets the copies.
  int64_t Check(const Layout& layout, PyObject* const* leaves, Plan* plan) const;

 private:
  bool Converts(int from, int to) const;

  PyTypeObject* const array_type_;
  const int bf16_type_num_;
  const bool narrow_;
};

// The items of a list or tuple, each kept alive while the GIL is released.
class Leaves {
 public:
  Leaves(const py::object& sequence, size_t want, const char* what);
  Leaves(const Leaves&) = delete;
  ~Leaves() {
    for (PyObject* item : held_) Py_DECREF(item);
  }

  PyObject* const* items() const { return items_; }

  void RunPlan(const Plan& plan, int max_threads);

 private:
  PyObject** items_ = nullptr;
  size_t size_ = 0;
  std::vector<PyObject*> held_;
};

}  // namespace recom::packing
