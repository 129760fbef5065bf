// A Python callable that hands its calls on to another one.

#ifndef RECOM_JAX_CSRC_FORWARD_H_
#define RECOM_JAX_CSRC_FORWARD_H_

#include <pybind11/pybind11.h>

namespace recom {

void bind_forward(pybind11::module_& m);

}  // namespace recom

#endif  // RECOM_JAX_CSRC_FORWARD_H_
