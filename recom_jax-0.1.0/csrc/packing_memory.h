// Part of packing.h: the memory of rings and arenas, and arrays over it.
#pragma once

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>
#include <vector>

#include "packing_layout.h"

namespace recom::packing {

constexpr int64_t kHugePage = int64_t{2} << 20;

// Bytes of all memory that is alive.
inline std::atomic<int64_t> live_bytes{0};

class Memory {
 public:
  explicit Memory(int64_t nbytes) : nbytes_(std::max(RoundUp(nbytes, kPage), kPage)) {
    void* data = nullptr;
    const bool huge = nbytes_ >= 2 * kHugePage;
    if (posix_memalign(&data, huge ? kHugePage : kPage, nbytes_) != 0) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    if (huge)
      madvise(data, nbytes_, MADV_HUGEPAGE);  // lookups are random: fewer TLB misses; only a hint
#endif
    data_ = static_cast<char*>(data);
    live_bytes += nbytes_;
  }
  Memory(const Memory&) = delete;
  ~Memory() {
    std::free(data_);
    live_bytes -= nbytes_;
  }
  char* data() const { return data_; }
  int64_t nbytes() const { return nbytes_; }

 private:
  char* data_;
  const int64_t nbytes_;
};

// A capsule that owns `*owned`. Its destructor runs with the GIL held and takes no lock that is
// held while waiting for the GIL.
template <typename T>
py::capsule Own(T owned) {
  return py::capsule(new T(std::move(owned)), [](void* p) { delete static_cast<T*>(p); });
}

// A read-only array of bytes.
inline py::array BytesOver(char* data, int64_t nbytes, const py::capsule& owner) {
  py::array array(py::dtype(npy_api::NPY_UINT8_), std::vector<py::ssize_t>{nbytes},
                  std::vector<py::ssize_t>{1}, data, owner);
  py::detail::array_proxy(array.ptr())->flags &= ~npy_api::NPY_ARRAY_WRITEABLE_;
  return array;
}

}  // namespace recom::packing
