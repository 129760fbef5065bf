#include "corun_bindings.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "corun_runtime.h"
#include "corun_view.h"

namespace py = pybind11;

namespace recom {
namespace {

using corun::Runtime;
using corun::RuntimePlan;
using Kernels = std::vector<std::tuple<int, int, int, int>>;
using Results = std::vector<std::pair<int64_t, int64_t>>;
using Parts = std::vector<std::tuple<uintptr_t, int64_t, int64_t>>;

std::shared_ptr<Runtime> make(std::unique_ptr<corun::Backend> backend, int slots, int ahead,
                              int64_t in_bytes, const Results& results, std::string tiles,
                              std::string words, std::string consts, const Kernels& kernels,
                              std::vector<std::string> stages, int mode, bool profile,
                              bool in_graphs) {
  RuntimePlan p;
  p.slots = slots;
  p.ahead = ahead;
  p.in_bytes = in_bytes;
  for (const auto& [offset, bytes] : results) p.results.push_back({offset, bytes});
  p.tiles = std::move(tiles);
  p.words = std::move(words);
  p.consts = std::move(consts);
  for (const auto& [first, n, blocks, stage] : kernels) {
    p.kernels.push_back({first, n, blocks, stage});
  }
  p.stages = std::move(stages);
  p.mode = static_cast<corun::Mode>(mode);
  p.profile = profile;
  p.in_graphs = in_graphs;
  return std::make_shared<Runtime>(std::move(backend), std::move(p));
}

py::dict stats(Runtime& r) {
  const corun::RuntimeStats s = r.stats();
  py::dict d;
  d["packed"] = s.packed;
  d["taken"] = s.taken;
  d["launched"] = s.launched;
  d["late"] = s.late;
  d["marks"] = s.marks;
  d["unknown_marks"] = s.unknown;
  d["host_bytes"] = s.host_bytes;
  d["device_bytes"] = s.device_bytes;
  return d;
}

// Where leaves go, converted once: (offset, or -1 for a leaf that nobody reads; bytes at most; kind
// and size of its elements) of each.
struct Places {
  std::vector<std::tuple<int64_t, int64_t, char, int>> of;
};

py::object stage(Runtime& r, const py::list& leaves, const Places& held, int threads) {
  const auto& places = held.of;
  if (leaves.size() != places.size()) throw std::invalid_argument("recom corun: other leaves");
  std::vector<Runtime::Part> parts;
  parts.reserve(places.size());
  for (size_t i = 0; i < places.size(); ++i) {
    const auto& [offset, most, kind, size] = places[i];
    if (offset < 0) continue;
    const py::handle h = leaves[i];
    if (!py::isinstance<py::array>(h)) return py::none();
    const auto a = py::reinterpret_borrow<py::array>(h);
    const auto dtype = a.dtype();
    if (!(a.flags() & py::array::c_style) || dtype.kind() != kind || dtype.itemsize() != size ||
        a.nbytes() > most) {
      return py::none();
    }
    if (a.nbytes() > 0) {
      parts.push_back(
          {reinterpret_cast<uintptr_t>(a.data()), static_cast<int64_t>(a.nbytes()), offset});
    }
  }
  int slot;
  {
    const py::gil_scoped_release released;
    slot = r.acquire();
    try {
      r.pack(slot, parts, threads);
      r.commit(slot);
    } catch (...) {
      r.abandon(slot);
      throw;
    }
  }
  return py::int_(slot);
}

// A capsule that whoever imports it renames, and then owns.
py::capsule view(const std::shared_ptr<Runtime>& r, int place, size_t result,
                 std::vector<int64_t> shape, std::pair<int, int> dtype,
                 std::pair<int, int> device) {
  const corun::DlType type{static_cast<uint8_t>(dtype.first), static_cast<uint8_t>(dtype.second),
                           1};
  auto* made = corun::make_view(r, place, result, std::move(shape), type,
                                corun::DlDevice{device.first, device.second});
  return py::capsule(made, "dltensor", [](PyObject* self) {
    if (!PyCapsule_IsValid(self, "dltensor")) return;  // imported
    auto* m = static_cast<corun::DlManaged*>(PyCapsule_GetPointer(self, "dltensor"));
    m->deleter(m);
  });
}

}  // namespace

void bind_corun(py::module_& m) {
  py::class_<Places>(m, "CorunPlaces").def(py::init([](decltype(Places::of) of) {
    return Places{std::move(of)};
  }));
  using release = py::call_guard<py::gil_scoped_release>;
  py::class_<Runtime, std::shared_ptr<Runtime>>(m, "CorunRuntime")
      .def(py::init([](int device, const std::string& image, int slots, int ahead, int64_t in_bytes,
                       const Results& results, std::string tiles, std::string words,
                       std::string consts, const Kernels& kernels, std::vector<std::string> stages,
                       int mode, bool profile, bool in_graphs) {
             return make(corun::make_cuda_backend(device, image), slots, ahead, in_bytes, results,
                         std::move(tiles), std::move(words), std::move(consts), kernels,
                         std::move(stages), mode, profile, in_graphs);
           }),
           py::kw_only(), py::arg("device"), py::arg("image"), py::arg("slots"), py::arg("ahead"),
           py::arg("in_bytes"), py::arg("results"), py::arg("tiles"), py::arg("words"),
           py::arg("consts"), py::arg("kernels"), py::arg("stages"), py::arg("mode"),
           py::arg("profile"), py::arg("in_graphs"))
      .def_static(
          "simulated",
          [](uint64_t seed, uintptr_t kernel, int slots, int ahead, int64_t in_bytes,
             const Results& results, std::string tiles, std::string words, std::string consts,
             const Kernels& kernels, std::vector<std::string> stages, int mode, bool profile,
             bool in_graphs) {
            auto backend =
                corun::make_sim_backend(seed, reinterpret_cast<corun::SimKernel>(kernel));
            return make(std::move(backend), slots, ahead, in_bytes, results, std::move(tiles),
                        std::move(words), std::move(consts), kernels, std::move(stages), mode,
                        profile, in_graphs);
          },
          py::kw_only(), py::arg("seed"), py::arg("kernel"), py::arg("slots"), py::arg("ahead"),
          py::arg("in_bytes"), py::arg("results"), py::arg("tiles"), py::arg("words"),
          py::arg("consts"), py::arg("kernels"), py::arg("stages"), py::arg("mode"),
          py::arg("profile"), py::arg("in_graphs"),
          "Tests: runs what was enqueued in a random order that streams and events allow.")
      .def("acquire", &Runtime::acquire, release())
      .def(
          "pack",
          [](Runtime& r, int slot, const Parts& parts, int threads) {
            std::vector<Runtime::Part> made;
            made.reserve(parts.size());
            for (const auto& [from, bytes, offset] : parts) made.push_back({from, bytes, offset});
            const py::gil_scoped_release released;
            r.pack(slot, made, threads);
          },
          py::arg("slot"), py::arg("parts"), py::arg("threads"))
      .def("stage", &stage, py::arg("leaves"), py::arg("places"), py::arg("threads"),
           "Acquires a slot, packs arrays into it and commits it, without the GIL; the slot, or "
           "None where an array is "
           "not as its place wants it.")
      .def("commit", &Runtime::commit, release())
      // Holds the GIL: what it enqueues takes microseconds, to get the GIL back may take tens.
      .def("begin",
           [](const std::shared_ptr<Runtime>& r, int slot) {
             const corun::Stream xla = r->begin(slot);
             corun::set_current_runtime(xla, r);
             if (r->backend().simulated()) r->backend().finish(xla);
           })
      .def("dispatched", &Runtime::dispatched)  // the same
      .def("place_of", &Runtime::place_of, release())
      .def("view", &view, py::arg("place"), py::arg("result"), py::arg("shape"), py::arg("dtype"),
           py::arg("device"), "A DLPack capsule of a place's result.")
      .def("abandon", &Runtime::abandon, release())
      .def(
          "take",
          [](Runtime& r, int slot, const std::vector<std::pair<uint64_t, int64_t>>& results) {
            r.take(slot, results, corun::sim_xla_stream());
          },
          release(), "Tests: as a step on the simulation's XLA stream does.")
      .def(
          "mark",
          [](Runtime& r, const std::string& name) { r.mark(name, corun::sim_xla_stream()); },
          release())
      .def(
          "ended",
          [](Runtime& r, const std::string& name) {
            r.record_stage(name, corun::sim_xla_stream());
          },
          release(), "Tests: a marker that records its event.")
      .def(
          "finish", [](Runtime& r) { r.backend().finish(corun::sim_xla_stream()); }, release())
      .def("close",
           [](const std::shared_ptr<Runtime>& r) {
             corun::forget_tokens(r.get());
             const py::gil_scoped_release released;
             r->close();
           })
      .def("register_token", [](const std::shared_ptr<Runtime>& r, uintptr_t token,
                                int slot) { corun::register_token(token, r, slot); })
      .def_property_readonly("processors", [](Runtime& r) { return r.backend().processors(); })
      .def_property_readonly("stats", &stats)
      .def_property_readonly("times", &Runtime::times);
}

}  // namespace recom
