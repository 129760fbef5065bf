// The Python module recom_jax._recom.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "byte_order.h"
#include "corun_bindings.h"
#include "cuda_bindings.h"
#include "cuda_module.h"
#include "cuda_stage.h"
#include "ffi_handler.h"
#include "forward.h"
#include "interp.h"
#include "kernels.h"
#include "packing.h"
#include "packing_job.h"
#include "program.h"
#include "row_sums.h"
#include "string_bindings.h"

namespace py = pybind11;

namespace recom {
namespace {

const char* dtype_name(int t) {
  switch (t) {
    case dtype::k_PRED:
      return "bool";
    case dtype::k_S8:
      return "int8";
    case dtype::k_S16:
      return "int16";
    case dtype::k_S32:
      return "int32";
    case dtype::k_S64:
      return "int64";
    case dtype::k_U8:
      return "uint8";
    case dtype::k_U16:
      return "uint16";
    case dtype::k_U32:
      return "uint32";
    case dtype::k_U64:
      return "uint64";
    case dtype::k_F16:
      return "float16";
    case dtype::k_F32:
      return "float32";
    case dtype::k_F64:
      return "float64";
    case dtype::k_F8E5M2:
      return "float8_e5m2";
    case dtype::k_F8E4M3FN:
      return "float8_e4m3fn";
    default:
      return "bfloat16";
  }
}

// Numbers of the format, from the same lists the decoder is compiled from.
py::dict constants() {
  py::dict out;
#define RECOM_PUT(name, value) d[#name] = value;
#define RECOM_TABLE(key, LIST) \
  {                            \
    py::dict d;                \
    LIST(RECOM_PUT)            \
    out[key] = d;              \
  }
  RECOM_TABLE("slot_kind", RECOM_SLOT_KINDS)
  RECOM_TABLE("dim_kind", RECOM_DIM_KINDS)
  RECOM_TABLE("opcode", RECOM_OPCODES)
  RECOM_TABLE("unary", RECOM_UNARY_OPS)
  RECOM_TABLE("binary", RECOM_BINARY_OPS)
  RECOM_TABLE("kind", RECOM_COMBINES)
  RECOM_TABLE("search_mode", RECOM_SEARCH_MODES)
  RECOM_TABLE("side", RECOM_SIDES)
  RECOM_TABLE("index_mode", RECOM_INDEX_MODES)
  RECOM_TABLE("flag", RECOM_FLAGS)
  RECOM_TABLE("space", RECOM_SPACES)
  // Dtypes go by the names that JAX gives them.
#define RECOM_PUT_DTYPE(name, value) types[dtype_name(value)] = value;
  py::dict types;
  RECOM_DTYPES(RECOM_PUT_DTYPE)
#undef RECOM_PUT_DTYPE
  out["dtype"] = types;
#undef RECOM_TABLE
#undef RECOM_PUT
  py::dict magic;
  magic["PROGRAM_MAGIC"] = kProgramMagic;
  magic["VERSION"] = kVersion;
  magic["SUMS_MAGIC"] = kSumsMagic;
  magic["SUMS_VERSION"] = kSumsVersion;
  magic["PACK_MAGIC"] = kPackMagic;
  out["magic"] = magic;
  return out;
}

// The FFI number of a numpy dtype (ml_dtypes' bfloat16 included), or 0. Asking numpy for a name is
// slow, so the common kinds are told by their letter.
int dtype_of(const py::dtype& t) {
  int log2 = 0;
  while (log2 < 3 && (1 << log2) < t.itemsize()) ++log2;
  switch (t.kind()) {
    case 'b':
      return dtype::k_PRED;
    case 'i':
      return dtype::k_S8 + log2;
    case 'u':
      return dtype::k_U8 + log2;
    case 'f':
      if (t.itemsize() == 4) return dtype::k_F32;
      if (t.itemsize() == 8) return dtype::k_F64;
  }
  const std::string name = py::str(t.attr("name"));
  for (const int t : {dtype::k_F16, dtype::k_BF16, dtype::k_F8E5M2, dtype::k_F8E4M3FN})
    if (name == dtype_name(t)) return t;
  return 0;
}

struct Arrays {
  std::vector<py::array> kept;
  std::vector<int64_t> dims;
  std::vector<Buffer> buffers;

