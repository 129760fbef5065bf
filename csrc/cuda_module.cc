#include "cuda_module.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "cuda_plan.h"
#include "recom_abi.h"

namespace recom {

using cuda::Driver;

// Kernels of a module; `point` only where the call's addresses come in a table, `mend` where tiles
// may search.
struct Functions {
  cuda::Function fused = nullptr, point = nullptr, mend = nullptr;
};

// One call's kernels on one device. Never freed, so that plain pointers to it may be kept.
class PreparedCall {
 public:
  struct Launch {
    cuda::Pointer tiles, unaligned, mends, unaligned_mends, words;
    unsigned n_tiles, n_unaligned, n_mends, n_unaligned_mends;
    std::vector<int> buffers;
  };

  bool matches(const CudaArguments& a) const {
    return device == a.device && hash == a.hash && digest == a.digest && pointers == a.pointers &&
           program_bytes == a.program.size() && ptx_bytes == a.ptx.size() && same_places(a) &&
           same_shapes(a);
  }
  // Launch and layout are long, and in no cache after a batch was packed.
  bool same_places(const CudaArguments& a) const {
    if (key != a.key || launch.size() != a.launch.size() ||
        layout.size() != static_cast<size_t>(a.n_layout)) {
      return false;
    }
    return !key.empty() ||
           (launch == a.launch && std::equal(layout.begin(), layout.end(), a.layout));
  }
  bool same_shapes(const CudaArguments& a) const {
    if (a.operands.size() != n_operands || a.operands.size() + a.results.size() != ranks.size()) {
      return false;
    }
    size_t i = 0;
    const int64_t* at = dims.data();
    for (const auto* list : {&a.operands, &a.results}) {
      for (const Buffer& b : *list) {
        if (ranks[i].first != b.dtype || ranks[i].second != b.rank) return false;
        ++i;
        for (int d = 0; d < b.rank; ++d) {
          if (*at++ != b.dims[d]) return false;
        }
      }
    }
    return true;
  }

  int device;
  std::string hash, digest, launch, key;
  size_t program_bytes, ptx_bytes;  // what the two digests are of
  int64_t pointers;
  std::vector<int64_t> layout, dims;
  std::vector<std::pair<int, int>> ranks;  // dtype and rank of operands and results
  size_t n_operands;

  Functions functions;
  std::vector<Launch> launches;
};

namespace {

constexpr const char *kFused = "recom_fused", *kPoint = "recom_point", *kMend = "recom_mend";
constexpr size_t kLogBytes = 8192;

// Kernels by (digest, a second hash so that a wrong digest is not believed, device).
Functions load_functions(const Driver& driver, const CudaArguments& a, bool mends) {
  using Key = std::tuple<std::string, size_t, int>;
  static std::mutex mutex;
  static auto* functions = new std::map<Key, Functions>;
  std::lock_guard<std::mutex> lock(mutex);
  Key key(a.digest, std::hash<std::string_view>()(a.ptx), a.device);
  const auto it = functions->find(key);
  if (it != functions->end()) return it->second;

  const std::string image(a.ptx);  // ends in a NUL, as PTX must
  std::vector<char> log(kLogBytes, '\0');
  int options[] = {cuda::kJitErrorLog, cuda::kJitErrorLogSize};
  void* values[] = {log.data(), reinterpret_cast<void*>(log.size())};
  cuda::Module module;
  const cuda::Result code = driver.module_load(&module, image.c_str(), 2, options, values);
  if (code != 0) {
    log.back() = '\0';
    driver.check(code, "load the fused kernel; the driver says: " + std::string(log.data()));
  }
  Functions found;
  driver.check(driver.module_function(&found.fused, module, kFused), "find the fused kernel");
  driver.spare_cache(found.fused, a.device, recom_cuda::kThreads);
  if (a.pointers == 0) {
    driver.check(driver.module_function(&found.point, module, kPoint), "find the table's kernel");
  }
  if (mends) {
    driver.check(driver.module_function(&found.mend, module, kMend), "find the kernel that mends");
  }
  ++cuda_stats().modules_loaded;
  return (*functions)[std::move(key)] = found;
}

// Frees what it holds unless told otherwise.
struct DeviceMemory {
  const Driver& driver;
  cuda::Pointer at = 0;

