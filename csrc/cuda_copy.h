// Copies within a device that cost the host little.

#ifndef RECOM_JAX_CSRC_CUDA_COPY_H_
#define RECOM_JAX_CSRC_CUDA_COPY_H_

#include <cstddef>

#include "cuda_driver.h"

namespace recom {

// Copies `n` bytes on the stream, in the context of the device, which is current. By a kernel where
// addresses are multiples of 16: the driver's copy takes the host longer than a launch.
void copy_on_device(int device, cuda::Pointer to, cuda::Pointer from, size_t n,
                    cuda::Stream stream);

}  // namespace recom

#endif  // RECOM_JAX_CSRC_CUDA_COPY_H_
