// A call's results in host memory of ours, without XLA's own way of saying that an array is ready:
// on a GPU that takes a callback of the driver's and two threads that sleep, and waking each of
// them takes longer than a small model's kernels.
//
// The FFI target recom_deliver_v1 is a program's last call. If a thread waits for the results, it
// copies them to page-locked memory of the staging slot that the call reads, and records an event,
// at which the waiting thread looks.

#ifndef RECOM_JAX_CSRC_DELIVER_H_
#define RECOM_JAX_CSRC_DELIVER_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "cuda_driver.h"

namespace recom {

// One slot's results. Used by one call at a time, from Begin until it has ended.
class Delivery {
 public:
  static constexpr int64_t kAlign = 64;  // of each result

  Delivery() = default;
  ~Delivery();
  Delivery(const Delivery&) = delete;

  // For a new call, whose results take `nbytes` together. Throws CudaError, std::bad_alloc.
  // `ordinal`: of the device; -1 where device memory is host memory (for tests).
  void Begin(int64_t nbytes, int ordinal);

  // Nobody waits any more. The memory stays as it is until the call has ended.
  void Cancel() { nbytes_ = -1; }

  // The handler's: copies results, one behind the other, at multiples of kAlign; nothing where no
  // call was begun. Throws CudaError; std::runtime_error where other results were asked for.
  void Copy(const std::vector<std::pair<const void*, int64_t>>& results, cuda::Stream stream);

  // Waits until the results are there; false after so many microseconds. `spin_us`: how long at
  // most, since Begin, it looks without sleeping. Throws CudaError.
  bool Wait(int64_t us, int64_t spin_us) const;

  // Whether the handler has run: if the call has ended without that, it failed.
  bool copied() const { return copied_; }
  const char* data() const { return data_; }
  int64_t nbytes() const { return nbytes_; }

 private:
  void Free();

  char* data_ = nullptr;
  std::atomic<int64_t> nbytes_{-1};  // -1: no call wants results
  int64_t room_ = 0, begun_us_ = 0;
  int ordinal_ = -1;
  cuda::Event event_ = nullptr;
  std::atomic<bool> copied_{false};
};

}  // namespace recom

#endif  // RECOM_JAX_CSRC_DELIVER_H_
