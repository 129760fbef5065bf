#include "cuda_time.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>

#include "cuda_driver.h"
#include "recom_abi.h"

namespace recom {
namespace {

using namespace cuda;

// Device memory for the time of a measurement.
class Memory {
 public:
  Memory(const Driver& d, size_t bytes) : d_(d) {
    d.check(d.mem_alloc(&at_, bytes ? bytes : 16), "allocate memory");
  }
  // In the stream's order: a plain copy from pageable memory may still be under way when a launch
  // begins.
  Memory(const Driver& d, std::string_view bytes, Stream stream) : Memory(d, bytes.size()) {
    if (bytes.empty()) return;
    d.check(d.copy_to_device_async(at_, bytes.data(), bytes.size(), stream), "copy");
  }
  Memory(Memory&& o) noexcept : d_(o.d_), at_(o.at_) { o.at_ = 0; }
  ~Memory() {
    if (at_) d_.mem_free(at_);
  }
  Pointer at() const { return at_; }

 private:
  const Driver& d_;
  Pointer at_ = 0;
};

struct Prepared {
  Memory tiles, words, mends;
  unsigned blocks, mending;
  std::vector<char> params, mend_params;
  Memory table;                           // of addresses, where they are no parameters
  std::vector<std::vector<char>> points;  // parameters of the kernel that fills it
};

// Should a stream take in fewer launches than are to be timed, the host waits for it: it goes on by
// itself.
constexpr auto kPatience = std::chrono::milliseconds(100);

// Holds a stream back until what shall be timed is queued behind: a launch with kilobytes of
// parameters takes the host as long as a small kernel takes the device.
class Gate {
 public:
  Gate(const Driver& d, Stream stream) : d_(d), stream_(stream) {}
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;
  ~Gate() { end(); }
  void close() {
    set(false);
    d_.check(d_.host_function(stream_, &Gate::wait, this), "hold a stream back");
  }
  void open() { set(true); }
  // Opens it for good. The stream may not have looked yet.
  void end() {
    open();
    if (stream_) d_.stream_synchronize(stream_);
    stream_ = nullptr;
  }

 private:
  void set(bool open) {
    const std::lock_guard<std::mutex> lock(mutex_);
    open_ = open;
    changed_.notify_all();
  }
  static void wait(void* self) {
    auto* gate = static_cast<Gate*>(self);
    std::unique_lock<std::mutex> lock(gate->mutex_);
    gate->changed_.wait_for(lock, kPatience, [gate] { return gate->open_; });
  }

