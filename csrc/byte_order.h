// Numpy arrays in the other byte order, among a call's arguments.

#ifndef RECOM_JAX_CSRC_BYTE_ORDER_H_
#define RECOM_JAX_CSRC_BYTE_ORDER_H_

#include <pybind11/pybind11.h>

namespace recom {

// How arguments are taken apart.
struct Leaves {
  PyObject* array = nullptr;  // a type whose instances are passed over: JAX's own arrays
  PyObject* leaves =
      nullptr;  // callable: a pytree -> its leaves, for what is no dict, list or tuple
};

// Whether any of the arguments holds an array whose numbers are in the other byte order. May find
// one that is no leaf (a list in place of a pytree's static part), so whoever is told looks again.
// Raises nothing.
bool AnySwapped(PyObject* const* args, Py_ssize_t n, const Leaves& how);

void bind_byte_order(pybind11::module_& m);

}  // namespace recom

#endif  // RECOM_JAX_CSRC_BYTE_ORDER_H_
