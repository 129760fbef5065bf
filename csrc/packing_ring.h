// Part of packing.h: staging slots, and who may touch one when.
//
// A slot is handed out by Ring::Take as a Lease and is free again when its Occupancy dies. An
// Occupancy is shared by the lease until it is consumed or released, by the array given to JAX, and
// by every view. JAX aliases that array's memory and keeps the array until it is done with it, so
// the slot can't be taken before.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cuda_stage.h"
#include "packing_copy.h"
#include "packing_job.h"
#include "packing_layout.h"
#include "packing_memory.h"

namespace recom::packing {

struct Lease;
struct Ring;

// Every live ring by its memory's address, so that a leased view is recognised whoever owns its
// ring.
struct Registry {
  // A leaf lock: nothing else is taken, and no shared_ptr dropped, while it is held.
  std::mutex mutex;
  std::map<uintptr_t, std::weak_ptr<Ring>> rings;
  static Registry& Get() {
    // Never destroyed: rings may die after static destruction began.
    static Registry* registry = new Registry;
    return *registry;
  }
};

struct Ring : std::enable_shared_from_this<Ring> {
  Ring(std::shared_ptr<Layout> layout_in, int n_slots)
      : layout(std::move(layout_in)),
        // + 64: empty entries at the end lie inside, too.
        stride(RoundUp(layout->total_bytes + kPackAlign, kPage)),
        memory(stride * n_slots),
        leases(n_slots),
        ready(n_slots, 0),
        pinned(n_slots, 0),
        uploads(n_slots) {
    for (int i = n_slots - 1; i >= 0; --i) free.push_back(i);
    for (int i = 0; i < n_slots; ++i) feeds.push_back(std::make_shared<StageFeed>());
  }

  ~Ring() {
    stage_forget(this);
    for (const auto& of_slot : uploads)
      for (const auto& upload : of_slot) upload->Drain();
    for (int i = 0; i < size(); ++i)
      if (pinned[i]) unpin_memory(Data(i));
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
  // Of what follows; no Python is called, and no shared_ptr of ours dropped, while it is held.
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<int> free;  // the last one given back is taken first: it is warm
  std::vector<std::weak_ptr<Lease>> leases;
  std::vector<char> ready;  // header written, rest zeroed: at a slot's first use
  std::vector<std::shared_ptr<StageFeed>> feeds;  // never changed: who writes a slot
  // Under the GIL, of a slot by who has leased it.
  std::vector<char> pinned;                                   // page-locked
  std::vector<std::vector<std::shared_ptr<Upload>>> uploads;  // to the devices it was sent to
  py::dict tokens;  // Python's: what a slot is called on a device
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

// A full collection, which holds the GIL for as long as the heap is large: one in two seconds,
// however many threads wait. False if it was not yet time. Called under the GIL.
bool CollectAll();
// A free slot, or null.
std::shared_ptr<Lease> TryAcquire(Ring& ring);
// Waits for one; raises TimeoutError after that long. `waited_s`: what the caller waited before.
std::shared_ptr<Lease> Acquire(Ring& ring, std::optional<double> timeout_s, double waited_s);
// "free", "leased" or "in_flight" for each slot.
std::vector<std::string> States(Ring& ring);

// The slot's bytes, for JAX; consumes the lease.
py::array TakeArray(Lease& lease);
// Writable arrays over entries.
py::array ViewOf(const std::shared_ptr<Lease>& lease, int64_t i);
py::list ViewsOf(const std::shared_ptr<Lease>& lease);
// Makes the lease's slot the one that calls with a token at this address read. With a device, the
// slot's memory is page-locked at the first time; "" or why that failed. `uploads`: the token is as
// large as the slot, which is copied into it before the call begins.
std::string RegisterToken(Lease& lease, uintptr_t token, int device, bool uploads);
// Begins to copy the slot to the device, for the call that will be handed this token: the Packing
// under way, or None where that call copies the slot itself.
py::object UploadNow(Lease& lease, uintptr_t token, int64_t spin_us);
// Gives an unused lease up; false if it was consumed or released before.
bool Release(Lease& lease);

// The live lease, consumed or not, whose slot an ndarray's data lie in; null for anything else.
std::shared_ptr<Lease> LeaseOf(py::handle object);
// The lease of the first leaf that lies in a slot, if any. Free of charge while no view is alive.
std::shared_ptr<Lease> LeaseAmong(const py::object& leaves);
int64_t LiveViews();

// A batch that is copied into its slot. Its leaves and the slot are kept until `Join`, which the
// destructor calls, too.
class Packing {
 public:
  Packing(std::shared_ptr<Job> job, py::object leaves, std::shared_ptr<Occupancy> slot)
      : job_(std::move(job)), leaves_(std::move(leaves)), slot_(std::move(slot)) {}
  Packing(const Packing&) = delete;
  ~Packing();
  // Returns once every leaf was read, and may be written again. Throws what a copy threw.
  void Join();

 private:
  std::shared_ptr<Job> job_;
  py::object leaves_;
  std::shared_ptr<Occupancy> slot_;
};

struct Packer {
  std::shared_ptr<Layout> layout;
  bool narrow;

  int64_t Matches(const py::object& leaves) const;

  int64_t PackInto(const std::shared_ptr<Lease>& lease, const py::object& sequence,
                   int threads) const;

  // Begins to pack into a leased slot, and consumes it: its bytes, and the Packing under way, None
  // where all was copied at once; or the index of the first leaf that doesn't fit.
  // `token`: of the call that will read it, 0: none. `spin_us`: see Offer.
  py::object Begin(const std::shared_ptr<Lease>& lease, const py::object& sequence, int threads,
                   uintptr_t token, int64_t spin_us) const;

  // Packs into a slot that is free right now and consumes it: (the slot, its bytes). Or the index
  // of the first leaf that doesn't fit, or None if no slot is free.
  py::object Pack(Ring& ring, const py::object& sequence, int threads) const;
};

}  // namespace recom::packing
