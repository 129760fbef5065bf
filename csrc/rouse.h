// Keeps the driver's thread that tells XLA of a call's end from falling deeply asleep.
//
// XLA learns that a call has ended from a host function on a stream of its own, which a thread of
// the driver's runs. That thread has nothing else to do, and a processor that slept for the length
// of a call takes tens of microseconds to wake up. So it is given something to do while the GPU
// still computes.

#ifndef RECOM_JAX_CSRC_ROUSE_H_
#define RECOM_JAX_CSRC_ROUSE_H_

#include <cstdint>

namespace recom {

// A helper that is awake rouses the driver's thread of that device; nothing where none is, or where
// one is about to. `ordinal`: -1 where device memory is host memory (for tests). Never throws: a
// call is as right without it.
void rouse_driver(int ordinal) noexcept;

// How often it was done.
int64_t roused();
// Tests and measurements only.
void set_rousing(bool on);

}  // namespace recom

#endif  // RECOM_JAX_CSRC_ROUSE_H_
