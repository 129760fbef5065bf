#include "cuda_bindings.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda_driver.h"
#include "cuda_nvrtc.h"
#include "cuda_plan.h"
#include "cuda_stage.h"
#include "cuda_time.h"
#include "program.h"

namespace py = pybind11;

namespace recom {
namespace {

using Types = std::vector<std::pair<int, std::vector<int64_t>>>;  // dtype, dims

std::vector<Buffer> buffers(const Types& types) {
  std::vector<Buffer> out;
  for (const auto& [dtype, dims] : types) {
    out.push_back({nullptr, dims.data(), static_cast<int>(dims.size()), dtype});
  }
  return out;
}

template <typename T>
py::bytes bytes_of(const std::vector<T>& v) {
  return {reinterpret_cast<const char*>(v.data()), v.size() * sizeof(T)};
}

py::dict cuda_plan(std::string_view program, std::string_view launch,
                   const py::array_t<int64_t, py::array::c_style>& layout, const Types& operands,
                   const Types& results, int sms, int pointers, double slice_positions,
                   int64_t searched_ids) {
  const auto decoded = decode_program(program);
  const CudaPlan plan = make_cuda_plan(
      *decoded, {launch, layout.data(), static_cast<int64_t>(layout.size()), buffers(operands),
                 buffers(results), sms, pointers, slice_positions, searched_ids});
  py::list launches;
  for (const CudaLaunch& l : plan.launches) {
    py::dict d;
    d["tiles"] = bytes_of(l.tiles);
    d["unaligned"] = bytes_of(l.unaligned.empty() ? l.tiles : l.unaligned);
    d["words"] = bytes_of(l.words);
    d["buffers"] = l.buffers;
    d["pointers"] = pointers;
    d["mends"] = bytes_of(l.mends);
    d["unaligned_mends"] = bytes_of(l.unaligned.empty() ? l.mends : l.unaligned_mends);
    launches.append(d);
  }
  py::dict out;
  out["launches"] = launches;
  return out;
}

py::dict cuda_info() {
  using namespace cuda;
  py::dict out;
  try {
    const Driver& d = Driver::get();
    int version = 0, count = 0;
    d.check(d.driver_version(&version), "tell its version");
    d.check(d.device_count(&count), "count devices");
    py::list devices;
    for (int i = 0; i < count; ++i) {
      Device device;
      char name[256] = "";
      d.check(d.device_get(&device, i), "find a device");
      d.check(d.device_name(name, sizeof name, device), "tell a device's name");
      py::dict one;
      one["name"] = name;
      one["sms"] = d.attribute(kMultiprocessors, device);
      one["capability"] = py::make_tuple(d.attribute(kCapabilityMajor, device),
                                         d.attribute(kCapabilityMinor, device));
      devices.append(one);
    }
    out["driver"] = py::make_tuple(version / 1000, version % 1000 / 10);
    out["devices"] = devices;
    out["error"] = "";
  } catch (const CudaError& e) {
    out["driver"] = py::none();
    out["devices"] = py::list();
    out["error"] = e.what();
  }
  return out;
}

// Results lie one behind the other, as Delivery::Copy puts them.
void take(Delivery& from, const std::vector<py::array>& arrays) {
  struct Piece {
    void* to;
    int64_t at, size;
  };
  std::vector<Piece> pieces;
  int64_t end = 0;
  for (py::array array : arrays) {
    if ((array.flags() & py::array::c_style) == 0) throw py::value_error("take: a strided array");
    const int64_t at = (end + Delivery::kAlign - 1) / Delivery::kAlign * Delivery::kAlign;
    pieces.push_back({array.mutable_data(), at, static_cast<int64_t>(array.nbytes())});
    end = at + pieces.back().size;
  }
  if (end != from.nbytes() || !from.copied())
    throw py::value_error("take: arrays of " + std::to_string(end) + " bytes, results of " +
                          std::to_string(from.nbytes()));
  constexpr int64_t kLong = int64_t{256} << 10;  // bytes; less is copied in a few microseconds
  std::optional<py::gil_scoped_release> release;
  if (end >= kLong) release.emplace();
  for (const Piece& p : pieces)
    if (p.size > 0) std::memcpy(p.to, from.data() + p.at, static_cast<size_t>(p.size));
  from.Cancel();  // later calls' results are not wanted
}

py::tuple nvrtc_compile(const std::vector<std::string>& paths, std::string text, std::string name,
                        std::vector<std::pair<std::string, std::string>> headers,
                        std::vector<std::string> options, bool cubin) {
  NvrtcResult result;
  {
    py::gil_scoped_release release;
    result = Nvrtc::open(paths).compile(
        {std::move(text), std::move(name), std::move(headers), std::move(options), cubin});
  }
  return py::make_tuple(py::bytes(result.image), result.log);
}

std::vector<double> cuda_time(
    std::string_view image, int pointers,
    const std::vector<std::tuple<std::string, std::string, std::vector<uint64_t>>>& launches,
    int device, int calls, int repeats, int64_t flush_bytes, int shared_percent,
    const std::vector<std::string>& mends) {
  std::vector<TimedLaunch> timed;
  for (const auto& [tiles, words, buffers] : launches) {
    const size_t k = timed.size();
    timed.push_back({tiles, words, buffers, k < mends.size() ? mends[k] : std::string_view()});
  }
  const py::gil_scoped_release release;
  return time_launches(image, pointers, timed, device, calls, repeats, flush_bytes, shared_percent);
}

}  // namespace

void bind_cuda(py::module_& m) {
  m.def("cuda_plan", &cuda_plan, py::arg("program"), py::arg("launch"), py::arg("layout"),
        py::arg("operands"), py::arg("results"), py::arg("sms"), py::arg("pointers"),
        py::arg("slice_positions") = 0.0, py::arg("searched_ids") = 0,
        "The launches of a call, for tests: tiles and words as recom_abi.h lays them out.");
  m.def("cuda_time", &cuda_time, py::arg("image"), py::arg("pointers"), py::arg("launches"),
        py::arg("device"), py::arg("calls"), py::arg("repeats"), py::arg("flush_bytes"),
        py::arg("shared_percent") = -1, py::arg("mends") = std::vector<std::string>(),
        "Milliseconds per call of (tiles, words, addresses) launches, by device events. `mends`: "
        "tiles of recom_mend, for each launch that it follows.");
  py::class_<Delivery, std::shared_ptr<Delivery>>(m, "Delivery", "A call's results on the host.")
      .def("begin", &Delivery::Begin, py::arg("nbytes"), py::arg("ordinal"),
           "For a new call, whose results take that many bytes.")
      .def("wait", &Delivery::Wait, py::arg("us"), py::arg("spin_us"),
           py::call_guard<py::gil_scoped_release>(),
           "Whether the results are there, after so many microseconds at most.")
      .def("cancel", &Delivery::Cancel, "The call shall deliver nothing, if it comes to that.")
      .def_property_readonly("copied", &Delivery::copied, "Whether the call has come to its end.")
      .def("take", &take, py::arg("arrays"), "Copies the results into writable arrays.");
  m.def(
      "delivery",
      [](uintptr_t token, int64_t nbytes) {
        return stage_source(reinterpret_cast<const void*>(token), nbytes).delivery;
      },
      py::arg("token"), py::arg("nbytes"), "What a call with this token delivers to.");
  m.def("cuda_info", &cuda_info, "Driver, devices, and what is missing if there are none.");
  m.def("nvrtc_compile", &nvrtc_compile, py::arg("paths"), py::arg("text"), py::arg("name"),
        py::arg("headers"), py::arg("options"), py::arg("cubin"), "(image, log), or RuntimeError.");
  m.def(
      "nvrtc_version",
      [](const std::vector<std::string>& paths) {
        const Nvrtc& n = Nvrtc::open(paths);
        return std::make_pair(n.version(), n.path());
      },
      py::arg("paths"), "((major, minor), path of the library), or RuntimeError.");
}

}  // namespace recom
