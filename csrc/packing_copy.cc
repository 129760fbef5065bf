#include "packing_copy.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <type_traits>

#include "packing_job.h"

namespace recom::packing {

namespace {

constexpr int64_t kReleaseBytes = 32 << 10;  // shorter ones keep the GIL: taking it back costs more
constexpr int64_t kThreadBytes = int64_t{1} << 20;  // per thread: less is not worth waking one
constexpr size_t kAhead = 8;                        // leaves
constexpr int64_t kPrefetchBytes =
    512;  // of a copy, while the one before it runs: the processor sees the rest coming
constexpr int64_t kChunkBytes = int64_t{64} << 10;  // what a thread takes at a time

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

// Writes past the caches: what a device reads next need not be fetched before it is overwritten,
// nor out of another core's cache afterwards.
void RunPastCaches(const FlatCopy& copy) {
#if defined(__SSE2__)
  if (reinterpret_cast<uintptr_t>(copy.dst) % 16 == 0) {
    int64_t at = 0;
    for (; at + 64 <= copy.nbytes; at += 64) {
      const auto* from = reinterpret_cast<const __m128i*>(copy.src + at);
      auto* to = reinterpret_cast<__m128i*>(copy.dst + at);
      const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
      const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
      _mm_stream_si128(to, a);
      _mm_stream_si128(to + 1, b);
      _mm_stream_si128(to + 2, c);
      _mm_stream_si128(to + 3, d);
    }
    std::memcpy(copy.dst + at, copy.src + at, copy.nbytes - at);
    return;
  }
#endif
  Run(copy);
}

void Fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

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

void Plan::RunAll() const {
  for (const FlatCopy& copy : flat_) Run(copy);
  for (const StridedCopy& copy : strided_) Run(copy);
}

int64_t Plan::Cut() {
  std::vector<FlatCopy> flat;
  std::vector<StridedCopy> strided;
  for (const FlatCopy& copy : flat_)
    for (int64_t at = 0; at < copy.nbytes; at += kChunkBytes)
      flat.push_back({copy.src + at, copy.dst + at, std::min(kChunkBytes, copy.nbytes - at)});
  for (const StridedCopy& copy : strided_) Split(copy, &strided);
  flat_ = std::move(flat);
  strided_ = std::move(strided);
  // Both lists ascend. Small neighbours share a chunk.
  size_t i = 0, j = 0;
  int64_t taken = kChunkBytes;
  while (i < flat_.size() || j < strided_.size()) {
    const bool is_flat =
        j == strided_.size() || (i < flat_.size() && flat_[i].dst < strided_[j].dst);
    const char* dst = is_flat ? flat_[i].dst : strided_[j].dst;
    if (taken >= kChunkBytes) {
      chunks_.push_back({chunks_.empty() ? 0 : dst - lo_, i, j});
      taken = 0;
    }
    taken += is_flat ? flat_[i++].nbytes : strided_[j++].nbytes();
  }
  chunks_.push_back({hi_ - lo_, flat_.size(), strided_.size()});
  return static_cast<int64_t>(chunks_.size()) - 1;
}

void Plan::RunChunk(int64_t chunk) const {
  const Chunk &from = chunks_[chunk], &to = chunks_[chunk + 1];
  for (size_t i = from.flat; i < to.flat; ++i) {
    if (i + 1 < to.flat) {
      const FlatCopy& next = flat_[i + 1];
      for (int64_t at = 0; at < std::min(next.nbytes, kPrefetchBytes); at += 64)
        __builtin_prefetch(next.src + at);
    }
    past_caches_ ? RunPastCaches(flat_[i]) : Run(flat_[i]);
  }
  for (size_t i = from.strided; i < to.strided; ++i) Run(strided_[i]);
  if (past_caches_) Fence();
}

int64_t Plan::ChunkBegin(int64_t chunk) const { return chunks_[chunk].begin; }

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
  const size_t n = layout.entries.size();
  for (size_t i = 0; i < n; ++i) {
    const Entry& entry = layout.entries[i];
    int dtype = kNoDtype;
    if (i + 2 * kAhead < n) PrefetchObject(leaves[i + 2 * kAhead]);
    if (i + kAhead < n && Py_TYPE(leaves[i + kAhead]) == array_type_) {
      const auto* next = py::detail::array_proxy(leaves[i + kAhead]);
      __builtin_prefetch(next->dimensions);
    }
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

int Leaves::Threads(int64_t bytes, int max_threads) {
  return static_cast<int>(std::min<int64_t>(max_threads, bytes / kThreadBytes));
}

void Leaves::RunPlan(Plan plan, int max_threads) {
  if (plan.bytes() < kReleaseBytes) return plan.RunAll();
  held_.assign(items_, items_ + size_);
  for (PyObject* item : held_) Py_INCREF(item);
  py::gil_scoped_release release;
  const int threads = Threads(plan.bytes(), max_threads);
  if (threads <= 1) return plan.RunAll();
  const auto job = std::make_shared<Job>(std::move(plan));
  job->Start(threads);
  job->Complete();
}

}  // namespace recom::packing
