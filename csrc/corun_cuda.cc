// The co-run runtime's device, by CUDA's driver.

#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "corun_backend.h"
#include "cuda_driver.h"

namespace recom::corun {
namespace {

using cuda::DeviceScope;
using cuda::Driver;

cuda::Stream as_stream(Stream s) { return static_cast<cuda::Stream>(s); }

// The kernel of an image on a device, loaded once a process and kept: programs are few, and what
// the driver makes of PTX takes it a while.
cuda::Function loaded(const Driver& d, int device, std::string_view image) {
  static std::mutex mutex;
  static auto* functions = new std::map<std::pair<int, std::string>, cuda::Function>;
  const std::lock_guard<std::mutex> lock(mutex);
  cuda::Function& function = (*functions)[{device, std::string(image)}];
  if (function) return function;
  const std::string text(image);
  std::vector<char> log(8192, '\0');
  int options[] = {cuda::kJitErrorLog, cuda::kJitErrorLogSize};
  void* values[] = {log.data(), reinterpret_cast<void*>(log.size())};
  cuda::Module module = nullptr;
  const cuda::Result code = d.module_load(&module, text.c_str(), 2, options, values);
  log.back() = '\0';
  if (code) {
    d.check(code, "load the preprocessing kernel; the driver says: " + std::string(log.data()));
  }
  cuda::Function found = nullptr;
  d.check(d.module_function(&found, module, "recom_prep"), "find the preprocessing kernel");
  return function = found;
}

// One for each stage's name and device, for good.
cuda::Event event_of_stage(const Driver& d, int device, std::string_view name) {
  static std::mutex mutex;
  static auto* events = new std::map<std::pair<int, std::string>, cuda::Event>;
  const std::lock_guard<std::mutex> lock(mutex);
  cuda::Event& event = (*events)[{device, std::string(name)}];
  if (!event) {
    const DeviceScope scope(d, device);
    d.check(d.event_create(&event, cuda::kEventDisableTiming), "create an event");
  }
  return event;
}

class CudaBackend : public Backend {
 public:
  CudaBackend(int device, std::string_view image) : d_(Driver::get()), device_(device) {
    const DeviceScope scope(d_, device_);
    cuda::Device handle;
    d_.check(d_.device_get(&handle, device_), "find a device");
    processors_ = d_.attribute(cuda::kMultiprocessors, handle);
    function_ = loaded(d_, device_, image);
  }

  ~CudaBackend() override {
    try {
      const DeviceScope scope(d_, device_);
      for (cuda::Stream s : streams_) {
        d_.stream_synchronize(s);
        d_.stream_destroy(s);
      }
      for (size_t k = 0; k < events_.size(); ++k) {
        if (owned_[k]) d_.event_destroy(events_[k]);
      }
      for (Address a : memory_) d_.mem_free(a);
      for (void* p : host_) d_.host_free(p);
    } catch (...) {  // the process ends
    }
  }

  void* host_memory(size_t bytes) override {
    const DeviceScope scope(d_, device_);
    void* p = nullptr;
    d_.check(d_.host_alloc(&p, bytes ? bytes : 16, cuda::kHostPortable),
             "page-lock " + std::to_string(bytes) + " bytes of host memory");
    host_.push_back(p);
    return p;
  }

  Address device_memory(size_t bytes) override {
    const DeviceScope scope(d_, device_);
    cuda::Pointer p = 0;
    d_.check(d_.mem_alloc(&p, bytes ? bytes : 16),
             "allocate " + std::to_string(bytes) +
                 " bytes for a ring of batches (XLA takes most of the memory for itself: "
                 "XLA_PYTHON_CLIENT_MEM_FRACTION lowers its share)");
    memory_.push_back(p);
    return p;
  }

  Stream own_stream() override {
    const DeviceScope scope(d_, device_);
    int low = 0, high = 0;
    d_.check(d_.stream_priorities(&low, &high), "tell the streams' priorities");
    cuda::Stream s = nullptr;
    // The lowest: whenever blocks of both could start, XLA's do.
    d_.check(d_.stream_create_priority(&s, cuda::kStreamNonBlocking, low), "create a stream");
    streams_.push_back(s);
    return s;
  }