  DeviceMemory(const Driver& d, size_t bytes) : driver(d) {
    if (bytes == 0) return;
    d.check(d.mem_alloc(&at, bytes),
            "allocate " + std::to_string(bytes) +
                " bytes for a plan (XLA takes most of the memory for itself: "
                "XLA_PYTHON_CLIENT_MEM_FRACTION lowers its share)");
  }
  ~DeviceMemory() {
    if (at) driver.mem_free(at);
  }
  cuda::Pointer keep() { return std::exchange(at, 0); }
};

// Copies on a stream of its own: the legacy stream would wait for, and could race with, XLA's.
void upload(const Driver& driver, cuda::Pointer to, const std::vector<char>& from) {
  static std::mutex mutex;
  static auto* streams = new std::map<cuda::Context, cuda::Stream>;
  std::lock_guard<std::mutex> lock(mutex);
  cuda::Context context;
  driver.check(driver.ctx_get_current(&context), "tell the current context");
  cuda::Stream& stream = (*streams)[context];
  if (!stream) {
    driver.check(driver.stream_create(&stream, cuda::kStreamNonBlocking), "create a stream");
  }
  driver.check(driver.copy_to_device_async(to, from.data(), from.size(), stream), "copy a plan");
  driver.check(driver.stream_synchronize(stream), "copy a plan");
}

template <typename T>
size_t append(const std::vector<T>& v, std::vector<char>* bytes) {
  const size_t at = bytes->size();
  const size_t n = v.size() * sizeof(T);
  bytes->resize(at + (n + 15) / 16 * 16);
  if (n) std::memcpy(bytes->data() + at, v.data(), n);
  return at;
}

std::unique_ptr<PreparedCall> make_prepared(const CudaArguments& a) {
  const Driver& driver = Driver::get();
  const auto program = cached_program(a.hash, a.program);
  cuda::Device device;
  driver.check(driver.device_get(&device, a.device), "find device " + std::to_string(a.device));
  if (a.pointers < 0 || a.pointers > RECOM_POINTERS) {
    throw ProgramError("recom call: a bad number of pointers");
  }
  const CudaPlan plan = make_cuda_plan(
      *program, {a.launch, a.layout, a.n_layout, a.operands, a.results,
                 driver.attribute(cuda::kMultiprocessors, device), static_cast<int>(a.pointers)});
  auto out = std::make_unique<PreparedCall>();
  out->device = a.device;
  out->hash = a.hash;
  out->digest = a.digest;
  out->launch = a.launch;
  out->key = a.key;
  out->program_bytes = a.program.size();
  out->ptx_bytes = a.ptx.size();
  out->pointers = a.pointers;
  out->layout.assign(a.layout, a.layout + a.n_layout);
  out->n_operands = a.operands.size();
  for (const auto* list : {&a.operands, &a.results}) {
    for (const Buffer& b : *list) {
      out->ranks.push_back({b.dtype, b.rank});
      out->dims.insert(out->dims.end(), b.dims, b.dims + b.rank);
    }
  }
  const cuda::DeviceScope scope(driver, a.device);
  out->functions = load_functions(driver, a, plan.searches);
  std::vector<char> bytes;
  for (const CudaLaunch& l : plan.launches) {
    PreparedCall::Launch launch;
    const bool same = l.unaligned.empty();
    const auto count = [](const auto& tiles) { return static_cast<unsigned>(tiles.size()); };
    launch.tiles = append(l.tiles, &bytes);
    launch.unaligned = same ? launch.tiles : append(l.unaligned, &bytes);
    launch.mends = append(l.mends, &bytes);
    launch.unaligned_mends = same ? launch.mends : append(l.unaligned_mends, &bytes);
    launch.words = append(l.words, &bytes);
    launch.n_tiles = count(l.tiles);
    launch.n_unaligned = count(same ? l.tiles : l.unaligned);
    launch.n_mends = count(l.mends);
    launch.n_unaligned_mends = count(same ? l.mends : l.unaligned_mends);
    launch.buffers = l.buffers;
    out->launches.push_back(std::move(launch));
  }
  DeviceMemory memory(driver, bytes.size());
  if (!bytes.empty()) upload(driver, memory.at, bytes);
  const cuda::Pointer base = memory.keep();
  for (PreparedCall::Launch& l : out->launches) {
    l.tiles += base;
    l.unaligned += base;
    l.mends += base;
    l.unaligned_mends += base;
    l.words += base;
  }
  ++cuda_stats().plans_uploaded;
  cuda_stats().device_bytes += static_cast<int64_t>(bytes.size());
  return out;
}

struct Calls {
  std::mutex mutex;
  // By program: a few shapes and devices each.
  std::unordered_map<std::string, std::vector<std::unique_ptr<PreparedCall>>> by_hash;
};

Calls& calls() {
  static auto* c = new Calls;  // leaked, so that a call during process exit still finds it
  return *c;
}

// The thread's last calls, by where XLA keeps their attributes: at one place as long as an
// executable lives. That says where to look and proves nothing: another executable's may lie there
// by now, so what is found is compared like any other.
thread_local std::array<const PreparedCall*, 64> recent{};

const PreparedCall*& recent_at(const CudaArguments& a) {
  return recent[reinterpret_cast<uintptr_t>(a.hash.data()) / 16 % recent.size()];
}

const PreparedCall* find_locked(const CudaArguments& a, const std::string& hash) {
  const auto it = calls().by_hash.find(hash);
  if (it == calls().by_hash.end()) return nullptr;
  for (const auto& c : it->second) {
    if (c->matches(a)) return c.get();
  }
  return nullptr;
}

// A kernel's parameters, with room for as many buffers as it was compiled for. The driver copies
// them at the launch.
struct Parameters {
  static constexpr size_t kHead = offsetof(recom_cuda::Params, buffer);
  static_assert(kHead == 2 * sizeof(void*));
  static_assert(offsetof(recom_cuda::Pointing, address) == kHead);

