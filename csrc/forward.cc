#include "forward.h"

#include <structmember.h>  // before Python 3.12 nothing else has the members' types

#include <cstddef>

#include "byte_order.h"

namespace py = pybind11;

namespace recom {
namespace {

// A subclass calls `_forward(target)` once and defines `_failed(error, args, kwargs)`, which raises
// something in place of an Exception of the target's. A `__call__` in Python that does the same
// takes 0.7 us of a call: as long as all that the fused call's handlers do.
//
// With `_forward(target, array, leaves)` it also defines `_swapped(args, kwargs)`, which is called
// before the target where an argument seems to hold an array of the other byte order, and may
// raise. `jax.jit` takes such an array for one of its own byte order, if it has seen that type
// before.
struct Forward {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* target;
  Leaves how;
};

Forward* as_forward(PyObject* self) { return reinterpret_cast<Forward*>(self); }

// The raised exception, no longer raised.
py::object take_error() {
#if PY_VERSION_HEX >= 0x030C0000
  return py::reinterpret_steal<py::object>(PyErr_GetRaisedException());
#else
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  if (trace) PyException_SetTraceback(value, trace);
  Py_XDECREF(type);
  Py_XDECREF(trace);
  return py::reinterpret_steal<py::object>(value);
#endif
}

// A call's arguments as Python has them.
struct Arguments {
  py::tuple positional;
  py::dict named;

  Arguments(PyObject* const* args, Py_ssize_t n, PyObject* names) : positional(n) {
    for (Py_ssize_t i = 0; i < n; ++i) positional[i] = py::handle(args[i]);
    for (Py_ssize_t i = 0; names && i < PyTuple_GET_SIZE(names); ++i) {
      named[py::handle(PyTuple_GET_ITEM(names, i))] = py::handle(args[n + i]);
    }
  }
};

PyObject* failed(PyObject* self, PyObject* const* args, Py_ssize_t n, PyObject* names) {
  const py::object error = take_error();
  try {
    const Arguments given(args, n, names);
    return py::handle(self).attr("_failed")(error, given.positional, given.named).release().ptr();
  } catch (py::error_already_set& raised) {
    raised.restore();
    return nullptr;
  }
}

// Whether the call may go on.
bool judged(PyObject* self, PyObject* const* args, Py_ssize_t n, PyObject* names) {
  const Py_ssize_t all = n + (names ? PyTuple_GET_SIZE(names) : 0);
  if (!as_forward(self)->how.leaves || !AnySwapped(args, all, as_forward(self)->how)) return true;
  try {
    const Arguments given(args, n, names);
    py::handle(self).attr("_swapped")(given.positional, given.named);
    return true;
  } catch (py::error_already_set& raised) {
    raised.restore();
    return false;
  }
}

PyObject* call(PyObject* self, PyObject* const* args, size_t flags, PyObject* names) {
  PyObject* target = as_forward(self)->target;
  if (!target) {
    PyErr_SetString(PyExc_TypeError, "it forwards calls to nothing yet");
    return nullptr;
  }
  const Py_ssize_t n = PyVectorcall_NARGS(flags);
  Py_INCREF(target);
  const bool may = judged(self, args, n, names);
  PyObject* out = may ? PyObject_Vectorcall(target, args, flags, names) : nullptr;
  Py_DECREF(target);
  if (out || !may || !PyErr_ExceptionMatches(PyExc_Exception)) return out;
  return failed(self, args, n, names);
}

PyObject* make(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* self = type->tp_alloc(type, 0);
  if (self) as_forward(self)->vectorcall = call;
  return self;
}

PyObject* forward(PyObject* self, PyObject* args) {
  PyObject *target, *array = nullptr, *leaves = nullptr;
  if (!PyArg_ParseTuple(args, "O|OO", &target, &array, &leaves)) return nullptr;
  Py_XSETREF(as_forward(self)->target, Py_NewRef(target));
  Py_XSETREF(as_forward(self)->how.array, Py_XNewRef(array));
  Py_XSETREF(as_forward(self)->how.leaves, Py_XNewRef(leaves));
  Py_RETURN_NONE;
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(as_forward(self)->target);
  Py_VISIT(as_forward(self)->how.array);
  Py_VISIT(as_forward(self)->how.leaves);
  Py_VISIT(Py_TYPE(self));
  return 0;
}

int clear(PyObject* self) {
  Py_CLEAR(as_forward(self)->target);
  Py_CLEAR(as_forward(self)->how.array);
  Py_CLEAR(as_forward(self)->how.leaves);
  return 0;
}

void dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef methods[] = {
    {"_forward", forward, METH_VARARGS, "Calls go to this callable from now on."},
    {nullptr, nullptr, 0, nullptr},
};
PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Forward, vectorcall), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};
PyType_Slot slots[] = {
    {Py_tp_doc, const_cast<char*>("Hands calls on, and tells `_failed` of what they raise.")},
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(clear)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {0, nullptr},
};
PyType_Spec spec = {
    "recom_jax._recom.Forward", sizeof(Forward), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    slots};

}  // namespace

void bind_forward(py::module_& m) {
  m.attr("Forward") = py::reinterpret_steal<py::object>(PyType_FromSpec(&spec));
}

}  // namespace recom
