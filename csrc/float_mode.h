// The calling thread's treatment of denormals, for others to take over.

#ifndef RECOM_JAX_CSRC_FLOAT_MODE_H_
#define RECOM_JAX_CSRC_FLOAT_MODE_H_

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace recom {

// XLA's pool flushes denormals, other threads do not. Chunks run in the caller's mode, so that a
// result does not depend on the thread that computed it.
class FloatMode {
 public:
#if defined(__SSE2__)
  FloatMode() : mode_(_mm_getcsr()) {}
  struct Scope {
    explicit Scope(const FloatMode& m) : saved(_mm_getcsr()) { _mm_setcsr(m.mode_); }
    ~Scope() { _mm_setcsr(saved); }
    unsigned saved;
  };

 private:
  unsigned mode_;
#else
  struct Scope {
    explicit Scope(const FloatMode&) {}
    ~Scope() {}
  };
#endif
};

}  // namespace recom

#endif  // RECOM_JAX_CSRC_FLOAT_MODE_H_
