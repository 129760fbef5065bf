// Asking for memory before it is needed.

#ifndef RECOM_JAX_CSRC_PREFETCH_H_
#define RECOM_JAX_CSRC_PREFETCH_H_

#include <cstdint>

namespace recom {

// The lines of [p, p + bytes). The address need not be one that may be read.
inline void prefetch(const void* p, int64_t bytes) {
  const char* at = static_cast<const char*>(p);
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i);
  // GCC takes a function that only prefetches for one without effects, and drops the calls of it.
  asm volatile("");
}

}  // namespace recom

#endif  // RECOM_JAX_CSRC_PREFETCH_H_
