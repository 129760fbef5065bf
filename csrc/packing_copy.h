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
  Plan(Plan&&) = default;

  void Add(const py::detail::PyArray_Proxy* array, const Entry& entry, int leaf_dtype);

  int64_t bytes() const { return bytes_; }

  // Has chunks written past the caches: for a device, which reads memory faster than caches.
  void PastCaches() { past_caches_ = true; }

  // All of it, on this thread.
  void RunAll() const;

  // Cuts the copies into chunks, in the order of what they write. How many.
  int64_t Cut();
  void RunChunk(int64_t chunk) const;
  // The destination's bytes in front of this one are written once all earlier chunks have run; of
  // the chunk behind the last one: the destination's size.
  int64_t ChunkBegin(int64_t chunk) const;

 private:
  // A run of both lists, and where in the destination it begins.
  struct Chunk {
    int64_t begin;
    size_t flat, strided;
  };

  static StridedCopy Strided(const py::detail::PyArray_Proxy* array, const Entry& entry,
                             int leaf_dtype, char* dst);

  static void Split(const StridedCopy& copy, std::vector<StridedCopy>* out);

  char* const lo_;
  char* const hi_;
  int64_t bytes_ = 0;
  std::vector<FlatCopy> flat_;
  std::vector<StridedCopy> strided_;
  std::vector<std::unique_ptr<char[]>> temporaries_;
  std::vector<Chunk> chunks_;  // and one behind the last
  bool past_caches_ = false;
};

// Asks for an object's head before it is read: a batch's leaves lie anywhere, and are cold.
inline void PrefetchObject(const PyObject* object) {
  __builtin_prefetch(object, 1);
  __builtin_prefetch(reinterpret_cast<const char*>(object) + 64);
}

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

  // The copies, by as many threads as pay.
  void RunPlan(Plan plan, int max_threads);
  // How many threads pay for that many bytes.
  static int Threads(int64_t bytes, int max_threads);

 private:
  PyObject** items_ = nullptr;
  size_t size_ = 0;
  std::vector<PyObject*> held_;
};

}  // namespace recom::packing
