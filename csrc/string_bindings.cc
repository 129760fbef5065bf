// The Python side of string_ids.h.
#include "string_bindings.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "packing_pool.h"
#include "string_ids.h"

namespace py = pybind11;

namespace recom::strings {
namespace {

constexpr int64_t kThreadStrings = 8192;  // per thread: fewer are not worth waking one

// A source and whatever holds its memory.
struct Held {
  std::unique_ptr<Source> source;
  std::vector<py::object> kept;
  int64_t not_a_string = -1;  // the first entry of an object array that is neither string nor null

  Executor executor(int threads) const {
    static const int cores = std::clamp<int>(std::thread::hardware_concurrency(), 1, 8);
    if (threads <= 0) threads = cores;  // asked once: it reads a file
    const int64_t useful = source->size() / kThreadStrings + 1;
    return packing::Helpers(static_cast<int>(std::min<int64_t>(threads, useful)));
  }
};

bool is_null(PyObject* o, PyObject* missing) {
  if (o == nullptr || o == Py_None || o == missing) return true;
  if (PyFloat_Check(o)) return std::isnan(PyFloat_AS_DOUBLE(o));
  return std::string_view(Py_TYPE(o)->tp_name).find("NAType") != std::string_view::npos;  // pandas
}

// `array` is one of Python objects, C-contiguous; `missing` stands for a null too, unless it is
// None.
Held from_objects(const py::array& array, const py::object& missing) {
  Held held;
  std::vector<PieceSource::Piece> pieces;
  const auto n = static_cast<size_t>(array.size());
  pieces.reserve(n);
  held.kept.reserve(n);
  auto* const* objects = static_cast<PyObject* const*>(array.data());
  for (size_t i = 0; i < n; ++i) {
    PyObject* const o = objects[i];
    if (o != nullptr && PyUnicode_Check(o)) {
#if PY_VERSION_HEX < 0x030C0000
      if (PyUnicode_READY(o)) throw py::error_already_set();
#endif
      const int kind = PyUnicode_KIND(o);
      pieces.push_back({PyUnicode_DATA(o), PyUnicode_GET_LENGTH(o),
                        PyUnicode_IS_ASCII(o) ? Encoding::kBytes
                        : kind == 1           ? Encoding::kLatin1
                        : kind == 2           ? Encoding::kUcs2
                                              : Encoding::kUcs4});
    } else if (o != nullptr && PyBytes_Check(o)) {
      pieces.push_back({PyBytes_AS_STRING(o), PyBytes_GET_SIZE(o), Encoding::kBytes});
    } else if (is_null(o, missing.ptr())) {
      pieces.push_back({nullptr, 0, Encoding::kBytes});
      continue;
    } else {
      held.not_a_string = static_cast<int64_t>(i);
      break;
    }
    // Another thread may put something else into the array while the strings are read.
    held.kept.push_back(py::reinterpret_borrow<py::object>(o));
  }
  held.source = std::make_unique<PieceSource>(std::move(pieces));
  return held;
}

// Bytes of a buffer, at least `least` of them.
const char* bytes_of(const py::buffer& buffer, int64_t least, Held* held, int64_t* size = nullptr) {
  const py::buffer_info info = buffer.request();
  const int64_t nbytes = info.size * info.itemsize;
  if (nbytes < least) throw py::value_error("a buffer of the strings is too short");
  if (size != nullptr) *size = nbytes;
  held->kept.push_back(buffer);
  return static_cast<const char*>(info.ptr);
}

Validity validity_of(const std::optional<py::buffer>& bits, int64_t offset, int64_t n, Held* held) {
  if (!bits) return {};
  return {reinterpret_cast<const uint8_t*>(bytes_of(*bits, (offset + n + 7) / 8, held)), offset};
}

// `array` is one of bytes (S) or of str (U) of native byte order, C-contiguous.
Held from_fixed(const py::array& array) {
  Held held;
  const bool text = array.dtype().kind() == 'U';
  const auto* data = static_cast<const char*>(array.data());
  held.source = std::make_unique<FixedSource>(
      data == nullptr ? "" : data, array.itemsize() / (text ? 4 : 1), array.size(),
      text ? Encoding::kUcs4 : Encoding::kBytes, true, Validity());
  held.kept.push_back(array);
  return held;
}

// Entries [offset, offset + n) of an Arrow array of strings.
Held from_arrow(const std::optional<py::buffer>& validity, const py::buffer& offsets,
                const std::optional<py::buffer>& data, int64_t offset, int64_t n, bool large) {
  Held held;
  if (offset < 0 || n < 0) throw py::value_error("an offset or a length below zero");
  const Validity there = validity_of(validity, offset, n, &held);
  const int64_t word = large ? 8 : 4;
  int64_t bytes = 0;
  const char* const text = data ? bytes_of(*data, 0, &held, &bytes) : nullptr;
  const char* starts = bytes_of(offsets, n == 0 ? 0 : (offset + n + 1) * word, &held);
  if (n > 0) starts += offset * word;
  if (large) {
    held.source = std::make_unique<OffsetSource<int64_t>>(reinterpret_cast<const int64_t*>(starts),
                                                          text, bytes, n, there);
  } else {
    held.source = std::make_unique<OffsetSource<int32_t>>(reinterpret_cast<const int32_t*>(starts),
                                                          text, bytes, n, there);
  }
  return held;
}

// The same of strings of one size.
Held from_arrow_fixed(const std::optional<py::buffer>& validity, const py::buffer& data,
                      int64_t offset, int64_t n, int64_t width) {
  Held held;
  if (offset < 0 || n < 0 || width < 0) throw py::value_error("an offset or a size below zero");
  const Validity there = validity_of(validity, offset, n, &held);
  const char* const text = bytes_of(data, (offset + n) * width, &held);
  held.source = std::make_unique<FixedSource>(text == nullptr ? "" : text + offset * width, width,
                                              n, Encoding::kBytes, false, there);
  return held;
}

template <typename T>
T* fill(py::array_t<T, py::array::c_style>& out, int64_t size) {
  if (out.size() != size) throw py::value_error("the result has the wrong size");
  return out.mutable_data();
}

int64_t fill_fingerprints(const Held& held, py::array_t<uint64_t, py::array::c_style> out,
                          uint64_t null, int threads) {
  uint64_t* const to = fill(out, held.source->size());
  const Executor executor = held.executor(threads);
  py::gil_scoped_release release;
  return fingerprints(*held.source, null, executor, to);
}

int64_t fill_bucket_ids(const Held& held, py::array_t<int32_t, py::array::c_style> out,
                        uint64_t buckets, int32_t null, int threads) {
  if (buckets == 0) throw py::value_error("no buckets");
  int32_t* const to = fill(out, held.source->size());
  const Executor executor = held.executor(threads);
  py::gil_scoped_release release;
  return bucket_ids(*held.source, buckets, null, executor, to);
}

std::unique_ptr<Tokens> split(const Held& held, const std::string& delimiter, uint64_t buckets,
                              bool skip_empty, const std::optional<std::string>& null,
                              int threads) {
  if (buckets == 0 || delimiter.empty()) throw py::value_error("no buckets or no delimiter");
  const Executor executor = held.executor(threads);
  const SplitOptions options{delimiter, buckets, skip_empty, !null, null.value_or("")};
  py::gil_scoped_release release;
  return std::make_unique<Tokens>(*held.source, options, executor);
}

}  // namespace
}  // namespace recom::strings

