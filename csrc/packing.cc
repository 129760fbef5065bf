// The Python side of packing.h.
#include "packing.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "packing_copy.h"
#include "packing_job.h"
#include "packing_layout.h"
#include "packing_memory.h"
#include "packing_pool.h"
#include "packing_reader.h"
#include "packing_ring.h"
#include "program.h"

namespace py = pybind11;

namespace recom::packing {
namespace {

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
  leaves.RunPlan(std::move(plan), std::clamp<int>(std::thread::hardware_concurrency(), 1, 8));
  return BytesOver(data, layout->total_bytes, Own(memory));
}

}  // namespace
}  // namespace recom::packing

void bind_packing(py::module_& module) {
  using namespace recom::packing;
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
      .def("views", &ViewsOf, "Writable numpy views of every entry, in order.")
      .def("freeze", &Lease::Freeze, "Makes every view given out read-only.")
      .def("release", &Release,
           "Gives an unused lease up; False if it was consumed or released before.")
      .def("register_token", &RegisterToken, py::arg("address"), py::arg("device") = -1,
           py::arg("uploads") = false,
           "Calls with a token at this address read this slot; page-locks its memory for a CUDA "
           "device. Why that failed, or \"\".")
      .def("upload", &UploadNow, py::arg("address"), py::arg("spin_us") = 0,
           "Begins to copy the slot to the device, for the call that is handed this token.")
      .def_property_readonly(
          "tokens", [](const Lease& lease) { return lease.ring->tokens; },
          "Of the ring: a dict for whoever makes them, alive as long as its memory.")
      .def_readonly("index", &Lease::slot)
      .def_property_readonly("state", &Lease::StateName, "'leased', 'in_flight' or 'free'")
      .def_property_readonly("layout", [](const Lease& lease) { return lease.ring->layout; })
      .def_property_readonly("address",
                             [](const Lease& l) { return reinterpret_cast<uintptr_t>(l.data()); });

  py::class_<Ring, std::shared_ptr<Ring>>(module, "SlotRing",
                                          "Staging slots of one layout. Thread-safe.")
      .def(py::init(&Ring::Make), py::arg("layout").none(false), py::arg("n_slots"))
      .def("acquire", &Acquire, py::arg("timeout_s") = py::none(), py::arg("waited_s") = 0.0,
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
           py::arg("threads") = 2, "Like matches, and copies the leaves if all fit.")
      .def("begin", &Packer::Begin, py::arg("slot").none(false), py::arg("leaves"),
           py::arg("threads"), py::arg("token") = 0, py::arg("spin_us") = 0,
           "Consumes the slot: (its array, the Packing under way or None); or the index of the "
           "first "
           "leaf that doesn't fit, and then the slot is as it was.")
      .def("pack", &Packer::Pack, py::arg("ring").none(false), py::arg("leaves"),
           py::arg("threads") = 2,
           "(Slot, its array) packed and consumed; the index of the first leaf that doesn't fit; "
           "or None while no slot is free.");

  py::class_<Packing>(module, "Packing", "A batch that is being copied into its slot.")
      .def("join", &Packing::Join, "Waits until every leaf was read: they may be written again.");
  module.def(
      "stir", [](int threads, int64_t spin_us) { Stir(threads, spin_us); }, py::arg("threads"),
      py::arg("spin_us"), "Wakes packing threads for that long: a batch is about to come.");
  module.def("set_stage_piece", &SetPieceBytes, py::arg("nbytes"),
             "How much of a slot that is still being written is copied to the device at a time.");
  module.def("set_pack_delay", &SetChunkDelay, py::arg("microseconds"),
             "Tests only: each chunk of a large pack is copied that much later.");
  module.def("set_pack_fault", &SetChunkFault, py::arg("chunk"),
             "Tests only: to copy that chunk of a large pack fails; -1: none.");

  BindReader(module);
  module.def("build_arena", &BuildArena, py::arg("entries"), py::arg("layout") = py::none(),
             "A pack of numpy arrays, as a read-only uint8 array.");
  module.def(
      "arena_bytes", [](const py::iterable& specs) { return MakeLayout(specs)->total_bytes; },
      py::arg("specs"));
  module.def("collect_all", &CollectAll,
             "A full collection for threads that wait for a slot: one in two seconds. Whether it "
             "was time.");
  module.def("lease_of", &LeaseOf, py::arg("array"),
             "The Slot that leased an array's memory (any ring's), or None.");
  module.def("lease_among", &LeaseAmong, py::arg("leaves"),
             "lease_of the first leaf that lies in a slot, or None.");
  module.def(
      "live_pack_bytes", [] { return live_bytes.load(); },
      "Bytes of all rings and arenas that are alive.");
}
