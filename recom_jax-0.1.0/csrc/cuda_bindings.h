// The CUDA target's functions of the Python module.

#ifndef RECOM_JAX_CSRC_CUDA_BINDINGS_H_
#define RECOM_JAX_CSRC_CUDA_BINDINGS_H_

#include <pybind11/pybind11.h>

namespace recom {

void bind_cuda(pybind11::module_& m);

}  // namespace recom

#endif  // RECOM_JAX_CSRC_CUDA_BINDINGS_H_