  explicit Parameters(size_t pointers) {
    static thread_local std::vector<uint64_t> storage;
    storage.resize(std::max(storage.size(), kHead / 8 + pointers));
    words = storage.data();
  }
  uint64_t* buffers() const { return words + kHead / 8; }
  uint64_t* words;
};

// The address of a launch's buffer i.
uint64_t address_of(const PreparedCall& call, const CudaArguments& a, size_t b) {
  const void* data = b < call.n_operands ? a.operands[b].data : a.results[b - call.n_operands].data;
  return reinterpret_cast<uint64_t>(data);
}

// Writes the addresses of a launch's buffers into the call's table, on the stream. Returns all
// their bits.
uint64_t fill_table(const Driver& driver, const PreparedCall& call, const CudaArguments& a,
                    const std::vector<int>& buffers, cuda::Stream stream) {
  const auto to = reinterpret_cast<uint64_t>(a.table.data);
  const bool bytes = a.table.dtype == dtype::k_U8 && a.table.rank == 1;
  if (!bytes || to % 8 != 0 || a.table.dims[0] / 8 < static_cast<int64_t>(buffers.size())) {
    throw ProgramError("recom call: no table for the addresses of its buffers");
  }
  const Parameters parameters(recom_cuda::kPointed);
  void* arguments[] = {parameters.words};
  uint64_t bits = 0;
  for (size_t at = 0; at < buffers.size(); at += recom_cuda::kPointed) {
    const size_t n = std::min<size_t>(buffers.size() - at, recom_cuda::kPointed);
    parameters.words[0] = to + 8 * at;
    parameters.words[1] = n;
    for (size_t i = 0; i < n; ++i) {
      bits |= parameters.buffers()[i] = address_of(call, a, buffers[at + i]);
    }
    const auto blocks = static_cast<unsigned>((n - 1) / recom_cuda::kThreads + 1);
    driver.check(driver.launch(call.functions.point, blocks, 1, 1, recom_cuda::kThreads, 1, 1, 0,
                               stream, arguments, nullptr),
                 "launch the table's kernel");
  }
  return bits;
}

}  // namespace

const PreparedCall* find_prepared(const CudaArguments& a) {
  const PreparedCall*& last = recent_at(a);
  if (last && last->matches(a)) return last;
  std::lock_guard<std::mutex> lock(calls().mutex);
  const PreparedCall* found = find_locked(a, std::string(a.hash));
  if (found) last = found;
  return found;
}

const PreparedCall& prepare_call(const CudaArguments& a) {
  if (const PreparedCall* found = find_prepared(a)) return *found;
  // Made without the lock: compiling a large kernel takes the driver seconds. Of two threads that
  // make the same one, the second gives its own up.
  auto made = make_prepared(a);
  std::lock_guard<std::mutex> lock(calls().mutex);
  const std::string hash(a.hash);
  const PreparedCall* found = find_locked(a, hash);
  if (!found) {
    auto& list = calls().by_hash[hash];
    list.push_back(std::move(made));
    found = list.back().get();
  }
  recent_at(a) = found;
  return *found;
}

void launch_call(const PreparedCall& call, const CudaArguments& a, cuda::Stream stream) {
  const Driver& driver = Driver::get();
  const cuda::DeviceScope scope(driver, call.device);
  for (const PreparedCall::Launch& l : call.launches) {
    uint64_t bits = 0;
    if (call.pointers == 0) bits = fill_table(driver, call, a, l.buffers, stream);
    const Parameters parameters(std::max<size_t>(call.pointers, 1));
    if (call.pointers == 0) {
      parameters.buffers()[0] = reinterpret_cast<uint64_t>(a.table.data);
    } else {
      for (size_t i = 0; i < l.buffers.size(); ++i) {
        bits |= parameters.buffers()[i] = address_of(call, a, l.buffers[i]);
      }
    }
    const bool aligned = bits % kBaseAlignment == 0;
    parameters.words[0] = aligned ? l.tiles : l.unaligned;
    parameters.words[1] = l.words;
    void* arguments[] = {parameters.words};
    driver.check(driver.launch(call.functions.fused, aligned ? l.n_tiles : l.n_unaligned, 1, 1,
                               recom_cuda::kThreads, 1, 1, 0, stream, arguments, nullptr),
                 "launch the fused kernel");
    ++cuda_stats().kernel_launches;
    const unsigned mends = aligned ? l.n_mends : l.n_unaligned_mends;
    if (mends == 0) continue;
    parameters.words[0] = aligned ? l.mends : l.unaligned_mends;
    driver.check(driver.launch(call.functions.mend, mends, 1, 1, recom_cuda::kThreads, 1, 1, 0,
                               stream, arguments, nullptr),
                 "launch the kernel that mends");
  }
}

CudaStats& cuda_stats() {
  static auto* s = new CudaStats;
  return *s;
}

}  // namespace recom
