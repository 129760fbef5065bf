// A slot's copy to its device, on a stream of our own: it begins as soon as bytes are there, while
// XLA is still busy with starting the call that will read them.
#ifndef RECOM_JAX_CSRC_STAGE_UPLOAD_H_
#define RECOM_JAX_CSRC_STAGE_UPLOAD_H_

#include <atomic>
#include <cstdint>

#include "cuda_driver.h"

namespace recom {

// One slot on one device. Used by one lease at a time; its parts are issued by one thread at a
// time.
class Upload {
 public:
  // `buffer`: of the device, as large as the slot, and nobody else's. `ordinal`: -1 where device
  // memory is host memory (for tests). Throws CudaError.
  Upload(const char* host, int64_t nbytes, uintptr_t buffer, int ordinal);
  ~Upload();
  Upload(const Upload&) = delete;

  // For a new lease: nothing of it was copied.
  void Reset() { finished_ = false; }
  // Copies a part of the slot; `last`: of those there are. Throws CudaError.
  void Issue(int64_t begin, int64_t end, bool last);
  // Whether all parts were issued.
  bool finished() const { return finished_; }
  // Has a stream wait for them.
  void Await(cuda::Stream stream) const;
  // Waits until nothing reads the slot or writes the buffer any more.
  void Drain() const;

 private:
  const char* const host_;
  const int64_t nbytes_;
  const uintptr_t buffer_;
  const int ordinal_;
  cuda::Stream stream_ = nullptr;
  cuda::Event event_ = nullptr;
  std::atomic<bool> finished_{false};
};

}  // namespace recom

#endif  // RECOM_JAX_CSRC_STAGE_UPLOAD_H_
