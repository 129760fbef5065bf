// Memory of ours that a call of XLA's has read and that is written again after it. That the call
// has ended is known from XLA, whose atomics the thread sanitizer does not see; so it is told here,
// in this direction alone, and by address: a slot that is written too early is reported. No code in
// other builds.

#ifndef RECOM_JAX_CSRC_HANDOVER_H_
#define RECOM_JAX_CSRC_HANDOVER_H_

#include <vector>

#include "plan.h"

#if defined(__SANITIZE_THREAD__)
extern "C" void __tsan_acquire(void*);
extern "C" void __tsan_release(void*);
#endif

namespace recom {

// What a call has done with this memory is done.
inline void hand_over([[maybe_unused]] const void* p) {
#if defined(__SANITIZE_THREAD__)
  __tsan_release(const_cast<void*>(p));
#endif
}

// Before it is written again.
inline void take_over([[maybe_unused]] const void* p) {
#if defined(__SANITIZE_THREAD__)
  __tsan_acquire(const_cast<void*>(p));
#endif
}

// The buffers of a call, which it reads while this lives.
class Borrowed {
 public:
  explicit Borrowed(const std::vector<Buffer>& buffers) : buffers_(buffers) {}
  ~Borrowed() {
    for (const Buffer& b : buffers_) hand_over(b.data);
  }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;

 private:
  const std::vector<Buffer>& buffers_;
};

}  // namespace recom

#endif  // RECOM_JAX_CSRC_HANDOVER_H_
