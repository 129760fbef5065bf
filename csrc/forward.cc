#include "forward.h"

#include <structmember.h>  // before Python 3.12 nothing else has the members' types

#include <cstddef>

namespace py = pybind11;

namespace recom {
namespace {

// A subclass calls `_forward(target)` once and defines `_failed(error, args, kwargs)`, which raises
// something in place of an Exception of the target's. A `__call__` in Python that does the same
// takes 0.7 us of a call: as long as all that the fused call's handlers do.
struct Forward {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* target;
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

PyObject* failed(PyObject* self, PyObject* const* args, Py_ssize_t n, PyObject* names) {
  const py::object error = take_error();
  try {
    py::tuple positional(n);
    for (Py_ssize_t i = 0; i < n; ++i) positional[i] = py::handle(args[i]);
    py::dict named;
    for (Py_ssize_t i = 0; names && i < PyTuple_GET_SIZE(names); ++i) {
      named[py::handle(PyTuple_GET_ITEM(names, i))] = py::handle(args[n + i]);
    }
    return py::handle(self).attr("_failed")(error, positional, named).release().ptr();
  } catch (py::error_already_set& raised) {
    raised.restore();
    return nullptr;
  }
}

PyObject* call(PyObject* self, PyObject* const* args, size_t flags, PyObject* names) {
  PyObject* target = as_forward(self)->target;
  if (!target) {
    PyErr_SetString(PyExc_TypeError, "it forwards calls to nothing yet");
    return nullptr;
  }
  Py_INCREF(target);
  PyObject* out = PyObject_Vectorcall(target, args, flags, names);
  Py_DECREF(target);
  if (out || !PyErr_ExceptionMatches(PyExc_Exception)) return out;
  return failed(self, args, PyVectorcall_NARGS(flags), names);
}

PyObject* make(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* self = type->tp_alloc(type, 0);
  if (self) as_forward(self)->vectorcall = call;
  return self;
}

PyObject* forward(PyObject* self, PyObject* target) {
  Py_INCREF(target);
  Py_XSETREF(as_forward(self)->target, target);
  Py_RETURN_NONE;
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(as_forward(self)->target);
  Py_VISIT(Py_TYPE(self));
  return 0;
}

int clear(PyObject* self) {
  Py_CLEAR(as_forward(self)->target);
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
    {"_forward", forward, METH_O, "Calls go to this callable from now on."},
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
