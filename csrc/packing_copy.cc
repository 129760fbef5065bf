#include "packing_copy.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <type_traits>

#include "packing_pool.h"

namespace recom::packing {

namespace {

constexpr int64_t kReleaseBytes = 32 << 10;  // shorter ones keep the GIL: taking it back costs more
constexpr int64_t kThreadBytes = int64_t{1} << 20;   // per thread: less is not worth waking one
constexpr int64_t kChunkBytes = int64_t{256} << 10;  // what a thread takes at a time

template <typename From, typename To>
void CopyRow(const char* src, int64_t stride, char* dst, int64_t n) {
  // memcpy: a leaf may be misaligned. The constant stride lets the compiler vectorise the usual
  // case.
  const int64_t step = stride == static_cast<int64_t>(sizeof(From)) ? sizeof(From) : stride;
  auto loop = [&](auto constant) {
    for (int64_t i = 0; i < n; ++i) {
      From from;
      std::memcpy(&from,
                  src + i * (decltype(constant)::value ? static_cast<int64_t>(sizeof(From)) : step),
                  sizeof from);
      const To to = static_cast<To>(from);
      std::memcpy(dst + i * static_cast<int64_t>(sizeof(To)), &to, sizeof to);
    }
  };
  if (stride == static_cast<int64_t>(sizeof(From)))
    loop(std::true_type{});
  else
    loop(std::false_type{});
}

using RowFn = void (*)(const char*, int64_t, char*, int64_t);

RowFn RowOf(const StridedCopy& copy) {
  if (copy.kind == Kind::kLow32) return CopyRow<uint64_t, uint32_t>;
  if (copy.kind == Kind::kF64ToF32) return CopyRow<double, float>;
  switch (copy.src_size) {
    case 1:
      return CopyRow<uint8_t, uint8_t>;
    case 2:
      return CopyRow<uint16_t, uint16_t>;
    case 4:
      return CopyRow<uint32_t, uint32_t>;
    default:
      return CopyRow<uint64_t, uint64_t>;
  }
}

void Run(const FlatCopy& copy) { std::memcpy(copy.dst, copy.src, copy.nbytes); }

void Run(const StridedCopy& copy) {
  const RowFn row = RowOf(copy);
  if (copy.rank == 0) return row(copy.src, copy.src_size, copy.dst, 1);
  const int inner = copy.rank - 1;
  const int64_t n = copy.dims[inner];
  const int64_t rows = n == 0 ? 0 : copy.nbytes() / copy.dst_size / n;
  int64_t at[kPackMaxRank] = {};
  const char* src = copy.src;
  for (int64_t r = 0; r < rows; ++r) {
    row(src, copy.strides[inner], copy.dst + r * n * copy.dst_size, n);
    for (int d = inner - 1; d >= 0; --d) {
      src += copy.strides[d];
      if (++at[d] < copy.dims[d]) break;
      src -= copy.strides[d] * copy.dims[d];
      at[d] = 0;
    }
  }
}

}  // namespace

void Plan::Add(const py::detail::PyArray_Proxy* array, const Entry& entry, int leaf_dtype) {
  if (entry.nbytes == 0) return;
  char* dst = lo_ + entry.offset;
  const bool same = leaf_dtype == entry.dtype;
  const bool contiguous = array->flags & npy_api::NPY_ARRAY_C_CONTIGUOUS_;
  if (array->data >= lo_ && array->data < hi_) {
    if (array->data == dst && same && contiguous) return;  // a leased view, in its own place
    // Some other entry's memory: read it before anything is overwritten.
    temporaries_.emplace_back(new char[entry.nbytes]);
    Run(Strided(array, entry, leaf_dtype, temporaries_.back().get()));
    flat_.push_back({temporaries_.back().get(), dst, entry.nbytes});
  } else if (same && contiguous) {
    flat_.push_back({array->data, dst, entry.nbytes});
  } else {
    strided_.push_back(Strided(array, entry, leaf_dtype, dst));
  }
  bytes_ += entry.nbytes;
}

void Plan::Execute(int max_threads) const {
  const int threads = static_cast<int>(std::min<int64_t>(max_threads, bytes_ / kThreadBytes));
  if (threads <= 1) {
    for (const FlatCopy& copy : flat_) Run(copy);
    for (const StridedCopy& copy : strided_) Run(copy);
    return;
  }
  std::vector<FlatCopy> flat;
  std::vector<StridedCopy> strided;
  for (const FlatCopy& copy : flat_)
    for (int64_t at = 0; at < copy.nbytes; at += kChunkBytes)
      flat.push_back({copy.src + at, copy.dst + at, std::min(kChunkBytes, copy.nbytes - at)});
  for (const StridedCopy& copy : strided_) Split(copy, &strided);
  // What a thread takes at a time: neighbours, as most leaves are small.
  std::vector<size_t> ends;
  int64_t taken = 0;
  for (size_t i = 0; i < flat.size() + strided.size(); ++i) {
    taken += i < flat.size() ? flat[i].nbytes : strided[i - flat.size()].nbytes();
    if (taken < kChunkBytes && i + 1 < flat.size() + strided.size()) continue;
    ends.push_back(i + 1);
    taken = 0;
  }
  parallel_for(Helpers(threads), static_cast<int64_t>(ends.size()), [&](int64_t at) {
    for (size_t i = at == 0 ? 0 : ends[at - 1]; i < ends[at]; ++i)
      i < flat.size() ? Run(flat[i]) : Run(strided[i - flat.size()]);
  });
}

StridedCopy Plan::Strided(const py::detail::PyArray_Proxy* array, const Entry& entry,
                          int leaf_dtype, char* dst) {
  StridedCopy copy{};
  copy.src = array->data;
  copy.dst = dst;
  copy.kind = leaf_dtype == entry.dtype ? Kind::kSame
              : leaf_dtype == kF64      ? Kind::kF64ToF32
                                        : Kind::kLow32;
  copy.src_size = ItemSize(leaf_dtype);
  copy.dst_size = ItemSize(entry.dtype);
  for (int i = 0; i < entry.rank;
       ++i) {  // leave out sizes of 1, join dims that lie behind one another
    const int64_t size = entry.dims[i], stride = array->strides[i];
    if (size == 1) continue;
    if (copy.rank > 0 && copy.strides[copy.rank - 1] == size * stride) {
      copy.dims[copy.rank - 1] *= size;
      copy.strides[copy.rank - 1] = stride;
    } else {
      copy.dims[copy.rank] = size;
      copy.strides[copy.rank++] = stride;
    }
  }
  return copy;
}

void Plan::Split(const StridedCopy& copy, std::vector<StridedCopy>* out) {
  const int64_t nbytes = copy.nbytes();
  if (copy.rank == 0 || nbytes <= kChunkBytes) return out->push_back(copy);
  const int64_t row_bytes = nbytes / copy.dims[0];
  const int64_t step = std::max<int64_t>(1, kChunkBytes / row_bytes);
  for (int64_t at = 0; at < copy.dims[0]; at += step) {
    StridedCopy part = copy;
    part.dims[0] = std::min(step, copy.dims[0] - at);
    part.src += at * copy.strides[0];
    part.dst += at * row_bytes;
    out->push_back(part);
  }
}

const py::detail::PyArray_Proxy* Checker::Array(PyObject* leaf, int* dtype) const {
  if (Py_TYPE(leaf) != array_type_) return nullptr;
  const auto* array = py::detail::array_proxy(leaf);
  const auto* descr = py::detail::array_descriptor_proxy(array->descr);
  if (!NativeOrder(descr->byteorder)) return nullptr;
  *dtype = DtypeOf(descr->type_num, bf16_type_num_);
  return *dtype == kNoDtype ? nullptr : array;
}

int64_t Checker::Check(const Layout& layout, PyObject* const* leaves, Plan* plan) const {
  for (size_t i = 0; i < layout.entries.size(); ++i) {
    const Entry& entry = layout.entries[i];
    int dtype = kNoDtype;
    const auto* array = Array(leaves[i], &dtype);
    if (array == nullptr || array->nd != entry.rank || !Converts(dtype, entry.dtype)) return i;
    for (int d = 0; d < entry.rank; ++d)
      if (array->dimensions[d] != entry.dims[d]) return i;
    if (plan != nullptr) plan->Add(array, entry, dtype);
  }
  return -1;
}

bool Checker::Converts(int from, int to) const {
  if (from == to) return true;
  return narrow_ && ((from == kS64 && to == kS32) || (from == kU64 && to == kU32) ||
                     (from == kF64 && to == kF32));
}

Leaves::Leaves(const py::object& sequence, size_t want, const char* what) {
  if (!PyList_Check(sequence.ptr()) && !PyTuple_Check(sequence.ptr()))
    throw py::type_error(std::string(what) + " takes a list or tuple of leaves");
  items_ = PySequence_Fast_ITEMS(sequence.ptr());
  size_ = PySequence_Fast_GET_SIZE(sequence.ptr());
  if (size_ != want)
    throw py::value_error(std::string(what) + ": the layout has " + std::to_string(want) +
                          " entries, " + std::to_string(size_) + " leaves were given");
}

void Leaves::RunPlan(const Plan& plan, int max_threads) {
  if (plan.bytes() < kReleaseBytes) return plan.Execute(1);
  held_.assign(items_, items_ + size_);
  for (PyObject* item : held_) Py_INCREF(item);
  py::gil_scoped_release release;
  plan.Execute(max_threads);
}

}  // namespace recom::packing