  Arrays(const py::sequence& list, bool writeable) {
    size_t ranks = 0;
    for (const py::handle h : list) {
      if (!py::isinstance<py::array>(h))
        throw py::value_error("operands and results are numpy arrays");
      kept.push_back(py::reinterpret_borrow<py::array>(h));
      ranks += kept.back().ndim();
    }
    dims.reserve(ranks);
    for (const py::array& a : kept) {
      const int t = dtype_of(a.dtype());
      if (!t) throw py::value_error("an array's dtype is not supported");
      if (!(a.flags() & py::array::c_style) || (writeable && !a.writeable())) {
        throw py::value_error("arrays are C-contiguous, and results writeable");
      }
      const size_t at = dims.size();
      for (py::ssize_t i = 0; i < a.ndim(); ++i) dims.push_back(a.shape(i));
      buffers.push_back(
          {const_cast<void*>(a.data()), dims.data() + at, static_cast<int>(a.ndim()), t});
    }
  }
};

std::string_view view(const py::bytes& b) {
  char* data;
  py::ssize_t size;
  if (PyBytes_AsStringAndSize(b.ptr(), &data, &size)) throw py::error_already_set();
  return {data, static_cast<size_t>(size)};
}

// Calls `body` with an executor of plain threads, and waits for them.
template <class Body>
void on_threads(int threads, const Body& body) {
  Executor executor;
  executor.threads = threads;
  std::vector<std::thread> workers;
  executor.schedule = [&](std::function<void()> task) { workers.emplace_back(std::move(task)); };
  try {
    body(executor);
  } catch (...) {
    for (auto& w : workers) w.join();
    throw;
  }
  for (auto& w : workers) w.join();
}

// Runs without XLA. The cache key is the program itself.
void run(const py::bytes& program, const py::array_t<int64_t, py::array::c_style>& binding,
         const py::sequence& operands, const py::sequence& results, int threads) {
  const std::string_view bytes = view(program);
  const Arrays in(operands, false), out(results, true);
  const std::vector<int64_t> bind(binding.data(), binding.data() + binding.size());
  py::gil_scoped_release release;
  const auto p = cached_program(std::to_string(std::hash<std::string_view>()(bytes)), bytes);
  on_threads(threads, [&](const Executor& executor) {
    run_program(*p, in.buffers, out.buffers, bind.data(), bind.size(), executor);
  });
}

void run_sums(const py::bytes& program, const py::array_t<int64_t, py::array::c_style>& binding,
              const py::array_t<int64_t, py::array::c_style>& sums, const py::sequence& operands,
              const py::sequence& results, int threads) {
  const std::string_view bytes = view(program);
  const Arrays in(operands, false), out(results, true);
  const std::vector<int64_t> bind(binding.data(), binding.data() + binding.size());
  const std::vector<int64_t> words(sums.data(), sums.data() + sums.size());
  py::gil_scoped_release release;
  const auto p = cached_program(std::to_string(std::hash<std::string_view>()(bytes)), bytes);
  on_threads(threads, [&](const Executor& executor) {
    run_row_sums(*p, in.buffers, out.buffers, bind.data(), bind.size(), words.data(), words.size(),
                 executor);
  });
}

py::dict program_stats() {
  const Stats& s = stats();
  py::dict d;
  d["programs_decoded"] = s.programs_decoded.load();
  d["program_cache_hits"] = s.program_cache_hits.load();
  d["programs_cached"] = s.programs_cached.load();
  d["plans_built"] = s.plans_built.load();
  d["plans_streaming"] = s.plans_streaming.load();
  d["calls"] = s.calls.load();
  d["chunks_run"] = s.chunks_run.load();
  d["tables_scanned"] = s.tables_scanned.load();
  d["row_sums"] = s.row_sums.load();
  const CudaStats& c = cuda_stats();
  d["cuda_modules_loaded"] = c.modules_loaded.load();
  d["cuda_plans_uploaded"] = c.plans_uploaded.load();
  d["cuda_device_bytes"] = c.device_bytes.load();
  d["cuda_kernel_launches"] = c.kernel_launches.load();
  d["cuda_late_preparations"] = c.late_preparations.load();
  d["cuda_staged_copies"] = stage_stats().copies;
  d["cuda_staged_pieces"] = packing::StagedPieces();
  d["cuda_stage_sources"] = stage_stats().sources;
  d["isa"] = kernels().name;
  return d;
}

py::dict handlers() {
  py::dict d;
  d["recom_fused_v1"] = py::capsule(fused_v1_handler());
  d["recom_empty_v1"] = py::capsule(empty_v1_handler());
  d["recom_row_sums_v1"] = py::capsule(row_sums_v1_handler());
  d["recom_stage_v2"] = py::capsule(stage_on_host_handler());
  d["recom_deliver_v1"] = py::capsule(deliver_on_host_handler());
  d["recom_corun_stream_v1"] = py::capsule(corun_stream_handler(false));
  d["recom_corun_take_v1"] = py::capsule(corun_take_handler(false));
  d["recom_corun_event_v1"] = py::capsule(corun_event_handler(false));
  d["recom_corun_mark_v1"] = py::capsule(corun_mark_handler(false));
  d["recom_corun_pass_v1"] = py::capsule(corun_pass_handler(false));
  return d;
}

py::dict cuda_handlers() {
  py::dict stages, d;
  stages["initialize"] = py::capsule(cuda_initialize_handler());
  stages["execute"] = py::capsule(cuda_execute_handler());
  d["recom_fused_v1"] = stages;
  d["recom_empty_v1"] = py::capsule(empty_v1_handler());
  d["recom_stage_v2"] = py::capsule(stage_on_cuda_handler());
  d["recom_deliver_v1"] = py::capsule(deliver_on_cuda_handler());
  d["recom_fused_alone_v1"] = py::capsule(cuda_alone_handler());
  d["recom_corun_stream_v1"] = py::capsule(corun_stream_handler(true));
  d["recom_corun_take_v1"] = py::capsule(corun_take_handler(true));
  d["recom_corun_event_v1"] = py::capsule(corun_event_handler(true));
  d["recom_corun_mark_v1"] = py::capsule(corun_mark_handler(true));
  d["recom_corun_pass_v1"] = py::capsule(corun_pass_handler(true));
  return d;
}

}  // namespace
}  // namespace recom

