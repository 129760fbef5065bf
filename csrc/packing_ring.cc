#include "packing_ring.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "handover.h"

namespace recom::packing {

namespace {

// jaxlib drops references it held for an execution only when some thread next enters it from
// Python; its gc callback is one such entry, and the cheapest (1 us for generation 0).
void CollectGarbage(int generation) { py::module_::import("gc").attr("collect")(generation); }

std::atomic<int64_t> live_views{0};

// Less is copied before others could help.
constexpr int64_t kOverlapBytes = int64_t{256} << 10;
// A slot so large that its copy takes longer than a call takes to begin: whoever has it issues the
// copy, as a helper that sleeps wakes late.
constexpr int64_t kIssueBytes = int64_t{4} << 20;
constexpr int64_t kHelperBytes = int64_t{192} << 10;  // each helper should have that much to copy

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

}  // namespace

bool CollectAll() {
  using Clock = std::chrono::steady_clock;
  constexpr auto pause = std::chrono::seconds(2);
  static Clock::time_point next{};
  if (Clock::now() < next) return false;
  next = Clock::now() + pause;  // the collection may run Python, and be interrupted
  CollectGarbage(2);
  next = Clock::now() + pause;
  return true;
}

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
  take_over(lease->data());
  feeds[lease->slot]->Set(nullptr);
  for (const auto& upload : uploads[lease->slot]) upload->Reset();
  if (!ready[lease->slot]) {
    std::memset(lease->data(), 0, stride);
    layout->WriteHeader(lease->data());
    ready[lease->slot] = 1;
  }
  return lease;
}

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

