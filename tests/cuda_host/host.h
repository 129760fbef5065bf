#ifndef RECOM_JAX_TESTS_CUDA_HOST_HOST_H_
#define RECOM_JAX_TESTS_CUDA_HOST_HOST_H_

namespace fake {

// Counts a call of the driver. Returns success.
int called(const char* symbol);

}  // namespace fake

#endif  // RECOM_JAX_TESTS_CUDA_HOST_HOST_H_