void bind_strings(py::module_& module) {
  using namespace recom::strings;
  py::class_<Held>(module, "StringSource", "Strings in memory, as csrc/string_ids.h reads them.")
      .def_static("from_objects", &from_objects, py::arg("array"), py::arg("missing"))
      .def_static("from_fixed", &from_fixed, py::arg("array"))
      .def_static("from_arrow", &from_arrow, py::arg("validity"), py::arg("offsets"),
                  py::arg("data"), py::arg("offset"), py::arg("n"), py::arg("large"))
      .def_static("from_arrow_fixed", &from_arrow_fixed, py::arg("validity"), py::arg("data"),
                  py::arg("offset"), py::arg("n"), py::arg("width"))
      .def("__len__", [](const Held& held) { return held.source->size(); })
      .def_property_readonly("first_null",
                             [](const Held& held) { return held.source->first_null(); })
      .def_readonly("not_a_string", &Held::not_a_string)
      .def("fingerprints", &fill_fingerprints, py::arg("out").noconvert(), py::arg("null"),
           py::arg("threads"), "Fills uint64 `out`. Returns -1, or the first that is no UTF-8.")
      .def("bucket_ids", &fill_bucket_ids, py::arg("out").noconvert(), py::arg("buckets"),
           py::arg("null"), py::arg("threads"), "The same modulo `buckets`, into int32 `out`.")
      .def("split", &split, py::arg("delimiter"), py::arg("buckets"), py::arg("skip_empty"),
           py::arg("null"), py::arg("threads"),
           "Tokens of every string; `null`: what a null is, or None for no tokens.");
  py::class_<Tokens>(module, "StringTokens", "Ids of the tokens of strings.")
      .def_property_readonly("bad", &Tokens::bad)
      .def_property_readonly("total", &Tokens::total)
      .def("__len__", &Tokens::rows)
      .def("first_longer", &Tokens::first_longer, py::arg("length"))
      .def(
          "jagged",
          [](const Tokens& tokens, py::array_t<int32_t, py::array::c_style> values,
             py::array_t<int32_t, py::array::c_style> splits, int32_t start) {
            tokens.jagged(fill(values, tokens.total()), fill(splits, tokens.rows() + 1), start);
          },
          py::arg("values").noconvert(), py::arg("splits").noconvert(), py::arg("start"))
      .def(
          "padded",
          [](const Tokens& tokens, py::array_t<int32_t, py::array::c_style> out, int32_t pad) {
            if (out.ndim() != 2 || out.shape(0) != tokens.rows())
              throw py::value_error("the result has the wrong shape");
            tokens.padded(out.mutable_data(), out.shape(1), pad);
          },
          py::arg("out").noconvert(), py::arg("pad"));
}