std::shared_ptr<Lease> Acquire(Ring& ring, std::optional<double> timeout_s, double waited_s) {
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
      if (CollectAll())
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
      "no staging slot became free within " + std::to_string(limit + waited_s) + " s: of " +
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

py::array ViewOf(const std::shared_ptr<Lease>& lease, int64_t i) {
  const Entry& entry = lease->ring->layout->At(i);
  if (lease->frozen && lease->state == Lease::kLeased)
    throw std::runtime_error("slot " + std::to_string(lease->slot) + ": view() after freeze()");
  lease->Enter(Lease::kLeased, "view()");
  const size_t place = lease->views.size();
  lease->views.push_back(nullptr);
  py::capsule owner = Own(std::make_unique<ViewHold>(lease, place));
  // Through numpy's own function, as a lease has a thousand of them; it takes over `descr`, and
  // SetBaseObject the owner.
  const auto& api = npy_api::get();
  Py_intptr_t dims[kPackMaxRank];
  std::copy_n(entry.dims, entry.rank, dims);
  py::object descr =
      py::reinterpret_steal<py::object>(api.PyArray_DescrFromType_(TypeNumOf(entry.dtype)));
  auto view = py::reinterpret_steal<py::array>(api.PyArray_NewFromDescr_(
      api.PyArray_Type_, descr.release().ptr(), entry.rank, dims, nullptr,
      lease->data() + entry.offset, npy_api::NPY_ARRAY_ALIGNED_ | npy_api::NPY_ARRAY_WRITEABLE_,
      nullptr));
  if (!view || api.PyArray_SetBaseObject_(view.ptr(), owner.release().ptr()) != 0)
    throw py::error_already_set();
  lease->views[place] = view.ptr();
  return view;
}

py::list ViewsOf(const std::shared_ptr<Lease>& lease) {
  const int64_t n = static_cast<int64_t>(lease->ring->layout->entries.size());
  py::list out(n);
  lease->views.reserve(n);
  for (int64_t i = 0; i < n; ++i) out[i] = ViewOf(lease, i);
  return out;
}

std::string RegisterToken(Lease& lease, uintptr_t token, int device, bool uploads) {
  Ring& ring = *lease.ring;
  std::string why;
  if (device >= 0 && !ring.pinned[lease.slot]) {
    why = pin_memory(lease.data(), static_cast<size_t>(ring.stride), device);
    ring.pinned[lease.slot] = why.empty();
  }
  std::shared_ptr<Upload> upload;
  if (uploads) {
    upload = std::make_shared<Upload>(lease.data(), ring.layout->total_bytes, token, device);
    ring.uploads[lease.slot].push_back(upload);
  }
  stage_register(token, {lease.data(), ring.layout->total_bytes, &ring, ring.feeds[lease.slot],
                         std::move(upload)});
  return why;
}

py::object UploadNow(Lease& lease, uintptr_t token, int64_t spin_us) {
  const Ring& ring = *lease.ring;
  const int64_t nbytes = ring.layout->total_bytes;
  auto upload = stage_source(reinterpret_cast<const void*>(token), nbytes).upload;
  if (!upload) return py::none();
  if (nbytes >= kIssueBytes) {
    upload->Issue(0, nbytes, true);
    return py::none();
  }
  // Nothing is left to copy, so that a helper's first act is to issue the piece there is. The call
  // does where there is no helper.
  Plan plan(*ring.layout, lease.data(), lease.data() + nbytes);
  const auto job = std::make_shared<Job>(std::move(plan), std::move(upload));
  auto packing = py::cast(std::make_unique<Packing>(job, py::none(), lease.occupancy.lock()));
  ring.feeds[lease.slot]->Set(job);
  job->Start(2, spin_us);
  return packing;
}

bool Release(Lease& lease) {
  if (lease.state == Lease::kConsumed || lease.state == Lease::kReleased) return false;
  lease.Enter(Lease::kReleased, "release()");
  lease.Freeze();
  lease.hold.reset();
  return true;
}

int64_t Packer::Matches(const py::object& leaves) const {
  return Checker(narrow).Check(*layout, Leaves(leaves, layout->entries.size(), "matches").items(),
                               nullptr);
}

int64_t Packer::PackInto(const std::shared_ptr<Lease>& lease, const py::object& sequence,
                         int threads) const {
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
  if (bad < 0) leaves.RunPlan(std::move(plan), threads);
  return bad;
}

py::object Packer::Begin(const std::shared_ptr<Lease>& lease, const py::object& sequence,
                         int threads, uintptr_t token, int64_t spin_us) const {
  if (lease->ring->layout != layout && !(*lease->ring->layout == *layout))
    throw py::value_error("begin: the slot has another layout");
  // A tuple holds its items, whatever else happens; a list may change while they are copied.
  const py::tuple kept = sequence;
  Leaves leaves(kept, layout->entries.size(), "begin");
  lease->Enter(Lease::kPacking, "begin()");
  struct Done {
    Lease& lease;
    ~Done() {
      if (lease.state == Lease::kPacking) lease.state = Lease::kLeased;
    }
  } done{*lease};
  Plan plan(*layout, lease->data(), lease->data() + layout->total_bytes);
  const int64_t bad = Checker(narrow).Check(*layout, leaves.items(), &plan);
  if (bad >= 0) return py::int_(bad);
  if (threads < 2 || plan.bytes() < kOverlapBytes) {
    leaves.RunPlan(std::move(plan), threads);
    lease->state = Lease::kLeased;
    py::object packing = py::none();
    if (token != 0) packing = UploadNow(*lease, token, spin_us);
    return py::make_tuple(TakeArray(*lease), std::move(packing));
  }
  const int helpers = static_cast<int>(std::min<int64_t>(threads, 1 + plan.bytes() / kHelperBytes));
  std::shared_ptr<Upload> upload;
  if (token != 0)
    upload = stage_source(reinterpret_cast<const void*>(token), layout->total_bytes).upload;
  if (upload) plan.PastCaches();
  const auto job = std::make_shared<Job>(std::move(plan), std::move(upload));
  const auto slot = lease->occupancy.lock();
  lease->state = Lease::kLeased;
  py::object array = TakeArray(*lease);
  lease->ring->feeds[lease->slot]->Set(job);
  auto packing = py::cast(std::make_unique<Packing>(job, kept, slot));
  job->Start(helpers, spin_us);  // last: whatever raises before has begun nothing
  return py::make_tuple(std::move(array), std::move(packing));
}

Packing::~Packing() {
  try {
    Join();
  } catch (...) {  // the call's own error says so
  }
}

void Packing::Join() {
  if (!job_) return;
  const std::shared_ptr<Job> job = std::move(job_);
  job_ = nullptr;
  std::exception_ptr error;
  {
    std::optional<py::gil_scoped_release> release;
    if (!job->Finished()) release.emplace();
    try {
      job->Complete();
    } catch (...) {
      error = std::current_exception();
    }
  }
  leaves_ = py::none();
  slot_ = nullptr;
  if (error) std::rethrow_exception(error);
}

py::object Packer::Pack(Ring& ring, const py::object& sequence, int threads) const {
  const auto lease = TryAcquire(ring);
  if (!lease) return py::none();
  const int64_t bad = PackInto(lease, sequence, threads);
  if (bad < 0) return py::make_tuple(lease, TakeArray(*lease));
  Release(*lease);
  return py::int_(bad);
}

int64_t LiveViews() { return live_views; }

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

}  // namespace recom::packing
