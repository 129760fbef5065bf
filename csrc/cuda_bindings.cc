#include "cuda_bindings.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda_driver.h"
#include "cuda_nvrtc.h"
#include "cuda_plan.h"
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
                   const Types& results, int sms, int pointers, double slice_positions) {
  const auto decoded = decode_program(program);
  const CudaPlan plan = make_cuda_plan(
      *decoded, {launch, layout.data(), static_cast<int64_t>(layout.size()), buffers(operands),
                 buffers(results), sms, pointers, slice_positions});
  py::list launches;
  for (const CudaLaunch& l : plan.launches) {
    py::dict d;
    d["tiles"] = bytes_of(l.tiles);
    d["unaligned"] = bytes_of(l.unaligned.empty() ? l.tiles : l.unaligned);
    d["words"] = bytes_of(l.words);
    d["buffers"] = l.buffers;
    d["pointers"] = pointers;
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
    int device, int calls, int repeats, int64_t flush_bytes, int shared_percent) {
  std::vector<TimedLaunch> timed;
  for (const auto& [tiles, words, buffers] : launches) timed.push_back({tiles, words, buffers});
  const py::gil_scoped_release release;
  return time_launches(image, pointers, timed, device, calls, repeats, flush_bytes, shared_percent);
}

}  // namespace

void bind_cuda(py::module_& m) {
  m.def("cuda_plan", &cuda_plan, py::arg("program"), py::arg("launch"), py::arg("layout"),
        py::arg("operands"), py::arg("results"), py::arg("sms"), py::arg("pointers"),
        py::arg("slice_positions") = 0.0,
        "The launches of a call, for tests: tiles and words as recom_abi.h lays them out.");
  m.def("cuda_time", &cuda_time, py::arg("image"), py::arg("pointers"), py::arg("launches"),
        py::arg("device"), py::arg("calls"), py::arg("repeats"), py::arg("flush_bytes"),
        py::arg("shared_percent") = -1,
        "Milliseconds per call of (tiles, words, addresses) launches, by device events.");
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