  const Driver& d_;
  Stream stream_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = true;
};

// Launches that a stream surely takes in while it is held back; with more of them the host would
// wait.
constexpr size_t kQueued = 256;

// Parameters of recom_point for all buffers of a launch.
std::vector<std::vector<char>> points_of(Pointer table, const std::vector<uint64_t>& buffers) {
  std::vector<std::vector<char>> out;
  for (size_t at = 0; at < buffers.size(); at += recom_cuda::kPointed) {
    const size_t n = std::min<size_t>(buffers.size() - at, recom_cuda::kPointed);
    std::vector<char> p(sizeof(recom_cuda::Pointing));
    const uint64_t head[2] = {table + 8 * at, n};
    std::memcpy(p.data(), head, 16);
    std::memcpy(p.data() + 16, buffers.data() + at, 8 * n);
    out.push_back(std::move(p));
  }
  return out;
}

}  // namespace

std::vector<double> time_launches(std::string_view image, int pointers,
                                  const std::vector<TimedLaunch>& launches, int device, int calls,
                                  int repeats, int64_t flush_bytes, int shared_percent) {
  const Driver& d = Driver::get();
  const DeviceScope scope(d, device);
  const std::string text(image);  // ends with a zero, as PTX must
  Module module;
  d.check(d.module_load(&module, text.c_str(), 0, nullptr, nullptr), "load a module");
  Function kernel;
  d.check(d.module_function(&kernel, module, "recom_fused"), "find the kernel");
  if (shared_percent != -2) d.spare_cache(kernel, device, recom_cuda::kThreads, shared_percent);
  Function point = nullptr;
  if (pointers == 0) {
    d.check(d.module_function(&point, module, "recom_point"), "find the table's kernel");
  }
  Function mend = nullptr;
  if (std::any_of(launches.begin(), launches.end(),
                  [](const auto& l) { return !l.mends.empty(); })) {
    d.check(d.module_function(&mend, module, "recom_mend"), "find the kernel that mends");
  }
  Stream stream;
  d.check(d.stream_create(&stream, kStreamNonBlocking), "create a stream");
  std::vector<Prepared> prepared;
  for (const TimedLaunch& l : launches) {
    const size_t named = pointers ? static_cast<size_t>(pointers) : 1;
    Prepared p{Memory(d, l.tiles, stream),
               Memory(d, l.words, stream),
               Memory(d, l.mends, stream),
               static_cast<unsigned>(l.tiles.size() / sizeof(recom_cuda::Tile)),
               static_cast<unsigned>(l.mends.size() / sizeof(recom_cuda::Tile)),
               std::vector<char>(16 + 8 * named),
               {},
               Memory(d, pointers ? 0 : 8 * l.buffers.size()),
               {}};
    const uint64_t head[3] = {p.tiles.at(), p.words.at(), p.table.at()};
    std::memcpy(p.params.data(), head, sizeof head);
    if (pointers) {
      std::memcpy(p.params.data() + 16, l.buffers.data(), l.buffers.size() * 8);
    } else {
      p.points = points_of(p.table.at(), l.buffers);
    }
    p.mend_params = p.params;
    const uint64_t mends = p.mends.at();
    std::memcpy(p.mend_params.data(), &mends, sizeof mends);
    prepared.push_back(std::move(p));
  }
  const Memory flush(d, static_cast<size_t>(flush_bytes));
  Event begin, end;
  d.check(d.event_create(&begin, 0), "create an event");
  d.check(d.event_create(&end, 0), "create an event");
  const auto call = [&] {
    for (Prepared& p : prepared) {
      if (p.blocks == 0) continue;
      for (auto& given : p.points) {
        void* args[] = {given.data()};
        constexpr unsigned kBlocks = (recom_cuda::kPointed - 1) / recom_cuda::kThreads + 1;
        d.check(
            d.launch(point, kBlocks, 1, 1, recom_cuda::kThreads, 1, 1, 0, stream, args, nullptr),
            "launch");
      }
      void* args[] = {p.params.data()};
      d.check(
          d.launch(kernel, p.blocks, 1, 1, recom_cuda::kThreads, 1, 1, 0, stream, args, nullptr),
          "launch");
      if (p.mending == 0) continue;
      void* mending[] = {p.mend_params.data()};
      d.check(
          d.launch(mend, p.mending, 1, 1, recom_cuda::kThreads, 1, 1, 0, stream, mending, nullptr),
          "launch");
    }
  };
  call();
  d.check(d.stream_synchronize(stream), "run the kernel");
  size_t queued = 0;
  for (const Prepared& p : prepared) queued += calls * (1 + p.points.size() + (p.mending > 0));
  std::vector<double> out;
  Gate gate(d, stream);
  for (int r = 0; r < repeats; ++r) {
    if (queued <= kQueued) gate.close();
    if (flush_bytes)
      d.check(d.mem_set_async(flush.at(), r & 255, flush_bytes, stream), "set memory");
    d.check(d.event_record(begin, stream), "record an event");
    for (int c = 0; c < calls; ++c) call();
    d.check(d.event_record(end, stream), "record an event");
    gate.open();
    d.check(d.event_synchronize(end), "run the kernel");
    float ms = 0;
    d.check(d.event_elapsed(&ms, begin, end), "tell a time");
    out.push_back(static_cast<double>(ms) / calls);
  }
  gate.end();
  d.event_destroy(begin);
  d.event_destroy(end);
  d.stream_destroy(stream);
  d.module_unload(module);
  return out;
}

}  // namespace recom