PYBIND11_MODULE(_recom, m) {
  m.doc() = "recom_jax's native half: the CPU interpreter, FFI handlers and packing";
  m.def("constants", &recom::constants, "Every number of the program format, by name.");
  m.def("handlers", &recom::handlers, "FFI target name -> capsule, for register_ffi_target.");
  m.def("cuda_handlers", &recom::cuda_handlers,
        "The same for platform CUDA: name -> capsule, or stage -> capsule.");
  m.def("run_program", &recom::run, py::arg("program"), py::arg("binding"), py::arg("operands"),
        py::arg("results"), py::arg("threads") = 1, "Runs a program on numpy arrays, without XLA.");
  m.def("run_row_sums", &recom::run_sums, py::arg("program"), py::arg("binding"), py::arg("sums"),
        py::arg("operands"), py::arg("results"), py::arg("threads") = 1,
        "Sums rows of cotangents into gradients, without XLA.");
  m.def("program_stats", &recom::program_stats, "Counters since the process started.");
  m.def(
      "validate", [](const py::bytes& b) { recom::decode_program(recom::view(b)); },
      py::arg("program"), "Raises ValueError if the program is malformed.");
  m.def("set_stage_delay", &recom::set_stage_delay, py::arg("microseconds"),
        "Tests only: emulated staging copies sleep first.");
  bind_packing(m);
  bind_strings(m);
  recom::bind_cuda(m);
  recom::bind_forward(m);
  recom::bind_byte_order(m);
  recom::bind_corun(m);
}