  Event event(bool timed) override {
    const DeviceScope scope(d_, device_);
    cuda::Event e = nullptr;
    d_.check(d_.event_create(&e, timed ? 0 : cuda::kEventDisableTiming), "create an event");
    return kept(e, true);
  }

  Event stage_event(std::string_view name) override {
    return kept(event_of_stage(d_, device_, name), false);
  }

  void upload(Address to, const void* from, size_t bytes) override {
    if (bytes == 0) return;
    const DeviceScope scope(d_, device_);
    cuda::Stream s = nullptr;
    d_.check(d_.stream_create(&s, cuda::kStreamNonBlocking), "create a stream");
    const cuda::Result copied = d_.copy_to_device_async(to, from, bytes, s);
    const cuda::Result waited = d_.stream_synchronize(s);
    d_.stream_destroy(s);
    d_.check(copied, "copy a plan");
    d_.check(waited, "copy a plan");
  }

  void copy_in(Address to, const void* from, size_t bytes, Stream stream) override {
    const DeviceScope scope(d_, device_);
    d_.check(d_.copy_to_device_async(to, from, bytes, as_stream(stream)), "copy a raw batch");
  }
  void copy(Address to, Address from, size_t bytes, Stream stream) override {
    const DeviceScope scope(d_, device_);
    d_.check(d_.copy_on_device_async(to, from, bytes, as_stream(stream)), "copy a batch");
  }
  void launch(unsigned blocks, const recom_cuda::PrepParams& params, Stream stream) override {
    const DeviceScope scope(d_, device_);
    recom_cuda::PrepParams p = params;
    void* arguments[] = {&p};
    d_.check(d_.launch(function_, blocks, 1, 1, recom_cuda::kPrepThreads, 1, 1, 0,
                       as_stream(stream), arguments, nullptr),
             "launch a preprocessing kernel");
  }
  void record(Event event, Stream stream) override {
    const DeviceScope scope(d_, device_);
    d_.check(d_.event_record(events_[event], as_stream(stream)), "record an event");
  }
  void wait(Stream stream, Event event) override {
    const DeviceScope scope(d_, device_);
    d_.check(d_.stream_wait_event(as_stream(stream), events_[event], 0), "wait for an event");
  }

  bool done(Event event) override {
    const DeviceScope scope(d_, device_);
    const cuda::Result code = d_.event_query(events_[event]);
    if (code == cuda::kNotReady) return false;
    d_.check(code, "run preprocessing");
    return true;
  }
  void host_wait(Event event) override {
    const DeviceScope scope(d_, device_);
    d_.check(d_.event_synchronize(events_[event]), "run preprocessing");
  }
  double elapsed_ms(Event from, Event to) override {
    const DeviceScope scope(d_, device_);
    float ms = 0;
    d_.check(d_.event_elapsed(&ms, events_[from], events_[to]), "tell a time");
    return ms;
  }
  void finish(Stream stream) override {
    const DeviceScope scope(d_, device_);
    d_.check(d_.stream_synchronize(as_stream(stream)), "run preprocessing");
  }
  int processors() const override { return processors_; }

 private:
  Event kept(cuda::Event e, bool owned) {
    events_.push_back(e);
    owned_.push_back(owned);
    return static_cast<Event>(events_.size()) - 1;
  }

  const Driver& d_;
  int device_;
  int processors_ = 1;
  cuda::Function function_ = nullptr;
  std::vector<cuda::Stream> streams_;
  std::vector<cuda::Event> events_;
  std::vector<char> owned_;  // of each event
  std::vector<Address> memory_;
  std::vector<void*> host_;
};

}  // namespace

void record_stage(std::string_view name, Stream stream) {
  const Driver& d = Driver::get();
  cuda::Device device = 0;
  d.check(d.ctx_get_device(&device), "tell the current device");
  int capturing = 0;
  d.check(d.stream_capturing(as_stream(stream), &capturing), "tell a stream's state");
  // The flag is refused where nothing is captured.
  d.check(d.event_record_flags(event_of_stage(d, device, name), as_stream(stream),
                               capturing ? cuda::kEventRecordExternal : 0),
          "record a stage's end");
}

std::unique_ptr<Backend> make_cuda_backend(int device, std::string_view image) {
  return std::make_unique<CudaBackend>(device, image);
}

}  // namespace recom::corun
