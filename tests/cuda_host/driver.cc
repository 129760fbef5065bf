// The CUDA driver's functions as libcuda.so.1 exports them, doing nothing: weak, so that host.cc
// replaces some.

#include "cuda_driver.h"
#include "host.h"

namespace recom::cuda {

#define RECOM_FAKE(member, symbol, parameters)                                              \
  extern "C" Result fake_##member parameters __asm__(symbol);                               \
  extern "C" __attribute__((weak, visibility("default"))) Result fake_##member parameters { \
    return fake::called(symbol);                                                            \
  }
RECOM_DRIVER_FUNCTIONS(RECOM_FAKE)
#undef RECOM_FAKE

}  // namespace recom::cuda
