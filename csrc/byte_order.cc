#include "byte_order.h"

#include <pybind11/numpy.h>

#include "packing_layout.h"

namespace py = pybind11;

namespace recom {
namespace {

using py::detail::npy_api;

constexpr int kDeepest = 100;

bool IsScalar(PyObject* x) {
  return x == Py_None || PyFloat_Check(x) || PyLong_Check(x) || PyUnicode_Check(x) ||
         PyComplex_Check(x);
}

// Looks through one call's arguments. What it holds on to while it runs code of others, that code
// may drop.
class Search {
 public:
  explicit Search(const Leaves& how) : how_(how), array_type_(npy_api::get().PyArray_Type_) {}

  bool In(PyObject* x, int depth) {
    PyTypeObject* type = Py_TYPE(x);
    if (reinterpret_cast<PyObject*>(type) == how_.array) return false;
    if (type == array_type_) return Swapped(x);
    if (IsScalar(x)) return false;
    if (PyDict_Check(x)) return InDict(x, depth);
    if (PyTuple_Check(x)) return InTuple(x, depth);
    if (PyList_Check(x)) return InList(x, depth);
    if (PyType_IsSubtype(type, array_type_)) return Swapped(x);
    return InOther(x);
  }

 private:
  static bool Swapped(PyObject* x) {
    const auto* descr = py::detail::array_descriptor_proxy(py::detail::array_proxy(x)->descr);
    return !packing::NativeOrder(descr->byteorder);
  }

  // Of something that holds itself JAX makes no pytree, and says so.
  bool Deeper(PyObject* x, int depth) {
    gave_up_ |= depth >= kDeepest;
    if (gave_up_) return false;
    const auto held = py::reinterpret_borrow<py::object>(x);
    return In(x, depth + 1);
  }

  bool InDict(PyObject* x, int depth) {
    PyObject* value;
    Py_ssize_t at = 0;
    while (PyDict_Next(x, &at, nullptr, &value))
      if (Deeper(value, depth)) return true;
    return false;
  }

  bool InTuple(PyObject* x, int depth) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(x); ++i)
      if (Deeper(PyTuple_GET_ITEM(x, i), depth)) return true;
    return false;
  }

  bool InList(PyObject* x, int depth) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(x); ++i)
      if (Deeper(PyList_GET_ITEM(x, i), depth)) return true;
    return false;
  }

  bool InOther(PyObject* x) {
    if (how_.leaves == nullptr) return false;
    const auto leaves = py::reinterpret_steal<py::object>(PyObject_CallOneArg(how_.leaves, x));
    if (!leaves) PyErr_Clear();  // no pytree: the call itself says so
    if (!leaves || !PyList_Check(leaves.ptr())) return false;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(leaves.ptr()); ++i) {
      PyObject* leaf = PyList_GET_ITEM(leaves.ptr(), i);
      if (PyType_IsSubtype(Py_TYPE(leaf), array_type_) && Swapped(leaf)) return true;
    }
    return false;
  }

  const Leaves& how_;
  PyTypeObject* const array_type_;
  bool gave_up_ = false;
};

}  // namespace

bool AnySwapped(PyObject* const* args, Py_ssize_t n, const Leaves& how) {
  Search search(how);
  for (Py_ssize_t i = 0; i < n; ++i)
    if (search.In(args[i], 0)) return true;
  return false;
}

void bind_byte_order(py::module_& m) {
  m.def(
      "any_swapped",
      [](py::object leaves) {
        PyObject* x = leaves.ptr();
        return AnySwapped(&x, 1, Leaves{});
      },
      py::arg("leaves"), "Whether a list holds a numpy array in the other byte order.");
}

}  // namespace recom
