// Host packing (packing.h). Three parts, top to bottom: what a pack looks like (Layout), how leaves
// are checked and copied (Plan), and who may touch a staging slot when (Ring, Occupancy, Lease).
#include "packing.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "program.h"

namespace {

namespace py = pybind11;
using py::detail::npy_api;

constexpr int64_t kPage = 4096;
constexpr int64_t kHugePage = int64_t{2} << 20;
constexpr int64_t kReleaseBytes = 32
                                  << 10;  // shorter copies keep the GIL: taking it back costs more
constexpr int64_t kThreadBytes = int64_t{4} << 20;  // longer ones get a second thread
constexpr int64_t kChunkBytes = int64_t{1} << 20;   // what a thread takes at a time
constexpr int64_t kMaxBytes = int64_t{1} << 48;     // so that no sum of sizes can overflow

int64_t RoundUp(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// ----------------------------------------------------------------------------------------------------
// dtypes

// program.h's numbers, under the names used here.
enum Dtype : int {
  kNoDtype = -1,
  kPred = recom::dtype::k_PRED,
  kS8 = recom::dtype::k_S8,
  kS16 = recom::dtype::k_S16,
  kS32 = recom::dtype::k_S32,
  kS64 = recom::dtype::k_S64,
  kU8 = recom::dtype::k_U8,
  kU16 = recom::dtype::k_U16,
  kU32 = recom::dtype::k_U32,
  kU64 = recom::dtype::k_U64,
  kF16 = recom::dtype::k_F16,
  kF32 = recom::dtype::k_F32,
  kF64 = recom::dtype::k_F64,
  kBF16 = recom::dtype::k_BF16,
};

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

int Bf16TypeNum() {  // numpy's number of ml_dtypes.bfloat16, assigned when ml_dtypes registers it;
                     // -1 without it
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

int DtypeOf(int type_num, int bf16_type_num) {
  switch (type_num) {
    case npy_api::NPY_BOOL_:
      return kPred;
    case npy_api::NPY_BYTE_:
      return kS8;
    case npy_api::NPY_UBYTE_:
      return kU8;
    case npy_api::NPY_SHORT_:
      return kS16;
    case npy_api::NPY_USHORT_:
      return kU16;
    case npy_api::NPY_INT_:
      return kS32;
    case npy_api::NPY_UINT_:
      return kU32;
    case npy_api::NPY_LONG_:
      return sizeof(long) == 8 ? kS64 : kS32;
    case npy_api::NPY_ULONG_:
      return sizeof(long) == 8 ? kU64 : kU32;
    case npy_api::NPY_LONGLONG_:
      return kS64;
    case npy_api::NPY_ULONGLONG_:
      return kU64;
    case npy_api::NPY_FLOAT_:
      return kF32;
    case npy_api::NPY_DOUBLE_:
      return kF64;
    case 23 /* NPY_HALF */:
      return kF16;
    default:
      return bf16_type_num >= 0 && type_num == bf16_type_num ? kBF16 : kNoDtype;
  }
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

bool NativeOrder(char order) {
  const uint16_t one = 1;
  const bool little = *reinterpret_cast<const char*>(&one) == 1;
  return order == '=' || order == '|' || order == (little ? '<' : '>');
}

// The dtype number of an xla::ffi::DataType number or of anything numpy takes for a dtype.
int ParseDtype(py::handle object) {
  if (PyLong_CheckExact(object.ptr())) {
    const int dtype = object.cast<int>();
    return ItemSize(dtype) > 0 ? dtype : kNoDtype;
  }
  const auto dtype = py::dtype::from_args(py::reinterpret_borrow<py::object>(object));
  return NativeOrder(dtype.byteorder()) ? DtypeOf(dtype.num(), Bf16TypeNum()) : kNoDtype;
}

// ----------------------------------------------------------------------------------------------------
// layout

struct Entry {
  int dtype = kNoDtype;
  int rank = 0;
  int64_t dims[kPackMaxRank] = {};
  int64_t offset = 0;
  int64_t nbytes = 0;
};

struct Layout {
  std::vector<Entry> entries;
  int64_t header_bytes = 0;
  int64_t total_bytes = 0;
  size_t hash = 0;

  void Append(int dtype, int rank, const int64_t* dims) {
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

  void Finish() {
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

  void WriteHeader(char* to) const {
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

  const Entry& At(int64_t i) const {
    if (i < 0 || i >= static_cast<int64_t>(entries.size()))
      throw py::index_error("entry " + std::to_string(i) + " of a pack of " +
                            std::to_string(entries.size()));
    return entries[i];
  }

  bool operator==(const Layout& other) const {
    return entries.size() == other.entries.size() && total_bytes == other.total_bytes &&
           hash == other.hash &&
           std::equal(entries.begin(), entries.end(), other.entries.begin(),
                      [](const Entry& a, const Entry& b) {
                        return a.dtype == b.dtype && a.rank == b.rank &&
                               std::equal(a.dims, a.dims + kPackMaxRank, b.dims);
                      });
  }
};

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

// ----------------------------------------------------------------------------------------------------
// copies

struct FlatCopy {
  const char* src;
  char* dst;
  int64_t nbytes;
};

enum class Kind : uint8_t {
  kSame,
  kLow32,
  kF64ToF32
};  // kLow32: int64 -> int32, uint64 -> uint32 (both wrap)

struct StridedCopy {
  const char* src;
  char* dst;
  Kind kind;
  int src_size, dst_size;
  int rank;
  int64_t dims[kPackMaxRank];
  int64_t strides[kPackMaxRank];  // of src, in bytes; dst is row-major

  int64_t Count() const {
    int64_t n = 1;
    for (int i = 0; i < rank; ++i) n *= dims[i];
    return n;
  }
};

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
  const int64_t rows = n == 0 ? 0 : copy.Count() / n;
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

// What has to be copied for one pack. Built with the GIL held, run with or without it.
class Plan {
 public:
  // [lo, hi): the destination; leaves already there are left alone.
  Plan(const Layout& layout, char* lo, char* hi) : lo_(lo), hi_(hi) {
    flat_.reserve(layout.entries.size());
  }

  void Add(const py::detail::PyArray_Proxy* array, const Entry& entry, int leaf_dtype) {
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

  int64_t bytes() const { return bytes_; }

  void Execute(int max_threads) const {
    const int threads =
        static_cast<int>(std::min<int64_t>(max_threads, bytes_ / (kThreadBytes / 2)));
    if (threads <= 1 || bytes_ < kThreadBytes) {
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
    std::atomic<size_t> next{0};
    auto drain = [&] {
      const size_t total = flat.size() + strided.size();
      for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < total;)
        i < flat.size() ? Run(flat[i]) : Run(strided[i - flat.size()]);
    };
    std::vector<std::thread> helpers;
    helpers.reserve(threads - 1);
    try {
      for (int i = 1; i < threads; ++i) helpers.emplace_back(drain);
    } catch (const std::system_error&) {  // no thread to be had: this one does it all
    }
    drain();
    for (std::thread& helper : helpers) helper.join();
  }

 private:
  static StridedCopy Strided(const py::detail::PyArray_Proxy* array, const Entry& entry,
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

  static void Split(const StridedCopy& copy, std::vector<StridedCopy>* out) {
    const int64_t nbytes = copy.Count() * copy.dst_size;
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

  char* const lo_;
  char* const hi_;
  int64_t bytes_ = 0;
  std::vector<FlatCopy> flat_;
  std::vector<StridedCopy> strided_;
  std::vector<std::unique_ptr<char[]>> temporaries_;
};

// Leaves checked against a layout, through numpy's C structs alone: no Python attribute is read.
class Checker {
 public:
  explicit Checker(bool narrow)
      : array_type_(npy_api::get().PyArray_Type_), bf16_type_num_(Bf16TypeNum()), narrow_(narrow) {}

  // `leaf`'s struct and dtype if it is exactly a numpy.ndarray of native byte order, otherwise
  // null.
  const py::detail::PyArray_Proxy* Array(PyObject* leaf, int* dtype) const {
    if (Py_TYPE(leaf) != array_type_) return nullptr;
    const auto* array = py::detail::array_proxy(leaf);
    const auto* descr = py::detail::array_descriptor_proxy(array->descr);
    if (!NativeOrder(descr->byteorder)) return nullptr;
    *dtype = DtypeOf(descr->type_num, bf16_type_num_);
    return *dtype == kNoDtype ? nullptr : array;
  }

  // The index of the first leaf that doesn't fit its entry, or -1; `plan`, if any, gets the copies.
  int64_t Check(const Layout& layout, PyObject* const* leaves, Plan* plan) const {
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

 private:
  bool Converts(int from, int to) const {
    if (from == to) return true;
    return narrow_ && ((from == kS64 && to == kS32) || (from == kU64 && to == kU32) ||
                       (from == kF64 && to == kF32));
  }

  PyTypeObject* const array_type_;
  const int bf16_type_num_;
  const bool narrow_;
};

// The items of a list or tuple, each kept alive while the GIL is released.
class Leaves {
 public:
  Leaves(const py::object& sequence, size_t want, const char* what) {
    if (!PyList_Check(sequence.ptr()) && !PyTuple_Check(sequence.ptr()))
      throw py::type_error(std::string(what) + " takes a list or tuple of leaves");
    items_ = PySequence_Fast_ITEMS(sequence.ptr());
    size_ = PySequence_Fast_GET_SIZE(sequence.ptr());
    if (size_ != want)
      throw py::value_error(std::string(what) + ": the layout has " + std::to_string(want) +
                            " entries, " + std::to_string(size_) + " leaves were given");
  }
  Leaves(const Leaves&) = delete;
  ~Leaves() {
    for (PyObject* item : held_) Py_DECREF(item);
  }

  PyObject* const* items() const { return items_; }

  void RunPlan(const Plan& plan, int max_threads) {
    if (plan.bytes() < kReleaseBytes) return plan.Execute(1);
    held_.assign(items_, items_ + size_);
    for (PyObject* item : held_) Py_INCREF(item);
    py::gil_scoped_release release;
    plan.Execute(max_threads);
  }

 private:
  PyObject** items_ = nullptr;
  size_t size_ = 0;
  std::vector<PyObject*> held_;
};

// ----------------------------------------------------------------------------------------------------
// memory

std::atomic<int64_t> live_bytes{0};

class Memory {
 public:
  explicit Memory(int64_t nbytes) : nbytes_(std::max(RoundUp(nbytes, kPage), kPage)) {
    void* data = nullptr;
    const bool huge = nbytes_ >= 2 * kHugePage;
    if (posix_memalign(&data, huge ? kHugePage : kPage, nbytes_) != 0) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    if (huge)
      madvise(data, nbytes_, MADV_HUGEPAGE);  // lookups are random: fewer TLB misses; only a hint
#endif
    data_ = static_cast<char*>(data);
    live_bytes += nbytes_;
  }
  Memory(const Memory&) = delete;
  ~Memory() {
    std::free(data_);
    live_bytes -= nbytes_;
  }
  char* data() const { return data_; }
  int64_t nbytes() const { return nbytes_; }

 private:
  char* data_;
  const int64_t nbytes_;
};

// A capsule that owns `*owned`. Its destructor runs with the GIL held and takes no lock that is
// held while waiting for the GIL.
template <typename T>
py::capsule Own(T owned) {
  return py::capsule(new T(std::move(owned)), [](void* p) { delete static_cast<T*>(p); });
}

py::array BytesOver(char* data, int64_t nbytes, const py::capsule& owner) {
  py::array array(py::dtype(npy_api::NPY_UINT8_), std::vector<py::ssize_t>{nbytes},
                  std::vector<py::ssize_t>{1}, data, owner);
  py::detail::array_proxy(array.ptr())->flags &= ~npy_api::NPY_ARRAY_WRITEABLE_;
  return array;
}

py::array BuildArena(const py::object& entries, std::shared_ptr<Layout> layout) {
  const Checker checker(/*narrow=*/true);
  const bool given = layout != nullptr;
  Leaves leaves(entries, given ? layout->entries.size() : py::len(entries), "build_arena");
  if (!given) {
    layout = std::make_shared<Layout>();
    for (size_t i = 0, n = py::len(entries); i < n; ++i) {
      int dtype = kNoDtype;
      const auto* array = checker.Array(leaves.items()[i], &dtype);
      if (array == nullptr)
        throw py::value_error(
            "entry " + std::to_string(i) +
            ": expected a plain numpy.ndarray of native byte order and a dtype that packs");
      layout->Append(dtype, array->nd, reinterpret_cast<const int64_t*>(array->dimensions));
    }
    layout->Finish();
  }
  const auto memory = std::make_shared<Memory>(layout->total_bytes);
  char* const data = memory->data();
  layout->WriteHeader(data);
  for (const Entry& entry : layout->entries)
    std::memset(data + entry.offset + entry.nbytes, 0,
                RoundUp(entry.nbytes, kPackAlign) - entry.nbytes);
  Plan plan(*layout, data, data + layout->total_bytes);
  const int64_t bad = checker.Check(*layout, leaves.items(), &plan);
  if (bad >= 0) throw py::value_error("entry " + std::to_string(bad) + " doesn't fit the layout");
  leaves.RunPlan(plan, std::clamp<int>(std::thread::hardware_concurrency(), 1, 8));
  return BytesOver(data, layout->total_bytes, Own(memory));
}

// ----------------------------------------------------------------------------------------------------
// the ring
//
// A slot is handed out by Ring::Take as a Lease and is free again when its Occupancy dies. An
// Occupancy is shared by the lease until it is consumed or released, by the array given to JAX, and
// by every view. JAX aliases that array's memory and keeps the array until it is done with it, so
// the slot can't be taken before.

struct Lease;
struct Ring;

// Every live ring by its memory's address, so that a leased view is recognised whoever owns its
// ring.
struct Registry {
  std::mutex
      mutex;  // a leaf lock: nothing else is taken, and no shared_ptr dropped, while it is held
  std::map<uintptr_t, std::weak_ptr<Ring>> rings;
  static Registry& Get() {
    static Registry* registry =
        new Registry;  // never destroyed: rings may die after static destruction began
    return *registry;
  }
};

struct Ring : std::enable_shared_from_this<Ring> {
  Ring(std::shared_ptr<Layout> layout_in, int n_slots)
      : layout(std::move(layout_in)),
        stride(RoundUp(layout->total_bytes + kPackAlign,
                       kPage)),  // + 64: empty entries at the end lie inside, too
        memory(stride * n_slots),
        leases(n_slots),
        ready(n_slots, 0) {
    for (int i = n_slots - 1; i >= 0; --i) free.push_back(i);
  }

  ~Ring() {
    std::lock_guard<std::mutex> lock(Registry::Get().mutex);
    Registry::Get().rings.erase(address());
  }

  static std::shared_ptr<Ring> Make(std::shared_ptr<Layout> layout, int n_slots) {
    if (n_slots < 1 || n_slots > (1 << 16)) throw py::value_error("a ring has 1 to 65,536 slots");
    auto ring = std::make_shared<Ring>(std::move(layout), n_slots);
    std::lock_guard<std::mutex> lock(Registry::Get().mutex);
    Registry::Get().rings[ring->address()] = ring;
    return ring;
  }

  // The slot whose memory holds the address, or -1.
  int FindSlot(uintptr_t at) const {
    return at - address() < static_cast<uintptr_t>(stride * size())
               ? static_cast<int>((at - address()) / stride)
               : -1;
  }

  uintptr_t address() const { return reinterpret_cast<uintptr_t>(memory.data()); }

  std::shared_ptr<Lease> Take();

  char* Data(int slot) const { return memory.data() + slot * stride; }
  int size() const { return static_cast<int>(leases.size()); }

  void GiveBack(int slot) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      free.push_back(slot);
    }
    changed.notify_one();
  }

  void Wait(std::chrono::microseconds most) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait_for(lock, most, [this] { return !free.empty(); });
  }

  const std::shared_ptr<Layout> layout;
  const int64_t stride;
  const Memory memory;
  std::mutex mutex;  // of what follows; no Python is called, and no shared_ptr of ours dropped,
                     // while it is held
  std::condition_variable changed;
  std::vector<int> free;  // the last one given back is taken first: it is warm
  std::vector<std::weak_ptr<Lease>> leases;
  std::vector<char> ready;  // header written, rest zeroed: at a slot's first use
};

struct Occupancy {
  std::shared_ptr<Ring> ring;
  int slot = -1;
  ~Occupancy() {
    if (slot >= 0) ring->GiveBack(slot);
  }
};

// One use of a slot: what Python calls a Slot. Leased until it is consumed (array()) or released.
struct Lease {
  enum State : int { kLeased, kPacking, kConsumed, kReleased };

  std::shared_ptr<Ring> ring;
  int slot = -1;
  std::atomic<int> state{kLeased};
  bool frozen = false;
  std::vector<PyObject*> views;  // borrowed; a view's capsule clears its place
  std::weak_ptr<Occupancy> occupancy;
  std::shared_ptr<Occupancy> hold;  // gone once consumed or released

  char* data() const { return ring->Data(slot); }

  void Enter(State next, const char* what) {
    int expected = kLeased;
    if (state.compare_exchange_strong(expected, next)) return;
    throw std::runtime_error("slot " + std::to_string(slot) + ": " + what +
                             " needs a leased slot; this lease " +
                             (expected == kPacking    ? "is being packed by another thread"
                              : expected == kConsumed ? "was consumed (its array was given out)"
                                                      : "was released"));
  }

  void Freeze() {
    frozen = true;
    for (PyObject* view : views)
      if (view != nullptr) py::detail::array_proxy(view)->flags &= ~npy_api::NPY_ARRAY_WRITEABLE_;
  }

  const char* StateName() const {
    const int now = state;
    if (now == kLeased || now == kPacking) return "leased";
    if (occupancy.expired()) return "free";
    return now == kConsumed ? "in_flight" : "leased";  // released, but views are still around
  }
};

std::shared_ptr<Lease> Ring::Take() {
  auto lease = std::make_shared<Lease>();
  auto hold = std::make_shared<Occupancy>();
  hold->ring = lease->ring = shared_from_this();
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (free.empty()) return nullptr;
    hold->slot = lease->slot = free.back();
    free.pop_back();
    leases[lease->slot] = lease;
  }
  lease->occupancy = hold;
  lease->hold = std::move(hold);
  if (!ready[lease->slot]) {
    std::memset(lease->data(), 0, stride);
    layout->WriteHeader(lease->data());
    ready[lease->slot] = 1;
  }
  return lease;
}

// jaxlib drops references it held for an execution only when some thread next enters it from
// Python; its gc callback is one such entry, and the cheapest (1 us for generation 0).
void CollectGarbage(int generation) { py::module_::import("gc").attr("collect")(generation); }

std::shared_ptr<Lease> TryAcquire(Ring& ring) {
  if (auto lease = ring.Take()) return lease;
  CollectGarbage(0);
  return ring.Take();
}

std::vector<std::string> States(Ring& ring) {
  std::vector<std::shared_ptr<Lease>> leases(ring.size());  // dropped after the lock
  std::vector<std::string> states(ring.size(), "in_flight");
  {
    std::lock_guard<std::mutex> lock(ring.mutex);
    for (int i = 0; i < ring.size(); ++i) leases[i] = ring.leases[i].lock();
    for (int slot : ring.free) states[slot] = "free";
  }
  for (int i = 0; i < ring.size(); ++i)
    if (states[i] != "free" && leases[i] && leases[i]->state != Lease::kConsumed)
      states[i] = "leased";
  return states;
}

std::shared_ptr<Lease> Acquire(Ring& ring, std::optional<double> timeout_s) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  auto elapsed = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  const double limit = timeout_s.value_or(1e9);
  auto step = std::chrono::microseconds(50);
  double next_full =
      0.1;  // views caught in reference cycles (a traceback, say) need a full collection
  for (;;) {
    if (auto lease = TryAcquire(ring)) return lease;
    if (elapsed() > next_full) {
      next_full = elapsed() + 2.0;
      CollectGarbage(2);
      if (auto lease = ring.Take()) return lease;
    }
    const double left = limit - elapsed();
    if (!(left > 0)) break;
    {
      py::gil_scoped_release release;
      ring.Wait(std::min(
          step, std::chrono::microseconds(static_cast<int64_t>(std::min(left, 1.0) * 1e6) + 1)));
    }
    step = std::min(step * 2, std::chrono::microseconds(2000));
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
  const auto states = States(ring);
  const std::string message =
      "no staging slot became free within " + std::to_string(limit) + " s: of " +
      std::to_string(ring.size()) + " slots " +
      std::to_string(std::count(states.begin(), states.end(), "leased")) + " are leased and " +
      std::to_string(std::count(states.begin(), states.end(), "in_flight")) +
      " in flight. A slot is free once its call has finished and every view of it is gone: drop "
      "the views of "
      "consumed leases, or make the ring larger";
  PyErr_SetString(PyExc_TimeoutError, message.c_str());
  throw py::error_already_set();
}

py::array TakeArray(Lease& lease) {
  // The capsule is made first: nothing may fail between giving up the lease and handing out the
  // array.
  const py::capsule owner = Own(lease.occupancy.lock());
  lease.Enter(Lease::kConsumed, "array()");
  lease.Freeze();
  try {
    py::array array = BytesOver(lease.data(), lease.ring->layout->total_bytes, owner);
    lease.hold.reset();
    return array;
  } catch (...) {
    lease.state = Lease::kLeased;
    throw;
  }
}

std::atomic<int64_t> live_views{0};

struct ViewHold {
  std::shared_ptr<Lease> lease;
  std::shared_ptr<Occupancy> occupancy;
  size_t place;
  ViewHold(std::shared_ptr<Lease> lease_in, size_t place_in)
      : lease(std::move(lease_in)), occupancy(lease->hold), place(place_in) {
    ++live_views;
  }
  ~ViewHold() {
    --live_views;
    lease->views[place] = nullptr;
  }
};

py::array ViewOf(const std::shared_ptr<Lease>& lease, int64_t i) {
  const Entry& entry = lease->ring->layout->At(i);
  if (lease->frozen && lease->state == Lease::kLeased)
    throw std::runtime_error("slot " + std::to_string(lease->slot) + ": view() after freeze()");
  lease->Enter(Lease::kLeased, "view()");
  const size_t place = lease->views.size();
  lease->views.push_back(nullptr);
  const py::capsule owner = Own(std::make_unique<ViewHold>(lease, place));
  std::vector<py::ssize_t> shape(entry.dims, entry.dims + entry.rank);
  py::array view(py::dtype(TypeNumOf(entry.dtype)), std::move(shape), std::vector<py::ssize_t>{},
                 lease->data() + entry.offset, owner);
  lease->views[place] = view.ptr();
  return view;
}

bool Release(Lease& lease) {
  if (lease.state == Lease::kConsumed || lease.state == Lease::kReleased) return false;
  lease.Enter(Lease::kReleased, "release()");
  lease.Freeze();
  lease.hold.reset();
  return true;
}

struct Packer {
  std::shared_ptr<Layout> layout;
  bool narrow;

  int64_t Matches(const py::object& leaves) const {
    return Checker(narrow).Check(*layout, Leaves(leaves, layout->entries.size(), "matches").items(),
                                 nullptr);
  }

  int64_t PackInto(const std::shared_ptr<Lease>& lease, const py::object& sequence) const {
    if (lease->ring->layout != layout && !(*lease->ring->layout == *layout))
      throw py::value_error("pack_into: the slot has another layout");
    Leaves leaves(sequence, layout->entries.size(), "pack_into");
    lease->Enter(Lease::kPacking, "pack_into()");
    struct Done {
      Lease& lease;
      ~Done() { lease.state = Lease::kLeased; }
    } done{*lease};
    Plan plan(*layout, lease->data(), lease->data() + layout->total_bytes);
    const int64_t bad = Checker(narrow).Check(*layout, leaves.items(), &plan);
    if (bad < 0) leaves.RunPlan(plan, /*max_threads=*/2);
    return bad;
  }
};

// The live lease, consumed or not, whose slot an ndarray's data lie in; null for anything else.
std::shared_ptr<Lease> LeaseOf(py::handle object) {
  if (!npy_api::get().PyArray_Check_(object.ptr())) return nullptr;
  const auto at = reinterpret_cast<uintptr_t>(py::detail::array_proxy(object.ptr())->data);
  std::shared_ptr<Ring> ring;
  {
    std::lock_guard<std::mutex> lock(Registry::Get().mutex);
    auto after = Registry::Get().rings.upper_bound(at);
    if (after == Registry::Get().rings.begin()) return nullptr;
    ring = std::prev(after)->second.lock();
  }
  const int slot = ring ? ring->FindSlot(at) : -1;
  if (slot < 0) return nullptr;
  std::lock_guard<std::mutex> lock(ring->mutex);
  return ring->leases[slot].lock();
}

// The lease of the first leaf that lies in a slot, if any. Free of charge while no view is alive.
std::shared_ptr<Lease> LeaseAmong(const py::object& leaves) {
  if (live_views == 0) return nullptr;
  if (!PyList_Check(leaves.ptr()) && !PyTuple_Check(leaves.ptr()))
    throw py::type_error("lease_among takes a list or tuple of leaves");
  PyObject* const* items = PySequence_Fast_ITEMS(leaves.ptr());
  for (py::ssize_t i = 0, n = PySequence_Fast_GET_SIZE(leaves.ptr()); i < n; ++i) {
    // A view has a base; an array that owns its memory cannot lie in a slot.
    if (Py_TYPE(items[i]) == npy_api::get().PyArray_Type_ &&
        py::detail::array_proxy(items[i])->base == nullptr)
      continue;
    if (auto lease = LeaseOf(items[i])) return lease;
  }
  return nullptr;
}

}  // namespace

void bind_packing(py::module_& module) {
  module.attr("PACK_MAGIC") = recom::kPackMagic;
  module.attr("PACK_MAX_RANK") = kPackMaxRank;
  module.attr("PACK_ALIGN") = kPackAlign;

  auto per_entry = [](auto get) {
    return [get](const Layout& layout) {
      py::tuple out(layout.entries.size());
      for (size_t i = 0; i < layout.entries.size(); ++i) out[i] = get(layout.entries[i]);
      return out;
    };
  };
  py::class_<Layout, std::shared_ptr<Layout>>(module, "Layout",
                                              "What a pack looks like. Immutable, hashable.")
      .def(py::init(&MakeLayout), py::arg("entries"),
           "entries: (dtype or its XLA number, shape) pairs")
      .def_readonly("total_bytes", &Layout::total_bytes)
      .def_readonly("header_bytes", &Layout::header_bytes)
      .def_property_readonly("offsets",
                             per_entry([](const Entry& e) { return py::int_(e.offset); }))
      .def_property_readonly("nbytes", per_entry([](const Entry& e) { return py::int_(e.nbytes); }))
      .def_property_readonly("dtypes", per_entry([](const Entry& e) { return py::int_(e.dtype); }))
      .def_property_readonly("shapes", per_entry([](const Entry& e) { return ShapeOf(e); }))
      .def(
          "offset", [](const Layout& layout, int64_t i) { return layout.At(i).offset; },
          py::arg("i"))
      .def(
          "entry_bytes", [](const Layout& layout, int64_t i) { return layout.At(i).nbytes; },
          py::arg("i"))
      .def(
          "dtype", [](const Layout& l, int64_t i) { return py::dtype(TypeNumOf(l.At(i).dtype)); },
          py::arg("i"))
      .def(
          "shape", [](const Layout& layout, int64_t i) { return ShapeOf(layout.At(i)); },
          py::arg("i"))
      .def("__len__", [](const Layout& layout) { return layout.entries.size(); })
      .def("__hash__",
           [](const Layout& layout) { return static_cast<py::ssize_t>(layout.hash >> 1); })
      .def("__eq__",
           [](const Layout& a, const py::object& b) {
             return py::isinstance<Layout>(b) && a == b.cast<const Layout&>();
           })
      .def("__repr__", [](const Layout& layout) {
        return "Layout(" + std::to_string(layout.entries.size()) + " entries, " +
               std::to_string(layout.total_bytes) + " bytes)";
      });

  py::class_<Lease, std::shared_ptr<Lease>>(
      module, "Slot", "One use of a staging slot: fill it, then array() once.")
      .def("array", &TakeArray,
           "The slot's bytes, for JAX; consumes the lease and freezes its views.")
      .def("view", &ViewOf, py::arg("i"), "A writable numpy view of entry i.")
      .def("freeze", &Lease::Freeze, "Makes every view given out read-only.")
      .def("release", &Release,
           "Gives an unused lease up; False if it was consumed or released before.")
      .def_readonly("index", &Lease::slot)
      .def_property_readonly("state", &Lease::StateName, "'leased', 'in_flight' or 'free'")
      .def_property_readonly("layout", [](const Lease& lease) { return lease.ring->layout; })
      .def_property_readonly("address",
                             [](const Lease& l) { return reinterpret_cast<uintptr_t>(l.data()); });

  py::class_<Ring, std::shared_ptr<Ring>>(module, "SlotRing",
                                          "Staging slots of one layout. Thread-safe.")
      .def(py::init(&Ring::Make), py::arg("layout").none(false), py::arg("n_slots"))
      .def("acquire", &Acquire, py::arg("timeout_s") = py::none(),
           "Waits for a free slot; TimeoutError after that.")
      .def("try_acquire", &TryAcquire, "A free slot or None.")
      .def("find_slot", &Ring::FindSlot, py::arg("address"),
           "The slot whose memory holds the address, or -1.")
      .def("states", &States, "'free', 'leased' or 'in_flight' per slot.")
      .def_property_readonly("n_slots", &Ring::size)
      .def_property_readonly("layout", [](const Ring& ring) { return ring.layout; })
      .def_property_readonly("nbytes", [](const Ring& ring) { return ring.memory.nbytes(); })
      .def_property_readonly("n_free", [](Ring& ring) {
        std::lock_guard<std::mutex> lock(ring.mutex);
        return ring.free.size();
      });

  py::class_<Packer>(module, "Packer", "Gathers numpy leaves into slots of one layout.")
      .def(py::init([](std::shared_ptr<Layout> layout, bool narrow) {
             return Packer{std::move(layout), narrow};
           }),
           py::arg("layout").none(false), py::arg("narrow") = true,
           "narrow: convert 64-bit leaves as jit does with x64 off")
      .def("matches", &Packer::Matches, py::arg("leaves"),
           "-1, or the index of the first leaf that doesn't fit.")
      .def("pack_into", &Packer::PackInto, py::arg("slot").none(false), py::arg("leaves"),
           "Like matches, and copies the leaves if all fit.");

  module.def("build_arena", &BuildArena, py::arg("entries"), py::arg("layout") = py::none(),
             "A pack of numpy arrays, as a read-only uint8 array.");
  module.def(
      "arena_bytes", [](const py::iterable& specs) { return MakeLayout(specs)->total_bytes; },
      py::arg("specs"));
  module.def("lease_of", &LeaseOf, py::arg("array"),
             "The Slot that leased an array's memory (any ring's), or None.");
  module.def("lease_among", &LeaseAmong, py::arg("leaves"),
             "lease_of the first leaf that lies in a slot, or None.");
  module.def(
      "live_pack_bytes", [] { return live_bytes.load(); },
      "Bytes of all rings and arenas that are alive.");
}
