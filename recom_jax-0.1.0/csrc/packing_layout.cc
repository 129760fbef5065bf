#include "packing_layout.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

namespace recom::packing {

namespace {

constexpr int64_t kMaxBytes = int64_t{1} << 48;  // so that no sum of sizes can overflow

// The dtype number of an xla::ffi::DataType number or of anything numpy takes for a dtype.
int ParseDtype(py::handle object) {
  if (PyLong_CheckExact(object.ptr())) {
    const int dtype = object.cast<int>();
    return ItemSize(dtype) > 0 ? dtype : kNoDtype;
  }
  const auto dtype = py::dtype::from_args(py::reinterpret_borrow<py::object>(object));
  return NativeOrder(dtype.byteorder()) ? DtypeOf(dtype.num(), Bf16TypeNum()) : kNoDtype;
}

}  // namespace

int ItemSize(int dtype) {
  switch (dtype) {
    case kPred:
    case kS8:
    case kU8:
      return 1;
    case kS16:
    case kU16:
    case kF16:
    case kBF16:
      return 2;
    case kS32:
    case kU32:
    case kF32:
      return 4;
    case kS64:
    case kU64:
    case kF64:
      return 8;
    default:
      return 0;
  }
}

int Bf16TypeNum() {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<int> storage;
  return storage
      .call_once_and_store_result([] {
        try {
          return py::dtype::from_args(py::module_::import("ml_dtypes").attr("bfloat16")).num();
        } catch (py::error_already_set& e) {
          if (!e.matches(PyExc_ImportError)) throw;
          return -1;
        }
      })
      .get_stored();
}

int TypeNumOf(int dtype) {
  switch (dtype) {
    case kPred:
      return npy_api::NPY_BOOL_;
    case kS8:
      return npy_api::NPY_INT8_;
    case kU8:
      return npy_api::NPY_UINT8_;
    case kS16:
      return npy_api::NPY_INT16_;
    case kU16:
      return npy_api::NPY_UINT16_;
    case kS32:
      return npy_api::NPY_INT32_;
    case kU32:
      return npy_api::NPY_UINT32_;
    case kS64:
      return npy_api::NPY_INT64_;
    case kU64:
      return npy_api::NPY_UINT64_;
    case kF16:
      return 23;
    case kF32:
      return npy_api::NPY_FLOAT32_;
    case kF64:
      return npy_api::NPY_FLOAT64_;
    default:
      return Bf16TypeNum();
  }
}

void Layout::Append(int dtype, int rank, const int64_t* dims) {
  const std::string where = "entry " + std::to_string(entries.size());
  if (dtype == kNoDtype) throw py::value_error(where + ": its dtype can't be packed");
  if (rank > kPackMaxRank)
    throw py::value_error(where + ": rank " + std::to_string(rank) +
                          " is more than a pack's 4; pass it directly");
  Entry entry;
  entry.dtype = dtype;
  entry.rank = rank;
  entry.nbytes = ItemSize(dtype);
  for (int i = 0; i < rank; ++i) {
    if (dims[i] < 0) throw py::value_error(where + ": a size of its shape is negative");
    entry.dims[i] = dims[i];
    if (__builtin_mul_overflow(entry.nbytes, dims[i], &entry.nbytes) || entry.nbytes > kMaxBytes)
      throw py::value_error(where + ": too large");
  }
  entries.push_back(entry);
}

void Layout::Finish() {
  header_bytes =
      RoundUp(static_cast<int64_t>(sizeof(int64_t) * (4 + 7 * entries.size())), kPackAlign);
  total_bytes = header_bytes;
  hash = entries.size();
  auto mix = [this](int64_t v) {
    hash = (hash ^ static_cast<size_t>(v)) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 29;
  };
  for (Entry& entry : entries) {
    entry.offset = total_bytes;
    total_bytes += RoundUp(entry.nbytes, kPackAlign);
    if (total_bytes > kMaxBytes) throw py::value_error("the pack is too large");
    mix(entry.dtype * 8 + entry.rank);
    for (int i = 0; i < entry.rank; ++i) mix(entry.dims[i]);
  }
}

void Layout::WriteHeader(char* to) const {
  std::vector<int64_t> words = {recom::kPackMagic, static_cast<int64_t>(entries.size()),
                                total_bytes, 0};
  words.reserve(4 + 7 * entries.size());
  for (const Entry& e : entries) {
    words.insert(words.end(), {e.offset, e.nbytes, e.rank});
    words.insert(words.end(), e.dims, e.dims + kPackMaxRank);
  }
  words.resize(header_bytes / sizeof(int64_t), 0);
  std::memcpy(to, words.data(), header_bytes);
}

const Entry& Layout::At(int64_t i) const {
  if (i < 0 || i >= static_cast<int64_t>(entries.size()))
    throw py::index_error("entry " + std::to_string(i) + " of a pack of " +
                          std::to_string(entries.size()));
  return entries[i];
}

bool Layout::operator==(const Layout& other) const {
  return entries.size() == other.entries.size() && total_bytes == other.total_bytes &&
         hash == other.hash &&
         std::equal(entries.begin(), entries.end(), other.entries.begin(),
                    [](const Entry& a, const Entry& b) {
                      return a.dtype == b.dtype && a.rank == b.rank &&
                             std::equal(a.dims, a.dims + kPackMaxRank, b.dims);
                    });
}

std::shared_ptr<Layout> MakeLayout(const py::iterable& specs) {
  auto layout = std::make_shared<Layout>();
  for (py::handle spec : specs) {
    const auto pair = py::reinterpret_borrow<py::object>(spec)
                          .cast<std::pair<py::object, std::vector<int64_t>>>();
    layout->Append(ParseDtype(pair.first), static_cast<int>(pair.second.size()),
                   pair.second.data());
  }
  layout->Finish();
  return layout;
}

py::tuple ShapeOf(const Entry& entry) {
  py::tuple shape(entry.rank);
  for (int i = 0; i < entry.rank; ++i) shape[i] = py::int_(entry.dims[i]);
  return shape;
}

}  // namespace recom::packing
